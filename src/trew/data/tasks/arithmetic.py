"""Arithmetic: generates problems from forms such as ``a + b`` or ``a + b * c``.

The problems of a form are numbered, and a keyed permutation of the numbers decides their order. So no problem is
drawn twice, and the cost depends on the number of problems drawn, not on how many there are. Held-out problems come
first. No training problem equals a held-out one, not even with summands or factors swapped (8 * 7 for 7 * 8).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...config import RewardConfig
from ...errors import DataError, nearest
from ...types import Prompt
from ..draws import Permutation
from ..messages import user_turn
from .base import Task
from .forms import Form, Node, parse

TEMPLATE = "What is {expression}? Answer with the number only."
_LIMIT = 10**9  # the largest absolute value of an operand
_LOOK = 30  # assignments tried per problem wanted, since a form may have few valid ones

Numbers = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic(Task):
    """Arguments of the task."""

    ops: tuple[str, ...] = ("+", "-", "*")  # operators, or forms such as "a + b * c"
    smallest: int = 0  # operand
    largest: int = 9  # operand
    ranges: Mapping[str, Any] = field(default_factory=dict)  # op -> [low, high], or {a = [low, high], ...}
    negative: bool = True  # whether results below 0 are allowed
    size: int = 10_000  # the most training problems, split evenly between the ops
    template: str = TEMPLATE
    system: str = ""  # a system message; empty = none

    def problems(self) -> list[str]:
        """Everything wrong with the arguments, one line each."""
        found = _op_problems(self.ops)
        if abs(self.smallest) > _LIMIT or abs(self.largest) > _LIMIT or self.smallest > self.largest:
            found.append(
                f"data.args.smallest, largest: got {self.smallest} and {self.largest}, accepts whole numbers "
                f"up to {_LIMIT} with smallest <= largest"
            )
        if self.size < 1:
            found.append(f"data.args.size: got {self.size}, accepts a whole number of at least 1")
        if self.template.count("{expression}") != 1:
            found.append(f"data.args.template: got {self.template!r}, accepts a text with {{expression}} in it once")
        for op, value in self.ranges.items():
            if op not in self.ops:
                accepts = ", ".join(map(repr, self.ops))
                found.append(f"data.args.ranges: {op!r} is not among data.args.ops{nearest(op, self.ops)}: {accepts}")
            elif not found:
                found += _range_problems(f"data.args.ranges.{op!r}", value, parse(op))
        return found

    def makes(self, train: str) -> bool:
        return True

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        return (RewardConfig(name="arithmetic"),)

    def generate(self, *, eval_size: int, seed: int) -> tuple[list[Prompt], list[Prompt], list[str]]:
        """Returns (train, eval, notes); equal arguments give equal problems. DataError if there are too few."""
        forms = {op: parse(op) for op in self.ops}
        # Twice the held-out number: training leaves out what equals a held-out problem up to order.
        offers = {op: self._valid(op, form, seed, want=2 * eval_size + self.size) for op, form in forms.items()}
        quotas = self._quotas([len(offer) for offer in offers.values()], eval_size)
        # Equal up to order (8 * 7 and 7 * 8), also between ops: "+" and "a + b" may both be asked for.
        classes: set[str] = set()
        held = [self._hold_out(op, offers[op], quota, classes) for op, quota in zip(self.ops, quotas, strict=True)]
        # What is held out for one op is left out of the training problems of all.
        rest = [[x for x in offers[op] if forms[op].canonical(x) not in classes] for op in self.ops]
        kept = share(self.size, [len(part) for part in rest])
        if sum(map(len, held)) < eval_size or not sum(kept):
            raise DataError(
                f"data.args: the ops overlap so much that {eval_size} held-out problems leave none for training; "
                "widen the ranges, change the ops, or lower eval.size"
            )
        train = [part[:n] for part, n in zip(rest, kept, strict=True)]
        note = f"arithmetic: {sum(kept)} training problems ({self._counts(kept)})"
        return self._interleaved(train), self._interleaved(held), [note]

    def _quotas(self, sizes: Sequence[int], eval_size: int) -> list[int]:
        """The number of problems of each op that are held out. Raises DataError if ``sizes`` leave too few."""
        quotas = share(eval_size, [3 * n // 4 for n in sizes])
        if not all(sizes) or sum(quotas) < eval_size:
            raise DataError(
                f"data.args: the ranges give too few problems ({self._counts(sizes)}): at most three quarters of each "
                f"kind can be held out, and eval.size = {eval_size}; widen the ranges, change the ops, or lower "
                "eval.size"
            )
        return quotas

    def _counts(self, numbers: Sequence[int]) -> str:
        return ", ".join(f"{n} of {op!r}" for op, n in zip(self.ops, numbers, strict=True))

    def _bounds(self, op: str, form: Form) -> dict[str, tuple[int, int]]:
        """The range of each operand of an op."""
        default = (self.smallest, self.largest)
        # [low, high] holds for every operand, a table for those that it names.
        given = self.ranges.get(op, default)
        table: dict[str, Any] = dict(given if isinstance(given, Mapping) else dict.fromkeys(form.letters, given))
        return {letter: tuple(table.get(letter, default)) for letter in form.letters}

    def _valid(self, op: str, form: Form, seed: int, *, want: int) -> list[Numbers]:
        """Up to ``want`` different problems of an op, in the seed's order."""
        bounds = self._bounds(op, form)
        sizes = {letter: high - low + 1 for letter, (low, high) in bounds.items()}
        order = Permutation(math.prod(sizes.values()), "arithmetic", seed, op)
        found: list[Numbers] = []
        for index in range(min(order.size, _LOOK * want)):
            # The place is a number in mixed radix, with a digit for each operand.
            place = order(index)
            numbers = {}
            for letter, size in sizes.items():
                place, digit = divmod(place, size)
                numbers[letter] = bounds[letter][0] + digit
            value = form.value(numbers)
            if value is not None and (self.negative or value >= 0):
                found.append(numbers)
                if len(found) == want:
                    break
        return found

    def _hold_out(self, op: str, offer: Sequence[Numbers], quota: int, classes: set[str]) -> list[Numbers]:
        """The first ``quota`` problems that differ in more than order; adds their canonical forms to ``classes``."""
        form = parse(op)
        bounds = self._bounds(op, form)
        scarce = len(set(map(form.canonical, offer))) < 2 * quota  # then hold out swapped variants too
        held: list[Numbers] = []
        for numbers in offer:
            if len(held) == quota:
                break
            key = form.canonical(numbers)
            # A problem that equals an earlier one up to order is held out only where problems are scarce.
            if key not in classes:
                classes.add(key)
                held += _swapped(form, numbers, bounds)[: quota - len(held)] if scarce else [numbers]
        return held

    def _interleaved(self, parts: Sequence[Sequence[Numbers]]) -> list[Prompt]:
        """Interleaves the ops' prompts, so that every stretch of the list has all of them."""
        made = [[self._prompt(op, x) for x in part] for op, part in zip(self.ops, parts, strict=True)]
        return [prompt for turn in itertools.zip_longest(*made) for prompt in turn if prompt is not None]

    def _prompt(self, op: str, numbers: Numbers) -> Prompt:
        form = parse(op)
        expression = form.fill(numbers)
        answer = form.value(numbers)
        text = self.template.replace("{expression}", expression)
        columns = {"expression": expression, "answer": str(answer), "gold": str(answer), "op": op}
        return Prompt(f"arithmetic:{expression}", messages=user_turn(text, system=self.system), columns=columns)


def _swapped(form: Form, numbers: Numbers, bounds: Mapping[str, tuple[int, int]]) -> list[Numbers]:
    """``numbers``, then every other assignment of the same operands that gives the same problem."""
    key, found = form.canonical(numbers), [numbers]
    for order in itertools.permutations(numbers.values()):
        other = dict(zip(form.letters, order, strict=True))
        # Operands may have ranges of their own, which an exchanged one can leave.
        fits = all(bounds[letter][0] <= n <= bounds[letter][1] for letter, n in other.items())
        if fits and other not in found and form.canonical(other) == key:
            found.append(other)
    return found


def share(total: int, limits: Sequence[int]) -> list[int]:
    """Splits ``total`` as evenly as the limits allow; sums to min(total, sum(limits)).

    >>> share(10, [2, 9, 9])
    [2, 4, 4]
    """
    parts = [0] * len(limits)
    left = min(total, sum(limits))
    while left:
        # Each pass gives all that are not full an equal share of what is left.
        open_ = [i for i, limit in enumerate(limits) if parts[i] < limit]
        each = max(1, left // len(open_))
        for i in open_:
            take = min(each, limits[i] - parts[i], left)
            parts[i] += take
            left -= take
    return parts


def _op_problems(ops: Sequence[str]) -> list[str]:
    found = []
    if not ops:
        found.append("data.args.ops: is empty, accepts operators (+ - * /) or forms such as 'a + b * c'")
    seen: dict[Node, str] = {}
    for op in ops:
        try:
            tree = parse(op).tree
        except ValueError as error:
            found.append(f"data.args.ops: {op!r} {error}")
            continue
        if tree in seen:
            found.append(f"data.args.ops: {op!r} is the same form as {seen[tree]!r}; give it once")
        seen[tree] = op
    return found


def _range_problems(where: str, value: Any, form: Form) -> list[str]:
    table = value if isinstance(value, Mapping) else {"": value}
    found = []
    for letter, pair in table.items():
        if letter and letter not in form.letters:
            found.append(f"{where}: {letter!r} is not in {form.text!r}; accepts {', '.join(form.letters)}")
        ok = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not ok or not -_LIMIT <= pair[0] <= pair[1] <= _LIMIT:
            found.append(f"{where}: got {pair!r}, accepts [low, high], two whole numbers with low <= high")
    return found
