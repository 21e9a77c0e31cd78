"""``ModelRunner``: the interface that :class:`.step.Learner` uses to run samples through a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float

from ..types import TrainingSample
from .accelerator import LayerAccelerator
from .head import Beside, LossCallback
from .packing import Pack
from .path import ExecutionPath


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The settings of a runner."""

    temperature: float = 1.0
    budget: int = 4096  # tokens of a pack, padding included
    ranks: int = 1  # processes that compute the packs of a step at the same time: their number is a multiple of this
    share_prompts: bool = True  # compute a group's prompt once instead of once per completion
    fused: bool = True  # compute the head chunk by chunk, without logits for all tokens
    autocast: torch.dtype | None = None  # dtype of products; None = float32
    flash: bool = True  # FlashAttention for packed rows, on a GPU in half precision
    gradient_checkpointing: bool = False
    accelerator: LayerAccelerator | None = None  # for the layers of the model's own forward
    release_after_use: bool = False  # weights are read once per step: pages backed by files may be released
    layers: int = 0  # the real model's, where the given one is a copy with fewer, used to plan packs only


@runtime_checkable
class ModelRunner(Protocol):
    """Computes log-probs of completion tokens at the temperature, and gradients, as the model's own forward would."""

    model: Any
    settings: RunnerSettings

    @property
    def messages(self) -> list[str]:
        """Notes for the user, each of them also given as a warning."""

    @property
    def path(self) -> ExecutionPath:
        """The execution path, as far as it is decided."""

    @property
    def verified(self) -> bool:
        """Whether the path is decided, which needs the first samples."""

    def packs(self, samples: Sequence[TrainingSample], *, among: Sequence[int] | None = None) -> list[Pack]:
        """The packs for all completion tokens (of ``among``); decides the path where the samples allow it."""

    def logprobs_of(self, pack: Pack) -> Float[torch.Tensor, "n"]:
        """Log-probs of the pack's n completion tokens, float32 on the model's device, without gradient."""

    def values_of(self, pack: Pack, beside: Beside) -> tuple[Float[torch.Tensor, "n"], Float[torch.Tensor, "n"]]:
        """The same, and the entropies of the tokens' distributions or the score norms of the tokens."""

    def accumulate(
        self, pack: Pack, rule: LossCallback, *, entropies: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        """Adds the gradient of a loss to ``grad``. ``rule`` returns its derivatives by log-probs and, with
        ``entropies``, by entropies, for a few tokens at a time; sequences of ``lengths`` are never split."""

    def idle(self, *, gradient: bool) -> None:
        """Takes part in a pass of other ranks without a pack; a no-op unless weights are sharded over ranks."""

    def sees_whole(self, lengths: Sequence[int]) -> bool:
        """Whether a rule can see sequences of these lengths whole without much memory."""

    def release(self) -> None:
        """Frees memory that is not needed until the next pass."""

    def exact(self) -> ModelRunner:
        """The same code in float32, taken as verified, for the comparison in :mod:`.choose`."""
