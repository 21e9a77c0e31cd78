"""Estimates rough step times: operations divided by this machine's matrix-product rate, measured on the spot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..config import Config
from ..models import backends
from ..models.planning import Planning
from ..objective import Objective
from .memory import Load
from .sizes import Sizes

SHARE = {"native": 0.65, "plain": 0.45}
"""The share of the product rate that a phase is assumed to reach, with our kernels and with a model's own forward."""

_MEASURE = 0.15  # seconds per measurement; the best repetition counts, as other processes may use the machine too
_BYTES = 1 << 26  # of weights per repetition: more than caches hold, since a real step reads its weights from memory


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations per second of matrix products: with many rows, and with as many as are decoded at once."""

    many: float
    few: float


def rates(s: Sizes, config: Config, *, rows: int, tokens: int, device: str) -> Rates:
    """Measures two products in the model's own widths, briefly."""
    dtype = torch.bfloat16 if config.learner.dtype == "bfloat16" else torch.float32
    backend = backends.of(config, device)
    plan = None if backend is None else backend.memory()
    # Two rates: with few rows a product is bound by reading the weights, with many by arithmetic.
    return Rates(*(_rate(n, s, dtype=dtype, device=device, plan=plan) for n in (min(tokens, 2048), rows)))


def _rate(rows: int, s: Sizes, *, dtype: torch.dtype, device: str, plan: Planning | None) -> float:
    numbers = s.intermediate * s.hidden
    count = max(1, _BYTES // (numbers * dtype.itemsize))
    weights = [torch.randn(s.intermediate, s.hidden, dtype=dtype, device=device) for _ in range(count)]
    x = torch.randn(rows, s.hidden, dtype=dtype, device=device)
    product: Callable[[torch.Tensor, Any], object] = torch.nn.functional.linear
    matrices: list[Any] = list(weights)
    own = None if plan is None else plan.product(depth=s.hidden, rows=rows, dtype=dtype)
    if own is not None:
        lay_out, product = own
        matrices = [lay_out(w) for w in weights]

    def once() -> None:
        for w in matrices:
            product(x, w)
        # Kernels are launched asynchronously: without this only the launches would be timed.
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    once()  # warms up: the first call allocates and may compile
    begin, best = time.perf_counter(), float("inf")
    while best == float("inf") or time.perf_counter() - begin < _MEASURE:
        start = time.perf_counter()
        once()
        best = min(best, time.perf_counter() - start)
    # A multiplication and an addition for each row and weight.
    return 2 * rows * numbers * count / best


def policy_passes(config: Config, objective: Objective) -> int:
    """Passes of the policy in a step that give log-probs and no gradient.

    One before the updates, where the policy moves between two of them, a teacher or in the rewards a reference is
    compared with it, or the objective reads of its distributions what the engine does not report; of completions of
    older weights, where the objective corrects for them, since otherwise the sampler's log-probs count. And one in each
    inner update where the objective must see a whole optimizer step before its first gradient.
    """
    older = config.cluster.staleness > 0 or config.rollout.stale_steps > 0
    corrected = any(correction.mismatch for correction in objective.correction)
    compared = objective.distillation > 0 or (objective.beta > 0 and objective.reference.place != "loss")
    moves = config.optimizer_steps > config.steps
    reads = set(objective.needs) & ({"score_norms"} | ({"entropies"} if config.cluster.rollout == "vllm" else set()))
    own = corrected if older else moves or compared
    # What is read and what is compared are computed in one way each.
    before = own + bool(reads) if compared else own or bool(reads)
    return before + config.learner.inner_updates * objective.sees_step


def operations(s: Sizes, config: Config, load: Load, *, log_prob_passes: float) -> dict[str, float]:
    """Counts floating-point operations of one step by phase, with A = heads x head size and t prompts of G completions:

    prefill    t (2 N_l P + 2 L A P^2)
    decoding   t G C (2 N_l + 2 V H + 4 L A (P + C / 2))
    one pass   2 N_l fed + 4 L A fed (P + C) / 2 + 2 V H read
    training   3 passes (2 where the weights are frozen), 1 more with gradient checkpointing, for each inner update
    log-probs  1 pass each: of the reference, of a critic and a teacher (by their sizes), and :func:`policy_passes`

    A critic adds 3 passes by its own size to the training (all of its weights learn), 1 more with gradient
    checkpointing.
    """
    rollout, learner = config.rollout, config.learner
    groups, size, prompt, completion = rollout.prompts, rollout.completions, load.prompt, load.completion
    # L A of the docstring.
    wide = s.layers * s.heads * s.head_dim
    # C - 1: the last token of a completion is predicted but never fed.
    fed = groups * (prompt + size * (completion - 1)) if load.shares else groups * size * (prompt + completion - 1)
    read = groups * size * completion
    once = 2 * s.linear * fed + 2 * wide * fed * (prompt + completion) + 2 * s.head * read
    # Backward takes two products per forward product, for input and weight; frozen weights need only the first.
    times = (2 if config.lora.rank else 3) + learner.gradient_checkpointing
    critic = 0.0 if load.critic is None else load.critic.passes
    times += critic * (3 + learner.gradient_checkpointing)
    return {
        "prefill": groups * (2 * s.linear * prompt + 2 * wide * prompt**2),
        "decoding": read * (2 * s.linear + 2 * s.head + 4 * wide * (prompt + completion / 2)),
        "log-probs": once * (log_prob_passes + critic),
        "training": once * times * learner.inner_updates,
    }


def seconds(work: dict[str, float], rate: Rates, load: Load) -> dict[str, float]:
    """Estimates each phase's seconds: its operations over the share of the rate that its code reaches."""
    generating, learning = (SHARE["native" if own else "plain"] for own in (load.native_decode, load.body is None))
    share = {"prefill": generating, "decoding": generating, "log-probs": learning, "training": learning}
    return {
        # Decoding multiplies few rows at a time and is bound by reading weights; the rest has many rows.
        phase: count / (share[phase] * (rate.few if phase == "decoding" else rate.many))
        for phase, count in work.items()
        if count
    }
