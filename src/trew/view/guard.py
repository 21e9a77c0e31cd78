"""Who may read runs over HTTP: the Host header, the token and the headers of every answer.

The server listens on this machine alone, but every program and every web page that this machine's browser shows can
reach it. The token keeps out the programs of other users; the Host header keeps out a page whose name was made to
resolve to 127.0.0.1 (DNS rebinding); the headers keep what models wrote from running as a page.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]

LOCKED = (
    "trew view: this page needs the token of its server. Open the address that trew view printed, with ?token=... at "
    "its end; if you came from there, reload this page once."
)


@dataclass(frozen=True, slots=True)
class Access:
    """What a request must bring, and where the page may be shown. ``framed``: in the frame of a notebook."""

    token: str
    port: int
    hosts: frozenset[str] = frozenset()  # besides this machine's own names
    framed: bool = False

    @property
    def cookie(self) -> str:
        # Browsers send cookies to every port of a host: two servers need two names.
        return f"trew-view-{self.port}"

    def known_host(self, host: str) -> bool:
        names = {"127.0.0.1", "localhost", "[::1]"}
        own = {f"{name}:{self.port}" for name in names}
        # Browsers leave the usual port of http out.
        return host.lower() in own | self.hosts | (names if self.port == 80 else set())

    def right(self, given: str) -> bool:
        """Whether this is the token."""
        # compare_digest takes the same time wherever two tokens differ.
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


class Guard:
    """An ASGI application around ``app``, which sees only requests that may be answered: GET and HEAD, of this host,
    with the token where it is needed. Only the files of the page itself need none: they hold nothing of any run."""

    def __init__(self, app: App, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = _with_headers(send, _headers(self.access, scope["path"]))
        found = _Request(scope)
        # The host first: a page under a foreign name learns nothing, not even which paths there are.
        if not self.access.known_host(found.host):
            await _refuse(
                send, 403, f"host: got {found.host[:100]!r}, not an address of this server; --allow-host adds one"
            )  # fmt: skip
        elif scope["method"] not in ("GET", "HEAD"):
            await _refuse(send, 405, f"method: got {scope['method'][:20]!r}, accepts GET: this server changes nothing")
        elif found.foreign and scope["path"].startswith("/api"):
            await _refuse(send, 403, "the request comes from a page of another site")
        # Once, with the token in the address: from then on a cookie has it.
        elif scope["path"] == "/" and self.access.right(found.token) and not self.access.framed:
            await _let_in(send, self.access)
        elif _needs_token(scope["path"]) and not self._known(found, scope["path"]):
            # For people as text, for the page's own requests as JSON.
            await _refuse(send, 401, LOCKED, plain=scope["path"] == "/")
        else:
            await self.app(scope, receive, send)

    def _known(self, request: _Request, path: str) -> bool:
        # In a frame of another site browsers keep no cookie, so the page itself is opened by the token in its address.
        in_address = request.token if self.access.framed and path == "/" else ""
        return any(map(self.access.right, (request.bearer, request.cookie(self.access.cookie), in_address)))


class _Request:
    """The parts of a request that are looked at; empty where they are missing or given twice."""

    def __init__(self, scope: Scope) -> None:
        self._headers = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        self.host = self._only(b"host")
        # Sent by browsers only. same-site is another port or subdomain: not this server.
        self.foreign = self._only(b"sec-fetch-site") in ("cross-site", "same-site")
        kind, _, given = self._only(b"authorization").partition(" ")
        self.bearer = given.strip() if kind.lower() == "bearer" else ""
        # Given twice, it would be ambiguous which one counts.
        tokens = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
        self.token = tokens[0] if len(tokens) == 1 else ""

    def _only(self, name: bytes) -> str:
        given = [value for known, value in self._headers if known == name]
        return given[0] if len(given) == 1 else ""

    def cookie(self, name: str) -> str:
        # Not http.cookies, which reads none of them if one is not by the standard: browsers send those that other
        # programs on this machine have set, too.
        pairs = (pair.strip().partition("=") for pair in self._only(b"cookie").split(";"))
        return next((value for known, _, value in pairs if known == name), "")


def _needs_token(path: str) -> bool:
    return path == "/" or path == "/index.html" or path.startswith("/api")


def _headers(access: Access, path: str) -> dict[bytes, bytes]:
    frames = "*" if access.framed else "'self'"
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        f"base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
    )
    return {
        b"content-security-policy": policy.encode(),
        b"x-content-type-options": b"nosniff",
        b"referrer-policy": b"no-referrer",
        b"cross-origin-resource-policy": b"same-origin",
        # Nothing of a run is kept by the browser; files of the page may be, but are asked for again.
        b"cache-control": b"no-store" if _needs_token(path) else b"no-cache",
    }


def _with_headers(send: Send, headers: dict[bytes, bytes]) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers.items()]}
        await send(message)

    return sending


async def _let_in(send: Send, access: Access) -> None:
    # Not readable by scripts, and sent by no other site.
    cookie = f"{access.cookie}={access.token}; HttpOnly; SameSite=Strict; Path=/"
    # Back to the address without the token, which would otherwise stay in the history.
    headers = [(b"location", b"/"), (b"set-cookie", cookie.encode()), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(send: Send, status: int, message: str, *, plain: bool = False) -> None:
    body = message.encode() if plain else json.dumps({"error": {"message": message}}).encode()
    kind = b"text/plain; charset=utf-8" if plain else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
