"""Checks data against rewards: golds must be readable and score 1, and every reward must apply to some row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..types import Prompt
from .builtin import layout
from .builtin.kinds import KINDS, gold_problems
from .combine import Reward
from .thinking import OPEN
from .user.functions import OFFERED

AT_ONCE = 256  # rows checked between two reports of progress
Bar = Callable[[str, int], AbstractContextManager[Any]]
"""Opens a progress bar with a name and a total; the context manager's value has ``advance(count)``."""


def columns_of(prompts: Iterable[Prompt]) -> frozenset[str]:
    """Returns every column that any row has. None is none: a row of a file that lacks a column has it there."""
    return frozenset(name for prompt in prompts for name, value in prompt.columns.items() if value is not None)


def applies(reward: Reward, prompt: Prompt) -> bool:
    """Returns whether a reward judges the answers to a row: it has what the reward needs; a model needs nothing."""
    if not reward.serves(prompt):
        return False
    if reward.function is not None:
        return reward.function.applies(prompt)
    return reward.model is not None or KINDS[reward.kind].gold(prompt.columns) is not None


def bad_golds(rewards: Sequence[Reward], prompts: Sequence[Prompt], *, bar: Bar | None = None) -> list[str]:
    """Lists golds of built-in rewards that cannot be read or do not score 1 against themselves, one line each."""
    builtins = [reward for reward in rewards if reward.is_builtin]
    is_slow = any(KINDS[reward.kind].grade_many is not None for reward in builtins)
    problems: list[str] = []
    with bar("checking golds", len(prompts)) if bar and is_slow and prompts else nullcontext() as shown:
        for first in range(0, len(prompts), AT_ONCE):
            # In batches: kinds with workers or a sandbox grade a batch side by side.
            part = prompts[first : first + AT_ONCE]
            problems += _bad_in(part, builtins, first)
            if shown is not None:
                shown.advance(len(part))
    return problems


def _bad_in(prompts: Sequence[Prompt], builtins: Sequence[Reward], first: int) -> list[str]:
    found: list[tuple[int, str]] = []
    for reward in builtins:
        own = [at for at, prompt in enumerate(prompts) if reward.serves(prompt)]
        lines = gold_problems(reward.kind, [prompts[at].columns for at in own], reward.args)
        found += [(at, f"reward {reward.name!r}: {line}") for at, line in zip(own, lines, strict=True) if line]
    # By row: sorting keeps the order of the rewards in it.
    return [f"row {first + at + 1} ({prompts[at].uid}): {line}" for at, line in sorted(found, key=lambda f: f[0])]


def serving_problems(rewards: Sequence[Reward], prompts: Sequence[Prompt], *, sets: Sequence[str] = ()) -> list[str]:
    """Reports rewards that apply to no row at all, or to none of one of several data ``sets``, and what they look
    for."""
    if not sets:
        return _serving_problems(rewards, prompts)
    problems = []
    for name in sets:
        own = [prompt for prompt in prompts if prompt.data_set == name]
        serving = [reward for reward in rewards if not reward.sets or name in reward.sets]
        problems += [
            f"data set {name!r}: {problem}; rewards.sets names the data sets that a reward judges"
            for problem in _serving_problems(serving, own)
        ]
    return problems


def _serving_problems(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> list[str]:
    columns = columns_of(prompts)
    problems: list[str] = []
    for reward in rewards:
        if reward.model is not None:
            problems += reward.model.prompt_problems(prompts)
        elif prompts and not any(applies(reward, prompt) for prompt in prompts):
            problems.append(_looks_for(reward, columns, rows=len(prompts)))
    return problems


def _looks_for(reward: Reward, columns: frozenset[str], *, rows: int) -> str:
    if reward.function is not None:
        return f"{reward.function.who} {reward.function.missing(columns)}"
    return (
        f"reward {reward.name!r} applies to none of the {rows} rows: it looks for {KINDS[reward.kind].looks_for}; "
        f"columns: {', '.join(sorted(columns)) or 'none'}"
    )


def unserved_notes(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> list[str]:
    """The first line of :meth:`RewardSet.column_notes`."""
    # Kinds such as format and length apply to every row, and would hide prompts whose answers nothing judges.
    reading = [r for r in rewards if not r.is_builtin or KINDS[r.kind].looks_for]
    alone = [p for p in prompts if reading and not any(applies(reward, p) for reward in reading)]
    if not alone:
        return []
    names = ", ".join(p.place or p.uid for p in alone[:5]) + (", ..." if len(alone) > 5 else "")
    return [
        f"{len(alone)} of {len(prompts)} prompts have nothing that a reward looks for, so their answers are "
        f"not judged: {names}; give them a gold, or take them out"
    ]


def hidden_notes(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> list[str]:
    """Columns that no function of TRL's form can see, since it is given something else by their names."""
    functions = [r.name for r in rewards if r.function is not None and not r.function.verl]
    hidden = [name for name in OFFERED if any(name in prompt.columns for prompt in prompts)]
    if not functions or not hidden:
        return []
    return [
        f"rewards: data have {'columns' if len(hidden) > 1 else 'a column'} {', '.join(hidden)}, by which name "
        f"{', '.join(functions)} is given the run's own values and not the data's; rename it if a reward is to read it"
    ]


def thought_notes(rewards: Sequence[Reward]) -> list[str]:
    """As :meth:`RewardSet.thought_notes`."""
    builtins = [r for r in rewards if r.is_builtin]
    notes = []
    if told := [r.name for r in builtins if "thinking" in KINDS[r.kind].settings and not r.args.get("thinking")]:
        notes.append(
            f"rewards: prompts end inside a thought (<think>), of which {', '.join(told)} is not told, so that what is "
            "said in a thought that never ends counts as an answer; give such rewards args = { thinking = true }"
        )
    if closed := [r.name for r in builtins if r.kind == "format" and _asks_for_thought(r)]:
        notes.append(
            f"rewards: prompts end with <think>, and {', '.join(closed)} asks for it in the reply, so that a reply "
            'which does not begin its thought again scores 0; give such rewards args = { prefilled = "<think>" }'
        )
    if models := [r.name for r in rewards if r.model is not None]:
        notes.append(
            f"rewards: prompts end with <think>, which is no part of the replies that reward model {', '.join(models)} "
            "reads: it sees thoughts that end and do not begin, unless its own chat template opens them"
        )
    return notes


def _asks_for_thought(reward: Reward) -> bool:
    """Whether the template of a ``format`` has a <think> that is not the prompt's."""
    template = layout.parse_template(reward.args.get("template", layout.THINK_ANSWER))
    return OPEN in template.tags and OPEN not in reward.args.get("prefilled", "")
