"""Linear layers of models that run through their own ``forward``, through oneDNN on CPUs: the same products as torch's
own path, faster on some machines (`benchmarks/linear.py` measures it).

``packed_linears`` is for generation: weights laid out once for the few rows of many decoding steps, where torch would
repack them in every call. ``linears`` is for training: forward and both backward products. ``linear = "plain"`` in a
recipe switches both off.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# oneDNN keeps the code that it makes for every shape, half a megabyte each and 1,024 of them: it looks here before its
# first product. A step works with a few dozen shapes; the lengths of the next one are others anyway.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch, on this machine, has the packed product. The operators are those that torch.compile uses."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_linear_pointwise") and hasattr(operators, "_reorder_linear_weight")):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


@contextlib.contextmanager
def packed_linears(model: nn.Module, *, rows: int, autocast: torch.dtype | None) -> Iterator[None]:
    """Lets every plain ``nn.Linear`` of ``model`` compute with packed weights, in ``autocast``'s precision if given.

    ``rows``: how many rows most products have; oneDNN chooses the layout by it. The weights are packed anew each time
    (0.2 s for 135 M parameters), as an optimizer may change them without a trace; the copies are freed at the end.
    Does nothing where ``available`` says no. Only for use without gradients.
    """
    dtype = autocast or torch.float32
    with _exchanged(_layers(model, dtype), lambda layer: _packed_forward(layer, rows, dtype)):
        yield


@contextlib.contextmanager
def linears(model: nn.Module) -> Iterator[None]:
    """Lets every plain float32 ``nn.Linear`` of ``model`` compute, forward and backward, through oneDNN.

    The backward pass may come after the block. Does nothing where ``available`` says no.
    """
    with _exchanged(_layers(model, torch.float32), _forward):
        yield


def _layers(model: nn.Module, dtype: torch.dtype) -> list[nn.Linear]:
    """The layers to exchange: all plain ones, or none where the operator is missing for one of them."""
    found = [m for m in model.modules() if type(m) is nn.Linear and m.weight.dtype == torch.float32]
    return found if all(available(layer.weight.device, dtype) for layer in found) else []


@contextlib.contextmanager
def _exchanged(
    layers: Sequence[nn.Linear], forward: Callable[[nn.Linear], Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """``layer.forward`` exchanged inside the block; a layer that somebody else has wrapped stays as it is."""
    free = [layer for layer in layers if "forward" not in layer.__dict__]
    try:
        for layer in free:
            layer.forward = forward(layer)  # type: ignore[method-assign]
        yield
    finally:
        for layer in free:
            layer.__dict__.pop("forward", None)


def product(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    """x (..., K) times weight (N, K) transposed, plus bias (N,) or ``add`` (..., N) -> (..., N)."""
    if add is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, weight, bias, "add")
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """y = x W^T + b;  dx = dy W,  dW = dy^T x,  db = sum of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy = grads[0]
        need_x, need_weight, _ = ctx.needs_input_grad
        flat = dy.flatten(0, -2)
        return (
            product(dy, weight.t()) if need_x else None,
            product(flat.t(), x.flatten(0, -2).t()) if need_weight else None,
            flat.sum(0) if ctx.has_bias else None,
        )


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: _Linear.apply(x, layer.weight, layer.bias)


def _packed_forward(layer: nn.Linear, rows: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype), rows)
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def forward(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.to(dtype), weight, bias, "none", [], "")

    return forward
