"""TRPA: its golden number, its gradient against the formula for the coefficient, and the corners."""

from __future__ import annotations

import math

import pytest
import torch

from trew import TokenBatch
from trew.errors import DataError
from trew.objective.preference import trpa_loss

F64 = torch.float64


def make(z: list[float], groups: list[int], *, width: int = 3, seed: int = 0, old: bool = False) -> TokenBatch:
    """Ragged sequences whose mean log-ratio to the reference is ``z``."""
    g = torch.Generator().manual_seed(seed)
    rows = len(z)
    mask = torch.arange(width)[None] < torch.randint(1, width + 1, (rows, 1), generator=g)
    ref = -torch.rand(rows, width, generator=g, dtype=F64) - 5
    noise = torch.randn(rows, width, generator=g, dtype=F64) * mask
    noise -= noise.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    logprobs = (ref + torch.tensor(z, dtype=F64)[:, None] + noise).requires_grad_()
    return TokenBatch.from_padded(
        logprobs=logprobs, ref_logprobs=ref, mask=mask, rewards=torch.zeros(rows), group_ids=torch.tensor(groups),
        old_logprobs=logprobs.detach() + 0.3 if old else None,
    )  # fmt: skip


def test_golden_number_and_coefficient():
    batch = make([0.2, -0.1], [0, 0])
    loss = trpa_loss(batch, levels=torch.tensor([1, 2]))
    assert loss.item() == pytest.approx(0.6563501408, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    per_sequence = [gradient[batch.sequence_ids == i].sum().item() for i in range(2)]
    assert per_sequence == pytest.approx([-0.1203146960, 0.1203146960], abs=1e-9)
    assert len(gradient[batch.sequence_ids == 0].unique()) == 1  # spread evenly over the tokens


def test_gradient_is_the_formula_s_over_several_levels():
    z, levels = [0.3, -0.2, 0.1, 0.4, -0.5], torch.tensor([1, 2, 2, 1, 3])
    batch = make(z, [0] * 5, seed=3)
    loss = trpa_loss(batch, levels=levels, beta=0.2, best_factor=2.3)
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    pairs = [(i, j) for i in range(5) for j in range(5) if levels[i] < levels[j]]
    factor = [2.3 if level == 1 else 1.0 for level in levels]
    want = [0.0] * 5
    for i, j in pairs:
        push = 0.2 * factor[i] / (1 + math.exp(0.2 * factor[i] * (z[i] - z[j]))) / len(pairs)
        want[i] += push
        want[j] -= push
    got = [-gradient[batch.sequence_ids == i].sum().item() for i in range(5)]
    assert got == pytest.approx(want, abs=1e-9)


def test_groups_do_not_see_each_other_and_a_group_of_one_level_stands_for_itself():
    levels = torch.tensor([1, 2, 1, 1, 3])
    batch = make([0.2, -0.1, 0.5, 0.1, 0.7], [4, 4, 9, 9, 7])
    sigmas = [0.1 * 2.5 * 0.3, 0.1 * 2.5 * 0.5, 0.1 * 2.5 * 0.1, -0.1 * 0.7]
    want = -sum(-math.log1p(math.exp(-h)) for h in sigmas) / 4
    assert trpa_loss(batch, levels=levels).item() == pytest.approx(want, abs=1e-12)


def test_trust_region_term():
    batch = make([0.2, -0.1], [0, 0], old=True)
    d = -0.3
    k3 = math.exp(-d) - 1 + d
    levels = torch.tensor([1, 2])
    without = trpa_loss(batch, levels=levels, anchor=0.0).item()
    assert trpa_loss(batch, levels=levels, anchor=0.01).item() == pytest.approx(without + 0.01 * k3, abs=1e-12)


def test_corners():
    batch = make([0.2, -0.1], [0, 0])
    with pytest.raises(DataError, match="ref_logprobs: got None"):
        trpa_loss(batch.replace(ref_logprobs=None), levels=torch.tensor([1, 2]))
    with pytest.raises(DataError, match=r"levels: got shape \(3,\), accepts \(2,\)"):
        trpa_loss(batch, levels=torch.tensor([1, 2, 3]))
    empty = batch.replace(mask=torch.zeros_like(batch.mask))
    assert trpa_loss(empty, levels=torch.tensor([1, 2])).item() == 0
