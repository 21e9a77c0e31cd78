"""Recipes of trew sft for a tiny model, and what their runs leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import trew
from recipe_help import merged
from trew.utils.console import Silent


def recipe(
    place: Path, name: str, /, *, data: dict[str, Any], batch: int, held: int, **sections: Any
) -> dict[str, Any]:
    """A run in ``place / name`` of the model beside it: one epoch, with an evaluation and a checkpoint every second
    step."""
    table: dict[str, Any] = {
        "model": str(place / "model"), "out": str(place / name), "threads": 1, "data": data,
        "sft": {"epochs": 1, "batch": batch}, "learner": {"lr": 3e-3}, "eval": {"size": held, "every": 2},
        "checkpoint": {"every": 2},
    }  # fmt: skip
    return merged(table, sections)


def trained(table: dict[str, Any], **how: Any) -> dict[str, Any]:
    return trew.train(table, display=Silent(), **how)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
