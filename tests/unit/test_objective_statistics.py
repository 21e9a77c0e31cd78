"""Sums, means, deviations and ranks: unsorted ids, missing values, empty sets, and what lies on a threshold."""

from __future__ import annotations

import math

import pytest
import torch

import trew
from trew import TokenBatch
from trew.errors import DataError
from trew.objective.adjust import WhitenTokens
from trew.objective.advantage import BaselineAdvantage, PerReward, pass_at_k
from trew.objective.baseline import (
    BatchMean,
    Greedy,
    GroupMean,
    LeaveOneOut,
    NoBaseline,
    leave_one_out_mean,
    length_weighted_mean,
)
from trew.objective.entropy_shares import shares_of_peers
from trew.objective.filter import UncutCompletions, high_entropy, largest_in_group, mixed_groups, uneven_groups
from trew.objective.process import process_advantages
from trew.objective.scale import BatchStd, BetaDensity, GroupStd, MeanReward, NoScaling, beta_density
from trew.objective.segments import (
    dense_ids,
    group_mean,
    group_std,
    has_signal,
    positions,
    segment_count,
    segment_mean,
    segment_starts,
    segment_sum,
    standardize,
    to_go,
)
from trew.objective.shaping import SoftOverlong

F64 = torch.float64
NAN = math.nan


def f(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def b(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_segments_in_any_order():
    ids = i(2, 0, 2, 1)
    assert segment_sum(f(1, 2, 4, 8), ids=ids, size=4).tolist() == [2, 8, 5, 0]
    assert segment_count(b(1, 1, 0, 0), ids=ids, size=4).tolist() == [1, 0, 1, 0]
    assert segment_mean(f(1, 2, 4, 8), mask=b(1, 1, 1, 0), ids=ids, size=4).tolist() == [2, 0, 2.5, 0]
    assert dense_ids(i(9, -3, 9, 4))[0].tolist() == [2, 0, 2, 1]
    assert dense_ids(i(9, -3, 9, 4))[1] == 3


def test_single_precision_is_summed_in_double():
    values, zero = torch.tensor([1e8, 1.0, -1e8]), i(0, 0, 0)
    assert segment_mean(values, mask=b(1, 1, 1), ids=zero, size=1).tolist() == pytest.approx([1 / 3])
    assert segment_mean(values, mask=b(1, 1, 1), ids=zero, size=1).dtype == torch.float32
    assert to_go(values, ids=zero, size=1).tolist() == [1.0, 1.0 - 1e8, -1e8]
    assert to_go(values, ids=zero, size=1).dtype == F64


def test_runs_of_a_sorted_stream():
    assert segment_starts(i(0, 0, 2, 2), size=4).tolist() == [0, 2, 2, 4]
    assert segment_starts(i(0, 9, 0, 9, 2, 9)[::2], size=3).tolist() == [0, 2, 2]  # torch warns of strided ids
    assert positions(b(0, 1, 1, 1, 1), ids=i(0, 0, 0, 2, 2), size=4).tolist() == [0, 0, 1, 0, 1]
    assert to_go(f(1, 2, 4, 8), ids=i(0, 0, 2, 2), size=4).tolist() == [3, 2, 12, 8]
    assert to_go(f(3), ids=i(0), size=2).tolist() == [3]
    assert positions(b(1), ids=i(0), size=2).tolist() == [0]
    assert to_go(f(), ids=i().long(), size=2).tolist() == []
    assert positions(b(), ids=i().long(), size=2).tolist() == []


def test_means_and_deviations_of_groups():
    rewards, ids = f(1, 10, NAN, 4, 7, 2), i(8, 3, 8, 8, 5, 3)
    assert group_mean(rewards, group_ids=ids).tolist() == [2.5, 6, 2.5, 2.5, 7, 6]
    one, three = math.sqrt(4.5), math.sqrt(32)
    assert group_std(rewards, group_ids=ids)[[0, 1, 3, 5]].tolist() == pytest.approx([one, three, one, three])
    assert group_std(rewards, group_ids=ids).isnan().tolist() == [False, False, False, False, True, False]
    assert group_std(rewards, group_ids=ids, ddof=0)[[0, 1, 4]].tolist() == [1.5, 4, 0]
    assert group_mean(f(NAN, 1), group_ids=i(0, 1)).isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("low", "high", "signal"),
    [(100, 100 + 5e-5, False), (100, 100 + 2e-4, True), (-100 - 5e-5, -100, False), (-100 - 2e-4, -100, True),
     (1e-3, 1e-3 + 5e-10, False), (1e-3, 1e-3 + 2e-9, True), (0, 5e-13, False), (0, 2e-12, True), (0, 0, False),
     (-1, 1, True), (-1e-3, 0, True)],
)  # fmt: skip
def test_a_spread_above_a_millionth_is_a_signal(low, high, signal):
    rewards = f(low, 5, NAN, high, 5)
    assert has_signal(rewards, group_ids=i(1, 0, 1, 1, 0)).tolist() == [signal, False, signal, signal, False]
    assert has_signal(f(NAN, NAN, 1), group_ids=i(0, 0, 1)).tolist() == [False, False, False]


def test_standardized_where_asked():
    assert standardize(f(1, 3, NAN, 9), where=b(1, 1, 1, 0), ddof=0).tolist() == [-1, 1, 0, 0]
    assert standardize(f(1, 3), where=b(1, 1), ddof=0, std_eps=1.0).tolist() == [-0.5, 0.5]
    assert standardize(f(1, 3), where=b(1, 1)).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert standardize(f(2, 2), where=b(1, 1)).tolist() == [0, 0]
    assert standardize(f(2, 2), where=b(1, 0)).tolist() == [0, 0]


def test_baselines_with_missing_rewards():
    rewards, ids = f(1, NAN, 3, 5, 7), i(4, 4, 4, 4, 1)
    assert leave_one_out_mean(rewards, group_ids=ids)[[0, 2, 3, 4]].tolist() == [4, 3, 2, 7]
    weighted = length_weighted_mean(rewards, lengths=i(3, 9, 1, 0, 0), group_ids=ids)
    assert weighted.tolist() == [1.5, 1.5, 1.5, 1.5, 0]
    two = leave_one_out_mean(f(1, 5), group_ids=i(0, 0))
    assert two.tolist() == [5, 1]


def test_a_signal_is_looked_for_where_the_baseline_is_taken():
    rewards, groups = f(0.1, 0.1, 0.1, 1), i(3, 3, 3, 5)
    batch = batch_of(rewards, groups)
    assert rewards[0] != rewards[:3].mean()  # rounding
    assert BaselineAdvantage(GroupMean())(rewards, batch=batch).tolist() == [0, 0, 0, 0]
    even, groups = f(1, 1, 0, 0), i(3, 3, 5, 5)
    assert BaselineAdvantage(BatchMean())(even, batch=batch_of(even, groups)).tolist() == [0.5, 0.5, -0.5, -0.5]
    assert BaselineAdvantage(NoBaseline())(even, batch=batch_of(even, groups)).tolist() == [1, 1, 0, 0]
    assert BaselineAdvantage(NoBaseline())(f(1, NAN, 0, 0), batch=batch_of(even, groups)).tolist() == [1, 0, 0, 0]
    for all_equal in (f(1, 1, 1, 1), f(-1, -1, -1, -1)):  # a difference over a deviation of 0
        assert BaselineAdvantage(NoBaseline(), BatchStd())(all_equal, batch=batch).tolist() == [0, 0, 0, 0]
    nothing = f(0.1, 0.1, 0.1)
    assert BaselineAdvantage(BatchMean())(nothing, batch=batch_of(nothing, i(0, 1, 2))).tolist() == [0, 0, 0]


def test_what_baselines_and_scales_look_at():
    alone, group, batch = (
        (NoBaseline(), Greedy(), NoScaling(), UncutCompletions(), SoftOverlong(4)),
        (GroupMean(), LeaveOneOut(), GroupStd()),
        (BatchMean(),),
    )
    batch = (BatchMean(), BatchStd(), BetaDensity(), WhitenTokens())
    for components, scope in ((alone, "sequence"), (group, "group"), (batch, "batch")):
        assert {component.scope for component in components} == {scope}


def batch_of(rewards: torch.Tensor | None, group_ids: torch.Tensor, **fields) -> TokenBatch:
    rows = len(group_ids)
    return TokenBatch.from_padded(
        logprobs=torch.full((rows, 2), -1.0, dtype=F64), mask=torch.ones(rows, 2), group_ids=group_ids,
        rewards=rewards, **fields,
    )  # fmt: skip


def test_scales():
    rewards = f(1, 3, 5, NAN)
    batch = batch_of(rewards, i(0, 0, 1, 1))
    assert BatchStd()(rewards, batch=batch).tolist() == [2, 2, 2, 2]
    assert BatchStd(0, 0.5)(rewards, batch=batch).tolist() == pytest.approx([math.sqrt(8 / 3) + 0.5] * 4)
    assert MeanReward()(rewards, batch=batch).tolist() == [2, 2, 5, 5]
    nothing = f(0.3 - 0.1 - 0.2, 0.1 + 0.2 - 0.3, -1, -1)
    assert MeanReward()(nothing, batch=batch).tolist()[2:] == [math.inf, math.inf]
    cancelled = f(1, -1 + 1e-7, 1, -1 + 1e-5)  # a mean of 5e-8 is rounding's, one of 5e-6 is not
    assert MeanReward()(cancelled, batch=batch).tolist() == pytest.approx([math.inf, math.inf, 5e-6, 5e-6])


def test_beta_density_without_spread_and_with_bounds():
    assert beta_density(f(1, 0, 1, 0), group_ids=i(0, 0, 1, 1)).tolist() == pytest.approx([1] * 4)
    assert beta_density(f(1, 0), group_ids=i(0, 0)).tolist() == pytest.approx([1, 1])
    # p = 0.2, 0.3: m = 0.25, v = 0.005, k = 36.5, a = 9.125, b = 27.375: Beta(1 + 73/24, 1 + 73/8)
    p = f(0.2, 0.3)
    alpha, beta = 1 + 73 / 24, 1 + 73 / 8
    norm = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    expected = [math.exp((alpha - 1) * math.log(x) + (beta - 1) * math.log(1 - x) - norm) for x in (0.2, 0.3)]
    assert beta_density(p, group_ids=i(0, 1)).tolist() == pytest.approx(expected)
    assert beta_density(f(0.0, 0.1, 0.0), group_ids=i(0, 1, 2))[0].item() == 1e-6


def test_the_beta_density_is_of_rewards_from_0_to_1():
    for bad in ((-0.5, 1), (0, 1.5)):
        rewards = f(*bad, NAN)
        with pytest.raises(DataError, match=r"^rewards: got .* accepts 0 to 1 here"):
            BetaDensity()(rewards, batch=batch_of(rewards, i(0, 0, 0)))
    nothing = f(NAN, NAN)
    assert BetaDensity()(f(0, 1, NAN), batch=batch_of(f(0, 1, NAN), i(0, 0, 0))).tolist() == pytest.approx([1] * 3)
    assert len(BetaDensity()(nothing, batch=batch_of(nothing, i(0, 0)))) == 2


def test_several_rewards_normalised_one_by_one():
    rewards = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]], dtype=F64)  # z-scores 1 -1 | 1 -1 and -1 1 | 1 -1
    weights = torch.tensor([2.0, 1.0])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    batch = TokenBatch.from_padded(logprobs=torch.full((4, 2), -1.0, dtype=F64), mask=mask, group_ids=i(0, 0, 1, 1),
                                   rewards=rewards, reward_weights=weights, max_length=2)  # fmt: skip
    plain = trew.preset("gdpo", ddof=0).loss(batch).advantages[:, 0]
    assert plain.tolist() == pytest.approx([x / math.sqrt(5) for x in (1, -1, 3, -3)])
    # the punishment for length is a reward of weight 1: -1 and -1/2 | -1 and -1, so -1 1 | 0 0
    punished = trew.preset("gdpo", ddof=0, overlong_cache=2).loss(batch).advantages[:, 0]
    assert punished.tolist() == pytest.approx([0, 0, math.sqrt(2), -math.sqrt(2)], abs=1e-12)
    wide = PerReward(ddof=0, std_eps=0.5)(rewards, batch=batch)  # std 1/2: z-scores are halved, 1 -1 3 -3 -> 1/2 ...
    assert wide.tolist() == pytest.approx([x / (math.sqrt(5) / 2 + 0.5) for x in (0.5, -0.5, 1.5, -1.5)])
    missing = torch.where(torch.tensor([[False], [False], [False], [True]]), NAN, rewards)
    known = PerReward(ddof=0)(missing, batch=batch.replace(reward_weights=None))  # 0 0 0: no spread
    assert known.tolist() == [0, 0, 0, 0]


def test_steps_of_a_sequence_without_reward_and_before_the_first_token():
    a = process_advantages(
        f(1, 3, NAN, 3), step_sequences=i(0, 0, 1, 2), ends=i(0, 2, 1, 2), sequence_ids=i(0, 0, 1, 2, 2),
        group_ids=i(7, 7, 7), ddof=0,
    )  # fmt: skip
    up = (3 - 7 / 3) / math.sqrt(8 / 9)
    assert a.tolist() == pytest.approx([up, up, 0, up, up])
    flat = process_advantages(
        f(1, 1), step_sequences=i(0, 1), ends=i(1, 1), sequence_ids=i(0, 1), group_ids=i(0, 0), std_eps=1.0
    )
    assert flat.tolist() == [0, 0]
    eps = process_advantages(
        f(1, 3), step_sequences=i(0, 1), ends=i(1, 1), sequence_ids=i(0, 1), group_ids=i(0, 0), ddof=0, std_eps=1.0
    )
    assert eps.tolist() == [-0.5, 0.5]


def test_pass_at_k_by_counting():
    # N = 4, one right, k = 2: miss = C(3,2)/C(4,2) = 1/2, s = 1/2; A+ = 1, A- = (1/2 - C(2,1)/C(3,1)) / s = -1/3
    assert pass_at_k(f(1, 0, 0, 0), group_ids=i(3, 3, 3, 3), k=2).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    with_nan = pass_at_k(f(1, NAN, 0, 0, 0), group_ids=i(3, 3, 3, 3, 3), k=2)
    assert with_nan.tolist() == pytest.approx([1, 0, -1 / 3, -1 / 3, -1 / 3])
    assert pass_at_k(f(1, 0), group_ids=i(0, 0), k=3).tolist() == [0, 0]
    assert pass_at_k(f(1, 0), group_ids=i(0, 0), k=2).tolist() == [0, 0]  # one of two is always right
    assert pass_at_k(f(1, 0, 0), group_ids=i(0, 0, 0), k=3).tolist() == [0, 0, 0]
    assert pass_at_k(f(1, 0), group_ids=i(0, 0), k=1).tolist() == [1, -1]
    assert pass_at_k(f(0, 0), group_ids=i(0, 0), k=1).tolist() == [0, 0]


def test_shares_among_peers():
    # set 0: right .6 and .2, wrong .5; set 1: right .3, wrong 1 and .25
    shares = shares_of_peers(
        f(0.6, 0.5, 0.3, 0.2, 1, 0.25), correct=b(1, 0, 1, 1, 0, 0), peers=i(0, 0, 1, 0, 1, 1), size=2
    )
    assert shares.tolist() == pytest.approx([1.5, 1, 1, 0.5, 0.4, 1.6])
    assert shares_of_peers(f(0, 0), correct=b(0, 0), peers=i(0, 0), size=1).tolist() == [1, 1]
    tiny = shares_of_peers(f(0, 3e-8), correct=b(0, 0), peers=i(0, 0), size=1)
    assert tiny.tolist() == pytest.approx([1.5, 0.5])


def test_the_largest_of_each_group():
    values, ids = f(1, 5, NAN, 3, 3, 3, 2), i(9, 2, 2, 9, 9, 2, 9)
    # group 9: 1, 3, 3, 2; group 2: 5, NaN, 3
    assert largest_in_group(values, group_ids=ids, keep=0.5).tolist() == [False, True, False, True, True, False, False]
    assert largest_in_group(values, group_ids=ids, keep=0.25).tolist() == [
        False,
        True,
        False,
        True,
        False,
        False,
        False,
    ]
    assert largest_in_group(values, group_ids=ids, keep=0.51).sum() == 5
    assert largest_in_group(values, group_ids=ids, keep=1.0).tolist() == [True, True, False, True, True, True, True]
    x = torch.tensor(0.7071067811865475, dtype=F64)
    alike = torch.stack([x, torch.nextafter(x, x + 1)])  # what z-scores of two rewards are, rounded
    two = torch.zeros(2, dtype=torch.int64)
    assert largest_in_group(alike, group_ids=two, keep=0.5).tolist() == [True, False]
    assert largest_in_group(alike * torch.tensor([1, 1 + 1e-6]), group_ids=two, keep=0.5).tolist() == [False, True]
    assert largest_in_group(alike[:0], group_ids=two[:0], keep=0.5).tolist() == []
    ten = torch.arange(10, dtype=F64)
    half = largest_in_group(torch.ones(400, dtype=F64), group_ids=torch.arange(400) % 2, keep=0.5)
    assert half.tolist() == [True] * 200 + [False] * 200
    assert largest_in_group(ten, group_ids=torch.zeros(10, dtype=torch.int64), keep=1 - 0.7).sum() == 3  # 3 + 4e-16


def test_tokens_of_high_entropy():
    h, mask = f(0, 4, 1, 3, 2, 99), b(1, 1, 1, 1, 1, 0)
    assert high_entropy(h, mask=mask, share=0.0).tolist() == [False, True, False, False, False, False]
    assert high_entropy(h, mask=mask, share=1.0).tolist() == [True, True, True, True, True, False]
    assert high_entropy(h, mask=mask, share=0.5).tolist() == [False, True, False, True, True, False]
    assert high_entropy(h, mask=mask, share=0.3).tolist() == [False, True, False, True, False, False]  # threshold 2.8
    assert high_entropy(h, mask=mask).tolist() == [False, True, False, False, False, False]  # threshold 3.2
    assert high_entropy(h, mask=b(0, 0, 0, 0, 0, 0)).sum() == 0
    assert high_entropy(f(2), mask=b(1), share=0.5).tolist() == [True]


def test_groups_that_are_kept():
    ids = i(4, 4, 1, 1, 7, 7, 7)
    rewards = f(1, 1, 1, 0, 1, NAN, 0.5)
    assert uneven_groups(batch_of(rewards, ids)).tolist() == [False, False, True, True, True, True, True]
    assert mixed_groups(batch_of(rewards, ids)).tolist() == [False, False, True, True, True, True, True]
    right = b(1, 0, 1, 1, 1, 0, 1)  # in group 7 the only wrong one has no reward
    kept = mixed_groups(batch_of(rewards, ids, correct=right))
    assert kept.tolist() == [True, True, False, False, False, False, False]
    wrong = b(0, 0, 1, 0, 0, 1, 0)
    assert mixed_groups(batch_of(rewards, ids, correct=wrong)).tolist() == [False] * 2 + [True] * 2 + [False] * 3
    given = batch_of(None, ids, advantages=f(0, 0, 1, 0, -1, 0, 0))
    assert uneven_groups(given).tolist() == [False, False, True, True, True, True, True]
    assert mixed_groups(given).tolist() == [False, False, True, True, True, True, True]
    judged = batch_of(None, ids, advantages=f(0, 0, 1, 0, -1, 0, 0), correct=right)
    assert mixed_groups(judged).tolist() == [True, True, False, False, True, True, True]
    hidden = given.replace(mask=given.mask & (given.sequence_ids != 2))
    assert uneven_groups(hidden).tolist() == [False, False, False, False, True, True, True]
