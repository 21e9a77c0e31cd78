"""Intervals and tests for accuracies measured on a few hundred prompts: no torch, deterministic.

Samples of one prompt are not independent, but prompts are, so every interval is over prompts. The mean of a value in
[0, 1] gets the *score* (Wilson) interval, with the effective number of observations that the spread between prompts
implies. With one sample per prompt that is the ordinary Wilson interval. Unlike a normal interval, it has a width
above 0 even where every prompt has the same value.

scipy.stats does the tests. It is imported where it is used: it takes half a second to load, and most commands never
need it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike

LEVEL = 0.95
_ALL_FLIPS = 22
"""The most changed pairs whose sign flips are all counted: 2²¹ sums, 16 MB."""
_AT_ONCE = 4096  # random sign flips held in memory


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(correct: float, n: float, *, level: float = LEVEL) -> Interval:
    """The score interval of a proportion (Wilson 1927): all p that a two-sided z-test at ``level`` does not reject.

        (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n),   p = correct / n

    ``n`` may be a fraction (an effective number of observations), which scipy's binomtest does not accept.
    n = 0 gives (nan, 0, 1).

    >>> print(wilson(0, 10))
    0.000 [0.000, 0.278]
    >>> print(wilson(81, 263))
    0.308 [0.255, 0.366]
    """
    if not 0 <= correct <= n:
        raise ValueError(f"correct: got {correct}, which is not between 0 and n = {n}")
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    z, p = normal_quantile(level), correct / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # Rounding must not push an end past the mean or past 0 and 1.
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


def cluster_interval(prompt_means: ArrayLike, *, samples: float, level: float = LEVEL) -> Interval:
    """The interval of avg@k (or pass@k): a mean over prompts of values in [0, 1], each from ``samples`` completions;
    of prompts with different numbers of them, the mean number.

    Uses the score interval with the effective number of observations (as do Korn and Graubard 1998)

        n_eff = m(1-m) / (s²/n),   m = mean, s² = sample variance between prompts, n = prompts,

    clamped to [n, n·samples]: correlated samples count for less than independent ones, but a prompt counts for at
    least one. With one sample per prompt this is ``wilson``. n = 0 gives (nan, 0, 1).

    >>> print(cluster_interval([0.0, 1.0, 1.0, 0.0], samples=1) == wilson(2, 4))
    True
    >>> print(cluster_interval([0.5, 0.5, 0.5, 0.5], samples=4) == wilson(8, 16))    # no spread: 16 independent draws
    True
    """
    means = np.asarray(prompt_means, dtype=np.float64)
    if means.ndim != 1 or np.any(~np.isfinite(means)) or np.any((means < 0) | (means > 1)):
        raise ValueError("prompt_means: accepts a list of finite numbers from 0 to 1")
    if samples < 1:
        raise ValueError(f"samples: got {samples}, accepts a number of at least 1")
    n = len(means)
    if n == 0:
        return wilson(0, 0, level=level)
    # A rounded mean outside [0, 1] would give a negative variance.
    mean = min(1.0, max(0.0, float(means.mean())))
    # With one prompt no spread is known: the estimate below then falls to its least, n.
    variance_of_mean = float(means.var(ddof=1)) / n if n > 1 else math.inf
    binomial = mean * (1 - mean)
    if binomial == 0:
        effective = float(n)  # every prompt at 0, or every one at 1: the spread is no evidence, so count prompts
    else:
        # Clamped: few prompts estimate their spread badly, in both directions.
        effective = binomial / variance_of_mean if variance_of_mean > 0 else math.inf
        effective = min(max(effective, float(n)), float(n * samples))
    _, low, high = wilson(mean * effective, effective, level=level)
    return Interval(mean, low, high)


def mean_interval(values: ArrayLike, *, level: float = LEVEL) -> Interval:
    """Student's t interval of the mean of independent numbers of any size: mean ± t_{n-1} s/√n.

    One value x has no interval, (x, nan, nan); no value gives (nan, nan, nan).

    >>> print(mean_interval([1.0, 2.0, 3.0]))
    2.000 [-0.484, 4.484]
    """
    from scipy.special import stdtrit

    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        return Interval(math.nan, math.nan, math.nan)
    mean = float(x.mean())
    if x.size == 1:
        return Interval(mean, math.nan, math.nan)
    half = float(stdtrit(x.size - 1, (1 + level) / 2)) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return Interval(mean, mean - half, mean + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n completions, drawn without replacement, include one of the c correct ones: the unbiased
    estimate of pass@k (Chen et al. 2021, arXiv 2107.03374, eq. 1).

        1 - C(n-c, k) / C(n, k)  =  1 - Π_{i=n-c+1..n} (1 - k/i)

    Uses the product, which stays within [0, 1] where the binomial coefficients overflow. Raises ValueError for k > n,
    which has no unbiased estimate.

    >>> round(pass_at_k(4, 1, 2), 3), pass_at_k(4, 0, 4), pass_at_k(4, 3, 2)
    (0.5, 0.0, 1.0)
    """
    if not 0 <= c <= n:
        raise ValueError(f"c: got {c}, which is not between 0 and n = {n}")
    if not 1 <= k <= n:
        raise ValueError(f"k: got {k}, which is not between 1 and n = {n}: pass@k needs at least k completions")
    # Fewer than k are wrong, so that any k of them include a correct one.
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def iqm(values: ArrayLike, axis: int | None = None) -> Any:
    """The interquartile mean: the mean without the ⌊n/4⌋ lowest and highest values (Agarwal et al. 2021,
    arXiv 2108.13264). As robust to outliers as the median, but uses half of the data. nan for no values.

    Over all values by default; over one ``axis`` it returns an array.

    >>> float(iqm([0.0, 1.0, 2.0, 100.0]))
    1.5
    """
    from scipy.stats import trim_mean

    x = np.asarray(values, dtype=np.float64)
    return trim_mean(x, 0.25, axis=cast(Any, axis)) if x.size else math.nan


class Statistic(Protocol):
    """A statistic that numpy's mean and ``iqm`` are examples of: over all values, or over one axis."""

    def __call__(self, values: np.ndarray, /, axis: int | None = None) -> Any: ...


def stratified_bootstrap(
    strata: Sequence[ArrayLike],
    *,
    statistic: Statistic = iqm,
    resamples: int = 10_000,
    seed: int = 0,
    level: float = LEVEL,
) -> Interval:
    """The percentile bootstrap interval of ``statistic`` over all values, resampled within each stratum.

    A stratum is a task; its values are the scores of the seeds. The same ``seed`` gives the same interval. With few
    values per stratum the interval is too narrow: ``seeds.iqm_over_seeds`` widens it.
    """
    groups = [np.asarray(s, dtype=np.float64).ravel() for s in strata]
    if not groups or any(g.size == 0 for g in groups):
        raise ValueError("stratified_bootstrap: needs at least one stratum, and one value in each")
    # scipy.stats.bootstrap refuses strata of one value; a task with one seed is allowed here.
    rng = np.random.default_rng(seed)
    # Indices (resamples, values of the stratum) -> drawn (resamples, all values).
    drawn = np.concatenate([g[rng.integers(0, g.size, (resamples, g.size))] for g in groups], axis=1)
    low, high = np.quantile(statistic(drawn, axis=-1), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(statistic(np.concatenate(groups))), float(low), float(high))


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """After minus before on the same prompts, and its p-value under the hypothesis of no change."""

    difference: Interval
    p_value: float
    n: int
    better: int  # prompts whose value rose
    worse: int  # prompts whose value fell


def paired_difference(
    before: ArrayLike,
    after: ArrayLike,
    *,
    samples: int = 1,
    level: float = LEVEL,
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedDifference:
    """Compares two accuracies (values in [0, 1], one per prompt) on the same prompts in the same order.

    Interval: Newcombe's square-and-add of the two score intervals, with their correlation ρ over prompts (Newcombe
    1998, method 10 without continuity correction), for d = a - b:

        low  = d - √((a-l_a)² - 2ρ(a-l_a)(u_b-b) + (u_b-b)²),   high likewise with the other ends.

    p-value: the two-sided sign-flip permutation test of the mean difference. On 0/1 values this equals McNemar's exact
    test, which is computed in its place. Other values: all sign flips of up to 22 changed prompts, otherwise
    ``resamples`` random ones from ``seed``.

    >>> r = paired_difference([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1])
    >>> r.better, r.worse, round(r.p_value, 4)
    (5, 0, 0.0625)
    """
    x, y = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or x.size == 0:
        raise ValueError(f"before, after: got shapes {x.shape} and {y.shape}, accepts two lists of one length above 0")
    b, a = (cluster_interval(v, samples=samples, level=level) for v in (x, y))
    # corrcoef of a constant is NaN; without spread there is no correlation to use.
    rho = float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else 0.0
    d = a.mean - b.mean
    # (a - l_a) and (u_b - b) are the sides that can lower d; the other two can raise it.
    low = d - _square_and_add(a.mean - a.low, b.high - b.mean, rho)
    high = d + _square_and_add(b.mean - b.low, a.high - a.mean, rho)
    better, worse = int((y > x).sum()), int((y < x).sum())
    # On 0/1 values the sign-flip test is the binomial test of the changed prompts, exact at any size.
    if np.isin(x, (0, 1)).all() and np.isin(y, (0, 1)).all():
        p = _mcnemar(better, worse)
    else:
        p = sign_flip(y - x, resamples, seed)
    return PairedDifference(Interval(d, max(-1.0, low), min(1.0, high)), p, x.size, better, worse)


def normal_quantile(level: float) -> float:
    """How many standard deviations around the mean of a normal distribution hold ``level`` of it."""
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, which is not between 0 and 1")
    return NormalDist().inv_cdf((1 + level) / 2)


def _square_and_add(x: float, y: float, rho: float) -> float:
    return math.sqrt(max(0.0, x * x - 2 * rho * x * y + y * y))


def _mcnemar(b: int, c: int) -> float:
    """The two-sided exact binomial test that a changed prompt is as likely to rise (b) as to fall (c)."""
    from scipy.stats import binomtest

    return float(binomtest(b, b + c).pvalue) if b + c else 1.0


def sign_flip(differences: np.ndarray, draws: int = 200_000, seed: int = 0) -> float:
    """The two-sided p-value of the sign-flip permutation test of the mean; 1 if every difference is 0.

        p = share of the 2ⁿ choices of signs s with |Σ_i s_i d_i| ≥ |Σ_i d_i|

    Exact for differences that are symmetric around 0. All choices are counted for up to 22 differences other than 0.
    Of more, ``draws`` random ones are, and the observed signs as one of them (Phipson and Smyth 2010).
    """
    # Flipping a zero changes nothing, so that zeros leave the p-value as it is and only cost exact enumeration.
    changed = differences[differences != 0]
    if changed.size < 2:  # one value: both of its flips are as far from 0
        return 1.0
    # Sums of the same numbers in another order are equal, whatever rounding says.
    least = abs(float(changed.sum())) - 1e-12 * float(np.abs(changed).sum())
    if changed.size <= _ALL_FLIPS:
        # The other half, with the first sign flipped, has the negatives of these.
        sums = changed[:1]
        for value in changed[1:]:
            sums = np.concatenate([sums + value, sums - value])
        return float(np.mean(np.abs(sums) >= least))
    rng = np.random.default_rng(seed)
    far = 0
    for first in range(0, draws, _AT_ONCE):
        flipped = rng.integers(0, 2, (min(_AT_ONCE, draws - first), changed.size), dtype=np.int8)
        far += int((np.abs(changed.sum() - 2 * (flipped @ changed)) >= least).sum())
    return (far + 1) / (draws + 1)
