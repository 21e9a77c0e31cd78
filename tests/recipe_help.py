"""Recipes of runs that take seconds, as TOML: one table that tests change section by section."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

import tiny
from trew.utils.toml import dump_table

ODD = """
def odd(completions, completion_ids, **columns):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]
"""
"""A reward that a random model can get: it differs within groups, and learning moves it."""


def merged(table: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """``table`` with changes: tables are merged key by key, anything else is replaced."""
    made = dict(table)
    for name, value in sections.items():
        own = made.get(name)
        made[name] = merged(own, value) if value and isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return made


def recipe(model: object, *, reward: str = "reward.py:odd", **sections: Any) -> str:
    """A run of 4 steps that adds two numbers, by a model in a folder and a function of the user's."""
    table = {
        "model": str(model), "steps": 4, "seed": 3,
        "data": {"task": "arithmetic", "args": {"ops": ["+"], "largest": 20}},
        "rollout": {"prompts": 4, "completions": 3, "max_tokens": 6},
        "learner": {"lr": 1e-2}, "eval": {"size": 6}, "rewards": [{"name": reward}],
    }  # fmt: skip
    return dump_table(merged(table, sections))


def run_folder(place: Path, recipe: str, *, reward: str = ODD, seed: int = 0) -> Path:
    """A folder for whole runs: the model ``lm`` with a plain tokenizer, ``reward.py`` and ``r.toml``."""
    tiny.model("llama", initializer_range=0.1, seed=seed).save_pretrained(place / "lm")
    tiny.tokenizer(chat=False).save_pretrained(place / "lm")
    (place / "reward.py").write_text(reward)
    (place / "r.toml").write_text(recipe)
    return place


def final_weights(run: Path) -> dict[str, Tensor]:
    """The weights of a finished run's model."""
    return load_file(run / "final" / "model.safetensors")


def assert_equal_weights(a: Path, b: Path) -> None:
    """Fails unless two finished runs have the same weights to the bit."""
    first, second = final_weights(a), final_weights(b)
    assert first.keys() == second.keys()
    assert [name for name in first if not first[name].equal(second[name])] == []


def metrics(run: Path) -> list[dict[str, Any]]:
    """Every row of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def training_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's steps, without those of its evaluations."""
    return [row for row in metrics(run) if "eval_accuracy" not in row]
