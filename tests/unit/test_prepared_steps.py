"""A step that one objective has prepared, given to the loss of another one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import trew
from trew.errors import DataError
from trew.objective.aggregate import TokenMean
from trew.objective.entropy_bonus import EntropyBonus
from trew.objective.prepared import BEFORE

GRPO = trew.preset("grpo")


def step() -> trew.TokenBatch:
    """Groups of different lengths and rewards, with everything that most presets read."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(6, 4, generator=generator)
    mask = torch.arange(4) < torch.tensor([4, 2, 3, 1, 4, 2])[:, None]
    return trew.TokenBatch.from_padded(
        logprobs=logprobs, old_logprobs=logprobs - 0.1, rollout_logprobs=logprobs - 0.2, ref_logprobs=logprobs - 0.1,
        mask=mask, rewards=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), group_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        teacher_logprobs=logprobs - 0.3, entropies=-logprobs,
        values=torch.rand(6, 4, generator=generator), baselines=torch.rand(6, generator=generator),
        truncated=torch.zeros(6, dtype=torch.bool), score_norms=torch.rand(6, 4, generator=generator),
        step_rewards=[[(1, 0.5)]] * 6, turns=[[(4, 0.5)]] * 6, states=[["a"]] * 6, max_length=4,
    )  # fmt: skip


@pytest.mark.parametrize("name", trew.presets())
def test_the_loss_of_a_foreign_step_is_that_of_an_own_one_or_refused(name):
    other, batch = trew.preset(name), step()
    given = torch.ones(int(batch.mask.sum())) if name == "ppo-clip" else None  # it computes none itself
    own = other.loss(batch.replace(advantages=given)).coefficients
    foreign = GRPO.prepare(batch)
    if all(getattr(other, axis) == getattr(GRPO, axis) for axis in BEFORE):
        torch.testing.assert_close(other.loss(foreign).coefficients, own, rtol=0, atol=0)
    else:
        with pytest.raises(DataError, match="prepared_by: got a step that grpo prepared with another"):
            other.loss(foreign)


def test_what_acts_in_the_loss_may_be_exchanged_after_prepare():
    batch = GRPO.prepare(step())
    for other in (GRPO.replace(weight=trew.preset("cispo").weight), GRPO.replace(entropy_bonus=EntropyBonus(0.1))):
        assert other.loss(batch).loss.isfinite()


def test_a_copy_of_the_objective_is_the_same_objective():
    assert dataclasses.replace(GRPO).loss(GRPO.prepare(step())).loss.isfinite()


def test_parts_are_refused_too_and_the_way_around_is_in_the_message():
    means = GRPO.replace(aggregate=TokenMean())
    part = GRPO.prepare(step()).select(torch.tensor([0, 1]))
    with pytest.raises(DataError, match=r"another aggregate than that of grpo; .* batch.replace\(prepared_by=None\)"):
        means.loss(part)
    assert means.loss(part.replace(prepared_by=None)).loss.isfinite()


def test_a_kl_in_the_reward_is_in_the_advantages_and_one_in_the_loss_is_not():
    inside = trew.preset("grpo", beta=0.1, kl_place="reward")
    with pytest.raises(DataError, match="another divergence than that of grpo"):
        GRPO.loss(inside.prepare(step()))
    with pytest.raises(DataError, match="another divergence than that of grpo"):
        inside.loss(GRPO.prepare(step()))
    assert trew.preset("grpo", beta=0.1).loss(GRPO.prepare(step())).loss.isfinite()


def test_every_choice_acts_either_before_the_loss_or_in_it():
    in_the_loss = {"name", "ratio", "weight", "correction", "divergence", "entropy_bonus", "nll"}
    assert {field.name for field in dataclasses.fields(GRPO)} == in_the_loss | set(BEFORE)
