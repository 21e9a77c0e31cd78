"""``LayerAccelerator``: faster code for the layers of a model that runs through its own ``forward``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar, Protocol, runtime_checkable

from transformers import PreTrainedModel


@runtime_checkable
class LayerAccelerator(Protocol):
    """``key``: the configuration key under ``learner``; ``what``: the subject of its messages. During a ``trial`` it
    raises RuntimeErrors, which the comparison catches; otherwise ModelErrors that say what to do."""

    key: ClassVar[str]
    what: ClassVar[str]
    trial: bool

    def layers(self, model: PreTrainedModel, *, again: bool = False) -> AbstractContextManager[None]:
        """Accelerates the layers inside the block, which must enclose the backward pass, and restores them afterwards.
        ``again``: layers recompute their activations in the backward pass."""
        ...

    def report(self) -> None:
        """Reports to the user after an optimizer step, where there is something to report."""
        ...
