"""Advantages as the papers write them: plain Python floats, one rollout at a time. Nothing here is imported from trew.

A step is a list of ``Rollout``. Each estimator fills ``rollout.A``, one number per loss token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Rollout:
    """One completion: its loss tokens only, in order; log-probs as floats (``fixed`` is the policy's, detached)."""

    row: int
    group: int
    columns: list[int]
    fixed: list[float]
    old: list[float]
    mu: list[float] | None
    ref: list[float] | None
    teacher: list[float] | None
    H: list[float] | None
    rewards: list[float]
    R: float
    raw: float
    correct: bool
    truncated: bool
    baseline: float | None
    steps: list[tuple[int, float]]
    turns: list[tuple[int, float]] = field(default_factory=list)  # (last column counted from 1, reward)
    states: list = field(default_factory=list)
    V: list[float] = field(default_factory=list)  # the critic's value before each loss token
    penalty: list[float] = field(default_factory=list)  # beta kl of each loss token, where the KL is in token rewards
    norms: list[float] = field(default_factory=list)  # |e - pi|^2 at each token
    l: list = field(default_factory=list)  # torch scalars
    A: list[float] = field(default_factory=list)
    in_loss: bool = True
    share: float = 0.0
    marked: list[bool] = field(default_factory=list)

    @property
    def T(self) -> int:
        return len(self.columns)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float], ddof: int = 1) -> float:
    if len(values) <= ddof:
        return 0.0
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - ddof))


def flat(values: list[float]) -> bool:
    """No spread worth the name: rounding must not become signal."""
    return not values or max(values) - min(values) <= 1e-6 * max(abs(v) for v in values)


def zscore(values: list[float], *, ddof: int, eps: float = 0.0) -> list[float]:
    if len(values) < 2 or flat(values):
        return [0.0] * len(values)
    m, s = mean(values), std(values, ddof)
    return [(v - m) / (s + eps) for v in values]


def centred(values: list[float]) -> list[float]:
    if len(values) < 2 or flat(values):
        return [0.0] * len(values)
    m = mean(values)
    return [v - m for v in values]


def groups_of(step: list[Rollout]) -> list[list[Rollout]]:
    found: dict[int, list[Rollout]] = {}
    for rollout in step:
        found.setdefault(rollout.group, []).append(rollout)
    return list(found.values())


def spread_over(rollouts: list[Rollout], values: list[float]) -> None:
    for rollout, value in zip(rollouts, values, strict=True):
        rollout.A = [value] * rollout.T


def per_group(step, rule) -> None:
    for group in groups_of(step):
        spread_over(group, rule([o.R for o in group], group))


# ---------------------------------------------------------------- reward -> advantage


def group_std(step, s):
    per_group(step, lambda R, _: zscore(R, ddof=s["ddof"], eps=s["std_eps"]))


def group_mean(step, s):
    divided = s.get("scale", "none") == "std"
    per_group(step, lambda R, _: zscore(R, ddof=s["ddof"], eps=s["std_eps"]) if divided else centred(R))


def leave_one_out(step, s):
    def rule(R, _):
        if len(R) < 2 or flat(R):
            return [0.0] * len(R)
        return [r - (sum(R) - r) / (len(R) - 1) for r in R]

    per_group(step, rule)


def batch_mean(step, s):
    spread_over(step, centred([o.R for o in step]))


def no_baseline(step, s):
    spread_over(step, [o.R for o in step])


def reinforce(step, s):
    {"none": no_baseline, "group": group_mean, "batch": batch_mean, "leave-one-out": leave_one_out}[s["baseline"]](
        step, s
    )


def ones(step, s):
    for o in step:
        o.A = [1.0] * o.T


def indicator(step, s):
    for o in step:
        o.A = [float(o.correct)] * o.T


def preferred(step, s):
    """1 / n for the n best of a group, -1 / n for the n worst."""
    for group in groups_of(step):
        values = [o.R for o in group if o.T]
        best, worst = max(values, default=0.0), min(values, default=0.0)
        for o in group:
            a = {best: 1 / max(values.count(best), 1), worst: -1 / max(values.count(worst), 1)}.get(o.R, 0.0)
            o.A = [a if best > worst else 0.0] * o.T


def greedy(step, s):
    spread_over(step, [o.R - o.baseline for o in step])


def batch_std_raw(step, s):
    """Centred within the group, divided by the spread of the raw rewards of the whole batch."""
    everything = [o.R for o in step]
    if flat(everything):
        return spread_over(step, [0.0] * len(step))
    scale = std(everything, s["ddof"]) + s["std_eps"]
    return per_group(step, lambda R, _: [c / scale for c in centred(R)])


def batch_std_centred(step, s):
    """Centred within the group, divided by the spread of what all groups then hold."""
    everything = [c for group in groups_of(step) for c in [o.R - mean([p.R for p in group]) for o in group]]
    scale = std(everything, s["ddof"]) + s["std_eps"]
    return per_group(step, lambda R, _: [c / scale if c else 0.0 for c in centred(R)])


def length_weighted(step, s):
    def rule(R, group):
        if len(R) < 2 or flat(R) or not any(o.T for o in group):
            return [0.0] * len(R)
        b = sum(o.T * o.R for o in group) / sum(o.T for o in group)
        return [r - b for r in R]

    per_group(step, rule)


def beta_density(p: float, alpha: float, beta: float) -> float:
    log = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    return math.exp(log) * p ** (alpha - 1) * (1 - p) ** (beta - 1)


def beta_normalized(step, s):
    ps = [mean([o.R for o in group]) for group in groups_of(step)]
    m, v = mean(ps) if ps else 0.0, std(ps, 1) ** 2
    alpha = beta = 1.0  # no variance, no moments: the density of all rates alike
    if v > 1e-12:
        k = m * (1 - m) / v - 1
        alpha, beta = max(1 + k * m / 3, 1.0), max(1 + k * (1 - m) / 3, 1.0)

    def rule(R, _):
        p = mean(R)
        if len(R) < 2 or flat(R):
            return [0.0] * len(R)
        return [(r - p) * min(1 / beta_density(p, alpha, beta), 1e6) for r in R]

    per_group(step, rule)


def maxrl(step, s):
    def rule(R, _):
        m = mean(R)
        return [c / m for c in centred(R)] if m > 0 else [0.0] * len(R)

    per_group(step, rule)


def pass_at_k(step, s):
    k = s["k"]

    def rule(R, group):
        n, wrong = len(group), sum(not o.correct for o in group)
        if n < max(k, 2):
            return [0.0] * n
        rbar = 1 - math.comb(wrong, k) / math.comb(n, k)
        spread = math.sqrt(rbar * (1 - rbar))
        if spread == 0:
            return [0.0] * n
        above = (1 - rbar) / spread
        below = (1 - rbar - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / spread
        return [above if o.correct else below for o in group]

    per_group(step, rule)


def lead(step, s):
    """The largest reward minus the largest without this completion."""

    def rule(R, _):
        if len(R) < 2 or flat(R):
            return [0.0] * len(R)
        scale = std(R, s["ddof"]) + s["std_eps"] if s["scale"] == "std" else 1.0
        return [(max(R) - max(R[:i] + R[i + 1 :])) / scale for i in range(len(R))]

    per_group(step, rule)


def token_baseline(step, s):
    """At each position the mean of the rewards still running, weighted by the squared scores so far."""
    for group in groups_of(step):
        silent = len(group) < 2 or flat([o.R for o in group])
        for o in group:
            o.A = []
            for t in range(o.T):
                alive = [x for x in group if t < x.T]
                if len(alive) == 1:
                    o.A.append(o.R if s["tail"] == "reward" else 0.0)
                    continue
                W = [sum(x.norms[: t + 1]) for x in alive]
                o.A.append(0.0 if silent else o.R - sum(w * x.R for w, x in zip(W, alive, strict=True)) / sum(W))


def gdpo(step, s):
    """z-score per reward within the group, weighted sum, z-score over the sequences of the batch."""
    total = {id(o): 0.0 for o in step}
    for group in groups_of(step):
        for k in range(len(group[0].rewards)):
            have = [o for o in group if not math.isnan(o.rewards[k])]
            if not have:
                continue
            for o, z in zip(have, zscore([o.rewards[k] for o in have], ddof=s["ddof"], eps=s["std_eps"]), strict=True):
                weight = s["reward_weights"][k] if k < len(s["reward_weights"]) else 1.0  # a penalty's own column
                total[id(o)] += weight * z
    spread_over(step, zscore([total[id(o)] for o in step], ddof=s["ddof"], eps=s["std_eps"]))


def process(step, s):
    """Step rewards normalised over all steps of all rollouts of the group, then summed over the steps still to come."""
    for group in groups_of(step):
        every = [value for o in group for _, value in o.steps]
        normal = iter(zscore(every, ddof=s["ddof"], eps=s["std_eps"]))
        for o in group:
            done = [(end, next(normal)) for end, _ in o.steps]
            o.A = [sum(z for end, z in done if end >= column + 1) for column in o.columns]


# ---------------------------------------------------------------- turns of episodes


def turn_rewards(o: Rollout) -> list[float]:
    """What was added to the episode's reward counts as earned by its last turn."""
    rewards = [reward for _, reward in o.turns]
    return [*rewards[:-1], rewards[-1] + o.R - o.raw]


def returns_of(o: Rollout, discount: float) -> list[float]:
    rewards = turn_rewards(o)
    return [sum(discount ** (l - k) * rewards[l] for l in range(k, len(rewards))) for k in range(len(rewards))]


def give_turns(o: Rollout, values: list[float]) -> None:
    """Each loss token takes over the advantage of its turn, the first one that ends in its column or later."""
    ends = [end for end, _ in o.turns]
    o.A = [values[next(k for k, end in enumerate(ends) if end >= column + 1)] for column in o.columns]


def compared(kinds: list, values: list[float], rule) -> list[float]:
    """``rule`` on the values of each kind, put back in place."""
    out = [0.0] * len(values)
    for kind in set(kinds):
        at = [i for i, k in enumerate(kinds) if k == kind]
        for i, value in zip(at, rule([values[i] for i in at]), strict=True):
            out[i] = value
    return out


def gigpo(step, s):
    def norm(values):
        return centred(values) if s["norm"] == "mean" else zscore(values, ddof=s["ddof"], eps=s["std_eps"])

    for group in groups_of(step):
        episodes = norm([o.R for o in group])
        states = [state for o in group for state in o.states]
        micro = iter(compared(states, [g for o in group for g in returns_of(o, s["turn_discount"])], norm))
        for o, macro in zip(group, episodes, strict=True):
            give_turns(o, [macro + s["omega"] * next(micro) for _ in o.turns])


def mt_grpo(step, s):
    for group in groups_of(step):
        outcome = zscore([turn_rewards(o)[-1] for o in group], ddof=s["ddof"], eps=s["std_eps"])
        numbers = [k for o in group for k in range(len(o.turns) - 1)]
        earlier = [r for o in group for r in turn_rewards(o)[:-1]]
        own = iter(compared(numbers, earlier, lambda r: zscore(r, ddof=s["ddof"], eps=s["std_eps"])))
        for o, last in zip(group, outcome, strict=True):
            give_turns(o, [*(next(own) + s["outcome_weight"] * last for _ in o.turns[:-1]), last])


def turn_returns(step, s):
    for group in groups_of(step):
        numbers = [k for o in group for k in range(len(o.turns))]
        returns = [g for o in group for g in returns_of(o, s["turn_discount"])]
        values = iter(compared(numbers, returns, lambda g: zscore(g, ddof=s["ddof"], eps=s["std_eps"])))
        for o in group:
            give_turns(o, [next(values) for _ in o.turns])


def gae(step, s):
    """Every advantage as the whole sum over later tokens, each with its own difference of values."""
    for o in step:
        if not o.T:
            continue
        lam = max(0.0, 1 - 1 / (s["length_alpha"] * o.T)) if s.get("length_alpha") else s["lam"]
        rewards = [-p for p in o.penalty] if o.penalty else [0.0] * o.T
        rewards[-1] += o.R
        V = [*o.V, 0.0]
        o.A = [
            sum((s["gamma"] * lam) ** (k - t) * (rewards[k] + s["gamma"] * V[k + 1] - V[k]) for k in range(t, o.T))
            for t in range(o.T)
        ]


def gtpo(step, s):
    a1, a2 = s["a1"], s["a2"]
    for group in groups_of(step):
        right, wrong = [o for o in group if o.correct and o.T], [o for o in group if not o.correct and o.T]
        if not right or not wrong:
            spread_over(group, [0.0] * len(group))
            continue
        shaped: dict[int, list[float]] = {}
        for o in group:
            side = right if o.correct else wrong
            values = []
            for t in range(o.T):
                alive = [x for x in side if t < x.T]
                if o.correct:
                    values.append(a1 + a2 * len(alive) * o.H[t] / sum(x.H[t] for x in alive))
                else:
                    values.append(-a1 - a2 * len(alive) * (1 / o.H[t]) / sum(1 / x.H[t] for x in alive))
            shaped[id(o)] = values
        for side in [group] if s["normalize"] == "joint" else [right, wrong]:
            normal = iter(zscore([v for o in side for v in shaped[id(o)]], ddof=s["ddof"]))
            for o in side:
                o.A = [next(normal) for _ in range(o.T)]


def grpo_s(step, s):
    b1, b2 = s["b1"], s["b2"]
    for group in groups_of(step):
        right, wrong = [o for o in group if o.correct and o.T], [o for o in group if not o.correct and o.T]
        spread_over(group, [0.0] * len(group))
        if not right or not wrong:
            continue
        shaped = {}
        for o in right:
            shaped[id(o)] = b1 + b2 * len(right) * mean(o.H) / sum(mean(x.H) for x in right)
        for o in wrong:
            shaped[id(o)] = -b1 - b2 * len(wrong) * (1 / mean(o.H)) / sum(1 / mean(x.H) for x in wrong)
        for side in [right + wrong] if s["normalize"] == "joint" else [right, wrong]:
            spread_over(side, zscore([shaped[id(o)] for o in side], ddof=s["ddof"]))


# ---------------------------------------------------------------- after the scale


def whiten(step, s):
    """Over all loss tokens of the batch; long rollouts weigh more in it."""
    every = iter(zscore([a for o in step for a in o.A], ddof=1))
    for o in step:
        o.A = [next(every) for _ in o.A]


def entropy_bonus(step, s):
    for o in step:
        o.A = [a + min(s["alpha"] * h, abs(a) / s["kappa"]) for a, h in zip(o.A, o.H, strict=True)]


def zero(step: list[Rollout], s: dict) -> None:
    """No rewards: what is learned is added to it."""
    for o in step:
        o.A = [0.0] * o.T


ESTIMATORS = {
    "group-std": group_std,
    "group-mean": group_mean,
    "leave-one-out": leave_one_out,
    "none": no_baseline,
    "zero": zero,
    "reinforce": reinforce,
    "greedy": greedy,
    "ones": ones,
    "indicator": indicator,
    "preferred": preferred,
    "batch-std": batch_std_raw,
    "batch-std-centred": batch_std_centred,
    "length": length_weighted,
    "beta": beta_normalized,
    "maxrl": maxrl,
    "pass-at-k": pass_at_k,
    "lead": lead,
    "token-baseline": token_baseline,
    "gdpo": gdpo,
    "process": process,
    "gigpo": gigpo,
    "mt-grpo": mt_grpo,
    "turn-returns": turn_returns,
    "gae": gae,
    "gtpo": gtpo,
    "grpo-s": grpo_s,
}
