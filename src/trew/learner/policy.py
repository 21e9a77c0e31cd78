"""``Policy``: the interface of a model under training, as the loop uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from ..objective import TokenBatch
from ..types import StepOutput, TrainingSample
from .accumulate import Accumulated


class Policy(Protocol):
    """A model under training. N is the number of completion tokens over all samples, in sample order.

    An optimizer step has two halves: ``accumulate`` adds up gradients, ``apply`` moves the weights. ``version`` counts
    changes of the weights: it rises exactly when they change.
    """

    @property
    def version(self) -> int:
        """How often the weights have changed."""
        ...

    @property
    def reference_version(self) -> int | None:
        """The version of the weights that the reference has; None where they are of no one version."""
        ...

    def logprobs(
        self,
        samples: Sequence[TrainingSample],
        *,
        reference: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Float[Tensor, "N"]:
        """Log-probs at the training temperature under the policy, or under the frozen reference; float32 on the CPU,
        without gradient. Raises NumericsError, naming the samples, where one is not finite."""
        ...

    def teacher_logprobs(self, samples: Sequence[TrainingSample]) -> Float[Tensor, "N"]:
        """Log-probs under the teacher, as :meth:`logprobs` gives them."""
        ...

    def untempered(self, samples: Sequence[TrainingSample]) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
        """Log-probs and entropies at temperature 1 under the policy, as :meth:`logprobs` gives them otherwise."""
        ...

    def score_norms(self, samples: Sequence[TrainingSample]) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
        """Log-probs under the policy as :meth:`logprobs` gives them, and 1 - 2 pi + sum_v pi_v^2 at each token."""
        ...

    def verify(self, samples: Sequence[TrainingSample]) -> None:
        """Decides the execution path on whole samples, where it is not decided yet."""
        ...

    def accumulate(self, samples: Sequence[TrainingSample], batch: TokenBatch) -> Accumulated:
        """Computes the gradient of one optimizer step; ``batch`` belongs to ``samples``, prepared by the objective. The
        weights do not change. Raises NumericsError, with gradients cleared, where a log-prob or the loss is not finite.
        """
        ...

    def apply(self, done: Accumulated) -> StepOutput:
        """Clips the gradient and moves the weights. Raises NumericsError, with nothing changed, where the gradient is
        not finite."""
        ...

    def update_reference(self) -> None:
        """Moves the reference's weights toward the policy's."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by the names that the model's files have, tied weights under both names."""
        ...
