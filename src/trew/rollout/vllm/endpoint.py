"""The address of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ConfigError
from ...utils.addresses import ACCEPTS, is_local, split_address


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens: ``url`` is ``http://host:port``, or ``http://localhost`` with the path of a Unix
    ``socket``. ``token``, if there is one, goes with every request as a bearer token and is never shown."""

    url: str
    socket: Path | None = None
    token: str = field(default="", repr=False)

    @staticmethod
    def parse(text: str, token: str = "") -> Endpoint:
        """The endpoint of an address in a recipe. Raises ConfigError where it is none.

        >>> str(Endpoint.parse("unix:/run/a.sock")), str(Endpoint.parse("http://10.0.0.1:8000"))
        ('unix:/run/a.sock', 'http://10.0.0.1:8000')
        """
        found = split_address(text)
        if found is None:
            raise ConfigError(f"cluster.endpoints: got {text!r}, accepts {ACCEPTS}")
        url, socket = found
        return Endpoint(url, Path(socket) if socket else None, token)

    @property
    def local(self) -> bool:
        """Whether the server runs on this machine, and so sees its files."""
        return is_local(self.url, str(self.socket or ""))

    def __str__(self) -> str:
        return self.url if self.socket is None else f"unix:{self.socket}"
