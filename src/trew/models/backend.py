"""``Backend``: faster code that may replace the plain runner and the plain decoder on one kind of machine.

Backends are optional: without one, the model's own forward pass and torch compute everything. A backend's results are
compared with those on real samples before it is used (:mod:`.verified`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from .planning import Planning

if TYPE_CHECKING:
    import torch

    from ..learner.autograd import AutogradRunner
    from ..learner.body import Body
    from ..learner.runner import ModelRunner
    from ..rollout.torch_engine.decoder import Decoder, Decoding


@runtime_checkable
class Backend(Protocol):
    """One object serves both engine and learner of a run. They take turns, so they may share memory through it.

    A method that cannot provide what is asked returns the reason, in words that complete "because ...".
    """

    name: str

    def missing(self) -> str:
        """Returns what this machine lacks for the backend, with advice; empty if it lacks nothing."""
        ...

    def start(self) -> None:
        """Prepares the process, before any weights are loaded."""
        ...

    def runner(self, model: Any, *, plain: AutogradRunner) -> ModelRunner | str:
        """Returns a runner for the model, with the settings of the ``plain`` one, or why there is none."""
        ...

    def body(self, model: Any, *, autocast: torch.dtype | None, recompute: bool) -> Body | str:
        """Returns everything below the model's output head, or why there is none. ``autocast``: the type of products;
        ``recompute``: the backward pass computes activations again (gradient checkpointing)."""
        ...

    def decoder(self, model: Any, work: Decoding) -> AbstractContextManager[Decoder] | str:
        """Returns a decoder that is valid inside the block, or why there is none. It uses the weights as they are when
        the block is entered."""
        ...

    def reads_by_layer(self, model: Any) -> bool:
        """Whether the runner reads file-backed weights layer by layer, so that not all of them need memory at once. The
        model's weights may be on "meta"."""
        ...

    def memory(self) -> Planning:
        """Returns what the memory estimate of a run needs to know."""
        ...

    def zeros(self, shapes: Sequence[Sequence[int]]) -> list[Tensor] | None:
        """Allocates float32 zeros on the CPU that live for the whole run, apart from a step's temporary tensors; None
        if the backend leaves that to torch."""
        ...

    def release(self) -> None:
        """Frees what is kept between calls of the decoder."""
        ...
