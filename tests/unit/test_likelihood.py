"""The likelihood of correct completions beside an objective: what it counts, and that no cut of a step changes it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import learner_help as help
import trew
from trew import TokenBatch
from trew.config import LearnerConfig
from trew.errors import DataError
from trew.objective import preset
from trew.training.batch import minibatches

F64 = torch.float64


def step(rewards: list[float], **fields) -> TokenBatch:
    """One group with completions of 1, 2, 3, ... tokens of log-prob -1."""
    size = len(rewards)
    mask = torch.arange(size)[None] <= torch.arange(size)[:, None]
    data = {"rewards": torch.tensor(rewards, dtype=F64), "group_ids": torch.zeros(size, dtype=torch.int64)}
    logprobs = torch.full((size, size), -1.0, dtype=F64, requires_grad=True)
    return TokenBatch.from_padded(**({"logprobs": logprobs, "mask": mask} | data | fields))


def added(batch: TokenBatch, **settings) -> list[float]:
    """What the term adds to the coefficient of each completion's first token."""
    with_it, without = (
        preset("grpo", beta=0.0, nll=nll, **settings).loss(batch).coefficients[:, 0] for nll in (0.6, 0.0)
    )
    return (with_it - without).tolist()


def test_each_token_of_a_correct_completion_counts_the_same():
    assert added(step([1.0, 0.0, 1.0])) == pytest.approx([0.15, 0.0, 0.15])  # 0.6 over 1 + 3 tokens
    out = preset("grpo", beta=0.0, nll=0.6).loss(step([1.0, 0.0, 1.0]))
    assert out.metrics["nll_correct"] == (4.0, 4.0)
    assert out.loss.item() == pytest.approx(0.6 + preset("grpo", beta=0.0).loss(step([1.0, 0.0, 1.0])).loss.item())
    assert "nll_correct" not in preset("grpo", beta=0.0).loss(step([1.0, 0.0])).metrics


def test_a_group_that_is_all_right_still_teaches():
    objective, batch = preset("grpo", beta=0.0, nll=0.6), step([1.0, 1.0])
    prepared = objective.prepare(batch)
    assert not prepared.advantages.any()
    assert objective.has_gradient(prepared).all()
    assert objective.loss(batch).coefficients[1].tolist() == pytest.approx([0.2, 0.2])
    wrong = step([0.0, 0.0])
    assert not objective.has_gradient(objective.prepare(wrong)).any()
    assert not objective.loss(wrong).coefficients.any()


def test_correct_is_what_the_batch_says_then_a_reward_above_0():
    assert added(step([0.5, -1.0, 0.0])) == pytest.approx([0.6, 0.0, 0.0])
    correct = torch.tensor([False, True, False])
    assert added(step([0.5, -1.0, 0.0], correct=correct)) == pytest.approx([0.0, 0.3, 0.0])
    # An unjudged completion is not correct, and one that was cut off leaves the count.
    assert added(step([1.0, float("nan"), 1.0])) == pytest.approx([0.15, 0.0, 0.15])
    cut = step([1.0, 0.0, 1.0], truncated=torch.tensor([False, False, True]))
    assert added(cut, overlong_filtering=True)[:2] == pytest.approx([0.6, 0.0])


def test_neither_ratio_nor_trust_region_acts_on_it():
    old = torch.full((3, 3), -3.0, dtype=F64)
    assert added(step([1.0, 0.0, 1.0], old_logprobs=old)) == pytest.approx([0.15, 0.0, 0.15])


def test_denominators_of_others_must_count_the_correct_tokens():
    batch = step([1.0, 0.0, 1.0])
    counts = dataclasses.replace(trew.Denominators.of(batch), correct_tokens=None)
    with pytest.raises(DataError, match="denominators: correct_tokens is None"):
        preset("grpo", beta=0.0, nll=0.6).loss(batch.replace(denominators=counts))
    whole = dataclasses.replace(counts, correct_tokens=8)  # as many again on another rank
    assert added(batch.replace(denominators=whole)) == pytest.approx([0.075, 0.0, 0.075])


SHAPE = [(6, (4, 3)), (5, (5, 2)), (4, (3, 3))]
REWARDS = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
ALONE = 0.7


@pytest.mark.parametrize("budget", [4096, 20, 1])
def test_the_gradient_of_a_learner_is_that_of_the_whole_step_however_it_is_cut(budget):
    net, items = help.model(), help.samples(SHAPE)
    objective = preset("grpo", beta=0.0, nll=ALONE)
    data = objective.prepare(help.batch(items, rewards=REWARDS))
    got = help.gradients(net, objective, items, data, microbatch_tokens=budget)
    net.zero_grad()
    logprobs = [help.plain_logprobs(net, item) for item in items]
    advantages = [data.advantages[data.sequence_ids == i][0] for i in range(6)]
    plain = sum(a * l.mean() for a, l in zip(advantages, logprobs, strict=True)) / 6
    (-plain - ALONE * torch.cat([logprobs[i] for i in range(3)]).mean()).backward()
    assert help.relative(got, torch.cat([p.grad.flatten() for p in net.parameters()])) < 1e-5
    out = help.learner(net, objective, microbatch_tokens=budget).step(items, data)
    total = -sum(float(logprobs[i].detach().sum()) for i in range(3))
    assert out.metrics["nll_correct"] == pytest.approx((total, 12.0), rel=1e-5)
    assert out.metrics["silent_share"] == (2.0, 6.0)  # the last group alone


def test_each_minibatch_has_a_count_of_its_own():
    items = help.samples(SHAPE)
    objective = preset("grpo", beta=0.0, nll=ALONE)
    data = objective.prepare(help.batch(items, rewards=REWARDS))
    parts = list(minibatches(items, data, objective, LearnerConfig(minibatch_prompts=1)))
    assert [part.batch.denominators.correct_tokens for part in parts] == [7, 5, 0]
