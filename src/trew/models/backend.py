"""``Backend``: faster code that may replace the plain runner and the plain decoder on one kind of machine.

Nothing needs one: with none at hand everything is computed by the model's own forward pass and torch. Whatever a
backend gives is compared with that on real samples before it is used (:mod:`.verified`).
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
    """One object serves the engine and the learner of a run, which take turns: they may share memory through it.

    Where it cannot do what it is asked for, it says why not, in words that complete "because ...".
    """

    name: str

    def missing(self) -> str:
        """What this machine lacks for the backend, and what to do; empty where it lacks nothing."""
        ...

    def start(self) -> None:
        """Prepares the process, before any weights are loaded."""
        ...

    def runner(self, model: Any, *, plain: AutogradRunner) -> ModelRunner | str:
        """A runner for the model, with the settings of the ``plain`` one, or why there is none."""
        ...

    def body(self, model: Any, *, autocast: torch.dtype | None, recompute: bool) -> Body | str:
        """Everything below the model's output head, or why there is none. ``autocast``: the type of products;
        ``recompute``: activations are computed again on the way back, and not kept."""
        ...

    def decoder(self, model: Any, work: Decoding) -> AbstractContextManager[Decoder] | str:
        """A decoder for one ``generate`` call, which lives inside the block, or why there is none. The weights are as
        they are when the block is entered."""
        ...

    def reads_by_layer(self, model: Any) -> bool:
        """Whether the runner reads weights that lie in a file layer by layer, so that not all of them need memory at
        once; the model's weights need not be there."""
        ...

    def memory(self) -> Planning:
        """What the estimate of a run needs to know."""
        ...

    def zeros(self, shapes: Sequence[Sequence[int]]) -> list[Tensor] | None:
        """float32 zeros on the CPU that stay for the whole run, apart from what passes through a step; None where they
        are no concern of the backend's."""
        ...

    def release(self) -> None:
        """Frees what is kept between calls of the decoder."""
        ...
