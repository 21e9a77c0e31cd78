"""What the ranks of test_shared_memory do."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from trew.distributed import Ranks, shared_memory
from trew.distributed.shared_memory import AllGather, ReduceScatter, SharedMemory

MEMORY = Path("/dev/shm")


def left() -> list[str]:
    return sorted(path.name for path in MEMORY.glob("trew-*"))


def exchanges(ranks: Ranks, *, lengths: list[int], dtype: str, half: int) -> list[list[torch.Tensor]]:
    """[own input of gathering, gathered, input of the sum, summed part] for each length, one call straight after the
    other; ranks are late by turns."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(ranks.rank)
    late = random.Random(ranks.rank)
    with mock.patch.object(shared_memory, "HALF", half):
        memory = SharedMemory.of(dist.group.WORLD)
        assert memory is not None
        gather, scatter = AllGather(memory), ReduceScatter(memory)
        found = []
        for length in lengths:
            own = torch.randn(length, generator=generator).to(kind)
            terms = torch.randn(length * ranks.size, generator=generator).to(kind)
            whole, summed = own.new_empty(length * ranks.size), own.new_empty(length)
            time.sleep(late.random() * 0.01)
            gather(output_tensor=whole, input_tensor=own, group=dist.group.WORLD)
            scatter(output_tensor=summed, input_tensor=terms, group=dist.group.WORLD, op=dist.ReduceOp.SUM)
            found.append([own, whole, terms, summed])
    return found


def gathered_in_place(ranks: Ranks) -> torch.Tensor:
    """As FSDP calls it: the input is its part of the output."""
    memory = SharedMemory.of(dist.group.WORLD)
    assert memory is not None
    whole = torch.full((ranks.size, 5), -1.0)
    whole[ranks.rank] = ranks.rank
    AllGather(memory)(output_tensor=whole.view(-1), input_tensor=whole[ranks.rank])
    return whole


def opened(ranks: Ranks, *, fault: str) -> tuple[bool, list[str]]:
    """Whether this rank got memory in spite of a fault, and what is left of it in the end."""
    before = left()
    elsewhere, full = Path("/nowhere"), mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    faults = {
        "": mock.patch.object(shared_memory, "MEMORY", MEMORY),
        "no such folder": mock.patch.object(shared_memory, "MEMORY", elsewhere),
        "full": mock.patch.object(os, "posix_fallocate", full),
        "another container": mock.patch.object(shared_memory, "MEMORY", elsewhere if ranks.rank == 1 else MEMORY),
    }
    with faults[fault]:
        memory = SharedMemory.of(dist.group.WORLD)
    ranks.gather(None)
    return memory is not None, [name for name in left() if name not in before]
