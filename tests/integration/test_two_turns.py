"""Rollouts of two turns with tool output between them go through a whole run: only sampled tokens carry loss and are
counted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import trew
from run_help import configured, save_models
from trew.learner import Learner
from trew.rollout import Engine, sync
from trew.types import Group, Prompt, Rollout, Sampling, Span, Turn
from trew.utils.console import Silent

OBSERVATION = np.array([7, 8, 9])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))["native"]


def in_two_turns(rollout: Rollout) -> Rollout:
    """The same sampled tokens, cut in two, with an observation between them."""
    [turn] = rollout.turns
    half = (len(turn.token_ids) + 1) // 2

    def cut(context: np.ndarray, where: slice) -> Turn:
        count = len(turn.token_ids[where])
        known = [None if v is None else v[where] for v in (turn.logprobs, turn.policy_logprobs, turn.entropies)]
        spans = (Span(turn.versions[0].version, 0, count),) if count else ()
        return Turn(context, turn.token_ids[where], *known, spans, turn.text, turn.finish_reason)  # type: ignore[arg-type]

    return dataclasses.replace(
        rollout, turns=(cut(turn.context_ids, slice(0, half)), cut(OBSERVATION, slice(half, None)))
    )


@pytest.mark.parametrize("preset", ["grpo", "dr-grpo", "gspo"])
def test_only_sampled_tokens_are_trained_on_and_counted(preset, model, tmp_path, monkeypatch):
    real, batches = sync.generate, []

    def generate(engine: Engine, prompts: Sequence[Prompt], *, n: int, sampling: Sampling, **how: Any) -> list[Group]:
        groups = real(engine, prompts, n=n, sampling=sampling)
        return [Group(group.prompt, tuple(map(in_two_turns, group.rollouts))) for group in groups]

    accumulate = Learner.accumulate
    monkeypatch.setattr(sync, "generate", generate)
    monkeypatch.setattr(
        Learner, "accumulate", lambda self, s, b, *a: (batches.append((s, b)), accumulate(self, s, b))[1]
    )
    # The second turn was sampled without the observation, so the policy's log-probs differ: no canary for this test.
    monkeypatch.setattr("trew.training.frozen.CANARY", {"embedded": {"float32": float("inf")}})
    config = configured(tmp_path, model, steps=1, objective={"preset": preset})
    trew.train(config, display=Silent())

    [(samples, batch)] = batches
    table = pq.read_table(Path(config.out) / "rollouts" / "000001.parquet").to_pylist()
    for row, sample in zip(table, samples, strict=True):
        assert row["token_ids"] == sample.token_ids.tolist()
        at = [i for i, sampled in enumerate(row["sampled"]) if not sampled]
        assert [row["token_ids"][i] for i in at] == OBSERVATION.tolist()
        assert not any(row["advantages"][i] for i in at)
        assert not any(row["entropies"][i] for i in at)
    sampled = sum(sum(row["sampled"]) for row in table)
    assert int(batch.mask.sum()) == sampled == sum(len(row["sampled"]) for row in table) - 3 * len(table)
    assert batch.denominators.tokens == sampled
    assert batch.denominators.max_length == config.rollout.max_tokens
    assert not batch.token_weights[~batch.mask].any()
    rows = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if "loss" in row]
    assert row["completion_length"] == pytest.approx(sampled / len(table))
    assert row["tokens_per_second"] * row["seconds"] == pytest.approx(sampled)
    entropy = sum(sum(e for e in row["entropies"]) for row in table) / sampled
    assert row["entropy"] == pytest.approx(entropy, rel=1e-5)
