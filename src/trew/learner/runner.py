"""``ModelRunner``: how samples are run through a model, as :class:`.step.Learner` needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float

from ..types import TrainingSample
from .accelerator import LayerAccelerator
from .head import LossCallback
from .packing import Pack


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What is asked of a runner."""

    temperature: float = 1.0
    budget: int = 4096  # tokens of a pack, padding included
    share_prompts: bool = True  # a group's prompt is computed once, and not once per completion
    fused: bool = True  # the head chunk by chunk, without logits for all tokens
    autocast: torch.dtype | None = None  # the type of products; None = float32
    gradient_checkpointing: bool = False
    accelerator: LayerAccelerator | None = None  # for the layers of the model's own forward
    release_after_use: bool = False  # weights are read once in a step: pages that files hold may be released
    layers: int = 0  # of the model, where the one given is a copy with fewer, on which packs are only planned


@dataclass(frozen=True, slots=True)
class ExecutionPath:
    """How samples are run; all empty is the model's own forward on padded rows, with logits for all tokens."""

    layers: str = ""  # the backend whose code runs the layers
    shared: bool = False
    fused: bool = False
    accelerator: str = ""  # the configuration's key


@runtime_checkable
class ModelRunner(Protocol):
    """Log-probs of completion tokens at the temperature, and gradients: those of the model's own forward pass."""

    model: Any
    settings: RunnerSettings

    @property
    def messages(self) -> list[str]:
        """What the user should know, each given as a warning too."""
        ...

    @property
    def path(self) -> ExecutionPath:
        """How samples are run, as far as is known."""
        ...

    @property
    def verified(self) -> bool:
        """Whether the path is decided, which takes the first samples."""
        ...

    def packs(self, samples: Sequence[TrainingSample], *, among: Sequence[int] | None = None) -> list[Pack]:
        """The passes for the log-probs of all completion tokens (of ``among``); decides the path, where it can."""
        ...

    def logprobs_of(self, pack: Pack) -> Float[torch.Tensor, "n"]:
        """Log-probs of the pack's n completion tokens, float32 on the model's device, without gradient."""
        ...

    def accumulate(
        self, pack: Pack, rule: LossCallback, *, entropies: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        """Adds the gradient of a loss to ``grad``. ``rule`` gives its derivatives by log-probs and, with ``entropies``,
        by entropies, for a few tokens at a time; sequences of ``lengths`` it must see whole."""
        ...

    def sees_whole(self, lengths: Sequence[int]) -> bool:
        """Whether a rule may be asked to see sequences of these lengths whole, without much memory."""
        ...

    def release(self) -> None:
        """Gives back memory that is not needed until the next pass."""
        ...

    def exact(self) -> ModelRunner:
        """The same code in float32, taken as verified: what :mod:`.choose` compares with the plain way."""
        ...
