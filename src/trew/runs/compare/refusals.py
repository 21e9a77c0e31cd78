"""What keeps runs from being compared: every reason at once, each with the runs and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ...config.free import is_free
from ..changes import FILE
from .choices import Allow
from .groups import Differences, RunGroup, differences, shown, task_names
from .members import Member

_MOST_NAMED = 3


def problems(members: Sequence[Member], *, allow: Collection[Allow]) -> list[str]:
    """Every difference between runs that makes a comparison meaningless and is not allowed, one line each."""
    found = list(_twice(members))
    versions = {m.name: {"version of trew": m.version} for m in members if m.version}
    if "version" not in allow:
        why = "versions may compute different things; --allow version compares anyway"
        found += _lines(differences(versions), why)
        found += [f"{m.name}: {text} from step {change.step} on: {why}" for m in members for change in m.data.changes
                  for text in change.versions if text.startswith("trew ")]  # fmt: skip
    if "model" not in allow:
        models = {m.name: {k: m.settings.get(k) for k in ("model", "tokenizer")} for m in members}
        found += _lines(differences(models), "runs of different models differ in more than settings; --allow model")
    tasks = {m.name: m.task() for m in members}
    if "data" not in allow:
        found += _lines(
            differences(tasks),
            "accuracies on different data cannot be compared; --allow data compares the groups within each data set",
        )
    if "eval" not in allow:
        found += _evaluations(members)
    if "changes" not in allow:
        found += _changed(members)
    return found


def _changed(members: Sequence[Member]) -> Iterator[str]:
    """Runs that went on under other settings than they began with: no group of one setting is theirs."""
    for m in members:
        yield from (f"{m.name}: {note}; put a backup of it there" for note in m.data.notes if note.startswith(FILE))
        if told := [text for change in m.data.changes for text in (*change.settings, *change.others)]:
            steps = some([str(change.step) for change in m.data.changes])
            yield (
                f"{m.name}: went on with changes after step {steps}: {'; '.join(told)}; leave it out, or --allow "
                "changes takes it for a run of the settings that it ended with"
            )


def _twice(members: Sequence[Member]) -> Iterator[str]:
    # Resolved: two names of one folder are one run.
    places = Counter(m.data.folder.resolve() for m in members)
    yield from (f"{place}: is given {count} times; give each run once" for place, count in places.items() if count > 1)


def _evaluations(members: Sequence[Member]) -> list[str]:
    """Differences between the evaluations of runs on the same data."""
    names = task_names(members)
    found: list[str] = []
    for task in dict.fromkeys(names.values()):
        tables = {m.name: m.evaluation() for m in members if names[m.name] == task}
        found += _lines(differences(tables), "the accuracies measure different things; --allow eval compares anyway")
    return found


def _lines(found: Differences, why: str) -> list[str]:
    return [f"{key}: differs: {_by_value(values)}: {why}" for key, values in found.items()]


def _by_value(values: Mapping[str, Any]) -> str:
    """``20 (runs/a, runs/b), 30 (runs/c)``"""
    runs: dict[str, list[str]] = {}
    for name, value in values.items():
        runs.setdefault(shown(value), []).append(name)
    return ", ".join(f"{value or repr(value)} ({some(names)})" for value, names in runs.items())


def group_problems(groups: Sequence[RunGroup]) -> list[str]:
    """Reasons that show only when runs are grouped: a seed twice in a group, and pairs with other held-out prompts."""
    # The second only where the first finds nothing: pairs need one run per seed.
    return [line for group in groups for line in _seed_twice(group)] or _other_prompts(groups)


def _seed_twice(group: RunGroup) -> list[str]:
    """One line if a group has several runs of one seed."""
    pair, count = Counter(group.pairs).most_common(1)[0]
    if count == 1:
        return []
    twice = [m for m, p in zip(group.members, group.pairs, strict=True) if p == pair]
    other = [k for k in differences({m.name: m.settings for m in twice}) if not is_free(k)]
    why = f"they differ in {', '.join(other)}; add that to --by" if other else "they are one run twice; leave one out"
    return [
        f"seed {pair[1]}: {some([m.name for m in twice])} are in one group ({group.name}) with the same seed: {why}"
    ]


def _other_prompts(groups: Sequence[RunGroup]) -> list[str]:
    """Pairs of one seed whose evaluations are of other prompts, beyond those that could not be judged."""
    firsts: dict[Any, Member] = {}
    found = []
    for group in groups:
        for pair, member in zip(group.pairs, group.members, strict=True):
            first = firsts.setdefault(pair, member)
            other = len(first.prompts ^ member.prompts)
            # Prompts that a reward could not judge are missing from one set for a good reason.
            if other > first.unjudged + member.unjudged:
                found.append(
                    f"{member.name}: was evaluated on {len(member.prompts)} prompts, {first.name} with the same seed "
                    f"on {len(first.prompts)}, and {other} of them are in one set only; evaluate both on the same "
                    "data (data.eval, eval.size)"
                )
    return found


def some(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
