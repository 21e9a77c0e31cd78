"""Folders of runs as trew train leaves them, with planted accuracies: made in milliseconds, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipe_help import merged
from trew.runs import RunFolder
from trew.utils.toml import dump_table

SETTINGS: dict[str, Any] = {
    "model": "lm", "steps": 10, "seed": 0, "out": "", "tokenizer": "", "chat_template": "plain",
    "data": {"task": "arithmetic", "train": "", "eval": "auto", "args": {"largest": 20}},
    "rollout": {"prompts": 4, "completions": 8, "max_tokens": 12, "stop": []},
    "objective": {"preset": "grpo"}, "learner": {"lr": 1e-3},
    "eval": {"every": 5, "size": 20, "samples": 1, "temperature": 0.0, "max_tokens": 0, "correct_reward": "",
             "correct_at": 1.0},
    "track": {"to": []}, "rewards": [{"name": "exact", "model": "", "args": {}}],
}  # fmt: skip


def write(
    folder: Path,
    seed: int,
    right: int,
    *,
    finished: bool = True,
    version: str = "1.0",
    prompts: int = 20,
    shift: int = 0,
    unjudged: int = 0,
    threads: int = 1,
    **sections: Any,
) -> Path:
    """A run of 10 steps, of whose ``prompts`` held-out prompts the first ``right`` are answered correctly at the end.

    ``shift`` numbers the held-out prompts from there on, which makes them other prompts.
    """
    settings = merged(SETTINGS, {"seed": seed, "out": str(folder), **sections})
    judged = {f"p{i + shift}": float(i < right) for i in range(prompts - unjudged)}
    with RunFolder.open(folder) as run:
        run.write_config(dump_table(settings))
        run.log({"step": 0, "eval_accuracy": 0.1, "eval_n": prompts})
        for step in range(1, 11):
            run.log({"step": step, "reward": step * right / 200, "entropy": 1 / step, "groups_sampled": 4})
            if step == 5:
                run.log({"step": 5, "eval_accuracy": right / prompts / 2, "eval_n": prompts})
        if not finished:
            return folder
        run.log({"step": 10, "eval_accuracy": right / prompts, "eval_n": prompts})
        run.write_summary(
            {"seed": seed, "steps": 10, "versions": {"trew": version},
             "arithmetic": {"device": "cpu", "threads": str(threads), "kernels": "trew's"},
             "after": {"prompt_accuracy": judged, "left_out": unjudged, "n": len(judged)}}
        )  # fmt: skip
    return folder


def study(folder: Path, groups: dict[str, tuple[list[int], dict[str, Any]]]) -> list[Path]:
    """Runs with seeds 0, 1, … for each group: name -> (right answers by seed, settings)."""
    return [
        write(folder / f"{name}-{seed}", seed, right, **settings)
        for name, (rights, settings) in groups.items()
        for seed, right in enumerate(rights)
    ]


def as_json(text: str) -> Any:
    """The JSON that a command printed, which must be all it printed."""
    return json.loads(text)
