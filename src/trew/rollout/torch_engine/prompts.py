"""Prompts whose rows have not all begun, for decoders that keep what one of them was computed to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class OpenPrompts(Generic[Kept]):
    """Numbers prompts and counts the rows of each that have not begun: ``open`` and ``withdraw`` of
    :class:`.decoder.Decoder`.

    ``held`` is one prompt with what a decoder keeps for its remaining rows. As rows begin prompt by prompt, one is
    enough.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()  # goes on after forget: a stale number must not mean another prompt
        OpenPrompts.forget(self)  # not a subclass's, which is not complete yet

    def forget(self) -> None:
        """Drops all prompts."""
        self.prompt_ids: dict[int, Sequence[int]] = {}  # by number
        self.missing: dict[int, int] = {}  # rows that have not begun, by number
        self.held: tuple[int, Kept] | None = None

    def open(self, prompt_ids: Sequence[int], count: int) -> int:
        """Registers a prompt that ``count`` rows will begin with; returns its number."""
        number = next(self._numbers)
        self.prompt_ids[number], self.missing[number] = prompt_ids, count
        return number

    def withdraw(self, prompt: int, count: int) -> None:
        """Counts ``count`` rows of a prompt off, because they have begun or never will."""
        self.missing[prompt] -= count
        if not self.missing[prompt]:
            del self.missing[prompt], self.prompt_ids[prompt]
            if self.held is not None and self.held[0] == prompt:
                self.held = None
