"""A paged KV cache for the rows being decoded, and the description of a pass's rows: see layers.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .arena import Arena
from .build import fields

PAGE = 32
"""Positions per page, as in layers.h."""


class TokensStruct(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "table", "prompt_length", "prompt_pages"),
        *fields(ctypes.c_void_p, "sequence", "position", "page", "place"),
        *fields(ctypes.c_int64, "table_width", "count"),
    )


class PagesStruct(ctypes.Structure):
    _fields_ = (
        ("chunks", ctypes.c_void_p),
        *fields(ctypes.c_int64, "pages_per_chunk", "page_numbers", "layer_numbers"),
    )


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the keys and values of S sequences are. A sequence's prompt lies in the first ``prompt_pages`` pages of its
    row of ``table``, which other sequences may share; the completion starts on a new page, so that shared pages are
    never written. All int32."""

    table: Tensor  # (S, pages)
    prompt_lengths: Tensor  # (S,)
    prompt_pages: Tensor  # (S,)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """N tokens of a forward pass, int32 (N,): their sequence, position in it, and page and place in the cache."""

    sequences: Sequences
    sequence: Tensor
    positions: Tensor
    pages: Tensor
    places: Tensor

    def struct(self) -> TokensStruct:
        """Returns the addresses that the kernels read; valid during the tensors' lifetime."""
        s = self.sequences
        given = (s.table, s.prompt_lengths, s.prompt_pages, self.sequence, self.positions, self.pages, self.places)
        assert all(t.is_contiguous() and t.dtype == torch.int32 for t in given)
        return TokensStruct(*(t.data_ptr() for t in given), s.table.shape[1], len(self.sequence))


class PagedCache:
    """Keys and values in pages of ``PAGE`` positions, in ``dtype``; a page holds all layers. Memory grows with the
    pages in use, in chunks of ``arena``, and never moves; freed pages are reused first, while they are in the cache."""

    def __init__(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, chunk_bytes: int = 1 << 22,
        arena: Arena | None = None,
    ) -> None:  # fmt: skip
        self.dtype, self.arena = dtype, arena or Arena()
        # Numbers that one page holds of one layer: keys and values.
        self.layer_numbers = kv_heads * head_dim * PAGE * 2
        self.page_numbers = layers * self.layer_numbers
        # At least one, however large a page of a large model is.
        self.per_chunk = max(1, chunk_bytes // (dtype.itemsize * self.page_numbers))
        self.chunks: list[Tensor] = []
        self.free: list[int] = []
        self._grow()

    def struct(self) -> PagesStruct:
        """Returns the structure that the kernels read; valid until the cache grows."""
        return self._struct

    def take(self, count: int) -> list[int]:
        """Allocates ``count`` pages; returns their numbers."""
        while len(self.free) < count:
            self._grow()
        return [self.free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        """Frees pages that no row reads anymore."""
        self.free += pages

    def _grow(self) -> None:
        # Zeros: masked entries must be finite, because 0 times NaN is NaN, and an arena's memory is not cleared.
        self.chunks.append(self.arena.alloc(self.per_chunk * self.page_numbers, dtype=self.dtype).zero_())
        first = (len(self.chunks) - 1) * self.per_chunk
        # Descending, as take() pops from the end: pages are handed out in the order of their addresses.
        self.free += range(first + self.per_chunk - 1, first - 1, -1)
        # An attribute, because the structure holds only this array's address.
        self._addresses = (ctypes.c_void_p * len(self.chunks))(*(c.data_ptr() for c in self.chunks))
        self._struct = PagesStruct(
            ctypes.cast(self._addresses, ctypes.c_void_p).value, self.per_chunk, self.page_numbers, self.layer_numbers
        )
