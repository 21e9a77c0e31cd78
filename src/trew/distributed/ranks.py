"""``Ranks``: the processes of a run, started together by torchrun and connected by torch.distributed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from ..errors import ConfigError, LostRankError
from .pulse import Pulse

BUCKET = 64 << 20
"""Bytes that are summed at once: few enough to need little memory beside the gradients, enough to use the network."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among those that were started together, from the variables that torchrun sets."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # processes on this node

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


def here() -> Place | None:
    """This process's place; None where it was started alone.

    Raises ConfigError where the variables are incomplete or contradict each other.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return None
    if missing := [name for name in names if name not in given]:
        raise ConfigError(f"{', '.join(missing)}: not set, but RANK and WORLD_SIZE are; start the ranks with torchrun")
    try:
        place = Place(*(int(given[name]) for name in names[:4]))
    except ValueError:
        raise ConfigError(
            f"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: got {given}, accepts whole numbers"
        ) from None
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size):
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: got {place}, which contradict each other")
    return place


def check_nodes(local_sizes: Sequence[int], shard: str, *, how: str) -> None:
    """Raises ConfigError where weights would be sharded inside each node, and nodes have different numbers of ranks:
    ranks would disagree on who shares with whom, and wait for each other. ``how``: they came there.

    >>> check_nodes([2, 2, 2, 2], "auto", how="Ray placed"), check_nodes([3, 3, 3, 1], "fsdp", how="Ray placed")
    (None, None)
    """
    if len(set(local_sizes)) > 1 and shard in ("auto", "hsdp"):
        sizes = sorted(set(local_sizes), reverse=True)
        raise ConfigError(
            f"cluster.shard: got {shard!r}, which shards inside each node, but {how} {sizes} ranks on different nodes; "
            "set cluster.learner to a multiple of the nodes, or cluster.shard = 'fsdp'"
        )


class Ranks:
    """All ranks of a run, seen from one of them. Implements :class:`..learner.Parallel`.

    Nothing is pickled: values travel as JSON, arrays as their bytes. Tensors on a GPU are summed by NCCL, everything
    else by gloo.
    """

    def __init__(self, place: Place, *, device: str, join_s: float, wait_s: float) -> None:
        """Joins the group within ``join_s`` seconds, or raises LostRankError; an operation may then take ``wait_s``."""
        self.place, self.device = place, torch.device(device)
        self.exchange = ""  # how ranks on CPUs exchange shards: it decides in which order gradients are added
        self.pulse = Pulse(place.rank)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        # Before the group is made: what is done without a device's name must not land on GPU 0.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        limit, self._wait = timedelta(seconds=join_s), timedelta(seconds=wait_s)
        try:
            store, *_ = next(dist.rendezvous("env://", place.rank, place.size, timeout=limit))
            # The agent may keep its store over a restart, with the addresses of ranks that are gone.
            self._store = dist.PrefixStore(f"trew/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(backend, store=self._store, rank=place.rank, world_size=place.size, timeout=limit)
        except RuntimeError as error:
            meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise LostRankError(
                f"rank {place.rank} of {place.size} could not join the others within {join_s:g} s: one of them did not "
                f"start, died, or cannot be reached at {meeting}. "
                f"Look at what each rank printed, and start all of them again ({str(error).splitlines()[0][:200]})"
            ) from None
        # Joined: from here on the limit is that of an operation.
        _set_pg_timeout(self._wait)
        self.local_sizes: list[int] = self.gather(place.local_size)  # of each rank's node

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    def beat(self) -> None:
        self.pulse.beat()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self.pulse.idle()
        try:
            yield
        finally:
            self.pulse.busy()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sums in buckets of one dtype and device, so that many small tensors take few messages."""
        for bucket in _buckets(tensors):
            # A tensor alone is summed where it is, without a second copy of it.
            if len(bucket) == 1 and bucket[0].is_contiguous():
                dist.all_reduce(bucket[0])
                continue
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.all_reduce(flat)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, value: Any) -> list[Any]:
        # bytearray: frombuffer warns of bytes, since they are not writable.
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(own)]))
        counts = [int(size) for size in sizes]
        # Padded to one length: gloo gathers tensors of equal shape only.
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: len(own)] = own
        found = [torch.zeros_like(padded) for _ in counts]
        dist.all_gather(found, padded)
        return [json.loads(bytes(t[:n].numpy())) for t, n in zip(found, counts, strict=True)]

    def broadcast(self, data: bytes | None) -> bytes:
        """The bytes that rank 0 gives, on all ranks; the others give None."""
        # The length first, which the others do not know. frombuffer refuses empty data.
        size = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(size, 0)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(buffer):
            dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrites a tensor with that of rank 0, of the same shape and dtype."""
        dist.broadcast(tensor.view(-1).view(torch.uint8), 0)  # bytes: gloo does not know all dtypes

    def send(self, data: bytes) -> None:
        """Sends bytes to rank 0, which must call :meth:`receive`."""
        self._finish(dist.isend(torch.tensor([len(data)]), 0))
        if data:
            self._finish(dist.isend(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0))

    def receive(self, rank: int) -> bytes:
        """The bytes that another rank sends to rank 0."""
        size = torch.zeros(1, dtype=torch.int64)
        self._finish(dist.irecv(size, rank))
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if len(buffer):
            self._finish(dist.irecv(buffer, rank))
        return buffer.numpy().tobytes()

    def receiving(self, rank: int) -> Future[bytes]:
        """What :meth:`receive` returns, once it is there. A thread receives it, so that whoever waits for it may be
        interrupted, and the other rank is not left with half a message."""
        found: Future[bytes] = Future()

        def receive() -> None:
            try:
                found.set_result(self.receive(rank))
            except Exception as error:  # of whoever waits for it
                found.set_exception(error)

        threading.Thread(target=receive, name="trew-receive", daemon=True).start()
        return found

    def _finish(self, work: dist.Work | None) -> None:
        # Without a limit of its own, gloo waits between two ranks only as long as they may take to connect.
        assert work is not None, "this rank is in the group"
        work.wait(self._wait)

    def abandon(self, what: int | str) -> None:
        """Asks the others to give up a round of generation, or something else by its name; they look
        (:meth:`abandoned`) where no collective operation could reach them, such as between passes of the model."""
        # A key for each round: none is ever deleted, and the next round must not see this one's.
        self._store.set(f"abandoned/{what}", "1")

    def abandoned(self, what: int | str) -> bool:
        """Whether rank 0 asked to give this up."""
        return self._store.check([f"abandoned/{what}"])

    def close(self) -> None:
        """Leaves the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def telling_of_lost_ranks() -> Iterator[None]:
    """Raises LostRankError where torch.distributed reports a connection that broke: the rank at its other end died
    first, and has the cause."""
    try:
        yield
    except RuntimeError as error:  # gloo raises it bare; NCCL's and the store's errors are subclasses
        if isinstance(error, dist.DistError) or _BROKEN.search(str(error)):
            raise LostRankError(
                "the connection to another rank broke; that rank died first, and its last lines say why. Continue with "
                f"--resume ({str(error).splitlines()[0][:200]})"
            ) from None
        raise


# What backends say of a lost connection; every other RuntimeError is an error of the computation.
_BROKEN = re.compile(r"gloo|[Cc]onnection (closed|reset|refused)|Broken pipe|Timed out waiting")


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Consecutive tensors of one dtype and device, up to BUCKET bytes together (a larger one is alone)."""
    buckets: list[list[Tensor]] = []
    kind, size = None, 0
    for tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        # By order, sizes and dtypes alone, which are equal on all ranks: each of them sums the same buckets.
        if (tensor.dtype, tensor.device) != kind or size + bytes_ > BUCKET:
            buckets.append([])
            kind, size = (tensor.dtype, tensor.device), 0
        buckets[-1].append(tensor)
        size += bytes_
    return buckets
