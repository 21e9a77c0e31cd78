"""What is maximised, as the papers write it: one rollout at a time, differentiable in its log-probs ``l``.

Each function returns J per token; the objective is the sum of share x correction x J. Whatever a paper puts under a
stop-gradient is computed from ``rollout.fixed``, the same log-probs as plain numbers, so that the derivative can be
taken by autograd and by central differences alike. Nothing here is imported from trew.

A sequence-level surrogate is one number per rollout. Where it must be weighted token by token (a mismatch correction
or an advantage that differs from token to token) its token form is used: the same gradient as long as the weights are
equal, each token answering for its own log-prob (GSPO-token's trick).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .estimators import Rollout


def anchor(o: Rollout, s) -> list[float]:
    return o.mu if s["anchor"] == "rollout" else o.old


def ratios(o: Rollout, s) -> list[Tensor]:
    return [torch.exp(l - a) for l, a in zip(o.l, anchor(o, s), strict=True)]


def fixed_ratios(o: Rollout, s) -> list[float]:
    return [math.exp(l - a) for l, a in zip(o.fixed, anchor(o, s), strict=True)]


def sg_one(o: Rollout, t: int) -> Tensor:
    """pi / sg(pi): the value 1, the derivative of the log-prob."""
    return torch.exp(o.l[t] - o.fixed[t])


def clipped(r: Tensor, A: float, low: float, high: float) -> Tensor:
    return torch.minimum(r * A, torch.clamp(r, low, high) * A)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def reinforce(o, s):
    return [l * a for l, a in zip(o.l, o.A, strict=True)]


def compare(step: list[Rollout], s) -> None:
    """Weighs each rollout by how wrongly the policy still ranks it against those of its group on the other side."""
    z = {o.row: s["dpo_beta"] * sum(l - r for l, r in zip(o.fixed, o.ref, strict=True)) for o in step}
    s["wrongly"] = {}
    for o in step:
        rivals = [x for x in step if x.group == o.group and sum(x.A) * sum(o.A) < 0]
        sign = 1 if sum(o.A) > 0 else -1
        pushes = [s["dpo_beta"] * sigmoid(-sign * (z[o.row] - z[x.row])) for x in rivals]
        s["wrongly"][o.row] = sum(pushes) / len(pushes) if pushes else 0.0


def preference(o, s):
    return [s["wrongly"][o.row] * l * a for l, a in zip(o.l, o.A, strict=True)]


def ppo(o, s):
    return [clipped(r, a, 1 - s["eps_low"], 1 + s["eps_high"]) for r, a in zip(ratios(o, s), o.A, strict=True)]


def dual_clip(o, s):
    return [
        torch.maximum(j, torch.full_like(j, s["cap"] * a)) if a < 0 else j for j, a in zip(ppo(o, s), o.A, strict=True)
    ]


def two_sided(o, s):
    out = []
    for r, a in zip(ratios(o, s), o.A, strict=True):
        capped = torch.clamp(r, max=s["delta"])
        out.append(torch.minimum(capped * a, torch.clamp(r, 1 - s["eps_low"], 1 + s["eps_high"]) * a))
    return out


# ---------------------------------------------------------------- weights written out: sg(w) r A


def weighted(o, s, weight):
    rs, fs = ratios(o, s), fixed_ratios(o, s)
    return [weight(fs[t], o.A[t], t) * rs[t] * o.A[t] for t in range(o.T)]


def tent(r: float, a: float, s) -> float:
    up = 1.0
    if r > 1 + s["eps_high"]:
        up = s["w_out"]
    elif r > 1:
        up = 1 - (1 - s["w2"]) * (r - 1) / s["eps_high"]
    down = 1.0
    if r < 1 - s["eps_low"]:
        down = s["w_out"]
    elif r < 1:
        down = s["w0"] + (1 - s["w0"]) * (r - 1 + s["eps_low"]) / s["eps_low"]
    if s.get("symmetric"):
        return up if r > 1 else down
    return up if a > 0 else down


def triangular(o, s):
    return weighted(o, s, lambda r, a, t: tent(r, a, s))


def trw_entropy(o, s):
    def weight(r, a, t):
        rare = o.H[t] / s["h_max"] if s["rarity"] == "entropy" else 1 - math.exp(o.old[t])
        boost = 1 + s["lam"] * rare * min(a / s["a_max"], 1.0) if a > 0 else 1.0
        return tent(r, a, s) * boost

    return weighted(o, s, weight)


def logistic(o, s):
    def weight(r, a, t):
        log_r = math.log(r)
        u = max(0.0, math.copysign(1.0, a) * log_r if a else 0.0) if s["directional"] else abs(log_r)
        both = sigmoid(-s["alpha"] * u) * sigmoid(s["gamma"] * a)
        w = (4 * both + s["eta"]) / (1 + s["eta"]) if s["normalized"] else both + s["eta"]
        return w * min(r, s["cap"]) / r

    return weighted(o, s, weight)


def ce_gppo(o, s):
    """The authors' loss with the stop-gradient written out, as its negative: bound r / sg(r) A, then the dual clip."""
    low, high = 1 - s["eps_low"], 1 + s["eps_high"]
    out = []
    for r, fixed, a in zip(ratios(o, s), fixed_ratios(o, s), o.A, strict=True):
        if a > 0 and fixed > high:
            j = s["beta2"] * high * (r / fixed) * a
        elif a < 0 and fixed < low:
            j = s["beta1"] * low * (r / fixed) * a
        else:
            j = r * a
        out.append(torch.maximum(j, torch.full_like(j, s["cap"] * a)) if a < 0 else j)
    return out


def dppo(o, s):
    """The mask of the divergence between what was sampled from and what is trained, at the sampled token."""

    def weight(r, a, t):
        mu, pi = math.exp(o.mu[t]), math.exp(o.fixed[t])
        if s["divergence"] == "tv":
            d = abs(mu - pi)
        else:
            d = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        masked = d > s["delta"] and ((a > 0 and r > 1) or (a < 0 and r < 1))
        return 0.0 if masked else min(r, s["cap"]) / r

    return weighted(o, s, weight)


def prime_rl(o, s):
    return dppo(o, s | {"divergence": "tv", "cap": math.inf})


def band(o, s):
    """Inside |pi - mu| <= delta alone, whichever way A pushes."""
    return weighted(o, s, lambda r, a, t: float(abs(math.exp(o.fixed[t]) - math.exp(o.mu[t])) <= s["delta"]))


def m2po(o, s):
    return weighted(o, s, lambda r, a, t: 0.0 if o.marked[t] else 1.0)


# ---------------------------------------------------------------- detached weights: sg(g) A l


def detached(o, s, rule):
    return [rule(r, a) * a * l for r, a, l in zip(fixed_ratios(o, s), o.A, o.l, strict=True)]


def cispo(o, s):
    return detached(o, s, lambda r, a: min(max(r, s.get("floor", 0.0)), s["cap"]))


def rollout_is(o, s):
    return detached(o, s, lambda r, a: r if 1 - s["eps_low"] < r < 1 + s["eps_high"] else 0.0)


def vespo(o, s):
    """A correction for the sampler's mismatch belongs to W (``fold``), once per completion."""
    W = math.prod(fixed_ratios(o, s)) * s["fold"]
    W = min(max(W, math.exp(-20)), math.exp(20))

    def phi(_, a):
        k, lam = (s["k_pos"], s["lam_pos"]) if a >= 0 else (s["k_neg"], s["lam_neg"])
        return W**k * math.exp(lam * (1 - W))

    return detached(o, s, phi)


def aspo(o, s):
    def rule(r, a):
        if a > 0:
            return 0.0 if r > 1 + s["eps_high"] else min(1 / r, s["cap"])
        return 0.0 if r < 1 - s["eps_low"] else min(r, s["cap"])

    return detached(o, s, rule)


def topr(o, s):
    if s["level"] == "token":
        return detached(o, s, lambda r, a: 1.0 if o.correct else min(max(r, 0.0), 1.0))
    S = math.prod(fixed_ratios(o, s))
    return detached(o, s, lambda r, a: 1.0 if o.correct else min(max(S, 0.0), 1.0))


def sapo(o, s):
    out = []
    for r, a in zip(ratios(o, s), o.A, strict=True):
        tau = s["tau_pos"] if a > 0 else s["tau_neg"]
        out.append(4 / tau * torch.sigmoid(tau * (r - 1)) * a)
    return out


# ---------------------------------------------------------------- one number per sequence


def gspo(o, s):
    logs = [l - a for l, a in zip(o.l, anchor(o, s), strict=True)]
    low, high = 1 - s["eps_low"], 1 + s["eps_high"]
    if not s["token_form"]:
        ratio = torch.exp(torch.stack(logs).mean())
        return [clipped(ratio, a, low, high) for a in o.A]
    value = math.exp(sum(math.log(r) for r in fixed_ratios(o, s)) / o.T)
    return [clipped(value * sg_one(o, t), o.A[t], low, high) for t in range(o.T)]


def product_clip(o, s):
    """RLOO: the completion is one action; J of the sequence is spread over its tokens."""
    low, high = 1 - s["eps_low"], 1 + s["eps_high"]
    if not s["token_form"]:
        ratio = torch.exp(sum(l - a for l, a in zip(o.l, anchor(o, s), strict=True)))
        return [clipped(ratio, a, low, high) / o.T for a in o.A]
    value = math.prod(fixed_ratios(o, s))
    return [clipped(value * sg_one(o, t), o.A[t], low, high) for t in range(o.T)]


def gmpo(o, s):
    """The log-ratio is clipped on one side before the geometric mean."""
    logs = []
    for l, a, A in zip(o.l, anchor(o, s), o.A, strict=True):
        logs.append(torch.clamp(l - a, max=s["eps_high"]) if A > 0 else torch.clamp(l - a, min=-s["eps_low"]))
    if not s["token_form"]:
        ratio = torch.exp(torch.stack(logs).mean())
        return [ratio * a for a in o.A]
    plain = []
    for r, A in zip(fixed_ratios(o, s), o.A, strict=True):
        plain.append(min(math.log(r), s["eps_high"]) if A > 0 else max(math.log(r), -s["eps_low"]))
    value = math.exp(sum(plain) / o.T)
    return [value * torch.exp(logs[t] - plain[t]) * o.A[t] for t in range(o.T)]


def arithmetic_clip(o, s):
    low, high = 1 - s["eps_low"], 1 + s["eps_high"]
    rs, fs = ratios(o, s), fixed_ratios(o, s)
    if not s["token_form"]:
        ratio = torch.stack(rs).mean()
        return [clipped(ratio, a, low, high) for a in o.A]
    value = sum(fs) / o.T
    return [clipped(value + rs[t] - fs[t], o.A[t], low, high) for t in range(o.T)]


# ---------------------------------------------------------------- tokens chosen over the whole batch


def chosen_tokens(step: list[Rollout], s) -> None:
    """Marks the tokens that kl-cov penalises, clip-cov and m2po silence and high-entropy-tokens keeps."""
    tokens = [(o, t) for o in step for t in range(o.T)]
    for o in step:
        o.marked = [False] * o.T
    if not tokens:
        return
    if s["surrogate"] == "high-entropy":
        threshold = quantile([o.H[t] for o, t in tokens], 1 - s["share"])
        for o, t in tokens:
            o.A[t] *= o.H[t] >= threshold
        return
    if s["surrogate"] == "m2po":
        drop_outliers(tokens, s)
        return
    mean_a = sum(o.A[t] for o, t in tokens) / len(tokens)
    mean_l = sum(o.fixed[t] for o, t in tokens) / len(tokens)
    covariance = {(o.row, t): (o.A[t] - mean_a) * (o.fixed[t] - mean_l) for o, t in tokens}
    if s["surrogate"] == "kl-cov":
        tokens.sort(key=lambda x: -covariance[x[0].row, x[1]])
        for o, t in tokens[: max(1, int(s["share"] * len(tokens)))]:
            o.marked[t] = True
    else:
        assert s["share"] in (0.0, 1.0), "the textbook draws none or all"
        for o, t in tokens:
            r, a = fixed_ratios(o, s)[t], o.A[t]
            cut = (a > 0 and r > 1 + s["eps_high"]) or (a < 0 and r < 1 - s["eps_low"])
            o.marked[t] = s["share"] == 1.0 and not cut and s["cov_low"] < covariance[o.row, t] < s["cov_high"]


def drop_outliers(tokens: list[tuple[Rollout, int]], s) -> None:
    """The paper's loop: the largest goes, until the mean of what is left fits."""

    def log_ratio(o, t):
        return o.fixed[t] - anchor(o, s)[t]

    region = [(o, t) for o, t in tokens if s["tokens"] == "all" or o.A[t] * log_ratio(o, t) > 0]
    region.sort(key=lambda x: log_ratio(*x) ** 2)
    while region and sum(log_ratio(*x) ** 2 for x in region) / len(region) > s["tau"]:
        o, t = region.pop()
        o.marked[t] = True


def quantile(values: list[float], q: float) -> float:
    """Linear between the two neighbours."""
    values = sorted(values)
    at = q * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def kl_cov(o, s):
    return [r * a for r, a in zip(ratios(o, s), o.A, strict=True)]


def clip_cov(o, s):
    return [j * 0 if o.marked[t] else j for t, j in enumerate(ppo(o, s))]


# ---------------------------------------------------------------- divergences that belong to a method (subtracted)


def square_to_sampler(o, s):
    return [s["penalty"] * torch.log(r) ** 2 for r in ratios(o, s)]


def distance_on_marked(o, s):
    return [s["penalty"] * torch.abs(l - a) * o.marked[t] for t, (l, a) in enumerate(zip(o.l, o.old, strict=True))]


def squared_log_ratio(o, s):
    """tau/2 (log pi(y)/pi_old(y))^2 of the whole completion, spread over its tokens."""
    Z = sum(l - a for l, a in zip(o.l, o.old, strict=True))
    return [s["tau"] / 2 * Z**2 / o.T for _ in o.l]


def squared_token_ratio(o, s):
    return [s["tau"] / 2 * (l - a) ** 2 for l, a in zip(o.l, o.old, strict=True)]


PENALTIES = {
    "prime-rl": square_to_sampler,
    "band": square_to_sampler,
    "dro": squared_token_ratio,
    "kl-cov": distance_on_marked,
    "kimi": squared_log_ratio,
}

SURROGATES = {
    "reinforce": reinforce,
    "preference": preference,
    "ppo": ppo,
    "dual-clip": dual_clip,
    "two-sided": two_sided,
    "triangular": triangular,
    "trw-entropy": trw_entropy,
    "logistic": logistic,
    "ce-gppo": ce_gppo,
    "dppo": dppo,
    "prime-rl": prime_rl,
    "band": band,
    "m2po": m2po,
    "rollout-is": rollout_is,
    "cispo": cispo,
    "vespo": vespo,
    "aspo": aspo,
    "topr": topr,
    "sapo": sapo,
    "gspo": gspo,
    "product": product_clip,
    "gmpo": gmpo,
    "arithmetic": arithmetic_clip,
    "kimi": reinforce,
    "dro": reinforce,
    "kl-cov": kl_cov,
    "clip-cov": clip_cov,
    "high-entropy": ppo,
}
