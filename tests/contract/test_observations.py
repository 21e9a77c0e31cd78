"""What an environment says never enters the loss: every preset, on streams with tokens that the policy did not sample.

A run's stream holds them, masked. The same episodes without them must give the same advantages, loss and gradient,
whatever numbers stand at them; but for rounding, since sums over the stream have more zeros in them.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import trew
from oracle.steps import F64, step_for
from trew import TokenBatch
from trew.objective.batch import ReasoningSteps

PER_TOKEN = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "entropies",
             "score_norms", "values")  # fmt: skip
NEAR = {"rtol": 1e-11, "atol": 1e-14}
GARBAGE = [math.nan, 0.0, -50.0]


def sampled_only(name: str, seed: int) -> TokenBatch:
    """Episodes as they were sampled, without a word of the environment's."""
    batch = TokenBatch.from_padded(**step_for(name, seed, width=6, empty=1, nan=1)).replace(padded_mask=None)
    return batch.replace(logprobs=batch.logprobs.detach())


def with_observations(batch: TokenBatch, garbage: float, seed: int) -> tuple[TokenBatch, torch.Tensor]:
    """The same with up to three foreign tokens before each token and behind the last; and the places of the others."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.bincount(batch.sequence_ids, minlength=batch.size)
    before = torch.randint(0, 4, (len(batch.mask),), generator=g)
    behind = torch.randint(0, 4, (batch.size,), generator=g)
    # Places are counted through the sequences: each token comes after all foreign ones that were put in up to it.
    foreign = torch.cat([torch.zeros(1, dtype=torch.int64), behind.cumsum(0)])[batch.sequence_ids]
    at = torch.arange(len(batch.mask)) + before.cumsum(0) + foreign
    size = len(batch.mask) + int(before.sum() + behind.sum())
    first = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])[:-1]
    added = torch.zeros(batch.size, dtype=torch.int64).index_add_(0, batch.sequence_ids, before) + behind
    start = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + added).cumsum(0)])[:-1]

    def spread(values: torch.Tensor, filler: float) -> torch.Tensor:
        out = torch.full((size,), filler, dtype=values.dtype)
        out[at] = values
        return out

    def moved(ends: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
        """Where the ends lie now: as many tokens up to the end-th sampled one; 0 stays before the first."""
        token = first[sequences] + ends - 1
        return torch.where(ends > 0, at[token.clamp(min=0)] - start[sequences] + 1, 0)

    fields = {k: spread(v, garbage) for k in (*PER_TOKEN, "advantages") if (v := getattr(batch, k)) is not None}
    steps, turns = batch.step_rewards, batch.turns
    assert steps is not None
    assert turns is not None
    ends = moved(turns.ends, turns.sequence_ids)
    # An observation behind the last token sampled belongs to the last turn here, as to none in a run.
    ends = torch.where(turns.is_last, (lengths + added)[turns.sequence_ids], ends)
    wide = batch.replace(
        **fields,
        mask=spread(batch.mask, False),
        sequence_ids=torch.arange(batch.size).repeat_interleave(lengths + added),
        step_rewards=ReasoningSteps(steps.values, steps.sequence_ids, moved(steps.ends, steps.sequence_ids)),
        turns=dataclasses.replace(turns, ends=ends),
    )
    return wide, at


def gradient(objective: trew.Objective, batch: TokenBatch) -> tuple[trew.LossOutput, torch.Tensor]:
    leaf = batch.logprobs.clone().requires_grad_()
    out = objective.loss(batch.replace(logprobs=leaf))
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return out, grad


@pytest.mark.parametrize("name", trew.presets())
def test_observations_carry_no_loss_and_change_none(name):
    settings = {"k": 2} if name == "pass-at-k" else {}
    for seed, (beta, garbage) in enumerate((beta, garbage) for beta in (0.0, 0.05) for garbage in GARBAGE):
        objective = trew.preset(name, **settings, beta=beta)
        short = sampled_only(name, seed)
        wide, at = with_observations(short, garbage, seed)
        assert int(wide.mask.sum()) == len(short.mask) < len(wide.mask)
        (a, plain), (b, spread) = gradient(objective, short), gradient(objective, wide)
        torch.testing.assert_close(b.advantages[at], a.advantages, **NEAR)
        torch.testing.assert_close(spread[at], plain, **NEAR)
        assert plain.dtype == F64
        assert plain.abs().sum() > 0
        torch.testing.assert_close(b.loss, a.loss, **NEAR)
        foreign = torch.ones(len(wide.mask), dtype=torch.bool)
        foreign[at] = False
        assert (spread[foreign] == 0).all()
        assert (b.advantages[foreign] == 0).all()


def test_the_gradient_of_a_part_ignores_observations_too():
    objective = trew.preset("grpo-process", beta=0.05)
    short = sampled_only("grpo-process", 3)
    wide, at = with_observations(short, math.nan, 3)
    (_, plain), prepared = gradient(objective, short), objective.prepare(wide)
    found = torch.zeros(len(wide.mask), dtype=F64)
    for row in range(wide.size):
        part = prepared.select(torch.tensor([row]))
        found[wide.sequence_ids == row] = -objective.loss(part).coefficients
    torch.testing.assert_close(found[at], plain, **NEAR)
