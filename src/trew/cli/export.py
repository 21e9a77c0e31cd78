"""``trew export``: converts a recipe to another trainer's command, and a checkpoint to a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def verl(
    recipe: Annotated[str, tyro.conf.Positional],
    *,
    out: str = "",
    set: tuple[str, ...] = (),
    train_files: str = "train.parquet",
    val_files: str = "test.parquet",
) -> None:
    """Writes the verl command that is equivalent to a recipe, and lists what does not carry over.

    Args:
        recipe: The recipe (.toml).
        out: The shell script to write; empty = print it.
        set: key=value, changes to the recipe.
        train_files: The converted training rows.
        val_files: The converted evaluation rows.
    """
    from ..config import load
    from ..errors import ConfigError
    from ..integrations.verl.export import export

    script = export(load(recipe, set), files=(train_files, val_files), recipe=recipe, changes=set).script()
    if not out:
        print(script, end="")
        return
    if Path(out).exists():
        raise ConfigError(f"--out: {out} already exists; choose another name or remove it")
    Path(out).write_text(script)
    print(f"{out}: written; its comments say what does not carry over")


def model(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    out: Path,
    step: int | None = None,
    set: tuple[str, ...] = (),
) -> None:
    """Writes the model of a run's checkpoint in Hugging Face layout, as transformers and vLLM load it.

    Reads checkpoints of any number of ranks in one process, on the CPU. A run that is finished has its model in final/
    already; this is for a run that still trains or was stopped, and for an earlier checkpoint.

    Args:
        run: The folder of the run.
        out: The folder to write, which must not exist; with adapters, they are in its adapter/ and merged in the model.
        step: The step of the checkpoint; default: the newest complete one.
        set: key=value, changes to the run's recipe, such as model=FOLDER where the model has moved.
    """
    from ..config import load
    from ..errors import ConfigError
    from ..training.exporting import export_checkpoint
    from ..utils.console import Display

    problems = []
    if not (run / "config.toml").is_file():
        problems.append(f"RUN: got {run}, accepts the folder of a run, which holds config.toml and checkpoints")
    if out.exists():
        problems.append(f"--out: {out} already exists; choose another name or remove it")
    if problems:
        raise ConfigError(problems)
    done = export_checkpoint(load(run / "config.toml", set), run, out, step=step, notify=Display().warn)
    print(f"{out}: the model of step {done}")
