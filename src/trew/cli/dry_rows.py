"""What ``trew sft --dry-run`` shows of demonstrations: the tokens of some rows, with those that are learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..data import prompt_order
from ..data.tasks.pairs import PAIR
from .dry_run import spread
from .main import visible
from .mixture import mixture_lines

if TYPE_CHECKING:
    from ..training.planning import Plan
    from ..types import Rollout

SHOWN = 3
LINES = 40


def data_lines(plan: Plan) -> Iterator[str]:
    """The number and lengths of rows, and what was decided about them."""
    rows = plan.demonstrations
    assert rows is not None
    rollouts = [r for row in rows.train for r in row.group.rollouts]
    lengths = sorted(len(r.prompt_ids) + len(r.token_ids) for r in rollouts)
    learned = sum(map(len, rollouts))
    done = "compared" if plan.config.prefers else "learned"
    yield (
        f"data: {len(rows.train)} training and {len(rows.held)} held-out rows; training rows have "
        f"{spread(lengths)}; {learned} of {sum(lengths)} tokens are {done}"
    )
    yield from mixture_lines(plan.config, plan.train, plan.eval)
    for note in plan.notes:
        yield f"note: {note}"


def row_lines(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """A heading and the lines of the first rows of a training: what is learned stands behind ``+``."""
    rows = plan.demonstrations
    assert rows is not None
    order = prompt_order(plan.config, plan.train)
    for number, index in enumerate(order.take(0, min(SHOWN, len(rows.train))), 1):
        group = rows.train[index].group
        # Of a pair, chosen and rejected; of demonstrations, one row without a name.
        kinds = [f", {name}" for name in group.prompt.columns.get(PAIR, ())] or [""] * len(group.rollouts)
        for kind, rollout in zip(kinds, group.rollouts, strict=True):
            tokens = len(rollout.prompt_ids) + len(rollout.token_ids)
            done = "compared" if kind else "learned"
            heading = (
                f"row {number} of step 1{kind}: {group.prompt.uid}, {tokens} tokens, {len(rollout)} of them {done} (+)"
            )
            yield heading, _cut([*_marked(plan, rollout)])


def _marked(plan: Plan, rollout: Rollout) -> Iterator[str]:
    for turn in rollout.turns:
        # Context tokens first, then those that are learned: decoded apart, they show where a turn begins.
        for mark, ids in ((" ", turn.context_ids), ("+", turn.token_ids)):
            text = plan.renderer.decode_whole(ids.tolist())
            yield from (f"{mark}│ {visible(line)}" for line in text.split("\n"))


def _cut(lines: list[str]) -> list[str]:
    if len(lines) <= LINES:
        return lines
    half = LINES // 2
    return [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
