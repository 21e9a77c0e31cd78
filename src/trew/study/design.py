"""``study.toml``: a study as it was designed: which cells there are, and which runs, in which order."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..config.recipe import build, read_table
from ..errors import ConfigError, nearest
from ..utils.toml import flatten, toml_value
from .settings import Warm

Overrides = Mapping[str, Any]
"""Settings of a recipe by their whole keys: {"learner.inner_updates": 4}."""

FIRST_TUNING_SEED = 1001
"""Learning rates are chosen on seeds from here on, which are never reported; reported ones count from 1."""

_MOST_SEEDS = 1000
_OWN = ("seed", "out", "rollout.replay", "track.to")
"""Settings that a study gives each run itself, or that runs which may be repeated cannot have."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PARTS = ("tasks", "regimes", "algorithms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A whole study. Every run has the base recipe's settings, changed by ``set``, then by its task, its regime and its
    algorithm, then by the tuned setting and the seed."""

    name: str
    base: Path
    baseline: str  # the algorithm that the others are compared with
    question: str = ""
    claims: tuple[str, ...] = ()  # what is expected, written before the first run
    seeds: int = 20
    tuning_seeds: int = 3
    set: Overrides = field(default_factory=dict)
    tasks: Mapping[str, Overrides] = field(default_factory=dict)
    regimes: Mapping[str, Overrides] = field(default_factory=dict)
    algorithms: Mapping[str, Overrides] = field(default_factory=dict)
    tuned: str = ""  # the setting that is tuned for every cell; empty = none
    values: tuple[float, ...] = ()  # its values
    warm: Warm | None = None  # the small model that the study makes
    recipe: Mapping[str, Any] = field(default_factory=dict)  # the base recipe's content

    @property
    def digest(self) -> str:
        """What was fixed before the first run, as a hash: the design with its question and claims, and the recipe."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """The design as plain values, without the place of the recipe."""
        # The place of the base recipe differs between machines; its content is in ``recipe``.
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("base", "warm")}
        warm = None if self.warm is None else {f.name: getattr(self.warm, f.name) for f in fields(self.warm)}
        # Through JSON, so that it equals a design that was read from a file.
        return json.loads(json.dumps(plain | {"warm": warm}))

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> Study:
        """The study that ``to_json`` wrote. Its recipe's content is there, but not the place of the recipe."""
        table: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in plain.items()}
        warm = table.pop("warm")
        return Study(base=Path(), warm=None if warm is None else Warm(**warm), **table)

    @property
    def cells(self) -> list[Cell]:
        return [Cell(*names) for names in itertools.product(self.tasks, self.regimes, self.algorithms)]

    @property
    def reported(self) -> range:
        return range(1, self.seeds + 1)

    @property
    def tuning(self) -> range:
        return range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + self.tuning_seeds) if self.tuned else range(0)

    def overrides(self, run: Run) -> list[str]:
        """The settings of a run beside the base recipe's, as ``--set`` takes them."""
        cell = run.cell
        # Later entries win: set, task, regime, algorithm, then what varies from run to run.
        table = {
            **self.set, **self.tasks[cell.task], **self.regimes[cell.regime], **self.algorithms[cell.algorithm],
            **({} if run.value is None else {self.tuned: run.value}), "seed": run.seed,
        }  # fmt: skip
        return [f"{key}={toml_value(value)}" for key, value in table.items()]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One algorithm on one task in one regime."""

    task: str
    regime: str
    algorithm: str

    @property
    def name(self) -> str:
        return f"{self.task}/{self.regime}/{self.algorithm}"


@dataclass(frozen=True, slots=True)
class Run:
    """One training: a cell with a value of the tuned setting (None = nothing is tuned) and a seed."""

    cell: Cell
    value: float | None
    seed: int

    @property
    def folder(self) -> Path:
        """Where it is below the study's folder."""
        value = "base" if self.value is None else f"{self.value:g}"
        return Path("runs", self.cell.task, self.cell.regime, self.cell.algorithm, value, str(self.seed))

    @property
    def name(self) -> str:
        value = "" if self.value is None else f" {self.value:g}"
        return f"{self.cell.name}{value} seed {self.seed}"


def tuning_runs(study: Study, cells: Sequence[Cell]) -> Iterator[Run]:
    """The runs on which the tuned setting is chosen, seed by seed: every beginning of the list is a balanced study."""
    for seed, value, cell in itertools.product(study.tuning, study.values, cells):
        yield Run(cell, value, seed)


def reported_runs(study: Study, cells: Sequence[Cell], chosen: Mapping[Cell, float | None]) -> Iterator[Run]:
    """The runs that are reported, seed by seed, of the cells whose tuned setting is chosen."""
    for seed, cell in itertools.product(study.reported, cells):
        if cell in chosen:
            yield Run(cell, chosen[cell], seed)


def only(study: Study, wanted: str) -> list[Cell]:
    """The cells that ``--only`` names: parts between slashes, each the name of a regime, a task or an algorithm.

    Raises ConfigError for a name that the study does not have.
    """
    parts = [part for part in wanted.split("/") if part]
    names = [name for kind in _PARTS for name in getattr(study, kind)]
    if unknown := [part for part in parts if part not in names]:
        raise ConfigError(
            f"--only: got {unknown[0]!r}{nearest(unknown[0], names)}, accepts names of tasks, regimes and algorithms "
            f"with / between them, as off/sums: {', '.join(names)}"
        )
    # Names differ over all kinds (_parts_problems), so that a part need not say its kind.
    cells = [c for c in study.cells if all(part in (c.task, c.regime, c.algorithm) for part in parts)]
    if not cells:
        raise ConfigError(f"--only: got {wanted!r}, which names no cell: give at most one name of each kind")
    return cells


# -------------------------------------------------------------------------------------------------------------- reading


def load(path: Path) -> Study:
    """Reads a study. Raises ConfigError with every problem of the file; what its runs would refuse is checked later."""
    table = _read(path)
    problems = _unknown(table) + _shape(table) + _warm_problems(table)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    base = path.parent / table["base"]
    tune = table.get("tune", {})
    tuned, values = next(iter(flatten(tune).items()), ("", []))
    recipe = read_table(base)
    # Where the base recipe writes its own runs is no part of the design.
    recipe.pop("out", None)
    settings = flatten(recipe)
    if dates := [*_dates(settings)]:
        raise ConfigError([f"{base}: {problem}" for problem in dates])
    if unfit := [key for key in ("rollout.replay", "track.to") if settings.get(key)]:
        raise ConfigError(f"{base}: sets {', '.join(unfit)}, which runs of a study cannot have; remove it there")
    return Study(
        name=table["name"], base=base, baseline=table["baseline"], question=table.get("question", ""),
        claims=tuple(table.get("claims", ())), seeds=table.get("seeds", 20),
        tuning_seeds=table.get("tuning_seeds", 3), set=_threads(_settings(table.get("set", {})), recipe),
        tuned=tuned, values=tuple(sorted(values)),
        warm=build(Warm, table["warm"], where="warm") if "warm" in table else None, recipe=recipe,
        **{kind: {name: _settings(of) for name, of in table[kind].items()} for kind in _PARTS},
    )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give the study's TOML file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def _settings(table: Any, where: str = "") -> dict[str, Any]:
    """Settings by their dotted keys, as ``--set`` takes them: a list and an empty table are values, which replace those
    of the base recipe."""
    if not isinstance(table, Mapping) or (where and not table):
        return {where: table}
    parts = [_settings(value, f"{where}.{name}".lstrip(".")) for name, value in table.items()]
    return {key: value for part in parts for key, value in part.items()}


def _threads(chosen: dict[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """One thread for each run unless the study says otherwise: the number of threads decides the order of sums, and
    must not depend on ``--jobs``."""
    return chosen if "threads" in chosen or recipe.get("threads") else {"threads": 1, **chosen}


def _unknown(table: Mapping[str, Any]) -> list[str]:
    known = ["name", "base", "baseline", "question", "claims", "seeds", "tuning_seeds", "set", *_PARTS, "tune", "warm"]
    return [f"{key}: unknown key{nearest(key, known)}; accepts {', '.join(known)}" for key in table if key not in known]


def _shape(table: Mapping[str, Any]) -> list[str]:
    """What is missing or has the wrong form, one line each."""
    found = [*_texts_problems(table), *_counts_problems(table)]
    for key in ("set", "tune", "warm"):
        if not isinstance(table.get(key, {}), dict):
            found.append(f"{key}: got {table[key]!r}, accepts a table")
    # The parts are read only where their tables have the right form.
    return found or [*_parts_problems(table), *_tune_problems(table)]


def _texts_problems(table: Mapping[str, Any]) -> list[str]:
    found = [
        f"{key}: got {table.get(key)!r}, accepts a text{' ' + why if why else ''}"
        for key, why in (("name", "without spaces"), ("base", "(the recipe's path)"), ("baseline", ""))
        if not (isinstance(table.get(key), str) and table[key])
    ]
    if isinstance(name := table.get("name"), str) and name and not _NAME.fullmatch(name):
        found.append(f"name: got {name!r}, accepts letters, digits, dots and dashes")
    claims = table.get("claims", [])
    if not (isinstance(claims, list) and all(isinstance(claim, str) for claim in claims)):
        found.append(f"claims: got {claims!r}, accepts a list of texts")
    if not isinstance(table.get("question", ""), str):
        found.append(f"question: got {table['question']!r}, accepts a text")
    return found


def _counts_problems(table: Mapping[str, Any]) -> list[str]:
    found = []
    for key, least in (("seeds", 2), ("tuning_seeds", 1)):
        count = table.get(key, least)
        if type(count) is not int or not least <= count <= _MOST_SEEDS:
            found.append(f"{key}: got {count!r}, accepts a whole number from {least} to {_MOST_SEEDS}")
    return found


def _parts_problems(table: Mapping[str, Any]) -> list[str]:
    """Tasks, regimes and algorithms: at least one of each, with names that are folders' names and differ."""
    found = []
    seen: dict[str, str] = {}
    for kind in _PARTS:
        parts = table.get(kind)
        if not (isinstance(parts, dict) and parts and all(isinstance(part, dict) for part in parts.values())):
            found.append(f"{kind}: got {parts!r}, accepts one table or more, as [{kind}.NAME]")
            continue
        for name, part in parts.items():
            if not _NAME.fullmatch(name):
                found.append(f"{kind}.{name}: accepts names of letters, digits, dots and dashes")
            if name in seen:
                found.append(f"{kind}.{name}: the name is among {seen[name]} too; --only could not tell them apart")
            seen[name] = kind
            found += _own_problems(f"{kind}.{name}", flatten(part), table)
    if not found and table["baseline"] not in table["algorithms"]:
        found.append(
            f"baseline: got {table['baseline']!r}{nearest(table['baseline'], table['algorithms'])}, accepts one of "
            f"the algorithms: {', '.join(table['algorithms'])}"
        )
    return found + _own_problems("set", flatten(table.get("set", {})), table)


def _own_problems(where: str, overrides: Overrides, table: Mapping[str, Any]) -> list[str]:
    """Settings that the study gives each run itself."""
    tuned = list(flatten(table.get("tune", {})))
    # The study makes the model, and with it tokenizer and template.
    own = [*_OWN, *(["model", "tokenizer", "chat_template"] if "warm" in table else [])]
    found = [
        f"{where}: sets {key}, which the study gives each run itself; remove it" for key in overrides if key in own
    ]
    found += [
        f"{where}: sets {key}, which [tune] varies; remove it from one of them" for key in overrides if key in tuned
    ]
    return found + [f"{where}: {problem}" for problem in _dates(overrides)]


def _dates(settings: Overrides) -> Iterator[str]:
    """A problem for each value that no setting takes and that a record of the study could not hold."""
    for key, value in settings.items():
        try:
            toml_value(value)
        except TypeError:
            yield f"{key}: got {value!r:.100}, accepts texts, numbers, true, false, and lists and tables of them"


def _tune_problems(table: Mapping[str, Any]) -> list[str]:
    tune = flatten(table.get("tune", {}))
    if not table.get("tune"):
        return []
    # No setting at all: a table of settings that is empty, as [tune.learner].
    values, *more = tune.values() or [None]
    numbers = isinstance(values, list) and all(type(v) in (int, float) and v > 0 for v in values)
    # Values that print alike would share a folder (Run.folder).
    if more or not numbers or len({f"{v:g}" for v in values}) < max(2, len(values)):
        return [f"tune: got {table['tune']!r}, accepts one setting with two different numbers above 0 or more"]
    return []


def _warm_problems(table: Mapping[str, Any]) -> list[str]:
    if not isinstance(table.get("warm"), dict):
        return []
    try:
        return build(Warm, table["warm"], where="warm").problems()
    except ConfigError as error:
        return list(error.problems)
