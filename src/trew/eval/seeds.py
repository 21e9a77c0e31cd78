"""Statistics over training runs that differ in their seed: intervals, comparisons with a baseline, power. No torch.

The unit is one run with one number (its score). Runs of two groups with the same seed form a pair: both started from
the same weights and saw the same prompts, so their difference varies less than their scores do. With several data sets
("tasks"), seeds are resampled and averaged within each task, and every task counts the same.

The number of runs is small (5 to 20), so that nothing here relies on large numbers: intervals are Student's t or
bootstrap intervals widened accordingly, and p-values come from sign flips, all of them up to 22 pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from .statistics import LEVEL, Interval, iqm, normal_quantile, stratified_bootstrap, wilson

POWER = 0.8
_DRAWS = 20_000
_CHUNK = 2_000  # draws held in memory at once
_FEW_FLIPS = 8
"""Below so many sign flips that may be as far from 0 as what was observed, the sign-flip test finds less than a
t-test."""
_STUDIES = 10_000  # that are simulated to tell what it finds


def mean_over_seeds(tasks: Sequence[ArrayLike], *, level: float = LEVEL) -> Interval:
    """The mean over tasks of the mean over seeds, with a t interval over seeds.

        mean ± t_ν √V,   V = Σ_t s_t²/n_t / T²,   ν = V² / Σ_t (s_t²/n_t / T²)² / (n_t - 1)

    s_t² is the variance between the n_t seeds of task t, T the number of tasks; ν are the degrees of freedom of Welch
    (1947), with one task n - 1. A task with one seed has no spread, so that the ends are nan.

    >>> print(mean_over_seeds([[1.0, 2.0, 3.0]]))
    2.000 [-0.484, 4.484]
    """
    from scipy.special import stdtrit

    values = _tasks(tasks)
    mean = float(np.mean([x.mean() for x in values]))
    if any(x.size < 2 for x in values):
        return Interval(mean, math.nan, math.nan)
    # parts[t] = s_t²/n_t / T², whose sum is V.
    parts = np.array([x.var(ddof=1) / x.size for x in values]) / len(values) ** 2
    if (variance := float(parts.sum())) == 0:
        return Interval(mean, mean, mean)
    freedom = variance**2 / float(np.sum(parts**2 / [x.size - 1 for x in values]))
    half = float(stdtrit(freedom, (1 + level) / 2)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def iqm_over_seeds(tasks: Sequence[ArrayLike], *, level: float = LEVEL, seed: int = 0) -> Interval:
    """The interquartile mean over all runs, with an *expanded* percentile interval of the stratified bootstrap.

    A bootstrap of n values has a spread that is too small by √((n-1)/n), and normal quantiles in place of Student's.
    Both are repaired by taking wider quantiles (Hesterberg 2015, arXiv 1411.5279, section 5):

        α'/2 = Φ(-√(n/(n-1)) t_{ν, 1-α/2}),   n = seeds of the task with the fewest,   ν = Σ_t (n_t - 1) over tasks

    Below 5 seeds no quantile of a bootstrap is wide enough: the ends are nan.
    """
    from scipy.special import ndtr, stdtrit

    values = _tasks(tasks)
    n = min(x.size for x in values)
    if n < 5:
        return Interval(iqm(np.concatenate(values)), math.nan, math.nan)
    tail = float(ndtr(-math.sqrt(n / (n - 1)) * stdtrit(sum(x.size - 1 for x in values), (1 + level) / 2)))
    return stratified_bootstrap(values, level=1 - 2 * tail, seed=seed)


def probability_of_improvement(
    scores: Sequence[ArrayLike], than: Sequence[ArrayLike], *, level: float = LEVEL
) -> Interval:
    """The chance that a run of one group scores above a run of the other: P(X > Y) + P(X = Y)/2, averaged over tasks
    (Agarwal et al. 2021, arXiv 2108.13264, section 4.3; the Mann-Whitney statistic divided by m n).

    The interval inverts the score test with the variance of Hanley and McNeil (Newcombe 2006, Statistics in Medicine
    25:559, method 5), which keeps a width above 0 where every run is better:

        (θ̂ - θ)² = z² V(θ),   V = θ(1-θ) (1 + (N-1) ((1-θ)/(2-θ) + θ/(1+θ))) / (m n),   N = (m + n)/2

    It treats the groups as independent; runs that are paired by seed vary together, which makes it wider than needed.

    >>> print(probability_of_improvement([[3.0, 4.0, 5.0]], [[0.0, 1.0, 2.0]]))
    1.000 [0.501, 1.000]
    """
    pairs = list(zip(_tasks(scores), _tasks(than), strict=True))
    # (m, 1) - (1, n) -> (m, n): the signs of all pairs. (mean + 1) / 2 counts a win 1, a tie one half.
    theta = float(np.mean([(np.sign(x[:, None] - y[None]).mean() + 1) / 2 for x, y in pairs]))
    z = normal_quantile(level)

    def gap(at: float) -> float:
        odds = (1 - at) / (2 - at) + at / (1 + at)
        # Σ_t V_t without θ(1-θ); the mean over T tasks has the variance Σ_t V_t / T².
        variance = sum((1 + ((x.size + y.size) / 2 - 1) * odds) / (x.size * y.size) for x, y in pairs)
        return abs(theta - at) - z * math.sqrt(at * (1 - at) * variance) / len(pairs)

    inside = min(max(theta, 1e-12), 1 - 1e-12)  # at 0 and 1 the gap has a root that is no end of the interval
    # The gap is positive at 0 and 1, and negative at θ̂: one root lies on either side.
    low = 0.0 if theta == 0 else _solve(gap, 0.0, inside)
    high = 1.0 if theta == 1 else _solve(gap, inside, 1.0)
    return Interval(theta, min(low, theta), max(high, theta))


def performance_profile(
    tasks: Sequence[ArrayLike], thresholds: Sequence[float], *, level: float = LEVEL
) -> list[Interval]:
    """The share of runs whose score is above each threshold τ, averaged over tasks (Agarwal et al. 2021,
    arXiv 2108.13264, section 4.2):

        F(τ) = Σ_t Σ_n 1[x_tn > τ] / n_t / T

    Intervals are pointwise score (Wilson) intervals for as many observations as there are runs: unlike a bootstrap,
    they have a width above 0 where every run is on one side.

    >>> print(*performance_profile([[0.1, 0.2, 0.3, 0.4]], [0.25]))
    0.500 [0.150, 0.850]
    """
    values = _tasks(tasks)
    runs = sum(x.size for x in values)
    # (T, thresholds) -> (thresholds,)
    shares = np.mean([(x[:, None] > np.asarray(thresholds)).mean(0) for x in values], axis=0)
    return [wilson(float(share) * runs, runs, level=level) for share in shares]


def simultaneous_intervals(
    differences: Sequence[ArrayLike], *, level: float = LEVEL, draws: int = _DRAWS, seed: int = 0
) -> list[Interval]:
    """Intervals of k mean paired differences that *all* hold their true values in ``level`` of studies (max-t).

    ``differences[t]`` has a row for each comparison and a column for each seed of task t. The interval of comparison j
    is mean_j ± c se_j, with se_j² = Σ_t s_tj²/n_t / T², and c the ``level`` quantile of max_j |t_j| over draws of
    normal data with the seeds' own covariance (as Dunnett 1955, with an estimated correlation). One comparison on one
    task has Student's quantile. A comparison whose differences are all equal gets that value as both of its ends.

    Correlations estimated from n seeds are shrunk by (n - 2)/n: few seeds overstate them, and the intervals would be
    too narrow. Fewer than two seeds in a task give nan.

    >>> print(*simultaneous_intervals([[[1.0, 2.0, 3.0]]]))
    2.000 [-0.484, 4.484]
    """
    values = [np.atleast_2d(np.asarray(d, dtype=np.float64)) for d in differences]
    means = np.mean([d.mean(1) for d in values], axis=0)
    if any(d.shape[1] < 2 for d in values):
        return [Interval(float(m), math.nan, math.nan) for m in means]
    # A comparison whose differences are all equal has no t: it stays out of the maximum, and its half width is 0.
    errors = _standard_errors(values)
    half = _max_t_quantile([d[errors > 0] for d in values], level, draws, seed) * errors
    return [Interval(float(m), float(m - h), float(m + h)) for m, h in zip(means, half, strict=True)]


def _standard_errors(values: Sequence[np.ndarray]) -> np.ndarray:
    """The standard error of each mean over tasks; the seeds are the last axis."""
    return np.sqrt(np.sum([d.var(-1, ddof=1) / d.shape[-1] for d in values], axis=0)) / len(values)


def _max_t_quantile(values: Sequence[np.ndarray], level: float, draws: int, seed: int) -> float:
    """The quantile of the largest |t| of all comparisons under the hypothesis that no difference exists."""
    from scipy.special import stdtrit

    comparisons, seeds = values[0].shape
    if not comparisons:
        return 0.0
    if comparisons == len(values) == 1:
        return float(stdtrit(seeds - 1, (1 + level) / 2))
    rng = np.random.default_rng(seed)
    roots = [_root(d) for d in values]
    largest = []
    # In chunks: all draws at once would be draws x comparisons x seeds numbers.
    for _ in range(-(-draws // _CHUNK)):
        # (C, C) @ (chunk, C, seeds) -> (chunk, C, seeds) for each task: normal data with the covariance of the
        # comparisons.
        drawn = [
            root @ rng.standard_normal((_CHUNK, comparisons, d.shape[1])) for root, d in zip(roots, values, strict=True)
        ]
        # (chunk, C): one t statistic for each draw and comparison, whose largest |t| counts.
        t = np.mean([x.mean(-1) for x in drawn], axis=0) / _standard_errors(drawn)
        largest.append(np.abs(t).max(-1))
    return float(np.quantile(np.concatenate(largest), level))


def _root(differences: np.ndarray) -> np.ndarray:
    """The symmetric square root of the covariance between comparisons, with its correlations shrunk."""
    n = differences.shape[1]
    covariance = np.atleast_2d(np.cov(differences))
    shrunk = covariance * (n - 2) / n
    # The diagonal is put back: correlations shrink, variances do not.
    np.fill_diagonal(shrunk, covariance.diagonal())
    # eigh and not Cholesky: a comparison without spread in one task leaves a zero on its diagonal.
    values, vectors = np.linalg.eigh(shrunk)
    # V √Λ Vᵀ and not V √Λ: processors differ in the signs of V's columns, and with them in every draw made with it.
    return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979): the chance of any false finding stays below the level.

        p_(i) -> max_{j ≤ i} min(1, (k - j + 1) p_(j)),   p_(1) ≤ … ≤ p_(k)

    >>> holm([0.04, 0.01])
    [0.04, 0.02]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p_values[i]))
        corrected[i] = largest
    return corrected


def least_pairs(comparisons: int, *, level: float = LEVEL) -> int:
    """The fewest pairs with which the corrected sign-flip test can fall to 1 - ``level``: k 2/2ⁿ ≤ α.

    >>> least_pairs(1), least_pairs(11)
    (6, 9)
    """
    # The slack is for a product that is a power of two but for rounding.
    return math.ceil(math.log2(2 * comparisons / (1 - level)) - 1e-9)


def detectable_difference(
    sd: float, pairs: int, *, tasks: int = 1, comparisons: int = 1, power: float = POWER, level: float = LEVEL
) -> float | None:
    """The true difference that ``pairs`` pairs find with probability ``power``, where paired differences have the
    standard deviation ``sd``; None if the pairs are too few to find any (``least_pairs``).

        δ = λ sd/√n,   P(T_ν(λ) > t_{ν, 1-α/2k}) = power,   T(λ) = noncentral t,   ν = n - tasks

    Of few pairs the sign-flip test, which a verdict takes too, finds less than a t-test: with 6 pairs all of them must
    have one sign. There δ is the one with which a share ``power`` of simulated studies passes both.

    ``tasks`` is the number of means that ``sd`` was taken around: one for each task (``comparison.pooled_sd``). Where
    differences vary much more in one task than in another, Welch's ν is smaller than this one, and less is found: with
    spreads of 1 and 4 in two tasks of eight pairs, 70 of 100 instead of 80.

    >>> round(detectable_difference(1.0, 20), 3), round(detectable_difference(1.0, 6), 1), detectable_difference(1.0, 5)
    (0.66, 1.8, None)
    """
    if pairs < least_pairs(comparisons, level=level):
        return None
    return _detectable(pairs, tasks, (1 - level) / comparisons, power) * sd


def pairs_needed(
    sd: float, difference: float, *, comparisons: int = 1, power: float = POWER, level: float = LEVEL
) -> int:
    """The fewest pairs with which a true ``difference`` is found with probability ``power``.

    >>> pairs_needed(1.0, 0.66), pairs_needed(0.0, 0.1)
    (21, 6)
    """
    if not difference > 0:
        raise ValueError(f"difference: got {difference}, accepts a number above 0")
    low = high = least_pairs(comparisons, level=level)
    tail = (1 - level) / comparisons

    def enough(pairs: int) -> bool:
        # δ falls with n, so that bisection finds the fewest.
        return _detectable(pairs, 1, tail, power) * sd <= difference

    # Doubles until it is enough, then bisects between the last two.
    while not enough(high):
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


@functools.cache
def _detectable(pairs: int, tasks: int, tail: float, power: float) -> float:
    """The detectable difference in standard deviations; ``tail`` is the p-value that a finding may have at most."""
    # Of 2ⁿ flips, half are as far from 0 on each side. From 60 pairs on there are enough for any number of comparisons.
    flips = math.floor(tail * 2.0 ** (min(pairs, 60) - 1) + 1e-9)
    if flips < _FEW_FLIPS:
        return _simulated(pairs, tasks, flips, tail, power)
    return _noncentrality(pairs - tasks, tail, power) / math.sqrt(pairs)


def _simulated(pairs: int, tasks: int, flips: int, tail: float, power: float) -> float:
    """The difference with which ``power`` of simulated studies pass the t-test at ``tail``, and the sign-flip test:
    at most ``flips`` of the flips, the observed signs among them, have a mean at least as large."""
    from scipy.special import stdtrit

    # (studies, pairs): differences without their true mean x, whose least value is looked for in each study.
    drawn = np.random.default_rng(0).standard_normal((_STUDIES, pairs))
    squares = [part.var(1) * part.shape[1] for part in np.array_split(drawn, tasks, axis=1)]
    error = np.sqrt(np.sum(squares, axis=0) / (pairs - tasks) / pairs)
    by_t = stdtrit(pairs - tasks, 1 - tail / 2) * error - drawn.mean(1)
    # Flipping some pairs does not lower the mean if their own mean + x is at most 0. The first ``flips`` of such
    # sets of pairs, by their means, have none but the ``flips`` lowest pairs: the set without its highest pair, and
    # with a lower one in its place, comes before it.
    lowest = np.sort(drawn, axis=1)[:, :flips]
    # (sets, flips): which of them each set has; all sets but the empty one, which stands for the observed signs.
    sets = (np.arange(1, 2 ** lowest.shape[1])[:, None] >> np.arange(lowest.shape[1])) & 1
    means = lowest @ (sets / sets.sum(1, keepdims=True)).T
    by_flips = -np.partition(means, flips - 1, axis=1)[:, flips - 1]
    return float(np.quantile(np.maximum(by_t, by_flips), power))


def _noncentrality(freedom: int, tail: float, power: float) -> float:
    """The noncentrality at which a two-sided t-test at ``tail`` rejects with probability ``power``."""
    from scipy.special import stdtrit
    from scipy.stats import nct

    # The upper tail alone: where power matters, the other one is never reached.
    edge = float(stdtrit(freedom, 1 - tail / 2))
    return _solve(lambda at: float(nct.sf(edge, freedom, at)) - power, 0.0, 3 * edge + 10)


def _solve(function: Callable[[float], float], low: float, high: float) -> float:
    """Where ``function`` is 0 between two points at which it has different signs."""
    from scipy.optimize import brentq

    return cast("float", brentq(function, low, high))


def _tasks(tasks: Sequence[ArrayLike]) -> list[np.ndarray]:
    values = [np.asarray(x, dtype=np.float64).ravel() for x in tasks]
    if not values or any(x.size == 0 or not np.isfinite(x).all() for x in values):
        raise ValueError("tasks: accepts at least one task, with at least one finite score in each")
    return values
