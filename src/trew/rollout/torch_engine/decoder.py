"""``Decoder``: runs rows of completions through a model for :class:`.decode.Schedule`."""

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
    """A schedule's requirements. ``autocast``: the type that products compute in; None = float32. ``tell`` receives
    messages for the user."""

    slots: int  # maximum number of rows at a time
    longest_prompt: int  # tokens
    max_tokens: int  # of a completion
    autocast: torch.dtype | None = None
    tell: Callable[[str], None] = lambda text: None

    @property
    def columns(self) -> int:
        """Maximum number of tokens of a row, including its prompt."""
        return self.longest_prompt + self.max_tokens


@runtime_checkable
class Decoder(Protocol):
    """Runs rows of completions, numbered 0 to rows - 1; the caller tracks which row is whose. Logits equal those of the
    model's own forward pass over a row, up to rounding; float32, or the type that the model computes in."""

    @property
    def rows(self) -> int:
        """The number of running rows."""
        ...

    def active(self) -> AbstractContextManager[object]:
        """Wraps every use of :meth:`add`, :meth:`step` and :meth:`draw`: a decoder may change the model inside this
        block, and restores it afterwards."""
        ...

    def open(self, prompt_ids: Sequence[int], count: int) -> int:
        """Registers a prompt that ``count`` rows will begin with; returns its number for :meth:`add`."""
        ...

    def withdraw(self, prompt: int, count: int) -> None:
        """Cancels ``count`` of the rows that have not begun with a prompt yet."""
        ...

    def add(self, prompts: Sequence[int]) -> Tensor:
        """Starts a row for each of these prompts (numbers, equal ones adjacent) after the running rows; returns the new
        rows' first logits (len(prompts), V)."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Feeds one token per row (rows,); returns the logits (rows, V) after it, which the next call may overwrite."""
        ...

    def keep(self, alive: Sequence[int]) -> list[int]:
        """Drops all other rows; returns the old number of each remaining one, in their new order."""
        ...

    def forget(self) -> None:
        """Drops all rows and all prompts."""
        ...

    def draw(self, logits: Tensor, *, keys: Tensor, positions: Tensor, sampling: Sampling) -> Draw:
        """Draws a token per row of ``logits`` (rows, V), with draw number ``positions`` (rows,) of ``keys`` (rows,),
        both int64: the same as :func:`.sampler.draw`, up to rounding. The next call may overwrite the result."""
        ...
