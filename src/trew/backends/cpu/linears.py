"""Computes the linear layers of models that run their own ``forward`` with compiled products, on CPUs.

``packed_forwards`` are for generation: weights laid out once for the few rows of many decoding steps. ``linears`` is
for training: forward and both backward products. ``linear = "plain"`` in a recipe switches both off;
`benchmarks/paths.py` measures what they gain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from . import training as kernels
from .build import library
from .layers import WIDTH
from .products import WeightMatrix, fits, product


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers on ``device`` can be computed in ``dtype`` by the compiled products."""
    plain = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    return plain and not isinstance(library(), str)


Forward = Callable[[Tensor], Tensor]
"""The ``forward`` of a linear layer."""


def packed_forwards(model: nn.Module, *, autocast: torch.dtype | None) -> dict[nn.Linear, Forward]:
    """Makes, for every plain float32 ``nn.Linear`` of ``model``, a forward pass with packed weights, in ``autocast``'s
    precision if given. Packs the current weights: nothing shows when an optimizer changes them in place, so later
    changes are ignored. Empty where ``available`` says no. Only for use without gradients.
    """
    dtype = autocast or torch.float32
    return {layer: _packed_forward(layer, dtype) for layer in _layers(model, dtype)}


@contextlib.contextmanager
def linears(model: nn.Module) -> Iterator[None]:
    """Lets every plain float32 ``nn.Linear`` of ``model`` compute, forward and backward, by the products.

    The backward pass may come after the block. Does nothing where ``available`` says no.
    """
    with exchanged({layer: _forward(layer) for layer in _layers(model, torch.float32)}):
        yield


def _layers(model: nn.Module, dtype: torch.dtype) -> list[nn.Linear]:
    """Returns the layers to replace. Excludes fake tensors, on which a pass is only planned, and layers whose forward
    is already wrapped: replacing it would drop the wrapper."""
    # Exact type: a subclass may compute something else.
    found = [m for m in model.modules() if type(m) is nn.Linear and m.weight.dtype == torch.float32]
    found = [m for m in found if available(m.weight.device, dtype) and fits(m.in_features, dtype)]
    return [m for m in found if not isinstance(m.weight, FakeTensor) and "forward" not in m.__dict__]


@contextlib.contextmanager
def exchanged(forwards: Mapping[nn.Linear, Forward]) -> Iterator[None]:
    """Replaces the layers' ``forward`` inside the block."""
    try:
        for layer, forward in forwards.items():
            layer.forward = forward  # type: ignore[method-assign]
        yield
    finally:
        for layer in forwards:
            # Without the instance's attribute, the class's method is found again.
            layer.__dict__.pop("forward", None)


class _Linear(torch.autograd.Function):
    """y = x W^T + b;  dx = dy W,  dW = dy^T x,  db = sum of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _rows(x, WeightMatrix.of(weight, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return _gradients(ctx, grads[0], _by_input, _by_weight)


def _gradients(
    ctx: Any, dy: Tensor, by_input: Any, by_weight: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad
    return (
        by_input(dy, weight) if need_x else None,
        by_weight(dy, x) if need_weight else None,
        # (..., n) -> (rows, n) -> (n,).
        dy.flatten(0, -2).sum(0) if need_bias else None,
    )


def _by_input(dy: Tensor, weight: Tensor) -> Tensor:
    return _rows(dy, WeightMatrix.of(weight, transposed=True))


def _by_weight(dy: Tensor, x: Tensor) -> Tensor:
    return _outer(dy.flatten(0, -2).contiguous(), x.flatten(0, -2))


# The same for compiled graphs (learner.compile): torch.compile keeps a custom operator as one opaque node, while it
# traces into an autograd.Function. Outside of graphs, custom operators take 0.2 ms longer per layer.


@torch.library.custom_op("trew::linear", mutates_args=())
def _linear_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _rows(x, WeightMatrix.of(weight, bias))


_by_input_op = torch.library.custom_op("trew::linear_by_input", _by_input, mutates_args=())
_by_weight_op = torch.library.custom_op("trew::linear_by_weight", _by_weight, mutates_args=())
_linear_op.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))
_by_input_op.register_fake(lambda dy, weight: dy.new_empty(*dy.shape[:-1], weight.shape[1]))
_by_weight_op.register_fake(lambda dy, x: dy.new_empty(dy.shape[-1], x.shape[-1]))
_linear_op.register_autograd(
    lambda ctx, dy: _gradients(ctx, dy, _by_input_op, _by_weight_op),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)


def _outer(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x."""
    # The kernel goes over whole vectors of x's width, without a tail.
    if x.shape[1] % WIDTH:
        return dy.t() @ x
    into = torch.empty(dy.shape[1], x.shape[1], dtype=torch.float32)
    kernels.add_outer(dy, x.contiguous(), into, add=False)
    return into


def _rows(x: Tensor, w: WeightMatrix) -> Tensor:
    """Returns x (..., depth) times W^T plus bias: (..., n)."""
    # (..., depth) -> (rows, depth) -> (..., n). Not view(): what an autograd.Function returns as a view may not be
    # changed in place, as Gemma 3n and Llama 4 do.
    return torch.ops.aten._unsafe_view(product(x.reshape(-1, w.depth).contiguous(), w), [*x.shape[:-1], w.n])


def _forward(layer: nn.Linear) -> Forward:
    def forward(x: Tensor) -> Tensor:
        # The layer's attributes are read at every call: they may be replaced between two.
        run = _linear_op if torch.compiler.is_compiling() else _Linear.apply
        return run(x, layer.weight, layer.bias)

    return forward


def _packed_forward(layer: nn.Linear, dtype: torch.dtype) -> Forward:
    packed = WeightMatrix.packed(layer.weight.detach(), layer.bias, dtype=dtype)
    return lambda x: _rows(x.to(dtype), packed)
