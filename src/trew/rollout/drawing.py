"""Draws the prompts of each step: in the order of the data or, with a curriculum, by measured pass rates as well."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from ..config import Config, CurriculumConfig
from ..data import PromptOrder, prompt_order
from ..eval.evaluate import Correct
from ..types import Prompt, ScoredGroup


@dataclass(frozen=True, slots=True)
class Drawn:
    """The prompt of a place of the stream. ``turn``: how many prompts of its set's order were drawn in their turn
    before it, -1 if it was drawn by its pass rate."""

    prompt: Prompt
    turn: int = -1


class Drawing(Protocol):
    """Chooses the prompt of each place of the stream."""

    def draw(self, place: int, *, taken: Iterable[str]) -> Drawn:
        """The prompt of a place. Prompts with the uids ``taken`` are being answered: their rates are yet to come."""
        ...

    def drew(self, place: int, uid: str, turn: int) -> None:
        """Takes notice of a draw that a process made before this one."""
        ...

    def prompt(self, uid: str, place: int) -> Prompt | None:
        """The prompt that an earlier process drew for a place; None if the data have it no more. The ``uid`` may have a
        number behind it: some step drew the prompt twice."""
        ...

    def learned(self, groups: Sequence[ScoredGroup]) -> None:
        """Takes notice of the groups of a step, those that it dropped included."""
        ...

    def facts(self) -> dict[str, float]:
        """Metrics of the draws since the last call."""
        ...

    def state(self) -> dict[str, Any]:
        """What later draws depend on besides the place, as JSON."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        ...


def drawing(config: Config, prompts: Sequence[Prompt], correct: Correct) -> Drawing:
    """How a run draws its training prompts."""
    order = prompt_order(config, prompts)
    if config.curriculum.share == 0:
        return InOrder(order, prompts)
    return Curriculum(order, prompts, config.curriculum, correct)


class InOrder:
    """The prompts of the order: a pure function of the place."""

    def __init__(self, order: PromptOrder, prompts: Sequence[Prompt]) -> None:
        self.order, self.prompts = order, prompts

    def draw(self, place: int, *, taken: Iterable[str]) -> Drawn:
        return Drawn(self.prompts[self.order.take(place, 1)[0]])

    def drew(self, place: int, uid: str, turn: int) -> None:
        pass

    def prompt(self, uid: str, place: int) -> Prompt | None:
        found = self.draw(place, taken=()).prompt
        return found if uid == found.uid or uid.startswith(f"{found.uid}~") else None

    def learned(self, groups: Sequence[ScoredGroup]) -> None:
        pass

    def facts(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass


class Curriculum:
    """Draws a share of each set's prompts by their pass rates, and the others in the set's order.

    A prompt's pass rate is p = c / n, over the completions of its groups so far: with each new group, c and n of before
    are multiplied by ``decay``. Of the prompts that have one, the next is that with the largest w (j - l): l is the
    number of its last draw and j that of this one, both counted within the set, and w is 1 for a rate from ``low`` to
    ``high`` and ``floor`` elsewhere. So prompts inside the target come up in turn, and one outside after 1 / ``floor``
    times as long. Nothing is random: draws depend on the order and on the rates alone.

    What has no rate yet comes only in its turn. The turns go on through whole epochs, so that no prompt is left out,
    and stand in while no prompt is inside the target.
    """

    def __init__(
        self, order: PromptOrder, prompts: Sequence[Prompt], settings: CurriculumConfig, correct: Correct
    ) -> None:
        self.order, self.prompts, self.settings, self.correct = order, prompts, settings, correct
        # The decimal number of the recipe, exactly: the binary neighbour that a float is could miss a draw or add one.
        self._share = Fraction(repr(settings.share))
        self._at = {prompt.uid: index for index, prompt in enumerate(prompts)}
        bounds = np.cumsum([0, *order.sizes])
        self._parts = [slice(int(a), int(b)) for a, b in itertools.pairwise(bounds)]
        self._clear()

    def _clear(self) -> None:
        count = len(self.prompts)
        self._passed, self._judged = np.zeros(count), np.zeros(count)
        self._last = np.full(count, -1, np.int64)  # the number of its last draw within its set
        self._turns = [0] * len(self._parts)  # draws of each set's order
        self._by_rate = self._draws = 0  # since the last step, for metrics

    def draw(self, place: int, *, taken: Iterable[str]) -> Drawn:
        # The set of this draw, and its number among the draws of that set.
        number, nth = self.order.place(place)
        self._draws += 1
        # Spread evenly over the draws of the set, like the sets over the draws of the run.
        if int((nth + 1) * self._share) > int(nth * self._share):
            index = self._longest_due(number, nth, taken)
            if index is not None:
                self._by_rate += 1
                self._last[index] = nth
                return Drawn(self.prompts[index])
        # In the set's order: in turn, or because no prompt is due by its rate.
        turn = self._turns[number]
        index = self.order.nth(number, turn)
        self._turns[number] = turn + 1
        self._last[index] = nth
        return Drawn(self.prompts[index], turn)

    def drew(self, place: int, uid: str, turn: int) -> None:
        number, nth = self.order.place(place)
        # Never backwards: a checkpoint's state may be ahead of this draw.
        self._turns[number] = max(self._turns[number], turn + 1)
        index = self._index(uid)
        if index is not None:
            self._last[index] = max(self._last[index], nth)

    def prompt(self, uid: str, place: int) -> Prompt | None:
        index = self._index(uid)
        return None if index is None else self.prompts[index]

    def learned(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            index = self._index(group.group.prompt.uid)
            verdicts = [found for score in group.scores if (found := self.correct(score)) is not None]
            if index is not None and verdicts:
                decay = self.settings.decay
                # p = c / n with c, n <- decay (c, n) + those of this group.
                self._passed[index] = decay * self._passed[index] + sum(verdicts)
                self._judged[index] = decay * self._judged[index] + len(verdicts)

    def facts(self) -> dict[str, float]:
        known = self._judged > 0
        drawn, self._draws = self._draws, 0
        by_rate, self._by_rate = self._by_rate, 0
        facts = {"curriculum/known": float(known.mean())}
        if known.any():
            facts["curriculum/in_target"] = float(self._in_target(slice(None))[known].mean())
        if drawn:
            facts["curriculum/by_rate"] = by_rate / drawn
        return facts

    def state(self) -> dict[str, Any]:
        # A prompt that was neither drawn nor judged is as in a new curriculum.
        touched = np.flatnonzero((self._judged > 0) | (self._last >= 0))
        rates = {
            self.prompts[i].uid: (float(self._passed[i]), float(self._judged[i]), int(self._last[i]))
            for i in map(int, touched)
        }
        return {"turns": list(self._turns), "rates": rates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._clear()
        for number, turn in enumerate(state.get("turns", ())[: len(self._turns)]):
            self._turns[number] = int(turn)
        for uid, (passed, judged, last) in state.get("rates", {}).items():
            if (index := self._at.get(uid)) is not None:
                self._passed[index], self._judged[index], self._last[index] = passed, judged, last

    def _longest_due(self, number: int, nth: int, taken: Iterable[str]) -> int | None:
        """The prompt that is due by its pass rate; None where none is."""
        part = self._parts[number]
        free = self._judged[part] > 0
        for uid in taken:
            index = self._index(uid)
            if index is not None and part.start <= index < part.stop:
                free[index - part.start] = False
        inside = free & self._in_target(part)
        if not inside.any():
            return None  # a prompt that was not seen yet may be inside; one that was seen outside is not
        weights = np.where(inside, 1.0, self.settings.floor)
        # The largest w (j - l); -1 keeps out what is being answered or has no rate.
        return part.start + int(np.where(free, weights * (nth - self._last[part]), -1.0).argmax())

    def _in_target(self, part: slice) -> np.ndarray:
        judged = self._judged[part]
        # Prompts without a rate count as 0 here; callers mask them.
        rates = self._passed[part] / np.where(judged > 0, judged, 1.0)
        return (self.settings.low <= rates) & (rates <= self.settings.high)

    def _index(self, uid: str) -> int | None:
        """The prompt of a group, whose uid may have a number behind it: some step drew it twice."""
        return self._at.get(uid, self._at.get(uid.rpartition("~")[0]))
