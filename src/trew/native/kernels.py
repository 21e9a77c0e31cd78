"""The compiled row kernels, called with tensors. T is the type of what matrix products take: float32 or bfloat16;
arithmetic, what products give, the residual stream, and the cache are float32. All widths are multiples of 16.

===========  =========================================================================================================
add_norm     x += norm(delta; after), where there is a delta;  out = norm(x; weight)
rotate       queries and keys of rows [q | k | v]: normed per head, turned by position; keys and values into the cache
attend       softmax(q K) V of each row over the pages of its sequence, up to its own position
===========  =========================================================================================================
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .build import library
from .family import Norm

PAGE = 32
"""Positions of one page, as in kernels.c."""
WIDTH = 16
"""Every width must be a multiple of it."""

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_ARGUMENTS = {"add_norm": "ppppfffpii", "attend": "pppipippppifiiii"}
_ROTATE = "pppipppfffpippiiii"
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


class _Pages(ctypes.Structure):
    _fields_ = (
        ("chunks", ctypes.c_void_p),
        ("pages_per_chunk", ctypes.c_int64),
        ("page_floats", ctypes.c_int64),
        ("layer_floats", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions for one T."""

    dtype: torch.dtype
    _add_norm: Any
    _attend: Any
    _rotate: Any

    @staticmethod
    def of(dtype: torch.dtype) -> Kernels | str:
        """The kernels for ``dtype``, or why there are none, in words that complete "because ..."."""
        found = library()
        if isinstance(found, str):
            return found
        if dtype not in _SUFFIX:
            return f"there are none for {dtype}"
        functions = []
        for name, arguments in _ARGUMENTS.items():
            function = getattr(found, f"{name}_{_SUFFIX[dtype]}")
            function.argtypes, function.restype = [_TYPES[a] for a in arguments], None
            functions.append(function)
        found.rotate.argtypes, found.rotate.restype = [_TYPES[a] for a in _ROTATE], None
        functions.append(found.rotate)
        return Kernels(dtype, *functions)

    def add_norm(self, x: Tensor, delta: Tensor | None, *, after: Norm | None, norm: Norm, out: Tensor) -> None:
        """x (rows, H) float32, in place; delta (rows, H) float32, out (rows, H) of T."""
        self._add_norm(
            x.data_ptr(), None if delta is None else delta.data_ptr(), after and after.weight.data_ptr(),
            norm.weight.data_ptr(), norm.offset, after.eps if after else 0.0, norm.eps, out.data_ptr(), *x.shape,
        )  # fmt: skip

    def rotate(
        self, qkv: Tensor, *, q: Tensor, kv_heads: int, table: Tensor | None, q_norm: Norm | None, k_norm: Norm | None,
        scaling: float, cache: PagedCache, layer: int, rows: Rows,
    ) -> None:  # fmt: skip
        """qkv (rows, (H + 2 K) D) float32 -> q (rows, H, D) float32, times ``scaling``; keys and values into the cache.
        ``table`` (2, positions, D): cosines and sines; None = not turned."""
        norm = q_norm or k_norm
        self._rotate(
            qkv.data_ptr(), q.data_ptr(), None if table is None else table.data_ptr(),
            0 if table is None else table.shape[1], rows.positions.data_ptr(),
            q_norm and q_norm.weight.data_ptr(), k_norm and k_norm.weight.data_ptr(),
            norm.offset if norm else 0.0, norm.eps if norm else 0.0, scaling,
            cache.pointer, layer, rows.pages.data_ptr(), rows.places.data_ptr(),
            *q.shape[:2], kv_heads, q.shape[2],
        )  # fmt: skip

    def attend(
        self, q: Tensor, *, out: Tensor, kv_heads: int, cache: PagedCache, layer: int, rows: Rows, window: int | None,
        cap: float,
    ) -> None:  # fmt: skip
        """q (rows, H, D) float32 -> out (rows, H D) of T."""
        s = rows.sequences
        self._attend(
            q.data_ptr(), out.data_ptr(), cache.pointer, layer, s.table.data_ptr(), s.table.shape[1],
            rows.sequence.data_ptr(), s.prompt_lengths.data_ptr(), s.prompt_pages.data_ptr(),
            rows.positions.data_ptr(), window or 0, cap, len(q), q.shape[1], kv_heads, q.shape[2],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sequences:
    """S sequences: where their keys and values are. Those of the prompt lie in the first ``prompt_pages`` pages of a
    row of ``table``, which may be other sequences' too; what follows begins a page of its own. int32 all."""

    table: Tensor  # (S, pages)
    prompt_lengths: Tensor  # (S,)
    prompt_pages: Tensor  # (S,)


@dataclass(frozen=True, slots=True)
class Rows:
    """N tokens of a forward pass, int32 (N,): whose they are, where in the sequence, and where in the cache."""

    sequences: Sequences
    sequence: Tensor
    positions: Tensor
    pages: Tensor
    places: Tensor


class PagedCache:
    """Keys and values in pages of ``PAGE`` positions, float32; a page holds all layers. Memory grows with the pages in
    use, in chunks, and never moves; what is given back is used again first."""

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, chunk_bytes: int = 1 << 22) -> None:
        self.layer_floats = kv_heads * head_dim * PAGE * 2
        self.page_floats = layers * self.layer_floats
        self.per_chunk = max(1, chunk_bytes // (4 * self.page_floats))
        self.chunks: list[Tensor] = []
        self.free: list[int] = []
        self._grow()

    @property
    def pointer(self) -> int:
        return ctypes.addressof(self._struct)

    def take(self, count: int) -> list[int]:
        """The numbers of ``count`` pages."""
        while len(self.free) < count:
            self._grow()
        return [self.free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        """Pages that nobody reads any more."""
        self.free += pages

    def _grow(self) -> None:
        # Zeros: what is masked must be a number, as 0 times NaN is NaN.
        self.chunks.append(torch.zeros(self.per_chunk * self.page_floats))
        first = (len(self.chunks) - 1) * self.per_chunk
        self.free += range(first + self.per_chunk - 1, first - 1, -1)
        self._addresses = (ctypes.c_void_p * len(self.chunks))(*(c.data_ptr() for c in self.chunks))
        self._struct = _Pages(
            ctypes.cast(self._addresses, ctypes.c_void_p).value, self.per_chunk, self.page_floats, self.layer_floats
        )
