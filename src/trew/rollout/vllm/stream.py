"""Sends a version of the weights to a server as a stream, through a process group of this process and its workers.

    update, over HTTP: the buckets, and an address  ->  the server checks them and connects
    all workers are connected                       ->  the group is made: NCCL between GPUs, gloo otherwise
    bucket after bucket, broadcast by rank 0        ->  checksum, then into the model's layers

A group serves one update of one server: its failure affects no other server and no later update. The buckets are in
this process's memory and never change, so any server can get them at any time. Server's side: ``trew_vllm.stream``.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import EngineError
from .buckets import Filled
from .client import ServerHung, call
from .endpoint import Endpoint
from .environment import FORMAT
from .plugin.trew_vllm import groups
from .routes import QUICK_S, prepare, start

_LOOK_S = 0.01
_GRACE_S = 10.0  # for a server to say why a stream broke off


@dataclass(frozen=True, slots=True)
class Stream:
    """A version in buckets that are sent. ``device``: a GPU, from which NCCL sends, or the CPU, with gloo."""

    version: int
    filled: tuple[Filled, ...]
    device: str

    @property
    def backend(self) -> str:
        return backend_of(self.device)

    def load(self, endpoint: Endpoint, what: str, *, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        prepare(endpoint, what, introduction(self.backend), timeout_s=timeout_s)
        size = 1 + _workers(endpoint, what, timeout_s=min(QUICK_S, timeout_s))
        start(endpoint, what, timeout_s=timeout_s)
        try:
            # It listens before the server is told where.
            meeting = _Meeting(own_address(endpoint), size, until)
        except (OSError, RuntimeError) as error:
            raise EngineError(
                f"server {endpoint}: {what}: cannot listen for it: {groups.first_line(error)}; "
                "set cluster.sync = 'files'"
            ) from None
        offer = {
            "format": FORMAT, "version": self.version, "backend": self.backend, "torch": torch.__version__,
            "address": meeting.address, "port": meeting.store.port, "key": meeting.key, "size": size,
            "seconds": timeout_s, "buckets": [each.bucket.table() for each in self.filled],
        }  # fmt: skip
        # The answer comes once all weights have arrived: it is waited for in a thread while they are sent.
        answer = _asked(
            lambda: call(
                endpoint, "POST", "/update_weights", what=f"{what}: updating", timeout_s=timeout_s,
                body={"update_info": {"offer": offer}},
            )
        )  # fmt: skip
        try:
            meeting.gather(answer)
            self._send(meeting)
        except RuntimeError as error:  # c10d's own
            meeting.close()  # so that the server notices, too
            hint = "cluster.sync = 'files' needs no process group"
            _explain(answer, f"server {endpoint}: {what}: the stream broke off: {groups.first_line(error)}; {hint}")
        except TimeoutError:
            raise ServerHung(f"server {endpoint}: {what}: did not take the weights within {timeout_s:g} s") from None
        finally:
            meeting.close()
        try:
            # The server has yet to verify and load what was sent last.
            answer.result(max(0.0, until - time.monotonic()) + _GRACE_S)
        except TimeoutError:
            raise ServerHung(f"server {endpoint}: {what}: updating: no answer within {timeout_s:g} s") from None

    def _send(self, meeting: _Meeting) -> None:
        meeting.join(self.backend)
        for each in self.filled:
            # From host memory to the device bucket by bucket: the GPU never holds the whole version.
            for piece in each.data.to(self.device).split(groups.PIECE_BYTES):
                meeting.send(piece)


def backend_of(device: str) -> str:
    """The backend that sends from a device: NCCL from a GPU, gloo otherwise."""
    return "nccl" if device.startswith("cuda") else "gloo"


def introduction(backend: str) -> dict[str, object]:
    """Introduces a stream to a server, which refuses one that it could not receive."""
    return {"format": FORMAT, "torch": torch.__version__, "backend": backend}


def _workers(endpoint: Endpoint, what: str, *, timeout_s: float) -> int:
    """Returns the number of a server's processes that hold a part of the model."""
    found = call(endpoint, "GET", "/get_world_size", what=f"{what}: counting its workers", timeout_s=timeout_s)
    try:
        return int(found["world_size"])
    except (KeyError, TypeError, ValueError):
        raise EngineError(f"server {endpoint}: {what}: says {found!r} when asked for its workers") from None


def _asked(ask: Callable[[], Any]) -> Future[Any]:
    """Calls ``ask`` in a daemon thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="trew-stream", daemon=True).start()
    return future


def _explain(answer: Future[Any], said: str) -> None:
    """Raises the server's own reason for a broken stream; if it gives none, ServerHung with ours."""
    with contextlib.suppress(TimeoutError):
        answer.result(_GRACE_S)
    raise ServerHung(said) from None


class _Meeting:
    """The store, on a free port of ``address``, through which this process (rank 0) and a server's workers connect."""

    def __init__(self, address: str, size: int, until: float) -> None:
        self.address, self.key, self._size, self._until = address, secrets.token_hex(16), size, until
        self._group: Any = None
        with socket.create_server((address, 0), family=_family(address)) as listener:
            # The listening socket is handed to the store, so that nobody else can take the port in between.
            port, descriptor = listener.getsockname()[1], listener.detach()
        self.store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=self.left(), master_listen_fd=descriptor
        )

    def left(self) -> datetime.timedelta:
        """Returns the time until the update must be complete. Raises TimeoutError if there is none."""
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return datetime.timedelta(seconds=seconds)

    def gather(self, answer: Future[Any]) -> None:
        """Waits until all workers are connected. Raises the server's error if it answers before that."""
        # Workers are ranks 1 and up, and each enters its key when it has connected.
        there = [f"{self.key}/{rank}" for rank in range(1, self._size)]
        while not self.store.check(there):
            self.left()
            if answer.done():
                answer.result()
                raise RuntimeError("it answered before anything was sent")
            time.sleep(_LOOK_S)

    def join(self, backend: str) -> None:
        """Makes the group of all that are connected."""
        # NCCL's watchdog would end this process, not only the group: it gets longer than any wait here.
        limit = self.left() * (4 if backend == "nccl" else 1)
        with _quiet_watchdog():
            self._group = groups.join(
                dist.PrefixStore(self.key, self.store), rank=0, size=self._size, backend=backend, address=self.address,
                timeout=limit,
            )  # fmt: skip

    def send(self, piece: Tensor) -> None:
        """Sends these bytes and waits until the workers have them."""
        left = self.left()
        self._group.broadcast(piece, 0, left).wait(left)

    def close(self) -> None:
        """Leaves the group. A worker that still waits gets an error."""
        self._group = None


@contextlib.contextmanager
def _quiet_watchdog() -> Iterator[None]:
    """Makes errors of groups that are created inside surface in their waits only: a server that dies must not end this
    process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def own_address(endpoint: Endpoint) -> str:
    """Returns the address at which a server reaches this process."""
    if endpoint.local:
        return "127.0.0.1"
    parts = urlsplit(endpoint.url)
    return groups.own_address(str(parts.hostname), parts.port or 80)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
