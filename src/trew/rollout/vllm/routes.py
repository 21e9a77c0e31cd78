"""Loads a version of the weights into a server: as files here, as a stream in ``stream``, from memory in ``memory``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...errors import EngineError
from .client import ServerRefused, call
from .endpoint import Endpoint
from .environment import FORMAT

QUICK_S = 60.0
"""Limit of calls that move no weights."""
ANNOUNCE_S = 5.0
"""Limit of an announcement, which the next update does without."""


class Route(Protocol):
    """One version of the weights, which any server can load at any time."""

    def load(self, endpoint: Endpoint, what: str, *, timeout_s: float) -> None:
        """Starts an update on a paused server and loads these weights; the caller finishes the update.

        ``what`` names the version in messages, ``timeout_s`` limits each step. Raises EngineError if the server may not
        have all of them."""
        ...


@dataclass(frozen=True, slots=True)
class Files:
    """The files in ``root/folder``, with a manifest of this BLAKE3 digest."""

    root: Path
    folder: str
    manifest_digest: str

    def announce(self, endpoints: Sequence[Endpoint]) -> None:
        """Has servers verify these files while they generate; :meth:`load` then need not. Returns once they have begun.
        A server that does not is not reported: it verifies them when it loads them."""
        if endpoints:
            with ThreadPoolExecutor(len(endpoints), thread_name_prefix="trew-announce") as threads:
                list(threads.map(self._announce, endpoints))

    def _announce(self, endpoint: Endpoint) -> None:
        info = {"root": str(self.root), "format": FORMAT, **self._name}
        with contextlib.suppress(EngineError):
            prepare(endpoint, "announcing weights", info, timeout_s=ANNOUNCE_S)

    @property
    def _name(self) -> dict[str, str]:
        return {"folder": self.folder, "manifest_digest": self.manifest_digest}

    def load(self, endpoint: Endpoint, what: str, *, timeout_s: float) -> None:
        prepare(endpoint, what, {"root": str(self.root), "format": FORMAT}, timeout_s=timeout_s)
        start(endpoint, what, timeout_s=timeout_s)
        call(
            endpoint, "POST", "/update_weights", what=f"{what}: updating", timeout_s=timeout_s,
            body={"update_info": self._name},
        )  # fmt: skip


def prepare(endpoint: Endpoint, what: str, info: Mapping[str, object], *, timeout_s: float) -> None:
    """Tells a server how it will get weights. Raises ServerRefused if it cannot take them that way."""
    call(
        endpoint, "POST", "/init_weight_transfer_engine", what=f"{what}: preparing",
        timeout_s=min(QUICK_S, timeout_s), body={"init_info": dict(info)},
    )  # fmt: skip


def start(endpoint: Endpoint, what: str, *, timeout_s: float) -> None:
    """Starts an update, or continues one that a trainer left open because it was killed: vLLM has no route to abort it,
    and it accepts these weights as well."""
    try:
        call(endpoint, "POST", "/start_weight_update", what=f"{what}: starting the update", timeout_s=timeout_s)
    except ServerRefused as error:
        if "already active" not in str(error):
            raise
