"""Messages between two trusted processes over pipes: a JSON object and byte strings, with their lengths."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from typing import Any


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """Whole messages over two descriptors, in both directions; raises Closed."""

    def __init__(self, source: int, target: int):
        self.source, self.target = source, target

    def send(self, message: dict[str, Any], parts: Sequence[bytes]) -> None:
        head = json.dumps(message).encode("ascii")
        sizes = struct.pack(f">I{1 + len(parts)}Q", 1 + len(parts), len(head), *map(len, parts))
        try:
            for data in (sizes + head, *parts):
                view = memoryview(data)
                while view:
                    view = view[os.write(self.target, view[: 1 << 20]) :]
        except OSError:
            raise Closed from None

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        (count,) = struct.unpack(">I", self._exactly(4))
        sizes = struct.unpack(f">{count}Q", self._exactly(8 * count))
        head, *parts = [self._exactly(size) for size in sizes]
        return json.loads(head), parts

    def _exactly(self, size: int) -> bytes:
        parts, left = [], size
        while left:
            try:
                part = os.read(self.source, min(left, 1 << 20))
            except OSError:
                part = b""
            if not part:
                raise Closed
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        os.close(self.source)
        os.close(self.target)
