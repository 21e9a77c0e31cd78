"""AdamW over float32 weights, the learning rate of each step, and the optimizer's state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import LearnerConfig
from ..errors import CheckpointError, ModelError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters to train by name, tied ones once. Raises ModelError where one is not float32, or none is left."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ModelError("the model has no parameter to train: all of them have requires_grad = False")
    for name, p in parameters.items():
        if p.dtype != torch.float32:
            raise ModelError(
                f"parameter {name}: got {p.dtype}, training accepts float32 weights (small updates vanish in less); "
                "load the model with dtype=torch.float32 and set learner.dtype = 'bfloat16' for the computation"
            )
    return parameters


def adamw(parameters: Mapping[str, torch.nn.Parameter], config: LearnerConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices and embeddings only, not on norms and biases."""
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True if {p.device.type for p in parameters.values()} <= {"cpu", "cuda"} else None,
    )


def learning_rate(step: int, *, config: LearnerConfig, steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``steps``, with w warmup steps.

        step < w:   lr (step + 1) / w
        else, with x = (step - w) / (steps - w) clipped to [0, 1]:
            constant  lr          linear  lr (1 - x)          cosine  lr (1 + cos(pi x)) / 2

    >>> config = LearnerConfig(lr=1.0, schedule="linear", warmup_steps=2)
    >>> [learning_rate(s, config=config, steps=6) for s in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    x = min((step - warmup) / max(steps - warmup, 1), 1.0)
    if config.schedule == "linear":
        return config.lr * (1 - x)
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * x)) / 2
    return config.lr


def moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as tensors ``optimizer.<moment>.<parameter>``; empty before the first step."""
    out = {}
    for name, p in parameters.items():
        for moment, value in optimizer.state.get(p, {}).items():
            out[f"optimizer.{moment}.{name}"] = torch.as_tensor(value)
    return out


def load_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Puts what :func:`moments` returned into a fresh optimizer. Raises CheckpointError where it does not fit."""
    saved = {name: t for name, t in tensors.items() if name.startswith("optimizer.")}
    state = {}
    for name, p in parameters.items():
        found = {m: saved.pop(f"optimizer.{m}.{name}") for m in MOMENTS if f"optimizer.{m}.{name}" in saved}
        if not found:  # a parameter that has had no gradient yet
            continue
        if set(found) != set(MOMENTS) or any(found[m].shape != p.shape for m in MOMENTS[:2]):
            raise CheckpointError(
                f"checkpoint: the optimizer state of {name} does not fit a parameter of shape {tuple(p.shape)}"
            )
        state[p] = {m: t.to(device=p.device, dtype=torch.float32, copy=True) for m, t in found.items()}
    if saved:
        raise CheckpointError(
            f"checkpoint: optimizer state for unknown parameters: {', '.join(sorted(saved)[:3])} ({len(saved)} "
            "in all); it was written by another model or optimizer"
        )
    optimizer.state.clear()
    optimizer.state.update(state)
