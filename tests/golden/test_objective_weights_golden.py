"""Numbers worked by hand, or from the papers: trust regions, as tables over (r, A) through the public surface."""

from __future__ import annotations

import math

import pytest
import torch

import trew
from oracle.single import column, g_of, table, w_of
from trew import TokenBatch

F64 = torch.float64
NEAR = {"abs": 1e-9}
PLAIN = {"beta": 0.0}
ALWAYS = {"dynamic_sampling": False}

# r, A, eps_high -> value of J, w, coefficient
CLIP_TABLE = [
    (0.9 / 0.5, 1, 0.2, 1.2, 0, 0), (0.7 / 0.5, 1, 0.2, 1.2, 0, 0), (1.25, 1, 0.2, 1.2, 0, 0), (1.0, 1, 0.2, 1.0, 1, 1),
    (0.9, 1, 0.2, 0.9, 1, 0.9), (0.2 / 0.5, 1, 0.2, 0.4, 1, 0.4), (0.9 / 0.5, -1, 0.2, -1.8, 1, -1.8),
    (0.7 / 0.5, -1, 0.2, -1.4, 1, -1.4), (1.25, -1, 0.2, -1.25, 1, -1.25), (1.0, -1, 0.2, -1.0, 1, -1),
    (0.9, -1, 0.2, -0.9, 1, -0.9), (0.2 / 0.5, -1, 0.2, -0.8, 0, 0), (1.8, 1, 0.28, 1.28, 0, 0),
    (1.4, 1, 0.28, 1.28, 0, 0), (1.25, 1, 0.28, 1.25, 1, 1.25), (1.0, 1, 0.28, 1.0, 1, 1), (0.9, 1, 0.28, 0.9, 1, 0.9),
    (0.4, 1, 0.28, 0.4, 1, 0.4),
]  # fmt: skip


@pytest.mark.parametrize(("r", "a", "eps_high", "value", "w", "coefficient"), CLIP_TABLE)
@pytest.mark.parametrize("name", ["grpo", "ppo-clip", "dapo"])
def test_clip(name, r, a, eps_high, value, w, coefficient):
    settings = {"eps_low": 0.2, "eps_high": eps_high, "beta": 0.0, "dynamic_sampling": False}
    out = table(name, ratio=[r], advantage=[a], settings=settings)
    assert -out.loss.item() == pytest.approx(value, abs=1e-12)
    assert out.weights.item() == w
    assert out.coefficients.item() == pytest.approx(coefficient, abs=1e-12)
    assert out.ratios.item() == pytest.approx(r)


@pytest.mark.parametrize(
    ("name", "limit", "r", "value", "w"),
    [("dual-clip", {"cap": 3.0}, 2.0, -2.0, 1), ("dual-clip", {"cap": 3.0}, 3.5, -3.0, 0),
     ("dual-clip", {"cap": 3.0}, 5.0, -3.0, 0), ("two-sided", {"delta": 4.0}, 3.5, -3.5, 1),
     ("two-sided", {"delta": 4.0}, 5.0, -4.0, 0)],
)  # fmt: skip
def test_second_cap_for_negative_advantages(name, limit, r, value, w):
    settings = limit | PLAIN | ALWAYS
    out = table(name, ratio=[r], advantage=[-1.0], settings=settings)
    assert (-out.loss.item(), out.weights.item()) == (pytest.approx(value), w)
    positive = table(name, ratio=[r], advantage=[1.0], settings=settings)
    assert (-positive.loss.item(), positive.weights.item()) == (pytest.approx(1.2), 0)


@pytest.mark.parametrize("a", [1.0, -1.0])
def test_cispo(a):
    ratio = [0.4, 1.0, 1.8, 6.0]
    assert g_of("cispo", ratio=ratio, advantage=a) == pytest.approx([0.4, 1.0, 1.8, 5.0])
    band = {"floor": 0.8, "cap": 1.2}
    assert g_of("cispo", ratio=ratio, advantage=a, settings=band) == pytest.approx([0.8, 1.0, 1.2, 1.2])
    assert w_of("cispo", ratio=ratio, advantage=a) == pytest.approx([1, 1, 1, 5 / 6])
    assert g_of("aipo", ratio=ratio, advantage=a) == pytest.approx([0.4, 1.0, 1.8, 5.0])


@pytest.mark.parametrize(
    ("r", "a", "value", "w"),
    [(1.0, 1, 2.0, 1.0), (1.8, 1, 2.7598979245, 0.8556387861), (0.4, 1, 1.4173747751, 0.9151369618),
     (1.8, -1, None, 0.8424462321), (0.4, -1, None, 0.9069878557), (5.0, -1, None, 0.0582230387)],
)  # fmt: skip
def test_sapo(r, a, value, w):
    out = table("sapo", ratio=[r], advantage=[a])
    assert out.weights.item() == pytest.approx(w, **NEAR)
    if value is not None:
        assert -out.loss.item() == pytest.approx(value, **NEAR)


def test_sapo_coefficient():
    assert g_of("sapo", ratio=[1.8], advantage=1.0) == pytest.approx([1.5401498149], **NEAR)


@pytest.mark.parametrize(
    ("a", "phi"),
    [(1.0, [0.5929834898, 1.1204222676, 1.0, 0.5020428603, 0.1991482735, 0.0019745566]),
     (-1.0, [0.0700263917, 0.3397852286, 1.0, 1.2415931140, 1.0826822659, 0.1586401393])],
)  # fmt: skip
def test_vespo(a, phi):
    got = g_of("vespo", ratio=[0.25, 0.5, 1.0, 1.5, 2.0, 4.0], advantage=a)
    assert got == pytest.approx(phi, **NEAR)


@pytest.mark.parametrize(
    ("r", "a", "w"),
    [(1.0, 1, 0.4155292893), (1.0, -1, 0.1844707107), (1.8, 1, 0.2224194761), (0.4, 1, 0.1508356660),
     (1.2, 1, 0.3496141716), (1.2, -1, 0.1602218940), (1.0, 0, 0.3)],
)  # fmt: skip
def test_trw_logistic(r, a, w):
    assert w_of("trw-logistic", ratio=[r], advantage=[a]) == pytest.approx([w], **NEAR)


def test_trw_logistic_normalised_and_directional():
    """w'(1, 0) = 1; a move back towards 1 is not damped when the weight looks at the direction."""
    assert w_of("trw-logistic", ratio=[1.0], advantage=[0.0], settings={"normalized": True}) == pytest.approx([1.0])
    flat = {"normalized": True, "gamma": 0.0, "eta": 0.0, "directional": True}
    got = w_of("trw-logistic", ratio=[2.0, 0.5, 0.5, 2.0], advantage=[1.0, -1.0, 1.0, -1.0], settings=flat)
    assert got == pytest.approx([0.4, 0.4, 1.0, 1.0])  # 2 sigma(-2 log 2) = 2 / (1 + 4)


TENT = [(1.14, 1, 0.75), (1.28 - 1e-12, 1, 0.5), (1.3, 1, 0.0), (0.7, 1, 1.0), (0.9, -1, 0.75),
        (0.8 + 1e-12, -1, 0.5), (0.7, -1, 0.0), (1.3, -1, 1.0), (1.0, 1, 1.0), (1.0, -1, 1.0)]  # fmt: skip


@pytest.mark.parametrize(("r", "a", "w"), TENT)
def test_trw_triangular(r, a, w):
    assert w_of("trw-triangular", ratio=[r], advantage=[a]) == pytest.approx([w], abs=1e-9)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_symmetric_tent_ignores_the_sign(sign):
    got = w_of("trw-triangular", ratio=[1.14, 0.9, 1.3, 0.7], advantage=sign, settings={"symmetric": True})
    assert got == pytest.approx([0.75, 0.75, 0.0, 0.0])


def test_trw_entropy_boosts_rare_tokens_of_good_answers():
    """(1 + 0.5 (1 - p) min(A, 1)) times the tent, with the probability under the policy that sampled."""
    for p, a, r, want in [(0.1, 1.0, 1.0, 1.45), (0.1, 0.4, 1.0, 1.18), (0.1, 3.0, 1.0, 1.45), (0.1, -1.0, 1.0, 1.0),
                          (0.9, 1.0, 1.0, 1.05), (0.1, 1.0, 1.14, 1.45 * 0.75)]:  # fmt: skip
        got = w_of("trw-entropy", ratio=[r], advantage=[a], old_probability=p)
        assert got == pytest.approx([want], **NEAR)


def test_ce_gppo_bounds_the_push_of_clipped_tokens():
    """beta2 (1 + eps_high) A above and beta1 (1 - eps_low) A below, however far r has gone; the dual clip is 3."""
    got = g_of("ce-gppo", ratio=[1.1, 1.3, 50.0, 0.7], advantage=1.0)
    assert got == pytest.approx([1.1, 1.2, 1.2, 0.7])
    got = g_of("ce-gppo", ratio=[0.9, 0.7, 0.01, 1.3, 2.9, 3.1], advantage=-1.0)
    assert got == pytest.approx([0.9, 0.6, 0.6, 1.3, 2.9, 0.0])


@pytest.mark.parametrize(
    ("name", "mu", "pi", "a", "divergence"),
    [("dppo-tv", 1e-4, 1e-2, 1.0, 0.0099), ("dppo-kl", 1e-4, 1e-2, 1.0, 0.0094888188),
     ("dppo-tv", 0.99, 0.80, -1.0, 0.19), ("dppo-kl", 0.99, 0.80, -1.0, 0.1810049606)],
)  # fmt: skip
def test_dppo_masks_by_divergence(name, mu, pi, a, divergence):
    for side, w in ((-1e-9, 0.0), (1e-9, 1.0)):
        settings = {"delta": divergence + side}
        out = table(name, ratio=[pi / mu], advantage=[a], old_probability=mu, settings=settings)
        assert out.weights.item() == w
        back = table(name, ratio=[pi / mu], advantage=[-a], old_probability=mu, settings=settings)
        assert back.weights.item() == 1.0
    default = table(name, ratio=[pi / mu], advantage=[a], old_probability=mu).weights.item()
    ppo = table("grpo", ratio=[pi / mu], advantage=[a], old_probability=mu, settings=PLAIN).weights.item()
    assert (default, ppo) == ((1.0, 0.0) if mu < pi else (0.0, 1.0))


def test_prime_rl_masks_by_total_variation_and_pulls_back():
    """Weight of the mask at delta 0.2; the penalty's derivative 2e-3 log r stands beside it."""
    for mu, pi, a, masked in [(0.3, 0.6, 1.0, True), (0.3, 0.45, 1.0, False), (0.6, 0.3, -1.0, True),
                              (0.6, 0.3, 1.0, False)]:  # fmt: skip
        rewards = torch.tensor([0.5 + a / 2, 0.5 - a / 2], dtype=F64)  # advantages a/2 and -a/2
        l = column([math.log(pi), math.log(0.5)])
        old = column([math.log(mu), math.log(0.5)])
        batch = TokenBatch.from_padded(
            logprobs=l.requires_grad_(), mask=torch.ones(2, 1, dtype=torch.bool), group_ids=torch.zeros(2).long(),
            rewards=rewards, rollout_logprobs=old, old_logprobs=old,
        )  # fmt: skip
        got = trew.preset("prime-rl").loss(batch).coefficients[0].item() * 2
        r = pi / mu
        assert got == pytest.approx((0 if masked else r * a / 2) - 2e-3 * math.log(r), **NEAR)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bands_stop_moves_in_both_directions(sign):
    """0.8 < r < 1.2 and |pi - 0.3| <= 0.1, whatever the sign of A; the report's loss is sg(r) A log pi."""
    got = table("rollout-is", ratio=[0.79, 0.81, 1.19, 1.21], advantage=sign, old_probability=0.3)
    assert got.weights[:, 0].tolist() == [0.0, 1.0, 1.0, 0.0]
    value = (0.81 * math.log(0.3 * 0.81) + 1.19 * math.log(0.3 * 1.19)) * sign / 4
    assert -got.loss.item() == pytest.approx(value, **NEAR)
    got = table("prime-rl-ipo", ratio=[0.66, 0.67, 1.33, 1.34], advantage=sign, old_probability=0.3, settings=
                {"penalty": 0.0})  # fmt: skip
    assert got.weights[:, 0].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert -got.loss.item() == pytest.approx((0.67 + 1.33) * sign / 4, **NEAR)
    dppo = w_of("dppo-tv", ratio=[0.66, 1.34], advantage=sign, old_probability=0.3, settings={"delta": 0.1})
    assert dppo == ([1.0, 0.0] if sign > 0 else [0.0, 1.0])  # it lets a move back pass


def test_m2po_drops_the_fewest_tokens_that_bound_the_mean():
    """Squares of the tokens that grow: 0.01, 0.04, 0.09, 0.25 with means 0.01, 0.025, 0.0467, 0.0975. The two that
    move back are not counted, however far they are."""
    log_r, a = [0.1, 0.2, 0.3, -0.5, -2.0, 2.0], [1.0, 1.0, 1.0, -1.0, 1.0, -1.0]
    ratio = [math.exp(x) for x in log_r]
    for tau, kept in ((0.04, 2), (0.05, 3), (0.0974, 3), (0.0976, 4), (math.inf, 4), (0.009, 0)):
        got = w_of("m2po", ratio=ratio, advantage=a, settings={"tau": tau})
        assert got == [1.0] * kept + [0.0] * (4 - kept) + [1.0, 1.0], tau
    # Of all tokens: 0.01, 0.04, 0.09, 0.25, 4, 4 with means up to 0.0975, 0.878, 1.398; equal ones leave together.
    for tau, kept in ((0.0974, 3), (0.5, 4), (0.9, 4), (1.4, 6)):
        got = w_of("m2po", ratio=ratio, advantage=a, settings={"tau": tau, "tokens": "all"})
        assert got == [1.0] * kept + [0.0] * (6 - kept), tau


def test_dro_pulls_back_by_the_log_ratio():
    """C = (A - tau log r) / n, of the value A log pi - tau/2 (log r)^2."""
    out = table("dro", ratio=[2.0, 0.5], advantage=[1.0, -1.0], old_probability=0.25, settings={"tau": 0.5})
    log2 = math.log(2)
    assert (2 * out.coefficients[:, 0]).tolist() == pytest.approx([1 - 0.5 * log2, -1 + 0.5 * log2], **NEAR)
    assert -2 * out.loss.item() == pytest.approx(-log2 + 3 * log2 - 0.5 * log2**2, **NEAR)


def test_aspo_turns_the_ratio_around_for_good_answers():
    settings = ALWAYS
    got = g_of("aspo", ratio=[0.2, 0.5, 1.1, 1.3], advantage=1.0, settings=settings)
    assert got == pytest.approx([3.0, 2.0, 0.9090909091, 0.0])
    got = g_of("aspo", ratio=[0.5, 0.9, 2.0, 5.0], advantage=-1.0, settings=settings)
    assert got == pytest.approx([0.0, 0.9, 2.0, 3.0])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_topr(level):
    settings = {"level": level}
    for correct, want in ((True, [1.0, 1.0]), (False, [0.4, 1.0])):
        marks = torch.tensor([correct, correct])
        sign = 1.0 if correct else -1.0
        assert g_of("topr", ratio=[0.4, 1.8], advantage=sign, settings=settings, correct=marks) == pytest.approx(want)


# ---------------------------------------------------------------- one completion of two tokens


def pair(name: str, a: float, **settings) -> trew.LossOutput:
    """Log-ratios 0.5 and -0.1."""
    old = torch.tensor([[-2.0, -2.0]], dtype=F64)
    logprobs = old + torch.tensor([[0.5, -0.1]], dtype=F64)
    batch = TokenBatch.from_padded(
        logprobs=logprobs.requires_grad_(), mask=torch.ones(1, 2, dtype=torch.bool), group_ids=torch.tensor([0]),
        advantages=torch.tensor([a], dtype=F64), old_logprobs=old, rollout_logprobs=old,
    )  # fmt: skip
    return trew.preset(name, **settings).loss(batch)


def test_ratios_of_a_completion():
    out = pair("grpo", 1.0, beta=0.0)
    assert out.ratios[0].tolist() == pytest.approx([1.6487212707, 0.9048374180], **NEAR)
    assert (out.weights * out.ratios)[0].tolist() == pytest.approx([0.0, 0.9048374180], **NEAR)
    for name in ("gspo", "gspo-token", "luspo"):
        assert pair(name, 1.0).ratios[0].tolist() == pytest.approx([1.2214027582] * 2, **NEAR)
    assert pair("gspo", 1.0).coefficients.tolist() == [[0.0, 0.0]]
    share = 0.5
    assert pair("gspo", -1.0).coefficients[0].tolist() == pytest.approx([-1.2214027582 * share] * 2, **NEAR)
    assert pair("luspo", -1.0).coefficients[0].tolist() == pytest.approx([-1.2214027582] * 2, **NEAR)
    assert pair("rloo", -1.0, beta=0.0).ratios[0].tolist() == pytest.approx([math.exp(0.4)] * 2)


def test_gmpo_clips_before_the_mean():
    out = pair("gmpo", 1.0)
    assert (out.weights * out.ratios)[0].tolist() == pytest.approx([0.0, 1.1618342427], **NEAR)
    assert -out.loss.item() == pytest.approx(1.1618342427, **NEAR)
    out = pair("gmpo", -1.0)
    assert (out.weights * out.ratios)[0].tolist() == pytest.approx([1.2214027582] * 2, **NEAR)
    assert -out.loss.item() == pytest.approx(-1.2214027582, **NEAR)


def test_grpo_s_gates_the_whole_completion_by_its_mean_ratio():
    """(e^0.5 + e^-0.1) / 2 = 1.2768 is over 1.2: a good answer is silent at 0.2, speaks with its own ratios at 0.28."""
    settings = {"dynamic_sampling": False, "eps_low": 0.2}
    assert pair("grpo-s", 1.0, eps_high=0.2, **settings).coefficients.tolist() == [[0.0, 0.0]]
    for eps_high, w in ((0.2767793443, 0.0), (0.2767793445, 1.0)):
        out = pair("grpo-s", 1.0, eps_high=eps_high, **settings)
        want = [w * 1.6487212707 / 2, w * 0.9048374180 / 2]
        assert out.coefficients[0].tolist() == pytest.approx(want, **NEAR)
    assert -pair("grpo-s", 1.0, eps_high=0.28, **settings).loss.item() == pytest.approx(1.2767793444, **NEAR)
