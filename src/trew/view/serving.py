"""Starts the server: a socket on this machine, a token, and the addresses to open."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..utils import listening
from ..utils.installing import install_extra

HOST = "127.0.0.1"
PORT = 8411


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs. ``url`` has the token: who has it may read the runs."""

    url: str
    port: int
    token: str
    alive: Callable[[], bool]


@contextlib.contextmanager
def serving(
    folders: Sequence[Path], *, port: int | None = None, hosts: Sequence[str] = (), framed: bool = False
) -> Iterator[Served]:
    """Serves the runs in ``folders`` while the block runs. ``port``: 0 takes a free one, None the usual one if it is
    free. Raises ConfigError and DataError."""
    check_installed()
    _check_hosts(hosts)
    from .app import application
    from .guard import Access
    from .library import Library
    from .store import Store

    library, store = Library(folders), Store()
    # The port is known before the server runs: the Host header is compared with it.
    with _socket(port) as bound:
        taken: int = bound.getsockname()[1]
        access = Access(secrets.token_urlsafe(24), taken, frozenset(host.lower() for host in hosts), framed)
        app = application(library, access, store)
        with listening.listening(app, [bound], None) as alive:
            # Daemon: reading may take longer than the server runs.
            threading.Thread(target=store.warm, args=(library.runs(),), name="trew-view", daemon=True).start()
            yield Served(f"http://{HOST}:{taken}/?token={access.token}", taken, access.token, alive)


def _check_hosts(hosts: Sequence[str]) -> None:
    """Raises ConfigError for what no Host header is, so that it would allow nothing, or the lack of one."""
    for host in hosts:
        if not re.fullmatch(r"[^\s/@?#]+", host):
            raise ConfigError(
                f"allow_host: got {host!r}, accepts HOST:PORT as the browser's address has it, without http:// and "
                "without a path; for example localhost:9000"
            )


def _socket(port: int | None) -> socket.socket:
    if port is not None:
        return listening.sockets_for(HOST, port, encrypted=False)[0]
    try:
        return listening.sockets_for(HOST, PORT, encrypted=False)[0]
    except ConfigError:  # another server has it
        return listening.sockets_for(HOST, 0, encrypted=False)[0]


def check_installed() -> None:
    """Raises ConfigError if the packages of the extra are missing."""
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"trew view needs the package {missing[0]}, which is not installed: {install_extra('view')}")


def tunnel(port: int) -> str:
    """The command that makes the server reachable from the machine at the other end of an ssh connection; empty where
    this is no ssh session."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    if len(parts) != 4:
        return ""
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or "you"
    return f"ssh -N -L {port}:{HOST}:{port} -p {parts[3]} {user}@{parts[2]}"
