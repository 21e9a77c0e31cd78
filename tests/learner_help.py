"""What the learner's tests share: ragged samples, batches, and gradients read off without touching the learner."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tiny
from trew.config import LearnerConfig
from trew.learner import Learner
from trew.learner.autograd import AutogradRunner
from trew.learner.runner import RunnerSettings
from trew.objective import Objective, TokenBatch, preset
from trew.types import TrainingSample

RAGGED = ((5, (3, 1, 7)), (9, (2, 2)), (1, (4, 0, 6)), (13, (1, 1)))
"""(prompt length, completion lengths) per group: one-token, empty and equal ones among them."""

WIDE = {"gemma2": {"sliding_window": 64}, "gemma3": {"sliding_window": 64}}
"""Overrides under which every tiny model sees whole sequences in all layers."""


def samples(shape: Sequence[tuple[int, Sequence[int]]] = RAGGED, *, seed: int = 0) -> list[TrainingSample]:
    rng = np.random.default_rng(seed)
    out = []
    for group, (prompt, completions) in enumerate(shape):
        ids = rng.integers(0, 256, prompt)
        out += [TrainingSample(ids, rng.integers(0, 256, n), group) for n in completions]
    return out


def model(kind: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    return tiny.model(kind, seed=seed, **{**WIDE.get(kind, {}), **overrides})


def plain_logits(net: Any, sample: TrainingSample) -> Tensor:
    """Logits (C, V) of the completion's tokens from one unpadded forward pass of this sequence alone."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]))[None]
    start = len(sample.prompt_ids) - 1
    return net(input_ids=ids).logits[0, start : start + len(sample.token_ids)]


def plain_logprobs(net: Any, sample: TrainingSample, *, temperature: float = 1.0) -> Tensor:
    logits = plain_logits(net, sample) / temperature
    return logits.log_softmax(-1).gather(1, torch.from_numpy(sample.token_ids)[:, None])[:, 0]


def batch(items: Sequence[TrainingSample], *, seed: int = 0, **fields: Any) -> TokenBatch:
    """Random binary rewards (mixed in groups of two and more), random old and reference log-probs near -2."""
    rng = np.random.default_rng(seed)
    lengths = [len(s.token_ids) for s in items]
    total = sum(lengths)
    rewards = rng.integers(0, 2, len(items)).astype(np.float32)
    for group in {s.group for s in items}:
        members = [i for i, s in enumerate(items) if s.group == group]
        if len(members) > 1:
            rewards[members[0]] = 1 - rewards[members[1]]
    values: dict[str, Any] = {
        "logprobs": torch.zeros(total),
        "mask": torch.ones(total, dtype=torch.bool),
        "sequence_ids": torch.arange(len(items)).repeat_interleave(torch.tensor(lengths)),
        "group_ids": torch.tensor([s.group for s in items]),
        "rewards": torch.from_numpy(rewards),
        "max_length": 16,
    }
    return TokenBatch(**{**values, **fields})


def near(net: Any, items: Sequence[TrainingSample], *, seed: int = 1, spread: float = 0.3) -> Tensor:
    """Log-probs of the samples under ``net``, moved at random: old ones for which some ratios are clipped."""
    with torch.no_grad():
        exact = torch.cat([plain_logprobs(net, s) for s in items])
    return exact + spread * torch.randn(len(exact), generator=torch.Generator().manual_seed(seed))


OVERRIDES: dict[str, dict[str, Any]] = {
    "kl-cov": {"share": 0.2},
    "clip-cov": {"share": 0.2, "cov_low": -1.0},
    "m2po": {"tau": 0.02},
    "pass-at-k": {"k": 2},
}
"""Settings of presets under which a small batch shows what they do."""


def prepared(
    net: Any, objective: Objective, items: Sequence[TrainingSample], *, seed: int, mask_share: float = 0.2
) -> TokenBatch:
    """A prepared batch: other policies' log-probs nearby, holes in the mask, the first sample without any loss."""
    total, size = sum(len(s.token_ids) for s in items), len(items)
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(total, generator=g) > mask_share
    mask[: len(items[0].token_ids)] = False
    data = batch(
        items, seed=seed, mask=mask, old_logprobs=near(net, items, seed=seed), ref_logprobs=near(net, items),
        rollout_logprobs=near(net, items, seed=seed + 1), teacher_logprobs=near(net, items, seed=seed + 2),
        entropies=3 * torch.rand(total, generator=g), score_norms=torch.linspace(1.9, 0.1, total),
        baselines=torch.rand(size, generator=g), truncated=torch.rand(size, generator=g) < 0.2,
        values=torch.randn(total, generator=g),
    )  # fmt: skip
    if objective.name in ("ppo-clip", "grpo-process", "gigpo", "mt-grpo", "turn-returns"):  # what only some runs give
        data = data.replace(rewards=None, advantages=torch.randn(total, generator=g))
    return objective.prepare(data.replace(logprobs=torch.full_like(data.logprobs, torch.nan)))


def learner(net: Any, objective: Objective | None = None, *, steps: int = 10, **settings: Any) -> Learner:
    """A learner; settings that belong to its configuration go there."""
    names = ("temperature", "reference", "adapters", "fused", "backend", "parallel", "offloaded")
    own = {name: settings.pop(name) for name in names if name in settings}
    config = LearnerConfig(**{"lr": 1e-2, "max_grad_norm": 1e9, **settings})
    return Learner(net, config=config, objective=objective or preset("dr-grpo"), optimizer_steps=steps, **own)


def runner(net: Any, **settings: Any) -> AutogradRunner:
    """The plain runner."""
    return AutogradRunner(net, RunnerSettings(**settings))


def gradients(
    net: Any, objective: Objective, items: Sequence[TrainingSample], data: TokenBatch, **settings: Any
) -> Tensor:
    """The whole gradient of one ``Learner.step``, before clipping, as one vector; ``net`` itself stays as it is."""
    net = copy.deepcopy(net)
    own = learner(net, objective, **settings)
    caught: dict[str, Tensor] = {}
    clip = own._clip

    def catch(*args):
        caught.update({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
        return clip(*args)

    own._clip = catch
    own.step(items, data)
    return torch.cat([caught.get(name, torch.zeros_like(p)).flatten() for name, p in net.named_parameters()])


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm())
