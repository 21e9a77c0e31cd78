"""What the folder is that a command was given for a model: a run's, one of several runs, or neither."""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def run_of(folder: Path) -> Path | None:
    """The run whose folder, or whose folder of final weights, ``folder`` is; None if it is neither."""
    for run in (folder, *([folder.parent] if folder.name == "final" else [])):
        # A model's folder has config.json; a run's folder has its recipe and metrics.
        if all((run / name).is_file() for name in ("config.toml", "metrics.jsonl")):
            return run
    return None


def refuse_unnamed_run(folder: Path) -> None:
    """Raises ConfigError for a folder that has runs in it, and is none itself."""
    if (folder / "config.json").is_file() or not folder.is_dir():
        return
    refuse_no_policy(folder)
    if runs := sorted(str(inner) for inner in folder.iterdir() if run_of(inner) == inner):
        some = ", ".join(runs[:5]) + (", ..." if len(runs) > 5 else "")
        raise ConfigError(f"{folder}: is a folder of runs, and no run; name one: {some}")


def refuse_no_policy(folder: Path) -> None:
    """Raises ConfigError for a run of trew train-reward or trew iterate, whose settings are not those of a policy."""
    table: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # said by who reads the settings
        table = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    if "iterate" in table:
        policies = sorted(str(path) for path in folder.glob("round-*/policy")) or [str(folder / "round-01" / "policy")]
        raise ConfigError(
            f"{folder}: is a run of trew iterate, and has a policy of each round; name one, such as {policies[-1]}"
        )
    data = table.get("data")
    if isinstance(data, dict) and "pairs" in data:
        raise ConfigError(
            f"{folder}: is a run of trew train-reward, whose model scores completions and writes none; give a run of "
            "trew train or trew sft"
        )
