"""Decides the state of a run from what its folder holds, so that a study can be continued after any failure."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import Config
from ..config.free import is_free
from ..config.recipe import dumps, parse
from ..errors import ConfigError
from ..runs.config_file import redact_config
from ..runs.files import write_atomic
from ..utils.toml import flatten

State = Literal["done", "failed", "half", "new"]

_KEPT_ROLLOUTS = 3  # steps whose completions stay, to look at


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of a run, and the settings that it must have."""

    folder: Path
    fingerprint: str

    @property
    def result(self) -> Path:
        """What its process wrote at its end: seconds, and the error of a failed run."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def log(self) -> Path:
        """What its process printed."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def state(self) -> State:
        """``done`` and ``failed`` are final: the run has these settings, and ended by itself. ``half`` has a checkpoint
        from which it goes on. Anything else starts again, in a folder that is made anew."""
        # An unfinished run with other settings is made anew; one that has ended is put aside by begin().
        if not self.folder.is_dir() or self._own() != self.fingerprint:
            return "new"
        if (self.folder / "summary.json").exists():
            return "done"
        if self.read_result().get("failed"):
            return "failed"
        return "half" if any((self.folder / "checkpoints").glob("[0-9]*")) else "new"

    def read_result(self) -> dict[str, Any]:
        try:
            return json.loads(self.result.read_bytes())
        except (OSError, ValueError):
            return {}

    def begin(self) -> None:
        """Removes what an earlier process said about its end: it is not this one's. Puts a run aside that has ended
        with other settings, as ``FOLDER.replaced-N``: it may have taken hours."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        ended = (self.folder / "summary.json").exists() or self.read_result().get("failed")
        if ended and self._own() != self.fingerprint:
            aside = (self.folder.with_name(f"{self.folder.name}.replaced-{n}") for n in itertools.count(1))
            self.folder.rename(next(place for place in aside if not place.exists()))
        self.result.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Removes what no figure needs from a run that has ended: weights, pages, and most completions."""
        for name in ("final", "checkpoints"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for path in sorted((self.folder / "rollouts").glob("*.parquet"))[:-_KEPT_ROLLOUTS]:
            path.unlink()
        (self.folder / "report.html").unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)

    def _own(self) -> str:
        # Read as a recipe: what a newer trew added to the settings has its default in older runs.
        try:
            return _hashed(parse(tomllib.loads((self.folder / "config.toml").read_text("utf-8"))), self._known)
        except (OSError, ValueError, ConfigError):
            return ""

    @property
    def _known(self) -> str:
        # What the folder does not say is taken from the wanted fingerprint: whether the recipe named rewards, and the
        # weights' hash.
        return self.fingerprint.partition(" ")[2]


def ended_below(folder: Path) -> int:
    """How many runs below ``folder`` have ended, whatever their settings: those of an earlier design, and those that
    were put aside, were seen as well."""
    ended = {path.parent for path in folder.rglob("summary.json")}
    results = (path for path in folder.rglob("*.json") if path.with_suffix("").is_dir())
    failed = {path.with_suffix("") for path in results if Place(path.with_suffix(""), "").read_result().get("failed")}
    return len(ended | failed)


def fingerprint(config: Config, *, model: str = "") -> str:
    """The settings of a run that change what it learns, as a hash; ``model`` is the hash of weights that the study
    made, in place of where they lie.

    The task's own rewards are not among them: a run's folder names them, a recipe need not.
    """
    judged = "given" if config.rewards else "default"
    note = f"{judged} {model}".strip()
    return _hashed(config, note)


def _hashed(config: Config, note: str) -> str:
    # Redacted, as config.toml in the folder is.
    table = tomllib.loads(redact_config(dumps(config)))
    judged, _, model = note.partition(" ")
    # Default rewards are spelled out in a run's folder and absent from the recipe: left out of both.
    plain = {key: value for key, value in table.items() if not (key == "rewards" and judged == "default")}
    # Two settings that are free elsewhere: threads decide the order of sums, eval.every the points of the curve.
    flat = {k: v for k, v in flatten(plain).items() if not is_free(k) or k in ("threads", "eval.every")}
    if model:
        # By content: the same weights may lie in another folder.
        flat["model"] = model
    hashed = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:16]
    return f"{hashed} {note}"


def write_json(path: Path, content: Any) -> None:
    """Writes ``content`` as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: file.write((json.dumps(content, indent=1) + "\n").encode()))
