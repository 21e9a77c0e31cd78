"""Has servers release a GPU's memory for a while: at level 2, which keeps nothing, since new weights follow anyway."""

from __future__ import annotations

from ...errors import EngineError
from .client import call
from .endpoint import Endpoint


def sleep(endpoint: Endpoint, *, timeout_s: float) -> None:
    """Has a server release its weights and its cache, and abort its requests. Raises EngineError unless it confirms
    that it sleeps."""
    level = {"level": "2", "mode": "abort"}
    call(endpoint, "POST", "/sleep", what="going to sleep", timeout_s=timeout_s, params=level)
    said = call(endpoint, "GET", "/is_sleeping", what="asking whether it sleeps", timeout_s=timeout_s)
    if not (isinstance(said, dict) and said.get("is_sleeping") is True):
        raise EngineError(f"server {endpoint}: was told to sleep, and answers {said!r} when asked whether it does")


def wake(endpoint: Endpoint, tag: str, *, timeout_s: float) -> None:
    """Has a sleeping server allocate memory: for ``weights``, which an update must follow, or for the ``kv_cache``,
    after which it generates."""
    call(endpoint, "POST", "/wake_up", what=f"waking up for {tag}", timeout_s=timeout_s, params={"tags": tag})
