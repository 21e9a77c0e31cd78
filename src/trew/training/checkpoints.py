"""A run saved and continued: what a checkpoint holds, when it may be continued, and under which settings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config import Config, choices, dumps, to_table
from ..diagnostics.health import Health
from ..errors import CheckpointError, ConfigError, ResumeError
from ..models import loading
from ..runs import RunFolder, checkpoint_files, read_config, redact, redact_config
from ..runs.record import step_files
from ..utils.signals import Interrupted
from . import remembered
from .parts import Parts

MODEL, ADAPTERS = "model.", "adapter_model."
"""How the names of trained tensors begin in a checkpoint: which file they are in."""

FREE = (
    "steps",
    "out",
    "device",
    "threads",
    "rollout.batch",
    "rollout.overlap",
    "stop.",
    "learner.microbatch_tokens",
    "learner.bad_steps",
    "eval.every",
    "checkpoint.",
    "track.",
    "health.",
)
"""Keys that may differ between a run's beginning and its continuation: they do not change what is learned, or only from
there on."""


def save(parts: Parts, run: RunFolder) -> None:
    """Begins one complete checkpoint: weights, optimizer, and everything that the run must remember. Does nothing where
    this step has one."""
    state = parts.state
    if state.saved == state.step:
        return
    state.saved = state.step
    tensors, learner = parts.policy.state()
    beside = functools.partial(loading.save_config, parts.model)
    if parts.adapters is not None:
        tensors = {_for_peft(name): tensor for name, tensor in tensors.items()}
        beside = parts.adapters.save_config
    meta = {
        "learner": learner, "state": dataclasses.asdict(state), "data": parts.plan.fingerprint,
        "remembered": {name: part.state() for name, part in parts.stateful.items()},
        "record": dataclasses.asdict(run.ledger.record()),
    }  # fmt: skip
    meta = redact(meta, keep=choices())  # a warning that waits may quote a completion
    parts.writer.save(
        run.checkpoints, state.step, tensors, meta, keep=parts.config.checkpoint.keep + state.bad_steps,
        best=state.best_step if parts.config.checkpoint.best else None, beside=beside,
    )  # fmt: skip


@contextlib.contextmanager
def rollback_on_interrupt(parts: Parts, run: RunFolder) -> Iterator[None]:
    """What an interrupt ends inside is as if it had never begun: the run is as before, and saved so."""
    before = dataclasses.replace(parts.state), {name: part.state() for name, part in parts.stateful.items()}
    try:
        yield
    except Interrupted:
        parts.state, states = before
        for name, part in parts.stateful.items():
            part.load_state(states[name])
        if parts.state.step:
            save(parts, run)
            parts.writer.finish()
        raise


def restore(parts: Parts, run: RunFolder, *, allow_changes: bool = False) -> None:
    """Continues from the newest complete checkpoint; a run that was stopped before its first one starts at step 1, and
    says so. Raises ResumeError where that would lose what was done, or where the checkpoint is of something else;
    ConfigError where it is past the last step."""
    loaded, messages = checkpoint_files.load_latest(run.checkpoints)
    for message in messages:
        parts.display.warn(message)
    if loaded is None:
        _refuse_lost(run)
        parts.display.line(f"note: {run.folder} has no checkpoint yet; starting at step 1")
        run.rewind(-1)
        return
    step, tensors, meta = loaded
    found = remembered.read(meta, step, run.checkpoints)
    if step > parts.config.steps:
        raise ConfigError(f"steps: got {parts.config.steps}, but {run.folder} has done {step}; give that many or more")
    gone = run.ledger.differences(found.record, step)
    for change in _other_data(parts, run, found.data) + _lost(run, gone, step):
        if not allow_changes:
            raise ResumeError(f"{change}, start a new run with another out, or go on with --allow-changes")
        parts.display.warn(change.rpartition(";")[0])
    # From here on everything fits: what follows changes the run, and then its folder.
    try:
        parts.policy.load_state({_from_peft(name): tensor for name, tensor in tensors.items()}, meta["learner"])
    except CheckpointError as error:
        raise ResumeError(f"{run.checkpoints}: {error}") from None
    for name, part in parts.stateful.items():
        part.load_state(meta["remembered"][name])
    parts.state = found.state
    _count_health_again(parts, run, step)
    run.rewind(step, evaluated=parts.state.evaluated == step, size=None if gone else found.record.rows.size)
    parts.display.line(f"note: continuing after step {step}")


def _other_data(parts: Parts, run: RunFolder, fingerprint: str) -> list[str]:
    """That the prompts are not those of the checkpoint, and what to do; empty where they are."""
    if fingerprint == parts.plan.fingerprint:
        return []
    return [
        f"{run.folder}: the data changed since this run began (fingerprint {fingerprint}, now "
        f"{parts.plan.fingerprint}); give the same data"
    ]


def _lost(run: RunFolder, differences: list[str], step: int) -> list[str]:
    """That the folder lacks what the checkpoint of ``step`` counts on, and what to do; empty where it does not."""
    if not differences:
        return []
    return [
        f"{run.folder}: is not what it was at the checkpoint of step {step}, so its report would be wrong: "
        f"{', '.join(differences).replace(';', ',')}; put a backup of it there"
    ]


def _count_health_again(parts: Parts, run: RunFolder, step: int) -> None:
    """Applies the rules anew to the rows so far, where their settings are not those that the run had: what they
    remember would be of other windows."""
    if (settings(run.folder) or {}).get("health") == to_table(parts.config)["health"]:
        return
    fresh = Health(parts.health.facts)
    for row in run.rows():
        if row["step"] <= step:
            fresh.observe(row)
    parts.health.load_state(fresh.state())


def _for_peft(name: str) -> str:
    """``model.x.lora_A.default.weight`` as peft has it in its files, behind the file's name."""
    if not name.startswith(MODEL):
        return name
    return f"{ADAPTERS}base_model.model.{name.removeprefix(MODEL).replace('.default.', '.')}"


def _from_peft(name: str) -> str:
    """
    >>> _from_peft(_for_peft("model.layers.0.q.lora_A.default.weight"))
    'model.layers.0.q.lora_A.default.weight'
    >>> _from_peft("optimizer.step.x")
    'optimizer.step.x'
    """
    if not name.startswith(ADAPTERS):
        return name
    inner, _, weight = name.removeprefix(f"{ADAPTERS}base_model.model.").rpartition(".")
    return f"{MODEL}{inner}.default.{weight}"


def _refuse_lost(run: RunFolder) -> None:
    """Raises where a run without a checkpoint is past the point where it must have had one."""
    if run.finished() is not None:
        raise ResumeError(
            f"{run.folder}: is a finished run without a checkpoint (checkpoint.every = 0), so that it cannot be "
            "continued; train on from its final/ as a new run's model, or begin anew with --overwrite"
        )
    every = int(flatten(settings(run.folder) or {}).get("checkpoint.every", 0))
    steps = [*(row["step"] for row in run.rows()), *(int(path.stem) for _, path in step_files(run.folder))]
    done = max(steps, default=0)
    # The first may still have been under way when the second was due.
    if every and done > 2 * every:
        raise ResumeError(
            f"{run.checkpoints}: holds no checkpoint, but this run has done {done} steps and saved every {every}; it "
            "is not silently started over. Put a backup of one there, or begin anew with --overwrite"
        )


# --------------------------------------------------------------------------------------------------------------------
# Settings that changed


def complete(run: RunFolder, config: Config) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do; None where there is something."""
    summary = run.finished()
    if summary is None or summary.get("steps") != config.steps or not run.final.is_dir():
        return None
    return summary


def check_changes(folder: Path, config: Config, *, allow: bool = False) -> list[str]:
    """Every difference between the settings that the run of a folder has and those that are given, one line each.

    Raises ConfigError with those that would make it another run, unless they are allowed."""
    table = settings(folder)
    if table is None:
        return []
    before, now = flatten(table), flatten(tomllib.loads(redact_config(dumps(config))))
    lines = {
        key: f"{key}: the run was started with {before.get(key)!r}, now it is {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    }
    refused = [line for key, line in lines.items() if not key.startswith(FREE)]
    if refused and not allow:
        raise ConfigError(
            [
                *refused,
                f"{folder}: continue with the same settings, start a new run elsewhere (out), or go on with "
                "--allow-changes: it is another run from there on",
            ]
        )
    return list(lines.values())


def settings(folder: Path) -> dict[str, Any] | None:
    """The configuration that the run of a folder has, as a table; None where there is none."""
    try:
        text = read_config(folder)
        return None if text is None else tomllib.loads(text)
    except ValueError as error:  # not TOML, or not even UTF-8
        raise ResumeError(
            f"{folder / 'config.toml'}: cannot be read ({error}), so it is not known whether this run has the same "
            "settings; put a backup of it there, or remove it to go on with the settings given now"
        ) from None


def flatten(table: Any, where: str = "") -> dict[str, Any]:
    """
    >>> flatten({"a": {"b": 1}, "c": [{"d": 2}]})
    {'a.b': 1, 'c.0.d': 2}
    """
    if isinstance(table, list) and any(isinstance(v, dict) for v in table):
        table = {str(i): v for i, v in enumerate(table)}
    if not isinstance(table, dict):
        return {where: table}
    return {k: v for name, value in table.items() for k, v in flatten(value, f"{where}.{name}".lstrip(".")).items()}
