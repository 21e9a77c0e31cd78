"""``trew train``: runs a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from .. import runs
from ..config import Config
from ..errors import ConfigError
from ..runs import trackers


def train(
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
    """Train a model according to a recipe.

    Reports everything wrong with configuration, data and model before it loads a model (exit code 2).
    Ctrl-C finishes the step and saves; the same command with --resume continues.

    Args:
        recipe: The recipe, a TOML file; docs/configuration.md lists its keys.
        set: key=value, overrides the recipe: --set learner.lr=1e-5 rollout.prompts=16
        out: Run folder, overrides the recipe.
        dry_run: Check everything, show the resolved configuration and where it comes from, the objective's equation,
            three prompts as the model reads them, golds with their rewards, memory and time; write and train nothing.
        resume: Continue from the newest complete checkpoint of the run folder, with the settings that the run was
            started with; --set changes them.
        overwrite: Start over in a folder that already holds a run.
        allow_changes: With --resume, continue with changed settings or data that would change the results; shows every
            difference.
    """
    from ..training.continuing import continued, own_settings
    from ..training.planning import read

    own, notes = own_settings(recipe, out, set) if resume else None, []
    if own is not None:
        config, notes = continued(recipe, own, set, out=out)
    else:
        config = read(recipe, set)
    if out is not None:
        config = dataclasses.replace(config, out=str(out))
    if allow_changes and not resume:
        raise ConfigError("--allow-changes: has no effect without --resume; add --resume, or remove it")
    if dry_run:
        from . import dry_run as dry

        busy = [*runs.problems(config.out, resume=resume, overwrite=overwrite), *trackers.problems(config.track.to)]
        given = dry.origins(recipe, set, out=out is not None, own=own)
        dry.show(config, given=given, found=busy, resume=resume, allow_changes=allow_changes, edited=notes)
        return 0
    run(config, resume=resume, overwrite=overwrite, allow_changes=allow_changes, notes=notes)
    return 0


def run(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    notes: Sequence[str] = (),
) -> dict:
    """Prints ``notes``, trains, and prints where everything was written."""
    from ..training.start import train as train_
    from ..utils.console import Display

    display = Display()
    for note in notes:
        display.line(f"note: {note}")
    summary = train_(config, resume=resume, overwrite=overwrite, allow_changes=allow_changes, display=display)
    folder = Path(config.out)
    display.files(
        {
            "model": f"{folder / 'final'}   (AutoModelForCausalLM.from_pretrained loads it)",
            "report": str(folder / "report.html"),
            "figures": str(folder / "summary.json"),
            "every step": str(folder / "metrics.jsonl"),
            "every completion": f"{folder / 'rollouts'}/*.parquet",
        }
    )
    return summary
