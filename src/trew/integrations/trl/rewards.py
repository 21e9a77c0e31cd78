"""Our graders as TRL reward functions: ``reward_funcs=[rewards.math(), rewards.format(template=...)]``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import ConfigError, DataError
from ...rewards.builtin import KINDS, argument_problems, graded_together, unknown_kind

Completion = str | Sequence[Mapping[str, Any]]
"""As TRL gives it: text, or the messages of a conversation."""


def text_of(completion: Completion) -> str:
    """What is graded: the text, or of a conversation the last message of the assistant.

    >>> text_of([{"role": "assistant", "content": "72"}]), text_of("72")
    ('72', '72')
    >>> text_of([{"role": "assistant", "content": [{"type": "text", "text": "7"}, {"type": "text", "text": "2"}]}])
    '72'
    """
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message.get("role") == "assistant"]
    content = said[-1] if said else None
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(piece.get("text") or "" for piece in content)


class BuiltIn:
    """A built-in grader with fixed arguments, called as TRL calls: one number per completion, None where it was not
    judged (a row without a gold for it, a gold that cannot be read, a timeout)."""

    def __init__(self, kind: str, args: Mapping[str, Any], *, columns: Mapping[str, str]):
        self.kind, self.args, self.columns = kind, dict(args), dict(columns)
        self.__name__ = kind  # what TRL calls the reward in its log

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        kind, items = KINDS[self.kind], {}
        for i, completion in enumerate(completions):
            row = {name: v[i] for name, v in columns.items() if isinstance(v, list) and len(v) == len(completions)}
            if missing := [name for name in self.columns.values() if name not in row]:
                raise DataError(f"reward {self.kind!r}: the data have no column {missing[0]!r}; they have {[*row]}")
            row |= {ours: row[theirs] for ours, theirs in self.columns.items()}
            if (found := kind.gold(row)) is not None:
                gold, from_row = found
                own = self._of_tokens(i, completion_ids)
                items[i] = text_of(completion), gold, {**self.args, **from_row, **own}
        verdicts = graded_together(kind, [*items.values()])
        scores = dict(zip(items, (verdict.score for verdict in verdicts), strict=True))
        return [scores.get(i) for i in range(len(completions))]

    def _of_tokens(self, i: int, completion_ids: Sequence[Sequence[int]] | None) -> dict[str, Any]:
        """What the grader reads of the completion's tokens."""
        wanted = [name for name in ("length", "token_ids") if name in KINDS[self.kind].from_row]
        if wanted and completion_ids is None:
            raise DataError(f"reward {self.kind!r}: reads the completions' tokens, and got no completion_ids")
        return {name: len(completion_ids[i]) if name == "length" else completion_ids[i] for name in wanted}  # type: ignore[index]


def of(kind: str, /, *, columns: Mapping[str, str] | None = None, **args: Any) -> BuiltIn:
    """The built-in grader ``kind`` as a TRL reward function; ``rewards.math(...)`` is ``of("math", ...)``.

    ``columns`` says where it finds what it looks for, ours to the data set's: ``columns={"gold": "final_answer"}``.
    Raises ConfigError for an unknown kind or argument.

    >>> of("gsm8k")(prompts=["6 * 12?"] * 2, completions=["#### 72", "no idea"], answer=["72", "72"])
    [1.0, 0.0]
    >>> of("gsm8k")(prompts=["?"], completions=["72"], other=[1])
    [None]
    """
    if kind not in KINDS:
        raise ConfigError(unknown_kind(kind))
    problems = argument_problems(kind, args)
    if "correct" in KINDS[kind].from_row:
        problems.append("asks whether another reward found the answer right, which a TRL reward function cannot see")
    if problems:
        raise ConfigError([f"reward {kind!r}: {problem}" for problem in problems])
    return BuiltIn(kind, args, columns=columns or {})


Steps = Sequence[tuple[int, float]]
"""(end, value) of a completion's steps: ``end`` counts its tokens up to and with the step's last one."""


class StepFunction:
    """A function that scores steps, for ``grpo-process``. TRL logs the sum of each completion's steps."""

    def __init__(self, function: Callable[..., Sequence[Steps | None]]):
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            raise ConfigError(f"rewards.steps: got the coroutine function {function!r}, accepts an ordinary one")
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._last: list[list[tuple[int, float]]] = []

    def __call__(self, **given: Any) -> list[float | None]:
        found = self.function(**given)
        self._last = [list(steps or ()) for steps in found]
        return [None if steps is None else float(sum(value for _, value in steps)) for steps in found]

    def taken(self) -> list[list[tuple[int, float]]]:
        """The steps of the last call's completions."""
        return self._last


def steps(function: Callable[..., Sequence[Steps | None]]) -> StepFunction:
    """``function(prompts, completions, completion_ids, **columns)`` gives the (end, value) list of each completion's
    steps, None where it was not judged. Its sums count as a reward beside the others where an objective reads rewards.

    >>> f = steps(lambda completions, **_: [[(2, 0.5), (4, 1.0)], None])
    >>> f(prompts=["", ""], completions=["a", "b"]), f.taken()
    ([1.5, None], [[(2, 0.5), (4, 1.0)], []])
    """
    return StepFunction(function)


def __getattr__(name: str) -> Callable[..., BuiltIn]:
    if name not in KINDS:
        raise AttributeError(unknown_kind(name))
    return lambda **args: of(name, **args)
