"""The JSON schema of recipes, for editors: completion, descriptions, defaults, and marks at what a run would refuse.

Everything comes from the code: keys, types, defaults and comments from the dataclasses of settings, ranges by asking
the rules (:func:`trew.config.validate`) about values near their ends, upper limits from ``config.limits``, settings of
objectives from the presets.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
import tokenize
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ..config import (
    ClusterConfig,
    Config,
    CurriculumConfig,
    DataConfig,
    EnvironmentConfig,
    LearnerConfig,
    LoraConfig,
    TeacherConfig,
    limits,
    validate,
)
from ..iterate.settings import Iterate, round_problems
from ..objective.options import Options
from ..objective.presets import PRESETS, kinds, settings
from .describe import OPTIONS

Schema = dict[str, Any]
Problems = typing.Callable[[str, Any], list[str]]
"""The rules' problems with one setting at another value; every other setting has its default."""

DRAFT = "http://json-schema.org/draft-07/schema#"  # the newest that TOML's editors read
_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string"}
_LEAST = (0, 1, 2, 4, 8, 16, 32, 64)


def recipe_schema() -> Schema:
    """The schema of recipes of ``trew train`` and ``trew iterate``."""
    root = _table(Config, "", _problems_of_config)
    # In place of the table's own: presets decide which settings there are.
    root["properties"]["objective"] = _objective()
    root["properties"]["iterate"] = _table(Iterate, "iterate.", _problems_of_rounds)
    about = "A recipe of trew: trew train recipe.toml, or trew iterate for one with an [iterate] table."
    return {"$schema": DRAFT, "title": "trew recipe", **root, "description": about}


# ---- tables


def _table(cls: type, where: str, problems: Problems) -> Schema:
    """The schema of a dataclass whose settings have names that begin with ``where``."""
    hints, comments = typing.get_type_hints(cls), field_comments(cls)
    found: Schema = {"type": "object", "additionalProperties": False, "properties": {}}
    # dataclass writes a signature where there is no docstring.
    if cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("):
        found["description"] = " ".join(inspect.cleandoc(cls.__doc__).replace("``", "`").split())
    for field in dataclasses.fields(cls):
        name = f"{where}{field.name}"
        value = _setting(hints[field.name], name, problems)
        if text := comments.get(field.name):
            value["description"] = text
        default = _default(field)
        if default is not None:
            value["default"] = default
        found["properties"][field.name] = value
    required = [f.name for f in dataclasses.fields(cls) if _is_required(f)]
    return found | ({"required": required} if required else {})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    """A field's default as JSON; None for tables and required keys."""
    if field.default is not dataclasses.MISSING:
        found = field.default
    elif field.default_factory is not dataclasses.MISSING:
        found = field.default_factory()
    else:
        return None
    if isinstance(found, tuple):
        return list(found)
    return found if isinstance(found, bool | int | float | str) else None


def _setting(hint: Any, name: str, problems: Problems) -> Schema:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _table(typing.cast(type, hint), f"{name}.", problems)
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": _setting(args[0], f"{name}[0]", problems)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_setting(each, name, problems) for each in args if each is not type(None)]}
    if origin is not None:  # a Mapping: the arguments of a task, a reward, an environment
        return {"type": "object"}
    found: Schema = {"type": _PLAIN[hint]} if hint in _PLAIN else {}
    return found | (_range(hint, name, problems) if hint in (int, float) else {})


# ---- ranges


def _range(kind: type, name: str, problems: Problems) -> Schema:
    """The range that the rules accept: what they say about values at and beside its ends."""

    def accepts(value: float) -> bool:
        # Of an integer's rule, only its own: a number that is too large is reported under its name.
        return not any(found.partition(":")[0] == name for found in problems(name, value))

    return (_whole if kind is int else _real)(accepts) | _largest(kind, name, accepts)


def _whole(accepts: typing.Callable[[int], bool]) -> Schema:
    if accepts(-1):
        return {}
    # The smallest value that passes, if the one below does not: else the rule is of another kind.
    least = next((n for n in _LEAST if accepts(n)), None)
    return {} if least is None or accepts(least - 1) else {"minimum": least}


def _real(accepts: typing.Callable[[float], bool]) -> Schema:
    found: Schema = {}
    # ---- the lower end
    if not accepts(-1.0) and accepts(0.5):
        at_least = [n for n in (0.0, 1.0, 2.0) if accepts(n) and not accepts(n - 0.5)]
        found |= {"minimum": at_least[0]} if at_least else {"exclusiveMinimum": 0} if accepts(1e-6) else {}
    elif not accepts(0.5) and accepts(2.0):
        found |= {"minimum": next(n for n in (1.0, 2.0) if accepts(n))}
    # ---- the upper end, where it is 1
    if not accepts(2.0) and accepts(0.5):
        found |= {"maximum": 1} if accepts(1.0) else {"exclusiveMaximum": 1}
    return found


def _largest(kind: type, name: str, accepts: typing.Callable[[float], bool]) -> Schema:
    plain = re.sub(r"\[\d+\]", "", name)
    most = limits.MOST.get(plain, limits.WHOLE if kind is int else limits.NUMBER)
    # Where 2 is refused the upper end is at 1, and _real has named it.
    return {} if kind is float and not accepts(2.0) and accepts(0.5) else {"maximum": kind(most)}


_BASES: dict[str, dict[str, Any]] = {
    "curriculum.": {"curriculum": CurriculumConfig(share=0.5, high=1.0)},
    "environment.": {"environment": EnvironmentConfig(name="guess")},
    "lora.": {"lora": LoraConfig(rank=8)},
    "learner.reference_mix": {"learner": LearnerConfig(reference_every=1)},
    "sft.": {"data": DataConfig(task="demonstrations")},
    "teacher.": {"teacher": TeacherConfig(endpoint="http://m:8000")},
    "cluster.request_timeout_s": {"cluster": ClusterConfig(rollout="vllm", servers=1)},
    "cluster.sync_timeout_s": {"cluster": ClusterConfig(rollout="vllm", servers=1)},
}
"""Settings without which those of such names may only have their defaults."""


def _problems_of_config(name: str, value: Any) -> list[str]:
    base = next((more for start, more in _BASES.items() if name.startswith(start)), {})
    return validate(_replaced(dataclasses.replace(Config(model="m"), **base), name.split("."), value))


def _problems_of_rounds(name: str, value: Any) -> list[str]:
    rounds = _replaced(Iterate(), name.removeprefix("iterate.").split("."), value)
    return round_problems(rounds) + limits.problems(rounds, "iterate.")


def _replaced(owner: Any, path: list[str], value: Any) -> Any:
    """A copy of nested dataclasses with one setting changed; a list of tables (rewards[0]) gets one that has it."""
    name, listed, _ = path[0].partition("[")
    if listed:
        hint = typing.get_type_hints(type(owner))[name]
        # DataConfig | tuple[SetConfig, ...]: the member that is a list of tables.
        several = next(h for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is tuple)
        kind = typing.get_args(several)[0]
        new: Any = (_replaced(kind(), path[1:], value),)
    else:
        new = value if len(path) == 1 else _replaced(getattr(owner, name), path[1:], value)
    return dataclasses.replace(owner, **{name: new})


# ---- objectives


def _objective() -> Schema:
    """A preset with its own settings and the options that all of them take: other names are refused by preset."""
    common = [f.name for f in dataclasses.fields(Options)]
    hints = typing.get_type_hints(Options)
    own_file = {"type": "string", "pattern": r"\.py:\w+$"}  # its settings are those of the function there
    about_name = "trew explain NAME says more; path/to/file.py:name for an objective of your own"
    every: Schema = {
        "preset": {"anyOf": [{"enum": list(PRESETS)}, own_file], "default": "grpo", "description": about_name}
    }
    # ---- settings of any preset, as one list: editors complete from it. A file's own may have the same names and other
    # types, so that only the rules below say which type a preset's have.
    for name in common:
        kind = next(k for k in (*typing.get_args(hints[name]), hints[name]) if k in _PLAIN)
        every[name] = {"type": _PLAIN[kind], "description": OPTIONS.get(name, "")}
    # ---- per preset: which of them it takes, and its defaults
    rules = []
    for preset in PRESETS:
        own, types = settings(preset), {name: _PLAIN[kind] for name, kind in kinds(preset).items()}
        for name in types:
            every.setdefault(name, {})
        # A preset's own setting may be of another type than another preset's of the same name.
        given = {
            name: {"type": types[name]} | ({} if default is None else {"default": default})
            for name, default in own.items()
        }
        names = {"preset", *own, *common}
        # Without a preset the recipe means grpo, and its rule applies.
        needed: Schema = {} if preset == "grpo" else {"required": ["preset"]}  # grpo is the default
        rules.append({
            "if": {"properties": {"preset": {"const": preset}}, **needed},
            "then": {"properties": given, "propertyNames": {"enum": sorted(names)}},
        })  # fmt: skip
    about = "The algorithm: a preset by name; every other key is a setting of that preset."
    return {"type": "object", "description": about, "properties": {k: _untyped(k, v, rules) for k, v in every.items()},
            "allOf": rules}  # fmt: skip


def _untyped(name: str, value: Schema, rules: list[Schema]) -> Schema:
    """The schema of a setting without its type where presets give it different ones."""
    kinds = {rule["then"]["properties"][name]["type"] for rule in rules if name in rule["then"]["properties"]}
    return (
        value if len(kinds | {value.get("type")}) < 2 or not kinds else {k: v for k, v in value.items() if k != "type"}
    )


# ---- comments


def field_comments(cls: type) -> Mapping[str, str]:
    """The comment of each field in a dataclass's source: behind it, or in the lines right above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in _lines(inspect.getsource(cls)):
        code, comment = line
        # Fields are indented by four blanks; what is in methods is deeper.
        field = re.match(r"    (\w+): ", code)
        if field:
            text = " ".join([*above, comment]).strip()
            if text:
                found[field[1]] = text
            above = []
        elif not code.strip() and comment:
            above.append(comment)
        else:
            above = []
    return found


def _lines(source: str) -> list[tuple[str, str]]:
    """(code, comment) of each line; a number sign inside a string is no comment."""
    lines = source.splitlines()
    found = [(line, "") for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            found[row - 1] = (lines[row - 1][:column], token.string.lstrip("# ").strip())
    return found
