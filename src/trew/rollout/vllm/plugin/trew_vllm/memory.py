"""Reads a version of the weights out of memory that the trainer, on the same host, has shared. Needs torch alone.

Over HTTP, the trainer says which buckets there are (:mod:`trew_vllm.buckets`), and how to open each:

    {"format": 1, "version": 12, "gpu": "", "buckets": [...], "handles": [{"segment": "000012/00001"}, ...]}
    {"format": 1, "version": 12, "gpu": "6f1c...", "buckets": [...], "handles": [{"memory": "base64", ...}, ...]}

A segment is a file in the folder that ``root`` named at the handshake, in shared memory; it is mapped, not read. On a
GPU, ``gpu`` is its UUID, and a handle has what torch's ``UntypedStorage._share_cuda_`` returns, bytes in base64.
Nothing is unpickled.

Every bucket is mapped and verified before any of it is used. The trainer changes none of it.
"""

from __future__ import annotations

import base64
import contextlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import buckets
from .published import Refused, Tensor, check_format, open_file

HANDLE = (
    "device", "memory", "size", "offset", "counter", "counter_offset", "event", "event_needed",
)  # fmt: skip
"""The values of ``_share_cuda_`` in their order, which ``_new_shared_cuda`` takes."""
BYTES = ("memory", "counter", "event")
"""Those that are bytes."""
_SEGMENT = re.compile(r"[0-9]{6,12}/[0-9]{5}")


@dataclass(frozen=True)
class Offer:
    """A version in shared memory. ``gpu``: the UUID of the GPU that it is on; empty for segments of host memory."""

    version: int
    gpu: str
    buckets: tuple[buckets.Bucket, ...]
    handles: tuple[Mapping[str, Any], ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return buckets.tensors_of(self.buckets)


def check_gpu(gpu: str, device: torch.device) -> None:
    """Raises Refused if this process cannot open memory of the GPU with this UUID."""
    own = uuid_of(device)
    if gpu != own:
        where = f"on GPU {own}" if own else f"on {device.type}"
        raise Refused(f"the trainer's weights are on GPU {gpu}, this server computes {where}")


def uuid_of(device: torch.device) -> str:
    """The UUID of a GPU; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def read(table: Mapping[str, Any], device: torch.device) -> Offer:
    """Checks a trainer's description of shared memory. Raises Refused, before anything was opened."""
    check_format(table.get("format"))
    try:
        handles = tuple(dict(handle) for handle in table["handles"])
        offer = Offer(int(table["version"]), str(table["gpu"]), buckets.parse(table["buckets"]), handles)
    except Refused:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"offer: {type(error).__name__}: {error}") from None
    if len(offer.handles) != len(offer.buckets):
        raise Refused(f"offer: {len(offer.handles)} handles for {len(offer.buckets)} buckets")
    if offer.gpu:
        check_gpu(offer.gpu, device)
    return offer


class Mapped:
    """The buckets of an offer, mapped into this process and verified. Raises Refused if one of them is missing, has
    another size or is damaged; nothing stays mapped then. ``root``: the folder of segments."""

    def __init__(self, offer: Offer, *, root: Path | None, device: torch.device) -> None:
        self.offer = offer
        self._data: list[torch.Tensor] = []
        try:
            # Sizes of all buckets first, which cost nothing, then their checksums.
            for number, (bucket, handle) in enumerate(zip(offer.buckets, offer.handles, strict=True)):
                data = _from_gpu(handle, device) if offer.gpu else _from_segment(handle, root)
                self._data.append(data)
                if len(data) != bucket.size:
                    raise Refused(f"{self._name(number)} has {len(data)} bytes, expected {bucket.size}")
            for number, (bucket, data) in enumerate(zip(offer.buckets, self._data, strict=True)):
                bucket.verify(data, self._name(number))
        except BaseException:
            # Those that were opened are given back by close(), the others here.
            release(offer.handles[len(self._data) :])
            self.close()
            raise

    def _name(self, number: int) -> str:
        return f"version {self.offer.version}: bucket {number}"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in their order, as views of the shared memory."""
        for bucket, data in zip(self.offer.buckets, self._data, strict=True):
            yield from bucket.unpack(data)

    def close(self) -> None:
        """Lets go of the memory; what still views it keeps it mapped."""
        self._data = []


def _from_segment(handle: Mapping[str, Any], root: Path | None) -> torch.Tensor:
    segment = str(handle.get("segment"))
    if root is None:
        raise Refused("init_weight_transfer_engine was not called")
    if not _SEGMENT.fullmatch(segment):
        raise Refused(f"{segment!r} is not the name of a segment")
    with open_file(root / segment) as file:
        if not os.fstat(file.fileno()).st_size:  # cannot be mapped
            return torch.empty(0, dtype=torch.uint8)
        # Copy on write: torch takes writable memory only, and nothing must reach the trainer.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _from_gpu(handle: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    torch.cuda.init()
    # Without the trainer's number of the GPU: this process may have another for it.
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *_decoded(handle)[1:])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def release(handles: Iterable[Any]) -> None:
    """Gives back handles of a GPU's memory that nobody opens. torch counts one reader for each handle that it makes,
    and the trainer's memory is not free before this reader has gone."""
    for handle in handles:
        with contextlib.suppress(Exception):  # segments have nothing to give back
            values = _decoded(handle)
            torch.UntypedStorage._release_ipc_counter(*values[4:6], device=values[0])


def encode(values: tuple[Any, ...]) -> dict[str, Any]:
    """What ``_share_cuda_`` returned, as JSON."""
    table = dict(zip(HANDLE, values, strict=True))
    return table | {key: base64.b64encode(table[key]).decode() for key in BYTES}


def _decoded(handle: Mapping[str, Any]) -> tuple[Any, ...]:
    """The reverse of :func:`encode`. Raises Refused if a value is not of its type."""
    try:
        found = [base64.b64decode(handle[key], validate=True) if key in BYTES else int(handle[key]) for key in HANDLE]
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"a handle is malformed: {type(error).__name__}: {error}") from None
    return (*found[:-1], bool(found[-1]))
