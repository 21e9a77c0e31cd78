"""Sends metrics to external trackers, in addition to the run folder and never instead of it.

A tracker whose package is missing or too old is refused before the run starts. A tracker that fails later (offline,
wrong key, exhausted quota) costs one warning; training and the run folder continue. No tracker may prompt for input, or
touch what the caller's process has open in it.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import importlib.metadata
import importlib.util
import itertools
import math
import netrc
import os
import re
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from ..errors import ConfigError, nearest
from ..utils.installing import install_extra, requirements
from ..utils.secrets import redact

Ending = Literal["finished", "failed", "interrupted"]
Rows = Sequence[tuple[int, Mapping[str, float]]]
_MANY_ROWS = 500
"""From so many on, a server may need minutes for them."""


class Tracker(Protocol):
    """A destination for metrics."""

    def begin(self) -> None:
        """Starts the tracker's run."""
        ...

    def catch_up(self, rows: Rows) -> None:
        """Records the rows from before a resume, unless the tracker has them."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records finite numbers by name."""
        ...

    def close(self, ending: Ending) -> None:
        """Flushes and ends the tracker's run, as far as it has begun."""
        ...


@dataclass(frozen=True)
class Subject:
    """What trackers are told of a run."""

    folder: Path
    name: str
    project: str
    config: dict[str, Any]
    note: Callable[[str], None]


def problems(names: Sequence[str]) -> list[str]:
    """Returns unknown trackers and missing or old packages, one line each, with what to install."""
    found = []
    for name in names:
        if name not in _MAKERS:
            found.append(f"track.to: got {name!r}, accepts {', '.join(_MAKERS)}{nearest(name, _MAKERS)}")
        elif importlib.util.find_spec(name) is None:
            found.append(f"track.to: got {name!r}, whose package is not installed: {install_extra(name)}")
        elif (have := _installed(name)) and (wanted := _refusing(name, have)):
            found.append(
                f"track.to: got {name!r}, whose package is {have} here, accepts {wanted}: {install_extra(name)}"
            )
    return found


def name_of(folder: Path) -> str:
    """How trackers call the run of ``folder``: by the folder's own name.

    In ``trew iterate`` every round has a folder of the name ``policy``, so that the rounds' folder and the round go in
    front.

    >>> name_of(Path("/runs/first")), name_of(Path("/runs/learned/round-01/policy"))
    ('first', 'learned/round-01/policy')
    """
    parts = folder.resolve().parts  # "." has no name of its own
    of_a_round = len(parts) > 3 and parts[-1] == "policy" and re.fullmatch(r"round-\d+", parts[-2])
    return "/".join(parts[-3:] if of_a_round else parts[-1:])


class Trackers:
    """Several trackers as one. A tracker that raises is dropped with one warning."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        folder: Path,
        config: Mapping[str, Any],
        project: str = "trew",
        warn: Callable[[str], None] = lambda text: warnings.warn(text, RuntimeWarning, stacklevel=3),
        tell: Callable[[str], None] = print,
    ):
        """Starts the trackers; the run is named by ``name_of``. Raises ConfigError with what ``problems`` finds.

        ``warn`` is given what a tracker failed for, and ``tell`` what is good to know, as a whole line.
        """
        if found := problems(names):
            raise ConfigError(found)
        self._warn, self._tell = warn, tell
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            subject = Subject(folder, name_of(folder), project, redact(_flat(config)), _Noting(name, tell))
            self._trackers[name] = _MAKERS[name](subject)
            self._guard(name, self._trackers[name].begin)

    def catch_up(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Sends the rows that a resumed run goes on from: a tracker may have begun a new run for it."""
        known = [(row["step"], _numbers(row)) for row in rows]
        if len(known) >= _MANY_ROWS and self._trackers:
            self._tell(f"note: the {len(known)} rows so far go to {', '.join(self._trackers)} first")
        if known:
            self._each(lambda tracker: tracker.catch_up(known))

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Sends the finite numbers of ``row``."""
        values = _numbers(row)
        self._each(lambda tracker: tracker.log(step, values))

    def close(self, error: BaseException | None = None) -> None:
        """Closes all trackers; with the error that has ended the training, they show it as failed or interrupted."""
        ending: Ending = "finished"
        if error is not None:
            ending = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        trackers, self._trackers = self._trackers, {}
        for name, tracker in trackers.items():
            self._guard(name, lambda tracker=tracker: tracker.close(ending))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        # A copy of the items: the guard removes a tracker that fails.
        for name, tracker in list(self._trackers.items()):
            # ``tracker=tracker``: a closure would see the last one of the loop.
            self._guard(name, lambda tracker=tracker: act(tracker))

    def _guard(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        # A tracker may raise anything, including SystemExit; only a user's interrupt is not the tracker's failure.
        except (Exception, SystemExit) as error:
            # Errors of HTTP clients may quote the request, key included.
            text = " ".join(str(redact(str(error))).split())[:300]
            self._warn(
                f"track.to: {name} failed and is no longer used ({type(error).__name__}: {text}); "
                "metrics.jsonl in the run folder stays complete"
            )
            # A run that stays open would be in the way of a later training, and be shown as running for ever.
            if (tracker := self._trackers.pop(name, None)) is not None:
                with contextlib.suppress(Exception, SystemExit):
                    tracker.close("failed")


@dataclass(frozen=True)
class _Noting:
    """Says a note of a tracker's."""

    name: str
    tell: Callable[[str], None]

    def __call__(self, text: str) -> None:
        self.tell(f"note: {self.name}: {text}")


# --------------------------------------------------------------------------------------------------------------------
# Weights & Biases


_CREATES_NEW = (0, 19, 10)
"""The first wandb whose init leaves other runs of the process alone."""
_WANDB_HOSTS = {"api.wandb.ai", "api.forge.coreweave.com"}
"""Names of one and the same service, whose logins wandb takes for each other."""


class _Wandb:
    def __init__(self, subject: Subject):
        self._subject = subject
        self._run: Any = None

    def begin(self) -> None:
        wandb: Any = importlib.import_module("wandb")
        about, apart = self._subject, _parts(getattr(wandb, "__version__", "0")) >= _CREATES_NEW
        # An older one would return the active run: rows would go there, and its owner would find it finished.
        if not apart and getattr(wandb, "run", None) is not None:
            raise RuntimeError(
                "another run of wandb is active in this process; finish it before the training, or install "
                f"wandb>={'.'.join(map(str, _CREATES_NEW))}"
            )
        # Without a key wandb would prompt for one; offline files can be uploaded later with `wandb sync`.
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key(wandb) else "")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", about.project),
            name=about.name,
            dir=str(about.folder),
            config=about.config,
            mode=mode or "offline",
            settings=wandb.Settings(silent=True, console="off", init_timeout=20),
            **({"reinit": "create_new"} if apart else {}),
        )
        # An axis of our own: under wandb's, the row of a step would be held back until the next step, and lost if the
        # process is killed, since the evaluation of the same step may still come.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if not mode:
            there = getattr(getattr(self._run, "settings", None), "sync_dir", None) or about.folder / "wandb"
            about.note(
                f"no key was found, so this run is kept offline in {there}; upload it with: "
                f"wandb sync {shlex.quote(str(there))}"
            )

    def catch_up(self, rows: Rows) -> None:
        for step, values in rows:
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self, ending: Ending) -> None:
        if self._run is not None:
            # 255 is what wandb itself gives a run that was interrupted.
            self._run.finish(exit_code={"finished": 0, "failed": 1, "interrupted": 255}[ending])


def _has_wandb_key(wandb: Any) -> bool:
    """Whether wandb would log in without asking."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = os.environ.get("WANDB_BASE_URL", "")
    # wandb knows best: its server may be named in its own settings, and a login may be of this process alone.
    with contextlib.suppress(Exception, SystemExit):
        settings = wandb.setup().settings
        server = settings.base_url
        if settings.api_key:
            return True
        return bool(importlib.import_module("wandb.sdk.lib.wbauth").read_netrc_auth(host=server))
    # An older wandb, or another: a login is in netrc, by the server's host.
    url = urlsplit(server or "https://api.wandb.ai")
    hosts = {url.netloc, url.hostname}
    hosts |= _WANDB_HOSTS if hosts & _WANDB_HOSTS else set()
    path = os.environ.get("NETRC") or next((p for p in ("~/.netrc", "~/_netrc") if Path(p).expanduser().exists()), "")
    try:
        # By its path: of its own accord Python refuses a file that others may read, which wandb does not.
        logins = netrc.netrc(os.path.expanduser(path)) if path else None
    except (OSError, netrc.NetrcParseError):
        return False
    return logins is not None and any(host and logins.authenticators(host) for host in hosts)


# --------------------------------------------------------------------------------------------------------------------
# trackio and TensorBoard


class _Trackio:
    def __init__(self, subject: Subject):
        self._subject = subject
        self._trackio: Any = None
        # Where trackio looks for the active run; in the caller's context, init() would end the caller's.
        self._apart = contextvars.Context()

    def begin(self) -> None:
        trackio: Any = importlib.import_module("trackio")
        about = self._subject
        self._apart.run(trackio.init, project=about.project, name=about.name, config=about.config, embed=False)
        self._trackio = trackio

    def catch_up(self, rows: Rows) -> None:
        for step, values in rows:
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._apart.run(self._trackio.log, dict(values), step=step)

    def close(self, ending: Ending) -> None:
        if self._trackio is not None:
            self._apart.run(self._trackio.finish)


class _Tensorboard:
    def __init__(self, subject: Subject):
        self._folder, self._config = subject.folder / "tensorboard", subject.config
        self._tensorboard: Any = None
        self._writer: Any = None  # from the first row on, which says where a resumed run goes on

    def begin(self) -> None:
        self._tensorboard = importlib.import_module("torch.utils.tensorboard")

    def catch_up(self, rows: Rows) -> None:
        # Its files are in the run's folder, and go on there; a tracker that the run was not begun with has none.
        if not self._folder.exists():
            for step, values in rows:
                self.log(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            # What the folder has from there on is of before a resume, and would be shown a second time. An evaluation
            # comes after the row of its step, which stays.
            first = step + any(name.startswith("eval_") for name in values)
            self._writer = self._tensorboard.SummaryWriter(str(self._folder), purge_step=first)
            self._writer.add_text("config", "\n".join(f"    {k} = {v}" for k, v in self._config.items()))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # At every step, so that a run that is killed leaves its curves.
        self._writer.flush()

    def close(self, ending: Ending) -> None:
        if self._writer is not None:
            self._writer.close()


# --------------------------------------------------------------------------------------------------------------------
# MLflow


_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""By its own defaults, MLflow tries for four minutes to reach a server, and says nothing."""
_METRICS, _PARAMS = 1000, 100
"""The most metrics and parameters that a request of MLflow's takes."""
_LONGEST_NAME, _LONGEST_VALUE = 250, 500


class _Mlflow:
    def __init__(self, subject: Subject):
        self._subject = subject
        self._entities: Any = None
        self._client: Any = None
        self._run = ""
        self._names = _Names()

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
        values = _Names().of({k: str(v)[:_LONGEST_VALUE] for k, v in about.config.items()})
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


class _Names:
    """Makes names that MLflow accepts, different ones for different names.

    >>> names = _Names()
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


_MAKERS: dict[str, Callable[[Subject], Tracker]] = {
    "trackio": _Trackio,
    "wandb": _Wandb,
    "tensorboard": _Tensorboard,
    "mlflow": _Mlflow,
}


# --------------------------------------------------------------------------------------------------------------------
# Versions and values


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a module without one, such as of mlflow-skinny
        return ""


def _refusing(package: str, version: str) -> str:
    """The requirement of trew's extra that an installed version is too old for; empty if it is not."""
    for requirement in requirements().get(package, ()):
        name, _, floor = requirement.partition(">=")
        if name == package and _parts(version) < _parts(floor):
            return requirement
    return ""


def _parts(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.16.0rc1 -> (2, 16); 2.16 and 2.16.0 are one."""
    numbers = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in re.sub(r"(\.0)+$", "", numbers[0]).split(".")) if numbers else ()


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens ``{"a": {"b": 1}}`` to ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, without its step: trackers take no others."""
    return {k: float(v) for k, v in row.items() if k != "step" and _is_number(v)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
