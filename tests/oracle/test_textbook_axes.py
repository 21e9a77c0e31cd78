"""Every preset with every choice that can be combined with it, against the textbook."""

from __future__ import annotations

import random

import pytest
import torch

import tiers
import trew
from oracle.steps import F64, fresh, step_for
from oracle.test_textbook import LIVELY, check
from oracle.textbook import PRESETS, step_loss
from trew import TokenBatch
from trew.errors import ConfigError

CORRECTIONS = {
    "tis": {"correction_high": 1.05},
    "tis-sequence": {"correction_high": 1.1},
    "mis": {"correction_high": 1.5},
    "mis-token": {"correction_high": 1.1},
    "icepop": {"correction_low": 0.9, "correction_high": 1.1},
    "geo-mask": {"correction_low": 0.9, "correction_high": 1.05},
    "opsm": {"opsm_delta": 0.02},
    "tis+opsm": {"opsm_delta": 0.02},
}
KLS = [("k1", "loss"), ("k2", "loss"), ("k3", "loss"), ("k3-corrected", "loss"), ("k1", "reward"), ("k2", "reward"),
       ("k3", "reward"), ("k1", "to-go"), ("k2", "to-go"), ("k3", "to-go")]  # fmt: skip
UNEVEN = ["seq-mean-token-mean"]  # gives the completions of a pair different shares
AGGREGATES = [*UNEVEN, "token-mean", "seq-mean-token-sum", "prompt-mean-token-mean", "constant"]
ROLLOUT_ANCHORED = {name for name, s in PRESETS.items() if s.get("anchor") == "rollout"}


# Nothing can be added to what is not read.
REWARD_BLIND = {"ppo-clip", "grpo-process", "gtpo", "grpo-s", "pass-at-k", "sft", "rft", "online-rft", "opd", "dpo"}
KL_BLIND = REWARD_BLIND | {"gdpo"}  # which would divide a KL in the reward by its own deviation
TO_GO_BLIND = {"ppo-clip", "ppo", "vapo"}
NEAR_ONE = {"bnpo-paper", "maxrl"}  # want rewards of 0 to 1: a penalty must not carry them out of it


def lively(name: str) -> dict:
    return LIVELY.get(name, {})


def with_room(name: str, data: dict, low: float, spread: float) -> dict:
    return data | {"rewards": data["rewards"] * spread + low} if name in NEAR_ONE else data


@pytest.mark.parametrize(("name", "correction"), tiers.thinned(PRESETS, CORRECTIONS, keep=4))
def test_corrections(name, correction):
    data = step_for(name, 21, empty=1, nan=1, mismatch=0.2)
    if name in ROLLOUT_ANCHORED and correction != "opsm":
        with pytest.raises(ConfigError, match="correction"):
            trew.preset(name, correction=correction)
        return
    check(name, data, **lively(name), **CORRECTIONS[correction], correction=correction)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_with_their_own_limits(correction):
    for seed in range(3):
        data = step_for("dapo", seed, mismatch=1.0, off_policy=1.0, groups=5)
        check("dapo", data, correction=correction)


@pytest.mark.parametrize(("name", "divergence"), tiers.thinned(PRESETS, KLS, keep=5))
def test_divergences(name, divergence):
    kl, place = divergence
    if (place == "reward" and name in KL_BLIND) or (place == "to-go" and name in TO_GO_BLIND):
        with pytest.raises(ConfigError, match="kl_place"):
            trew.preset(name, beta=0.2, kl=kl, kl_place=place)
        return
    data = with_room(name, step_for(name, 22, empty=1, nan=1), 0.4, 0.2)
    check(name, data, **(lively(name) | {"beta": 0.2, "kl": kl, "kl_place": place}))


@pytest.mark.parametrize(("name", "aggregate"), tiers.thinned(PRESETS, AGGREGATES, keep=3))
def test_aggregates(name, aggregate):
    if name == "dpo" and aggregate in UNEVEN:
        with pytest.raises(ConfigError, match=r"objective\.aggregate: dpo compares log-ratios of whole completions"):
            trew.preset(name, aggregate=aggregate)
        return
    data = step_for(name, 23, empty=2, nan=1, layout="holes")
    check(name, data, **lively(name), aggregate=aggregate)


@pytest.mark.parametrize("name", PRESETS)
def test_any_combination(name):
    """Several options at once: the order in which they act counts."""
    draw = random.Random(name)
    for seed in range(50, 50 + tiers.examples(12)):
        kl, place = draw.choice(KLS)
        if name in KL_BLIND | NEAR_ONE | TO_GO_BLIND and place != "loss":
            place = "loss"
        chosen = {
            "beta": draw.choice([0.0, 0.15]), "kl": kl, "kl_place": place, "aggregate": draw.choice(AGGREGATES),
            "dynamic_sampling": draw.choice([True, False]), "overlong_filtering": draw.choice([True, False]),
            "overlong_cache": 0 if name in REWARD_BLIND | NEAR_ONE else draw.choice([0, 2, 4]),
        }  # fmt: skip
        if name == "dpo" and chosen["aggregate"] in UNEVEN:
            chosen["aggregate"] = "token-mean"
        correction = "opsm" if name in ROLLOUT_ANCHORED else draw.choice(list(CORRECTIONS))
        chosen |= {"correction": correction} | CORRECTIONS[correction]
        data = step_for(name, seed, groups=4, nan=1, empty=1, mismatch=0.2, layout=draw.choice(["holes", "right"]))
        check(name, data, **(lively(name) | chosen))


@pytest.mark.parametrize("name", PRESETS)
def test_float32_is_the_same_to_its_precision(name):
    data = step_for(name, 31, nan=1, empty=1)
    single = {k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in data.items()}
    double = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in single.items()}
    a, b = (trew.preset(name, **lively(name)).loss(TokenBatch.from_padded(**fresh(d))) for d in (single, double))
    assert (a.loss.dtype, b.loss.dtype) == (torch.float32, F64)
    torch.testing.assert_close(a.coefficients.double(), b.coefficients, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(a.advantages.double(), b.advantages, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PRESETS)
def test_overlong_filtering(name):
    data = step_for(name, 24)
    assert data["truncated"].any()
    check(name, data, **lively(name), overlong_filtering=True)


@pytest.mark.parametrize("name", PRESETS)
def test_overlong_punishment(name):
    if name in REWARD_BLIND:
        with pytest.raises(ConfigError, match="overlong_cache"):
            trew.preset(name, overlong_cache=3)
        return
    check(name, with_room(name, step_for(name, 25), 1.0, 0.0), **lively(name), overlong_cache=3)


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_dynamic_sampling(name, switch):
    data = step_for(name, 26, unmixed=2, nan=1)
    check(name, data, **(lively(name) | {"dynamic_sampling": switch}))
    data["correct"] = torch.arange(len(data["mask"])) % 3 == 0  # says something else than the rewards
    data["correct"][-4:] = True
    check(name, data, **(lively(name) | {"dynamic_sampling": switch}))


def test_a_missing_greedy_answer_takes_its_completions_out():
    data = step_for("remax", 30)
    data["baselines"][2:5] = torch.nan
    check("remax", data, beta=0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_likelihood_of_correct_completions(name):
    data = step_for(name, 28, nan=1, empty=1, layout="holes")
    if data.get("rewards") is None:
        data["rewards"] = data["advantages"] if data["advantages"].dim() == 1 else data["advantages"][:, 0]
    check(name, data, **(lively(name) | {"nll": 0.3}))
    data["correct"] = torch.arange(len(data["mask"])) % 3 == 0  # says something else than the rewards
    check(name, data, **(lively(name) | {"nll": 0.3, "overlong_filtering": True}))


@pytest.mark.parametrize("name", PRESETS)
def test_entropy_bonus(name):
    """Its gradient goes through the entropies that the caller gives; its value is in the loss."""
    data = step_for(name, 27)
    overrides = lively(name) | {"entropy_bonus": 0.05}
    parts = []
    for source in (fresh(data), fresh(data)):
        source["entropies"] = source["entropies"].clone().requires_grad_()
        parts.append(source)
    want = step_loss(name, parts[0], **overrides)
    out = trew.preset(name, **overrides).loss(TokenBatch.from_padded(**parts[1]))
    for field in ("logprobs", "entropies"):
        (a,) = torch.autograd.grad(want.loss, parts[0][field], retain_graph=True)
        (b,) = torch.autograd.grad(out.loss, parts[1][field], retain_graph=True)
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)
        assert a.abs().max() > 1e-4


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "gdpo"])
def test_several_rewards_are_summed_with_their_weights(name):
    if name == "ppo-clip":
        pytest.skip("takes no rewards")
    data = step_for(name, 28, reward_functions=2, nan=2) | {"reward_weights": torch.tensor([1.0, 0.5], dtype=F64)}
    data["rewards"][3, 0] = torch.nan
    if name in ("bnpo-paper", "pass-at-k", "maxrl"):
        data["rewards"] = data["rewards"] / 2
    check(name, data, **lively(name))


@pytest.mark.parametrize("name", list(PRESETS))
def test_given_advantages_are_final(name):
    data = step_for(name, 29)
    g = torch.Generator().manual_seed(0)
    data["advantages"] = torch.randn(data["logprobs"].shape, generator=g, dtype=F64)
    check(name, data, **lively(name))
