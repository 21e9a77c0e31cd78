"""Addresses of HTTP servers, as settings write them."""

from __future__ import annotations

from urllib.parse import urlsplit

ACCEPTS = "addresses like 'http://127.0.0.1:8000', 'https://host:8443' or 'unix:/path/to/socket'"


def split_address(text: str) -> tuple[str, str] | None:
    """The URL of a server and the path of its Unix socket, empty over TCP; None if ``text`` is not an address.

    >>> split_address("http://127.0.0.1:8000/"), split_address("unix:/run/a.sock")
    (('http://127.0.0.1:8000', ''), ('http://localhost', '/run/a.sock'))
    >>> split_address("127.0.0.1:8000"), split_address("unix:a.sock"), split_address("http://host:port")
    (None, None, None)
    >>> split_address("http://node..local:8000"), split_address("http://:password@host:8000")
    (None, None)
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        return ("http://localhost", path) if path.startswith("/") and "\0" not in path else None
    try:
        parts = urlsplit(text)
        port = parts.port
        # As a connection does, which fails with the same error for a name that no host has.
        (parts.hostname or "").encode("idna")
    except ValueError:  # a port that is no number, a broken IPv6 address; two dots in a row, a part that is too long
        return None
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None or not plain:
        return None
    return f"{parts.scheme}://{parts.netloc}", ""


def is_local(url: str, socket: str | None) -> bool:
    """Whether a server is on this machine, by its address.

    >>> is_local("http://localhost:80", None), is_local("http://localhost", "/a"), is_local("http://10.0.0.1:80", None)
    (True, True, False)
    """
    return bool(socket) or urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
