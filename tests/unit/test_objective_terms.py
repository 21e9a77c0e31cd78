"""Ratios, divergences, corrections, the entropy bonus and the loss around them: limits, edges, what is refused."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import trew
from trew import TokenBatch
from trew.errors import ConfigError, DataError
from trew.objective.adjust import EntropyAdvantage, WhitenTokens
from trew.objective.correction import (
    GeometricMask,
    MaskedImportance,
    OffPolicySequenceMask,
    TruncatedImportance,
    off_policy_sequences,
)
from trew.objective.covariance import ClipCov, CovariancePenalty, covariance, tokens_of
from trew.objective.covariance import _seed_of as covariance_seed
from trew.objective.divergence import KL, SequenceSquare, kl_derivative, kl_value
from trew.objective.entropy_bonus import EntropyBonus
from trew.objective.preference import trpa_loss
from trew.objective.probability import Distance, ProbabilityMask, binary_kl, binary_tv
from trew.objective.ratio import ClippedGeometricRatio, bounded_exp, log_ratio, token_ratio
from trew.objective.shaping import SoftOverlong
from trew.objective.trw import RareTokenBoost
from trew.objective.weight import LogClip, MeanRatioClip, Unclipped

F64 = torch.float64


def f(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def step(log_ratio, **fields) -> TokenBatch:
    """Sequences of one group whose tokens have these log-ratios to the old policy, which gives each 1/e, or less where
    the policy would give more than 1."""
    rows = torch.tensor(log_ratio, dtype=F64)
    mask = fields.get("mask", torch.ones_like(rows))
    old = -float(rows[mask.bool()].clamp(min=1.0).max())
    data = {"mask": mask, "group_ids": torch.zeros(len(rows), dtype=torch.int64),
            "old_logprobs": torch.full_like(rows, old)}  # fmt: skip
    if not fields.keys() & {"advantages", "rewards"}:
        fields["advantages"] = torch.zeros(len(rows), dtype=F64)
    return TokenBatch.from_padded(**({"logprobs": (rows + old).requires_grad_()} | data | fields))


def test_log_ratios_stop_at_twenty():
    assert bounded_exp(f(-30, -1, 0, 1, 30)).log().tolist() == pytest.approx([-20, -1, 0, 1, 20])
    far = {"ref_logprobs": f(-1, -1), "logprobs": f(29, -31)}
    assert kl_value(**far, estimator="k1").tolist() == [20, -20]
    assert kl_value(**far, estimator="k2").tolist() == [200, 200]
    assert kl_value(**far).tolist() == pytest.approx([19, math.exp(20) - 21])
    assert kl_derivative(**far, estimator="k1").tolist() == [1, 1]
    assert kl_derivative(**far, estimator="k2").tolist() == [20, -20]
    assert kl_derivative(**far).tolist() == pytest.approx([1, 1 - math.exp(20)])


def test_nothing_but_the_log_probability_has_a_gradient():
    l, m = f(-0.5, -1.5).requires_grad_(), f(-1, -1)
    mask, ids = torch.tensor([True, True]), torch.tensor([0, 0])
    for value in (
        token_ratio(l, anchor_logprobs=m), kl_value(l, ref_logprobs=m), kl_derivative(l, ref_logprobs=m),
        binary_tv(l, anchor_logprobs=m), binary_kl(l, anchor_logprobs=m), covariance(l, advantages=m, mask=mask),
        off_policy_sequences(l, behaviour_logprobs=m, advantages=m, mask=mask, sequence_ids=ids, size=1),
    ):  # fmt: skip
        assert not value.requires_grad


def test_ratio_of_clipped_tokens():
    band = ClippedGeometricRatio(eps_low=0.5, eps_high=0.25)
    batch = step([[1.0, -1.0]], advantages=f(1))
    assert band(batch).log().tolist() == pytest.approx([-0.375] * 2)
    assert band(batch.replace(advantages=f(-1, -1))).log().tolist() == pytest.approx([0.25] * 2)
    assert band(batch.replace(advantages=f(0, 0))).log().tolist() == pytest.approx([0.25] * 2)  # as for A < 0


def test_log_clip_on_the_edge():
    def gate(log_r: float, a: float) -> float:
        return LogClip(eps_low=0.5, eps_high=0.25)(f(1), advantages=f(a), batch=step([[log_r]])).item()

    assert [gate(r, 1.0) for r in (0.25, 0.26, -9.0)] == [1, 0, 1]
    assert [gate(r, -1.0) for r in (-0.5, -0.51, 9.0)] == [1, 0, 1]
    assert [gate(r, 0.0) for r in (9.0, -9.0)] == [1, 1]


def test_mean_ratio_over_loss_tokens_only():
    mask = torch.tensor([[1, 1, 0]])
    batch = step([[math.log(1.5), 0.0, math.log(9.0)]], mask=mask)
    ratio = log_ratio(batch).exp()
    gate = MeanRatioClip(eps_low=0.25, eps_high=0.25)
    assert gate(ratio, advantages=f(1, 1), batch=batch).tolist() == [1, 1]
    assert MeanRatioClip(0.25, 0.24)(ratio, advantages=f(1, 1), batch=batch).tolist() == [0, 0]
    assert gate.surrogate(ratio, advantages=f(2, 2), batch=batch).tolist() == pytest.approx([2.5, 2.5])


def test_squared_log_ratio_of_a_sequence_counts_once():
    term = SequenceSquare(tau=0.5)
    batch = step([[1.0, 2.0, 7.0], [0.5, 0.0, 0.0]], mask=torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert term.derivative(batch).tolist() == [1.5, 1.5, 0.25]
    assert term.value(batch).tolist() == [1.125, 1.125, 0.0625]  # 0.25 * 9 / 2 tokens; 0.25 * 0.25
    assert (SequenceSquare(0.0).active, term.active) == (False, True)


def test_what_a_kl_term_looks_at():
    assert KL(0.1).needs == ("ref_logprobs",)
    assert KL(0.1, anchor="rollout").needs == ("rollout_logprobs",)
    assert KL(0.1, "k3-corrected").needs == ("ref_logprobs",)
    assert KL(0.1, "k3-corrected", behaviour="rollout").needs == ("ref_logprobs", "rollout_logprobs")
    assert KL(0.1, behaviour="rollout").needs == ("ref_logprobs",)
    assert (KL().active, KL(1e-9).active) == (False, True)
    batch = step([[0.5]], ref_logprobs=f(-2)[None], rollout_logprobs=f(-3)[None])
    # pi -0.5, old -1, ref -2, mu -3
    assert KL(2.0, "k1").value(batch).tolist() == [3]
    assert KL(2.0, "k1", anchor="rollout").value(batch).tolist() == [5]
    assert KL(2.0, "k1").of_rollout(batch).tolist() == [2]
    assert KL(2.0, "k3-corrected").derivative(batch).tolist() == pytest.approx([2 * math.exp(0.5) * 1.5])
    sampler = KL(2.0, "k3-corrected", behaviour="rollout")
    assert sampler.derivative(batch).tolist() == pytest.approx([2 * math.exp(2.5) * 1.5])
    assert sampler.value(batch).tolist() == pytest.approx([2 * math.exp(2.5) * (math.exp(-1.5) + 0.5)])
    masked = batch.replace(mask=torch.tensor([False]))
    assert KL(2.0, "k1").of_rollout(masked).tolist() == [0]


def test_entropy_bonus_at_its_target():
    fixed, adaptive = EntropyBonus(0.1), EntropyBonus(0.1, target=0.5, step=0.25)
    assert (EntropyBonus().active, fixed.active, EntropyBonus(target=0.5).active) == (False, True, True)
    assert (fixed.applies(9.0), EntropyBonus().applies(0.0)) == (True, False)
    assert [adaptive.applies(h) for h in (0.4, 0.5, 0.6)] == [True, True, False]
    assert EntropyBonus(0.0, target=0.5).applies(0.1) is False
    assert [adaptive.after(h).coefficient for h in (0.5, 0.6)] == [0.35, 0.0]
    assert EntropyBonus(0.9, target=0.5, step=0.25).after(0.1) == EntropyBonus(1.0, target=0.5, step=0.25)
    assert fixed.after(0.0) is fixed
    assert EntropyBonus(0.5).loss(f(1, 3), token_weights=f(0.25, 0.75)).item() == -1.25
    assert fixed.needs == ("entropies",)


def test_probabilities_that_reach_one():
    assert binary_tv(f(0.0), anchor_logprobs=f(math.log(0.25))).item() == pytest.approx(0.75)
    assert binary_kl(f(0.0), anchor_logprobs=f(0.0)).item() == 0
    sure = binary_kl(f(0.0), anchor_logprobs=f(math.log(0.5))).item()  # 1 - pi counts as 1e-12
    assert sure == pytest.approx(0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - math.log(1e-12)))


def test_rare_tokens_are_boosted_up_to_a_limit():
    batch = step([[0.0, 0.0]], entropies=f(4, 1)[None])
    boost = RareTokenBoost(Unclipped(), lam=0.5, a_max=2.0, rarity="entropy", h_max=2.0)

    def w(component: RareTokenBoost, a: float) -> list[float]:
        return component(f(1, 1), advantages=f(a, a), batch=batch).tolist()

    assert [w(boost, a) for a in (9, 2, 1, 0, -1)] == [[1.5, 1.25], [1.5, 1.25], [1.25, 1.125], [1, 1], [1, 1]]
    rare = 1 - math.exp(-1)  # both have probability 1/e under the old policy
    moved = step([[1.0, 0.0]])  # what has become likely was rare
    by_old = RareTokenBoost(Unclipped(), lam=0.5)(f(1, 1), advantages=f(1, 1), batch=moved)
    assert by_old.tolist() == pytest.approx([1 + 0.5 * rare] * 2)
    assert boost.needs == ("entropies",)
    assert RareTokenBoost(Unclipped()).needs == ()
    assert RareTokenBoost(ProbabilityMask(), rarity="entropy").needs == ("rollout_logprobs", "entropies")


@dataclass(frozen=True)
class Quarter(Distance):
    def __call__(self, logprobs: torch.Tensor, *, anchor_logprobs: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logprobs, 0.25)


def test_a_distance_of_exactly_delta_is_inside():
    batch = step([[0.5, 0.0, -0.5]], rollout_logprobs=f(-1, -1, -1)[None])
    r = log_ratio(batch).exp()

    def w(a: float, **settings: float) -> list[float]:
        return ProbabilityMask(Quarter(), **settings)(r, advantages=f(a, a, a), batch=batch).tolist()

    assert w(1, delta=0.25) == w(-1, delta=0.25) == [1, 1, 1]
    assert (w(1, delta=0.24), w(-1, delta=0.24), w(0, delta=0.24)) == ([0, 1, 1], [1, 1, 0], [1, 1, 1])
    assert w(-1, delta=0.24, cap=1.0) == pytest.approx([math.exp(-0.5), 1, 0])


def test_covariance_over_loss_tokens_only():
    mask = torch.tensor([True, True, False])
    cov = covariance(f(-1, -3, 50), advantages=f(1, 3, 50), mask=mask)
    assert cov.tolist()[:2] == [-1, -1]
    assert cov[2].item() == 48 * 52
    assert covariance(f(-1, -3), advantages=f(1, 3), mask=torch.tensor([False, False])).tolist() == [-1, -9]
    assert [tokens_of(share, mask) for share in (0.0, 0.49, 0.5, 0.99, 1.0)] == [1, 1, 1, 1, 2]


def test_covariance_terms_at_share_zero_and_one():
    batch = step([[0.5, -0.5, 0.0]], advantages=f(1, 2, 3)[None], mask=torch.tensor([[1, 1, 1]]))
    assert not CovariancePenalty(share=0.0).active
    assert not CovariancePenalty(penalty=0.0).active
    assert CovariancePenalty(1e-9, 1e-9).active
    assert CovariancePenalty(0.5, 1.0).value(batch).tolist() == [0.25, 0.25, 0]
    assert CovariancePenalty(0.5, 1.0).derivative(batch).tolist() == [0.5, -0.5, 0]
    few = batch.replace(mask=torch.tensor([True, False, False]))
    assert CovariancePenalty(0.5, 1.0).value(few).tolist() == [0.25, 0, 0]
    far = step([[30.0, -30.0]], advantages=f(1, 1)[None])
    assert CovariancePenalty(1.0, 1.0).value(far).tolist() == [20, 20]
    off = ClipCov(share=0.0)
    assert off(f(1, 1, 1), advantages=batch.advantages, batch=batch).tolist() == [1, 1, 1]


def test_clip_cov_stays_strictly_between_its_bounds():
    batch = step([[0.0, -2.0]], advantages=f(3, 1)[None])  # cov = 1 * 1 at both
    for low, high, silent in ((0.5, 1.0, 0), (1.0, 2.0, 0), (0.5, 2.0, 2)):
        gate = ClipCov(share=1.0, cov_low=low, cov_high=high, eps_low=0.9)
        w = gate(f(1, 1), advantages=batch.advantages, batch=batch)
        assert (w == 0).sum() == silent
        value = gate.surrogate(f(1, 1), advantages=batch.advantages, batch=batch)
        assert value.tolist() == ([0, 0] if silent else [3, 1])
    cut = ClipCov(share=1.0, cov_low=0.5, cov_high=2.0, eps_high=0.5)  # what PPO clips keeps the clip's value
    assert cut.surrogate(f(2, 1), advantages=batch.advantages, batch=batch).tolist() == [4.5, 0]


def test_clip_cov_draws_anew_for_other_completions_and_the_same_in_any_order():
    """One of the same 8 candidates in all batches: each is drawn in an eighth of the batches."""
    gate, drawn = ClipCov(share=1 / 8, cov_low=-9.0, cov_high=9.0), torch.zeros(8)
    advantages, g = torch.arange(8.0), torch.Generator().manual_seed(1)
    for _ in range(800):
        batch = step([[-(k**1.3) / 4] for k in range(8)], advantages=advantages,
                     rollout_logprobs=-torch.rand(8, 1, generator=g))  # fmt: skip
        w = gate(torch.ones(8), advantages=advantages, batch=batch)
        drawn += w == 0
    assert int(drawn.sum()) == 800
    assert ((drawn - 100).square() / 100).sum() < 26.1  # chi-square with 7 degrees of freedom, p = 0.0005
    order = torch.randperm(8, generator=g)
    other = gate(torch.ones(8), advantages=advantages[order], batch=batch.select(order))
    assert torch.equal(other, w[order])


def test_clip_cov_draws_by_lengths_and_rewards_where_the_sampler_s_log_probs_are_cut():
    g, found = torch.Generator().manual_seed(1), set()
    for _ in range(100):
        lengths = torch.randint(1, 40, (8, 1), generator=g)
        rewards = torch.randint(0, 2, (8,), generator=g).double()
        mask = torch.arange(40)[None] < lengths
        batch = step([[0.0] * 40] * 8, rewards=rewards, mask=mask)
        # A ninth completion without a loss, whose reward lies between the others.
        more = step([[0.0] * 40] * 9, rewards=torch.cat([rewards, f(0.5)]), mask=torch.cat([mask, mask[:1] & False]))
        seed = covariance_seed(batch, 3)
        found.add(seed)
        assert covariance_seed(more, 3) == seed
        assert covariance_seed(batch, 4) == seed + 1
        assert covariance_seed(batch.replace(rewards=rewards - 3), 3) == seed
        assert covariance_seed(batch.select(torch.randperm(8, generator=g)), 3) == seed
        assert covariance_seed(batch.replace(rewards=torch.stack((rewards, rewards), 1)), 3) != seed
    assert len(found) > 90


def test_corrections_on_their_bounds():
    log2 = math.log(2)
    batch = step([[0.0, 0.0]], rollout_logprobs=f(-1 - log2, -1 + log2)[None], advantages=f(-1))  # kappa 2 and 1/2
    kappa = (2.0 - 1e-9, 2.0 + 1e-9, 0.5 - 1e-9, 0.5 + 1e-9)
    assert MaskedImportance(kappa[2], kappa[1], "token")(batch).tolist() == pytest.approx([2, 0.5])
    assert MaskedImportance(kappa[3], kappa[1], "token")(batch).tolist() == pytest.approx([2, 0])
    assert MaskedImportance(0.0, kappa[0], "token")(batch).tolist() == pytest.approx([0, 0.5])
    assert MaskedImportance(0.0, 1.0)(batch).tolist() == [1, 1]  # product exactly 1
    assert MaskedImportance(1.0, 3.0)(batch).tolist() == [1, 1]
    assert TruncatedImportance(0.75, 1.5)(batch).tolist() == pytest.approx([1.5, 0.75])
    assert TruncatedImportance(2.0, 3.0, "sequence")(batch).tolist() == [2, 2]
    stale = step([[-0.5, -0.5]], advantages=f(-1))  # drift against the old policy: exactly 0.5
    assert OffPolicySequenceMask(0.5)(stale).tolist() == [1, 1]
    assert OffPolicySequenceMask(0.49)(stale).tolist() == [0, 0]
    assert OffPolicySequenceMask(0.49)(stale.replace(advantages=f(0, 0))).tolist() == [1, 1]
    fresh = stale.replace(rollout_logprobs=stale.policy)  # the sampler's numbers go before the old policy's
    assert OffPolicySequenceMask(0.49)(fresh).tolist() == [1, 1]


def test_what_a_correction_cuts_is_counted():
    log2 = math.log(2)
    batch = step([[0.0, 0.0]], rollout_logprobs=f(-1 - log2, -1 + log2)[None], advantages=f(-1))  # kappa 2 and 1/2
    shares = {
        TruncatedImportance(0.0, 1.5): 0.5, TruncatedImportance(0.75, 1.5): 1.0, TruncatedImportance(0.0, 2.1): 0.0,
        MaskedImportance(0.75, 3.0, "token"): 0.5, MaskedImportance(0.0, 0.9): 1.0, GeometricMask(0.9, 1.1): 0.0,
        GeometricMask(1.1, 1.2): 1.0,
    }  # fmt: skip
    for rule, share in shares.items():
        objective = trew.preset("grpo", beta=0.0).replace(correction=(rule,))
        assert objective.corrected_share(batch) == share, rule
        assert objective.corrected_share(batch.replace(old_logprobs=None)) is None  # there is nothing to compare
    assert trew.preset("grpo", beta=0.0).corrected_share(batch) is None


def test_a_geometric_mean_on_its_bounds():
    even = step([[0.0, 0.0]], rollout_logprobs=f(-1.5, -0.5)[None])  # kappa e^(1/2) and e^(-1/2), mean exactly 1
    for low, high, kept in ((1.0, 1.5, 1), (0.5, 1.0, 1), (1.01, 1.5, 0), (0.5, 0.99, 0)):
        expected = [kept * math.exp(0.5), kept * math.exp(-0.5)]
        assert GeometricMask(low, high)(even).tolist() == pytest.approx(expected)


def test_a_correction_as_a_part_of_a_sequence_s_ratio():
    batch = step([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], rollout_logprobs=torch.full((2, 3), -1.0, dtype=F64))
    batch = batch.replace(mask=torch.tensor([True, True, False, True, False, False]))
    factor = f(2, 0.25, 9, 0, 9, 9)
    token = [math.log(0.5)] * 3 + [math.log(1e-8)] * 3
    assert TruncatedImportance().log_of_sequence(factor, batch=batch).tolist() == pytest.approx(token)
    assert OffPolicySequenceMask().log_of_sequence(factor, batch=batch).tolist() == pytest.approx(token)
    whole = MaskedImportance().log_of_sequence(f(2, 2, 2, 0, 0, 0), batch=batch)  # the sequence's already
    assert whole.tolist() == pytest.approx([math.log(2)] * 3 + [math.log(1e-8)] * 3)


def test_entropy_advantage_takes_the_smaller_bonus():
    batch = step([[0.0, 0.0]], entropies=f(1.0, 4.0)[None])
    assert EntropyAdvantage(alpha=0.5, kappa=2.0)(f(3, -3), batch=batch).tolist() == [3.5, -1.5]


def test_whitening_over_loss_tokens_only():
    batch = step([[0.0, 0.0, 0.0]], mask=torch.tensor([[1, 1, 1]])).replace(mask=torch.tensor([True, True, False]))
    assert WhitenTokens(ddof=0)(f(1, 3, 50), batch=batch).tolist() == [-1, 1, 0]
    assert WhitenTokens()(f(1, 3, 50), batch=batch).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5), 0])


def test_right_answers_are_told_from_wrong_ones_by_what_is_known():
    given = {"advantages": f(1, -1)}
    for log_r, by_sign, by_answer in ((math.log(0.5), [2, 1], [1, 2]), (math.log(2), [0.5, 0.5], [0.5, 0.5])):
        batch = step([[log_r], [log_r]], **given)  # w r = 1 for right ones, min(r, 1) for wrong ones
        assert trew.preset("topr").loss(batch).weights[:, 0].tolist() == pytest.approx(by_sign)
        for known in ({"correct": torch.tensor([False, True])}, {"rewards": f(0, 1)}):
            batch = step([[log_r], [log_r]], **given, **known)
            assert trew.preset("topr").loss(batch).weights[:, 0].tolist() == pytest.approx(by_answer)


def test_a_token_without_advantage_counts_as_wrong_where_nothing_else_is_known():
    batch = step([[math.log(0.5)]], advantages=f(0))
    assert trew.preset("topr").loss(batch).weights.item() == pytest.approx(1)


def test_punishment_up_to_the_whole_length():
    batch = step([[0.0, 0.0]], rewards=f(1), max_length=2)
    assert SoftOverlong(2)(batch).tolist() == [-1]
    assert SoftOverlong(1)(batch).tolist() == [-1]
    with pytest.raises(ConfigError, match=r"^overlong_cache: got 3, accepts at most the longest completion allowed, 2"):
        SoftOverlong(3)(batch)
    with pytest.raises(ConfigError, match=r"^max_length: got None"):
        SoftOverlong(1)(batch.replace(max_length=None))


def test_preferences_among_one_completion_and_none():
    batch = step([[0.5]], ref_logprobs=f(-0.5)[None])  # z = 0, and one token for the trust region
    k3 = math.exp(-0.5) - 0.5
    loss = trpa_loss(batch, levels=torch.tensor([1]), anchor=0.25)
    assert loss.item() == pytest.approx(math.log(2) + 0.25 * k3)
    for d, bounded in ((30.0, 19.0), (-30.0, math.expm1(20) - 20)):  # log-ratios stop at twenty here, too
        far = step([[d]], ref_logprobs=f(min(d - 1, 0.0))[None])
        assert trpa_loss(far, levels=torch.tensor([1]), anchor=0.25).item() == pytest.approx(
            math.log(2) + 0.25 * bounded
        )
    empty = batch.replace(mask=torch.tensor([False]))
    assert trpa_loss(empty, levels=torch.tensor([1]), anchor=0.25).item() == 0


@pytest.mark.parametrize("name", ["rloo", "reinforce-pp", "grpo"])
def test_given_advantages_need_nothing_that_leads_to_advantages(name):
    objective = trew.preset(name, beta=0.0 if name == "grpo" else 0.1)
    assert objective.loss(step([[0.0]], advantages=f(2))).advantages.tolist() == [[2]]
    with pytest.raises(DataError, match=r"^ref_logprobs: got None"):
        trew.preset(name, beta=0.1).loss(step([[0.0], [0.0]], rewards=f(0, 1)))


@dataclass(frozen=True)
class GroupWeight(Unclipped):
    scope: ClassVar = "group"


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_what_looks_at_more_than_a_sequence_is_not_shown_a_part(scope):
    objective = trew.preset("clip-cov")
    if scope == "group":
        objective = trew.preset("lite-ppo").replace(weight=GroupWeight())
    assert objective.scope == scope
    prepared = objective.prepare(step([[0.0, 0.0], [0.0, 0.0]], rewards=f(0, 1)))
    objective.loss(prepared)
    with pytest.raises(DataError, match=r"must see the whole step at once: got 2 of its 4 loss tokens"):
        objective.loss(prepared.select(torch.tensor([0])))


def test_unscored_sequences_leave_the_step_whatever_filters_there_are():
    batch = step([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], rewards=f(0, 1, math.nan))
    out = trew.preset("lite-ppo").loss(batch)
    assert out.batch.denominators == dataclasses.replace(out.batch.denominators, sequences=2, tokens=4, groups=1)
    assert out.advantages.tolist()[2] == [0, 0]
    assert out.batch.token_weights.tolist() == [0.25] * 4 + [0] * 2
    assert out.coefficients[0].tolist() == pytest.approx([-math.sqrt(0.5) / 4] * 2)


def test_sequences_without_a_baseline_leave_the_step_where_one_is_needed():
    fields = {"rewards": f(1, 1, 0), "baselines": f(math.nan, 0.25, 0.5)}
    remax = trew.preset("remax").loss(step([[0.0, 0.0]] * 3, **fields))
    assert remax.advantages[:, 0].tolist() == [0, 0.75, -0.5]
    assert (remax.batch.denominators.sequences, remax.batch.denominators.tokens) == (2, 4)
    assert remax.coefficients[:, 0].tolist() == [0, 0.1875, -0.125]
    other = trew.preset("lite-ppo").loss(step([[0.0, 0.0]] * 3, **fields))
    assert other.batch.denominators.sequences == 3


def test_names_that_are_not_there():
    with pytest.raises(
        ConfigError, match=r"^objective.preset: got 'dapoo' .did you mean 'dapo'.., accepts reinforce, "
    ):
        trew.preset("dapoo")
    with pytest.raises(
        ConfigError, match=r"^objective.ddof: rloo has no such setting.* accepts eps_low, eps_high; and"
    ):
        trew.preset("rloo", ddof=0)
    with pytest.raises(ConfigError, match="accepts none of its own; and as every objective beta, kl, "):
        trew.preset("opo", ddof=0)
    for name, value in (("correction_low", 0.5), ("correction_high", 5.0), ("opsm_delta", 0.25)):
        with pytest.raises(
            ConfigError, match=f"^objective.{name}: got {value}, but correction = 'none' has no such bound"
        ):
            trew.preset("grpo", **{name: value})
    assert trew.preset("grpo", correction="tis+opsm", opsm_delta=0.25, correction_low=0.5).correction == (
        TruncatedImportance(0.5, 2.0), OffPolicySequenceMask(0.25),
    )  # fmt: skip
