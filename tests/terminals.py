"""A terminal with somebody who reads and types."""

from __future__ import annotations

import os
import pty
import threading

from forks import wait_for


class Terminal:
    """A pseudo-terminal at ``path``, until it is closed; use as a context."""

    def __enter__(self) -> Terminal:
        self._ours, self._theirs = pty.openpty()
        self.path = os.ttyname(self._theirs)
        self._seen = bytearray()
        self._read_to = 0
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        try:
            while part := os.read(self._ours, 4096):
                self._seen += part
        except OSError:
            pass

    @property
    def text(self) -> str:
        """All that was written to it."""
        return self._seen.decode(errors="replace").replace("\r\n", "\n")

    def types(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def reads(self, text: str) -> str:
        """Waits until ``text`` appears behind what was read before; returns what stands before it."""
        wait_for(lambda: text in self.text[self._read_to :], lambda: repr(self.text))
        start = self._read_to
        at = self.text.index(text, start)
        self._read_to = at + len(text)
        return self.text[start:at]

    def close(self) -> None:
        """Hangs up, as a window that is closed does."""
        if self._theirs >= 0:
            os.close(self._theirs)
            os.close(self._ours)
            self._theirs = -1

    def __exit__(self, *_: object) -> None:
        self.close()
