"""``trew sft``: the training of a recipe whose data are demonstrations, or preference pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from ..config import DEMONSTRATED, read_table
from ..errors import ConfigError


def sft(
    recipe: Annotated[Path, tyro.conf.Positional],
    /,
    *,
    set: tuple[str, ...] = (),
    out: Path | None = None,
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
) -> int:
    """Fine-tune a model on demonstrations: rows that say what to answer, or completions that a reward accepted. Or on
    preference pairs, by DPO.

    Only answers are learned, from exactly the tokens that the policy would have to sample. Reports everything wrong
    with configuration, data and model before it loads a model (exit code 2). Ctrl-C finishes the step and saves; the
    same command with --resume continues. The trained model is in OUT/final: name it as the model of a recipe of trew
    train to go on with rewards.

    Args:
        recipe: The recipe, a TOML file with data.task = "demonstrations", "rollouts" or "pairs"; docs/sft.md shows
            some.
        set: key=value, overrides the recipe: --set learner.lr=1e-5 sft.epochs=2
        out: Run folder, overrides the recipe.
        dry_run: Check everything, show the resolved configuration, the tokens that are learned in some rows, memory
            and time; write and train nothing.
        resume: Continue from the newest complete checkpoint of the run folder, with the settings that the run was
            started with; --set changes them.
        overwrite: Start over in a folder that already holds a run.
        allow_changes: With --resume, continue with changed settings or data that would change the results; shows every
            difference.
    """
    from .train import train

    # Read before the recipe is checked as a whole, so that the message names the command for it.
    tasks = _tasks(read_table(recipe, set).get("data"))
    if not any(task in DEMONSTRATED for task in tasks):
        raise ConfigError(
            f"{recipe}: data.task is {' and '.join(map(repr, tasks))}, accepts {' or '.join(map(repr, DEMONSTRATED))}; "
            "other recipes are for trew train"
        )
    return train(
        recipe, set=set, out=out, dry_run=dry_run, resume=resume, overwrite=overwrite, allow_changes=allow_changes
    )


def _tasks(data: object) -> list[str]:
    """The tasks of a recipe's data sets; the default where one is not named."""
    sets = data if isinstance(data, list) else [data]
    return [str(one.get("task", "prompts")) if isinstance(one, dict) else "prompts" for one in sets]
