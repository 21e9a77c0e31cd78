"""``Decoder``: a model with rows of completions in it, as :class:`.decode.Schedule` needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...types import Sampling
from .sampler import Draw


@dataclass(frozen=True, slots=True)
class Decoding:
    """What one ``generate`` call asks of a decoder. ``autocast``: the type that products compute in; None = float32.
    ``tell`` is given what the user should know."""

    prompt_ids: Sequence[Sequence[int]]
    n: int  # completions of each prompt
    slots: int  # most rows at a time
    max_tokens: int  # of a completion
    autocast: torch.dtype | None = None
    tell: Callable[[str], None] = lambda text: None


@runtime_checkable
class Decoder(Protocol):
    """Rows of completions of ``prompt_ids``, numbered 0 to rows - 1; which row is whose is the caller's to know. Logits
    are those of the model's own forward pass over a row, up to rounding; float32, or what the model computes in."""

    prompt_ids: Sequence[Sequence[int]]

    @property
    def rows(self) -> int:
        """Rows that are running."""
        ...

    def add(self, prompts: Sequence[int]) -> Tensor:
        """Starts a row for each of these prompts (numbers, equal ones side by side) after those that run; returns the
        first logits (len(prompts), V) of the new ones."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Feeds one token per row (rows,); the logits (rows, V) after it, which the next call may overwrite."""
        ...

    def keep(self, alive: Sequence[int]) -> list[int]:
        """Drops all other rows; returns the old number of each remaining one, in their new order."""
        ...

    def forget(self) -> None:
        """Drops all rows, and prompts whose rows have not all begun: as before the first :meth:`add`."""
        ...

    def draw(self, logits: Tensor, *, keys: Tensor, positions: Tensor, sampling: Sampling) -> Draw:
        """A token for each row of ``logits`` (rows, V), by draw number ``positions`` (rows,) of ``keys`` (rows,), both
        int64: the same tokens as :func:`.sampler.draw`, up to rounding. The next call may overwrite the result."""
        ...
