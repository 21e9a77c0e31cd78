"""``trew.train``: builds a run from a configuration and enters the loop."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import runs
from ..config import Config, apply_overrides, dumps, parse, to_table
from ..distributed import launch
from ..distributed.orders import Orders
from ..distributed.ranks import check_nodes, telling_of_lost_ranks
from ..errors import ConfigError
from ..runs import RunFolder, Trackers, notebook, trackers
from ..utils.console import Display
from ..utils.signals import Interrupts
from . import loop, planning, watch
from .alone import alone
from .build import build
from .changes import FREE_IN_A_RUN, check_changes, complete, unrecorded
from .follower import follow
from .planning import Plan
from .run import TrainingRun
from .summary import headline


def train(
    recipe: Config | Mapping[str, Any] | str | Path,
    /,
    *,
    set: Iterable[str] = (),
    on_row: Callable[[Mapping[str, Any]], object] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    display: Display | None = None,
    position: int = 0,
) -> dict[str, Any]:
    """Runs a training; returns the content of its summary.json.

        summary = trew.train("recipe.toml", set=["steps=20"], on_row=print)

    In a notebook, progress and curves appear below the cell. Raises ConfigError with every problem of configuration,
    data, rewards and model before a model is loaded. Interrupting the cell (Ctrl-C elsewhere) finishes the step, saves
    a checkpoint and raises Interrupted; with ``resume`` the same call continues.

    Args:
        recipe: The path of a TOML file, its content as a mapping (``{"model": ..., "data": {...}}``; files of rewards
            are relative to the current folder), or a :class:`Config`.
        set: ``key=value`` each, overrides the recipe: ``["learner.lr=1e-5", "rollout.prompts=16"]``.
        on_row: Called with each row of metrics.jsonl, of a step or of an evaluation (which has ``eval_accuracy``), once
            it is on disk. What it raises ends the run; ``resume`` continues after the newest checkpoint.
        resume: Continue from the newest complete checkpoint of the run folder, under other settings only with
            ``allow_changes``.
        overwrite: Start over in a folder that already holds a run.
        allow_changes: With ``resume``, accept settings and data that change the results.
        display: Shows the run; default: below the cell in a notebook, else on standard output.
            ``trew.utils.console.Silent()`` shows nothing.
        position: The number of prompts of the shuffled stream that a new run skips; 0 with a curriculum, which draws by
            pass rates too, and in a replay.

    One at a time in a process, and not inside ``torch.autocast``. The caller's default dtype and device, ``no_grad``
    and ``inference_mode`` are set aside meanwhile.

    Where a launcher started several ranks (``cluster.learner``), all of them call this. Rank 0 drives the run; on the
    others this returns an empty dictionary once it has ended, and raises LostRankError if another rank died.
    """
    config = launch.with_ranks(_config(recipe, set))
    display = display or notebook.display()
    place = launch.place_for(config)
    # The other ranks go by the configuration that rank 0 sends.
    if place is not None and place.rank:
        follow(place)
        return {}
    with contextlib.ExitStack() as ending:
        if on_row is not None:
            display.listeners.append(on_row)
            ending.callback(display.listeners.remove, on_row)  # a display may show several runs, one after the other
        orders = None if place is None else ending.enter_context(launch.leading(place))
        return lead(
            config, orders, resume=resume, overwrite=overwrite, allow_changes=allow_changes, display=display,
            position=position,
        )  # fmt: skip


def _config(recipe: Config | Mapping[str, Any] | str | Path, overrides: Iterable[str]) -> Config:
    """The configuration of a recipe in any of its forms, with a run folder."""
    overrides = [overrides] if isinstance(overrides, str) else [*overrides]
    if isinstance(recipe, (str, Path)):
        return planning.read(Path(recipe), overrides)
    if isinstance(recipe, Config):
        # Checked like a recipe: dataclasses.replace takes values of any type.
        table = to_table(recipe)
        config = planning.checked(lambda: parse(table, base=Path.cwd()))
        if not overrides:
            return config
        recipe = tomllib.loads(dumps(config))
    table = copy.deepcopy(dict(recipe))
    apply_overrides(table, overrides)
    if not table.get("out"):
        raise ConfigError("out: is missing, and a recipe without a file has no name to make one of; set out = 'runs/x'")
    return planning.checked(lambda: parse(table, base=Path.cwd()))


@alone()
def lead(
    config: Config,
    orders: Orders | None,
    *,
    resume: bool,
    overwrite: bool,
    allow_changes: bool,
    display: Display | None,
    position: int = 0,
) -> dict[str, Any]:
    """:func:`train` in a single process, or with ``orders`` on rank 0 of several."""
    display = display or Display()
    if orders is not None:
        check_nodes(orders.ranks.local_sizes, config.cluster.shard, how="the launcher started")
        launch.check_device(config, orders.ranks.device)
    busy = [
        *runs.problems(config.out, resume=resume, overwrite=overwrite, settings=to_table(config)),
        *trackers.problems(config.track.to),
        *_position_problems(config, position),
    ]
    # Problems with the folder are reported together with all others.
    plan = planning.plan(config, found=busy, bar=display.bar)
    if orders is not None:
        plan = dataclasses.replace(plan, device=str(orders.ranks.device))  # as on the others
    with (
        RunFolder.open(config.out, resume=resume, overwrite=overwrite) as folder,
        warnings.catch_warnings(),
        contextlib.ExitStack() as ending,
    ):
        # Warnings of libraries go through the display, which knows how to print beside a progress bar.
        warnings.showwarning = lambda message, *_, **__: display.warn(str(message))
        if orders is not None:
            launch.note_opened()
        # Before a model is loaded: settings that are refused cost nothing.
        if folder.resumed:
            given = dumps(plan.config)
            for change in check_changes(folder.folder, given, free=FREE_IN_A_RUN, allow=allow_changes):
                display.line(f"note: {change}")
            steps = plan.config.steps  # of demonstrations, those that the epochs make
            if (summary := complete(folder, steps)) is not None:
                display.line(f"note: {folder.folder} is already complete: {steps} of {steps} steps")
                watch.at_end(folder, display)
                return summary
        else:
            if resume:  # a mistyped name of a folder looks the same
                display.line(f"note: {folder.folder} holds no run to continue: this one starts at step 1")
            folder.write_config(dumps(plan.config))
        run = _start(plan, folder, display, ending, orders, allow_changes=allow_changes, position=position)
        # Before the writer sees the error: it does not wait for the files of a rank that died.
        with telling_of_lost_ranks(), run:
            return loop.train(run)


def _position_problems(config: Config, position: int) -> list[str]:
    """Why a run cannot begin at this place of its stream of prompts."""
    if position < 0:
        return [f"position: got {position}, accepts a whole number of at least 0"]
    if position and config.curriculum.share:
        why = f"with curriculum.share = {config.curriculum.share:g}, whose turns begin with the first prompts"
    elif position and config.rollout.replay:
        why = "with rollout.replay, which has the prompts of the recorded run"
    else:
        return []
    return [f"position: got {position}, accepts 0 {why}; leave it out"]


def _start(
    plan: Plan,
    folder: RunFolder,
    display: Display,
    ending: contextlib.ExitStack,
    orders: Orders | None,
    *,
    allow_changes: bool,
    position: int,
) -> TrainingRun:
    """Loads the model, assembles the run and restores the newest checkpoint of a resumed one; registers with ``ending``
    what must be closed however the run ends."""
    config = plan.config
    outside = Trackers(
        config.track.to, folder=folder.folder, config=to_table(config), warn=display.warn, tell=display.line
    )
    # They show how the run has ended.
    ending.push(lambda _kind, error, _trace: outside.close(error))
    ending.callback(plan.rewards.close)
    # Nothing is sampled for a step on rows of data: it is an update, which is always done to its end.
    grace = 0.0 if config.demonstrates else config.stop.grace_s
    interrupts = Interrupts(more=config.stop.signals, grace_s=grace)
    if orders is not None:
        # Before the model is loaded, so that all ranks load at the same time.
        sampler = dataclasses.asdict(plan.sampler)
        orders.give("start", config=to_table(config), sampler=sampler, objective=planning.objective_files(config))
    # Of this run alone: the next one in the same process may leave the number to torch.
    ending.callback(torch.set_num_threads, torch.get_num_threads())
    program = build(plan, folder, outside, display, interrupts, ending, orders)
    program.rollouts.position = position  # a resumed run overwrites it with the checkpoint's
    display.line(headline(program))
    for note in (*plan.notes, *folder.messages):
        display.line(f"note: {note}")
    if folder.resumed:
        accepted = program.restore(allow_changes=allow_changes)
        # Only now: a refused resume must leave the run's settings as they were.
        free = unrecorded(config.learner.schedule, ahead=config.rollout.stale_steps + config.cluster.staleness)
        folder.go_on_with(dumps(config), program.state.step, free=free, accepted=accepted)
        outside.catch_up(folder.rows())  # up to the checkpoint, since the folder was rewound
        program.memory.begin()
    for note in plan.notes:
        folder.event(f"note: {note}", once=True)
    # Also of a run that goes on: its servers have other weights, or none.
    program.team.publish()
    program.weights.publish(program.policy, program.engine)
    ending.enter_context(interrupts)  # from here on an interrupt has something to save; before, it just ends
    ending.enter_context(program.writer)
    return TrainingRun(program)
