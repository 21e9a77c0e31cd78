"""Plots an objective over the ratio: w(r, A) and the coefficient w r A for A = +1 and A = -1.

Every value comes from the objective itself, through ``Objective.loss`` on completions of one token, so that a plot
always shows what training uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..objective import Objective, TokenBatch
from ..objective.likelihood import CorrectLikelihood
from ..runs.report.svg import Series, line_chart, side_by_side

P_OLD = 0.2
"""The sampled token's probability under the old policy: some trust regions (DPPO) depend on it."""

HIGHEST_WEIGHT = 3.0
"""The largest weight drawn: 1/r, for example, is unbounded near r = 0."""

_PANEL = (372, 250)
_MARKS = {"A > 0": "", "A < 0": "6 4"}  # solid and dashed
_NICE = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True, slots=True)
class Curves:
    """Values (n,) over ``ratio`` (n,): index 0 for A = +1, index 1 for A = -1."""

    ratio: Tensor
    weight: tuple[Tensor, Tensor]
    coefficient: tuple[Tensor, Tensor]


def evaluate(objective: Objective, ratio: Tensor, *, p_old: float = P_OLD) -> Curves:
    """w and C_t / share_t of a token at each ratio, for A = +1 and A = -1; float64.

    Each completion is one token, so a sequence's ratio is the token's. The sampler is the old policy and the reference
    is the current policy, so that the plot shows neither a correction nor a pull towards the reference; nor is the
    likelihood of correct completions in it, which depends on how many of a step are correct. The batch also
    has twice as many bystanders as plotted tokens, with smaller advantages and a more extreme covariance with log pi:
    rules that pick some tokens of a batch (cppo, kl-cov) pick from those.
    """
    n = len(ratio)
    # (6n,): ratios at A = +1, ratios at A = -1, and 4n bystanders at ratio 1, whose old log-probs follow below.
    r = torch.cat([ratio, ratio, torch.ones(4 * n)]).to(torch.float64)
    ones = torch.ones(n, dtype=torch.float64)
    advantages = torch.cat([ones, -ones, 0.5 * ones, -0.5 * ones, 0.5 * ones, -0.5 * ones])
    old = torch.full_like(r, math.log(p_old))
    # One quarter of the bystanders is improbable, for the extreme covariance.
    old[2 * n :] = torch.cat([-0.01 * ones, -120.0 * ones, -0.01 * ones, -0.01 * ones])
    # log pi = log pi_old + log r; (6n, 1), completions of one token.
    logprobs = (old + r.log())[:, None]
    batch = TokenBatch.from_padded(
        logprobs=logprobs,
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        group_ids=torch.zeros(len(r), dtype=torch.int64),
        advantages=advantages,
        old_logprobs=old[:, None],
        rollout_logprobs=old[:, None],
        ref_logprobs=logprobs,
        entropies=torch.ones_like(logprobs),
        score_norms=torch.ones_like(logprobs),
        correct=advantages > 0,
        truncated=torch.zeros(len(r), dtype=torch.bool),
        max_length=1,
    )
    # Without the likelihood of correct completions: see above.
    objective = objective.replace(nll=CorrectLikelihood())
    # ---- what training would compute
    prepared = objective.prepare(batch)
    out = objective.loss(prepared)
    assert prepared.token_weights is not None
    token_weight = prepared.unpack(prepared.token_weights)[:, 0]
    # Rounded, so that a plot does not depend on the last bits of a machine's exponential.
    # (2n,): bystanders cut off. Divided by the token's weight, since C_t contains it.
    coefficient, weight = (
        x[: 2 * n].round(decimals=9) for x in (out.coefficients[:, 0] / token_weight, out.weights[:, 0])
    )
    return Curves(ratio, (weight[:n], weight[n:]), (coefficient[:n], coefficient[n:]))


def probability(high: float) -> float:
    """The token's probability under the old policy in a plot up to ratio ``high``: keeps the new one below 1.

    >>> probability(2.0), probability(10.0)
    (0.2, 0.09)
    """
    return min(P_OLD, float(f"{0.9 / high:.2g}"))


# ------------------------------------------------------------------------------------------------------ which ratios


def ratio_range(objective: Objective) -> tuple[float, float]:
    """The range of ratios that shows this objective's trust region: [0, 2], wider where w changes beyond it, and narrow
    around 1 where the region is narrow (sequence ratios have bounds of 1e-4).
    """
    # Evaluated rather than asked of each rule: a new rule gets a fitting plot without saying where it changes.
    # 300 distances from 1e-5 up to, not including, 1: ratio 0 has no logarithm.
    distance = torch.logspace(-5, 0, 301, dtype=torch.float64)[:-1]
    above = 1 + torch.cat([distance, torch.linspace(1.0, 3.9, 117, dtype=torch.float64)])
    # Flipped: ratios ascend, so the one nearest to 1 is last (around = -1).
    # ---- where w changes, below 1, above it, and far above it
    low = _changes(evaluate(objective, 1 - distance.flip(0)), around=-1)
    high = _changes(evaluate(objective, above), around=0)
    # Large ratios need a small old probability: the new one would exceed 1 otherwise.
    far = torch.linspace(4.9, 20, 303, dtype=torch.float64)
    # With a ratio next to 1 in front, from which changes are measured.
    beyond = _changes(evaluate(objective, torch.cat([above[:1], far]), p_old=probability(20.0)), around=0)
    high = [h if math.isfinite(h) else b for h, b in zip(high, beyond, strict=True)]
    finite = [h - 1 for h in high if math.isfinite(h)]
    nearest = [*finite, *(1 - d for d in low if math.isfinite(d))]
    # ---- a range around these places
    if nearest and max(nearest) < 0.1:
        half = nice(2.5 * max(nearest))
        # Narrow on both sides, as for ratios of sequences.
        return 1 - half, 1 + half
    return 0.0, max([2.0, *(min(10.0, nice(1.4 * (1 + h))) for h in finite if h > 0.5)])


def nice(x: float) -> float:
    """Rounds up to a round number.

    >>> nice(0.00101), nice(4.5), nice(6.0)
    (0.0015, 5.0, 6.0)
    """
    power = 10.0 ** math.floor(math.log10(x))
    return next((round(m * power, 12) for m in _NICE if m * power >= x * (1 - 1e-9)), 10 * power)


def _changes(curves: Curves, *, around: int) -> list[float]:
    """For A > 0 and A < 0: the ratio nearest to 1 (at index ``around``) whose w is halfway to the farthest w."""
    found = []
    for w in curves.weight:
        # Weights above the drawn range count as its end, or an unbounded one would hide all other changes.
        moved = (w.clamp(max=HIGHEST_WEIGHT) - w[around]).abs()
        # Halfway to the farthest weight; below 0.05 counts as no change.
        far = (moved >= max(0.5 * float(moved.max()), 0.05)).nonzero()[:, 0]
        found.append(float(curves.ratio[far[0 if around == 0 else -1]]) if len(far) else math.inf)
    return found


# --------------------------------------------------------------------------------------------------------- the points


def trace(objective: Objective, low: float, high: float) -> Curves:
    """Samples the curves on [low, high] where they change. Finds steps by bisection, to 1e-7 of the range."""
    width, p_old = high - low, probability(high)
    # Not 0: its logarithm is infinite.
    ratio = torch.linspace(low, high, 161, dtype=torch.float64).round(decimals=12).clamp(min=width * 1e-3)
    curves = evaluate(objective, ratio, p_old=p_old)
    # Each round halves the steep intervals: 16 of them reach 1e-7 of the range, and end the loop.
    for _ in range(30):
        values = torch.stack([*curves.weight, *curves.coefficient]).clamp(-HIGHEST_WEIGHT, HIGHEST_WEIGHT)
        steep = (values.diff(dim=1).abs() > 0.03).any(0) & (curves.ratio.diff() > 1e-7 * width)
        if not steep.any():
            break
        middle = (curves.ratio[:-1] + curves.ratio[1:])[steep] / 2
        curves = _merged(curves, evaluate(objective, middle, p_old=p_old))
    return curves


def _merged(a: Curves, b: Curves) -> Curves:
    ratio, order = torch.cat([a.ratio, b.ratio]).sort()

    def both(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat([x[0], y[0]])[order], torch.cat([x[1], y[1]])[order]

    return Curves(ratio, both(a.weight, b.weight), both(a.coefficient, b.coefficient))


def simplified(x: Sequence[float], y: Sequence[float], *, tolerance: tuple[float, float]) -> list[int]:
    """The points that a polygon needs to pass within ``tolerance`` of all others (Douglas and Peucker, 1973).

    A clipped weight needs six points, however finely it was sampled.

    >>> simplified([0, 1, 2, 3], [0, 0, 0, 1], tolerance=(0.01, 0.01))
    [0, 2, 3]
    """
    keep, todo = {0, len(x) - 1}, [(0, len(x) - 1)]
    while todo:
        # Distance from a line: |d x p| / |d|.
        first, last = todo.pop()
        dx, dy = (x[last] - x[first]) / tolerance[0], (y[last] - y[first]) / tolerance[1]
        length = math.hypot(dx, dy) or 1.0
        worst, distance = first, 1.0
        # Farthest point from the chord between first and last, in units of the tolerance.
        for i in range(first + 1, last):
            px, py = (x[i] - x[first]) / tolerance[0], (y[i] - y[first]) / tolerance[1]
            off = abs(dx * py - dy * px) / length
            if off > distance:
                worst, distance = i, off
        if worst != first:
            keep.add(worst)
            todo += [(first, worst), (worst, last)]
    return sorted(keep)


# -------------------------------------------------------------------------------------------------------- the picture


def figure(objectives: Sequence[Objective], *, ratios: tuple[float, float] | None = None) -> str:
    """One SVG: w(r, A) on the left, the coefficient w r A on the right, all ``objectives`` overlaid.

    ``ratios`` is the range of r; by default the widest range of the objectives.
    """
    if ratios is None:
        ranges = [ratio_range(o) for o in objectives]
        ratios = min(r[0] for r in ranges), max(r[1] for r in ranges)
    # ---- curves, all on one range so that they can be compared
    low, high = ratios
    traced = [trace(o, low, high) for o in objectives]
    weights = _lines([c.weight for c in traced], traced, limit=HIGHEST_WEIGHT)
    pushes = _lines([c.coefficient for c in traced], traced, limit=math.inf)
    # ---- the panels
    charts = [
        line_chart(
            series, x_label="r", y_label=label, x_range=ratios, y_range=ends, width=_PANEL[0], height=_PANEL[1],
            standalone=False,
        )
        for series, label, ends in (
            (weights, "weight w(r, A)", (0.0, max(1.06, 1.06 * _highest(weights)))),
            (pushes, "coefficient C_t / share_t", None),
        )
    ]  # fmt: skip
    note = (
        f"One token with r = π / π_old and A = ±1, of a completion of one token; π_old = {probability(high):g}; "
        "π_ref = π."
    )
    return side_by_side(
        charts, width=_PANEL[0], height=_PANEL[1], title=", ".join(o.name for o in objectives),
        legend=_legend([o.name for o in objectives]), note=note,
    )  # fmt: skip


def _legend(names: Sequence[str]) -> list[Series]:
    if len(names) == 1:
        return [Series(sign, [], [], colour=i, dash=dash) for i, (sign, dash) in enumerate(_MARKS.items())]
    signs = [Series(name, [], [], colour=i, dash="") for i, name in enumerate(names)]
    return [*signs, *(Series(sign, [], [], colour=7, dash=dash) for sign, dash in _MARKS.items())]


def _lines(values: Sequence[tuple[Tensor, Tensor]], traced: Sequence[Curves], *, limit: float) -> list[Series]:
    """One line per objective and sign, with as few points as its shape needs; gaps where a value exceeds ``limit``."""
    # Height of the drawn values, for the tolerance.
    finite = torch.cat([v for pair in values for v in pair]).clamp(-limit, limit)
    height = max(float(finite.max() - finite.min()), 1.0)
    series = []
    for number, (pair, curves) in enumerate(zip(values, traced, strict=True)):
        for sign, (value, dash) in enumerate(zip(pair, _MARKS.values(), strict=True)):
            x = curves.ratio.tolist()
            y = value.clamp(-limit, limit).tolist()
            kept = simplified(x, y, tolerance=((x[-1] - x[0]) / 1500, height / 1000))
            gaps: Callable[[float], float | None] = lambda v: None if abs(v) >= limit else v  # noqa: E731
            # One objective: a colour for each sign. Several: one each, the first ones thicker, so that they show under
            # the others.
            colour, thickness = (
                (sign, None) if len(values) == 1 else (number, 1.5 + 0.9 * min(4, len(values) - 1 - number))
            )
            points = [x[i] for i in kept], [gaps(y[i]) for i in kept]
            series.append(Series("", *points, colour=colour, dash=dash, thickness=thickness))
    return series


def _highest(series: Sequence[Series]) -> float:
    return max((v for s in series for v in s.y if v is not None), default=1.0)
