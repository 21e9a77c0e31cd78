"""``reasoning_gym:NAME``: a problem of reasoning-gym with several attempts; arguments are the settings of its task.

Two are ours: ``attempts`` (3), and ``instruction``, which is appended to the problem. An answer stands between
``<answer>`` and ``</answer>``; the reward ``reasoning_gym`` judges it, which never lets the package execute it.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from typing import Any

from ...data.tasks.puzzles import EXTRA, INSTRUCTION, UNGRADED
from ...data.tasks.puzzles_child import answer_of, tagged
from ...errors import ConfigError, SandboxError, nearest
from ...rewards.builtin import reasoning
from ...utils.installing import install_extra
from ..protocol import Environment, Reply, Say

ATTEMPTS = 3


def adapt(name: str, args: Mapping[str, Any]) -> tuple[Callable[[], Environment], Mapping[str, str]]:
    """Makes a problem, to see that the settings are right. Raises ConfigError."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"environment.name: reasoning_gym:{name} needs reasoning-gym ({error}): {install_extra(EXTRA)}"
        ) from None
    if name not in DATASETS:
        raise ConfigError(f"environment.name: reasoning-gym has no task {name!r}{nearest(name, DATASETS)}")
    if name in UNGRADED:
        raise ConfigError(f"environment.name: reasoning_gym:{name} is not supported: {UNGRADED[name]}")
    if wrong := sorted({"seed", "size"} & args.keys()):
        raise ConfigError(f"environment.args.{wrong[0]}: follows from the run's seed; remove it")
    settings = dict(args)
    attempts, instruction = settings.pop("attempts", ATTEMPTS), settings.pop("instruction", INSTRUCTION)
    if not isinstance(attempts, int) or attempts < 1:
        raise ConfigError(f"environment.args.attempts: got {attempts!r}, accepts a whole number of at least 1")

    def problem(seed: int) -> tuple[str, str, str]:
        """A problem, its answer, and what the reward needs to know of it."""
        # One problem per seed: a data set of one, made anew for every episode.
        entry = reasoning_gym.create_dataset(name, seed=seed, size=1, **settings)[0]
        facts = {
            "task": name, "seed": seed, "index": 0, "version": importlib.metadata.version("reasoning-gym"),
            "config": settings, "metadata": tagged(entry["metadata"]),
        }  # fmt: skip
        gold = answer_of(entry)
        if gold is None:
            raise ValueError(f"reasoning-gym gives no answer to its own problem {seed} of {name}")
        return f"{entry['question'].strip()}\n\n{instruction}".strip(), gold, json.dumps(facts)

    try:
        problem(0)
    except Exception as error:  # whatever the package's checks of settings raise
        raise ConfigError(f"environment.args: reasoning_gym:{name}: {type(error).__name__}: {error}") from None
    return lambda: ReasoningEnvironment(problem, attempts=attempts), {}


class ReasoningEnvironment:
    """One problem. A right answer earns 1, and the last wrong one 0."""

    def __init__(self, problem: Callable[[int], tuple[str, str, str]], *, attempts: int) -> None:
        self._problem, self.attempts = problem, attempts

    def reset(self, row: Mapping[str, Any], seed: int) -> Say:
        question, self._gold, self._puzzle = self._problem(seed % 2**31)
        self._left = self.attempts
        return Say.of(question)

    def step(self, reply: Reply) -> Say:
        verdict = reasoning.grade(reply.text, self._gold, puzzle=self._puzzle)
        # No score means that nothing could judge, which must not count as a wrong answer.
        if verdict.score is None:
            raise SandboxError(f"the answer could not be judged: {verdict.detail}")
        self._left -= 1
        if verdict.score == 1 or not self._left:
            return Say(reward=verdict.score, done=True, metrics={"attempts": float(self.attempts - self._left)})
        return Say.of("That is not right. Try again.")

    def close(self) -> None:
        pass
