"""The whole loss of a step for every preset, padded and in loops, in float64; autograd does the derivatives.

    answer = step_loss("grpo", data, beta=0.1)      data: what TokenBatch.from_padded takes
    answer.loss          to be minimised, differentiable in data["logprobs"] (and data["entropies"] for the bonus)
    answer.advantages    {(row, column): A} of the tokens in the loss

The settings of each preset are written down here a second time, so that a default that slips is noticed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .estimators import ESTIMATORS, Rollout, entropy_bonus, flat, groups_of, whiten
from .surrogates import PENALTIES, SURROGATES, chosen_tokens, compare

COMMON = {
    "anchor": "old", "surrogate": "ppo", "advantage": "group-std", "aggregate": "token-mean",
    "beta": 0.0, "kl": "k3", "kl_place": "loss", "ddof": 1, "std_eps": 0.0, "eps_low": 0.2, "eps_high": 0.2,
    "dynamic_sampling": False, "has_signal": False, "whiten": False, "pruning": None,
    "correction": "none", "correction_low": None, "correction_high": None, "opsm_delta": 0.5,
    "overlong_filtering": False, "overlong_cache": None, "entropy_bonus": 0.0, "distill": 0.0,
    "nll": 0.0,
}  # fmt: skip
HIGHER = {"eps_high": 0.28}
PER_TOKEN_MEAN = {"aggregate": "seq-mean-token-mean"}
TOKEN_SUM = {"aggregate": "seq-mean-token-sum"}
TENT = {"w0": 0.5, "w2": 0.5, "w_out": 0.0}
ROLLOUT = {"anchor": "rollout"}

PRESETS: dict[str, dict] = {
    "reinforce": {"surrogate": "reinforce", "advantage": "reinforce", "baseline": "none", "kl": "k1",
                  "kl_place": "reward"} | TOKEN_SUM,
    "remax": {"surrogate": "reinforce", "advantage": "greedy", "kl": "k1", "kl_place": "to-go"},
    "rloo": {"surrogate": "product", "advantage": "leave-one-out", "kl": "k1", "kl_place": "reward", "beta": 0.03}
    | TOKEN_SUM,
    "reinforce-pp": {"advantage": "none", "kl": "k1", "kl_place": "to-go", "beta": 0.01, "whiten": True},
    "reinforce-pp-baseline": {"advantage": "group-mean", "kl": "k2", "beta": 1e-3, "whiten": True},
    "ppo": {"advantage": "gae", "gamma": 1.0, "lam": 0.95, "critic_lam": None, "length_alpha": 0.0,
            "whiten": True, "kl": "k1", "kl_place": "reward"},
    "vapo": {"advantage": "gae", "gamma": 1.0, "critic_lam": 1.0, "length_alpha": 0.05, "whiten": True, "kl": "k1",
             "kl_place": "reward", "nll": 0.1} | HIGHER,
    "ppo-clip": {},
    "dual-clip": {"surrogate": "dual-clip", "cap": 3.0},
    "grpo": {"beta": 0.04} | PER_TOKEN_MEAN,
    "grpo-process": {"advantage": "process", "beta": 0.04} | PER_TOKEN_MEAN,
    "gigpo": {"advantage": "gigpo", "omega": 1.0, "turn_discount": 0.95, "norm": "mean-std", "beta": 0.01},
    "mt-grpo": {"advantage": "mt-grpo", "outcome_weight": 1.0},
    "turn-returns": {"advantage": "turn-returns", "turn_discount": 1.0},
    "bnpo-paper": {"advantage": "beta"},
    "token-mean-local": {"aggregate": "token-mean-local", "microbatch": 8},
    "dapo": {"dynamic_sampling": True} | HIGHER,
    "dr-grpo": {"advantage": "group-mean", "aggregate": "constant"},
    "gtpo": {"advantage": "gtpo", "a1": 1.0, "a2": 0.1, "normalize": "joint", "dynamic_sampling": True} | HIGHER,
    "grpo-s": {"advantage": "grpo-s", "surrogate": "arithmetic", "b1": 1.0, "b2": 0.1, "normalize": "joint",
               "dynamic_sampling": True} | HIGHER | PER_TOKEN_MEAN,
    "trw-triangular": {"surrogate": "triangular", "symmetric": False} | TENT | HIGHER | PER_TOKEN_MEAN,
    "trw-logistic": {"surrogate": "logistic", "alpha": 2.0, "gamma": 1.0, "eta": 0.05, "normalized": False,
                     "directional": False, "cap": math.inf} | PER_TOKEN_MEAN,
    "trw-entropy": {"surrogate": "trw-entropy", "lam": 0.5, "a_max": 1.0, "rarity": "probability", "h_max": 1.0}
    | TENT | HIGHER | PER_TOKEN_MEAN,
    "two-sided": {"surrogate": "two-sided", "delta": 4.0, "beta": 1e-3, "dynamic_sampling": True},
    "gspo": {"surrogate": "gspo", "eps_low": 3e-4, "eps_high": 4e-4} | PER_TOKEN_MEAN,
    "gspo-token": {"surrogate": "gspo", "eps_low": 3e-4, "eps_high": 4e-4} | PER_TOKEN_MEAN,
    "luspo": {"surrogate": "gspo", "eps_low": 2e-3, "eps_high": 2.5e-3} | TOKEN_SUM,
    "gmpo": {"surrogate": "gmpo", "eps_low": 0.4, "eps_high": 0.4} | PER_TOKEN_MEAN,
    "cispo": {"surrogate": "cispo", "cap": 5.0, "floor": 0.0},
    "scalerl": {"surrogate": "cispo", "cap": 5.0, "advantage": "batch-std-centred", "has_signal": True,
                "aggregate": "prompt-mean-token-mean"},
    "aipo": {"surrogate": "cispo", "cap": 5.0} | ROLLOUT,
    "sapo": {"surrogate": "sapo", "tau_pos": 1.0, "tau_neg": 1.05} | PER_TOKEN_MEAN,
    "vespo": {"surrogate": "vespo", "k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0},
    "dppo-tv": {"surrogate": "dppo", "divergence": "tv", "delta": 0.15, "cap": math.inf, "advantage": "group-mean",
                "scale": "none"} | ROLLOUT,
    "dppo-kl": {"surrogate": "dppo", "divergence": "kl", "delta": 0.05, "cap": math.inf, "advantage": "group-mean",
                "scale": "none"} | ROLLOUT,
    "prime-rl": {"surrogate": "prime-rl", "delta": 0.2, "penalty": 1e-3, "advantage": "group-mean",
                 "has_signal": True} | ROLLOUT,
    "prime-rl-ipo": {"surrogate": "band", "delta": 0.1, "penalty": 1e-3, "advantage": "group-mean", "has_signal": True}
    | ROLLOUT,
    "rollout-is": {"surrogate": "rollout-is"} | ROLLOUT,
    "m2po": {"surrogate": "m2po", "tau": 0.04, "tokens": "growing"},
    "topr": {"surrogate": "topr", "level": "token", "advantage": "group-mean"},
    "aspo": {"surrogate": "aspo", "cap": 3.0, "dynamic_sampling": True},
    "ce-gppo": {"surrogate": "ce-gppo", "beta1": 0.75, "beta2": 1.0, "cap": 3.0},
    "gpg": {"surrogate": "reinforce", "advantage": "group-mean", "has_signal": True} | PER_TOKEN_MEAN,
    "opo": {"surrogate": "reinforce", "advantage": "length"},
    "otb": {"advantage": "token-baseline", "tail": "silent"},
    "lite-ppo": {"advantage": "batch-std"},
    "cppo": {"pruning": 0.5, "beta": 0.04} | PER_TOKEN_MEAN,
    "kl-cov": {"surrogate": "kl-cov", "share": 2e-3, "penalty": 1.0},
    "clip-cov": {"surrogate": "clip-cov", "eps_low": 1.0, "eps_high": 1.0, "share": 2e-4, "cov_low": 1.0,
                 "cov_high": 5.0},
    "high-entropy-tokens": {"surrogate": "high-entropy", "share": 0.2, "dynamic_sampling": True} | HIGHER,
    "entropy-advantage": {"bonus": True, "alpha": 0.4, "kappa": 2.0},
    "maxrl": {"advantage": "maxrl"},
    "pass-at-k": {"advantage": "pass-at-k", "k": 4},
    "grpo-passk": {"advantage": "lead", "scale": "std"},
    "gdpo": {"advantage": "gdpo"},
    "kimi": {"surrogate": "kimi", "tau": 0.1, "advantage": "group-mean"} | TOKEN_SUM,
    "dro": {"surrogate": "dro", "tau": 0.05, "advantage": "group-mean"},
    "deepseek-v3.2": {"correction": "opsm", "delta": 0.5, "kl": "k3-corrected", "beta": 1e-3}
    | ROLLOUT | PER_TOKEN_MEAN,
    "opd": {"advantage": "zero", "distill": 1.0},
    "sft": {"surrogate": "reinforce", "advantage": "ones"},
    "rft": {"surrogate": "reinforce", "advantage": "indicator"} | PER_TOKEN_MEAN,
    "online-rft": {"surrogate": "reinforce", "advantage": "indicator"} | PER_TOKEN_MEAN,
    "dpo": {"surrogate": "preference", "advantage": "preferred", "aggregate": "prompt-mean-token-sum", "dpo_beta": 0.1},
}  # fmt: skip

# The papers give the surrogate itself, not only its gradient.
GRADIENT_ONLY = {"aspo", "topr"}
# DPO's loss is one of pairs; its value is compared with the paper's in tests/unit/test_dpo_preset.py.
GRADIENT_ONLY |= {"dpo"}


@dataclass
class Answer:
    loss: Tensor
    advantages: dict[tuple[int, int], float]
    shares: dict[int, float]
    token_form: bool


def settings(name: str, overrides: dict) -> dict:
    s = COMMON | PRESETS[name] | overrides
    if name == "deepseek-v3.2" and "opsm" in s["correction"]:
        s["opsm_delta"] = s["delta"]
    if name == "topr" and s["level"] == "sequence" and "aggregate" not in overrides:
        s["aggregate"] = "seq-mean-token-sum"
    return s


def read(data: dict, s: dict) -> list[Rollout]:
    """The padded tensors as rollouts; one whose reward is NaN was never there."""
    mask = data["mask"].tolist()

    def floats(name: str) -> list | None:
        return data[name].detach().tolist() if data.get(name) is not None else None

    l, fixed = data["logprobs"], data.get("fixed_logprobs", data["logprobs"]).detach().tolist()
    old, mu, ref = floats("old_logprobs") or fixed, floats("rollout_logprobs"), floats("ref_logprobs")
    teacher = floats("teacher_logprobs")
    H, rewards, baselines = floats("entropies"), floats("rewards"), floats("baselines")
    V = floats("values")
    step = []
    for i, keep in enumerate(mask):
        columns = [t for t, m in enumerate(keep) if m]

        def row(values: list | None, i=i, columns=columns) -> list[float] | None:
            return None if values is None else [values[i][t] for t in columns]

        mine = rewards[i] if rewards is not None else 0.0
        mine = mine if isinstance(mine, list) else [mine]
        weights = data["reward_weights"].tolist() if data.get("reward_weights") is not None else [1.0] * len(mine)
        s["reward_weights"] = weights
        if s["advantage"] == "greedy" and math.isnan(baselines[i]):
            continue
        real = [(w, r) for w, r in zip(weights, mine, strict=True) if not math.isnan(r)]
        if not real and s["advantage"] != "zero":
            continue
        total = sum(w * r for w, r in real)
        step.append(
            Rollout(
                row=i, group=int(data["group_ids"][i]), columns=columns, fixed=row(fixed), old=row(old), mu=row(mu),
                ref=row(ref), teacher=row(teacher), H=row(H), rewards=mine, R=total, raw=total,
                correct=bool(data["correct"][i]) if data.get("correct") is not None else total > 0,
                truncated=bool(data["truncated"][i]) if data.get("truncated") is not None else False,
                baseline=baselines[i] if baselines is not None else None,
                steps=data["step_rewards"][i] if data.get("step_rewards") is not None else [],
                turns=data["turns"][i] if data.get("turns") is not None else [],
                norms=row(floats("score_norms")) or [],
                states=data["states"][i] if data.get("states") is not None else [],
                V=row(V) or [],
                l=[l[i, t] for t in columns],
            )
        )  # fmt: skip
    return step


def kl_number(o: Rollout, t: int, s: dict) -> float:
    """The estimator at the policy that sampled the step, as a number (for the reward)."""
    d = o.old[t] - o.ref[t]
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[s["kl"]]


def kl_in_loss(o: Rollout, t: int, s: dict) -> Tensor:
    d = o.l[t] - o.ref[t]
    if s["kl"] == "k1":
        return d
    if s["kl"] == "k2":
        return d**2 / 2
    k3 = torch.exp(-d) - 1 + d
    if s["kl"] == "k3":
        return k3
    # A correction for mu means that old is the policy before the step, which need not have sampled.
    corrected = set(s["correction"].split("+")) - {"none", "opsm"}
    sampled = o.mu if corrected or s["anchor"] == "rollout" else o.old
    return torch.exp(o.l[t] - sampled[t]) * k3


def shape_rewards(step: list[Rollout], s: dict, max_length: int | None) -> None:
    for o in step:
        if s["overlong_cache"]:
            room = max_length - s["overlong_cache"]
            o.R += 0.0 if room >= o.T else (room - o.T) / s["overlong_cache"] if max_length >= o.T else -1.0
            o.rewards = [*o.rewards, o.R - o.raw]
        if s["kl_place"] == "reward" and s["beta"] and s["advantage"] == "gae":
            o.penalty = [s["beta"] * kl_number(o, t, s) for t in range(o.T)]
        elif s["kl_place"] == "reward" and s["beta"]:
            kl = s["beta"] * sum(kl_number(o, t, s) for t in range(o.T))
            o.R -= kl
            o.rewards = [*o.rewards, -kl]


def keep_groups(step: list[Rollout], s: dict, data: dict) -> list[Rollout]:
    """Judged by right and wrong, where nobody says which is which by the rewards as they came, and where there are none
    by the given advantages."""
    out = []
    for group in groups_of(step):
        signal = not flat([o.raw for o in group])
        if data.get("rewards") is None:
            given = data["advantages"]
            signal = any(float(given[o.row] if given.dim() == 1 else given[o.row, t]) for o in group for t in o.columns)
        mixed = 0 < sum(o.correct for o in group) < len(group) if data.get("correct") is not None else signal
        if (mixed or not s["dynamic_sampling"]) and (signal or not s["has_signal"]):
            out += group
    return sorted(out, key=lambda o: o.row)


def advantages(step: list[Rollout], s: dict, data: dict) -> None:
    given = data.get("advantages")
    if given is not None:
        for o in step:
            o.A = [float(given[o.row] if given.dim() == 1 else given[o.row, t]) for t in o.columns]
        return
    ESTIMATORS[s["advantage"]](step, s)
    if s["kl_place"] == "to-go" and s["beta"]:
        for o in step:
            kl = [kl_number(o, t, s) for t in range(o.T)]
            o.A = [a - s["beta"] * sum(kl[t:]) for t, a in enumerate(o.A)]
    if s["whiten"]:
        whiten(step, s)
    if s.get("bonus"):
        entropy_bonus(step, s)
    if s["distill"]:
        for o in step:
            o.A = [a + s["distill"] * (q - p) for a, q, p in zip(o.A, o.teacher, o.old, strict=True)]


def prune(step: list[Rollout], s: dict) -> list[Rollout]:
    if s["pruning"] is not None:
        kept = []
        for group in groups_of(step):
            size = [max((abs(a) for a in o.A), default=0.0) for o in group]
            order = sorted(range(len(group)), key=lambda i: -round(size[i], 9))  # equal but for rounding: the first
            kept += [group[i] for i in order[: math.ceil(len(group) * (1 - s["pruning"]))]]
        step = sorted(kept, key=lambda o: o.row)
    return [o for o in step if o.T and not (s["overlong_filtering"] and o.truncated)]


def set_shares(step: list[Rollout], s: dict, max_length: int | None) -> None:
    n, tokens = len(step), sum(o.T for o in step)
    size = s.get("microbatch", 1)
    for index, o in enumerate(step):
        match s["aggregate"]:
            case "seq-mean-token-mean":
                o.share = 1 / (n * o.T)
            case "token-mean":
                o.share = 1 / tokens
            case "seq-mean-token-sum":
                o.share = 1 / n
            case "constant":
                o.share = 1 / (n * max_length)
            case "prompt-mean-token-mean":
                prompts = {x.group for x in step}
                o.share = 1 / (len(prompts) * sum(x.T for x in step if x.group == o.group))
            case "prompt-mean-token-sum":
                o.share = 1 / len({x.group for x in step})
            case "token-mean-local":
                start = index // size * size
                o.share = 1 / (math.ceil(n / size) * sum(x.T for x in step[start : start + size]))


def correction(o: Rollout, s: dict) -> list[float]:
    c = [1.0] * o.T
    for kind in s["correction"].split("+"):
        if kind == "none":
            continue
        low, high = s["correction_low"], s["correction_high"]
        if kind == "opsm":
            behaviour = o.mu if o.mu is not None else o.old
            drift = sum(b - l for b, l in zip(behaviour, o.fixed, strict=True)) / o.T
            c = [0.0 if a < 0 and drift > s["opsm_delta"] else x for x, a in zip(c, o.A, strict=True)]
            continue
        kappa = [math.exp(a - b) for a, b in zip(o.old, o.mu, strict=True)]
        product = math.prod(kappa)
        defaults = {"tis": (0, 2), "tis-sequence": (0, 2), "mis": (0, 3), "mis-token": (0, 3), "icepop": (0.5, 5),
                    "geo-mask": (0.999, 1.002)}[kind]  # fmt: skip
        low, high = defaults[0] if low is None else low, defaults[1] if high is None else high
        geo = product ** (1 / o.T)
        new = {
            "tis": [min(max(k, low), high) for k in kappa],
            "tis-sequence": [min(max(product, low), high)] * o.T,
            "mis": [product if low <= product <= high else 0.0] * o.T,
            "mis-token": [k if low <= k <= high else 0.0 for k in kappa],
            "icepop": [k if low <= k <= high else 0.0 for k in kappa],
            "geo-mask": [k if low <= geo <= high else 0.0 for k in kappa],
        }[kind]
        c = [x * y for x, y in zip(c, new, strict=True)]
    return c


def fold_into_ratio(o: Rollout, c: list[float], s: dict) -> list[float]:
    """VESPO's W takes the correction in: the product over the tokens, or the sequence's own; a mask stays outside."""
    kinds = s["correction"].split("+")
    mask = correction(o, s | {"correction": "opsm"}) if "opsm" in kinds else [1.0] * o.T
    ratio = correction(o, s | {"correction": "+".join(k for k in kinds if k != "opsm") or "none"})
    bounded = [max(x, 1e-8) for x in ratio]
    s["fold"] = bounded[0] if {"tis-sequence", "mis"} & set(kinds) else math.prod(bounded)
    return mask


def step_loss(name: str, data: dict, **overrides) -> Answer:
    """The loss of a whole optimizer step of this preset."""
    s = settings(name, overrides)
    max_length = data.get("max_length")
    step = read(data, s)
    shape_rewards(step, s, max_length)
    step = keep_groups(step, s, data)
    advantages(step, s, data)
    step = prune(step, s)
    set_shares(step, s, max_length)
    if s["surrogate"] in ("kl-cov", "clip-cov", "high-entropy", "m2po"):
        chosen_tokens(step, s)
    if s["surrogate"] == "preference":
        compare(step, s)
    loss, any_token_form = data["logprobs"].new_zeros(()), False
    for o in step:
        c = correction(o, s)
        if s["surrogate"] == "vespo":
            c = fold_into_ratio(o, c, s)
        s["token_form"] = len(set(o.A)) > 1 or len(set(c)) > 1
        any_token_form |= s["token_form"]
        J = SURROGATES[s["surrogate"]](o, s)
        penalty = PENALTIES[s["surrogate"]](o, s) if s["surrogate"] in PENALTIES else [0.0] * o.T
        for t in range(o.T):
            loss = loss - o.share * c[t] * J[t] + o.share * penalty[t]
            if s["kl_place"] == "loss" and s["beta"]:
                loss = loss + s["beta"] * o.share * kl_in_loss(o, t, s)
            if s["entropy_bonus"]:
                loss = loss - s["entropy_bonus"] * o.share * data["entropies"][o.row, o.columns[t]]
    positive = [l for o in step if o.correct for l in o.l]
    if s["nll"] and positive:
        loss = loss - s["nll"] / len(positive) * sum(positive)
    table = {(o.row, column): a for o in step for column, a in zip(o.columns, o.A, strict=True)}
    return Answer(loss, table, {o.row: o.share for o in step}, any_token_form)
