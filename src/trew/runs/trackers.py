"""Sends metrics to external trackers, in addition to the run folder and never instead of it.

A tracker whose package is missing is refused before the run starts. A tracker that fails later (offline, wrong key,
exhausted quota) costs one warning; training and the run folder continue. No tracker may prompt for input.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import netrc
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ..errors import ConfigError, nearest
from ..utils.installing import install_extra
from ..utils.secrets import redact


class Tracker(Protocol):
    """A destination for metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records finite numbers by name."""
        ...

    def close(self) -> None:
        """Flushes and ends the tracker's run."""
        ...


def problems(names: Sequence[str]) -> list[str]:
    """Returns unknown trackers and missing packages, one line each, with what to install."""
    found = []
    for name in names:
        if name not in _MAKERS:
            found.append(f"track.to: got {name!r}, accepts {', '.join(_MAKERS)}{nearest(name, _MAKERS)}")
        elif importlib.util.find_spec(name) is None:
            found.append(f"track.to: got {name!r}, whose package is not installed: {install_extra(name)}")
    return found


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
    ):
        """Starts the trackers; the run is named after its folder. Raises ConfigError with what ``problems`` finds."""
        if found := problems(names):
            raise ConfigError(found)
        self._warn = warn
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            # ``name=name``: a closure would see the last name of the loop.
            self._guard(name, lambda name=name: self._start(name, folder, project, config))

    def _start(self, name: str, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        self._trackers[name] = _MAKERS[name](folder, project, redact(_flat(config)))

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Sends the finite numbers of ``row``."""
        # Trackers take finite numbers only: see Tracker.
        values = {k: float(v) for k, v in row.items() if k != "step" and _is_number(v)}
        # A copy of the items: the guard removes a tracker that fails.
        for name, tracker in list(self._trackers.items()):
            self._guard(name, lambda tracker=tracker: tracker.log(step, values))

    def close(self) -> None:
        """Closes all trackers."""
        for name, tracker in list(self._trackers.items()):
            self._guard(name, tracker.close)
        self._trackers.clear()

    def _guard(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        # A tracker may raise anything, including SystemExit; only a user's interrupt is not the tracker's failure.
        except (Exception, SystemExit) as error:
            self._trackers.pop(name, None)
            # Errors of HTTP clients may quote the request, key included.
            text = " ".join(str(redact(str(error))).split())[:300]
            self._warn(
                f"track.to: {name} failed and is no longer used ({type(error).__name__}: {text}); "
                "metrics.jsonl in the run folder stays complete"
            )


class _Wandb:
    def __init__(self, folder: Path, project: str, config: dict[str, Any]):
        wandb: Any = importlib.import_module("wandb")
        # Without a key wandb would prompt for one; offline files can be uploaded later with `wandb sync`.
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", project),
            name=folder.name,
            dir=str(folder),
            config=config,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", init_timeout=20),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, folder: Path, project: str, config: dict[str, Any]):
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(project=project, name=folder.name, config=config, embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


class _Tensorboard:
    def __init__(self, folder: Path, project: str, config: dict[str, Any]):
        self._tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        self._folder, self._config = folder / "tensorboard", config
        self._writer: Any = None  # from the first row on, which says where a resumed run goes on

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

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Mlflow:
    def __init__(self, folder: Path, project: str, config: dict[str, Any]):
        self._mlflow: Any = importlib.import_module("mlflow")
        mlflow = self._mlflow
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            # mlflow's default would write into the working directory instead of the run folder.
            mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        mlflow.set_experiment(project)
        mlflow.start_run(run_name=folder.name)
        # Cut, since a store may refuse longer values.
        mlflow.log_params({k: str(v)[:500] for k, v in config.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_MAKERS: dict[str, Callable[[Path, str, dict[str, Any]], Tracker]] = {
    "trackio": _Trackio,
    "wandb": _Wandb,
    "tensorboard": _Tensorboard,
    "mlflow": _Mlflow,
}


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    # wandb login writes to netrc, by the server's host.
    hosts = {"api.wandb.ai", urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname}
    try:
        logins = netrc.netrc()
    except (OSError, netrc.NetrcParseError):
        return False
    return any(host and logins.authenticators(host) for host in hosts)


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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
