"""``trew iterate``: trains policy and reward model in turns, from a recipe with an ``[iterate]`` table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def iterate(
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
    """Train a policy on a learned reward, and the reward model on the policy's completions, round after round.

    Each round sets the reference to the current policy, trains the policy, and continues training the reward model on
    pairs ranked by a verifier. Reports everything wrong before it loads a model (exit code 2).

    Args:
        recipe: A recipe of trew train with an [iterate] table; docs/reward-models.md lists its keys.
        set: key=value, overrides the recipe: --set iterate.rounds=2 steps=20
        out: The folder of all rounds, overrides the recipe.
        dry_run: Check everything and show the resolved recipe; train nothing.
        resume: Continue where the rounds stopped.
        overwrite: Start over in a folder that already holds rounds.
        allow_changes: With --resume, go on under settings or with data that would make it another run from there on;
            each difference is shown.
    """
    from ..errors import ConfigError
    from ..iterate import iterate as run
    from ..iterate import load_recipe
    from ..iterate.continuing import LAYOUT
    from ..iterate.rounds import check
    from ..iterate.settings import as_table, dumps
    from ..runs import problems
    from ..utils.console import Display

    if allow_changes and not resume:
        raise ConfigError("--allow-changes: is about a run that is continued; give --resume too, or leave it out")
    display = Display()
    config = load_recipe(recipe, set, out=out)
    if dry_run:
        own = as_table(config)
        busy = problems(config.policy.out, resume=resume, overwrite=overwrite, layout=LAYOUT, settings=own)
        _, name = check(config, found=busy)
        display.line(dumps(config).rstrip())
        r, c = config.rounds, config.policy
        display.line(
            f"\nplan: {r.rounds} rounds, each {c.steps} steps of the policy ({c.model}) on the learned reward, then "
            f"pairs of {r.prompts} fresh prompts, ranked by {name}, with {r.replay:.0%} of history. Nothing was "
            "trained."
        )
        return 0
    summary = run(config, resume=resume, overwrite=overwrite, allow_changes=allow_changes, display=display)
    folder = Path(config.policy.out)
    display.files(
        {
            "policy": summary["policy"],
            "reward model": summary["reward_model"],
            "report": str(folder / "report.html"),
            "figures": str(folder / "summary.json"),
            "every round": f"{folder / 'round-*'}",
        }
    )
    return 0
