"""Rewards that users write: one function in a file, in the signature of TRL or of verl, sync or async.

TRL: ``f(prompts, completions, completion_ids=..., **columns) -> list[float | None]`` is called once with all
completions of a step. verl: ``compute_score(data_source, solution_str, ground_truth, extra_info)`` is called per
completion. The form is recognised by the parameters' names, and a function gets only the keywords that it accepts.
This module reads and describes a function; ``session`` calls it, and ``process`` calls it in a separate process.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...errors import ConfigError, nearest
from ...types import Message, Prompt
from ...utils.user_files import load_function, sources_of
from ..columns import first_column
from ..verdict import shown

OFFERED = ("prompts", "completions", "completion_ids", "trainer_state")  # by us, in TRL's form
CONVERSATION = "messages"  # offered with episodes; elsewhere a column may have this name
PROMPT = "prompt"  # a column that is not passed on, as in TRL: ``prompts`` has what it holds
NOT_OFFERED = ("log_extra", "log_metric", "environments")  # TRL's trainer has them; here they must have defaults
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion as a function sees it."""

    prompt: Prompt
    text: str
    token_ids: Iterable[int]  # (T,), or empty if the function does not read them
    length: int = 0  # T
    conversation: Sequence[Message] = ()  # of an episode: all that was said
    opening: int = 0  # how many messages of it came before the first reply

    def __str__(self) -> str:
        return f"prompt {self.prompt.uid!r}, completion {shown(self.text)!r}"


@dataclass(frozen=True, slots=True)
class UserFunction:
    """What is known of a loaded function without having it. ``accepts`` is None when it takes any keyword;
    ``required`` are columns it cannot do without; ``positional`` are parameters that can only be given by position."""

    name: str
    file: Path
    args: Mapping[str, Any]
    verl: bool
    accepts: frozenset[str] | None
    required: tuple[str, ...]
    positional: tuple[str, ...] = ()
    is_async: bool = False
    names_tokens: bool = False  # whether completion_ids is one of its parameters, and not only one that **kwargs takes
    index: int = field(default=0, compare=False)  # its place in the session that loaded it
    # By path below the file's folder: SHA-256 of the file and of what it has imported from there.
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def who(self) -> str:
        return f"reward {self.name!r} ({self.file})"

    @property
    def reads_tokens(self) -> bool:
        """Whether completions' token ids may reach it."""
        return not self.verl and (self.accepts is None or "completion_ids" in self.accepts)

    def applies(self, prompt: Prompt) -> bool:
        """Whether the row has what the function cannot do without."""
        if self.verl:
            return first_column(prompt.columns) is not None
        # None: a row of a file that lacks a column which others have.
        return all(prompt.columns.get(name) is not None for name in self.required)

    def missing(self, columns: Iterable[str]) -> str:
        """What the function needs and no row has; ``columns`` are those of all rows together."""
        columns = list(columns)
        have = ", ".join(sorted(columns)) or "none"
        if self.verl:
            return f"needs a gold answer, which no row has; columns: {have}"
        absent = [name for name in self.required if name not in columns]
        if not absent:
            return f"needs columns {', '.join(map(repr, self.required))} in one row, which no row has; columns: {have}"
        close = nearest(absent[0], columns)
        return f"needs column {', '.join(map(repr, absent))}{close}, which no row has; columns: {have}"

    def call(self, function: Callable[..., Any], samples: Sequence[Sample], *, step: int) -> Any:
        """``function`` called in TRL's form; the result is raw, and may be something to await."""
        return self._call(function, self._trl_keywords(samples, step))

    def call_one(self, function: Callable[..., Any], sample: Sample) -> Any:
        """``function`` called in verl's form."""
        return self._call(function, self._verl_keywords(sample))

    def _call(self, function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
        if self.accepts is not None:
            keywords = {name: value for name, value in keywords.items() if name in self.accepts}
        return function(*self._leading(function, keywords), **keywords)

    def _leading(self, function: Callable[..., Any], keywords: dict[str, Any]) -> list[Any]:
        """Takes the values of positional-only parameters out of ``keywords``, in their order."""
        places = [place for place, name in enumerate(self.positional) if name in keywords]
        if not places:
            return []
        parameters = inspect.signature(function).parameters
        # One that is not offered keeps its place by its default: the next value would be taken for it.
        names = self.positional[: places[-1] + 1]
        return [keywords.pop(name) if name in keywords else parameters[name].default for name in names]

    def _trl_keywords(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """The arguments as TRL's trainer passes them: one list per column, with an entry for each completion."""
        # The union of all rows' columns, and None if a row lacks one: a step may mix rows of several tasks. Names
        # that TRL gives a meaning of its own win over columns, and the recipe's args over both.
        names = dict.fromkeys(name for sample in samples for name in sample.prompt.columns)
        columns = {n: [s.prompt.columns.get(n) for s in samples] for n in names if n not in OFFERED and n != PROMPT}
        if any(s.conversation for s in samples):
            columns[CONVERSATION] = [[dict(message) for message in s.conversation] for s in samples]
        return {
            **columns,
            "prompts": [_as_prompt(s) for s in samples],
            "completions": [_as_completion(s) for s in samples],
            "completion_ids": [[int(t) for t in s.token_ids] for s in samples],
            "trainer_state": SimpleNamespace(global_step=step),
            **self.args,
        }

    def _verl_keywords(self, sample: Sample) -> dict[str, Any]:
        columns = sample.prompt.columns
        return {
            "data_source": columns.get("data_source") or "",
            "solution_str": sample.text,
            "ground_truth": first_column(columns, ("ground_truth", "gold", "answer")),
            # A table nearly always; whatever else the column holds is passed as it is, as verl does.
            "extra_info": copy.copy(columns.get("extra_info") or {}),
            **self.args,
        }


def _as_prompt(sample: Sample) -> Any:
    prompt = sample.prompt
    if sample.conversation:
        return [dict(message) for message in sample.conversation[: sample.opening]]
    return prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]


def _as_completion(sample: Sample) -> Any:
    if sample.conversation:  # as in TRL: everything behind the prompt
        return [dict(message) for message in sample.conversation[sample.opening :]]
    return sample.text if sample.prompt.messages is None else [{"role": "assistant", "content": sample.text}]


# --------------------------------------------------------------------------------------------------------------------
# Loading


def load(
    spec: str, args: Mapping[str, Any], modules: dict[Path, ModuleType], *, index: int = 0
) -> tuple[UserFunction, Callable[..., Any]]:
    """``path/to/file.py:function`` with its keyword arguments, described and itself; its file is run, once for all
    that share ``modules``. Raises ConfigError with every problem found."""
    function, path, name = load_function(spec, modules)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"{path}:{name}: its parameters cannot be read; wrap it in a plain def") from None
    signature = _Signature.read(name, parameters)
    if problems := signature.problems(args):
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    called = getattr(function, "__call__", None)  # noqa: B004 (of an object that is async when called)
    described = UserFunction(
        name=name,
        file=path,
        args=dict(args),
        verl=signature.verl,
        accepts=None if signature.any_keyword else frozenset(signature.named),
        required=("ground_truth",)
        if signature.verl
        else tuple(n for n in signature.needed(args) if n not in (*OFFERED, CONVERSATION)),
        positional=tuple(n for n, p in signature.named.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY),
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called),
        names_tokens=not signature.verl and "completion_ids" in signature.named,
        index=index,
        sources=sources_of(path),
    )
    return described, function


@dataclass(frozen=True, slots=True)
class _Signature:
    """A function's parameters; their names say which form it has, and so what it is given in every call."""

    name: str
    parameters: tuple[str, ...]  # all of them
    named: Mapping[str, inspect.Parameter]  # without *args and **kwargs
    any_keyword: bool

    @classmethod
    def read(cls, name: str, parameters: Mapping[str, inspect.Parameter]) -> _Signature:
        kinds = inspect.Parameter
        named = {n: p for n, p in parameters.items() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
        any_keyword = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
        return cls(name, tuple(parameters), named, any_keyword)

    @property
    def verl(self) -> bool:
        return {"solution_str", "ground_truth"} <= set(self.named)

    def needed(self, args: Mapping[str, Any]) -> list[str]:
        """Parameters without a default and without a value in ``args``."""
        return [n for n, p in self.named.items() if p.default is inspect.Parameter.empty and n not in args]

    def problems(self, args: Mapping[str, Any]) -> list[str]:
        """Says why a function with these parameters cannot be a reward, or not with these arguments."""
        found = [problem for key in args if (problem := self._argument_problem(key))]
        if self.verl:
            return found + [
                f"{self.name}() needs {n!r}, which verl's form does not have; give it under args"
                for n in self.needed(args)
                if n not in VERL
            ]
        if "completions" not in self.named and not self.any_keyword:
            return [
                *found,
                f"{self.name}({', '.join(self.parameters)}) takes neither `completions` "
                "(TRL: f(prompts, completions, **columns)) nor `solution_str` and `ground_truth` "
                "(verl: compute_score(data_source, solution_str, ground_truth, extra_info))",
            ]
        # other parameters without a default are columns of the data, which are looked for when rows are known
        needed = self.needed(args)
        if PROMPT in needed:
            found.append(f"{self.name}() needs {PROMPT!r}, which no function is given; take 'prompts', a list of them")
        return found + [
            f"{self.name}() needs {n!r}, which only TRL's trainer has; give it the default None"
            for n in needed
            if n in NOT_OFFERED
        ]

    def _argument_problem(self, key: str) -> str:
        offered = VERL if self.verl else OFFERED
        if key in offered:
            return f"args.{key}: is given by trew in every call; leave it out"
        if key in self.named:
            return ""
        settable = [n for n in self.named if n not in offered]
        if self.any_keyword:
            # `**columns` would take it without a word, and the parameter that was meant would keep its default.
            meant = nearest(key, settable, cutoff=0.8)
            also = "; to pass it to **kwargs, give the function this parameter as well"
            return f"args.{key}: {self.name}() has no such parameter{meant}{also}" if meant else ""
        takes = f"it takes {', '.join(settable)}" if settable else "it takes no arguments of its own"
        return f"args.{key}: {self.name}() has no such parameter{nearest(key, settable)}; {takes}"
