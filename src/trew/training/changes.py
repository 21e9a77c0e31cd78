"""Decides under which settings a training may be continued, and whether it is complete already."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.free import FREE
from ..config.schema import Schedule
from ..config.stored import completed
from ..errors import ConfigError, ResumeError
from ..runs import RunFolder, read_config, redact_config
from ..runs.record import step_files
from ..utils.toml import flatten

FREE_IN_A_RUN = (*FREE, "steps", "sft.epochs")
"""The same for a single training, which may be given more steps; rounds must keep theirs."""


def unrecorded(schedule: Schedule, *, ahead: int = 0) -> tuple[str, ...]:
    """The settings whose changes need no record, since all steps are what they would have been. How many steps are
    planned decides a learning rate, unless that is constant, and what is generated ``ahead`` of its step."""
    return FREE_IN_A_RUN if schedule == "constant" and not ahead else FREE


def refuse_lost(run: RunFolder) -> None:
    """Raises ResumeError if a run has no checkpoint but has done so many steps that it must have had one."""
    if run.finished() is not None:
        raise ResumeError(
            f"{run.folder}: is a finished run without a checkpoint (checkpoint.every = 0), so that it cannot be "
            "continued; train on from its final/ as a new run's model, or begin anew with --overwrite"
        )
    every = int(flatten(settings(run.folder) or {}).get("checkpoint.every", 0))
    # By rows of metrics and by tables of rollouts and evaluations, whichever tell of more.
    steps = [*(row["step"] for row in run.rows()), *(int(path.stem) for _, path in step_files(run.folder))]
    done = max(steps, default=0)
    # Checkpoints are written in the background: the first may still have been unfinished when the second was due.
    if every and done > 2 * every:
        raise ResumeError(
            f"{run.checkpoints}: holds no checkpoint, but this run has done {done} steps and saved every {every}; it "
            "is not silently started over. Put a backup of one there, or begin anew with --overwrite"
        )


def complete(run: RunFolder, steps: int) -> dict[str, Any] | None:
    """The summary of a training that has done all its ``steps``; None if it has not."""
    summary = run.finished()
    if summary is None or summary.get("steps") != steps or not run.final.is_dir():
        return None
    return summary


def check_changes(folder: Path, given: str, *, free: Sequence[str], allow: bool = False) -> list[str]:
    """Lists every difference between a run's own settings and those ``given`` (TOML), one line each.

    Raises ConfigError with the differences that would make it another run, unless they are allowed or begin with one of
    ``free``. A setting that the run's version of trew did not have is no difference while it is at its default.
    """
    table = settings(folder)
    if table is None:
        return []
    # Both sides redacted: config.toml has masks where the given settings have secrets.
    stored, now = flatten(table), flatten(tomllib.loads(redact_config(given)))
    before = {key: value for key, value in completed(stored).items() if key in stored or key in now}
    lines = {
        key: f"{key}: the run was started with {before.get(key)!r}, now it is {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    }
    # By prefix: "track." frees all keys of that table.
    refused = [line for key, line in lines.items() if not key.startswith(tuple(free))]
    if refused and not allow:  # all at once, so that a user does not meet them one by one
        raise ConfigError(
            [
                *refused,
                f"{folder}: continue with the same settings, start a new run elsewhere (out), or go on with "
                "--allow-changes: it is another run from there on",
            ]
        )
    return list(lines.values())


def settings(folder: Path) -> dict[str, Any] | None:
    """The configuration stored in a run's folder, as a table; None if there is none."""
    try:
        text = read_config(folder)
        return None if text is None else tomllib.loads(text)
    except ValueError as error:  # not TOML, or not even UTF-8
        raise ResumeError(
            f"{folder / 'config.toml'}: cannot be read ({error}), so it is not known whether this run has the same "
            "settings; put a backup of it there, or remove it to go on with the settings given now"
        ) from None
