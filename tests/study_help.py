"""Designs of studies, and rows of runs as a study would have them, with planted accuracies."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recipe_help import merged
from trew.study.design import Study, load
from trew.study.history import History
from trew.study.results import assemble
from trew.study.rows import Row
from trew.utils.signals import Interrupted
from trew.utils.toml import toml_value

DESIGN: dict[str, Any] = {
    "name": "planted", "base": "r.toml", "baseline": "clip", "seeds": 10, "tuning_seeds": 2,
    "question": "Which is better?", "claims": ["none is better than clip"],
    "set": {"objective.beta": 0.0},
    "tasks": {"sums": {}}, "regimes": {"off": {"learner.inner_updates": 2}},
    "algorithms": {name: {"objective.preset": "grpo"} for name in ("clip", "other", "same")},
    "tune": {"learner.lr": [0.001, 0.01]},
}  # fmt: skip


def write(folder: Path, recipe: str = 'model = "lm"\nsteps = 10\n', **changes: Any) -> Path:
    """A study's file with its base recipe; None removes a key."""
    (folder / "r.toml").write_text(recipe)
    table = {key: _without_none(value) for key, value in merged(DESIGN, changes).items() if value is not None}
    path = folder / "study.toml"
    # Inline tables keep the dots inside keys, as quoted keys of a study do.
    path.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in table.items()))
    return path


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value


def study(folder: Path, **changes: Any) -> Study:
    return load(write(folder, **changes))


def row(algorithm: str, seed: int, final: float, *, value: float | None = 0.01, **changes: Any) -> Row:
    """A run of 10 steps whose accuracy rises evenly from 0.2 to ``final`` and stays there."""
    curve = tuple(0.2 + (final - 0.2) * share for share in (0.0, 0.5, 1.0, 1.0, 1.0))
    table = {
        "task": "sums", "regime": "off", "algorithm": algorithm, "value": value, "seed": seed,
        "steps": (0, 4, 6, 8, 10), "accuracy": curve, "completions": (0, 40, 60, 80, 100),
        "tokens": (0, 80, 120, 160, 200), "optimizer_steps": 20, "final": float(np.mean(curve[-3:])),
        "area": float(np.trapezoid(curve, (0, 4, 6, 8, 10))) / 10, "failed": "", "error": "", "entropy": (1.0, 0.5),
        "kl": 0.1, "clipped": 0.2, "truncated": 0.0, "no_signal": 0.1, "trew": "1.0",
        "seconds": 1.0, "cpu_seconds": 1.0, "load": 1.0,
    }  # fmt: skip
    return Row(**{**table, **changes})


def simulated(folder: Path, finals: Mapping[str, Any], design: Study | None = None) -> dict[str, Any]:
    """Results of a study whose runs ended at the given accuracies: algorithm -> one for each seed."""
    design = design or study(folder)
    rows = [row(name, seed, float(final)) for name, of in finals.items() for seed, final in enumerate(of, 1)]
    tuning = [row(name, seed, 0.5 + 10 * value, value=value)
              for name in finals for seed in design.tuning for value in design.values]  # fmt: skip
    chosen = dict.fromkeys(design.cells, 0.01)
    return assemble(design, {}, chosen, [*tuning, *rows], History.read(folder))


def stopped_once(folder: str) -> dict[str, Any]:
    """Work that something stops at its first try, as a run that gets SIGTERM is."""
    tried = Path(folder) / "tried"
    if not tried.exists():
        tried.touch()
        raise Interrupted("interrupted by SIGTERM", signal.SIGTERM)
    return {"done": True}
