"""Listens for the requests of one's own runs on other machines: on which interface, with which token, with or without
TLS. ``trew serve`` and ``trew rewards serve`` share it.

Needs uvicorn (the extra ``serve``), which is imported when something listens.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import ssl
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TrewError
from .installing import install_extra

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

SHORTEST_TOKEN = 16
TOKEN_FILE = "token"
_START_S = 30.0
_GRACE_S = 1  # for answers in progress when it ends; uvicorn takes whole seconds
_IDLE_S = 75  # longer than clients keep idle connections: the side that sends the next request must close first
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""Seconds and tries after which a connection to a machine that is gone ends, and with it the work for it."""


# ------------------------------------------------------------------------------------------------------------ the token


def token_for(variable: str, folder: Path, tell: Callable[[str], None]) -> str:
    """The token that requests must bring: that of the environment variable, or the one in ``folder``, which is made
    and told once. Raises ConfigError if it is too short, or if others can read the file."""
    file = folder / TOKEN_FILE
    given = os.environ.get(variable, "")
    if given:
        if len(given) < SHORTEST_TOKEN or not (given.isascii() and given.isprintable()) or " " in given:
            raise ConfigError(
                f"{variable}: got a token of {len(given)} characters, accepts at least {SHORTEST_TOKEN} printable "
                f"ASCII characters without spaces; unset it to have one made, in {file}"
            )
        return given
    made = secrets.token_urlsafe(32)
    if not _write_token(file, made):
        found = _read_token(file)
        tell(f"token: that of {file}, as before; give it to runs as {variable}")
        return found
    tell(f"token: {made}")
    tell(f"       give it to runs as {variable}; it is kept in {file}, and shown this once")
    return made


def _write_token(file: Path, token: str) -> bool:
    """Writes the file whole, for its owner alone; False if there is one already, or a link in its place."""
    if os.path.lexists(file):
        return False
    whole = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(token + "\n")
    try:
        # Of two commands that start at once exactly one makes the name, of a file that the other can read already.
        os.link(whole, file)
    except FileExistsError:
        return False
    finally:
        whole.unlink()
    return True


def _read_token(file: Path) -> str:
    again = "remove the file to have another one made"
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as source:
        # Of the open file, not of its name, which may mean another file by now.
        about = os.fstat(source.fileno())
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077 or not stat.S_ISREG(about.st_mode):
            raise ConfigError(f"{file}: others can read or write it (mode {stat.S_IMODE(about.st_mode):04o}); {again}")
        found = source.read(1024).strip()
    if len(found) < SHORTEST_TOKEN:
        raise ConfigError(
            f"{file}: holds {len(found)} characters, accepts a token of {SHORTEST_TOKEN} or more; {again}"
        )
    return found


class Guard:
    """An ASGI application that passes on what brings the token, and answers everything else with 401, whatever its
    path. What fails inside ends the connection and is told, without a traceback."""

    def __init__(self, app: App, token: str, tell: Callable[[str], None]) -> None:
        self.app, self.tell = app, tell
        self._expected = b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Neither WebSockets nor the lifespan protocol are served.
        if scope["type"] != "http":
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        # compare_digest takes the same time wherever two tokens differ.
        # Two headers are refused: a proxy in front may have looked at the other one.
        if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):
            await answer(send, 401, "the token is missing or wrong", {b"www-authenticate": b"Bearer"})
            return
        try:
            await self.app(scope, receive, send)
        except Exception as error:  # the server must go on; a connection that is cut tells the client
            self.tell(f"{scope['method']} {scope['path']}: {type(error).__name__}: {error}")


async def answer(send: Send, status: int, found: Any, headers: dict[bytes, bytes] | None = None) -> None:
    """Sends an answer of JSON: ``found``, or with an error status ``{"error": {"message": found}}``."""
    body = json.dumps(found if status == 200 else {"error": {"message": found, "code": status}}).encode()
    shown = {b"content-type": b"application/json", b"content-length": str(len(body)).encode(), **(headers or {})}
    if status == 401:
        shown[b"connection"] = b"close"  # a body that comes with it is not read
    await send({"type": "http.response.start", "status": status, "headers": [*shown.items()]})
    await send({"type": "http.response.body", "body": body})


# -------------------------------------------------------------------------------------------------------- the interface


def sockets_for(host: str, port: int, *, count: int = 1, encrypted: bool) -> list[socket.socket]:
    """Sockets that are bound to ``port`` and those after it, or to free ports with 0; nobody is let in yet.

    Raises ConfigError if ``host`` is no interface of this machine, where one is public and not ``encrypted``, or
    where a port is taken."""
    if not 0 <= port <= 65536 - count:
        raise ConfigError(f"--port: got {port}, accepts 0 (any free one) to {65536 - count}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host: got {host!r}, accepts a name or an address of this machine ({error})") from None
    if not encrypted and (why := public(str(address[0]))):
        raise ConfigError(
            f"--host: got {host!r}, which is {why}; without TLS the token and all texts could be read on the way. Name "
            "a private interface (127.0.0.1, 10.x.x.x, 192.168.x.x), or give --tls-cert and --tls-key"
        )
    # Closes those that are bound already if a later port is taken; pop_all keeps all of them open.
    with contextlib.ExitStack() as stack:
        bound = [
            # Port 0 stays 0 for each of them: any free port.
            stack.enter_context(_bound(family, (address[0], port and port + i, *address[2:]), host))
            for i in range(count)
        ]
        stack.pop_all()
    return bound


@contextlib.contextmanager
def bound_on_node(host: str) -> Iterator[socket.socket]:
    """A socket on a free port of ``host``, the address by which the nodes of a cluster reach this one. Raises
    ConfigError."""
    try:
        bound = sockets_for(host, 0, encrypted=False)[0]
    except ConfigError as error:
        raise ConfigError(f"cannot listen on {host}, the address of this node on the Ray cluster: {error}") from None
    with bound:
        yield bound


def _bound(family: int, address: tuple[Any, ...], host: str) -> socket.socket:
    # The protocol by name: asyncio sends small answers at once only where it sees TCP, else 40 ms later.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a restart would have to wait
        # Keepalive ends the work for a peer that vanished without closing its connection.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"--host, --port: cannot use {host} port {address[1]}: {error.strerror}; name an address of this machine "
            "and a free port (0 takes any)"
        ) from None
    return made


def public(address: str) -> str:
    """What is public about an address; empty for those that only reach this machine or a private network.

    >>> public("127.0.0.1"), public("10.1.2.3"), public("fd00::1")
    ('', '', '')
    >>> public("8.8.8.8"), public("::ffff:8.8.8.8"), public("100.64.0.1")
    ('a public address', 'a public address', 'a public address')
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    # An IPv4 address inside IPv6 is judged as what it is.
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_unspecified:  # before is_private, which it is too
        return "every interface of this machine"
    return "" if found.is_loopback or found.is_private or found.is_link_local else "a public address"


def address_of(bound: socket.socket, *, host: str, encrypted: bool) -> str:
    """The URL of a bound socket, with the host as it was named."""
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if encrypted else 'http'}://{shown}:{bound.getsockname()[1]}"


# ------------------------------------------------------------------------------------------------------------------ TLS


def tls(cert: str, key: str) -> tuple[str, str] | None:
    """The files of a certificate and its key, tried; None where neither is given. Raises ConfigError."""
    if not cert and not key:
        return None
    if not (cert and key):
        raise ConfigError("--tls-cert, --tls-key: one is of no use without the other; give both, as PEM files")
    try:
        # An empty password: without one, OpenSSL would ask for it in the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(
            f"--tls-cert, --tls-key: {cert} and {key} cannot be used ({error}); they must be PEM files that belong "
            "together, the key without a password"
        ) from None
    return cert, key


# -------------------------------------------------------------------------------------------------------------- serving


@contextlib.contextmanager
def listening(
    app: App, sockets: Sequence[socket.socket], encryption: tuple[str, str] | None
) -> Iterator[Callable[[], bool]]:
    """Answers requests on ``sockets`` in a thread while the block runs; gives a function that says whether it still
    does."""
    uvicorn = _uvicorn()
    cert, key = encryption or (None, None)
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="off", loop="asyncio", log_level="critical", access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=_IDLE_S, timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=cert, ssl_keyfile=key,
    )  # fmt: skip
    server = uvicorn.Server(config)
    # Outside the main thread uvicorn leaves the process's signal handlers alone.
    thread = threading.Thread(target=server.run, args=([*sockets],), name="trew-listening", daemon=True)
    thread.start()
    try:
        until = time.monotonic() + _START_S
        # uvicorn has no event to wait for.
        while not server.started:
            if not thread.is_alive() or time.monotonic() > until:
                raise TrewError("the HTTP server did not start; run the command again")
            time.sleep(0.005)
        yield thread.is_alive
    finally:
        server.should_exit = True
        thread.join(_GRACE_S + 5)
        for one in sockets:
            one.close()


def _uvicorn() -> Any:
    try:
        import uvicorn
    except ImportError:
        raise ConfigError(f"this needs uvicorn, which is not installed: {install_extra('serve')}") from None
    return uvicorn
