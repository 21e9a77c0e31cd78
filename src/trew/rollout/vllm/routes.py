"""Loads a version of the weights into a server: as files here, as a stream in ``stream``, from memory in ``memory``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .client import ServerRefused, call
from .endpoint import Endpoint
from .environment import FORMAT

QUICK_S = 60.0
"""Limit of calls that move no weights."""


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

    def load(self, endpoint: Endpoint, what: str, *, timeout_s: float) -> None:
        prepare(endpoint, what, {"root": str(self.root), "format": FORMAT}, timeout_s=timeout_s)
        start(endpoint, what, timeout_s=timeout_s)
        info = {"update_info": {"folder": self.folder, "manifest_digest": self.manifest_digest}}
        call(endpoint, "POST", "/update_weights", what=f"{what}: updating", timeout_s=timeout_s, body=info)


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
