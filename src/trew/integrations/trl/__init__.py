"""trew inside TRL.

    from trew.integrations.trl import GRPOTrainer, rewards
    GRPOTrainer(model, reward_funcs=[rewards.math()], objective=trew.preset("trw-logistic"), train_dataset=rows)

Importing ``GRPOTrainer`` imports TRL; importing this package does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import rewards as rewards
    from .trainer import GRPOTrainer as GRPOTrainer

__all__ = ["GRPOTrainer", "rewards"]


def __getattr__(name: str) -> Any:
    if name == "GRPOTrainer":
        return importlib.import_module(".trainer", __name__).GRPOTrainer
    if name == "rewards":
        return importlib.import_module(".rewards", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
