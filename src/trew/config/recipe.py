"""Reads recipes: TOML to a checked :class:`Config`, and back.

Precedence: defaults < recipe < ``--set key=value``. Every key is used or refused: ``parse`` collects all unknown keys
and wrong types, ``rules.validate`` all invalid values and combinations.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, nearest
from ..utils.peer_names import in_a_recipe
from ..utils.toml import dump_table, is_text
from . import limits
from .rules import validate
from .schema import DEMONSTRATED, PAIRED, Assumed, Config, ObjectiveConfig

T = typing.TypeVar("T")


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads a recipe and applies ``key=value`` overrides; raises ConfigError with every problem found."""
    table = read_table(path, overrides)
    if "iterate" in table:
        raise ConfigError(f"{path}: is a recipe for rounds (it has an [iterate] table); run it with trew iterate")
    if isinstance(data := table.get("data"), dict) and {"pairs", "runs"} & {*data}:
        raise ConfigError(
            f"{path}: has settings of a reward model's training (data.pairs, data.runs); trew train-reward reads them, "
            "and a [[rewards]] table of another recipe uses its model, as model = 'RUN/final'"
        )
    return parse(table, base=Path(path).parent)


def read_table(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Reads a recipe as plain values, applies ``key=value`` overrides and sets ``out``; checks nothing else."""
    path = Path(path)
    try:
        # utf-8-sig: editors on Windows may write a byte order mark, which tomllib refuses.
        table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, not a recipe (.toml)") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save the recipe as UTF-8") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of thousands of digits, endless nesting
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        hint = "; strings need quotes, and recipes are TOML, not YAML: key = value below [section]"
        raise ConfigError(f"{path}: is not valid TOML: {why}{hint}") from None
    apply_overrides(table, overrides)
    if not table.get("out"):
        table["out"] = f"runs/{path.stem}"
    return table


def apply_overrides(table: dict[str, Any], overrides: Iterable[str]) -> None:
    """Writes ``a.b=value`` into the nested ``table``. Reads the value as TOML, or as a string where it is not TOML.

    >>> t = {}; apply_overrides(t, ["learner.lr=1e-5", "model=./m"]); t
    {'learner': {'lr': 1e-05}, 'model': './m'}
    >>> t = {"data": [{"name": "a"}]}; apply_overrides(t, ["data.0.weight=2"]); t
    {'data': [{'name': 'a', 'weight': 2}]}
    """
    problems = []
    for text in [overrides] if isinstance(overrides, str) else overrides:  # one text is no list of letters
        key, equals, raw = text.partition("=")
        if not equals or not all(part for part in key.strip().split(".")):
            problems.append(f"--set {text!r}: expected key=value, for example --set learner.lr=1e-5")
            continue
        *parents, last = key.strip().split(".")
        try:
            _inner(table, parents)[last] = _toml_value(raw)
        except ValueError as error:
            problems.append(f"--set {text!r}: {error}")
    if problems:
        raise ConfigError(problems)


def _inner(table: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The table of that name inside another one, which is made if it is missing. Raises ValueError if something else
    has the name."""
    node: Any = table
    for at, name in enumerate(names):
        if isinstance(node, list):
            # A list of tables is entered by number, and never grown.
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.setdefault(name, {})
        tables = isinstance(node, list) and bool(node) and all(isinstance(each, dict) for each in node)
        if tables and at == len(names) - 1:
            raise ValueError(
                f"{name!r} is a list of {len(node)} tables; name one by its number, {name}.0 for the first"
            )
        if not (tables or isinstance(node, dict)):
            raise ValueError(f"{name!r} is not a table")
    assert isinstance(node, dict)
    return node


def _toml_value(raw: str) -> Any:
    try:
        # As the value of a key, so that numbers, lists and tables are read as TOML; a path or a name is not TOML.
        found = tomllib.loads(f"v = {raw}")
    except (ValueError, RecursionError):
        return raw
    # A text of several lines may be TOML as a whole, of which its first line alone would be the value.
    return found["v"] if len(found) == 1 else raw


def parse(table: Mapping[str, Any], *, base: Path | None = None) -> Config:
    """Builds and validates a Config. Files of users' code are relative to ``base`` (the recipe's folder)."""
    problems: list[str] = []
    table = dict(table)
    table["objective"] = _objective(table, problems)
    table |= _by_steps(table)
    config = _build(Config, table, "", problems)
    config = _anchored(config, base)
    # Keys that could not be read have their defaults here, so that validation still finds every other problem.
    # A setting that could not be read has its problem already; the default in its place must not add another.
    problems += [p for p in validate(config) if p.partition(":")[0] not in {q.partition(":")[0] for q in problems}]
    problems += _unwritable(dataclasses.asdict(config), "")
    if problems:
        raise ConfigError(problems, config=config)
    return config


def _objective(table: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The objective's table: a recipe has overrides flat beside ``preset``, ObjectiveConfig has them in ``args``."""
    given = table.get("objective", {})
    named = given.get("preset", "") if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping) or not isinstance(named, str):
        key = "objective.preset: expected a string" if isinstance(given, Mapping) else "objective: expected a table"
        # Of an Objective, which repr would show in several lines, the kind alone.
        got = repr(named) if isinstance(named, str | int | float | list) else f"an object of {type(named).__name__}"
        problems.append(
            f"{key}, got {got}; accepts preset = the name of a preset, or path/to/file.py:name for an objective of "
            "your own, and its settings beside it"
        )
        return {"preset": _usual_preset(table)}
    preset = given.get("preset", _usual_preset(table))
    return {"preset": preset, "args": {k: v for k, v in given.items() if k != "preset"}}


def _unwritable(value: Any, where: str) -> Iterator[str]:
    """Every value that config.toml could not hold, such as a date, or a path with bytes that are not UTF-8."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _unwritable(inner, f"{where}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _unwritable(inner, f"{where}[{i}]")
    elif not isinstance(value, (str, int, float)):
        yield (
            f"{where}: got {value!r:.200} ({type(value).__name__}), accepts strings, numbers, true, false, and lists "
            "and tables of them; write a date as a string"
        )
    elif isinstance(value, str) and not is_text(value):
        yield f"{where}: got {value!r}, which is not UTF-8 text; rename that file or folder"


def _tasks(table: Mapping[str, Any]) -> set[Any]:
    data = table.get("data")
    sets = data if isinstance(data, list | tuple) else [data]
    return {one.get("task") for one in sets if isinstance(one, Mapping)}


def _usual_preset(table: Mapping[str, Any]) -> str:
    """The objective of a recipe that names none: by what its data are."""
    usual = {"demonstrations": "sft", "rollouts": "rft", PAIRED: "dpo"}
    return next((usual[task] for task in usual if task in _tasks(table)), ObjectiveConfig().preset)


def _by_steps(table: Mapping[str, Any]) -> dict[str, Any]:
    """The ``[sft]`` table of demonstrations whose recipe gives steps and no epochs: steps count, not the one epoch that
    is the default."""
    own = table.get("sft", {})
    if "steps" in table and isinstance(own, Mapping) and "epochs" not in own and _tasks(table) & set(DEMONSTRATED):
        return {"sft": {**own, "epochs": 0}}
    return {}


def _anchored(config: Config, base: Path | None) -> Config:
    """Makes relative files of users' code absolute: they are relative to the recipe, whatever the working directory."""
    rewards = tuple(dataclasses.replace(reward, name=_anchor(reward.name, base)) for reward in config.rewards)
    own = config.environment
    tools = tuple(_anchor(tool, base) for tool in own.tools)
    environment = dataclasses.replace(own, name=anchored(own.name, base), tools=tools)
    objective = dataclasses.replace(config.objective, preset=_anchor(config.objective.preset, base))
    return dataclasses.replace(config, rewards=rewards, environment=environment, objective=objective)


def anchored(name: str, base: Path | None) -> str:
    """The name of a function in a file as a configuration has it, with an absolute path; other names as they are. A
    package's name may stand in front of the file, as in ``trl:file.py:Class``."""
    kind, colon, rest = name.partition(":")
    if colon and kind.isidentifier() and rest.rpartition(":")[0].endswith(".py"):
        return f"{kind}:{_anchor(rest, base)}"
    return _anchor(name, base)


def _anchor(name: str, base: Path | None) -> str:
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or "\0" in file:
        return name
    if Path(home := os.path.expanduser(file)).is_absolute():
        return f"{home}:{function}"
    # A file that is not beside the recipe is taken from the working directory.
    here = (base / file) if base is not None and (base / file).exists() else Path(file)
    return f"{here.resolve()}:{function}"


def build(cls: type[T], table: Mapping[str, Any], *, where: str) -> T:
    """Builds one dataclass from a table, as ``parse`` does: for the arguments of a task or reward, named ``where``."""
    problems: list[str] = []
    built = _build(cls, table, f"{where}." if where else "", problems)
    if problems:
        raise ConfigError(problems)
    return built


def _build(cls: type, table: Any, where: str, problems: list[str]) -> Any:
    """Builds one dataclass from one table. Appends what is wrong to ``problems``, and keeps that key's default."""
    if not isinstance(table, Mapping):
        problems.append(f"{where.rstrip('.')}: expected a table, got {table!r}")
        table = {}
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in table.items():
        if key not in fields:
            problems.append(f"{where}{key}: unknown key{_elsewhere(key, fields, value)}; accepts {', '.join(fields)}")
            continue
        before = len(problems)
        built = _coerce(hints[key], value, f"{where}{key}", problems)
        # A section is built even if some of its keys are wrong: each of those has its default.
        if len(problems) == before or any(map(dataclasses.is_dataclass, (hints[key], *typing.get_args(hints[key])))):
            values[key] = built
    for name in _required(cls):
        if name not in table:
            problems.append(f"{where}{name}: is required")
        # Stands in, so that the object can be made; the problem above keeps it from being used.
        values.setdefault(name, "")
    return cls(**values)


def _elsewhere(key: str, fields: Collection[str], value: Any) -> str:
    """Where a key may belong: to a name like it, to what TRL or verl call so, or to the top of a recipe, if it is a
    table such as [curriculum]."""
    if isinstance(value, Mapping) and key in {field.name for field in dataclasses.fields(Config)}:
        return f" (did you mean the table [{key}], beside the others?)"
    return in_a_recipe(key) or nearest(key, fields)


def _required(cls: type) -> list[str]:
    fields = dataclasses.fields(cls)
    return [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]


def _coerce(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Converts ``value`` to the annotated type without loss, or appends a problem."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, f"{where}.", problems)
    if origin is Literal:
        if value not in args:
            hint_text = nearest(str(value), args)
            problems.append(f"{where}: got {value!r}, accepts {', '.join(map(repr, args))}{hint_text}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            problems.append(f"{where}: expected a list, got {value!r}")
            return ()
        # Lists of TOML become tuples: a frozen configuration must not have parts that can change.
        return tuple(_coerce(args[0], v, f"{where}[{i}]", problems) for i, v in enumerate(value))
    if origin in (Mapping, dict) or getattr(origin, "__name__", "") == "Mapping":
        if not isinstance(value, Mapping):
            problems.append(f"{where}: expected a table, got {value!r}")
        return value
    if origin is types.UnionType:  # one table, or a list of tables
        one, several = args
        return _coerce(several if isinstance(value, (list, tuple)) else one, value, where, problems)
    return _coerce_plain(hint, value, where, problems)


def _coerce_plain(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Converts to int, float, str or bool. A bool is not a number here, although Python says so."""
    if hint is Any:
        return value
    value = _plain_number(value)
    a_bool_for_another = isinstance(value, bool) and hint is not bool
    if hint in (int, float) and isinstance(value, int | float) and (large := limits.problem(where, value)):
        problems.append(large)
    # 1 for 1.0: nothing is lost. The other way round would lose a fraction, and is refused.
    elif hint is float and isinstance(value, int) and not a_bool_for_another:
        return float(value)
    elif a_bool_for_another or not isinstance(value, hint):
        problems.append(f"{where}: expected {_NAMES.get(hint, hint)}, got {value!r} ({type(value).__name__})")
    return value


def _plain_number(value: Any) -> Any:
    """Numbers of other libraries, as numpy's, as Python's own; everything else as it is."""
    if isinstance(value, (bool, int)) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def to_table(config: Config) -> dict[str, Any]:
    """The whole configuration as nested plain values, with the objective's overrides flat as in a recipe. Without
    steps that no recipe gave and epochs are to make."""
    table = dataclasses.asdict(config)
    table["steps"] = int(config.steps)
    if isinstance(config.steps, Assumed) and config.demonstrates and config.sft.epochs:
        del table["steps"]  # whoever reads the table would take them for given
    table["objective"] = {"preset": config.objective.preset, **config.objective.args}
    return table


def dumps(config: Config) -> str:
    """The resolved configuration as TOML that ``load`` reads back to an equal Config."""
    return dump_table(to_table(config))
