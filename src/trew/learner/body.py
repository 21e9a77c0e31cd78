"""``Body``: a model below its output head, over packed rows, for heads other than the learner's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from ..models.anatomy import Transformer
from .packing import Pack


@runtime_checkable
class Body(Protocol):
    """Hidden states are those of the model's own float32 forward pass, up to rounding."""

    @property
    def parts(self) -> Transformer:
        """The model's modules by their role, the head among them."""
        ...

    @property
    def pack_tokens(self) -> int:
        """The best number of tokens in a pack; more take more memory and are no faster."""
        ...

    def states(self, pack: Pack) -> Float[Tensor, "K H"]:
        """Hidden states at ``pack.read_at``, float32, as the head takes them; without gradient."""
        ...

    def differentiable(self, pack: Pack) -> AbstractContextManager[Float[Tensor, "K H"]]:
        """The same as a leaf that requires a gradient. At the end of the block, the gradient in its ``grad`` is
        propagated back and added to the weights' ``grad``."""
        ...

    def exact(self) -> Body:
        """The same code on the same weights, with products in float32, for the comparison with the plain way."""
        ...
