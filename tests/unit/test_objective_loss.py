"""The composed objective: gradients against independent textbook losses, and what it must refuse."""

from __future__ import annotations

import math

import pytest
import torch

import trew
from trew import TokenBatch
from trew.errors import ConfigError, DataError
from trew.objective.correction import TruncatedImportance
from trew.objective.weight import Clip, Triangular

F64 = torch.float64
LENGTH = 7


def make(seed: int = 0, groups: int = 3, size: int = 4, *, off_policy: float = 0.3, signal: bool = True) -> dict:
    """A random ragged batch as from_padded takes it, with leaf log-probs in float64."""
    g = torch.Generator().manual_seed(seed)
    rows = groups * size
    lengths = torch.randint(1, LENGTH + 1, (rows,), generator=g)
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    logprobs = -torch.rand(rows, LENGTH, generator=g, dtype=F64) * 3
    rewards = torch.randint(0, 2, (rows,), generator=g).to(F64)
    if signal:
        rewards[::size], rewards[1::size] = 1.0, 0.0
    return {
        "logprobs": logprobs.requires_grad_(),
        "mask": mask,
        "rewards": rewards,
        "group_ids": torch.arange(groups).repeat_interleave(size),
        "old_logprobs": logprobs.detach() + off_policy * torch.randn(rows, LENGTH, generator=g, dtype=F64),
        "ref_logprobs": logprobs.detach() + 0.2 * torch.randn(rows, LENGTH, generator=g, dtype=F64),
        "max_length": LENGTH,
    }


def textbook(data: dict, *, eps_low, eps_high, beta, scale_by_std, aggregate) -> torch.Tensor:
    """The surrogate as the papers write it, differentiated by autograd; loops on purpose."""
    l, old, ref, mask = data["logprobs"], data["old_logprobs"], data["ref_logprobs"], data["mask"]
    rewards, ids = data["rewards"], data["group_ids"]
    total, count = torch.zeros((), dtype=F64), 0
    sequences = len(l)
    tokens = int(mask.sum())
    for i in range(sequences):
        group = rewards[ids == ids[i]]
        a = rewards[i] - group.mean()
        if scale_by_std:
            a = a / group.std() if group.max() > group.min() else 0.0
        row, length = torch.zeros((), dtype=F64), int(mask[i].sum())
        for t in range(length):
            r = torch.exp(l[i, t] - old[i, t])
            surrogate = torch.min(r * a, torch.clamp(r, 1 - eps_low, 1 + eps_high) * a)
            d = ref[i, t] - l[i, t]
            row = row + surrogate - beta * (torch.exp(d) - d - 1)
        weight = {"sequence": 1 / (sequences * length), "token": 1 / tokens, "constant": 1 / (sequences * LENGTH)}
        total = total + row * weight[aggregate]
        count += length
    assert count == tokens
    return -total


CASES = {
    "grpo": ({}, {"eps_low": 0.2, "eps_high": 0.2, "beta": 0.04, "scale_by_std": True, "aggregate": "sequence"}),
    "dapo": ({}, {"eps_low": 0.2, "eps_high": 0.28, "beta": 0.0, "scale_by_std": True, "aggregate": "token"}),
    "dr-grpo": ({}, {"eps_low": 0.2, "eps_high": 0.2, "beta": 0.0, "scale_by_std": False, "aggregate": "constant"}),
    "trw-triangular": (
        {"w0": 1.0, "w2": 1.0},
        {"eps_low": 0.2, "eps_high": 0.28, "beta": 0.0, "scale_by_std": True, "aggregate": "sequence"},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_gradient_and_value_equal_the_textbook_surrogate(name, seed):
    data = make(seed)
    overrides, form = CASES[name]
    want = textbook(data, **form)
    (gradient,) = torch.autograd.grad(want, data["logprobs"])
    out = trew.preset(name, **overrides).loss(TokenBatch.from_padded(**data))
    (got,) = torch.autograd.grad(out.loss, data["logprobs"])
    assert torch.allclose(got, gradient, rtol=1e-9, atol=1e-12)
    assert torch.allclose(out.coefficients, -gradient, rtol=1e-9, atol=1e-12)
    if name != "trw-triangular":  # its surrogate's value is w r A, which is not the clipped one
        assert out.loss.item() == pytest.approx(want.item(), abs=1e-12)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_coefficients_alone_carry_the_gradient(name):
    data = make(3)
    out = trew.preset(name).loss(TokenBatch.from_padded(**data))
    (a,) = torch.autograd.grad(out.loss, data["logprobs"])
    (b,) = torch.autograd.grad(-(out.coefficients.detach() * data["logprobs"]).sum(), data["logprobs"])
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_on_policy_every_preset_is_reinforce_with_its_advantage(name):
    data = make(1, off_policy=0.0) | {"ref_logprobs": None}
    objective = trew.preset(name, beta=0.0)
    out = objective.loss(TokenBatch.from_padded(**data))
    batch = objective.prepare(TokenBatch.from_padded(**data))
    share = objective.aggregate(batch, denominators=batch.denominators)
    assert torch.allclose(out.coefficients[data["mask"]], share * batch.advantages)


def test_old_logprobs_default_to_the_policys_own():
    data = make(2) | {"old_logprobs": None}
    explicit = data | {"old_logprobs": data["logprobs"].detach()}
    a, b = (trew.preset("grpo").loss(TokenBatch.from_padded(**d)) for d in (data, explicit))
    assert torch.equal(a.coefficients, b.coefficients)
    assert a.metrics["ratio"][0] == a.metrics["ratio"][1]


def test_triangle_with_full_sides_is_the_clip_to_the_last_bit():
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, F64):
        ratio = torch.cat([torch.rand(5000, generator=g, dtype=dtype) * 3, torch.tensor([1.0, 0.8, 1.28], dtype=dtype)])
        advantages = torch.randn(len(ratio), generator=g, dtype=dtype)
        tent, clip = Triangular(w0=1.0, w2=1.0, w_out=0.0), Clip(0.2, 0.28)
        assert torch.equal(tent(ratio, advantages=advantages), clip(ratio, advantages=advantages))


def test_padding_is_never_read():
    data = make(4)
    poisoned = dict(data)
    for name in ("logprobs", "old_logprobs", "ref_logprobs"):
        values = data[name].detach().clone()
        values[~data["mask"]] = math.nan
        poisoned[name] = values.requires_grad_(name == "logprobs")
    a, b = (trew.preset("grpo").loss(TokenBatch.from_padded(**d)) for d in (data, poisoned))
    assert torch.equal(a.loss, b.loss)
    b.loss.backward()
    assert torch.isfinite(poisoned["logprobs"].grad).all()


def test_a_nan_reward_takes_its_sequence_out_as_if_it_were_not_there():
    data = make(5)
    full = data | {"rewards": data["rewards"].clone()}
    full["rewards"][3] = math.nan
    rest = [i for i in range(12) if i != 3]
    per_row = ("logprobs", "mask", "rewards", "group_ids", "old_logprobs", "ref_logprobs")
    without = data | {k: data[k][rest] for k in per_row}
    for name in CASES:
        a = trew.preset(name).loss(TokenBatch.from_padded(**full))
        b = trew.preset(name).loss(TokenBatch.from_padded(**without))
        assert torch.allclose(a.coefficients[rest], b.coefficients)
        assert a.coefficients[3].abs().sum() == 0


def test_dapo_drops_groups_without_signal_from_gradient_and_denominators():
    data = make(6)
    data["rewards"][:4] = 1.0
    rest = data | {k: data[k][4:] for k in ("logprobs", "mask", "rewards", "group_ids", "old_logprobs", "ref_logprobs")}
    a, b = (trew.preset("dapo").loss(TokenBatch.from_padded(**d)) for d in (data, rest))
    assert torch.allclose(a.coefficients[4:], b.coefficients)
    assert a.coefficients[:4].abs().sum() == 0
    assert a.metrics["zero_signal_share"] == (1.0, 3.0)


def test_dynamic_sampling_judges_correctness_not_the_shaped_reward():
    data = make(7)
    data["rewards"][:4] = torch.tensor([1.0, 0.9, 0.8, 1.0], dtype=F64)  # all correct, lengths punished
    data["correct"] = data["rewards"] > 0.5
    out = trew.preset("dapo").loss(TokenBatch.from_padded(**data))
    assert out.advantages[:4].abs().sum() == 0
    without = trew.preset("dapo", dynamic_sampling=False).loss(TokenBatch.from_padded(**data))
    assert without.advantages[:4].abs().sum() > 0


def test_overlong_filtering_and_punishment():
    data = make(8)
    truncated = data["mask"].sum(1) == LENGTH
    out = trew.preset("dapo", overlong_filtering=True).loss(TokenBatch.from_padded(**data, truncated=truncated))
    assert out.coefficients[truncated].abs().sum() == 0
    batch = TokenBatch.from_padded(**data)
    plain = trew.preset("dapo").prepare(batch).advantages
    shaped = trew.preset("dapo", overlong_cache=3).prepare(batch).advantages
    assert not torch.allclose(plain, shaped)
    with pytest.raises(ConfigError, match=r"overlong_cache: got 8, accepts at most .* 7"):
        trew.preset("dapo", overlong_cache=8).prepare(batch)


def test_truncated_importance_scales_the_coefficients():
    data = make(9)
    mu = data["old_logprobs"] - torch.where(torch.arange(LENGTH) % 2 == 0, math.log(1.5), math.log(8.0))
    objective = trew.preset("grpo", beta=0.0)
    plain = objective.loss(TokenBatch.from_padded(**data)).coefficients
    corrected = objective.replace(correction=TruncatedImportance(cap=2.0))
    got = corrected.loss(TokenBatch.from_padded(**data, rollout_logprobs=mu)).coefficients
    factor = torch.where(torch.arange(LENGTH) % 2 == 0, 1.5, 2.0)
    assert torch.allclose(got, plain * factor)
    with pytest.raises(DataError, match="rollout_logprobs"):
        corrected.loss(TokenBatch.from_padded(**data))


def test_metrics_are_sums_and_counts():
    data = make(10)
    out = trew.preset("grpo").loss(TokenBatch.from_padded(**data))
    ratio = (data["logprobs"] - data["old_logprobs"]).exp()[data["mask"]].detach()
    total, count = out.metrics["ratio"]
    assert count == data["mask"].sum()
    assert total == pytest.approx(ratio.sum().item())
    assert out.metrics["clip_share"][0] > 0
    high, low = out.metrics["clip_share_high"][0], out.metrics["clip_share_low"][0]
    assert high + low == out.metrics["clip_share"][0]


REFUSED = [
    ("grop", {}, r"got 'grop'.*did you mean 'grpo'"),
    ("grpo", {"epsilon_high": 0.3}, r"objective.epsilon_high: grpo has no such setting.*eps_high"),
    ("grpo", {"eps_low": "0.2"}, r"objective.eps_low: got '0.2'"),
    ("grpo", {"eps_low": -0.2}, r"eps_low: got -0.2"),
    ("grpo", {"beta": float("nan")}, r"beta"),
    ("grpo", {"beta": -1.0}, r"beta: got -1.0"),
    ("grpo", {"kl": "k4"}, r"kl: got 'k4', accepts 'k1', 'k2' or 'k3'"),
    ("grpo", {"ddof": 2}, r"ddof: got 2"),
    ("trw-triangular", {"w0": 1.5}, r"w0: got 1.5, accepts a number from 0 to 1"),
    ("dapo", {"dynamic_sampling": 1}, r"dynamic_sampling: got 1"),
]


@pytest.mark.parametrize(("name", "overrides", "message"), REFUSED)
def test_bad_presets_are_refused_with_what_they_accept(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        trew.preset(name, **overrides)


def test_bad_batches_are_refused():
    data = make(0)
    with pytest.raises(DataError, match=r"old_logprobs: got shape \(12, 6\), accepts \(12, 7\)"):
        TokenBatch.from_padded(**(data | {"old_logprobs": data["old_logprobs"][:, 1:]}))
    with pytest.raises(DataError, match="rewards: got None"):
        TokenBatch.from_padded(**(data | {"rewards": None}))
    with pytest.raises(DataError, match="ref_logprobs: got None; beta"):
        trew.preset("grpo").loss(TokenBatch.from_padded(**(data | {"ref_logprobs": None})))
    with pytest.raises(ConfigError, match="max_length: got None"):
        trew.preset("dr-grpo").loss(TokenBatch.from_padded(**(data | {"max_length": None})))
    infinite = data["rewards"].clone()
    infinite[0] = math.inf
    with pytest.raises(DataError, match="got inf"):
        trew.preset("grpo").loss(TokenBatch.from_padded(**(data | {"rewards": infinite})))
