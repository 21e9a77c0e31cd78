"""What other machines reach of the servers of ``trew serve``: the routes that runs use, and none else.

vLLM listens on a Unix socket that only this user can open, since its control routes ask for no key and one of them
(``/collective_rpc``) runs what it is sent. The proxy passes bodies on piece by piece, in both directions, and gives up
a request whose client has gone. :class:`~trew.utils.listening.Guard` asks for the token before any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from urllib.parse import parse_qs

import httpx2

from ...utils.listening import Receive, Scope, Send, answer
from .client import CONNECT_S, REUSED_S, headers, wire
from .keeper import Keeper
from .remote import RENEW, STATE
from .traffic import GENERATE, report_unless_late

FINISH = "/finish_weight_update"
ROUTES = {
    **dict.fromkeys(("/health", "/version", "/openapi.json", "/server_info", "/metrics"), "GET"),
    **dict.fromkeys(("/weight_info", "/get_world_size"), "GET"),
    **dict.fromkeys(
        (
            GENERATE,
            "/pause",
            "/resume",
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            FINISH,
        ),
        "POST",
    ),
}
"""The routes of vLLM that are passed on, with their methods."""
MOST_BYTES = 64 << 20
"""Of a request's body: prompts are token ids, at most a few megabytes."""
_PASSED = (b"content-type", b"content-length")


class _TooLarge(Exception):
    """A body above MOST_BYTES."""


class _ClientGone(Exception):
    """The client closed the connection."""


class Proxy:
    """An ASGI application for the servers of ``keeper``. ``ports`` says which server is behind which port."""

    def __init__(self, keeper: Keeper, ports: Mapping[int, int], *, most_bytes: int = MOST_BYTES) -> None:
        self.keeper, self.ports, self.most_bytes = keeper, ports, most_bytes
        self._clients: dict[int, httpx2.AsyncClient] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number, path = self.ports[scope["server"][1]], scope["path"]
        kept = self.keeper.kept[number]
        if path == STATE and scope["method"] == "GET":
            await answer(send, 200, kept.said())
        elif path == RENEW and scope["method"] == "POST":
            self.keeper.renew(number, parse_qs(scope["query_string"].decode("ascii", "replace")).get("life", [""])[0])
            await answer(send, 200, kept.said())
        elif path not in ROUTES:
            await answer(send, 404, f"trew serve passes on no {path}; it does {', '.join(ROUTES)}")
        elif ROUTES[path] != scope["method"]:
            await answer(send, 405, f"{path} takes {ROUTES[path]}, got {scope['method']}")
        elif kept.state != "up":
            # 502: a run takes the server for gone, not the request for refused (client.GATEWAY).
            await answer(send, 502, kept.why)
        elif path == GENERATE and kept.fresh:
            # Its weights are those of the model's files: whoever asks it now believes that it has others.
            why = f"server {number} has got no weights from a run yet"
            if kept.lives > 1:
                why = f"server {number} was started again, and has got no weights since"
            await answer(send, 502, why)
        else:
            await self._pass_on(number, scope, _Upload(receive, self.most_bytes), send)

    async def _pass_on(self, number: int, scope: Scope, upload: _Upload, send: Send) -> None:
        """Passes a request on; gives it up, which ends the work on it, as soon as its client is gone."""
        # Whichever ends first decides: the answer, or the client's leaving.
        passing = asyncio.ensure_future(self._carry(number, scope, upload, send))
        watching = asyncio.ensure_future(upload.gone())
        try:
            await asyncio.wait((passing, watching), return_when=asyncio.FIRST_COMPLETED)
            # Raises what it raised, if anything.
            if passing.done():
                await passing
        finally:
            for task in (passing, watching):
                task.cancel()
            await asyncio.gather(passing, watching, return_exceptions=True)

    async def _carry(self, number: int, scope: Scope, upload: _Upload, send: Send) -> None:
        kept = self.keeper.kept[number]
        life = kept.life
        began = False
        try:
            async with self._request(number, scope, upload) as response:
                # Only of the life that was updated: the server may have been started again meanwhile.
                if scope["path"] == FINISH and response.status_code == 200 and kept.life == life:
                    kept.fresh = False
                began = True
                await _pass_on(response, send)
        except _TooLarge:
            await answer(send, 413, f"the body is larger than {self.most_bytes} bytes")
        except _ClientGone:
            pass
        except (httpx2.HTTPError, OSError) as error:
            if began:  # the answer cannot be taken back: its end is missing, and the connection is cut
                return
            await answer(send, 502, f"{self.keeper.why(number)} ({type(error).__name__})")

    def _request(
        self, number: int, scope: Scope, upload: _Upload
    ) -> contextlib.AbstractAsyncContextManager[httpx2.Response]:
        method, address = scope["method"], self._address(number, scope)
        if method != "POST":
            upload.skip()
            return self._client(number).stream(method, address)
        given = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _PASSED}
        return self._client(number).stream(method, address, headers=given, content=upload.pieces())

    def _address(self, number: int, scope: Scope) -> str:
        """The address of a request at the server."""
        query = scope["query_string"].decode("ascii", "replace")
        return f"{self.keeper.servers.endpoints[number].url}{scope['path']}{'?' if query else ''}{query}"

    def _client(self, number: int) -> httpx2.AsyncClient:
        # Made here, in the event loop that it belongs to.
        if number not in self._clients:
            asyncio.get_running_loop().set_exception_handler(report_unless_late)
            endpoint = self.keeper.servers.endpoints[number]
            every = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=REUSED_S)
            self._clients[number] = httpx2.AsyncClient(
                transport=httpx2.AsyncHTTPTransport(**wire(endpoint), limits=every),
                headers={**headers(endpoint), "Accept-Encoding": "identity"},  # what comes is passed on as it is
                trust_env=False, timeout=httpx2.Timeout(None, connect=CONNECT_S),
            )  # fmt: skip
        return self._clients[number]


async def _pass_on(response: httpx2.Response, send: Send) -> None:
    """Sends a server's answer to the client, piece by piece as it comes."""
    headers = [(k.lower(), v) for k, v in response.headers.raw if k.lower() in _PASSED]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    # Raw, because the length in the headers is that of the bytes as the server sent them.
    async for piece in response.aiter_raw():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class _Upload:
    """The body of a request as it comes, and its client's leaving after that."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most = receive, most
        self._read = asyncio.Event()  # the whole body, or that nobody reads it

    def skip(self) -> None:
        """Says that the body is not read."""
        self._read.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone
            piece = message.get("body", b"")
            size, more = size + len(piece), message.get("more_body", False)
            if size > self._most:
                raise _TooLarge
            if not more:
                self._read.set()
            if piece:
                yield piece

    async def gone(self) -> None:
        """Returns once the client has gone; until the body is read, :meth:`pieces` is who notices."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
