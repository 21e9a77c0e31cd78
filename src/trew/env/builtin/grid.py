"""``grid``: walk to a goal, one word per turn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ..protocol import Episode, Say

MOVES = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}


def grid(row: Mapping[str, Any], seed: int, *, size: int = 3, turns: int = 5, closer: float = 0.0) -> Episode:
    """The policy walks over ``size`` x ``size`` fields to a goal, by the words up, down, left and right.

    Arriving within ``turns`` moves earns 1; ``closer`` is earned by each other move that comes nearer. A word that is
    no move, and a move into the wall, leave the policy where it is.
    """
    if size < 2:
        raise ValueError(f"size: got {size}, accepts a whole number of at least 2")
    rng = random.Random(seed)
    fields = [(x, y) for x in range(1, size + 1) for y in range(1, size + 1)]
    at, goal = rng.sample(fields, 2)
    earned = 0.0
    reply = yield Say(_opening(size, at, goal), state=_seen(at, goal))
    for turn in range(turns):
        before, at = at, _moved(at, reply.text, size)
        if at == goal:
            return {"reward": 1.0, "moves": turn + 1}
        earned = closer if _distance(at, goal) < _distance(before, goal) else 0.0
        # The last move ends the episode; its reward is returned instead of said.
        if turn < turns - 1:
            said = _seen(at, goal)
            reply = yield Say(({"role": "user", "content": said},), reward=earned, state=said)
    return {"reward": earned, "moves": turns}


def _moved(at: tuple[int, int], text: str, size: int) -> tuple[int, int]:
    words = text.lower().replace(".", " ").split()
    x, y = MOVES.get(words[0] if words else "", (0, 0))
    return min(max(at[0] + x, 1), size), min(max(at[1] + y, 1), size)


def _distance(a: tuple[int, int], b: tuple[int, int]) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _seen(at: tuple[int, int], goal: tuple[int, int]) -> str:
    return f"at {at[0]},{at[1]} goal {goal[0]},{goal[1]}"


def _opening(size: int, at: tuple[int, int], goal: tuple[int, int]) -> tuple[dict[str, str], ...]:
    # A whole walk as an example, as in ``guess``.
    said = [
        ("user", f"Walk to the goal on a {size} x {size} grid. Say only right, left, up or down. at 1,1 goal 2,2"),
        ("assistant", "right"),
        ("user", "at 2,1 goal 2,2"),
        ("assistant", "up"),
        ("user", f"Arrived. Next walk: {_seen(at, goal)}"),
    ]
    return tuple({"role": role, "content": content} for role, content in said)
