"""Countdown, as in TinyZero: make a target from given numbers with + - * / , each number used exactly once.

Problems are built backwards from a random expression over the numbers whose intermediate values are whole, so that
every target is reachable.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import RewardConfig
from ...errors import DataError
from ...types import Prompt
from ..draws import Draws
from ..messages import user_turn
from ..rows import BadRow, Row, Split, column, require_columns, show, to_prompts
from .base import Task
from .forms import OPERATORS, apply

TEMPLATE = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use every number exactly once, with "
    "+ - * / and parentheses only. First think it through inside <think> </think>, then give the expression alone "
    "inside <answer> </answer>, for example <answer>(1 + 2) * 3</answer>."
)
_TRIES = 20_000  # consecutive draws without a new problem after which the task counts as exhausted


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown(Task):
    """Arguments of the task."""

    numbers: tuple[int, ...] = (3, 4)  # how many numbers a problem has; each problem uses one of these
    smallest: int = 1  # number
    largest: int = 99  # number
    target: tuple[int, ...] = (10, 99)  # lowest and highest target
    ops: tuple[str, ...] = ("+", "-", "*", "/")  # operators that the hidden solution may use
    size: int = 10_000  # the most training problems
    template: str = TEMPLATE
    system: str = ""  # a system message; empty = none
    format_weight: float = 0.1  # weight of the default format reward, next to the answer's 1; 0 = none

    def problems(self) -> list[str]:
        """Everything wrong with the arguments, one line each."""
        found = self._problems_of_numbers()
        if not self.ops or not set(self.ops) <= set(OPERATORS.values()):
            found.append(f"data.args.ops: got {list(self.ops)!r}, accepts a list of + - * /")
        if self.size < 1:
            found.append(f"data.args.size: got {self.size}, accepts a whole number of at least 1")
        if self.template.count("{numbers}") != 1 or self.template.count("{target}") != 1:
            found.append("data.args.template: accepts a text with {numbers} and {target} in it once each")
        if not 0 <= self.format_weight < float("inf"):
            found.append(f"data.args.format_weight: got {self.format_weight}, accepts a number of at least 0")
        return found

    def _problems_of_numbers(self) -> list[str]:
        found = []
        if not self.numbers or not all(2 <= n <= 6 for n in self.numbers):
            found.append(f"data.args.numbers: got {list(self.numbers)!r}, accepts a list of whole numbers from 2 to 6")
        if not 1 <= self.smallest <= self.largest <= 10**6:
            found.append(
                f"data.args.smallest, largest: got {self.smallest} and {self.largest}, accepts "
                "1 <= smallest <= largest <= 1000000"
            )
        if len(self.target) != 2 or not 0 <= self.target[0] <= self.target[1]:
            found.append(f"data.args.target: got {list(self.target)!r}, accepts [low, high] with 0 <= low <= high")
        return found

    def makes(self, train: str) -> bool:
        return not train

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        return {"uid": prompt.uid} | {**prompt.columns, "uid": prompt.uid}  # first, whatever the row's order was

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        answer = RewardConfig(name="countdown")
        return (answer, RewardConfig(name="format", weight=self.format_weight)) if self.format_weight else (answer,)

    def prompts(self, split: Split) -> list[Prompt]:
        """Reads rows with nums and target, such as the published Countdown sets."""
        require_columns(split, ("nums", "target"), hint="countdown rows have nums (a list) and target")
        return to_prompts(split, self._row_prompt)

    def generate(self, *, eval_size: int, seed: int) -> tuple[list[Prompt], list[Prompt], list[str]]:
        """Returns (train, eval, notes), all different in numbers or target; equal arguments give equal problems."""
        found = list(itertools.islice(self._different(seed), eval_size + self.size))
        if len(found) <= eval_size:
            raise DataError(
                f"data.args: there are only {len(found)} different problems, too few to hold out eval.size = "
                f"{eval_size}; widen the ranges, or lower eval.size"
            )
        made = [self._prompt(f"countdown:{'-'.join(map(str, nums))}={target}", nums, target) for nums, target in found]
        train, evaluation = made[eval_size:], made[:eval_size]
        only = f"only {len(train)} different" if len(train) < self.size else f"{len(train)}"
        return train, evaluation, [f"countdown: {only} training problems"]

    def _different(self, seed: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yields different problems in the seed's order; the order of a problem's numbers makes no difference."""
        seen: set[tuple[tuple[int, ...], int]] = set()
        draws = Draws("countdown", seed)
        vain = 0
        while vain < _TRIES:
            vain += 1
            problem = self._draw(draws)
            if problem is None or (key := (tuple(sorted(problem[0])), problem[1])) in seen:
                continue
            vain = 0
            seen.add(key)
            yield problem

    def _draw(self, draws: Draws) -> tuple[tuple[int, ...], int] | None:
        """Draws one problem; None if the expression's value is not in the range of targets."""
        nums = tuple(draws.between(self.smallest, self.largest) for _ in range(draws.choice(self.numbers)))
        # Two numbers are replaced by a result until one is left, which is the target.
        pool = list(nums)
        while len(pool) > 1:
            left = pool.pop(draws.below(len(pool)))
            right = pool.pop(draws.below(len(pool)))
            values = [apply(op, left, right) for op in self.ops]
            # Whole results of at least 0 only, so that the hidden solution needs no others on the way.
            exact = [value for value in values if value is not None and value >= 0]
            if not exact:
                return None
            pool.append(draws.choice(exact))
        return (nums, pool[0]) if self.target[0] <= pool[0] <= self.target[1] else None

    def _prompt(self, uid: str, nums: Sequence[int], target: int, columns: Mapping[str, Any] | None = None) -> Prompt:
        numbers = ", ".join(map(str, nums))
        text = self.template.replace("{numbers}", numbers).replace("{target}", str(target))
        mine = {"nums": list(nums), "target": target}
        return Prompt(uid, messages=user_turn(text, system=self.system), columns={**(columns or {}), **mine})

    def _row_prompt(self, row: Row, uid: str) -> Prompt:
        nums, target = column(row, "nums"), column(row, "target")
        if not isinstance(nums, list) or not nums or not all(type(n) is int for n in nums):
            raise BadRow(f"column 'nums' must be a list of whole numbers, got {show(nums)}")
        if type(target) is not int:
            raise BadRow(f"column 'target' must be a whole number, got {show(target)}")
        return self._prompt(uid, nums, target, row.values)
