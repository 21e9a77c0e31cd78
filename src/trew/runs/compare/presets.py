"""What differs between presets although no recipe names it: each preset brings the KL term and limits of its paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError
from ...utils.user_files import is_file_spec
from .groups import RunGroup, shown


def default_differences(groups: Sequence[RunGroup]) -> list[str]:
    """One line for each of these that is not the same in all groups: the KL term's beta, dynamic sampling, the clip's
    ends. Nothing if all groups have the same preset.
    """
    named = {str(g.members[0].settings["objective.preset"]) for g in groups}
    if len(named) < 2:
        return []
    values = {g.name: _resolved(g) for g in groups}
    lines = []
    for key in ("beta", "dynamic_sampling", "eps_low", "eps_high"):
        known = {name: found[key] for name, found in values.items() if found.get(key) is not None}
        if len(set(known.values())) > 1:
            told = ", ".join(f"{shown(value)} in {name}" for name, value in known.items())
            lines.append(f"the presets differ in more than their method: objective.{key} is {told}")
    return lines


def _resolved(group: RunGroup) -> dict[str, Any]:
    """These settings of a group's objective, named in its recipe or not; empty for a preset of another version. Of an
    objective in a user's file those that the recipe names: to compare runs, nobody's code is run."""
    from ...objective.presets import preset

    given = {k.partition(".")[2]: v for k, v in group.members[0].settings.items() if k.startswith("objective.")}
    if is_file_spec(str(given["preset"])):
        return given
    try:
        # Also resolves overrides, so that the numbers are those that were trained with.
        objective = preset(str(given.pop("preset")), **given)
    except ConfigError:
        return {}
    return {
        # The options of these names: a pull towards the sampler is part of the method, and a filter that replaces
        # nothing is no dynamic sampling.
        "beta": objective.beta,
        "dynamic_sampling": objective.dynamic_sampling,
        "eps_low": getattr(objective.weight, "eps_low", None),
        "eps_high": getattr(objective.weight, "eps_high", None),
    }
