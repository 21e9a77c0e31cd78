"""AdamW over float32 weights in three forms, the learning rate schedule, and optimizer state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..config import LearnerConfig
from ..errors import CheckpointError, ModelError
from ..models.sharded import Rows, copy_into, is_sharded, like, local, whole
from .parallel import Parallel


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters to train by name, tied ones once. Raises ModelError where one is not float32, or there is none."""
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


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter], config: LearnerConfig, *, offloaded: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that ``config.optimizer`` names, with weight decay on matrices and embeddings but not on norms and
    biases. All are AdamW:

        m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2      W <- (1 - lr wd) W - lr m' / (sqrt(v') + eps)

    ``adamw``: m and v in float32 beside the weights, 8 bytes per parameter. ``adamw-offload``: the same values in CPU
    memory. ``adamw-8bit``: m and v rounded to 8 bits in blocks of 256 (arXiv:2110.02861), 2 bytes per parameter;
    vectors and matrices below 4,096 values stay in float32. ``offloaded``: ``adamw`` as ``adamw-offload`` does it.
    """
    # By the number of dimensions: norms and biases are vectors, and decay would pull norm weights to 0 instead of 1.
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    how: dict[str, Any] = {
        "lr": config.lr, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps,
    }  # fmt: skip
    # The fused kernels exist for these two devices; None leaves the choice to torch elsewhere (mps).
    fused = True if {p.device.type for p in parameters.values()} <= {"cpu", "cuda"} else None
    if config.optimizer == "adamw" and not offloaded:
        return torch.optim.AdamW(groups, **how, fused=fused)
    if config.optimizer in ("adamw", "adamw-offload"):
        return OffloadedAdamW(groups, **how, fused=fused)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, **how)


Zeros = Callable[[Sequence[Sequence[int]]], "list[Tensor] | None"]
"""Returns float32 zeros of these shapes on the CPU, or None to leave their allocation to torch."""


def begin(optimizer: torch.optim.Optimizer, zeros: Zeros) -> None:
    """Allocates the moments of CPU parameters that have a gradient for the first time, before AdamW does.

    AdamW allocates them during its first step, between the gradients. Freeing the gradients then leaves holes in the
    heap that the moments keep from being returned for the rest of the run.
    """
    if type(optimizer) is not torch.optim.AdamW:
        return
    fresh = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if _is_plain(p) and p.grad is not None and p not in optimizer.state
    ]
    made = zeros([p.shape for p in fresh for _ in range(2)]) if fresh else None
    if made is None:
        return
    # The keys and the scalar step are those that torch.optim.AdamW makes itself; it skips parameters with a state.
    moments = iter(made)
    for p in fresh:
        optimizer.state[p] = {"step": torch.zeros(()), "exp_avg": next(moments), "exp_avg_sq": next(moments)}


def _is_plain(p: torch.Tensor) -> bool:
    """Whether a parameter's moments are plain CPU tensors; those of a sharded parameter (DTensor) must be sharded."""
    return type(p) is torch.nn.Parameter and p.device.type == "cpu"


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments stay in CPU memory (pinned where the weights are on a GPU).

    The moments of one parameter at a time are copied to its device for the update: the same operations as AdamW, so the
    same numbers, for two transfers of 8 bytes per parameter and step. The device needs room for the moments of the
    largest parameter only.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        if any(p.is_cuda for group in self.param_groups for p in group["params"]):
            # The copies back are asynchronous, and a checkpoint may read the moments as soon as this returns.
            torch.cuda.synchronize()

    def _update(self, p: torch.nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state.update(self.rest(p))
        # One parameter at a time, each with its whole state; non_blocking is safe, since the copies, the update and the
        # copies back are ordered by the same stream.
        visiting = {name: t.to(p.device, non_blocking=True) for name, t in state.items()}
        adamw(
            [local(p)], [local(p.grad)], [visiting["exp_avg"]], [visiting["exp_avg_sq"]], [], [visiting["step"]],
            foreach=False, fused=group["fused"], amsgrad=False, maximize=False, capturable=False, differentiable=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"],
        )  # fmt: skip
        for name, t in visiting.items():
            state[name].copy_(t, non_blocking=True)  # a no-op on the CPU, where .to() returned the same tensor

    @staticmethod
    def rest(p: torch.nn.Parameter) -> dict[str, Tensor]:
        """The state before the first step."""
        how: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "pin_memory": p.is_cuda}
        shape = local(p).shape
        return {"step": torch.zeros((), **how)} | {m: torch.zeros(shape, **how) for m in ("exp_avg", "exp_avg_sq")}


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


WATCHED = 512
"""Weights per parameter that are compared before and after an optimizer step."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A sample of each parameter's weights that have a gradient, to see whether a step changes them at all.

    An update smaller than half the distance to the next float32 number is silently lost in rounding.
    """

    parameters: tuple[torch.nn.Parameter, ...]
    values: tuple[Tensor, ...]  # before the step
    moved: tuple[Tensor, ...]  # bool: which of them have a gradient

    @staticmethod
    def before(parameters: Iterable[torch.nn.Parameter]) -> Watched:
        given = tuple(p for p in parameters if p.grad is not None)
        # A weight without gradient may rightly stand still.
        grads = tuple(_some(p.grad) != 0 for p in given if p.grad is not None)
        return Watched(given, tuple(_some(p).clone() for p in given), grads)

    def after(self, parallel: Parallel) -> dict[str, tuple[float, float]]:
        """``changed_share``: the share of the watched weights that differ now, as (changed, watched)."""
        changed = [(_some(p) != v) & g for p, v, g in zip(self.parameters, self.values, self.moved, strict=True)]
        # Of sharded weights each rank watches its own part; whole ones are the same everywhere and count once.
        counted = [parallel.rank == 0 or is_sharded(p) for p in self.parameters]
        counts = torch.tensor([int(sum(t.sum() for t, ok in zip(of, counted, strict=True) if ok))
                               for of in (changed, self.moved)])  # fmt: skip
        parallel.sum_([counts])
        number, count = counts.tolist()
        return {"changed_share": (float(number), float(count)) if count else (0.0, 1.0)}


def _some(values: Tensor) -> Tensor:
    """At most ``WATCHED`` values at a regular stride; the same positions for a parameter and its gradient."""
    flat = local(values).detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // WATCHED))]  # a rank may hold no rows of a small weight


def moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as tensors ``optimizer.<moment>.<parameter>``; empty before the first step."""
    return {
        f"optimizer.{moment}.{name}": like(torch.as_tensor(value), p)
        for name, p in parameters.items()
        for moment, value in optimizer.state.get(p, {}).items()
        if not moment.startswith("qmap")  # bitsandbytes' quantization tables: constants
    }


def load_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, Tensor | Rows],
) -> None:
    """Restores what :func:`moments` returned into an optimizer of the same kind. Raises CheckpointError where it does
    not fit, and leaves the optimizer unchanged then."""
    # By parameter name: torch's load_state_dict matches by position in the groups, and could not name what differs.
    saved = {name: t for name, t in tensors.items() if name.startswith("optimizer.")}
    before = dict(optimizer.state)  # restored on any error, so that a failed load leaves a usable optimizer
    optimizer.state.clear()
    try:
        for name, p in parameters.items():
            found = {m: saved.pop(key) for m in _KNOWN if (key := f"optimizer.{m}.{name}") in saved}
            if found:  # else the parameter has had no gradient yet
                optimizer.state[p] = _loaded(_initial(optimizer, p), found, name=name, of=p)
        if saved:
            raise CheckpointError(
                f"checkpoint: optimizer state for unknown parameters: {', '.join(sorted(saved)[:3])} ({len(saved)} "
                "in all); it was written by another model or optimizer"
            )
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise


_KNOWN = ("step", "exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")


def _initial(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> dict[str, Any]:
    """The state of ``p`` before its first step: names, shapes and dtypes that a restored state must have."""
    if isinstance(optimizer, OffloadedAdamW):
        return optimizer.rest(p)
    if isinstance(optimizer, torch.optim.AdamW):
        zeros = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
        return {"step": torch.zeros((), device=p.device), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    # bitsandbytes decides per parameter whether a moment is 8-bit, and adds its quantization tables: let it do so.
    group, index = next(
        (g, i) for g, at in enumerate(optimizer.param_groups) for i, q in enumerate(at["params"]) if q is p
    )
    eight_bit: Any = optimizer
    eight_bit.init_state(optimizer.param_groups[group], p, group, index)
    return optimizer.state.pop(p)


def _loaded(state: dict[str, Any], found: Mapping[str, Tensor | Rows], *, name: str, of: Tensor) -> dict[str, Any]:
    """``state`` with the values ``found``, which must have the same names, shapes and dtypes."""
    stored = {moment: value for moment, value in state.items() if not moment.startswith("qmap")}
    ours = {moment: like(value, of) for moment, value in stored.items() if isinstance(value, Tensor)}
    fits = found.keys() == stored.keys() and all(
        (value.shape, value.dtype) == (found[m].shape, found[m].dtype) for m, value in ours.items()
    )
    if not fits:
        raise CheckpointError(
            f"checkpoint: the optimizer state of {name} does not fit a parameter of shape {tuple(of.shape)}"
        )
    for moment in stored:
        if moment in ours:
            copy_into(ours[moment], found[moment])
        else:
            # The step of bitsandbytes, a Python number.
            state[moment] = int(whole(found[moment]))
    return state
