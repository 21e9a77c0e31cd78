"""HTTP calls to a server, each with a name and a limit, and what may come of them.

A control call opens a connection of its own: after an error vLLM closes the connection, and the next call on it would
fail for a reason that has nothing to do with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx2

from ...errors import EngineError
from .endpoint import Endpoint

CONNECT_S = 10.0
"""Seconds until a connection must be made: a server that is up accepts at once, however busy it is."""
GATEWAY = (502, 504)
"""What a proxy answers where the server behind it does not; vLLM itself never does."""
SHOWN = 300
"""Characters of a server's own words in a message."""


class ServerGone(EngineError):
    """A server cannot be reached, closed the connection, or reports that it cannot go on."""


class ServerHung(ServerGone):
    """A server that is there, and does not answer or make progress within the limit."""


class ServerRefused(EngineError):
    """A server answered a call with an error; ``status`` is HTTP's."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def call(
    endpoint: Endpoint, method: str, path: str, *, what: str, timeout_s: float, body: Any = None,
    params: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """The JSON that a server answers one call with; its text where that is not JSON, None where it is empty.

    ``what`` names the call in messages. Raises ServerGone, ServerHung after ``timeout_s`` without a byte, and
    ServerRefused where the status is not 200.
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
    """How to connect to a server, as arguments of a transport."""
    # Certificates are loaded for https only: reading the system's takes 20 ms, and every control call would do it.
    encrypted = endpoint.url.startswith("https:")
    return {"uds": None if endpoint.socket is None else str(endpoint.socket), "verify": encrypted}


def headers(endpoint: Endpoint) -> dict[str, str]:
    """The headers of every request to a server."""
    return {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}


def failure(endpoint: Endpoint, what: str, error: Exception, *, timeout_s: float | None = None) -> ServerGone:
    """The error to raise for a request that got no answer."""
    if isinstance(error, httpx2.ReadTimeout | httpx2.WriteTimeout) and timeout_s is not None:
        return ServerHung(f"server {endpoint}: {what}: no answer within {timeout_s:g} s")
    said = str(error) or type(error).__name__
    return ServerGone(f"server {endpoint}: {what}: {said}")


def answer(endpoint: Endpoint, what: str, response: httpx2.Response) -> Any:
    """The content of an answer. Raises ServerRefused where it is an error, ServerGone where it is a
    proxy's and says that there is no server."""
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
    """What a server says about an error, on one line."""
    try:
        found = response.json()
    except ValueError:
        found = response.text
    for key in ("error", "message", "detail"):  # vLLM: {"error": {"message": ...}}; FastAPI: {"detail": ...}
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:SHOWN] or "no reason given"
