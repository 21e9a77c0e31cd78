"""Runs all layers of a decoder in one kernel call: norms, products, rotary embedding, attention over pages.

T is the type of the operands of matrix products, and of the cache: float32 or bfloat16. Results of products, the
residual stream and all other arithmetic are float32. All widths are multiples of 16. With one call per product or norm,
Python's overhead would be as large as the arithmetic of a small model.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...models.anatomy import Layer, Norm, Transformer, weight_of
from .arena import Arena
from .build import fields, kernel
from .pages import PagedCache, PagedRows
from .products import WeightMatrix, packed_size

WIDTH = 16
"""Every width must be a multiple of this."""
WIDEST = 1024
"""Largest head size, as in layers.h."""


# The structures mirror layers.h field by field: ctypes checks neither order nor types.
class NormStruct(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("offset", ctypes.c_float), ("eps", ctypes.c_float))

    @classmethod
    def of(cls, norm: Norm | None) -> NormStruct:
        # All zero, with a null weight: no norm.
        return cls(norm.weight.data_ptr(), norm.offset, norm.eps) if norm else cls()


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "qkv", "o", "gate", "up", "down"),
        *fields(NormStruct, "attention", "q", "k", "attention_after", "mlp", "mlp_after"),
        ("table", ctypes.c_void_p),
        *fields(ctypes.c_int64, "positions", "window"),
    )


class DecoderStruct(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("last", NormStruct),
        *fields(ctypes.c_int64, "count", "hidden", "heads", "kv_heads", "head_dim", "gelu"),
        *fields(ctypes.c_float, "scaling", "cap"),
    )


class _Room(ctypes.Structure):
    _fields_ = fields(ctypes.c_void_p, "normed", "qkv", "q", "attended", "gated", "delta", "scratch")


@dataclass(frozen=True, slots=True)
class _Matrices:
    """One layer's weights, laid out for products in T."""

    qkv: WeightMatrix
    o: WeightMatrix
    gate: WeightMatrix
    up: WeightMatrix
    down: WeightMatrix

    @staticmethod
    def of(layer: Layer, dtype: torch.dtype, arena: Arena | None) -> _Matrices:
        each = ((layer.q, layer.k, layer.v), (layer.o,), (layer.gate,), (layer.up,), (layer.down,))
        return _Matrices(*(packed(*modules, dtype=dtype, arena=arena) for modules in each))


class Layers:
    """The layers of ``parts`` in T = ``dtype``, their weights laid out when it is made, in ``arena`` or else in the
    heap: for one ``generate`` call."""

    def __init__(self, parts: Transformer, *, dtype: torch.dtype, positions: int, arena: Arena | None = None) -> None:
        self.parts, self.dtype = parts, dtype
        device = parts.embedding.weight.device
        # (2, positions, D) each, cosines and sines. Attributes, because the structures hold bare addresses.
        self._tables = {k: t.contiguous() for k, t in parts.rotary(positions, device=device).items()}
        self._matrices = [_Matrices.of(layer, dtype, arena) for layer in parts.layers]
        # Only norms after a block (Gemma) need its output apart; otherwise products add to the residual directly.
        self._after = any(layer.attention_after or layer.mlp_after for layer in parts.layers)
        # Each matrix names the one that is multiplied next, to prefetch it. Gate and up are one step, entered by gate.
        for m, following in zip(self._matrices, [*self._matrices[1:], None], strict=True):
            after = None if following is None else following.qkv
            for w, then in ((m.qkv, m.o), (m.o, m.gate), (m.gate, m.down), (m.down, after)):
                w.then(then)
        layers = zip(parts.layers, self._matrices, strict=True)
        self._layers = (LayerStruct * len(parts.layers))(*(self._layer(layer, w) for layer, w in layers))
        self._struct = DecoderStruct(
            ctypes.addressof(self._layers), NormStruct.of(parts.norm), len(parts.layers),
            parts.embedding.embedding_dim, parts.heads, parts.kv_heads, parts.head_dim,
            parts.activation == "gelu_tanh", parts.scaling, parts.attention_cap,
        )  # fmt: skip

    def _layer(self, layer: Layer, w: _Matrices) -> LayerStruct:
        norms = (
            layer.attention_norm,
            layer.q_norm,
            layer.k_norm,
            layer.attention_after,
            layer.mlp_norm,
            layer.mlp_after,
        )
        table = self._tables[layer.rope] if layer.rope else None
        # A null table means no rotary embedding; window 0 means all positions up to the query's own.
        return LayerStruct(
            *(matrix.pointer for matrix in (w.qkv, w.o, w.gate, w.up, w.down)), *map(NormStruct.of, norms),
            None if table is None else table.data_ptr(), 0 if table is None else table.shape[1], layer.window or 0,
        )  # fmt: skip

    def forward(self, x: Tensor, rows: PagedRows, cache: PagedCache) -> Tensor:
        """Returns the last norm's output (N, H) of T, for embeddings ``x`` (N, H) float32, which it overwrites. Writes
        the rows' keys and values into the cache; each query then sees the cache up to its own position."""
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        assert len(x) == len(rows.sequence)
        assert cache.dtype == self.dtype
        # All layers have the same widths: the first one's matrices size the buffers of all.
        parts, w = self.parts, self._matrices[0]
        n, queries = len(x), parts.heads * parts.head_dim
        scratch = kernel("layers_scratch", self.dtype, "pi")(ctypes.addressof(self._struct), n)
        # In the order of _Room. torch allocates them, so that lacking memory raises an error here and not in C.
        room = (
            torch.empty(x.shape, dtype=self.dtype), torch.empty(n, w.qkv.n, dtype=torch.float32),
            torch.empty(n, queries, dtype=torch.float32),
            torch.empty(n, queries, dtype=self.dtype), torch.empty(n, w.up.n, dtype=self.dtype),
            torch.empty(x.shape if self._after else 0, dtype=torch.float32), torch.empty(scratch, dtype=torch.float32),
        )  # fmt: skip
        # Bound to a name until the kernel returns: addressof keeps nothing alive.
        given = cache.struct(), rows.struct(), _Room(*(t.data_ptr() for t in room))
        pages, tokens, addresses = map(ctypes.addressof, given)
        kernel("layers", self.dtype, "ppppp")(
            ctypes.addressof(self._struct), pages, tokens, x.data_ptr(), addresses
        )  # fmt: skip
        return room[0]


def packed(*modules: nn.Linear, dtype: torch.dtype, arena: Arena | None = None) -> WeightMatrix:
    """Packs the weights of ``modules`` as one matrix, with their outputs side by side."""
    rows, depth = sum(m.out_features for m in modules), modules[0].in_features
    out = None if arena is None else arena.alloc(packed_size(rows, depth), dtype=dtype)
    bias = None
    if any(m.bias is not None for m in modules):
        bias = torch.cat(
            [
                torch.zeros(m.out_features, dtype=torch.float32) if m.bias is None else m.bias.detach().float()
                for m in modules
            ]
        )
    # Temporaries go to the arena, which takes them back whole. In the heap, small objects that stay keep the matrices
    # that are freed apart, in some runs for half as much as all the weights.
    with nullcontext() if arena is None else arena.again():
        weight = _side_by_side(modules, torch.empty if arena is None else arena.alloc)
        return WeightMatrix.packed(weight, bias, dtype=dtype, out=out)


def _side_by_side(modules: Sequence[nn.Linear], empty: Callable[..., Tensor]) -> Tensor:
    """The modules' weights one below the other, in float32 or bfloat16."""
    each = [weight_of(m, empty=empty) for m in modules]
    weights = [w if w.dtype == torch.bfloat16 else w.float() for w in each]
    if len(weights) == 1:
        return weights[0].contiguous()
    # float32 if one of them is: a type that loses nothing, since T is applied when the matrix is packed.
    widest = functools.reduce(torch.promote_types, (w.dtype for w in weights))
    rows = sum(len(w) for w in weights)
    return torch.cat(weights, out=empty(rows, weights[0].shape[1], dtype=widest))
