"""Wraps our graders as TRL reward functions: ``reward_funcs=[rewards.math(), rewards.format(template=...)]``.

A recipe's whole list of rewards becomes one function: ``reward_funcs=[rewards.together([{"name": "math"}, ...])]``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...config import RewardConfig, build
from ...config.rules import of_reward
from ...errors import ConfigError, DataError, nearest
from ...rewards import RewardSet
from ...rewards.builtin.kinds import KINDS, argument_problems, graded_together, unknown_kind
from ...rewards.reward_checks import text_group
from ...types import Group, Prompt

Completion = str | Sequence[Mapping[str, Any]]
"""A completion as TRL passes it: text, or the messages of a conversation."""


def text_of(completion: Completion) -> str:
    """Returns the text to grade; for a conversation, the assistant's last message.

    >>> text_of([{"role": "assistant", "content": "72"}]), text_of("72")
    ('72', '72')
    >>> text_of([{"role": "assistant", "content": [{"type": "text", "text": "7"}, {"type": "text", "text": "2"}]}])
    '72'
    """
    if isinstance(completion, str):
        return completion
    answers = [message.get("content") for message in completion if message.get("role") == "assistant"]
    content = answers[-1] if answers else None
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(piece.get("text") or "" for piece in content)


def rows_of(
    columns: Mapping[str, Any], count: int, *, mapped: Mapping[str, str] = MappingProxyType({}), who: str = ""
) -> list[dict[str, Any]]:
    """Builds the data rows of ``count`` completions from TRL's keyword arguments; ``mapped`` renames columns, ours to
    the data set's."""
    # TRL passes trainer state among the columns; only lists with one entry per completion are data. One of these is no
    # data either: the objects that play the episodes, one for each completion.
    of_data = {
        name: v for name, v in columns.items() if isinstance(v, list) and len(v) == count and name != "environments"
    }
    if missing := [name for name in mapped.values() if name not in of_data]:
        raise DataError(f"reward {who!r}: the data have no column {missing[0]!r}; they have {[*of_data]}")
    of_data |= {ours: of_data[theirs] for ours, theirs in mapped.items()}
    return [{name: values[i] for name, values in of_data.items()} for i in range(count)]


class BuiltIn:
    """A built-in grader with fixed arguments and TRL's calling convention: one number per completion, None if it was
    not judged (no gold in the row, an unreadable gold, a timeout)."""

    def __init__(
        self, kind: str, args: Mapping[str, Any], *, columns: Mapping[str, str], correct: BuiltIn | None = None
    ):
        self.kind, self.args, self.columns, self.correct = kind, dict(args), dict(columns), correct
        self.__name__ = kind  # TRL logs the reward under this name
        self._begun = False

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        # By the completion's number: those that cannot be graded are left out.
        kind, items = KINDS[self.kind], {}
        judged = None if self.correct is None else self.correct(prompts, completions, completion_ids, **columns)
        rows = rows_of(columns, len(completions), mapped=self.columns, who=self.kind)
        if not self._begun:  # the first batch alone: data of an evaluation may lack what one of several rewards reads
            _refuse_unread([self.kind], rows, who=self.kind)
            self._begun = True
        for i, (completion, row) in enumerate(zip(completions, rows, strict=True)):
            known = None if judged is None else judged[i]
            # A grader that asks which answers are right skips those that ``correct`` could not judge.
            if (found := kind.gold(row)) is not None and (judged is None or known is not None):
                gold, from_row = found
                own = self._of_tokens(i, completion_ids) | ({} if known is None else {"correct": known >= 1})
                items[i] = text_of(completion), gold, {**self.args, **from_row, **own}
        # One call for all of them, since some graders judge their items side by side.
        verdicts = graded_together(kind, [*items.values()])
        scores = dict(zip(items, (verdict.score for verdict in verdicts), strict=True))
        return [scores.get(i) for i in range(len(completions))]

    def _of_tokens(self, i: int, completion_ids: Sequence[Sequence[int]] | None) -> dict[str, Any]:
        """Returns what the grader reads from the completion's tokens."""
        wanted = [name for name in ("length", "token_ids") if name in KINDS[self.kind].from_row]
        if wanted and completion_ids is None:
            raise DataError(f"reward {self.kind!r}: reads the completions' tokens, and got no completion_ids")
        return {name: len(completion_ids[i]) if name == "length" else completion_ids[i] for name in wanted}  # type: ignore[index]


def of(
    kind: str, /, *, columns: Mapping[str, str] | None = None, correct: BuiltIn | None = None, **args: Any
) -> BuiltIn:
    """The built-in grader ``kind`` as a TRL reward function; ``rewards.math(...)`` is ``of("math", ...)``.

    ``columns`` maps our column names to the data set's: ``columns={"gold": "final_answer"}``. ``cosine`` depends on
    whether the answer is right: ``correct`` is the grader that decides it, by a score of 1.
    Raises ConfigError for an unknown kind or argument.

    >>> of("gsm8k")(prompts=["6 * 12?"] * 2, completions=["#### 72", "no idea"], answer=["72", "72"])
    [1.0, 0.0]
    >>> of("gsm8k")(prompts=["?"], completions=["72"], answer=[None])
    [None]
    >>> cosine = of("cosine", correct=of("gsm8k"), max_len=4)
    >>> cosine(prompts=["?"] * 2, completions=["#### 72", "73"], completion_ids=[[5] * 4, [5] * 4], answer=["72"] * 2)
    [0.5, -0.5]
    """
    if kind not in KINDS:
        raise ConfigError(unknown_kind(kind))
    problems, asks = argument_problems(kind, args), "correct" in KINDS[kind].from_row
    if asks and not isinstance(correct, BuiltIn):
        problems.append(
            f"correct: got {correct!r}, accepts the grader that says which answers are right: rewards.math()"
        )
    if correct is not None and not asks:
        problems.append("correct: does not ask which answers are right; leave it out")
    problems += _unread_columns(kind, columns or {})
    if problems:
        raise ConfigError([f"reward {kind!r}: {problem}" for problem in problems])
    return BuiltIn(kind, args, columns=columns or {}, correct=correct)


class _Asked(dict[str, Any]):
    """A row without columns that keeps the names it is asked for."""

    def get(self, name: str, default: Any = None) -> Any:
        self[name] = None
        return default


def _columns_asked(kind: str) -> list[str]:
    """The columns in which a grader looks for its gold, in their order, until it finds one.

    >>> _columns_asked("gsm8k"), _columns_asked("format")
    (['gold', 'ground_truth', 'answer', 'reward_model'], [])
    """
    row = _Asked()
    KINDS[kind].gold(row)
    return [*row]


def _refuse_unread(kinds: Sequence[str], rows: Sequence[Mapping[str, Any]], *, who: str) -> None:
    """Raises DataError where the data have none of the columns in which a grader looks for its gold: it would judge no
    answer, and nothing would be learned, without a word. A column may be empty in some rows: those are not judged."""
    for kind in kinds:
        asked = _columns_asked(kind)
        if rows and asked and not any(name in rows[0] for name in asked):  # all rows have the same columns
            raise DataError(
                f"reward {who!r}: the data have no column that {kind} reads its gold from ({KINDS[kind].looks_for}); "
                f"they have {[*rows[0]]}; name one of them: columns={{{asked[0]!r}: '...'}}"
            )


def _unread_columns(kind: str, columns: Mapping[str, str]) -> list[str]:
    """Lists the names of ours among ``columns`` that the grader does not read: another column would be its gold."""
    asked = _columns_asked(kind)
    # Those that grade programs and puzzles read more once they have found the first.
    if kind in ("code_stdin", "code_func", "reasoning_gym"):
        return []
    accepts = ", ".join(asked) or "none, since it reads no column"
    return [f"columns: got {name!r}{nearest(name, asked)}, accepts {accepts}" for name in columns if name not in asked]


Steps = Sequence[tuple[int, float]]
"""(end, value) of a completion's steps: ``end`` counts its tokens up to and including the step's last one."""


class StepFunction:
    """A function that scores steps, for ``grpo-process``. TRL logs each completion's sum over its steps.

    TRL accepts one number per completion only, so that the steps wait in ``taken`` for our trainer.
    """

    def __init__(self, function: Callable[..., Sequence[Steps | None]]):
        # TRL awaits coroutine functions; this wrapper is not one, so the coroutine would come back unawaited.
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
        """Returns the steps from the last call."""
        return self._last


def steps(function: Callable[..., Sequence[Steps | None]]) -> StepFunction:
    """Wraps ``function(prompts, completions, completion_ids, **columns)``, which returns the (end, value) list of each
    completion's steps, None if it was not judged. Where an objective reads rewards, the sums count as one of them.

    >>> f = steps(lambda completions, **_: [[(2, 0.5), (4, 1.0)], None])
    >>> f(prompts=["", ""], completions=["a", "b"]), f.taken()
    ([1.5, None], [[(2, 0.5), (4, 1.0)], []])
    """
    return StepFunction(function)


class RecipeRewards:
    """A recipe's rewards as one TRL reward function: returns :class:`~trew.rewards.RewardSet`'s value of each
    completion, or None. Logs each reward's mean as well, where TRL passes ``log_metric``."""

    def __init__(self, rewards: RewardSet, *, columns: Mapping[str, str], name: str):
        self.rewards, self.columns, self.__name__ = rewards, dict(columns), name
        self._begun = False

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        rows = rows_of(columns, len(completions), mapped=self.columns, who=self.__name__)
        if not self._begun:
            _refuse_unread([r.kind for r in self.rewards.rewards if r.kind in KINDS], rows, who=self.__name__)
            self._begun = True
        groups = self._groups(prompts, completions, completion_ids, rows)
        scores = [score for scored in self.rewards.score(groups) for score in scored.scores]
        for text in self.rewards.take_warnings():
            warnings.warn(text, stacklevel=2)
        for name in self.rewards.names:
            known = [part for score in scores if (part := score.parts[name]) is not None]
            if known and log_metric is not None:
                log_metric(f"rewards/{self.__name__}/{name}", sum(known) / len(known))
        return [score.value for score in scores]

    def _groups(
        self, prompts: Sequence[Any], completions: Sequence[Completion], ids: Any, rows: Sequence[dict[str, Any]]
    ) -> list[Group]:
        """Groups consecutive rows of one prompt; rows on other processes are not visible here."""
        numbers: list[list[int]] = []
        # Compared with the row as well: two tasks may share a prompt's text but have different golds.
        for i, row in enumerate(rows):
            if i and prompts[i] == prompts[i - 1] and _alike(row, rows[i - 1]):
                numbers[-1].append(i)
            else:
                numbers.append([i])
        if ids is None and any({"length", "token_ids"} & {*KINDS[r.kind].from_row} for r in self.rewards.rewards
                               if r.kind in KINDS):  # fmt: skip
            raise DataError(f"reward {self.__name__!r}: reads the completions' tokens, and got no completion_ids")
        return [
            text_group(
                # The first row's number is the uid: unique in this call, and that is all that scoring needs.
                _prompt(str(of_group[0]), prompts[of_group[0]], rows[of_group[0]]),
                [text_of(completions[i]) for i in of_group],
                token_ids=None if ids is None else [ids[i] for i in of_group],
            )
            for of_group in numbers
        ]


def _alike(one: Any, other: Any) -> bool:
    """Whether two columns, or tables or lists of them, are equal. Arrays, whose ``==`` goes by entry, are compared as a
    whole."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if hasattr(one, "tolist") and hasattr(other, "tolist"):
        return one.shape == other.shape and one.tolist() == other.tolist()
    return bool(one == other)


def _prompt(uid: str, given: Any, columns: Mapping[str, Any]) -> Prompt:
    if isinstance(given, str):
        return Prompt(uid, text=given, columns=columns)
    # text_of reads assistants' messages: each turn passes as one, whatever its role.
    turns = tuple({"role": turn["role"], "content": text_of([turn | {"role": "assistant"}])} for turn in given)
    return Prompt(uid, messages=turns, columns=columns)


def together(
    tables: Sequence[Mapping[str, Any]], *, columns: Mapping[str, str] | None = None, name: str = "trew"
) -> RecipeRewards:
    """Makes one TRL reward function, logged as ``name``, from a list of rewards like a recipe's ``[[rewards]]``: with
    weights, gates and user functions (``path/to/file.py:function``). Raises ConfigError with all problems at once.

    >>> both = together([{"name": "gsm8k"}, {"name": "format", "gate": True, "weight": 0.0}])
    >>> answers = ["<think>a</think><answer>#### 72</answer>", "#### 72"]
    >>> both(prompts=["?"] * 2, completions=answers, answer=["72"] * 2)
    [1.0, 0.0]
    """
    configs = [build(RewardConfig, table, where=f"rewards[{i}]") for i, table in enumerate(tables)]
    problems = [] if configs else ["rewards: got an empty list, accepts one reward or more"]
    for i, config in enumerate(configs):
        if config.model:
            problems.append(f"rewards[{i}]: {config.model} is a reward model; name it among TRL's reward_funcs itself")
        if config.verify_with:
            problems.append(f"rewards[{i}].verify_with: is for trew train, which watches it; leave it out")
        if config.sets:
            problems.append(f"rewards[{i}].sets: got {config.sets}, but TRL's rows are of one set; leave it out")
        if config.name or config.model:
            problems += of_reward(config, f"rewards[{i}]")
        else:
            problems.append(f"rewards[{i}].name: is required: a built-in's name, or path/to/file.py:function")
    if problems:
        raise ConfigError(problems)
    return RecipeRewards(RewardSet.from_config(configs), columns=columns or {}, name=name)


def __getattr__(name: str) -> Callable[..., BuiltIn]:
    if name not in KINDS:
        raise AttributeError(unknown_kind(name))
    return lambda **args: of(name, **args)
