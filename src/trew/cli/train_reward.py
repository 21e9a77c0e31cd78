"""``trew train-reward``: trains a reward model on preference pairs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro


def train_reward(
    recipe: Annotated[Path | None, tyro.conf.Positional] = None,
    /,
    *,
    model: str = "",
    pairs: str = "",
    runs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FOLDER")] = (),
    reward: str = "",
    out: Path | None = None,
    set: tuple[str, ...] = (),
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
) -> int:
    """Train a reward model on preference pairs, with the loss of Bradley and Terry.

    The pairs come from a file, or from the rollouts of a run whose completions a verifier has judged. Reports
    everything wrong with settings, data and model before it loads a model (exit code 2). Writes the trained model to
    OUT/final; use it as a reward in a recipe with model = "OUT/final" in a [[rewards]] table.

    Args:
        recipe: A TOML file with these settings and all others; docs/reward-models.md lists its keys. Flags override it.
        model: A causal language model, or a reward model to train on: a folder or hub id.
        pairs: A .jsonl, .json or .parquet file with the columns prompt, chosen, rejected.
        runs: A run folder of trew train to make pairs from; may be given several times.
        reward: The reward of those runs that ranks their completions; default: their total.
        out: Run folder.
        set: key=value, overrides the recipe: --set learner.lr=1e-5 epochs=2
        dry_run: Check everything, show the resolved settings, the number of pairs and one pair; do not train.
        resume: Continue from the newest complete checkpoint of the run folder.
        overwrite: Start over in a folder that already holds a run.
        allow_changes: With --resume, go on under settings or with data that would make it another training from there
            on; each difference is shown.
    """
    from ..errors import ConfigError
    from ..reward_training import load_settings
    from ..reward_training import train_reward as train
    from ..runs import problems

    flags: dict[str, Any] = {"model": model, "data.pairs": pairs, "data.runs": list(runs), "data.reward": reward}
    # Empty ones were not given, and leave the recipe's.
    flags = {key: value for key, value in flags.items() if value}
    if out is not None:
        flags["out"] = str(out)
    if allow_changes and not resume:
        raise ConfigError("--allow-changes: is about a run that is continued; give --resume too, or leave it out")
    settings = load_settings(recipe, set, flags=flags)
    if dry_run:
        own = dataclasses.asdict(settings)
        show(settings, found=problems(settings.out, resume=resume, overwrite=overwrite, settings=own))
        return 0
    from ..utils.console import Display

    display = Display()
    train(settings, resume=resume, overwrite=overwrite, allow_changes=allow_changes, display=display)
    folder = Path(settings.out)
    display.files(
        {
            "model": f"{folder / 'final'}   (AutoModelForSequenceClassification.from_pretrained loads it)",
            "in a recipe": f'model = "{folder / "final"}"   (in a table [[rewards]] of its own)',
            "figures": str(folder / "summary.json"),
            "every step": str(folder / "metrics.jsonl"),
        }
    )
    return 0


def show(settings: Any, *, found: list[str]) -> None:
    """The dry run: makes the same checks and prints what would be trained on what."""
    from ..reward_training.planning import plan
    from ..reward_training.settings import dumps
    from ..utils.console import Display

    display = Display()
    ready = plan(settings, found=found)
    display.line(dumps(settings).rstrip())
    for note in ready.notes:
        display.line(f"note: {note}")
    longest = max(max(len(p.chosen), len(p.rejected)) for p in [*ready.train, *ready.held])
    display.line(f"\n--- a chosen text as the model reads it\n{ready.example}")
    display.line(
        f"\nplan: {len(ready.train)} training and {len(ready.held)} held-out pairs, of at most {longest} tokens each; "
        f"{ready.steps} steps of {settings.learner.batch} pairs on {ready.device}. Nothing was trained."
    )
