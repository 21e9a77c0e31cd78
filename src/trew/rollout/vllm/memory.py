"""The weights of a version in memory that servers of this host read: nothing is sent but where it is.

    update, over HTTP: a handle for each bucket  ->  the server maps all buckets and verifies their checksums
                                                     the model's layers take the tensors; the server lets go

In host memory a bucket is a segment, a file in shared memory; on a GPU it is a block that processes on the same GPU can
open. Handles are JSON. Buckets never change, so a server may read them at any time. ``trew_vllm.memory`` is what the
server does.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .buckets import Filled
from .client import ServerGone, call
from .endpoint import Endpoint
from .environment import FORMAT
from .plugin.trew_vllm import memory as form
from .plugin.trew_vllm.buckets import Bucket
from .routes import prepare, start


@dataclass(frozen=True, slots=True)
class Segments:
    """Buckets in host memory: the segments ``root/folder/00000``, ``root/folder/00001``, …"""

    version: int
    root: Path
    folder: str
    buckets: tuple[Bucket, ...]

    def load(self, endpoint: Endpoint, what: str, *, timeout_s: float) -> None:
        prepare(endpoint, what, {"root": str(self.root), "format": FORMAT}, timeout_s=timeout_s)
        start(endpoint, what, timeout_s=timeout_s)
        handles = [{"segment": f"{self.folder}/{segment_name(number)}"} for number in range(len(self.buckets))]
        _update(endpoint, what, offer(self.version, self.buckets, handles), timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class OnGpu:
    """Buckets in the memory of the GPU with the UUID ``gpu``."""

    version: int
    gpu: str
    filled: tuple[Filled, ...]

    def load(self, endpoint: Endpoint, what: str, *, timeout_s: float) -> None:
        prepare(endpoint, what, introduction(self.gpu), timeout_s=timeout_s)
        start(endpoint, what, timeout_s=timeout_s)
        # New handles for each server: torch frees memory when every handle has been opened and let go once.
        handles = [form.encode(each.data.untyped_storage()._share_cuda_()) for each in self.filled]
        torch.cuda.synchronize(self.filled[0].data.device)  # the copies into the buckets
        try:
            _update(
                endpoint, what, offer(self.version, [each.bucket for each in self.filled], handles, gpu=self.gpu),
                timeout_s=timeout_s,
            )  # fmt: skip
        except ServerGone:  # one that answers has let go of all of them, also where it refuses
            form.release(handles)
            raise
        finally:
            # Gives back what all readers have let go of.
            torch.cuda.ipc_collect()


def introduction(gpu: str) -> dict[str, object]:
    """What a server is told before it gets weights from this GPU: it refuses if it cannot open them."""
    return {"gpu": gpu, "format": FORMAT}


def gpu_of(device: str) -> str:
    """The UUID of a GPU, empty for a CPU."""
    return form.uuid_of(torch.device(device))


def offer(
    version: int, buckets: Sequence[Bucket], handles: Sequence[dict[str, Any]], *, gpu: str = ""
) -> dict[str, Any]:
    """The description of a version that a server gets."""
    tables = [bucket.table() for bucket in buckets]
    return {"format": FORMAT, "version": version, "gpu": gpu, "buckets": tables, "handles": handles}


def _update(endpoint: Endpoint, what: str, memory: dict[str, Any], *, timeout_s: float) -> None:
    info = {"update_info": {"memory": memory}}
    call(endpoint, "POST", "/update_weights", what=f"{what}: updating", timeout_s=timeout_s, body=info)


def segment_name(number: int) -> str:
    """The name of a version's segment.

    >>> segment_name(0), segment_name(12)
    ('00000', '00012')
    """
    return f"{number:05d}"


def segment(path: Path, size: int) -> Tensor:
    """Makes a segment and maps it. Raises OSError if there is no room for it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Takes the memory now: with too little of it a write would end this process by a signal.
        os.posix_fallocate(descriptor, 0, size)
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)
