"""``trew export``: converts a recipe to another trainer's command."""

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
