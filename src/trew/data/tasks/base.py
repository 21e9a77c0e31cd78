"""The interface of all tasks, with the defaults that suit most of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...config import RewardConfig
from ...types import Prompt
from .. import sources
from ..rows import Split


class Task:
    """A task's arguments are the fields of its dataclass; ``problems`` checks them before any other call.

    Prompts are either generated (``generate``) or read (``prompts``); ``makes`` says which, given the recipe's
    ``data.train``.
    """

    __slots__ = ()
    home_split: ClassVar[str] = "train"  # the default split of a source: test for sets meant only for evaluation

    def problems(self) -> list[str]:
        """Everything wrong with the arguments, one line each."""
        return []

    def makes(self, train: str) -> bool:
        """Whether the task generates its problems when ``data.train`` is ``train``."""
        return False

    def source(self, train: str) -> str:
        """The source to read rows from: what the user wrote, or the set's place on the hub."""
        return train

    def read(self, source: str) -> Split:
        """Reads the training rows of a source."""
        return sources.read_train(source)

    def prompts(self, split: Split) -> list[Prompt]:
        """Turns the rows of one split into prompts; raises DataError naming every unusable row."""
        raise NotImplementedError

    def whole(self) -> Task:
        """This task without its selection of training rows: a separate evaluation set is used whole."""
        return self

    def generate(self, *, eval_size: int, seed: int) -> tuple[list[Prompt], list[Prompt], list[str]]:
        """Returns (training prompts, held-out prompts, notes); equal arguments give equal problems."""
        raise NotImplementedError

    def parts(self, split: Split) -> Mapping[str, Split]:
        """The published splits (train, test, validation) where one file holds them all; empty if it does not."""
        return {}

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        """The rewards for a recipe that names none."""
        raise NotImplementedError

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        """The row that ``trew data prepare`` writes for a prompt; this task reads the same prompt from it."""
        raise NotImplementedError

    def skipped(self, count: int, split: Split) -> list[str]:
        """A note on the ``count`` rows of a split that ``prompts`` left out."""
        return [f"{split.source}: {count} of {len(split.rows)} rows left out"] if count else []
