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
    train_files: str = "",
    val_files: str = "",
) -> None:
    """Writes the verl command that is equivalent to a recipe, and lists what does not carry over.

    Args:
        recipe: The recipe (.toml).
        out: The shell script to write; empty = print it.
        set: key=value, changes to the recipe.
        train_files: The converted training rows; empty = RECIPE-train.parquet.
        val_files: The converted evaluation rows; empty = RECIPE-test.parquet.
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
    Path(out).write_text(script, encoding="utf-8")
    print(f"{out}: written; its comments say what does not carry over")


def model(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    out: Path,
    step: int | None = None,
    set: tuple[str, ...] = (),
    license: str = "",
    push: str = "",
    public: bool = False,
) -> None:
    """Writes the model of a run in Hugging Face layout, as transformers and vLLM load it, with a model card.

    The model of a finished run, or of a checkpoint, which any number of ranks may have written. The card (README.md)
    says what it was made from and how: figures before and after, objective, recipe, versions, licence.

    Args:
        run: The folder of the run.
        out: The folder to write, which must not exist; with adapters, they are in its adapter/ and merged in the model.
        step: The step of a checkpoint; default: the final model, or the newest complete checkpoint.
        set: key=value, changes to the run's recipe, such as model=FOLDER where the model has moved.
        license: The model's licence, such as apache-2.0; default: what the base model's card says.
        push: Also upload the folder to the Hugging Face hub as this model: NAME or OWNER/NAME.
        public: Everybody may read it there; without this, only you.
    """
    from ..config import load
    from ..errors import ConfigError, Problems
    from ..models import loading
    from ..training.exporting import export_checkpoint, export_final, finished, recipe_at
    from ..utils.console import Display
    from . import model_card, pushing
    from .run_folders import refuse_no_policy

    # ---- what can be refused before the export
    problems = Problems()
    if not (run / "config.toml").is_file():
        problems.append(f"RUN: got {run}, accepts the folder of a run, which holds config.toml and checkpoints")
    if out.exists():
        problems.append(f"--out: {out} already exists; choose another name or remove it")
    if public and not push:
        problems.append("--public: is for --push, which names the model on the hub")
    problems.attempt(lambda: refuse_no_policy(run))
    problems.attempt(lambda: model_card.check_license(license))
    if problems:
        raise ConfigError(problems)
    # Asks the hub now: the export may take minutes.
    if push:
        pushing.check(push, public=public)
    # ---- the folder, with its card
    config, display = load(run / "config.toml", set), Display()

    def with_card(folder: Path, step: int) -> None:
        then = recipe_at(run, step, set) or config
        base = loading.folder(then.model)
        title = push.rpartition("/")[2] or out.absolute().name
        text = model_card.card(then, run, step, name=title, base_folder=base, license=license)
        (folder / "README.md").write_text(text, encoding="utf-8")

    # With --set the recipe differs from what made the final model, so a checkpoint is exported.
    if step is None and not set and (done := finished(run)) is not None:
        export_final(run, out, extra_files=lambda folder: with_card(folder, done))
    else:
        done = export_checkpoint(config, run, out, step=step, notify=display.warn, extra_files=with_card)
    print(f"{out}: the model of step {done}")
    # ---- the upload, of a folder that is complete
    if push:
        message = f"Step {done} of a run of trew"
        print(f"uploaded: {pushing.push(out, push, public=public, message=message, say=display.line)}")
