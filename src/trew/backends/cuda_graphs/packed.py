"""Packs a model's weights for a decoder's products, in tensors whose addresses stay the same.

q, k and v are joined into one matrix, gate and up into another, with adapters added, in the type of the computation. A
weight that already has this form (not joined, of that type, without adapters) is used in place, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.anatomy import Layer, Norm, Transformer, weight_of


@dataclass(frozen=True, slots=True)
class JoinedLinears:
    """Computes y = W x + b for several linear layers with concatenated outputs. ``own``: W is a copy, which
    :meth:`load` fills."""

    weight: Tensor
    bias: Tensor | None
    own: bool

    @classmethod
    def of(cls, modules: Sequence[nn.Linear], dtype: torch.dtype) -> JoinedLinears:
        weights = [weight_of(m) for m in modules]
        # Only a single plain matrix of the right type; an adapter's weight is a sum, made anew for each schedule.
        shared = len(modules) == 1 and type(modules[0]) is nn.Linear and weights[0].dtype == dtype
        outputs = sum(map(len, weights))
        bias = None
        # Modules without a bias keep their zeros.
        if any(m.bias is not None for m in modules):
            bias = weights[0].new_zeros(outputs, dtype=dtype)
        # Uninitialised: load() fills it, here and in RMSNorm.of.
        weight = weights[0] if shared else weights[0].new_empty((outputs, weights[0].shape[1]), dtype=dtype)
        return cls(weight, bias, not shared)

    def load(self, modules: Sequence[nn.Linear]) -> bool:
        """Copies the current weights; False if a weight used in place is no longer the model's tensor, since graphs
        would keep reading the old address."""
        begin = 0
        for module in modules:
            weight = weight_of(module)
            part = slice(begin, begin + len(weight))
            if self.own:
                self.weight[part].copy_(weight)
            elif weight.data_ptr() != self.weight.data_ptr() or weight.dtype != self.weight.dtype:
                return False
            if self.bias is not None and module.bias is not None:
                self.bias[part].copy_(module.bias.detach())
            begin = part.stop
        return True

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """RMS norm over the last dimension, with its result in ``dtype``: x w / sqrt(mean(x^2) + eps), x and w float32."""

    weight: Tensor  # (n,), or (heads, n)
    eps: float
    dtype: torch.dtype

    @classmethod
    def of(cls, norm: Norm | None, dtype: torch.dtype) -> RMSNorm | None:
        return None if norm is None else cls(torch.empty_like(norm.weight, dtype=torch.float32), norm.eps, dtype)

    @classmethod
    def of_heads(cls, layer: Layer, heads: int, kv_heads: int, dtype: torch.dtype) -> RMSNorm | None:
        """Joins the norms of queries and keys, whose heads are adjacent in the product: one kernel norms both."""
        q, k = layer.q_norm, layer.k_norm
        if q is None or k is None:
            return None
        assert q.eps == k.eps
        return cls(q.weight.new_empty((heads + kv_heads, len(q.weight)), dtype=torch.float32), q.eps, dtype)

    def load(self, *norms: tuple[slice, Norm]) -> None:
        for part, norm in norms:
            # Gemma stores the difference from 1: offset is 1 there and 0 elsewhere.
            self.weight[part] = norm.weight.detach() + norm.offset

    def __call__(self, x: Tensor) -> Tensor:
        # rms_norm takes one weight for all heads: a weight per head is multiplied afterwards.
        if self.weight.dim() == 1:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(self.dtype)
        return (F.rms_norm(x, self.weight.shape[-1:], None, self.eps) * self.weight).to(self.dtype)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    qkv: JoinedLinears
    o: JoinedLinears
    gate_up: JoinedLinears
    down: JoinedLinears
    attention_norm: RMSNorm
    heads_norm: RMSNorm | None
    attention_after: RMSNorm | None
    mlp_norm: RMSNorm
    mlp_after: RMSNorm | None


class Packed:
    """Holds all weights of ``parts`` in ``dtype``; norms in float32. Valid once :meth:`load` has returned True."""

    def __init__(self, parts: Transformer, dtype: torch.dtype) -> None:
        self.dtype, self.heads = dtype, parts.heads
        self.embedding = parts.embedding.weight.detach()
        self.layers = tuple(_layer(layer, parts, dtype) for layer in parts.layers)
        self.norm = _present(RMSNorm.of(parts.norm, dtype))
        self.head = JoinedLinears.of([parts.head], dtype)

    @property
    def copies(self) -> list[Tensor]:
        """The matrices that are copies, not the model's own tensors."""
        matrices = [self.head, *(matrix for layer in self.layers for matrix in _of(layer))]
        return [matrix.weight for matrix in matrices if matrix.own]

    def load(self, parts: Transformer) -> bool:
        """Copies the current weights. Returns False if tensors of the model that are read in place were replaced: this
        object cannot be used afterwards."""
        if parts.embedding.weight.data_ptr() != self.embedding.data_ptr():
            return False
        self.norm.load((slice(None), parts.norm))
        return self.head.load([parts.head]) and all(
            self._load(packed, layer) for packed, layer in zip(self.layers, parts.layers, strict=True)
        )

    def _load(self, packed: PackedLayer, layer: Layer) -> bool:
        for name in ("attention_norm", "attention_after", "mlp_norm", "mlp_after"):
            if (norm := getattr(layer, name)) is not None:
                getattr(packed, name).load((slice(None), norm))
        if packed.heads_norm is not None and layer.q_norm is not None and layer.k_norm is not None:
            packed.heads_norm.load((slice(self.heads), layer.q_norm), (slice(self.heads, None), layer.k_norm))
        return all(matrix.load(modules) for matrix, modules in zip(_of(packed), _modules(layer), strict=True))


def _layer(layer: Layer, parts: Transformer, dtype: torch.dtype) -> PackedLayer:
    qkv, o, gate_up, down = (JoinedLinears.of(modules, dtype) for modules in _modules(layer))
    # Norms before a product give its operand, in T. Norms of heads and those after a block go on in float32: into the
    # rotation, and into the residual stream.
    return PackedLayer(
        qkv=qkv, o=o, gate_up=gate_up, down=down,
        attention_norm=_present(RMSNorm.of(layer.attention_norm, dtype)),
        heads_norm=RMSNorm.of_heads(layer, parts.heads, parts.kv_heads, torch.float32),
        attention_after=RMSNorm.of(layer.attention_after, torch.float32),
        mlp_norm=_present(RMSNorm.of(layer.mlp_norm, dtype)),
        mlp_after=RMSNorm.of(layer.mlp_after, torch.float32),
    )  # fmt: skip


def _of(packed: PackedLayer) -> tuple[JoinedLinears, ...]:
    return packed.qkv, packed.o, packed.gate_up, packed.down


def _modules(layer: Layer) -> tuple[list[nn.Linear], ...]:
    return [layer.q, layer.k, layer.v], [layer.o], [layer.gate, layer.up], [layer.down]


def _present(scale: RMSNorm | None) -> RMSNorm:
    assert scale is not None
    return scale
