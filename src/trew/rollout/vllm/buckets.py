"""Fills buckets with the tensors of a version. Their form, which servers know too, is ``trew_vllm.buckets``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .plugin.trew_vllm import buckets as form
from .plugin.trew_vllm import published

BUCKET_BYTES = 64 << 20
"""Tensors are put together up to this size; one that is larger is a bucket by itself."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A bucket with its bytes."""

    bucket: form.Bucket
    data: Tensor


def in_memory(size: int) -> Tensor:
    """Bytes in this process's memory."""
    return torch.empty(size, dtype=torch.uint8)


def fill(
    tensors: Iterable[tuple[str, Tensor]],
    stored: Callable[[Tensor], torch.dtype],
    allocate: Callable[[int], Tensor] = in_memory,
) -> Iterator[Filled]:
    """Copies tensors, in the types that ``stored`` gives, into buckets whose bytes ``allocate`` makes. A tensor that
    comes under two names is copied twice."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        # Counted as it will be stored, not as it is.
        length = form.padded(tensor.numel() * stored(tensor).itemsize)
        if part and size + length > BUCKET_BYTES:
            yield _filled(part, allocate(size), stored)
            part, size = [], 0
        part.append((name, tensor.detach()))
        size += length
    if part:
        yield _filled(part, allocate(size), stored)


def _filled(part: Sequence[tuple[str, Tensor]], data: Tensor, stored: Callable[[Tensor], torch.dtype]) -> Filled:
    tensors, at = {}, 0
    for name, tensor in part:
        dtype = stored(tensor)
        length = tensor.numel() * dtype.itemsize
        data[at : at + length].view(dtype).view(tensor.shape).copy_(tensor)
        # The checksum covers the padding, so it must not be left as the memory was.
        data[at + length : at + form.padded(length)] = 0
        tensors[name] = published.Tensor(str(dtype).removeprefix("torch."), tuple(tensor.shape))
        at += form.padded(length)
    return Filled(form.Bucket(len(data), form.checksum(data), tensors), data)
