"""Calls the learner's separate compiled kernels: rows of the output head, and weight gradients. For its layers see
:mod:`.stack`."""

from __future__ import annotations

import torch
from torch import Tensor

from .build import kernel

SHARED, OWN = 1 << 20, 1 << 17
"""Scratch floats for a weight's gradient, shared by all threads and per thread: OUTER_RIGHT, OUTER_LEFT of outer.h."""


def head_normalise(z: Tensor, *, cap: float, temperature: float, entropies: bool) -> tuple[Tensor, Tensor | None]:
    """Turns products z (n, V) into logits in place: capped, and divided by the temperature. Returns their log-sum-exp
    and entropies."""
    normaliser = torch.empty(len(z), dtype=torch.float32)
    entropy = torch.empty(len(z), dtype=torch.float32) if entropies else None
    assert z.is_contiguous()
    kernel("head_normalise", None, "pppiiff")(*_at(z, normaliser, entropy), *z.shape, cap, temperature)
    return normaliser, entropy


def head_differentiate(
    z: Tensor, normaliser: Tensor, *, weight: Tensor, slope: Tensor | None, entropy: Tensor | None, cap: float,
    temperature: float,
) -> None:  # fmt: skip
    """Replaces logits z by -p (weight + slope (log p + entropy)), back through the cap. In place, because a second
    (n, V) buffer would double the head's peak."""
    given = z, normaliser, weight, slope, entropy
    assert all(t is None or t.is_contiguous() for t in given)
    kernel("head_differentiate", None, "pppppiiff")(*_at(*given), *z.shape, cap, temperature)


def head_round(z: Tensor) -> Tensor:
    """Rounds z (n, V) float32 to bfloat16 in the same memory. The result is strided: rows of 2 V numbers, of which the
    first V are z."""
    assert z.is_contiguous()
    kernel("head_round", None, "pii")(z.data_ptr(), *z.shape)
    return z.view(torch.bfloat16)[:, : z.shape[1]]


def add_outer(a: Tensor, b: Tensor, into: Tensor, *, add: bool = True) -> None:
    """Computes ``into`` (N, K) float32 = or += a^T b, where a (T, N) and b (T, K) have one type and may be columns of
    wider matrices; K is a multiple of 16."""
    assert a.stride(1) == b.stride(1) == 1
    # From torch, so that lacking memory raises an error here and not in C.
    scratch = torch.empty(SHARED + OWN * torch.get_num_threads(), dtype=torch.float32)
    kernel("outer", a.dtype, "pipipiiiip")(
        a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), into.data_ptr(), len(a), a.shape[1], b.shape[1], add,
        scratch.data_ptr(),
    )  # fmt: skip


def _at(*tensors: Tensor | None) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]
