"""Statistics over seeds: equal to rliable 1.2.0, to textbook values, and to what is known in closed form."""

import math

import numpy as np
import pytest
from scipy import stats

from trew.eval.comparison import GroupScores, compare, verdict_of
from trew.eval.seeds import (
    detectable_difference,
    holm,
    iqm_over_seeds,
    least_pairs,
    mean_over_seeds,
    pairs_needed,
    performance_profile,
    probability_of_improvement,
    simultaneous_intervals,
)
from trew.eval.statistics import Interval, iqm, sign_flip, stratified_bootstrap

A = [[0.31, 0.42, 0.28, 0.55, 0.47, 0.39, 0.44, 0.36], [0.62, 0.58, 0.71, 0.49, 0.66, 0.60, 0.57, 0.73],
     [0.10, 0.12, 0.05, 0.31, 0.22, 0.08, 0.15, 0.19]]  # fmt: skip
B = [[0.35, 0.47, 0.25, 0.61, 0.52, 0.41, 0.50, 0.36], [0.64, 0.55, 0.70, 0.52, 0.75, 0.66, 0.55, 0.80],
     [0.09, 0.20, 0.11, 0.35, 0.30, 0.06, 0.21, 0.26]]  # fmt: skip
"""Scores of two algorithms: three tasks of eight seeds."""

# Golden numbers of rliable 1.2.0 (numpy 2.2.6, arch 7.2.0), by
#     from rliable import library, metrics
#     a, b = np.array(A).T, np.array(B).T
#     metrics.aggregate_iqm(a), metrics.aggregate_iqm(b), metrics.aggregate_iqm(a[:, :1])
#     metrics.probability_of_improvement(b, a), metrics.probability_of_improvement(b[:, :1], a[:, :1])
#     library.get_interval_estimates({"a": a, "b": b}, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=50000,
#                                    random_state=np.random.RandomState(0))    and with aggregate_mean
#     library.create_performance_profile({"a": a, "b": b}, np.array(THRESHOLDS))[0]
IQM_A, IQM_B, IQM_A_FIRST = 0.4008333333333334, 0.4283333333333333, 0.40249999999999997
IMPROVEMENT, IMPROVEMENT_FIRST = 0.5859375, 0.578125
IQM_ENDS = {"a": (0.3575, 0.4416666666666667), "b": (0.38, 0.48)}
MEAN_ENDS = {"a": (0.36083333333333334, 0.42333333333333334), "b": (0.38625, 0.4658333333333333)}
THRESHOLDS = (0.1, 0.3, 0.42, 0.55, 0.8)
PROFILES = {"a": (0.875, 0.6666666666666666, 0.4583333333333333, 0.2916666666666667, 0.0),
            "b": (0.9166666666666666, 0.6666666666666666, 0.5, 0.25, 0.0)}  # fmt: skip


def test_interquartile_means_are_those_of_rliable():
    assert float(iqm(np.concatenate(A))) == pytest.approx(IQM_A, abs=1e-12)
    assert iqm_over_seeds(B).mean == pytest.approx(IQM_B, abs=1e-12)
    assert iqm_over_seeds(A[:1]).mean == pytest.approx(IQM_A_FIRST, abs=1e-12)


def test_probabilities_of_improvement_are_those_of_rliable():
    assert probability_of_improvement(B, A).mean == pytest.approx(IMPROVEMENT, abs=1e-12)
    assert probability_of_improvement(B[:1], A[:1]).mean == pytest.approx(IMPROVEMENT_FIRST, abs=1e-12)


@pytest.mark.parametrize(("statistic", "ends"), [(iqm, IQM_ENDS), (np.mean, MEAN_ENDS)])
def test_bootstrap_intervals_are_those_of_rliable_up_to_their_random_numbers(statistic, ends):
    for tasks, wanted in ((A, ends["a"]), (B, ends["b"])):
        assert stratified_bootstrap(tasks, statistic=statistic)[1:] == pytest.approx(wanted, abs=0.004)


@pytest.mark.parametrize(("tasks", "shares"), [(A, PROFILES["a"]), (B, PROFILES["b"])])
def test_performance_profiles_are_those_of_rliable_and_their_intervals_wilsons(tasks, shares):
    found = performance_profile(tasks, THRESHOLDS)
    assert [interval.mean for interval in found] == pytest.approx(shares, abs=1e-12)
    for interval, share in zip(found, shares, strict=True):
        wanted = stats.binomtest(round(24 * share), 24).proportion_ci(method="wilson")
        assert interval[1:] == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_tasks_count_the_same_in_a_profile_however_many_runs_they_have():
    (interval,) = performance_profile([[1.0, 1.0, 1.0, 0.0], [0.0]], [0.5])
    assert interval.mean == 0.375


def test_the_bootstrap_for_few_seeds_is_wider_than_rliables_and_absent_below_five():
    low, high = IQM_ENDS["a"]
    interval = iqm_over_seeds(A)
    assert interval.low < low
    assert interval.high > high
    assert math.isnan(iqm_over_seeds([A[0][:4]]).low)
    assert not math.isnan(iqm_over_seeds([A[0][:5]]).low)


def test_the_interval_over_one_task_is_students_and_over_several_welchs():
    one = stats.ttest_1samp(A[0], 0).confidence_interval()
    assert mean_over_seeds(A[:1])[1:] == pytest.approx((one.low, one.high))
    # Mean over two tasks = half the difference of the first and the negated second.
    two = stats.ttest_ind(A[0][:5], [-x for x in A[1]], equal_var=False).confidence_interval()
    assert mean_over_seeds([A[0][:5], A[1]])[1:] == pytest.approx((two.low / 2, two.high / 2))
    assert math.isnan(mean_over_seeds([A[0], [0.5]]).low)


def test_the_interval_of_the_probability_of_improvement_solves_newcombes_equation():
    x, y = A[0], B[0][:6]
    theta, low, high = probability_of_improvement([y], [x])
    n = (len(x) + len(y)) / 2
    for at in (low, high):
        bracket = 1 + (n - 1) * ((1 - at) / (2 - at) + at / (1 + at))
        assert (theta - at) ** 2 == pytest.approx(1.959964**2 * at * (1 - at) * bracket / (len(x) * len(y)), rel=1e-5)
    assert low < theta < high


def test_simultaneous_intervals_lie_between_one_at_a_time_and_bonferroni():
    rng = np.random.default_rng(0)
    differences = rng.normal(size=(5, 12)) + rng.normal(size=12)
    together = simultaneous_intervals([differences])
    for row, interval in zip(differences, together, strict=True):
        half = interval.high - interval.mean
        alone, bonferroni = (stats.t.ppf(1 - 0.025 / k, 11) * stats.sem(row) for k in (1, 5))
        assert alone < half < bonferroni
    assert simultaneous_intervals([differences[:1]])[0] == pytest.approx(mean_over_seeds([differences[0]]))


def test_simultaneous_intervals_are_those_of_every_processor(monkeypatch):
    # An eigenvector may have either sign, and libraries of linear algebra choose it by the processor.
    differences = np.random.default_rng(4).normal(size=(3, 9))
    found = simultaneous_intervals([differences])
    eigh = np.linalg.eigh

    def of_another(matrix):
        values, vectors = eigh(matrix)
        return values, vectors * [1, -1, -1]

    monkeypatch.setattr(np.linalg, "eigh", of_another)
    for one, other in zip(found, simultaneous_intervals([differences]), strict=True):
        assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=1e-12)


def test_simultaneous_intervals_over_equal_comparisons_are_as_wide_as_one():
    """Three names for one algorithm need no correction: the correlation is seen, but for what few seeds take of it."""
    row = np.random.default_rng(1).normal(size=100)
    one, three = simultaneous_intervals([[row]])[0], simultaneous_intervals([[row, row, row]])[0]
    assert one.high - one.low < three.high - three.low < 1.12 * (one.high - one.low)


def test_differences_that_do_not_vary_have_a_point_as_interval_and_do_not_disturb_others():
    row = [1.0, 2.0, 4.0]
    constant, alone = simultaneous_intervals([[[0.5] * 3, row]])
    assert constant == (0.5, 0.5, 0.5)
    assert alone == pytest.approx(mean_over_seeds([row]))


def test_sign_flips_are_exact_and_one_changed_pair_says_nothing():
    assert sign_flip(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == pytest.approx(2 / 32)
    assert sign_flip(np.array([0.0, 0.25, 0.0])) == 1.0
    assert sign_flip(np.zeros(4)) == 1.0


def test_all_sign_flips_of_20_pairs_are_counted():
    """Random ones would decide verdicts where p, times 94 comparisons, is near 0.05."""
    differences = np.random.default_rng(5).integers(-3, 9, 20)
    # ways[s]: of the flips, how many have the sum s - total. One difference after the other.
    total = int(np.abs(differences).sum())
    ways = [0] * total + [1] + [0] * total
    for d in map(abs, map(int, differences)):
        ways = [sum(ways[i - s] for s in (d, -d) if 0 <= i - s < len(ways)) for i in range(len(ways))]
    far = sum(w for i, w in enumerate(ways) if abs(i - total) >= abs(int(differences.sum())))
    assert sign_flip(differences / 1500, seed=1) == pytest.approx(far / 2**20, rel=1e-12)


def test_random_sign_flips_of_many_pairs_agree_with_the_binomial_test():
    """Differences of one size: the sum of their signs is all there is."""
    for better in (21, 24, 27):
        differences = np.array([0.1] * better + [-0.1] * (40 - better) + [0.0] * 7)
        expected = stats.binomtest(better, 40).pvalue
        assert sign_flip(differences) == pytest.approx(expected, rel=0.05)


def test_holm_corrects_by_rank_and_never_reorders():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_power_is_that_of_the_noncentral_t_where_the_pairs_are_not_few():
    for pairs, tasks, comparisons in ((9, 1, 1), (20, 1, 4), (10, 3, 1)):
        found = detectable_difference(0.02, pairs, tasks=tasks, comparisons=comparisons)
        nc, edge = found / 0.02 * math.sqrt(pairs), stats.t.ppf(1 - 0.025 / comparisons, pairs - tasks)
        assert stats.nct.sf(edge, pairs - tasks, nc) == pytest.approx(0.8)
        assert tasks > 1 or pairs_needed(0.02, found * 1.0001, comparisons=comparisons) == pairs
    # Two-sided at 5 %, power 80 %: n = 7.85 (sd / difference)² for many pairs, 2 more for few.
    assert pairs_needed(1.0, 0.1) == pytest.approx(787, abs=1)
    assert least_pairs(1) == 6
    assert detectable_difference(1.0, 5) is None


def group(name, scores, *, task="t"):
    return GroupScores(name, {(task, seed): score for seed, score in scores.items()})


def test_only_seeds_that_every_group_has_are_compared_and_the_others_are_named():
    found = compare(
        [group("a", dict(enumerate(A[0]))), group("b", dict(enumerate(B[0][:6]))), group("c", {7: 0.4})], baseline="a"
    )
    assert found.pairs == tuple(("t", s) for s in range(6))
    assert found.unpaired == ("c",)
    assert found.unused == (("a", ("t", 6)), ("a", ("t", 7)))
    (versus,) = found.versus
    assert versus.difference.mean == pytest.approx(np.mean(np.subtract(B[0][:6], A[0][:6])))
    assert [s.runs for s in found.groups] == [8, 6, 1]


def test_tasks_count_the_same_whatever_their_number_of_seeds():
    base = GroupScores("a", {("x", s): 0.0 for s in range(8)} | {("y", s): 0.0 for s in range(2)})
    other = GroupScores("b", {("x", s): 0.1 + s / 100 for s in range(8)} | {("y", s): 0.5 + s / 10 for s in range(2)})
    (versus,) = compare([base, other], baseline="a").versus
    assert versus.difference.mean == pytest.approx((0.135 + 0.55) / 2)
    assert versus.detectable == detectable_difference(versus.sd, 10, tasks=2)


@pytest.mark.parametrize(("better", "won"), [("higher", 2), ("lower", 1)])
def test_pairs_are_won_by_the_better_run_of_one_seed(better, won):
    groups = [group("a", {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}), group("b", {0: 0.6, 1: 0.7, 2: 0.4, 3: 0.5})]
    (versus,) = compare(groups, baseline="a", better=better).versus
    assert (versus.won, versus.pairs) == (won, 4)


def test_five_seeds_are_never_enough_however_clear_they_look():
    low, high = ({s: base + s / 1000 * (1 + base) for s in range(6)} for base in (0.1, 0.9))
    for seeds, verdict in ((5, "not told apart"), (6, "better")):
        groups = [group(n, {s: scores[s] for s in range(seeds)}) for n, scores in (("a", low), ("b", high))]
        (versus,) = compare(groups, baseline="a").versus
        assert versus.difference.low > 0
        assert versus.verdict == verdict
        assert (versus.detectable is None) == (seeds == 5)


@pytest.mark.parametrize(
    ("interval", "p_value", "settings", "verdict"),
    [
        (Interval(0.2, 0.1, 0.3), 0.01, {}, "better"),
        (Interval(0.2, 0.1, 0.3), 0.05, {}, "better"),
        (Interval(-0.2, -0.3, -0.1), 0.01, {}, "worse"),
        (Interval(-0.2, -0.3, -0.1), 0.01, {"sign": -1.0}, "better"),
        (Interval(0.2, -0.1, 0.5), 0.01, {}, "not told apart"),  # the interval has 0
        (Interval(0.2, 0.1, 0.3), 0.06, {}, "not told apart"),  # p is above 0.05
        (Interval(0.2, 0.1, 0.3), 0.06, {"level": 0.9}, "better"),
        (Interval(0.0, 0.0, 0.0), 1.0, {"changed": False}, "equal"),
    ],
)
def test_a_verdict_needs_both_the_interval_and_the_p_value(interval, p_value, settings, verdict):
    assert verdict_of(interval, p_value, **{"changed": True, **settings}) == verdict
