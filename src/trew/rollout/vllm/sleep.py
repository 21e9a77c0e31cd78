"""Servers that give up a GPU's memory for a while: at level 2, which keeps nothing, as new weights come anyway."""

from __future__ import annotations

from ...errors import EngineError
from .client import call
from .endpoint import Endpoint


def sleep(endpoint: Endpoint, *, timeout_s: float) -> None:
    """Has a server give up its weights and its cache; what it is working on is dropped. Raises EngineError where it
    may not have done so."""
    level = {"level": "2", "mode": "abort"}
    call(endpoint, "POST", "/sleep", what="going to sleep", timeout_s=timeout_s, params=level)
    said = call(endpoint, "GET", "/is_sleeping", what="asking whether it sleeps", timeout_s=timeout_s)
    if not (isinstance(said, dict) and said.get("is_sleeping") is True):
        raise EngineError(f"server {endpoint}: was told to sleep, and answers {said!r} when asked whether it does")


def wake(endpoint: Endpoint, tag: str, *, timeout_s: float) -> None:
    """Has a sleeping server take memory again: for ``weights``, into which an update must follow, or the ``kv_cache``,
    after which it generates."""
    call(endpoint, "POST", "/wake_up", what=f"waking up for {tag}", timeout_s=timeout_s, params={"tags": tag})
