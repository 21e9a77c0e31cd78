"""DPO: its golden number, its gradient against the coefficient of DeepSeekMath's table, and what is no pair."""

from __future__ import annotations

import math

import pytest
import torch

from test_objective_preference import make
from trew import TokenBatch
from trew.errors import DataError
from trew.objective.preference import dpo_loss, implicit_rewards

F64 = torch.float64


def pairs(z: list[float], rewards: list[float], *, groups: list[int] | None = None, seed: int = 0) -> TokenBatch:
    batch = make(z, groups or [i // 2 for i in range(len(z))], seed=seed)
    return batch.replace(rewards=torch.tensor(rewards, dtype=F64))


def test_golden_number():
    """Log-ratios of 2 and -1 over one token each, beta = 0.1: log(1 + exp(-0.3))."""
    log_ratio = torch.tensor([[2.0], [-1.0]], dtype=F64)
    batch = TokenBatch.from_padded(
        logprobs=log_ratio - 3, ref_logprobs=torch.full((2, 1), -3.0, dtype=F64), mask=torch.ones(2, 1),
        rewards=torch.tensor([1.0, -1.0]), group_ids=torch.tensor([0, 0]),
    )  # fmt: skip
    assert dpo_loss(batch, beta=0.1).item() == pytest.approx(math.log1p(math.exp(-0.3)), abs=1e-12)
    swapped = batch.replace(rewards=-batch.rewards)
    assert dpo_loss(swapped, beta=0.1).item() == pytest.approx(math.log1p(math.exp(0.3)), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_is_the_coefficient_of_the_unified_table(seed):
    """Groups apart from each other in the batch, and the chosen completion first, second or in between."""
    z, rewards, groups = [0.3, -0.2, 0.1, 0.4, -0.5, 0.9], [1.0, 0.0, -1.0, 2.0, 0.5, 0.25], [7, 3, 7, 5, 3, 5]
    batch = pairs(z, rewards, groups=groups, seed=seed)
    (gradient,) = torch.autograd.grad(dpo_loss(batch, beta=0.7), batch.logprobs)
    total = [zi * int(n) for zi, n in zip(z, batch.lengths, strict=True)]
    assert implicit_rewards(batch, beta=0.7).tolist() == pytest.approx([0.7 * t for t in total])
    for chosen, rejected in ((0, 2), (4, 1), (3, 5)):
        push = 0.7 / (1 + math.exp(0.7 * (total[chosen] - total[rejected]))) / 3
        for i, c in ((chosen, push), (rejected, -push)):
            got = -gradient[batch.sequence_ids == i]
            assert got.tolist() == pytest.approx([c] * int(batch.lengths[i]), abs=1e-12)


def test_parts_of_a_step_add_up():
    batch = pairs([0.3, -0.2, 0.1, 0.4], [1.0, 0.0, 0.0, 1.0])
    (whole,) = torch.autograd.grad(dpo_loss(batch), batch.logprobs)
    parts = []
    for sequences in ([0, 1], [2, 3]):
        part = batch.select(torch.tensor(sequences))
        logprobs = part.logprobs.detach().requires_grad_()
        loss = dpo_loss(part.replace(logprobs=logprobs), pairs=2)
        parts.append(torch.autograd.grad(loss, logprobs)[0])
    assert torch.equal(torch.cat(parts), whole)
    assert dpo_loss(batch.select(torch.tensor([], dtype=torch.int64))).item() == 0.0


def test_far_log_ratios_stay_finite():
    batch = pairs([0.0] * 4, [1.0, 0.0, 1.0, 0.0])
    far = torch.tensor([300.0, -300.0, -300.0, 300.0], dtype=F64)[batch.sequence_ids]
    batch = batch.replace(logprobs=(batch.ref_logprobs + far).requires_grad_())
    loss = dpo_loss(batch, beta=1.0)
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    right = gradient[(batch.sequence_ids == 0) | (batch.sequence_ids == 1)]
    wrong = gradient[batch.sequence_ids == 2]
    assert (right == 0).all()  # told apart already: nothing is left to push
    assert wrong.tolist() == pytest.approx([-0.5] * len(wrong))


@pytest.mark.parametrize(
    ("groups", "rewards", "said"),
    [([4, 4, 4], [1.0, 0.0, 0.0], "group_ids: group 4 has 3 completions, accepts 2"),
     ([1, 1, 2], [1.0, 0.0, 1.0], "group_ids: group 2 has 1 completions"),
     ([5, 5], [1.0, 1.0], "rewards: group 5 has two equal ones"),
     ([5, 5], [1.0, math.nan], "rewards: group 5 has two equal ones, or one that is NaN")],
)  # fmt: skip
def test_what_is_no_pair_is_refused(groups, rewards, said):
    with pytest.raises(DataError, match=said):
        dpo_loss(pairs([0.1] * len(groups), rewards, groups=groups))


def test_what_is_missing_is_said():
    batch = pairs([0.1, 0.2], [1.0, 0.0])
    with pytest.raises(DataError, match="ref_logprobs: got None"):
        dpo_loss(batch.replace(ref_logprobs=None))
    with pytest.raises(DataError, match="rewards: got None"):
        dpo_loss(batch.replace(rewards=None))
    with pytest.raises(ValueError, match=r"beta: got 0.0, accepts a number above 0"):
        dpo_loss(batch, beta=0.0)
