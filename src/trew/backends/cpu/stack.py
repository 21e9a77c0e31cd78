"""Runs the learner's layers with compiled kernels, all in one forward and one backward call: see stack.h.

T is the type of the operands and results of matrix products, float32 or bfloat16; the residual stream, queries, keys
and values and all other arithmetic are float32. Little is kept between the two passes: norms, rotated queries and keys
and gated products are computed again, and weight gradients go straight into ``grad``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ...models.anatomy import Layer, Norm, Transformer
from .arena import Arena
from .build import fields, kernel
from .layers import NormStruct
from .products import fits

TILE = 32
"""Query rows per tile, as in train_attention.h: the most queries that may share a key."""
TASKS, MOST_SHARES = 16, 4
"""The attention's backward pass is split into about TASKS tasks, and a prompt's completions into at most MOST_SHARES.
Not by the number of threads: the order of sums, and so the gradients, would depend on it."""
WIDEST = 256
"""Largest head size, as in train.h."""
NOTHING, INPUTS, ALL = range(3)
"""What a forward pass keeps for the backward pass, as in stack.h: nothing; each layer's input, from which the rest is
computed again; or all."""


class LowRankPair(Protocol):
    """A linear layer's adapter: scale B A is added to its weight."""

    @property
    def a(self) -> nn.Parameter: ...  # (rank, in)
    @property
    def b(self) -> nn.Parameter: ...  # (out, rank)
    @property
    def scale(self) -> float: ...


Passed = Callable[[int], None]
"""Called with a layer's number after its weights have been read."""
_PASSED = ctypes.CFUNCTYPE(None, ctypes.c_int64)

Split = Callable[[Any], tuple[nn.Linear, LowRankPair | None]]
"""Splits a linear layer into its base layer and its adapter, or None without an active one."""


# The structures below mirror those of the C headers, field by field: ctypes checks neither order nor type, and a
# difference would read wrong memory.


class LinearStruct(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "weight", "bias", "grad", "bias_grad", "a", "b", "a_grad", "b_grad"),
        *fields(ctypes.c_int64, "n", "depth", "half", "fresh", "rank", "even"),
        ("scale", ctypes.c_float),
    )


class TrainedNormStruct(ctypes.Structure):
    _fields_ = (("norm", NormStruct), ("grad", ctypes.c_void_p))


class TrainedLayerStruct(ctypes.Structure):
    _fields_ = (
        *fields(LinearStruct, "q", "k", "v", "o", "gate", "up", "down"),
        *fields(TrainedNormStruct, "attention", "q_norm", "k_norm", "attention_after", "mlp", "mlp_after"),
        ("table", ctypes.c_void_p),
        *fields(ctypes.c_int64, "positions", "window"),
    )


class StackStruct(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("last", TrainedNormStruct),
        *fields(ctypes.c_void_p, "embedding", "embedding_grad"),
        *fields(ctypes.c_int64, "count", "hidden", "wide", "heads", "kv_heads", "head_dim", "gelu"),
        *fields(ctypes.c_float, "embed_scale", "scaling", "cap"),
    )


class RowStruct(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "ids", "positions", "segments", "units", "read_at"),
        *fields(ctypes.c_int64, "tokens", "segment_count", "unit_count", "read", "shares"),
    )


class RowLayout:
    """A packed row of T tokens. ``segments`` (start, length, prefix start, prefix length) define which tokens attend to
    which; a segment that reads a prefix comes after the one that computes it. int64: ``ids`` and ``positions`` (T,),
    and ``read_at`` (K,), the tokens that the head reads."""

    def __init__(
        self, segments: Sequence[tuple[int, int, int, int]], *, ids: np.ndarray, positions: np.ndarray,
        read_at: np.ndarray, kv_heads: int,
    ) -> None:  # fmt: skip
        # A unit is a prompt with its completions: a segment without a prefix begins one. Units do not see each other,
        # so they are the tasks of attention; few units are split further, into shares.
        bounds = [i for i, (_, _, _, prefix) in enumerate(segments) if prefix == 0]
        units = len(bounds)
        shares = min(MOST_SHARES, -(-TASKS // (units * kv_heads)))
        # As in PackedRow of stack.h. ``bounds`` gets an end: unit u has the segments bounds[u] to bounds[u + 1].
        arrays = (ids, positions, np.array(segments, dtype=np.int64), np.array([*bounds, len(segments)]), read_at)
        # Kept as an attribute: the structure holds bare addresses, which keep nothing alive.
        self.arrays = tuple(np.ascontiguousarray(a, dtype=np.int64) for a in arrays)
        self.tokens, self.read, self.positions = len(ids), len(read_at), int(positions.max()) + 1
        self.struct = RowStruct(
            *(a.ctypes.data for a in self.arrays), self.tokens, len(segments), units, self.read, shares
        )


def unsupported(parts: Transformer) -> str | None:
    """Says why the kernels cannot run this model, in words that complete "because ..."; None if they can."""
    widths = {"hidden size": parts.embedding.weight.shape[1], "head size": parts.head_dim,
              "intermediate size": parts.layers[0].gate.out_features}  # fmt: skip
    # The kernels go over whole vectors of 16 floats, without a tail.
    for name, width in widths.items():
        if width % 16:
            return f"its {name} of {width} is not a multiple of 16"
    if parts.head_dim > WIDEST:
        return f"its head size of {parts.head_dim} is above {WIDEST}"
    if parts.heads // parts.kv_heads > TILE:
        return f"more than {TILE} of its heads share keys"
    return _unsupported_weight(parts)


def _unsupported_weight(parts: Transformer) -> str | None:
    # Of linear layers, whose weights may be of either type; embedding, head and norms are read as float32.
    small = {id(p) for layer in parts.layers for m in _linears(layer) for p in m.parameters()}
    for name, p in parts.model.named_parameters():
        if not p.is_contiguous():
            return f"its {name} does not lie in one piece"
        # A frozen linear layer may be bfloat16, the type that products cast it to. Trained weights must be float32.
        if p.dtype != torch.float32 and (p.requires_grad or p.dtype != torch.bfloat16 or id(p) not in small):
            return f"it has weights of {p.dtype}"
    return None


def _linears(layer: Layer) -> tuple[Any, ...]:
    return layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down


def _norms(layer: Layer) -> tuple[Norm | None, ...]:
    return (
        layer.attention_norm, layer.q_norm, layer.k_norm, layer.attention_after, layer.mlp_norm, layer.mlp_after,
    )  # fmt: skip


class Stack:
    """Embedding, layers and last norm of ``parts``, in T = ``dtype``. Reads the weights in place at every call."""

    def __init__(self, parts: Transformer, *, dtype: torch.dtype, split: Split) -> None:
        self.parts, self.dtype, self.split = parts, dtype, split
        self._tables: dict[str, Tensor] = {}
        self._positions = 0  # of the tables
        self._layers = (TrainedLayerStruct * len(parts.layers))()
        first = parts.layers[0]
        self._struct = StackStruct(
            layers=ctypes.addressof(self._layers), count=len(parts.layers), hidden=parts.embedding.embedding_dim,
            wide=first.gate.out_features, heads=parts.heads, kv_heads=parts.kv_heads, head_dim=parts.head_dim,
            gelu=parts.activation == "gelu_tanh", embed_scale=parts.embed_scale, scaling=parts.scaling,
            cap=parts.attention_cap,
        )  # fmt: skip
        # (module's parameters, name, parameter, address) of each weight: while all agree, the structures are valid.
        self._places: list[tuple[dict[str, Any], str, Tensor, int]] = []
        # (weight, structure, name of its field for the gradient, whether a first gradient is written and not added)
        self._trained: list[tuple[Any, Any, str, bool]] = []
        self._copies: list[Tensor] = []

    def bytes(self, row: RowLayout, *, keep: int) -> int:
        """Returns the bytes of memory that a forward pass over ``row`` takes and, if it keeps something, its backward
        pass."""
        self._point(row.positions)
        return self._bytes(row, keep)

    def forward(
        self, row: RowLayout, *, keep: int, arena: Arena, passed: Passed | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns residuals at the tokens that the head reads, before and after the last norm, (K, H) float32; and the
        memory for :meth:`backward`, valid while ``arena`` is leased."""
        # Bound to a name until the kernel returns: C calls it after each layer.
        called = None if passed is None else _PASSED(passed)
        memory = arena.alloc(self.bytes(row, keep=keep), dtype=torch.uint8)
        last, hidden = torch.empty(2, row.read, self._struct.hidden, dtype=torch.float32).unbind(0)
        kernel("stack_forward", self.dtype, "ppipppp")(
            ctypes.addressof(self._struct), ctypes.addressof(row.struct), keep, memory.data_ptr(), last.data_ptr(),
            hidden.data_ptr(), called and ctypes.cast(called, ctypes.c_void_p),
        )  # fmt: skip
        return last, hidden, memory

    def backward(self, row: RowLayout, *, keep: int, memory: Tensor, last: Tensor, gradient: Tensor) -> None:
        """Adds to the ``grad`` of all trained weights, given the ``gradient`` (K, H) float32 with respect to the last
        norm's output. Call once per forward pass of the same row, with the ``memory`` that it returned."""
        gradient = gradient.contiguous()
        assert keep
        assert gradient.shape == last.shape
        assert gradient.dtype == last.dtype == torch.float32
        assert self._bytes(row, keep) <= len(memory), "more threads than in the forward pass"
        # Here and not in forward: a pass without a backward pass allocates none.
        self._want_gradients()
        kernel("stack_backward", self.dtype, "ppippp")(
            ctypes.addressof(self._struct), ctypes.addressof(row.struct), keep, memory.data_ptr(), last.data_ptr(),
            gradient.data_ptr(),
        )  # fmt: skip

    def _bytes(self, row: RowLayout, keep: int) -> int:
        return kernel("stack_bytes", self.dtype, "ppi")(
            ctypes.addressof(self._struct), ctypes.addressof(row.struct), keep
        )  # fmt: skip

    def _point(self, positions: int) -> None:
        """Updates the addresses of the weights, and grows the rotary tables to at least this many positions."""
        # Larger tables have other addresses, which the layers' structures hold: point everything again.
        if self._positions < positions:
            made = self.parts.rotary(positions, device=torch.device("cpu"))
            self._tables, self._positions = {name: t.contiguous() for name, t in made.items()}, positions
        elif self._holds():
            return
        # In reverse, the order of the backward pass: see _want_gradients.
        self._places, self._trained, self._copies = [], [], []
        for layer, struct in zip(reversed(self.parts.layers), reversed(self._layers), strict=True):
            self._point_layer(layer, struct)
        self._point_norm(self.parts.norm, self._struct.last)
        self._struct.embedding = self._place(self.parts.embedding, "weight")
        self._trained.append((self.parts.embedding.weight, self._struct, "embedding_grad", False))
        if any(type(module) is not nn.Linear for layer in self.parts.layers for module in _linears(layer)):
            # Adapters may be switched on and off without any address changing: point again at every call.
            self._places = []

    def _holds(self) -> bool:
        """Whether every weight is the parameter, and at the address, that was recorded; costs less than to point."""
        return bool(self._places) and all(
            of.get(name) is p and p.data_ptr() == at for of, name, p, at in self._places
        )  # fmt: skip

    def _point_layer(self, layer: Layer, struct: TrainedLayerStruct) -> None:
        for module, field in zip(reversed(_linears(layer)), reversed(_LINEARS), strict=True):
            self._point_linear(module, getattr(struct, field))
        for norm, field in zip(_norms(layer), _NORMS, strict=True):
            self._point_norm(norm, getattr(struct, field))
        # A layer without rotary embedding has a null table.
        table = self._tables.get(layer.rope) if layer.rope else None
        struct.table = None if table is None else table.data_ptr()
        struct.positions, struct.window = self._positions, layer.window or 0

    def _place(self, module: nn.Module, name: str) -> int:
        """Returns the address of a parameter, and records it, to notice when the parameter is replaced or moved."""
        parameter = module._parameters[name]
        assert parameter is not None
        self._places.append((module._parameters, name, parameter, parameter.data_ptr()))
        return parameter.data_ptr()

    def _point_linear(self, module: Any, struct: LinearStruct) -> None:
        base, low = self.split(module)
        struct.n, struct.depth = base.weight.shape
        struct.weight, struct.half = self._place(base, "weight"), base.weight.dtype == torch.bfloat16
        self._trained.append((base.weight, struct, "grad", True))
        struct.bias = None
        if base.bias is not None:
            # Recorded even if a copy is used below, to notice that the parameter was replaced.
            struct.bias = self._place(base, "bias")
            self._trained.append((base.bias, struct, "bias_grad", False))
            # Frozen, since trained weights are float32: the copy cannot become stale.
            if base.bias.dtype != torch.float32:
                struct.bias = self._copy(base.bias.detach().float())
        struct.rank = struct.even = 0 if low is None else len(low.a)
        if low is not None:
            a, b = low.a.detach().float(), low.b.detach().float()  # frozen ones may be bfloat16
            # bfloat16 products take the depth in pairs: an odd rank gets a row and a column of zeros.
            if not fits(len(a), self.dtype):
                a, b = nn.functional.pad(a, (0, 0, 0, 1)), nn.functional.pad(b, (0, 1))
            # A padded copy holds the current numbers: with adapters, _point runs at every call.
            struct.a, struct.b, struct.even, struct.scale = self._copy(a), self._copy(b), len(a), low.scale
            self._trained += [(low.a, struct, "a_grad", False), (low.b, struct, "b_grad", False)]

    def _copy(self, tensor: Tensor) -> int:
        """Returns the address of a tensor that may be a copy, and keeps it alive."""
        self._copies.append(tensor)
        return tensor.data_ptr()

    def _point_norm(self, norm: Norm | None, struct: TrainedNormStruct) -> None:
        struct.norm = NormStruct.of(norm)
        if norm is not None:
            self._places.append(({"weight": norm.weight}, "weight", norm.weight, norm.weight.data_ptr()))
            self._trained.append((norm.weight, struct, "grad", False))

    def _want_gradients(self) -> None:
        """Allocates ``grad`` for every trained weight. Goes in the order of the backward pass: a weight used in several
        places (tied) is fresh only at the first, where its gradient is written; the others add to it."""
        for parameter, struct, field, written in self._trained:
            gradient = parameter.grad if parameter.requires_grad else None
            if written:
                # Without a gradient pointer, the kernels ignore it.
                struct.fresh = gradient is None
            if gradient is None and parameter.requires_grad:
                # Memory that the kernels overwrite needs no zeros, which would take a pass over all weights.
                gradient = (torch.empty_like if written else torch.zeros_like)(parameter)
                parameter.grad = gradient
            assert gradient is None or (gradient.dtype == torch.float32 and gradient.is_contiguous())
            setattr(struct, field, None if gradient is None else gradient.data_ptr())


_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
_NORMS = ("attention", "q_norm", "k_norm", "attention_after", "mlp", "mlp_after")
