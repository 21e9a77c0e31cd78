"""``LayerAccelerator``: something else than the layers' own code, for a model that runs through its own forward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar, Protocol, runtime_checkable

from transformers import PreTrainedModel


@runtime_checkable
class LayerAccelerator(Protocol):
    """``key``: of the configuration; ``what``: its subject in a message. In a ``trial`` its errors are RuntimeErrors;
    else ModelErrors, with what to do."""

    key: ClassVar[str]
    what: ClassVar[str]
    trial: bool

    def layers(self, model: PreTrainedModel, *, again: bool = False) -> AbstractContextManager[None]:
        """In force inside the block, which must enclose the backward pass; nothing is left of it outside. ``again``:
        layers compute their activations again in the backward pass."""
        ...

    def report(self) -> None:
        """Tells what the user may like to know after an optimizer step."""
        ...
