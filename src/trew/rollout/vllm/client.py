"""Calls a server over HTTP: each call has a name and a limit, and fails with one of three errors.

Each control call opens its own connection: vLLM closes a connection after an error, and another call on it would fail
for no reason of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx2

from ...errors import EngineError
from .endpoint import Endpoint

CONNECT_S = 10.0
"""Limit of connecting: a running server accepts at once, however busy it is."""
REUSED_S = 2.0
"""Limit of an idle connection's reuse: vLLM closes it after 5 seconds, and a request that is sent at that moment would
fail as if the server had died."""
GATEWAY = (502, 504)
"""Statuses of a proxy whose server does not answer; vLLM itself never sends them."""
SHOWN = 300
"""Characters of a server's message that are shown."""


class ServerGone(EngineError):
    """A server cannot be reached, closed the connection, or reports that it cannot go on."""


class ServerHung(ServerGone):
    """A server accepts connections, but does not answer or make progress within the limit."""


class ServerRefused(EngineError):
    """A server answered a call with an error; ``status`` is HTTP's."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def call(
    endpoint: Endpoint, method: str, path: str, *, what: str, timeout_s: float, body: Any = None,
    params: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """Returns the JSON of a server's answer; its text if that is not JSON, None if it is empty.

    ``what`` names the call in messages. Raises ServerGone, ServerHung after ``timeout_s`` without a byte, and
    ServerRefused if the status is not 200.
    """
    transport = httpx2.HTTPTransport(**wire(endpoint))
    limit = httpx2.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
    # trust_env=False: a proxy from the environment must not see prompts, and would not find a local server.
    with httpx2.Client(transport=transport, headers=headers(endpoint), timeout=limit, trust_env=False) as client:
        try:
            response = client.request(method, f"{endpoint.url}{path}", json=body, params=params)
        except (httpx2.HTTPError, OSError) as error:
            raise failure(endpoint, what, error, timeout_s=timeout_s) from None
    return answer(endpoint, what, response)


def wire(endpoint: Endpoint) -> dict[str, Any]:
    """Returns the arguments of a transport that connects to a server."""
    # Certificates are loaded for https only: reading the system's takes 20 ms, and every control call would do it.
    encrypted = endpoint.url.startswith("https:")
    return {"uds": None if endpoint.socket is None else str(endpoint.socket), "verify": encrypted}


def headers(endpoint: Endpoint) -> dict[str, str]:
    """Returns the headers of every request to a server."""
    return {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}


def failure(endpoint: Endpoint, what: str, error: Exception, *, timeout_s: float | None = None) -> ServerGone:
    """Returns the error for a request without an answer."""
    if isinstance(error, httpx2.ReadTimeout | httpx2.WriteTimeout) and timeout_s is not None:
        return ServerHung(f"server {endpoint}: {what}: no answer within {timeout_s:g} s")
    said = str(error) or type(error).__name__
    return ServerGone(f"server {endpoint}: {what}: {said}")


def answer(endpoint: Endpoint, what: str, response: httpx2.Response) -> Any:
    """Returns the content of an answer. Raises ServerRefused if it is an error, ServerGone if it is a proxy's that has
    no server."""
    if response.status_code in GATEWAY:
        raise ServerGone(f"server {endpoint}: {what}: {words(response)}")
    if response.status_code != 200:
        raise ServerRefused(
            f"server {endpoint}: {what}: status {response.status_code}: {words(response)}", status=response.status_code
        )
    text = response.content
    try:
        return json.loads(text) if text else None
    except ValueError:
        return response.text


def words(response: httpx2.Response) -> str:
    """Returns a server's error message on one line."""
    try:
        found = response.json()
    except ValueError:
        found = response.text
    for key in ("error", "message", "detail"):  # vLLM: {"error": {"message": ...}}; FastAPI: {"detail": ...}
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:SHOWN] or "no reason given"
