"""Checks of the prepared step, or part of one, that ``Objective.loss`` is given."""

from __future__ import annotations

from typing import Any

from ..errors import DataError
from .batch import TokenBatch
from .divergence import KL

BEFORE = ("keep", "shape", "advantage", "adjust", "prune", "select", "aggregate")
"""Choices that act in ``Objective.prepare``; those of the loss may be exchanged between it and ``Objective.loss``."""


def refuse_foreign(batch: TokenBatch, objective: Any) -> None:
    """Raises DataError for a step that was prepared by an objective whose advantages or token weights are others: the
    loss would be neither's."""
    other = batch.prepared_by
    if other is None or other is objective:
        return
    theirs, own = _before(other), _before(objective)
    for axis in own:
        if theirs[axis] != own[axis]:
            raise DataError(
                f"prepared_by: got a step that {other.name} prepared with another {axis} than that of "
                f"{objective.name}; give {objective.name}.prepare, or its loss, the step as it was before. To use "
                "advantages and token weights as they are: batch.replace(prepared_by=None)"
            )


def _before(objective: Any) -> dict[str, Any]:
    """What an objective has computed once a step is prepared, by axis."""
    kl = [term for term in objective.divergence if term.active and isinstance(term, KL) and term.place != "loss"]
    return {axis: getattr(objective, axis) for axis in BEFORE} | {"divergence": kl}


def refuse_part(batch: TokenBatch, objective: Any) -> None:
    """Raises DataError if a component whose scope is the group or the batch is given a part of the step."""
    assert batch.denominators is not None
    # A part of a step has fewer loss tokens than the step's denominators count.
    if objective.sees_step and int(batch.mask.sum()) != batch.denominators.tokens:
        raise DataError(
            f"{objective.name} must see the whole step at once: got {int(batch.mask.sum())} of its "
            f"{batch.denominators.tokens} loss tokens. Call loss on the whole step (log-probs without gradient "
            "will do), and give each micro-batch the gradient of -(coefficients * logprobs).sum()"
        )
