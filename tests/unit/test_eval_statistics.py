"""Statistics against numbers worked by hand, against scipy, and against their own promise (coverage)."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from trew.eval.statistics import (
    cluster_interval,
    iqm,
    mean_interval,
    paired_difference,
    pass_at_k,
    stratified_bootstrap,
    wilson,
)


def test_wilson_by_hand():
    # n = 4, 2 correct, z = 1.959964: centre 0.5, half = z sqrt(1/16 + z²/64) / (1 + z²/4) = 0.349942
    assert wilson(2, 4) == pytest.approx((0.5, 0.150036, 0.849964), abs=5e-5)


@pytest.mark.parametrize(("correct", "n"), [(0, 1), (1, 1), (0, 200), (200, 200), (37, 200), (3, 7)])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_wilson_equals_scipy(correct, n, level):
    reference = stats.binomtest(correct, n).proportion_ci(level, method="wilson")
    assert wilson(correct, n, level=level) == pytest.approx((correct / n, reference.low, reference.high), abs=1e-12)


def test_wilson_of_nothing():
    mean, low, high = wilson(0, 0)
    assert math.isnan(mean)
    assert (low, high) == (0.0, 1.0)


@pytest.mark.parametrize("arguments", [(-1, 3), (4, 3)])
def test_wilson_refuses_impossible_counts(arguments):
    with pytest.raises(ValueError, match="not between 0 and n"):
        wilson(*arguments)


def test_cluster_interval_with_fully_correlated_samples_counts_prompts():
    # Every prompt is all right or all wrong: 8 samples say no more than one.
    assert cluster_interval([1.0] * 30 + [0.0] * 70, samples=8) == pytest.approx(wilson(30, 100))


def test_cluster_interval_by_hand():
    # Means 0.25, 0.75, 0.5, 0.5: m = .5, s² = .125/3, n_eff = .25 / (.0416667/4) = 24, capped at 4 prompts x 4 samples.
    assert cluster_interval([0.25, 0.75, 0.5, 0.5], samples=4) == wilson(8, 16)
    # Means 0, 1, .5, .5: s² = .5/3, n_eff = .25 / (.1666667/4) = 6.
    assert cluster_interval([0.0, 1.0, 0.5, 0.5], samples=4) == pytest.approx(wilson(3, 6))


def test_cluster_interval_never_claims_certainty():
    for value in (0.0, 1.0):
        interval = cluster_interval([value] * 20, samples=16)
        assert interval == wilson(value * 20, 20)
        assert interval.high - interval.low > 0.1


def test_cluster_interval_covers_the_truth():
    """95 % intervals hold the true mean in about 95 of 100 experiments with prompts of very unequal difficulty."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        difficulty = rng.beta(0.4, 0.6, 60)  # mean 0.4
        means = rng.binomial(8, difficulty) / 8
        _, low, high = cluster_interval(means, samples=8)
        hits += low <= 0.4 <= high
    assert 925 <= hits <= 975  # binomial(1000, .95) within 3.6 standard deviations


@pytest.mark.parametrize("bad", [[0.5, 1.2], [-0.1], [float("nan")]])
def test_cluster_interval_refuses_values_that_are_no_shares(bad):
    with pytest.raises(ValueError, match="from 0 to 1"):
        cluster_interval(bad, samples=1)


def test_mean_interval_equals_scipy():
    x = [0.3, 1.7, -2.0, 0.4, 0.4]
    reference = stats.ttest_1samp(x, 0).confidence_interval(0.95)
    assert mean_interval(x) == pytest.approx((np.mean(x), reference.low, reference.high))


def test_mean_interval_of_one_and_none():
    assert mean_interval([2.0]).mean == 2.0
    assert math.isnan(mean_interval([2.0]).low)
    assert math.isnan(mean_interval([]).mean)


def test_pass_at_k_counts_subsets():
    """The definition, by listing every subset of 6 completions."""
    for c in range(7):
        right = [True] * c + [False] * (6 - c)
        for k in range(1, 7):
            subsets = list(itertools.combinations(right, k))
            assert pass_at_k(6, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_stable_for_many_completions():
    n, c, k = 10_000, 3, 5_000
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-12)


def test_pass_at_k_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="at least k completions"):
        pass_at_k(4, 1, 5)


def test_iqm_equals_the_trimmed_mean_of_scipy():
    x = np.random.default_rng(1).normal(size=37)
    assert iqm(x) == pytest.approx(stats.trim_mean(x, 0.25))
    assert math.isnan(iqm([]))


def test_stratified_bootstrap_keeps_strata_apart():
    # No spread within a stratum: resampling within strata can change nothing, mixing strata would.
    assert stratified_bootstrap([[0.0] * 5, [1.0] * 5], statistic=np.mean, resamples=50) == (0.5, 0.5, 0.5)
    a = stratified_bootstrap([np.arange(20.0)], resamples=200, seed=3)
    assert a == stratified_bootstrap([np.arange(20.0)], resamples=200, seed=3)
    assert a.low < a.mean < a.high
    with pytest.raises(ValueError, match="one value in each"):
        stratified_bootstrap([[1.0], []])


def test_paired_difference_is_mcnemar_on_binary_values():
    before = [1] * 10 + [0] * 12 + [1] * 3 + [0] * 5
    after = [1] * 10 + [1] * 12 + [0] * 3 + [0] * 5
    r = paired_difference(before, after)
    assert (r.better, r.worse, r.n) == (12, 3, 30)
    assert r.p_value == pytest.approx(stats.binomtest(3, 15).pvalue)
    assert r.difference.mean == pytest.approx(0.3)
    assert 0 < r.difference.low < 0.3 < r.difference.high < 1


def test_paired_difference_by_hand_without_correlation():
    # 2x2 table with every cell 5: rho = 0, both accuracies 0.5 of 20; square-and-add of equal halves: h * sqrt(2).
    before, after = [0] * 10 + [1] * 10, [0] * 5 + [1] * 5 + [0] * 5 + [1] * 5
    half = math.sqrt(2) * (wilson(10, 20).high - 0.5)
    assert paired_difference(before, after).difference == pytest.approx((0.0, -half, half))
    assert paired_difference(before, after).p_value == 1.0


def test_paired_difference_on_shares_equals_the_permutation_test_of_scipy():
    rng = np.random.default_rng(2)
    before = rng.integers(0, 5, 9) / 4
    after = np.clip(before + rng.integers(-1, 3, 9) / 4, 0, 1)
    exact = stats.permutation_test(
        (before, after), lambda x, y, axis: (y - x).mean(axis=axis), permutation_type="samples", n_resamples=np.inf
    ).pvalue  # exact: all 2**9 sign flips
    assert paired_difference(before, after, samples=4).p_value == pytest.approx(exact, abs=0.02)


def test_paired_difference_of_equal_runs():
    r = paired_difference([0.5, 0.25], [0.5, 0.25], samples=4)
    assert r.p_value == 1.0
    assert r.difference.mean == 0


def test_paired_difference_refuses_unpaired_lists():
    with pytest.raises(ValueError, match="one length"):
        paired_difference([0, 1], [1])


def test_many_changed_prompts_neither_overflow_nor_underflow():
    assert paired_difference([0] * 3000 + [1], [1] * 3000 + [0]).p_value == pytest.approx(0.0, abs=1e-300)
    assert paired_difference([0, 1] * 2000, [1, 0] * 2000).p_value == 1.0
