"""``trew plan``: estimates what a run needs, without loading any weights."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import tyro


def plan(
    recipe: Annotated[Path, tyro.conf.Positional],
    /,
    *,
    set: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Estimate the memory and time that a recipe needs, by part, and what to change if it does not fit.

    Checks the recipe as `trew train --dry-run` does and loads no weights. Assumes prompts and completions of the
    maximum length. docs/memory.md gives the accuracy of memory estimates; times are rough. Exit code 1 if the run does
    not fit this machine.

    Args:
        recipe: The recipe, a TOML file; docs/configuration.md lists its keys.
        set: key=value, overrides the recipe: --set lora.rank=16 learner.microbatch_tokens=2048
        json: Print one JSON object: bytes and seconds.
    """
    from ..estimate import Machine, estimate, knobs, table
    from ..estimate.text import as_json
    from ..training import planning
    from ..utils.console import Display

    display = Display()
    made = planning.plan(planning.read(recipe, set), bar=None if json else display.bar)
    machine = Machine.of(made.device, adapters=made.config.lora.rank > 0)
    found = estimate(made.config, machine=machine, objective=made.objective, prompt=made.longest)
    turns = knobs(found)
    if json:
        print(json_.dumps(as_json(found, turns), indent=1))
    else:
        print("\n".join(table(found, turns)))
    return int(found.fits is False)
