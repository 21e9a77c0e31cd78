"""Receives a version of the weights through a process group with the trainer. Needs torch alone.

Over HTTP, the trainer describes what it will send, and where to meet:

    {"format": 1, "version": 12, "backend": "gloo", "torch": "2.13.0", "address": "127.0.0.1", "port": 40111,
     "key": "...", "size": 2, "seconds": 300, "buckets": [...]}

It listens there as rank 0 of a group of this update alone. Each worker sets ``key/rank`` in its store, joins the group,
and receives every bucket by broadcast, in pieces of at most 256 MiB. :mod:`trew_vllm.buckets` describes buckets.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import buckets, groups
from .published import Refused, Tensor, check_format

BACKENDS = ("gloo", "nccl")


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
    buckets: tuple[buckets.Bucket, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return buckets.tensors_of(self.buckets)


def check_sender(torch_version: str, backend: str, device: torch.device) -> None:
    """Raises Refused if a trainer with this torch cannot send to this process."""
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
    """Checks a trainer's description of a stream. Raises Refused, before anything was changed."""
    check_format(table.get("format"))
    check_sender(str(table.get("torch")), str(table.get("backend")), device)
    try:
        return Offer(
            int(table["version"]), str(table["backend"]), str(table["address"]), int(table["port"]), str(table["key"]),
            int(table["size"]), float(table["seconds"]), buckets.parse(table["buckets"]),
        )  # fmt: skip
    except Refused:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"offer: {type(error).__name__}: {error}") from None


class Receiver:
    """This process's place in the group of one update. Raises Refused if the trainer does not come in time."""

    def __init__(self, offer: Offer, *, rank: int, device: torch.device) -> None:
        self.offer, self._until = offer, time.monotonic() + offer.seconds
        # gloo receives in host memory, whatever the model is on.
        self._device = device if offer.backend == "nccl" else torch.device("cpu")
        self._store: Any = None
        self._group: Any = None
        try:
            # The trainer's store: it listens there only for this update.
            self._store = dist.TCPStore(
                offer.address, offer.port, is_master=False, wait_for_workers=False, timeout=self._left()
            )
            # By this the trainer knows that the worker is here.
            self._store.set(f"{offer.key}/{rank}", "here")
            self._group = groups.join(
                dist.PrefixStore(offer.key, self._store), rank=rank, size=offer.size, backend=offer.backend,
                address=groups.own_address(offer.address, offer.port), timeout=self._left(),
            )  # fmt: skip
        except RuntimeError as error:  # c10d's own
            raise Refused(f"version {offer.version}: cannot join the trainer: {groups.first_line(error)}") from None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in their order; each bucket is verified before any of it is used. Raises Refused if the stream
        breaks off or is damaged: the model then has a part of it."""
        for number, bucket in enumerate(self.offer.buckets):
            data = torch.empty(bucket.size, dtype=torch.uint8, device=self._device)
            try:
                # In pieces, as the trainer sends them: both sides must broadcast equal sizes.
                for piece in data.split(groups.PIECE_BYTES):
                    left = self._left()
                    self._group.broadcast(piece, 0, left).wait(left)
            except RuntimeError as error:
                raise Refused(
                    f"version {self.offer.version}: the stream broke off: {groups.first_line(error)}"
                ) from None
            bucket.verify(data, f"version {self.offer.version}: bucket {number}")
            yield from bucket.unpack(data)

    def _left(self) -> datetime.timedelta:
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise Refused(f"version {self.offer.version} did not come within {self.offer.seconds:g} s")
        return datetime.timedelta(seconds=seconds)

    def close(self) -> None:
        """Leaves the group, which is of no further use."""
        self._group = self._store = None
