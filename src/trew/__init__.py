"""trew: train language models with reinforcement learning from verifiable rewards.

    objective = trew.preset("dapo", eps_high=0.3)      an algorithm, as a frozen value
    batch = trew.TokenBatch.from_padded(...)           log-probs in, from any trainer
    objective.loss(batch)                              loss, advantages, coefficients, metrics out
    trew.rewards.grade("gsm8k", completion, gold)      one verdict
    trew.train("recipe.toml")                          the whole job
    trew.curves("runs/recipe")                         its curves, in a notebook

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import config, data, eval, learner, objective, rewards, rollout, types
    from .config import Config as Config
    from .objective import Denominators as Denominators
    from .objective import LossOutput as LossOutput
    from .objective import Objective as Objective
    from .objective import TokenBatch as TokenBatch
    from .objective import preset as preset
    from .objective import presets
    from .runs import report
    from .runs.notebook import curves as curves
    from .runs.report.read import load_run as load_run
    from .training.start import train as train
    from .view.notebook import view as view

__version__ = "0.1.0"

_HOME = {
    "Config": "config",
    "Denominators": "objective",
    "LossOutput": "objective",
    "curves": "runs.notebook",
    "load_run": "runs.report.read",
    "Objective": "objective",
    "TokenBatch": "objective",
    "preset": "objective",
    "presets": "objective",
    "train": "training.start",
}
_ROOMS = {
    name: name for name in ("config", "data", "eval", "learner", "objective", "rewards", "rollout", "types", "view")
}
_ROOMS["report"] = "runs.report"

__all__ = ["Config", "Denominators", "LossOutput", "Objective", "TokenBatch", "config", "curves", "data", "eval",
           "learner", "load_run", "objective", "preset", "presets", "report", "rewards", "rollout", "train",
           "types", "view"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "train":
        from .utils import posix

        if lacking := posix.problem():
            raise ImportError(lacking)
    if name in _HOME:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, in notebooks without ipywidgets
            return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in _ROOMS:
        return importlib.import_module(f".{_ROOMS[name]}", __name__)
    raise AttributeError(f"module 'trew' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
