"""Checks that the installed TRL has the methods our trainer overrides, with the parameters it expects."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

TESTED = ("1.15", "1.16")
"""TRL releases that our trainer has been tested with, under every preset."""

WORKS = f"trl=={TESTED[-1]}.*"
"""The requirement that installs the newest of them."""

HOOKS: dict[str, tuple[str, ...]] = {
    "_compute_loss": ("self", "model", "inputs"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_get_per_token_logps_and_entropies": (
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
        "compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes",
        "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
    ),
}  # fmt: skip
"""Methods of TRL's GRPOTrainer that ours overrides or calls, and their parameters.

They are private, so a release may change them without notice: signatures are compared exactly, names and order.
"""

MODEL_INPUTS = HOOKS["_get_per_token_logps_and_entropies"][8:]
"""Optional inputs that a forward pass takes from the batch besides the tokens."""


def installed() -> str | None:
    """Returns TRL's version, or None if it is not installed."""
    try:
        return importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        return None


def tested(version: str) -> bool:
    return version.split(".")[:2] in [known.split(".") for known in TESTED]


def misfits(trainer: type[Any]) -> list[str]:
    """Lists the hooks that a trainer class lacks or has with other parameters, one line each."""
    problems = []
    for name, wanted in HOOKS.items():
        method = getattr(trainer, name, None)
        if method is None:
            problems.append(f"GRPOTrainer.{name} is not there")
        elif (found := tuple(inspect.signature(method).parameters)) != wanted:
            changed = [f"+{p}" for p in found if p not in wanted] + [f"-{p}" for p in wanted if p not in found]
            problems.append(f"GRPOTrainer.{name} has other parameters: {', '.join(changed) or 'in another order'}")
    return problems
