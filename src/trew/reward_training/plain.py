"""``Pairs``: the interface that runs pairs through a reward model; and the plain way, its own forward on padded rows.

The plain way works for every sequence classifier and is the reference that :mod:`.packed` is compared with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..learner import recompute
from ..rewards.model.scorer import Scorer, token_batches
from .data import Encoded
from .loss import bradley_terry

Scores = tuple[list[float], list[float]]
"""Scores of the chosen and the rejected texts, in the order of the pairs."""


class Pairs(Protocol):
    """Runs pairs through one reward model."""

    def scores(self, pairs: Sequence[Encoded]) -> Scores:
        """Scores of both sides, without gradient."""
        ...

    def accumulate(self, pairs: Sequence[Encoded], *, centre: float) -> tuple[float, Scores]:
        """Adds the gradient of the mean loss of ``pairs`` to the parameters' ``grad``; returns the loss and the scores.
        Pairs may be split over passes, but both sides of a pair are in the same pass."""
        ...


@dataclass(frozen=True, slots=True)
class PlainPairs:
    """Runs pairs by the model's own forward. ``again``: recompute activations in the backward pass."""

    scorer: Scorer
    again: bool = False

    def scores(self, pairs: Sequence[Encoded]) -> Scores:
        found = self.scorer.score([*(p.chosen for p in pairs), *(p.rejected for p in pairs)])
        return found[: len(pairs)], found[len(pairs) :]

    def accumulate(self, pairs: Sequence[Encoded], *, centre: float) -> tuple[float, Scores]:
        total = 0.0
        chosen, rejected = [0.0] * len(pairs), [0.0] * len(pairs)
        # Both texts of a pair count with the length of the longer one, to which they are padded.
        widths = [2 * max(len(p.chosen), len(p.rejected)) for p in pairs]
        for batch in token_batches(widths, budget=self.scorer.budget):
            members = [pairs[i] for i in batch]
            with recompute.recomputing(self.scorer.model) if self.again else contextlib.nullcontext():
                scores = self.scorer.logits([*(p.chosen for p in members), *(p.rejected for p in members)])
                # (2 pairs,) -> the chosen texts' scores, then the rejected ones'.
                good, bad = scores.chunk(2)
                # Over all pairs of the step, not of the pass: passes add up to the gradient of the mean loss.
                loss = bradley_terry(good, rejected=bad, centre=centre).sum() / len(pairs)
                loss.backward()
            total += float(loss.detach())
            for i, c, r in zip(batch, good.tolist(), bad.tolist(), strict=True):
                chosen[i], rejected[i] = c, r
        return total, (chosen, rejected)
