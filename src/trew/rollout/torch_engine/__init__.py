"""The embedded engine: generates with the very module that is being trained, through its own forward pass."""

from .engine import TorchEngine

__all__ = ["TorchEngine"]
