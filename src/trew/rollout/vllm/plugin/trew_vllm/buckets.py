"""Buckets: the tensors of a version side by side in memory, each from a multiple of 16 bytes on. Needs torch alone.

Trainer and server both use this module. A bucket is described by

    {"bytes": 1024, "checksum": "...",
     "tensors": [{"name": "model.norm.weight", "dtype": "float32", "shape": [64]}, ...]}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .published import DTYPES, Refused, Tensor

ALIGN = 16
_SIDE = 1024  # words in a row of the squares that a checksum is computed by
_WORDS = _SIDE * _SIDE


@dataclass(frozen=True)
class Bucket:
    """Size, checksum and tensors of a bucket, without its bytes."""

    size: int
    checksum: str
    tensors: Mapping[str, Tensor]

    def table(self) -> dict[str, Any]:
        """The description, as JSON."""
        rows = [{"name": name, "dtype": t.dtype, "shape": list(t.shape)} for name, t in self.tensors.items()]
        return {"bytes": self.size, "checksum": self.checksum, "tensors": rows}

    def verify(self, data: torch.Tensor, name: str) -> None:
        """Raises Refused if ``data`` are not the bytes that the trainer has. ``name``: of the bucket, in messages."""
        if (got := checksum(data)) != self.checksum:
            raise Refused(f"{name} is damaged: its checksum is {got}, expected {self.checksum}")

    def unpack(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, as views of ``data``."""
        at = 0
        for name, tensor in self.tensors.items():
            length = bytes_of(tensor)
            yield name, data[at : at + length].view(getattr(torch, tensor.dtype)).view(tensor.shape)
            at += padded(length)


def parse(tables: Any) -> tuple[Bucket, ...]:
    """Reads the descriptions of all buckets of a version. Raises Refused if they contradict themselves."""
    try:
        buckets = tuple(_parse(table) for table in tables)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"buckets: {type(error).__name__}: {error}") from None
    if not buckets or sum(len(bucket.tensors) for bucket in buckets) != len(tensors_of(buckets)):
        raise Refused("buckets: no tensors, or one of them twice")
    return buckets


def _parse(table: Mapping[str, Any]) -> Bucket:
    tensors = {str(row["name"]): Tensor(str(row["dtype"]), tuple(map(int, row["shape"]))) for row in table["tensors"]}
    bucket = Bucket(int(table["bytes"]), str(table["checksum"]), tensors)
    if strange := [name for name, tensor in tensors.items() if tensor.dtype not in DTYPES.values()]:
        raise ValueError(f"{strange[0]} is {tensors[strange[0]].dtype}")
    if len(tensors) != len(table["tensors"]) or sum(padded(bytes_of(t)) for t in tensors.values()) != bucket.size:
        raise ValueError(f"a bucket of {bucket.size} bytes holds other tensors than it should")
    return bucket


def tensors_of(buckets: Iterable[Bucket]) -> dict[str, Tensor]:
    """All tensors of these buckets."""
    return {name: tensor for bucket in buckets for name, tensor in bucket.tensors.items()}


def bytes_of(tensor: Tensor) -> int:
    """The size of a tensor, without padding."""
    size = getattr(torch, tensor.dtype).itemsize
    for length in tensor.shape:
        size *= length
    return size


def padded(size: int) -> int:
    """The size with the bytes up to the next tensor.

    >>> padded(16), padded(17)
    (16, 32)
    """
    return -(-size // ALIGN) * ALIGN


def checksum(data: torch.Tensor) -> str:
    """Two sums over the 32-bit words w_i of a bucket, modulo 2^64: of w_i, and of i w_i.

    They are sums of integers, so every device computes the same in any order. A changed word changes the first, two
    words that have changed places the second. This detects errors, not attacks.

    >>> checksum(torch.arange(16, dtype=torch.uint8)) != checksum(torch.arange(16, dtype=torch.uint8).flip(0))
    True
    """
    # No sum overflows int64: a part has 2^20 words, and its weighted sums stay below 2^61. Totals are Python integers.
    plain = weighted = 0
    for number, part in enumerate(data.view(torch.int32).split(_WORDS)):
        whole = len(part) - len(part) % _SIDE
        at = number * _WORDS
        for words, begin in ((part[:whole].view(-1, _SIDE), at), (part[whole:].view(1, -1), at + whole)):
            # Word (r, c) is number begin + r width + c: sums of rows and of columns are enough, and take no copies.
            rows, columns = words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)
            total = int(rows.sum())
            plain += total
            weighted += begin * total + words.shape[1] * _weighted(rows) + _weighted(columns)
    return f"{plain % 2**64:016x}{weighted % 2**64:016x}"


def _weighted(sums: torch.Tensor) -> int:
    """The sum of i s_i."""
    return int((sums * torch.arange(len(sums), device=sums.device)).sum())
