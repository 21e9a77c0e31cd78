"""MLflow, by a client of its own: nothing that the caller's process has open in it is touched."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .tracker import Ending, Rows, Subject

_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""By its own defaults, MLflow tries for four minutes to reach a server, and says nothing."""
_METRICS, _PARAMS = 1000, 100
"""The most metrics and parameters that a request of MLflow's takes."""
_LONGEST_NAME, _LONGEST_VALUE = 250, 500


class Mlflow:
    def __init__(self, subject: Subject):
        self._subject = subject
        self._entities: Any = None
        self._client: Any = None
        self._run = ""
        self._names = Names()

    def begin(self) -> None:
        for name, value in _MLFLOW_PATIENCE.items():
            os.environ.setdefault(name, value)
        about = self._subject
        mlflow: Any = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        # mlflow's default would write into the working directory instead of the run folder.
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(about.folder / 'mlflow.db').resolve()}"
        # A client: mlflow's functions act on the server, experiment and run of the whole process.
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._experiment(about.project)
        here = {"trew.folder": str(about.folder.resolve()), "trew.inode": str(about.folder.stat().st_ino)}
        self._end_killed(experiment, here)
        self._run = self._client.create_run(experiment, run_name=about.name, tags=_in_context(here)).info.run_id
        # Cut, since a store may refuse longer values.
        values = Names().of({k: str(v)[:_LONGEST_VALUE] for k, v in about.config.items()})
        for some in _batches([self._entities.Param(k, v) for k, v in values.items()], _PARAMS):
            self._client.log_batch(self._run, params=some)

    def catch_up(self, rows: Rows) -> None:
        now = int(time.time() * 1000)
        values = [(step, self._names.of(row)) for step, row in rows]
        every = [self._entities.Metric(k, v, now, step) for step, row in values for k, v in row.items()]
        for some in _batches(every, _METRICS):
            self._client.log_batch(self._run, metrics=some)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.catch_up([(step, values)])

    def close(self, ending: Ending) -> None:
        if self._run:
            status = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[ending]
            self._client.set_terminated(self._run, status)

    def _experiment(self, name: str) -> str:
        """The experiment's id; makes it where the server has none of that name."""
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return self._client.create_experiment(name)
            except Exception:
                # Runs that start at the same time all find none; one of them makes it.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return found.experiment_id

    def _end_killed(self, experiment: str, here: Mapping[str, str]) -> None:
        """Ends the runs of this folder that nobody ended: whoever has the folder's lock is alone in it."""
        # By the inode too: on another host, the same path may be another run, which goes on.
        inode = f"attributes.status = 'RUNNING' and tags.`trew.inode` = '{here['trew.inode']}'"
        for run in self._client.search_runs([experiment], filter_string=inode):
            # Compared here, since a path may have quotes, which the filter's language cannot escape.
            if run.data.tags.get("trew.folder") == here["trew.folder"]:
                self._client.set_terminated(run.info.run_id, "KILLED")


class Names:
    """Makes names that MLflow accepts, different ones for different names.

    >>> names = Names()
    >>> names.of({"a+b": 1.0, "a_b": 2.0, "a//b": 3.0}), names.of({"a+b": 4.0, "a b": 5.0, "../x": 6.0})
    ({'a_b': 2.0, 'a_b_2': 1.0, 'a/b': 3.0}, {'a b': 5.0, 'a_b_2': 4.0, '__/x': 6.0})
    """

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``values`` by their accepted names."""
        # Names that are accepted as they are come first, and keep themselves.
        names = sorted(values, key=lambda name: name != _accepted(name))
        return {self._one(name): values[name] for name in names}

    def _one(self, name: str) -> str:
        if name not in self._given:
            plain = _accepted(name)
            taken = set(self._given.values())
            numbered = (f"{plain[: _LONGEST_NAME - 10]}_{n}" for n in itertools.count(2))
            self._given[name] = next(one for one in itertools.chain([plain], numbered) if one not in taken)
        return self._given[name]


def _accepted(name: str) -> str:
    # Cut first: the end may be a slash then.
    parts = re.sub(r"[^\w\-.:/ ]", "_", name)[:_LONGEST_NAME].split("/")
    # As a path, which must not be shorter than it is written, nor begin with "..".
    plain = (re.sub(r"^\.{1,2}$|^\.\.", lambda dots: "_" * len(dots[0]), part) for part in parts)
    return "/".join(part for part in plain if part) or "_"


def _in_context(tags: Mapping[str, str]) -> dict[str, str]:
    """``tags`` with those of the user, program and commit, which MLflow's own functions would add."""
    with contextlib.suppress(ImportError, AttributeError):
        return importlib.import_module("mlflow.tracking.context.registry").resolve_tags(dict(tags))
    return dict(tags)


def _batches(every: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (every[at : at + size] for at in range(0, len(every), size))
