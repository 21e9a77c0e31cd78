"""Short runs of tiny models, and what they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from trew.config import Config, parse
from trew.runs.folder import decode_row
from trew.utils.console import Silent

REWARD = """
calls = []

def odd(completions, completion_ids, **columns):
    return [round(sum(i % 2 for i in ids) / len(ids), 1) for ids in completion_ids]

def huge(completions, completion_ids, **columns):
    calls.append(1)
    values = odd(completions, completion_ids)
    return [1e39 if len(calls) == 3 and i == 3 else v for i, v in enumerate(values)]
"""
PATHS = {"native": {}, "fused": {}, "generic": {"kernels": "plain"}}


class Watching(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def save_models(folder: Path) -> dict[str, Path]:
    """One model for each way through the learner: widths for the kernels, or a body that they do not know."""
    for path, kind in {"native": "llama", "fused": "gpt_neox", "generic": "llama"}.items():
        tiny.model(kind, **tiny.wide(kind), initializer_range=0.1).save_pretrained(folder / path)
        tiny.tokenizer().save_pretrained(folder / path)
    return {path: folder / path for path in PATHS}


def configured(folder: Path, model: Path, *, reward: str = "odd", **sections: Any) -> Config:
    (folder / "reward.py").write_text(REWARD)
    table: dict[str, Any] = {
        "model": str(model), "steps": 3, "seed": 3, "out": str(folder / "run"),
        "data": {"task": "arithmetic", "args": {"ops": ["+"], "smallest": 1, "largest": 9}},
        "rewards": [{"name": f"{folder}/reward.py:{reward}"}], "objective": {"preset": "grpo", "beta": 0.0},
        "rollout": {"prompts": 4, "completions": 3, "max_tokens": 5},
        "learner": {"lr": 1e-3}, "eval": {"size": 4}, "track": {"samples_every": 0, "regrade_every": 0},
    }  # fmt: skip
    for name, section in sections.items():
        table[name] = {**table[name], **section} if isinstance(table.get(name), dict) else section
    return parse(table)


def rows(config: Config) -> dict[int, dict[str, Any]]:
    found = [decode_row(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in found if row is not None and "eval_accuracy" not in row}
