"""Asynchronous rollouts of an engine without a model, kept in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import trew
from engine_help import ScriptedEngine
from trew.config import parse
from trew.errors import CheckpointError
from trew.eval import correct_by
from trew.rewards import RewardSet
from trew.rollout.asynchronous import AsyncRollouts
from trew.rollout.ledger import Stored
from trew.rollout.source import StepRollouts
from trew.rollout.sync import SyncRollouts
from trew.types import Prompt, ScoredGroup


class Memory:
    """Keeps a ledger's lines and groups as a run's folder does; lines are there for good once they are flushed."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.waiting: list[str] = []
        self.groups: dict[str, bytes] = {}
        self.count = 0

    def lines(self) -> list[str]:
        return list(self.written)

    def write(self, line: str) -> None:
        self.waiting.append(line)

    def flush(self) -> None:
        self.written, self.waiting = self.written + self.waiting, []

    def put(self, groups: Sequence[bytes]) -> list[Stored]:
        self.count += 1
        name = f"{self.count:06d}"
        self.groups[name] = b"".join(groups)
        ends = [sum(map(len, groups[: i + 1])) for i in range(len(groups))]
        return [
            Stored(name, end - len(data), len(data), hashlib.sha256(data).hexdigest())
            for end, data in zip(ends, groups, strict=True)
        ]

    def get(self, stored: Stored) -> bytes:
        data = self.groups.get(stored.file, b"")[stored.at : stored.at + stored.size]
        if hashlib.sha256(data).hexdigest() != stored.sha256:
            raise CheckpointError(f"{stored.file}: is damaged")
        return data

    def keep(self, needed: Collection[str]) -> None:
        self.groups = {name: data for name, data in self.groups.items() if name in needed}


def configured(
    staleness: int, *, prompts: int = 3, completions: int = 4, steps: int = 6, curriculum: Any = None, **rollout: Any
) -> Any:
    return parse({
        "model": "m", "steps": steps, "seed": 5,
        "rollout": {"prompts": prompts, "completions": completions, "max_tokens": 12, **rollout},
        "cluster": {"rollout": "vllm", "servers": 1, "staleness": staleness}, "curriculum": curriculum or {},
    })  # fmt: skip


def parts(config: Any, *, preset: str = "grpo", prompts: int = 40) -> dict[str, Any]:
    """What every source needs: prompts whose right answer is 1."""
    return {
        "config": config, "objective": trew.preset(preset, beta=0.0),
        "prompts": [Prompt(f"p{i}", text="?", columns={"answer": "#### 1"}) for i in range(prompts)],
        "rewards": RewardSet.from_config(parse({"model": "m", "rewards": [{"name": "gsm8k"}]}).rewards),
        "correct": correct_by("gsm8k"),
    }  # fmt: skip


def asynchronous(
    config: Any, engine: Any = None, keeper: Any = None, *, covered: Callable[[], int] = lambda: -1, **how: Any
) -> AsyncRollouts:
    engine = engine or ScriptedEngine()
    return AsyncRollouts(engine, ahead=engine, keeper=keeper or Memory(), covered=covered, **parts(config, **how))


def synchronous(config: Any, engine: Any = None, **how: Any) -> SyncRollouts:
    return SyncRollouts(engine or ScriptedEngine(), **parts(config, **how))


def train(source: Any, engine: Any, steps: Sequence[int], *, passes: int = 0) -> list[StepRollouts]:
    """What a run does with a source: each step gives the engine the next version, after some passes of the engine while
    it learns."""
    found = []
    for step in steps:
        found.append(source.next(step))
        for _ in range(passes):
            source._gather(0.0)
        engine.version = step
        source.trained(step, step)
    return found


def seen(groups: Sequence[ScoredGroup]) -> list[Any]:
    return [
        (g.group.prompt.uid, [r.token_ids.tolist() for r in g.group.rollouts], [s.value for s in g.scores])
        for g in groups
    ]
