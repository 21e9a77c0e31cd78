"""The embedded engine: generates with the very module that is being trained, through its own forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import TorchEngine

__all__ = ["TorchEngine"]


def __getattr__(name: str) -> Any:
    """Imports the engine when it is asked for: it needs the backends, which need :mod:`.packed` and :mod:`.sampler`."""
    if name == "TorchEngine":
        from .engine import TorchEngine

        return TorchEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
