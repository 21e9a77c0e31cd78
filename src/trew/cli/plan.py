"""``trew plan``: what a run needs, before anything of it is loaded."""

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
    """Say what memory and time a recipe needs, by part, and what to turn if it does not fit.

    Checks the recipe as `trew train --dry-run` does and loads no weights. For prompts and completions that are all as
    long as they may be. docs/memory.md says how near memory comes; time is a rough figure. Exit code 1 where it does
    not fit this machine.

    Args:
        recipe: The recipe, a TOML file; docs/configuration.md lists its keys.
        set: key=value, over what the recipe says: --set lora.rank=16 learner.microbatch_tokens=2048
        json: Print one JSON object: bytes and seconds.
    """
    from ..estimate import Machine, estimate, knobs, table
    from ..estimate.text import as_json
    from ..training import planning
    from ..utils.console import Display

    display = Display()
    made = planning.plan(planning.read(recipe, set), bar=None if json else display.bar)
    found = estimate(made.config, machine=Machine.of(made.device), objective=made.objective, prompt=made.longest)
    turns = knobs(found)
    if json:
        print(json_.dumps(as_json(found, turns), indent=1))
    else:
        print("\n".join(table(found, turns)))
    return int(found.fits is False)
