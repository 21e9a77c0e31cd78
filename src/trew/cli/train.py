"""``trew train``: runs a recipe."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import tyro

from .. import runs
from ..config import ClusterConfig, Config, to_table
from ..config.cluster import OF_SERVERS
from ..errors import ConfigError, TrewError
from ..runs import trackers
from ..utils.signals import Interrupted
from ..utils.toml import toml_value

if TYPE_CHECKING:
    from ..distributed import Place
    from ..distributed.orders import Orders


class Read(Protocol):
    """:func:`_read` for one recipe."""

    def __call__(self, *, resume: bool) -> tuple[Config, dict[str, Any] | None, list[str]]: ...


def train(
    recipe: Annotated[Path | None, tyro.conf.Positional] = None,
    /,
    *,
    set: tuple[str, ...] = (),
    out: Path | None = None,
    replay: Path | None = None,
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
) -> int:
    """Train a model according to a recipe.

    Reports everything wrong with configuration, data and model before it loads a model (exit code 2).
    Ctrl-C finishes the step and saves; the same command with --resume continues.

    Args:
        recipe: The recipe, a TOML file; docs/configuration.md lists its keys. With --replay it may be left out.
        set: key=value, overrides the recipe: --set learner.lr=1e-5 rollout.prompts=16
        out: Run folder, overrides the recipe.
        replay: Folder of an earlier run: train on its recorded rollouts and generate none, in one process or on ranks,
            with the settings of that run unless a recipe is given. Two replays are equal to the bit. Writes to
            FOLDER-replay unless --out or the recipe names another folder.
        dry_run: Check everything, show the resolved configuration and where it comes from, the objective's equation,
            three prompts as the model reads them, golds with their rewards, memory and time; write and train nothing.
        resume: Continue from the newest complete checkpoint of the run folder, with the settings that the run was
            started with; --set changes them.
        overwrite: Start over in a folder that already holds a run.
        allow_changes: With --resume, continue with changed settings or data that would change the results; shows every
            difference.
    """
    from ..distributed import here, launch

    if allow_changes and not resume:
        raise ConfigError("--allow-changes: has no effect without --resume; add --resume, or remove it")
    # ---- what is trained, and by which settings
    asked: dict[str, str] = {}
    if replay is not None:
        recipe, out = _replayed(replay, recipe, out, resume=resume)
        asked = replay_settings(replay)
    if recipe is None:
        raise ConfigError("RECIPE: is missing; give a recipe (a TOML file), or --replay with the folder of a run")
    # In front: --set on the command line wins over --replay.
    set = (*(f"{key}={value}" for key, value in asked.items()), *set)
    read = partial(_read, recipe, set, out)
    # ---- this process: one of several ranks, a dry run, the one that starts ranks, or the run itself
    place = here()
    if place is not None and (place.size > 1 or launch.launched()) and not dry_run:
        return _as_rank(place, read, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
    config, own, notes = read(resume=resume)
    if dry_run:
        from . import dry_run as dry

        # Problems of the folder and of trackers go in with the others, to be reported together.
        busy = runs.problems(config.out, resume=resume, overwrite=overwrite, settings=to_table(config))
        busy += trackers.problems(config.track.to)
        given = dry.origins(recipe, set, out=out is not None, own=own) | dict.fromkeys(asked, "--replay")
        dry.show(config, given=given, found=busy, resume=resume, allow_changes=allow_changes, edited=notes)
    elif how := launch.launcher(config):
        from ..distributed import ray_launch
        from .main import tell

        start = ray_launch.launch if how == "ray" else launch.launch
        return start(config, sys.argv[1:], tell)
    else:
        run(config, resume=resume, overwrite=overwrite, allow_changes=allow_changes, notes=notes)
    return 0


def _replayed(run: Path, recipe: Path | None, out: Path | None, *, resume: bool) -> tuple[Path, Path | None]:
    """The recipe and the folder of a replay: by default those settings that the recorded run stored with it, or a
    replay that is resumed."""
    if recipe is not None:
        return recipe, out
    # Of "." and "..", beside the folder that they stand for: .-replay would be a hidden folder inside it.
    named = run if run.name not in ("", "..") else run.resolve()
    out = out or Path(f"{named}-replay")
    if not run.is_dir():
        raise ConfigError(f"--replay: {run} is not a folder; give the folder of a run of trew train")
    own = out / "config.toml"
    # A replay that is resumed goes on under its own settings.
    return own if resume and own.exists() else run / "config.toml", out


def replay_settings(run: Path) -> dict[str, str]:
    """The settings of a replay of ``run``, as values of TOML: without servers, since only evaluations generate."""
    defaults = ClusterConfig()
    servers = {f"cluster.{key}": toml_value(getattr(defaults, key)) for key in ("rollout", "in_flight", *OF_SERVERS)}
    return {"rollout.replay": toml_value(str(run.resolve())), **servers}


def _read(
    recipe: Path, set: tuple[str, ...], out: Path | None, *, resume: bool
) -> tuple[Config, dict[str, Any] | None, list[str]]:
    """The configuration; with ``resume``, the run's own settings and notes on how the recipe differs from them."""
    from ..distributed import launch
    from ..training.continuing import continued, own_settings
    from ..training.planning import read

    own, notes = own_settings(recipe, out, set) if resume else None, []
    if own is not None:
        config, notes = continued(recipe, own, set, out=out)
    else:
        config = read(recipe, set)
    if out is not None:
        config = dataclasses.replace(config, out=str(out))
    return launch.with_ranks(config), own, notes


def _as_rank(place: Place, read: Read, *, resume: bool, overwrite: bool, allow_changes: bool) -> int:
    """This process's part in a run of several ranks, which torchrun or Ray Train has started."""
    from ..distributed import launch
    from ..rewards.isolation.lifelines import die_with_parent

    if launch.over():
        return 0  # the agent restarted this rank although the run had decided to end
    die_with_parent()  # of the agent, or on Ray the guardian: a rank never outlives what started it
    if place.rank:
        from ..training.follower import follow

        follow(place)
        return 0
    # After a rank of this run died: resume from the newest checkpoint, whatever flags began the run.
    again = launch.restarted()
    try:
        with launch.leading(place) as orders:
            config, _, notes = read(resume=resume or again)
            launch.place_for(config)
            run(
                config, resume=resume or again, overwrite=overwrite and not again, allow_changes=allow_changes,
                notes=notes, orders=orders,
            )  # fmt: skip
    except (TrewError, Interrupted) as error:
        if not launch.launched() or not launch.decided(error):
            raise
        from .main import tell

        tell(error)  # and exit with 0: the agent takes any other code for a crash, and restarts the ranks
    return 0


def run(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    notes: Sequence[str] = (),
    orders: Orders | None = None,
) -> dict:
    """Prints ``notes``, trains (with ``orders`` as rank 0 of several), and prints where everything was written."""
    from ..training.start import lead
    from ..utils.console import Display

    display = Display()
    for note in notes:
        display.line(f"note: {note}")
    summary = lead(
        config, orders, resume=resume, overwrite=overwrite, allow_changes=allow_changes, display=display
    )  # fmt: skip
    folder = Path(config.out)
    display.files(
        {
            "model": f"{folder / 'final'}   (AutoModelForCausalLM.from_pretrained loads it)",
            "report": str(folder / "report.html"),
            "figures": str(folder / "summary.json"),
            "every step": str(folder / "metrics.jsonl"),
            "every completion": f"{folder / 'rollouts'}/*.parquet   (trew view {shlex.quote(str(folder))} shows them)",
        }
    )
    return summary
