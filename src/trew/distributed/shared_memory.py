"""Exchanges weights and gradients between ranks on the CPUs of one machine through memory, in place of sockets."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Bytes that all ranks together write at a time. A wait for each other takes a fifth of a millisecond, in which a rank
# copies about a MiB: with much less they would only wait.
HALF = 1 << 23

# Memory that has no disk behind it. A system without it (macOS) keeps gloo.
MEMORY = Path("/dev/shm")


class SharedMemory:
    """Memory that the ranks of a group have in common: a row of ``room`` bytes for each, twice.

    All ranks write their rows, wait for each other, and read the rows of the others. The two halves take turns, so that
    one wait for each exchange is enough: whoever writes a half again has met the others at the other half since,
    and they had read this one before they came there.
    """

    def __init__(self, memory: mmap.mmap, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.room = _room(self.size)
        self._halves = torch.frombuffer(memory, dtype=torch.uint8).view(2, self.size, self.room)
        self._half = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> SharedMemory | None:
        """The memory that all ranks of ``group`` share, or None (on all of them) where they do not share any: they are
        on several machines or in several containers, or it has no room. All ranks call this together."""
        size = 2 * group.size() * _room(group.size())
        first = group.rank() == 0
        name = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
        created = _map(_path(name), size, create=True) if first else None
        try:
            dist.broadcast(name, group=group, group_src=0)  # by now, the file is there
            found = created if first else _map(_path(name), size)
            everywhere = torch.tensor([found is not None])
            dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
        finally:
            # The memory stays for those that have it, and nothing is left behind, however they end.
            if first:
                _path(name).unlink(missing_ok=True)
        return cls(found, group) if found is not None and everywhere else None

    def turn(self) -> Tensor:
        """The half whose turn it is, (ranks, room) bytes. Its rows are written before :meth:`meet`, and read after."""
        self._half ^= 1
        return self._halves[self._half]

    def meet(self) -> None:
        """Waits until all ranks are here. As with every operation of the group: within its limit, and with an error
        where one of them has died."""
        dist.barrier(self.group)


class _Exchange:
    """What FSDP asks of a communication besides the call."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Exchange):
    """All ranks' inputs, one behind the other, on every rank."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> None:
        memory = self._memory
        own = input_tensor.view(torch.uint8)
        outputs = output_tensor.view(torch.uint8).view(memory.size, -1)
        for start in range(0, len(own), memory.room):
            part = slice(start, start + memory.room)
            length = len(own[part])
            rows = memory.turn()
            rows[memory.rank, :length] = own[part]
            memory.meet()
            for rank, output in enumerate(outputs):
                if rank != memory.rank:
                    output[part] = rows[rank, :length]
        outputs[memory.rank].copy_(own)  # nothing to do where the input is its part of the output, as FSDP's is


class ReduceScatter(_Exchange):
    """Every rank's part of the sum over all ranks' inputs, added in the order of the ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, op: Any = None, async_op: bool = False
    ) -> None:
        assert op in (None, dist.ReduceOp.SUM), op
        memory = self._memory
        inputs = input_tensor.view(memory.size, -1)
        step = memory.room // memory.size // input_tensor.element_size()
        for start in range(0, len(output_tensor), step):
            part = slice(start, start + step)
            length = len(output_tensor[part])
            # (from, to, elements)
            parts = memory.turn().view(input_tensor.dtype)[:, : memory.size * step].view(memory.size, memory.size, step)
            for rank, whole in enumerate(inputs):
                if rank != memory.rank:
                    parts[memory.rank, rank, :length] = whole[part]
            memory.meet()
            output = output_tensor[part]
            for rank in range(memory.size):
                term = inputs[rank, part] if rank == memory.rank else parts[rank, memory.rank, :length]
                output.copy_(term) if rank == 0 else output.add_(term)


def _room(ranks: int) -> int:
    return HALF // ranks // 64 * 64  # whole elements of all types, and whole lines of a cache


def _path(name: Tensor) -> Path:
    return MEMORY / f"trew-{bytes(name.tolist()).hex()}"


def _map(path: Path, size: int, *, create: bool = False) -> mmap.mmap | None:
    """The file in this process's memory, or None where that cannot be."""
    # ValueError: of a file that its maker could not give its size; AttributeError: macOS has no posix_fallocate.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                # Or a write to memory that is not there would kill the process.
                os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    return None
