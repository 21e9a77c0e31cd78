"""What every preset promises, on every preset."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trew
from trew import TokenBatch
from trew.objective.presets import PRESETS

F64 = torch.float64


@st.composite
def batches(draw: st.DrawFn) -> dict:
    groups, size, width = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rows = groups * size
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths = torch.randint(0, width + 1, (rows,), generator=g)  # empty completions too
    logprobs = -torch.rand(rows, width, generator=g, dtype=F64) * 4
    rewards = torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.0, float("nan"), 0.5]), min_size=rows, max_size=rows)))
    return {
        "logprobs": logprobs.requires_grad_(),
        "mask": torch.arange(width)[None] < lengths[:, None],
        "rewards": rewards,
        "group_ids": torch.randperm(groups, generator=g).repeat_interleave(size),
        "old_logprobs": logprobs.detach() + torch.randn(rows, width, generator=g, dtype=F64) * 0.3,
        "ref_logprobs": logprobs.detach() + torch.randn(rows, width, generator=g, dtype=F64) * 0.3,
        "max_length": width,
    }


@pytest.mark.parametrize("name", trew.presets())
@settings(max_examples=60, deadline=None)
@given(data=batches(), cut=st.randoms(use_true_random=False))
def test_the_gradient_does_not_depend_on_the_split(name, data, cut):
    objective = trew.preset(name, beta=0.1)
    whole = objective.loss(TokenBatch.from_padded(**data))
    (want,) = torch.autograd.grad(whole.loss, data["logprobs"])
    assert torch.isfinite(want).all()

    prepared = objective.prepare(TokenBatch.from_padded(**data))
    rows = list(range(len(data["rewards"])))
    cut.shuffle(rows)
    parts = []
    while rows:
        k = cut.randint(1, len(rows))
        parts.append(torch.tensor(rows[:k]))
        rows = rows[k:]
    total = torch.zeros((), dtype=F64)
    sums: dict[str, float] = {}
    for part in parts:
        out = objective.loss(prepared.select(part))
        total = total + out.loss
        for metric, (value, _) in out.metrics.items():
            sums[metric] = sums.get(metric, 0.0) + value
    (got,) = torch.autograd.grad(total, data["logprobs"])
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)
    assert total.item() == pytest.approx(whole.loss.item(), abs=1e-9)
    for metric, value in sums.items():
        assert value == pytest.approx(whole.metrics[metric][0], abs=1e-9)


@pytest.mark.parametrize("name", trew.presets())
@settings(max_examples=30, deadline=None)
@given(data=batches())
def test_coefficients_equal_central_differences_of_the_linear_form(name, data):
    """The loss is linear in log pi once C is fixed: moving one log-prob by h moves -C . l by -C h."""
    out = trew.preset(name, beta=0.1).loss(TokenBatch.from_padded(**data))
    (gradient,) = torch.autograd.grad(out.loss, data["logprobs"])
    assert torch.equal(gradient, -out.coefficients)
    assert not out.coefficients.requires_grad
    assert not out.advantages.requires_grad
    assert (out.coefficients[~data["mask"]] == 0).all()


@pytest.mark.parametrize("name", trew.presets())
def test_every_preset_explains_itself(name):
    objective = trew.preset(name)
    text = objective.equation()
    assert objective.name == name
    assert objective.couples in ("token", "sequence")
    for row in ("advantage", "ratio", "weight", "aggregate"):
        assert row in text
    assert "arXiv" in (PRESETS[name].__doc__ or "") or name == "trw-triangular"


@pytest.mark.parametrize("name", trew.presets())
def test_nothing_to_learn_from_gives_exactly_nothing(name):
    l = torch.full((4, 3), -1.0, requires_grad=True)
    empty = torch.zeros(4, 3, dtype=torch.bool)
    ids = torch.zeros(4, dtype=torch.int64)
    equal, unknown, mixed = torch.ones(4), torch.full((4,), torch.nan), torch.tensor([1.0, 0.0, 1.0, 0.0])
    for mask, rewards in ((empty, mixed), (~empty, equal), (~empty, unknown)):
        batch = TokenBatch.from_padded(logprobs=l, mask=mask, rewards=rewards, group_ids=ids, max_length=3)
        out = trew.preset(name, beta=0.0).loss(batch)
        (gradient,) = torch.autograd.grad(out.loss, l)
        assert out.loss.item() == 0
        assert torch.equal(gradient, torch.zeros_like(l))
