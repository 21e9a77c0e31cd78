"""The preset ``dpo``: the loss of preference.dpo_loss, value and gradient, as one coefficient per token."""

from __future__ import annotations

import math

import pytest
import torch

import trew
from test_dpo_loss import pairs
from trew.errors import ConfigError, DataError
from trew.objective import TokenBatch
from trew.objective.preference import dpo_loss
from trew.objective.preferred import preferred_advantages

F64 = torch.float64
Z, REWARDS, GROUPS = [0.3, -0.2, 0.1, 0.4, -0.5, 0.9], [1.0, 0.0, -1.0, 2.0, 0.5, 0.25], [7, 3, 7, 5, 3, 5]


def test_golden_coefficients():
    """Log-ratios of 2 and -1 over one token each, beta = 0.1: +-0.1 sigma(-0.3), and the loss log(1 + exp(-0.3))."""
    log_ratio = torch.tensor([[2.0], [-1.0]], dtype=F64)
    batch = TokenBatch.from_padded(
        logprobs=(log_ratio - 3).requires_grad_(), ref_logprobs=torch.full((2, 1), -3.0, dtype=F64),
        mask=torch.ones(2, 1), rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0]),
    )  # fmt: skip
    out = trew.preset("dpo").loss(batch)
    push = 0.1 / (1 + math.exp(0.3))
    assert out.coefficients[:, 0].tolist() == pytest.approx([push, -push], abs=1e-12)
    assert out.advantages[:, 0].tolist() == [1.0, -1.0]
    assert out.loss.item() == pytest.approx(math.log1p(math.exp(-0.3)), abs=1e-12)
    assert out.metrics["preference_margin"] == pytest.approx((0.6, 2.0))
    assert out.metrics["preference_accuracy"] == (2.0, 2.0)


@pytest.mark.parametrize("beta", [0.05, 0.7, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_those_of_the_loss_over_pairs(seed, beta):
    batch = pairs(Z, REWARDS, groups=GROUPS, seed=seed)
    want = dpo_loss(batch, beta=beta)
    (gradient,) = torch.autograd.grad(want, batch.logprobs, retain_graph=True)
    out = trew.preset("dpo", dpo_beta=beta).loss(batch)
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(-out.packed["coefficients"], gradient, rtol=1e-12, atol=1e-14)
    (own,) = torch.autograd.grad(out.loss, batch.logprobs)
    torch.testing.assert_close(own, gradient, rtol=1e-12, atol=1e-14)


def test_metrics_count_a_pair_once_whatever_its_length():
    batch = pairs(Z, REWARDS, groups=GROUPS)
    total = [0.5 * z * int(n) for z, n in zip(Z, batch.lengths, strict=True)]
    margins = [total[c] - total[r] for c, r in ((0, 2), (4, 1), (3, 5))]
    metrics = trew.preset("dpo", dpo_beta=0.5).loss(batch).metrics
    value, count = metrics["preference_margin"]
    assert count == pytest.approx(6)
    assert value / count == pytest.approx(sum(margins) / 3)
    value, count = metrics["preference_accuracy"]
    assert value / count == pytest.approx(sum(m > 0 for m in margins) / 3)
    assert "preference_margin" not in trew.preset("sft").loss(batch).metrics


def test_a_larger_group_is_its_best_against_its_worst():
    """Two best, one in between, one worst: the mean over two pairs, whose loss autograd differentiates."""
    batch = pairs([0.2, -0.1, 0.4, 0.3], [1.0, 0.5, 1.0, 0.0], groups=[0, 0, 0, 0])
    out = trew.preset("dpo", dpo_beta=0.8).loss(batch)
    z = [0.8 * (batch.logprobs - batch.ref_logprobs)[batch.sequence_ids == i].sum() for i in range(4)]
    want = -sum(torch.nn.functional.logsigmoid(z[i] - z[3]) for i in (0, 2)) / 2
    (gradient,) = torch.autograd.grad(want, batch.logprobs)
    torch.testing.assert_close(-out.packed["coefficients"], gradient, rtol=1e-12, atol=1e-14)
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-12)


def test_groups_without_a_better_completion_are_silent_and_count():
    both = pairs([0.3, -0.2, 0.1, 0.4], [1.0, 0.0, 1.0, 1.0])
    out = trew.preset("dpo").loss(both)
    assert (out.packed["coefficients"][both.sequence_ids >= 2] == 0).all()
    alone = pairs([0.3, -0.2], [1.0, 0.0])
    assert out.loss.item() == pytest.approx(trew.preset("dpo").loss(alone).loss.item() / 2)
    nan = preferred_advantages(torch.tensor([1.0, math.nan, 0.0, 0.0]), batch=both)
    assert nan.tolist() == [0, 0, 0, 0]


def test_a_pair_is_never_computed_by_halves():
    objective = trew.preset("dpo")
    prepared = objective.prepare(pairs([0.3, -0.2, 0.1, 0.4], [1.0, 0.0, 0.0, 1.0]))
    with pytest.raises(DataError, match="must see the whole step"):
        objective.loss(prepared.select(torch.tensor([0])))


def test_what_it_cannot_do_without():
    batch = pairs([0.3, -0.2], [1.0, 0.0])
    for name in ("ref_logprobs", "rewards"):
        with pytest.raises(DataError, match=f"{name}: got None"):
            trew.preset("dpo").loss(batch.replace(**{name: None}))
    with pytest.raises(ConfigError, match=r"objective.dpo_beta: got 0.0, accepts a number above 0"):
        trew.preset("dpo", dpo_beta=0.0)


def test_the_kl_s_beta_is_noted_to_be_another():
    (note,) = trew.preset("dpo", beta=0.3).notes
    assert note == "beta = 0.3 is a KL term beside DPO's loss, whose own beta is dpo_beta = 0.1"
