"""What every task can be asked, with the answer of most of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...config import RewardConfig
from ...types import Prompt
from ..rows import Split


class Task:
    """A task's arguments are the fields of its dataclass; ``problems`` checks them before anything else is asked.

    Prompts are either made (``generate``) or read (``prompts``); ``makes`` says which, given the recipe's
    ``data.train``.
    """

    __slots__ = ()
    home_split: ClassVar[str] = "train"  # of a source that does not say: test for sets that are for evaluation alone

    def problems(self) -> list[str]:
        """Everything wrong with the arguments, one line each."""
        return []

    def makes(self, train: str) -> bool:
        """Whether the problems are made on the fly when ``data.train`` is ``train``."""
        return False

    def source(self, train: str) -> str:
        """Where rows are read from: what the user wrote, or the set's home on the hub."""
        return train

    def prompts(self, split: Split) -> list[Prompt]:
        """The rows of one split as prompts; DataError names every row that is unusable."""
        raise NotImplementedError

    def whole(self) -> Task:
        """This task without its choice of training rows, as a set of its own is evaluated with."""
        return self

    def generate(self, *, eval_size: int, seed: int) -> tuple[list[Prompt], list[Prompt], list[str]]:
        """(training prompts, held-out prompts, notes): equal arguments give equal problems."""
        raise NotImplementedError

    def parts(self, split: Split) -> Mapping[str, Split]:
        """The set's own splits (train, test, validation) where one file holds all of it; empty where it does not."""
        return {}

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        """The rewards of a recipe that names none."""
        raise NotImplementedError

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        """A prompt as the row that ``trew data prepare`` writes: this task reads the same prompt from it."""
        raise NotImplementedError

    def skipped(self, count: int, split: Split) -> list[str]:
        """A note on the ``count`` rows of a split that ``prompts`` left out."""
        return [f"{split.source}: {count} of {len(split.rows)} rows left out"] if count else []
