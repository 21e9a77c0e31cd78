"""Sends metrics to external trackers, in addition to the run folder and never instead of it.

A tracker whose package is missing or too old is refused before the run starts. A tracker that fails later (offline,
wrong key, exhausted quota) costs one warning; training and the run folder continue. No tracker may prompt for input, or
touch what the caller's process has open in it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, nearest
from ..utils.installing import install_extra, requirements
from ..utils.secrets import redact
from .tracking.local import Tensorboard, Trackio
from .tracking.mlflow import Mlflow
from .tracking.tracker import Ending, Subject, Tracker
from .tracking.versions import parts
from .tracking.wandb import Wandb

_MANY_ROWS = 500
"""From so many on, a server may need minutes for them."""


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


_MAKERS: dict[str, Callable[[Subject], Tracker]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": Tensorboard,
    "mlflow": Mlflow,
}


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a module without one, such as of mlflow-skinny
        return ""


def _refusing(package: str, version: str) -> str:
    """The requirement of trew's extra that an installed version is too old for; empty if it is not."""
    for requirement in requirements().get(package, ()):
        name, _, floor = requirement.partition(">=")
        if name == package and parts(version) < parts(floor):
            return requirement
    return ""


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
