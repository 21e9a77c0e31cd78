"""Groups runs by their settings and names each group by what sets it apart."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config.free import is_free
from ...errors import ConfigError, nearest
from ...eval.comparison import Pair
from ...utils import user_files
from ..report.text import ends_of
from .members import Member

Differences = Mapping[str, Mapping[str, Any]]
"""Setting -> name of a run or group -> its value, for every setting that is not the same for all."""

_LONGEST = 60


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs whose settings differ in the seed alone, and in the data set where that is allowed."""

    name: str
    members: tuple[Member, ...]
    tasks: tuple[str, ...]  # of each member

    @property
    def pairs(self) -> list[Pair]:
        return [(task, member.seed) for task, member in zip(self.tasks, self.members, strict=True)]


def grouped(
    members: Sequence[Member], *, by: Collection[str], several_tasks: bool
) -> tuple[list[RunGroup], Differences]:
    """The groups in the order of their first runs, and the settings in which they differ.

    A group is made by the settings in ``by``, or else by all that change what is learned. With ``several_tasks`` the
    settings that belong to the data (``of_data``) do not separate groups.
    """
    # Settings that separate groups; is_free leaves out those that change nothing that is learned.
    keys = _separating(members, by, several_tasks=several_tasks)
    parts: dict[str, list[Member]] = {}
    for member in members:
        # Dictionaries keep their order, so the group of the first run comes first.
        parts.setdefault(_key(_settings(member, keys)), []).append(member)
    # Members of a group agree in ``keys``, so the first stands for all.
    firsts = [of[0] for of in parts.values()]
    # Only what the groups differ in names them: other settings are the same in all.
    differing = sorted(k for k in keys if len({_key(m.settings.get(k)) for m in firsts}) > 1)
    names = _names([_settings(first, differing) for first in firsts])
    tasks = task_names(members) if several_tasks else {m.name: "" for m in members}
    groups = [
        RunGroup(name, tuple(of), tuple(tasks[m.name] for m in of))
        for name, of in zip(names, parts.values(), strict=True)
    ]  # fmt: skip
    return groups, {k: {g.name: g.members[0].settings.get(k) for g in groups} for k in differing}


def _separating(members: Sequence[Member], by: Collection[str], *, several_tasks: bool) -> set[str]:
    """The settings that separate groups: those in ``by``, or else all that change what is learned."""
    keys = _checked(by, members) or {k for m in members for k in m.settings if not is_free(k)}
    return keys - of_data(members) if several_tasks else keys


def of_data(members: Sequence[Member]) -> set[str]:
    """The settings that belong to the data: those that say what it is, and rewards that are the same in all runs on it,
    as each task brings its own."""
    names = task_names(members)
    values: dict[str, dict[str, set[str]]] = {}
    for key in {k for m in members for k in m.settings if k.startswith("rewards.")}:
        for member in members:
            of = values.setdefault(key, {}).setdefault(names[member.name], set())
            of.add(_key(member.settings.get(key)))
    rewards = {key for key, by_task in values.items() if all(len(of) == 1 for of in by_task.values())}
    return rewards | {k for m in members for k in m.task()}


def _settings(member: Member, keys: Collection[str]) -> dict[str, Any]:
    return {k: member.settings.get(k) for k in keys}


def differences(tables: Mapping[str, Mapping[str, Any]]) -> Differences:
    """What differs between the tables of several runs, by key and then by run.

    >>> differences({"a": {"x": 1, "y": 2}, "b": {"x": 1}})
    {'y': {'a': 2, 'b': None}}
    """
    keys = dict.fromkeys(key for table in tables.values() for key in table)
    found = {key: {name: table.get(key) for name, table in tables.items()} for key in keys}
    return {key: values for key, values in found.items() if len({_key(v) for v in values.values()}) > 1}


def task_names(members: Sequence[Member]) -> dict[str, str]:
    """A name for the data of each run: what it is where it differs."""
    # The same for data: runs on equal data share a name.
    differing = differences({m.name: m.task() for m in members})
    tables = {m.name: {key: differing[key][m.name] for key in differing} for m in members}
    distinct = {_key(table): table for table in tables.values()}
    names = dict(zip(distinct, _names(list(distinct.values())), strict=True))
    return {name: names[_key(table)] for name, table in tables.items()}


def find(groups: Sequence[RunGroup], wanted: str) -> RunGroup:
    """The group that ``--baseline`` names: by its name, a value in it, or the folder of one of its runs."""
    exact = [g for g in groups if g.name == wanted]
    within = [g for g in groups if wanted in _words(g.name)]
    by_folder = [g for g in groups if any(_is_named(m, wanted) for m in g.members)]
    # In this order: an exact name wins over a word in several names.
    for found in (exact, within, by_folder):
        if len(found) == 1:
            return found[0]
    names = [g.name for g in groups]
    several = f", which fits {len(within)} groups" if len(within) > 1 else nearest(wanted, names)
    raise ConfigError(f"--baseline: got {wanted!r}{several}; accepts {'; '.join(names)}, or the folder of a run")


def _is_named(member: Member, wanted: str) -> bool:
    """Whether ``wanted`` is the run's folder, however its path is written: shells put a slash behind it."""
    return wanted == member.data.name or os.path.realpath(wanted) == os.path.realpath(member.data.folder)


def shown(value: Any) -> str:
    """A setting's value as text; a setting that a run does not have is a dash."""
    if value is None:
        return "–"
    # Six digits where they say it all: values that differ in the seventh would look alike.
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return ends_of(short if not isinstance(value, float) or float(short) == value else repr(value), _LONGEST)


def _checked(by: Collection[str], members: Sequence[Member]) -> set[str]:
    """The settings that ``--by`` names. Raises ConfigError for one that no run has."""
    every = {k for m in members for k in m.settings}
    for key in by:
        if key not in every:
            raise ConfigError(f"--by: got {key!r}{nearest(key, sorted(every))}, accepts settings, as objective.preset")
    return set(by)


def _names(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """One name for each table, of its values. The preset stands for itself; other settings are named."""
    if len(tables) == 1:
        return ["all runs"]
    lasts = [key.rpartition(".")[2] for key in tables[0]]

    def part(key: str, value: Any) -> str:
        last = key.rpartition(".")[2]
        # One setting differs: its value is enough.
        if len(tables[0]) == 1 or key == "objective.preset":
            return shown(user_files.short_name(value)) if isinstance(value, str) else f"{last}={shown(value)}"
        return f"{last if lasts.count(last) == 1 else key}={shown(value)}"

    order = sorted(tables[0], key=lambda key: (key != "objective.preset", key))
    # An override that a group lacks is left to the preset's default, and does not belong to its name.
    names = [" ".join(part(k, t[k]) for k in order if t[k] is not None) or "defaults" for t in tables]
    # Equal names are numbered: shown() may have cut off what differs.
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, start=1)]


def _words(name: str) -> list[str]:
    return [word for part in name.split() for word in (part, part.rpartition("=")[2])]


def _key(value: Any) -> str:
    """Equal for equal values, including lists and tables; 1 and 1.0 are equal."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k!r}:{_key(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_key, value)) + "]"
    # Beyond 2**53, floats would make different whole numbers equal.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return repr(float(value))
    return repr(value)
