"""``trew.view`` in a notebook: the page in a frame below the cell."""

from __future__ import annotations

import contextlib
import html
import weakref
from pathlib import Path

from .serving import serving


class Viewer:
    """A server that runs in the background until :meth:`close`, or until nothing refers to it any more.

    A notebook shows it as a frame. The frame's address has the token: whoever gets the notebook's output while the
    server runs, and can reach this machine's 127.0.0.1, can read the runs.
    """

    def __init__(self, runs: tuple[Path, ...], *, port: int | None, height: int) -> None:
        self.height = height
        self._open = contextlib.ExitStack()
        served = self._open.enter_context(serving(runs, port=port, framed=True))
        self.url, self.port = served.url, served.port
        # finalize holds the stack, not this object, so that the object can be collected.
        self.close = weakref.finalize(self, self._open.close)  # also at the end of the process

    def __repr__(self) -> str:
        return f"<trew.view at {self.url}>" if self.close.alive else "<trew.view, closed>"

    def _repr_html_(self) -> str:
        if not self.close.alive:
            return "<p>closed</p>"
        return f'<iframe src="{html.escape(self.url)}" width="100%" height="{self.height}" style="border: 0"></iframe>'


def view(*runs: str | Path, port: int | None = 0, height: int = 800) -> Viewer:
    """Shows run folders, or folders that contain runs, in a notebook; without an argument those in ``runs``.

    The browser must reach ``port`` of this machine's 127.0.0.1, by default a free one: with a notebook server on
    another machine, forward a port and name it here (``ssh -L 8411:127.0.0.1:8411 host``, ``port=8411``). Raises
    ConfigError if packages of the extra ``view`` are missing, and DataError if there is no run.
    """
    if isinstance(height, bool) or not isinstance(height, int) or not 100 <= height <= 10_000:
        raise ValueError(f"height: got {height!r}, accepts 100 to 10000 pixels")
    return Viewer(tuple(map(Path, runs or ("runs",))), port=port, height=height)
