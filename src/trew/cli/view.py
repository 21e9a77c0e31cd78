"""``trew view``: a web page over run folders, on this machine only."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import TrewError

_LOOK_S = 0.2


def view(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("runs"),),
    /,
    *,
    port: int | None = None,
    open: bool = False,
    allow_host: tuple[str, ...] = (),
) -> int:
    """Show runs in a browser: curves, completions, tokens and settings, while they train and afterwards.

    Serves a page on this machine (127.0.0.1) until Ctrl-C, and prints its address, which has a random token: who has
    the address can read the runs. Reads run folders and changes nothing; new runs and new steps appear by themselves.
    On a machine that is reached by ssh, also prints the command that brings the page to yours.

    Args:
        runs: Run folders, or folders that contain runs.
        port: The port to listen on; 0 takes a free one. Without it: 8411, or a free one if that is taken.
        open: Open the address in this machine's browser.
        allow_host: HOST:PORT by which a proxy or a tunnel with another port reaches this server; others are refused,
            since a web page could otherwise read the runs by giving its own name the address 127.0.0.1.
    """
    from ..view import serving

    with serving.serving(runs, port=port, hosts=allow_host) as served:
        _say(f"showing {', '.join(map(str, runs))} at")
        _say("")
        _say(f"    {served.url}")
        _say("")
        if command := serving.tunnel(served.port):
            _say("from your own machine, first run this there, then open the same address:")
            _say("")
            _say(f"    {command}")
            _say("")
        _say("Ctrl-C ends it")
        if open:
            webbrowser.open(served.url)
        # Ctrl-C ends the wait by an exception, and the block closes the server.
        while served.alive():
            time.sleep(_LOOK_S)
    raise TrewError("the HTTP server has ended; start trew view again")


def _say(text: str) -> None:
    print(text, flush=True)
