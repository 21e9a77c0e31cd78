"""The settings of a resumed run: its own, overridden by the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import Config, apply_overrides, parse, read_table
from ..config.recipe import anchored
from ..errors import ConfigError
from ..runs.layout import has_run
from ..utils.secrets import MASK
from ..utils.toml import flatten
from .changes import settings


def own_settings(recipe: Path, out: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any] | None:
    """The settings of the run that ``--resume`` would continue, as a table; None if there is no run yet."""
    given = str(out) if out is not None else read_table(recipe, overrides)["out"]
    return settings(Path(given)) if isinstance(given, str) and given and has_run(Path(given)) else None


def continued(
    recipe: Path, own: Mapping[str, Any], overrides: Sequence[str], *, out: Path | None
) -> tuple[Config, list[str]]:
    """The configuration of a run resumed from the settings ``own``, and a line for each key that differs in the recipe.

    Edits of the recipe do not change a run that has begun; the lines keep the user from believing that they did.

    Values that are masked in the run's config.toml (secrets) are taken from the recipe."""
    given = read_table(recipe, overrides)
    table = _unmasked(own, given)
    apply_overrides(table, overrides)
    table["out"] = str(out) if out is not None else given["out"]
    asked = flatten(given)
    if masked := [k for k, v in flatten(table).items() if isinstance(v, str) and MASK in v and asked.get(k) != v]:
        raise ConfigError([f"{key}: is masked in the run's config.toml; give it again with --set" for key in masked])
    config = parse(table, base=recipe.parent)
    if config.demonstrates and config.sft.epochs and "steps" not in _named(overrides):
        # Its steps were made from its epochs, and are made anew: the epochs may have changed.
        config = parse({key: value for key, value in table.items() if key != "steps"}, base=recipe.parent)
    return config, list(_edited(recipe, own, overrides))


def _named(overrides: Sequence[str]) -> list[str]:
    """The keys of overrides, key=value."""
    return [text.partition("=")[0].strip() for text in overrides]


def _unmasked(own: Any, given: Any) -> Any:
    """``own`` with masked values replaced by those of ``given``, where it has them."""
    if isinstance(own, Mapping):
        return {k: _unmasked(v, given.get(k) if isinstance(given, Mapping) else None) for k, v in own.items()}
    if isinstance(own, list):
        return [
            _unmasked(v, given[i] if isinstance(given, list) and i < len(given) else None) for i, v in enumerate(own)
        ]
    return given if isinstance(own, str) and MASK in own and given is not None else own


def _edited(recipe: Path, own: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """A line for each key of the recipe that differs from the run's own settings and is not overridden."""
    # A key counts as given again if an override names it or a table above it.
    before, over = flatten(dict(own)), _named(overrides)
    for key, value in flatten(read_table(recipe)).items():
        mine = before.get(key)
        again = any(f"{key}.".startswith(f"{name}.") for name in over)
        masked = isinstance(mine, str) and MASK in mine
        # Not an edit: the folder, what an override says anyway, secrets, and what is equal or empty.
        if key == "out" or again or masked or value in (mine, {}) or _same_file(key, value, mine, recipe.parent):
            continue
        yield (
            f"{key}: the recipe says {value!r} now, and the run goes on with {mine!r}, as it was started; "
            f"--set {key}=... would change it"
        )


def _same_file(key: str, value: Any, mine: Any, base: Path) -> bool:
    """Whether the files of users' code in the recipe are those that the run has stored, where relative paths are
    absolute."""
    if not key.startswith(("rewards.", "environment.", "objective.preset")):
        return False
    if isinstance(value, list) and isinstance(mine, list):  # environment.tools
        same = (one == other or _same_file(key, one, other, base) for one, other in zip(value, mine, strict=False))
        return len(value) == len(mine) and all(same)
    # From the recipe's folder, or from the working directory: a file may have come to lie there since.
    return isinstance(value, str) and mine in (anchored(value, base), anchored(value, None))
