"""What ``Objective`` decides around the mathematics: defaults, which tokens can have a gradient, what it refuses."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
import torch

import trew
from trew import TokenBatch
from trew.errors import ConfigError, DataError

F64 = torch.float64
LENGTH = 7


def make(seed: int = 0, groups: int = 3, size: int = 4) -> dict:
    """A random ragged batch as from_padded takes it, with leaf log-probs in float64; every group has a signal."""
    g = torch.Generator().manual_seed(seed)
    rows = groups * size
    lengths = torch.randint(1, LENGTH + 1, (rows,), generator=g)
    logprobs = -torch.rand(rows, LENGTH, generator=g, dtype=F64) * 3 - 1.5
    rewards = torch.randint(0, 2, (rows,), generator=g).to(F64)
    rewards[::size], rewards[1::size] = 1.0, 0.0
    return {
        "logprobs": logprobs.requires_grad_(),
        "mask": torch.arange(LENGTH)[None] < lengths[:, None],
        "rewards": rewards,
        "group_ids": torch.arange(groups).repeat_interleave(size),
        "old_logprobs": logprobs.detach() + 0.3 * torch.randn(rows, LENGTH, generator=g, dtype=F64),
        "ref_logprobs": logprobs.detach() + 0.2 * torch.randn(rows, LENGTH, generator=g, dtype=F64),
        "entropies": torch.rand(rows, LENGTH, generator=g, dtype=F64),
        "max_length": LENGTH,
    }


def test_old_logprobs_default_to_the_policys_own():
    data = make(2) | {"old_logprobs": None}
    explicit = data | {"old_logprobs": data["logprobs"].detach()}
    a, b = (trew.preset("grpo").loss(TokenBatch.from_padded(**d)) for d in (data, explicit))
    assert torch.equal(a.coefficients, b.coefficients)
    assert a.metrics["ratio"][0] == a.metrics["ratio"][1]


def test_dynamic_sampling_drops_groups_without_signal_from_gradient_and_denominators():
    data = make(6)
    data["rewards"][:4] = 1.0
    rest = data | {k: v[4:] for k, v in data.items() if isinstance(v, torch.Tensor)}
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


WITHOUT_AN_ADVANTAGE = {
    "dr-grpo": ({}, False),
    "grpo": ({}, True),  # KL in the loss
    "rloo": ({}, False),  # KL in the reward is part of the advantage
    "remax": ({"beta": 0.1}, False),
    "kimi": ({}, True),
    "kl-cov": ({}, True),
    "prime-rl": ({}, True),
    "clip-cov": ({}, False),
    "dapo": ({"entropy_bonus": 0.1}, True),
    "gspo": ({"entropy_bonus": 0.1, "entropy_target": 0.9}, True),  # the mean entropy is near 0.5
    "gmpo": ({"entropy_bonus": 0.1, "entropy_target": 0.1}, False),
    "gpg": ({"entropy_target": 0.9}, False),  # starts at 0
}


@pytest.mark.parametrize("name", WITHOUT_AN_ADVANTAGE)
def test_tokens_without_an_advantage_can_have_a_gradient_only_by_another_term(name):
    settings, speaks = WITHOUT_AN_ADVANTAGE[name]
    data = make(3) | {"rollout_logprobs": make(3)["old_logprobs"]}
    advantages = torch.where(torch.arange(12) % 2 == 0, 0.0, 1.0).to(F64)
    objective = trew.preset(name, **settings).replace(keep=())
    batch = objective.prepare(TokenBatch.from_padded(**data | {"rewards": None, "advantages": advantages}))
    may = batch.unpack(objective.has_gradient(batch).to(F64)).bool()
    assert torch.equal(may, data["mask"] & (advantages[:, None] != 0) | (data["mask"] & speaks))
    if not settings.get("entropy_bonus"):
        assert not objective.loss(batch).coefficients[batch.padded_mask][~objective.has_gradient(batch)].any()


def test_bad_batches_are_refused():
    data = make(0)
    with pytest.raises(DataError, match=r"old_logprobs: got shape \(12, 6\), accepts \(12, 7\)"):
        TokenBatch.from_padded(**(data | {"old_logprobs": data["old_logprobs"][:, 1:]}))
    with pytest.raises(DataError, match="rewards: got None"):
        TokenBatch.from_padded(**(data | {"rewards": None}))
    with pytest.raises(DataError, match="ref_logprobs: got None; grpo needs it for its divergence: "):
        trew.preset("grpo").loss(TokenBatch.from_padded(**(data | {"ref_logprobs": None})))
    with pytest.raises(DataError, match="baselines: got None; remax needs it for its advantage"):
        trew.preset("remax").loss(TokenBatch.from_padded(**data))
    with pytest.raises(ConfigError, match="max_length: got None"):
        trew.preset("dr-grpo").loss(TokenBatch.from_padded(**(data | {"max_length": None})))
    with pytest.raises(ConfigError, match=r"overlong_cache: got 8, accepts at most .* 7"):
        trew.preset("dapo", overlong_cache=8).prepare(TokenBatch.from_padded(**data))
    infinite = data["rewards"].clone()
    infinite[0] = math.inf
    with pytest.raises(DataError, match="got inf"):
        trew.preset("grpo").loss(TokenBatch.from_padded(**(data | {"rewards": infinite})))


def test_log_probs_of_a_part_are_widened_and_have_the_shape_of_its_tokens():
    data = make()
    objective = trew.preset("grpo", beta=0.0)
    step = objective.prepare(TokenBatch.from_padded(**data | {"old_logprobs": None}))
    logprobs = data["logprobs"].detach()[data["mask"]].bfloat16().requires_grad_()
    out = objective.loss(step.replace(logprobs=logprobs))
    expected = -objective.loss(step).coefficients[data["mask"]]
    assert out.loss.dtype == out.coefficients.dtype == torch.float32
    assert torch.allclose(out.coefficients[data["mask"]].double(), -expected, rtol=1e-6)
    # As gather() leaves them; with old log-probs beside them they would be broadcast to (N, N).
    with pytest.raises(DataError, match=r"^logprobs: got shape \(\d+, 1\), accepts \(\d+,\)"):
        objective.loss(step.replace(logprobs=logprobs[:, None], old_logprobs=logprobs.detach()))


@pytest.mark.parametrize("axis", ["keep", "shape", "adjust", "prune", "select", "correction", "divergence"])
@pytest.mark.parametrize("chosen", [None, [], trew.objective.adjust.WhitenTokens()])
def test_a_component_outside_a_tuple_is_refused_at_once(axis, chosen):
    fields = {f.name: getattr(trew.preset("grpo"), f.name) for f in dataclasses.fields(trew.Objective)}
    init = inspect.unwrap(trew.Objective.__init__)  # without the tests' own type checker, as a user's program
    with pytest.raises(ValueError, match=f"^{axis}: got .* accepts a tuple of components"):
        init(trew.Objective.__new__(trew.Objective), **fields | {axis: chosen})
