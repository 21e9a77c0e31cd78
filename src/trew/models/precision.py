"""Computes in float32 with weights that are stored, or gathered from other ranks, in bfloat16."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .sharded import is_sharded


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Makes modules with weights in bfloat16 compute in float32 inside the block; converts the weights for each call,
    so that no float32 copy of the model exists."""
    # Whether sharded weights are gathered in bfloat16 is seen when the module is called.
    # A module with a forward of its own is left alone: the end of the block would remove it.
    low = [
        module for module in model.modules()
        if "forward" not in module.__dict__
        and any(p.dtype == torch.bfloat16 or is_sharded(p) for p in module.parameters(recurse=False))
    ]  # fmt: skip
    # peft rounds the input of adapters to the type of their weights.
    rounding: list[Any] = [m for m in model.modules() if getattr(m, "cast_input_dtype_enabled", False)]
    for module in low:
        converts_weights(module)
    for module in rounding:
        module.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for module in low:
            module.__dict__.pop("forward", None)
        for module in rounding:
            module.cast_input_dtype_enabled = True


def converts_weights(module: nn.Module) -> None:
    """Makes a module convert its own weights to float32 in each call, if they are in bfloat16 then."""
    module.forward = functools.partial(_converted, module)  # type: ignore[method-assign]


def _converted(module: nn.Module, *args: Any, **named: Any) -> Any:
    own = {name: p for name, p in module._parameters.items() if p is not None and p.dtype == torch.bfloat16}
    converted: dict[str, Any] = {name: p.float() for name, p in own.items()}
    # Into the table itself: assigning an attribute accepts Parameters only. p.float() keeps the path of the gradient to
    # p.
    module._parameters.update(converted)
    try:
        # The class's forward: the module's own is this function.
        return type(module).forward(module, *args, **named)
    finally:
        module._parameters.update(own)
