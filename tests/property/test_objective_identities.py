"""One objective written as another: the trust-region view as a fact, and what each setting turns off.

Each identity is checked on random ragged batches, off-policy enough that every branch is taken; "exact" ones to the
last bit of the coefficients, in float32 and float64, the others to 1e-7 of the largest coefficient.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import trew
from trew import Objective, TokenBatch
from trew.objective.aggregate import SequenceMeanTokenMean, TokenMean
from trew.objective.capped import Capped, Flipped
from trew.objective.probability import Distance, ProbabilityMask
from trew.objective.smooth import Sech2
from trew.objective.trw import Triangular
from trew.objective.weight import Clip, DualClip

LENGTH = 9
DTYPES = (torch.float32, torch.float64)


def make(seed: int, dtype: torch.dtype, *, rows: int = 24, size: int = 6, spread: float = 0.4, **changes) -> TokenBatch:
    """Ragged, groups of ``size`` with right and wrong answers; ratios up to about e^(±3 spread)."""
    g = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, LENGTH, generator=g, dtype=dtype)

    lengths = torch.randint(1, LENGTH + 1, (rows,), generator=g)
    logprobs = -torch.rand(rows, LENGTH, generator=g, dtype=dtype) * 3 - 0.01
    rewards = torch.randint(0, 2, (rows,), generator=g).to(dtype)
    rewards[::size], rewards[1::size] = 1.0, 0.0
    data = {
        "logprobs": logprobs,
        "mask": torch.arange(LENGTH)[None] < lengths[:, None],
        "rewards": rewards,
        "group_ids": torch.arange(rows) // size,
        "old_logprobs": (logprobs - noise(spread)).clamp(max=-1e-3),  # a probability
        "rollout_logprobs": (logprobs - noise(spread)).clamp(max=-1e-3),
        "ref_logprobs": (logprobs - noise(0.3)).clamp(max=-1e-3),
        "entropies": torch.rand(rows, LENGTH, generator=g, dtype=dtype) * 2,
        "score_norms": 0.1 - logprobs,
        "truncated": torch.zeros(rows, dtype=torch.bool),
        "max_length": LENGTH,
    }
    return TokenBatch.from_padded(**(data | changes))


def coefficients(objective: Objective, batch: TokenBatch) -> torch.Tensor:
    return objective.loss(batch).coefficients


def of(name: str, **settings) -> Objective:
    return trew.preset(name, **settings)


# name -> (one way, another way): equal to the last bit.
EXACT = {
    "the tent with full sides is clip-higher": lambda: (
        of("trw-triangular", w0=1.0, w2=1.0),
        of("grpo", eps_high=0.28, beta=0.0),
    ),
    "the tent with full sides and equal bounds is PPO's clip": lambda: (
        of("trw-triangular", w0=1.0, w2=1.0, eps_high=0.2),
        of("grpo", beta=0.0),
    ),
    "with a token mean it is DAPO's loss": lambda: (
        of("trw-triangular", w0=1.0, w2=1.0, aggregate="token-mean", dynamic_sampling=True),
        of("dapo"),
    ),
    "the gradient-preserving clip that preserves nothing": lambda: (
        of("ce-gppo", beta1=0.0, beta2=0.0),
        of("dual-clip"),
    ),
    "full weight outside: no trust region": lambda: (
        of("trw-triangular", w0=1.0, w2=1.0, w_out=1.0, aggregate="token-mean"),
        of("kl-cov", penalty=0.0),
    ),
    "the two-sided clip is dual clip": lambda: (
        of("two-sided", beta=0.0, dynamic_sampling=False),
        of("dual-clip", cap=4.0),
    ),
    "dual clip without its bound": lambda: (
        of("dual-clip", cap=math.inf),
        of("grpo", beta=0.0, aggregate="token-mean"),
    ),
    "rare-token boost of 0": lambda: (of("trw-entropy", lam=0.0), of("trw-triangular")),
    "GSPO-token with one advantage per sequence": lambda: (of("gspo-token"), of("gspo")),
    "all tokens selected": lambda: (of("high-entropy-tokens", share=1.0), of("dapo")),
    "entropy advantage of 0": lambda: (
        of("entropy-advantage", alpha=0.0),
        of("grpo", beta=0.0, aggregate="token-mean"),
    ),
    "nothing pruned": lambda: (of("cppo", pruning=0.0), of("grpo")),
    "no token drawn": lambda: (of("clip-cov", share=0.0, eps_low=0.2, eps_high=0.2), of("dual-clip", cap=math.inf)),
    "no residual": lambda: (of("kimi", tau=0.0), of("reinforce", baseline="group")),
    "no pull back": lambda: (of("dro", tau=0.0), of("reinforce", baseline="group", aggregate="token-mean")),
    "M2PO without a bound": lambda: (of("m2po", tau=math.inf), of("kl-cov", penalty=0.0)),
    "a band in probabilities that holds all": lambda: (of("prime-rl-ipo", delta=1.0), of("prime-rl", delta=1.0)),
    "Dr. GRPO with a token mean and groups without signal left out": lambda: (
        of("dr-grpo", aggregate="token-mean"),
        of("maxrl").replace(advantage=of("dr-grpo").advantage),
    ),
    "blocks as large as the batch": lambda: (
        of("token-mean-local", microbatch=1000),
        of("grpo", beta=0.0, aggregate="token-mean"),
    ),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_identities(name, dtype):
    one, other = EXACT[name]()
    for seed in range(5):
        batch = make(seed, dtype)
        a, b = one.loss(batch), other.loss(batch)
        assert torch.equal(a.coefficients, b.coefficients)
        assert torch.equal(a.advantages, b.advantages)
        assert a.coefficients.abs().max() > 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tent_is_the_clip_at_its_very_edges(dtype):
    ratio = torch.tensor([0.8, 1.0, 1.28, 0.8 - 1e-6, 1.28 + 1e-6, 1e-6, 1e6], dtype=dtype).repeat(3)
    advantages = torch.tensor([1.0, 0.0, -1.0], dtype=dtype).repeat_interleave(7)
    batch = make(0, dtype)  # not read by these weights
    tent, clip = Triangular(w0=1.0, w2=1.0, w_out=0.0), Clip(0.2, 0.28)
    assert torch.equal(tent(ratio, advantages=advantages, batch=batch), clip(ratio, advantages=advantages, batch=batch))


CLOSE = {
    "blocks of one sequence are the sequence mean": lambda: (
        of("token-mean-local", microbatch=1),
        of("grpo", beta=0.0),
    ),
    "pass@1 is the z-score with the population deviation": lambda: (
        of("pass-at-k", k=1),
        of("grpo", beta=0.0, ddof=0, aggregate="token-mean"),
    ),
    "a ratio capped at infinity is no trust region": lambda: (of("cispo", cap=1e30), of("kl-cov", penalty=0.0)),
    "GPG is REINFORCE with the group's mean, averaged over tokens": lambda: (
        of("reinforce", baseline="group", aggregate="seq-mean-token-mean"),
        of("gpg").replace(keep=()),
    ),
    "DPPO without a bound is importance weighting against the sampler": lambda: (
        of("dppo-tv", delta=1.0),
        of("aipo", cap=1e30).replace(advantage=of("dppo-tv").advantage),
    ),
    "a band of all ratios is importance weighting against the sampler": lambda: (
        of("rollout-is", eps_low=2.0, eps_high=math.inf),
        of("aipo", cap=1e30),
    ),
    "prime-rl without its pull is DPPO": lambda: (
        of("prime-rl", penalty=0.0).replace(keep=()),
        of("dppo-tv", delta=0.2),
    ),
}


@pytest.mark.parametrize("name", CLOSE)
def test_identities_up_to_rounding(name):
    one, other = CLOSE[name]()
    for seed in range(5):
        batch = make(seed, torch.float64)
        a, b = coefficients(one, batch), coefficients(other, batch)
        assert (a - b).abs().max() <= 1e-7 * b.abs().max()
        assert b.abs().max() > 1e-4


@pytest.mark.parametrize("size", [2, 6])
def test_leave_one_out_is_group_centring_times_g_over_g_minus_1(size):
    batch = make(1, torch.float64, size=size)
    a = of("reinforce", baseline="leave-one-out").loss(batch).advantages
    b = of("reinforce", baseline="group").loss(batch).advantages
    assert torch.allclose(a, b * size / (size - 1), rtol=1e-12, atol=0)


def test_a_token_baseline_of_equal_energies_is_the_group_s_mean():
    """Completions of one length: each position compares the whole group."""
    batch = make(1, torch.float64, mask=torch.ones(24, LENGTH, dtype=torch.bool))
    batch = batch.replace(score_norms=torch.full_like(batch.logprobs, 0.3))
    a, b = (objective.loss(batch).advantages for objective in (of("otb"), of("dr-grpo")))
    assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)


def test_one_token_sequences_make_every_ratio_level_equal():
    changes = {"mask": torch.arange(LENGTH)[None] < torch.ones(24, 1)}
    batch = make(2, torch.float64, **changes)
    token = of("grpo", beta=0.0)
    for other in (
        of("gspo", eps_low=0.2, eps_high=0.2),
        of("rloo", beta=0.0).replace(advantage=token.advantage),
        of("grpo-s", eps_high=0.2, dynamic_sampling=False).replace(advantage=token.advantage),
    ):
        a, b = coefficients(other, batch), coefficients(token, batch)
        assert (a - b).abs().max() <= 1e-12


def test_a_trust_region_in_ratios_is_ppos():
    """DPPO whose distance is |r - 1| stops exactly the tokens that PPO clips."""

    class RatioDistance(Distance):
        def __call__(self, logprobs, *, anchor_logprobs):
            return ((logprobs - anchor_logprobs).exp() - 1).abs()

        def equation(self):
            return "|r - 1|"

    batch = make(3, torch.float64)
    batch = batch.replace(old_logprobs=batch.rollout_logprobs)
    ppo = of("dppo-tv").replace(weight=Clip(0.2, 0.2))
    dppo = of("dppo-tv").replace(weight=ProbabilityMask(RatioDistance(), delta=0.2))
    assert torch.equal(coefficients(ppo, batch), coefficients(dppo, batch))


def test_a_band_stops_what_a_trust_region_stops_for_either_sign():
    """In probabilities it is DPPO's mask, in ratios PPO's clip, of A and of -A together."""
    batch = make(4, torch.float64)
    batch = batch.replace(advantages=torch.ones_like(batch.logprobs))
    for band, region in ((of("prime-rl-ipo", delta=0.1), of("dppo-tv", delta=0.1).weight),
                         (of("rollout-is", eps_high=0.28), Clip(0.2, 0.28))):  # fmt: skip
        r = band.ratio(batch)
        both = [region(r, advantages=sign * batch.advantages, batch=batch) for sign in (1.0, -1.0)]
        w = band.weight(r, advantages=batch.advantages, batch=batch)
        assert torch.equal(w, torch.minimum(*both))
        assert 0 < w.mean() < 1


@pytest.mark.parametrize("tokens", ["growing", "all"])
def test_a_bound_on_the_second_moment_holds_with_as_few_dropped_as_can_be(tokens):
    for seed in range(5):
        out = of("m2po", tau=0.04, tokens=tokens).loss(make(seed, torch.float64))
        kept, log_r = out.weights > 0, out.ratios.log()
        bounded = out.batch.padded_mask
        bounded = bounded & (out.advantages * log_r > 0) if tokens == "growing" else bounded
        squares = (log_r**2)[bounded & kept]
        dropped = (log_r**2)[bounded & ~kept]
        assert squares.mean() <= 0.04
        assert len(dropped)
        assert torch.cat([squares, dropped.min()[None]]).mean() > 0.04
        assert squares.max() < dropped.min()


def test_weights_of_others_as_functions_of_ratio_and_advantage():
    r = torch.logspace(-3, 3, 2001, base=math.e, dtype=torch.float64)
    batch = make(0, torch.float64)  # not read by these weights
    for sign in (1.0, -1.0):
        a = torch.full_like(r, sign)
        tau = 1.0 if sign > 0 else 1.05
        sech2 = 1 / torch.cosh(tau * (r - 1) / 2) ** 2
        assert torch.allclose(Sech2()(r, advantages=a, batch=batch), sech2, atol=1e-12)
        assert torch.allclose(Capped(5.0)(r, advantages=a, batch=batch), (5 / r).clamp(max=1))
        unclipped = Clip(0.2, 0.2)(r, advantages=a, batch=batch)
        dual = DualClip(0.2, 0.2, 3.0)(r, advantages=a, batch=batch)
        assert torch.equal(dual, unclipped * ~((r > 3) & (sign < 0)))
        inside = unclipped > 0
        flipped = Flipped(cap=1e30)(r, advantages=a, batch=batch) * r
        assert torch.allclose(flipped[inside], (1 / r if sign > 0 else r)[inside])


@pytest.mark.parametrize("name", ["sapo"])
def test_a_weight_is_the_derivative_of_its_surrogate(name):
    weight = of(name).weight
    batch = make(0, torch.float64)
    r = torch.linspace(0.05, 4, 500, dtype=torch.float64, requires_grad=True)
    for sign in (1.0, -1.0):
        a = torch.full_like(r, sign).detach()
        (slope,) = torch.autograd.grad(weight.surrogate(r, advantages=a, batch=batch).sum(), r)
        assert torch.allclose(slope, weight(r.detach(), advantages=a, batch=batch) * a)


# ---- what a normaliser optimises


def expected_push(objective: Objective, *, p: float, size: int, times=lambda right: 1.0) -> float:
    """E[ (1/G) sum_i A_i d log pi_i / dp ] over groups of ``size`` binary answers with success rate p, exactly."""
    total = 0.0
    for right in range(size + 1):
        rewards = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
        batch = TokenBatch.from_padded(
            logprobs=torch.zeros(size, 1, dtype=torch.float64), mask=torch.ones(size, 1), rewards=rewards,
            group_ids=torch.zeros(size, dtype=torch.int64), max_length=1,
        )  # fmt: skip
        advantages = objective.replace(keep=()).prepare(batch).advantages
        score = torch.where(rewards > 0, 1 / p, -1 / (1 - p))
        chance = math.comb(size, right) * p**right * (1 - p) ** (size - right)
        total += chance * times(right) * float((advantages * score).mean())
    return total


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_an_advantage_optimises(p, size):
    """Dr. GRPO: (1 - 1/G) p; RLOO: p; MaxRL: the log-likelihood, truncated at order G - 1; grpo-passk:
    1 - (1 - p)^G, over G."""
    assert expected_push(of("dr-grpo"), p=p, size=size) == pytest.approx(1 - 1 / size)
    assert expected_push(of("reinforce", baseline="leave-one-out"), p=p, size=size) == pytest.approx(1)
    # The chance that one of the group is right, whose slope is spread over the group's answers.
    lead = expected_push(of("grpo-passk", scale="none"), p=p, size=size)
    assert lead == pytest.approx((1 - p) ** (size - 1))
    # The mean that is taken off holds the answer itself: one order less than the group's size.
    assert expected_push(of("maxrl"), p=p, size=size) == pytest.approx((1 - (1 - p) ** (size - 1)) / p)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
@pytest.mark.parametrize(("size", "k"), [(4, 1), (4, 2), (8, 2), (8, 5)])
def test_pass_at_k_without_its_scale_has_the_slope_of_pass_at_k(p, size, k):
    """(1 - p)^(k - 1), up to the factor 1 - k/G of a baseline that holds the answer itself: the chance that one of k is
    right has k times this slope, and each answer has its share of it."""

    def scale(right: int) -> float:
        miss = math.comb(size - right, k) / math.comb(size, k)
        return math.sqrt(miss * (1 - miss))

    push = expected_push(of("pass-at-k", k=k), p=p, size=size, times=scale)
    assert push == pytest.approx((1 - p) ** (k - 1) * (1 - k / size))


WRITTEN = {
    "1": lambda p, k, size: 1,
    "(1 − (1 − p)^(G−1)) / p": lambda p, k, size: (1 - (1 - p) ** (size - 1)) / p,
    "(1 − p)^(G−1)": lambda p, k, size: (1 - p) ** (size - 1),
    "(1 − p)^(k−1)": lambda p, k, size: (1 - p) ** (k - 1),
    "k (1 − p)^(k−1)": lambda p, k, size: k * (1 - p) ** (k - 1),
}
"""Slopes as docs/objectives.md writes them."""


@pytest.mark.parametrize(
    ("name", "settings"), [("dr-grpo", {}), ("maxrl", {}), ("grpo-passk", {"scale": "none"}), ("pass-at-k", {"k": 3})]
)
def test_the_page_says_what_an_advantage_optimises(name, settings):
    """Of groups so large that it makes little difference whether a baseline holds the answer itself."""
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    table = page.partition("| advantage | F(p) |")[2].partition("\n\n")[0]
    [slope] = [row.split(" | ")[2] for row in table.splitlines() if f"`{name}`" in row]
    p, size, k = 0.05, 100, settings.get("k", 1)

    def scale(right: int) -> float:
        miss = math.comb(size - right, k) / math.comb(size, k)
        return math.sqrt(miss * (1 - miss)) if name == "pass-at-k" else 1.0

    push = expected_push(of(name, **settings), p=p, size=size, times=scale)
    assert push == pytest.approx(WRITTEN[slope](p, k, size), rel=0.04)


def test_large_groups_of_z_scores_climb_the_arcsine():
    """The slope of 2 arcsin(sqrt p) is 1 / sqrt(p (1 - p))."""
    for p in (0.2, 0.5, 0.7):
        assert expected_push(of("grpo", beta=0.0), p=p, size=100) == pytest.approx(1 / math.sqrt(p * (1 - p)), rel=0.03)


def test_aggregates_by_name_are_the_presets_own():
    assert of("grpo").aggregate == SequenceMeanTokenMean()
    assert of("grpo", aggregate="token-mean").aggregate == TokenMean()
