"""Length-prefixed messages between a process and its worker over pipes; a message is a list of byte strings.

Imports nothing from trew, because workers use it too.
"""

from __future__ import annotations

import os
import select
import struct
import time

LOOK_S = 1.0
"""The longest single wait, in seconds. A signal (Ctrl-C) wakes one thread of the process, not always the one that has
to act on it. And after the parent was killed, another process forked from it may still hold the worker's pipe open."""
_PIECE = 1 << 20


class WorkerLost(Exception):
    """No answer will come, and nothing more can be sent to this worker."""


class Closed(WorkerLost):
    """The other side is gone. ``ended`` says how its process ended, where known."""

    ended = ""


class Late(WorkerLost):
    """The message did not arrive in time."""


class Channel:
    """Sends and receives whole messages over two descriptors.

    Raises Closed, and Late after ``deadline`` (a time of ``time.monotonic()``). With ``parent``, the channel counts as
    closed once this process has been reparented."""

    def __init__(self, source: int, target: int, *, parent: int | None = None):
        self.source, self.target, self.parent = source, target, parent
        # A blocking read or write could not be bounded by a deadline, nor notice that the parent is gone.
        os.set_blocking(source, False)
        os.set_blocking(target, False)

    def send(self, *parts: bytes, deadline: float | None = None) -> None:
        # Wire format, big-endian: uint32 count, then one uint64 size per part, then the parts.
        sizes = struct.pack(f">I{len(parts)}Q", len(parts), *map(len, parts))
        left = memoryview(b"".join((sizes, *parts)))
        while left:
            try:
                left = left[os.write(self.target, left[:_PIECE]) :]
            except BlockingIOError:
                self._wait(self.target, select.POLLOUT, deadline)
            except OSError as error:
                raise Closed(str(error)) from None

    def receive(self, *, deadline: float | None = None) -> list[bytes]:
        (count,) = struct.unpack(">I", self._exactly(4, deadline))
        sizes = struct.unpack(f">{count}Q", self._exactly(8 * count, deadline))
        return [self._exactly(size, deadline) for size in sizes]

    def close(self) -> None:
        os.close(self.source)
        os.close(self.target)

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        parts, left = [], size
        while left:
            try:
                part = os.read(self.source, min(left, _PIECE))
            except BlockingIOError:
                self._wait(self.source, select.POLLIN, deadline)
                continue
            except OSError as error:
                raise Closed(str(error)) from None
            if not part:
                raise Closed("its pipe closed")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int, deadline: float | None) -> None:
        left = LOOK_S if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise Late("no answer in time")
        # poll, not select: select fails for descriptors of 1024 and above, which a training process may well reach.
        poll = select.poll()
        poll.register(descriptor, event)
        poll.poll(min(left, LOOK_S) * 1000)  # milliseconds
        # The parent's death does not always close the pipe (see LOOK_S), so ask for it directly.
        if self.parent is not None and os.getppid() != self.parent:
            raise Closed("the process that it worked for is gone")
