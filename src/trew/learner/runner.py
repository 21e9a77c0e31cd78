"""``ModelRunner``: how samples are run through a model, as :class:`.step.Learner` needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .accelerator import LayerAccelerator
from .packing import Pack, Sample

LossCallback = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""From the log-probs (n,) and entropies (n,) of the tokens in a slice to the derivatives of the loss by them."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What is asked of a runner. ``budget``: tokens of a pack, padding included. ``autocast``: the type of
    products; None = float32."""

    temperature: float = 1.0
    budget: int = 4096
    share_prompts: bool = True  # a group's prompt is computed once, and not once per completion
    fused: bool = True  # the head chunk by chunk, and not logits for all tokens
    autocast: torch.dtype | None = None
    gradient_checkpointing: bool = False
    accelerator: LayerAccelerator | None = None  # for the layers of the model's own forward
    release_after_use: bool = False  # the weights are read once in a step: memory that files hold may be given back
    layers: int = 0  # of the model, where the one given is a copy with fewer, on which packs are only planned


@dataclass(frozen=True, slots=True)
class ExecutionPath:
    """How samples are run; all empty is the model's own forward on padded rows, with logits for all tokens."""

    layers: str = ""  # the backend whose code runs the layers; empty: the model's own forward
    shared: bool = False
    fused: bool = False
    accelerator: str = ""  # the configuration's key of what runs the layers of the model's own forward


@runtime_checkable
class ModelRunner(Protocol):
    """Log-probs of completion tokens under a model, at the temperature, and gradients of losses of them. Both are those
    of the model's own float32 forward pass over one sample at a time, up to rounding."""

    model: Any
    settings: RunnerSettings

    @property
    def messages(self) -> list[str]:
        """What the user should know about how samples are run; each was given as a warning too."""
        ...

    @property
    def path(self) -> ExecutionPath:
        """How samples are run, as far as is known."""
        ...

    @property
    def verified(self) -> bool:
        """Whether the path is decided: it depends on the model and on the first samples."""
        ...

    def packs(self, samples: Sequence[Sample], *, among: Sequence[int] | None = None) -> list[Pack]:
        """The passes that give the log-probs of all completion tokens of the samples (or those ``among``). Decides the
        path, where the samples are enough for that."""
        ...

    def logprobs_of(self, pack: Pack) -> Float[Tensor, "n"]:
        """Log-probs of the pack's n completion tokens, float32 on the model's device, without gradient."""
        ...

    def accumulate(
        self, pack: Pack, rule: LossCallback, *, entropies: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        """Adds the gradient of a loss of the pack's tokens to the parameters' ``grad``. ``rule`` gives the loss's
        derivatives by log-probs and, with ``entropies``, by entropies; it may be asked for a few tokens at a time.
        ``lengths``: of runs of tokens (sequences) that it must see whole."""
        ...

    def sees_whole(self, lengths: Sequence[int]) -> bool:
        """Whether a rule may be asked to see sequences of these lengths whole, without much memory."""
        ...

    def release(self) -> None:
        """Gives back memory that is not needed until the next pass."""
        ...

    def exact(self) -> ModelRunner:
        """The same code in float32, whatever its settings say, and taken as verified: what :mod:`.choose` compares."""
        ...
