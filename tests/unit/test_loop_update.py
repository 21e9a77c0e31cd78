"""What the loop hands to the learner: minibatches with their own denominators, one frozen old policy, fresh seeds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import trew
from trew import loop
from trew.config import parse
from trew.eval import correct_by
from trew.types import Completion, Group, Prompt, Score, ScoredGroup, StepOutput

LENGTHS = [[1, 2], [3, 4], [5, 6], [7, 8]]  # four groups of two


class Recorder:
    """Stands in for the learner and keeps what it was given; log-probs change with every update, as weights would."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.batches: list[trew.TokenBatch] = []
        self.samples: list[list[Any]] = []

    def logprobs(self, samples: list[Any], *, reference: bool = False) -> torch.Tensor:
        count = sum(len(s.completion_ids) for s in samples)
        return torch.full((count,), -7.0 if reference else -1.0 - self.policy_version)

    def step(self, samples: list[Any], batch: trew.TokenBatch) -> StepOutput:
        self.policy_version += 1
        self.batches.append(batch)
        self.samples.append(samples)
        return StepOutput(0.0, {}, 0.0, self.policy_version)


def completion(length: int) -> Completion:
    values = np.full(length, -0.5, dtype=np.float32)
    ids = np.arange(length)
    return Completion(ids, np.ones(length, dtype=bool), values, values, -values, "", "stop", 0)


def scored(rewards: list[list[float]]) -> list[ScoredGroup]:
    out = []
    for g, (lengths, values) in enumerate(zip(LENGTHS, rewards, strict=True)):
        group = Group(Prompt(uid=str(g), text="q"), np.array([g]), tuple(map(completion, lengths)))
        out.append(ScoredGroup(group, tuple(Score(v, parts={"r": v}) for v in values)))
    return out


def job(**learner: Any) -> Any:
    config = parse({"model": "m", "rollout": {"prompts": 4, "completions": 2}, "learner": learner})
    plan = SimpleNamespace(objective=trew.preset("grpo", beta=0.1), correct=correct_by("r"))
    return SimpleNamespace(config=config, plan=plan, learner=Recorder(), engine=SimpleNamespace(policy_version=-1))


def run(j: Any) -> Recorder:
    loop.update(j, scored([[1.0, 0.0]] * 4), SimpleNamespace(note=lambda text: None))  # type: ignore[arg-type]
    return j.learner


def test_each_optimizer_step_divides_by_its_own_sequences_and_tokens():
    batches = run(job(minibatch_prompts=2)).batches
    assert [b.denominators.sequences for b in batches] == [4, 4]
    assert [b.denominators.tokens for b in batches] == [1 + 2 + 3 + 4, 5 + 6 + 7 + 8]


def test_the_old_policy_is_frozen_over_all_updates_and_the_reference_is_another():
    learner = run(job(minibatch_prompts=2, inner_updates=2))
    assert len(learner.batches) == 4
    for batch in learner.batches:
        assert set(batch.old_logprobs.tolist()) == {-1.0}
        assert set(batch.ref_logprobs.tolist()) == {-7.0}


def test_one_update_on_policy_needs_no_old_logprobs():
    assert [b.old_logprobs for b in run(job()).batches] == [None]


def test_samples_and_batch_are_of_the_same_groups_in_the_same_order():
    learner = run(job(minibatch_prompts=2))
    for start, samples, batch in zip((0, 2), learner.samples, learner.batches, strict=True):
        assert [s.group for s in samples] == [start, start, start + 1, start + 1] == batch.group_ids.tolist()
        assert [len(s.completion_ids) for s in samples] == batch.lengths.tolist()
        assert batch.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_the_engine_is_told_the_version_of_the_weights():
    j = job(minibatch_prompts=2, inner_updates=2)
    run(j)
    assert j.engine.policy_version == 4


def test_every_step_refill_and_seed_draws_anew_and_the_same_again():
    seeds = {
        (seed, step, attempt): loop.sampling(parse({"model": "m", "seed": seed}), step, attempt).seed
        for seed in (0, 1)
        for step in (1, 2, 11)
        for attempt in (0, 1)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert loop.sampling(parse({"model": "m"}), 2, 1).seed == seeds[0, 2, 1]


@pytest.mark.parametrize(
    ("kept", "share", "silent"),
    [(["group"], 0.5, False), (["group"], 1.0, True), ([], 0.0, True)],
    ids=["a signal", "all equal", "nothing kept: no score counts as correct"],
)
def test_a_step_that_teaches_nothing_is_counted(kept, share, silent):
    assert loop.teaches_nothing(kept, {"zero_signal_share": share}) is silent
