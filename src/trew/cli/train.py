"""``trew train``: a run from a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from .. import track
from ..config import Config, dumps
from ..track import trackers


def train(
    recipe: Annotated[Path, tyro.conf.Positional],
    /,
    *,
    set: tuple[str, ...] = (),
    out: Path | None = None,
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
) -> int:
    """Train a model as a recipe says.

    Everything that is wrong with configuration, data and model is reported before a model is loaded (exit code 2).
    Ctrl-C finishes the step and saves; the same command with --resume continues.

    Args:
        recipe: The recipe, a TOML file; docs/configuration.md lists its keys.
        set: key=value, over what the recipe says: --set learner.lr=1e-5 rollout.prompts=16
        out: Run folder, over what the recipe says.
        dry_run: Check everything, show the resolved configuration, the objective and three prompts; do not train.
        resume: Continue from the newest complete checkpoint of the run folder.
        overwrite: Start over in a run folder that holds a run already.
    """
    from ..setup import read

    config = read(recipe, set)
    if out is not None:
        config = dataclasses.replace(config, out=str(out))
    if dry_run:
        show(config, found=track.problems(config.out, resume=resume, overwrite=overwrite))
        return 0
    run(config, resume=resume, overwrite=overwrite)
    return 0


def run(config: Config, *, resume: bool = False, overwrite: bool = False) -> dict:
    """Trains and says where everything was written."""
    from ..display import Display
    from ..loop import train as train_

    display = Display()
    summary = train_(config, resume=resume, overwrite=overwrite, display=display)
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


def show(config: Config, *, found: Sequence[str] = ()) -> None:
    """The dry run: what would be run, in full, after the same checks."""
    from .. import models, setup
    from ..display import Display
    from ..estimate import Machine, estimate, summary

    display = Display()
    plan = setup.plan(config, found=[*found, *trackers.problems(config.track.to)], bar=display.bar)
    display.line(dumps(plan.config).rstrip())
    display.line(f"\nobjective {plan.objective.name}\n{plan.objective.equation()}\n")
    for note in plan.notes:
        display.line(f"note: {note}")
    display.line(f"data: {len(plan.train)} training and {len(plan.eval)} held-out prompts")
    for prompt in plan.train[:3]:
        count = len(plan.renderer.encode(prompt))
        columns = ", ".join(f"{k} = {v!r}"[:80] for k, v in prompt.columns.items())
        display.line(f"\n--- prompt {prompt.uid}, {count} tokens; {columns}\n{plan.renderer.render(prompt)}")
    c = plan.config
    if models.is_here(c.model):
        needs = estimate(c, machine=Machine.of(plan.device), objective=plan.objective, prompt=plan.longest)
        display.line("\n" + "\n".join([*summary(needs), "         trew plan says more"]))
    display.line(
        f"\nplan: {c.steps} steps, each {c.rollout.prompts} prompts x {c.rollout.completions} completions of at most "
        f"{c.rollout.max_tokens} tokens; {c.optimizer_steps} optimizer steps; on {plan.device}. Nothing was trained."
    )
