"""Receives a version of the weights through a process group with the trainer. Needs torch alone.

The trainer says, over HTTP, what will come and where to meet:

    {"format": 1, "version": 12, "backend": "gloo", "torch": "2.13.0", "address": "127.0.0.1", "port": 40111,
     "key": "...", "size": 2, "seconds": 300, "buckets": [{"bytes": 1024, "checksum": "...", "tensors":
        [{"name": "model.norm.weight", "dtype": "float32", "shape": [64]}, ...]}, ...]}

It listens there as rank 0 of a group of this update alone. Each worker sets ``key/rank`` in its store, joins the group,
and receives every bucket by broadcast, in pieces of at most 256 MiB. A bucket has its tensors one after another, each
from a multiple of 16 bytes on.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .published import DTYPES, Refused, Tensor, check_format

PIECE_BYTES = 256 << 20
ALIGN = 16
BACKENDS = ("gloo", "nccl")
_WORDS = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """A part of the stream."""

    size: int
    checksum: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Offer:
    """A version that a trainer is ready to send, and how long it may take."""

    version: int
    backend: str
    address: str
    port: int
    key: str
    size: int
    seconds: float
    buckets: tuple[Bucket, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for bucket in self.buckets for name, tensor in bucket.tensors.items()}


def check_sender(torch_version: str, backend: str, device: torch.device) -> None:
    """Raises Refused where a trainer with this torch cannot send to this process."""
    if _series(torch_version) != _series(torch.__version__):
        raise Refused(
            f"the trainer has torch {torch_version}, this server {torch.__version__}: a group needs the same series on "
            'both sides; publish files (cluster.sync = "files")'
        )
    if backend not in BACKENDS:
        raise Refused(f"backend: got {backend!r}, accepts {', '.join(BACKENDS)}")
    if backend == "nccl" and device.type != "cuda":
        raise Refused(f'the trainer sends by NCCL, this server computes on {device.type}; use cluster.sync = "files"')


def _series(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def read(table: Mapping[str, Any], device: torch.device) -> Offer:
    """Checks what a trainer says about a stream. Raises Refused; nothing has been touched then."""
    check_format(table.get("format"))
    check_sender(str(table.get("torch")), str(table.get("backend")), device)
    try:
        buckets = tuple(_bucket(part) for part in table["buckets"])
        offer = Offer(
            int(table["version"]), str(table["backend"]), str(table["address"]), int(table["port"]), str(table["key"]),
            int(table["size"]), float(table["seconds"]), buckets,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"offer: {type(error).__name__}: {error}") from None
    if sum(len(bucket.tensors) for bucket in buckets) != len(offer.tensors) or not buckets:
        raise Refused("offer: no tensors, or one of them twice")
    return offer


def _bucket(table: Mapping[str, Any]) -> Bucket:
    tensors = {str(row["name"]): Tensor(str(row["dtype"]), tuple(map(int, row["shape"]))) for row in table["tensors"]}
    bucket = Bucket(int(table["bytes"]), str(table["checksum"]), tensors)
    if strange := [name for name, tensor in tensors.items() if tensor.dtype not in DTYPES.values()]:
        raise ValueError(f"{strange[0]} is {tensors[strange[0]].dtype}")
    if len(tensors) != len(table["tensors"]) or sum(_padded(_bytes(t)) for t in tensors.values()) != bucket.size:
        raise ValueError(f"a bucket of {bucket.size} bytes holds other tensors than it should")
    return bucket


def _bytes(tensor: Tensor) -> int:
    size = getattr(torch, tensor.dtype).itemsize
    for length in tensor.shape:
        size *= length
    return size


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class Receiver:
    """This process's place in the group of one update. Raises Refused where the trainer is not there in time."""

    def __init__(self, offer: Offer, *, rank: int, device: torch.device) -> None:
        self.offer, self._until = offer, time.monotonic() + offer.seconds
        self._device = device if offer.backend == "nccl" else torch.device("cpu")
        self._store: Any = None
        self._group: Any = None
        try:
            self._store = dist.TCPStore(
                offer.address, offer.port, is_master=False, wait_for_workers=False, timeout=self._left()
            )
            self._store.set(f"{offer.key}/{rank}", "here")
            self._group = self._joined(rank)
        except RuntimeError as error:  # c10d's own
            raise Refused(f"version {offer.version}: cannot join the trainer: {_line(error)}") from None

    def _joined(self, rank: int) -> Any:
        store, offer = dist.PrefixStore(self.offer.key, self._store), self.offer
        if offer.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(offer.address, offer.port))]
            options._timeout = self._left()
            return dist.ProcessGroupGloo(store, rank, offer.size, options)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = self._left()
        return dist.ProcessGroupNCCL(store, rank, offer.size, nccl)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in their order, each bucket verified before any of it is used. Raises Refused where the stream
        breaks off or is damaged: the model then has a part of it."""
        for number, bucket in enumerate(self.offer.buckets):
            data = torch.empty(bucket.size, dtype=torch.uint8, device=self._device)
            try:
                for piece in data.split(PIECE_BYTES):
                    left = self._left()
                    self._group.broadcast(piece, 0, left).wait(left)
            except RuntimeError as error:
                raise Refused(f"version {self.offer.version}: the stream broke off: {_line(error)}") from None
            if (got := checksum(data)) != bucket.checksum:
                raise Refused(
                    f"version {self.offer.version}: bucket {number} is damaged: its checksum is {got}, expected "
                    f"{bucket.checksum}"
                )
            yield from _unpacked(data, bucket)

    def _left(self) -> datetime.timedelta:
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise Refused(f"version {self.offer.version} did not come within {self.offer.seconds:g} s")
        return datetime.timedelta(seconds=seconds)

    def close(self) -> None:
        """Leaves the group, which is of no further use."""
        self._group = self._store = None


def _unpacked(data: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    at = 0
    for name, tensor in bucket.tensors.items():
        length = _bytes(tensor)
        yield name, data[at : at + length].view(getattr(torch, tensor.dtype)).view(tensor.shape)
        at += _padded(length)


def checksum(data: torch.Tensor) -> str:
    """Sums over the 32-bit words w_i of a bucket, modulo 2^64: of w_i, and of i w_i."""
    plain = weighted = 0
    for number, part in enumerate(data.view(torch.int32).split(_WORDS)):
        words = part.to(torch.int64)
        total = int(words.sum())
        plain += total
        weighted += number * _WORDS * total + int((words * torch.arange(len(words), device=words.device)).sum())
    return f"{plain % 2**64:016x}{weighted % 2**64:016x}"


def _own_address(address: str, port: int) -> str:
    """The address of this host on the way to another."""
    family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # sends nothing
        probe.connect(where)
        return str(probe.getsockname()[0])


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
