"""The learner's compiled kernels that stand alone, called with tensors: rows of the output head, and gradients of
weights. For its layers see :mod:`.stack`."""

from __future__ import annotations

import torch
from torch import Tensor

from .build import kernel

SHARED, OWN = 1 << 20, 1 << 17
"""Numbers packed for a weight's gradient, by all threads and by each: OUTER_RIGHT and OUTER_LEFT of outer.h."""


def head_normalise(z: Tensor, *, cap: float, temperature: float, entropies: bool) -> tuple[Tensor, Tensor | None]:
    """Products z (n, V) become logits, capped and over the temperature, in place; their log sum exp and entropies."""
    normaliser = torch.empty(len(z))
    entropy = torch.empty(len(z)) if entropies else None
    assert z.is_contiguous()
    kernel("head_normalise", None, "pppiiff")(*_at(z, normaliser, entropy), *z.shape, cap, temperature)
    return normaliser, entropy


def head_differentiate(
    z: Tensor, normaliser: Tensor, *, weight: Tensor, slope: Tensor | None, entropy: Tensor | None, cap: float,
    temperature: float,
) -> None:  # fmt: skip
    """In place: - p (weight + slope (log p + entropy)), through the cap."""
    given = z, normaliser, weight, slope, entropy
    assert all(t is None or t.is_contiguous() for t in given)
    kernel("head_differentiate", None, "pppppiiff")(*_at(*given), *z.shape, cap, temperature)


def head_round(z: Tensor) -> Tensor:
    """z (n, V) float32 in bfloat16, in the same memory: rows of 2 V numbers, of which the first V are z."""
    assert z.is_contiguous()
    kernel("head_round", None, "pii")(z.data_ptr(), *z.shape)
    return z.view(torch.bfloat16)[:, : z.shape[1]]


def add_outer(a: Tensor, b: Tensor, into: Tensor, *, add: bool = True) -> None:
    """``into`` (N, K) float32 = or += a^T b, where a (T, N) and b (T, K) are of one type and may be columns of wider
    matrices; K is a multiple of 16."""
    assert a.stride(1) == b.stride(1) == 1
    scratch = torch.empty(SHARED + OWN * torch.get_num_threads())
    kernel("outer", a.dtype, "pipipiiiip")(
        a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), into.data_ptr(), len(a), a.shape[1], b.shape[1], add,
        scratch.data_ptr(),
    )  # fmt: skip


def _at(*tensors: Tensor | None) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]
