"""``guess``: find a number from "higher" and "lower"."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Literal

from ..protocol import Episode, Say


def guess(
    row: Mapping[str, Any],
    seed: int,
    *,
    largest: int = 9,
    turns: int = 4,
    inside: float = 0.1,
    hints: Literal["true", "random"] = "true",
) -> Episode:
    """The policy guesses a number from 1 to ``largest`` in at most ``turns`` guesses, told "higher" or "lower".

    A hit earns 1, and what the guesses that it saved could have earned: a late hit must not be worth more than an early
    one. Any other guess earns ``inside`` if it was still possible by the hints before it, else 0.

    Halving what is left needs 4 guesses for 9 numbers; blind guesses hit 4 times in 9. ``hints = "random"`` is the
    control: what is possible is narrowed by the true hint, which the policy is not told, so that heeding hints earns
    nothing, and only guesses without repeats can be learned.
    """
    rng = random.Random(seed)
    number = rng.randint(1, largest)
    low, high, earned = 1, largest, 0.0
    reply = yield Say(_opening(largest), state=f"{low}-{high}")
    for turn in range(turns):
        said = first_number(reply.text)
        if said == number:
            return {"reward": 1.0 + inside * (turns - 1 - turn), "guesses": turn + 1}
        hint, earned = "Say only a number.", 0.0
        if said is not None:
            hint = "higher" if said < number else "lower"
            if low <= said <= high:
                earned = inside
                # By the true hint even where another one is told: see the docstring.
                low, high = (said + 1, high) if hint == "higher" else (low, said - 1)
            if hints == "random":
                hint = rng.choice(["higher", "lower"])
        if turn < turns - 1:
            reply = yield Say(({"role": "user", "content": hint},), reward=earned, state=f"{low}-{high}")
    return {"reward": earned, "guesses": turns}


def first_number(text: str) -> int | None:
    """The first whole number in a text.

    >>> first_number("I say 7, not 8"), first_number("seven")
    (7, None)
    """
    found = re.search(r"\d{1,6}", text)
    return int(found[0]) if found else None


def _opening(largest: int) -> tuple[dict[str, str], ...]:
    # A whole example, without which the default model answers in prose. It shows the form and what the hints mean.
    middle = (largest + 1) // 2
    upper = (middle + 1 + largest) // 2
    said = [
        ("user", f"Guess my number from 1 to {largest}. Say only a number."),
        ("assistant", str(middle)),
        ("user", "higher"),
        ("assistant", str(upper)),
        ("user", f"Right. Guess my next number from 1 to {largest}."),
    ]
    return tuple({"role": role, "content": content} for role, content in said)
