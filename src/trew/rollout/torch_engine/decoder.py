"""``Decoder``: a model with rows of completions in it, as :class:`.decode.Schedule` needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...types import Sampling
from .sampler import Draw


@dataclass(frozen=True, slots=True)
class Decoding:
    """What a schedule asks of a decoder. ``autocast``: the type that products compute in; None = float32. ``tell`` is
    given what the user should know."""

    slots: int  # most rows at a time
    longest_prompt: int  # tokens
    max_tokens: int  # of a completion
    autocast: torch.dtype | None = None
    tell: Callable[[str], None] = lambda text: None

    @property
    def columns(self) -> int:
        """The most tokens of a row, its prompt's among them."""
        return self.longest_prompt + self.max_tokens


@runtime_checkable
class Decoder(Protocol):
    """Rows of completions, numbered 0 to rows - 1; which row is whose is the caller's to know. Logits are those of the
    model's own forward pass over a row, up to rounding; float32, or what the model computes in."""

    @property
    def rows(self) -> int:
        """Rows that are running."""
        ...

    def active(self) -> AbstractContextManager[object]:
        """Entered around :meth:`add`, :meth:`step` and :meth:`draw`, as often as they are used: whatever a decoder
        changes in the model for them is changed inside the block alone."""
        ...

    def open(self, prompt_ids: Sequence[int], count: int) -> int:
        """Takes a prompt that ``count`` rows will begin with; the number that :meth:`add` knows it by."""
        ...

    def withdraw(self, prompt: int, count: int) -> None:
        """Fewer rows will begin with a prompt: ``count`` of those that have not begun."""
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
        """Drops all rows and all prompts."""
        ...

    def draw(self, logits: Tensor, *, keys: Tensor, positions: Tensor, sampling: Sampling) -> Draw:
        """A token for each row of ``logits`` (rows, V), by draw number ``positions`` (rows,) of ``keys`` (rows,), both
        int64: the same tokens as :func:`.sampler.draw`, up to rounding. The next call may overwrite the result."""
        ...
