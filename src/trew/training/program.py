"""``Program``: the base of every training. Runs steps with evaluations and checkpoints between them, in a folder from
which a stopped training resumes. ``trew train`` and ``trew train-reward`` are programs."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..config import choices
from ..errors import CheckpointError, ConfigError, ResumeError
from ..models.backend import Backend
from ..models.sharded import Rows
from ..runs import RunFolder, checkpoint_files, redact
from ..runs.changes import Accepted
from ..runs.writer import Writer
from ..utils.console import Display
from ..utils.signals import Interrupted, Interrupts
from . import remembered
from .changes import refuse_lost
from .remembered import Progress, Remembered
from .team import Team
from .versions import arithmetic, versions


@dataclass(frozen=True, slots=True)
class Timetable:
    """The number of steps, and what happens between them; ``..._every`` is in steps, 0 = never."""

    steps: int
    evaluate_every: int  # in addition to before the first step and after the last
    save_every: int
    keep: int  # newest checkpoints that stay


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint's part for the model and its optimizer. The tensors are the live ones, not copies: the writer must
    have read them before they change (``Writer.release``)."""

    tensors: Mapping[str, Tensor]
    counters: Mapping[str, Any]
    extra_files: Callable[[Path], None] | None = None  # writes more files into the checkpoint's folder


class Stateful(Protocol):
    """Something that counts or warns over several steps, and is therefore part of every checkpoint."""

    def state(self) -> dict[str, Any]:
        """A JSON-compatible snapshot that later steps do not change."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a snapshot of :meth:`state`."""
        ...


@dataclass(kw_only=True)
class Program(ABC):
    """A training outside its steps: evaluates, saves and stops when due, and resumes from the newest complete
    checkpoint. A subclass defines what is trained; the code that runs a step must advance ``state.step``."""

    timetable: Timetable
    fingerprint: str  # of the data
    device: str  # that computes
    inputs: Mapping[str, str] = field(default_factory=dict)  # digests of what a run reads besides its data, by name
    folder: RunFolder
    display: Display
    interrupts: Interrupts
    state: Progress = field(default_factory=Progress)
    writer: Writer = field(default_factory=Writer)
    team: Team = field(default_factory=Team)
    backend: Backend | None = None  # whose kernels compute; None for PyTorch's alone

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Evaluates the current weights, logs the figures in the folder, and returns those for ``state``. May raise
        Interrupted; a resumed training then repeats it."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """The model's and the optimizer's state."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor | Rows], counters: Mapping[str, Any]) -> None:
        """Restores what :meth:`snapshot` returned. Raises CheckpointError, and changes nothing, if it belongs to
        another model or optimizer."""

    @property
    @abstractmethod
    def remembers(self) -> remembered.Shapes:
        """The types that the non-tensor state of this kind of training is validated against."""

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Other parts whose state is saved and restored, by their names in checkpoints."""
        return {}

    @property
    def keep(self) -> int:
        """The number of newest checkpoints that stay."""
        return self.timetable.keep

    @property
    def best(self) -> int | None:
        """The step whose checkpoint is never deleted; None for no such step."""
        return None

    def restored(self) -> None:  # noqa: B027 - most programs have nothing to do
        """Called once everything is restored from a checkpoint, before the folder is changed."""

    # ---- from step to step

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the remaining steps. Between two of them it evaluates and saves when due, and stops
        when asked to."""
        last = self.timetable.steps
        while True:
            state, asked = self.state, self.interrupts.asked
            # Also right after a resume, since the training may have stopped between a step and its evaluation. One that
            # was asked to stop leaves the evaluation to the resumed run, unless no step is left for that.
            if self._evaluation_due() and not (asked and state.step < last):
                self._evaluate()
            if state.step and (self._checkpoint_due() or self.interrupts.asked):
                self.save()
            if state.step == last:
                self.writer.finish()
                return
            if self.interrupts.asked:
                self.writer.finish()  # the checkpoint must be on disk before the message says so
            self.interrupts.stop_if_asked(self.saved())
            self.team.step(self.state.step + 1)
            yield self.state.step + 1

    def saved(self) -> str:
        """The message of an interrupted training."""
        if not self.state.step:
            return "before the first step was done; start again with --resume"
        return f"saved step {self.state.step} of {self.timetable.steps}; continue with --resume"

    @contextlib.contextmanager
    def rollback_on_interrupt(self) -> Iterator[None]:
        """Restores and saves the state from before the block if an interrupt ends it.

        Weights need no restoring: interrupts are raised while sampling or evaluating, before any update.
        """
        # States are snapshots: later steps do not change them.
        before = dataclasses.replace(self.state), {name: part.state() for name, part in self.stateful.items()}
        try:
            yield
        except Interrupted:
            self.state, states = before
            for name, part in self.stateful.items():
                part.load_state(states[name])
            if self.state.step:
                self.save()
                self.writer.finish()
            raise

    def _evaluation_due(self) -> bool:
        step, every = self.state.step, self.timetable.evaluate_every
        now = step in (0, self.timetable.steps) or bool(every and step % every == 0)
        return now and self.state.evaluated != step

    def _evaluate(self) -> None:
        with self.rollback_on_interrupt():
            found = self.evaluate()
        state = self.state
        state.before = state.before or found  # the first evaluation, before training, stays
        state.last_eval, state.evaluated = found, state.step

    def _checkpoint_due(self) -> bool:
        step, every = self.state.step, self.timetable.save_every
        # A new best step has a checkpoint even where none is due.
        return bool(every) and (step in (self.best, self.timetable.steps) or step % every == 0)

    # ---- checkpoints

    def save(self) -> None:
        """Starts writing a complete checkpoint: weights, optimizer, and all other state. Does nothing if this step has
        one already."""
        state = self.state
        # Several causes may fall on one step: its schedule, an interrupt, the end.
        if state.saved == state.step:
            return
        state.saved = state.step  # before it is serialised: the checkpoint itself says that it exists
        model = self.snapshot()
        meta = {
            "learner": dict(model.counters), "state": dataclasses.asdict(state), "data": self.fingerprint,
            "code": dict(self.inputs), "made_with": self.made_with,
            "remembered": {name: part.state() for name, part in self.stateful.items()},
            "record": dataclasses.asdict(self.folder.recorder.record()),
        }  # fmt: skip
        self.team.save(self.folder.checkpoints, state.step)
        meta = redact(meta, keep=choices())  # a pending warning may quote a completion, and with it a secret
        self.writer.save(
            self.folder.checkpoints, state.step, model.tensors, meta, keep=self.keep, best=self.best,
            extra_files=model.extra_files, parts=self.team.parts, failed=self.team.give_up_saving,
        )  # fmt: skip

    def restore(self, *, allow_changes: bool = False) -> Accepted:
        """Restores the newest complete checkpoint; a training that stopped before its first one starts at step 1, with
        a note. Returns what changed since then besides settings. Raises ResumeError if that would lose finished steps,
        or if the checkpoint belongs to something else; ConfigError if it is past the last step."""
        # ---- read and check everything before anything is changed
        folder = self.folder
        loaded, messages = checkpoint_files.load_latest(folder.checkpoints)
        for message in messages:
            self.display.warn(message)
        if loaded is None:
            refuse_lost(folder)
            self.display.line(f"note: {folder.folder} has no checkpoint yet; starting at step 1")
            folder.rewind(-1)
            return Accepted()
        step, tensors, meta = loaded
        # Validated as a whole here, so that nothing below fails halfway for a damaged field.
        found = remembered.read(self.remembers, meta, step, folder.checkpoints)
        if step > self.timetable.steps:
            raise ConfigError(
                f"steps: got {self.timetable.steps}, but {folder.folder} has done {step}; give that many or more"
            )
        # Files that the final report needs must be as they were; data that changed would mix two trainings.
        gone = folder.recorder.differences(found.record, step)
        allowed = []
        for change in self._other_data(found) + self._other_inputs(found) + self._lost(gone, step):
            if not allow_changes:
                raise ResumeError(
                    f"{folder.folder}: {change}, start a new run with another out, or go on with --allow-changes"
                )
            allowed.append(change.rpartition(";")[0])
            self.display.warn(f"{folder.folder}: {allowed[-1]}")
        # ---- everything fits: restore the training first, then rewind its folder to the checkpoint
        self.team.load(tensors, meta["learner"])
        try:
            self.load(tensors, meta["learner"])
        except CheckpointError as error:
            raise ResumeError(f"{folder.checkpoints}: {error}") from None
        for name, part in self.stateful.items():
            part.load_state(meta["remembered"][name])
        self.state = found.state
        self.restored()
        # size cuts metrics.jsonl to what it was at the checkpoint; unknown where the record does not fit.
        folder.rewind(step, evaluated=self.state.evaluated == step, size=None if gone else found.record.rows.size)
        # Also where nothing was taken back, as after an interrupt: settings may have changed from here on.
        folder.event(f"continued after step {step}")
        if step < self.timetable.steps:
            folder.go_on()
        self.display.line(f"note: continuing after step {step}")
        updated = [f"{name} was {then}, is {now}" for name, now in self.made_with.items()
                   if (then := found.made_with.get(name, now)) != now]  # fmt: skip
        for text in updated:
            self.display.line(f"note: {text}: steps from here on may round otherwise than they would have")
        return Accepted(tuple(redact(allowed)), tuple(updated))

    @property
    def made_with(self) -> dict[str, str]:
        """What its numbers are rounded by: the versions of libraries, device, threads, kernels and how ranks
        exchange gradients."""
        return {**versions(), **arithmetic(self.device, self.backend), **self.team.exchange}

    def _other_data(self, found: Remembered) -> list[str]:
        """A message for data other than the checkpoint's, with what to do; empty if they are the same."""
        if found.data == self.fingerprint:
            return []
        return [
            f"the data changed since this run began (fingerprint {found.data}, now {self.fingerprint}); give the same "
            "data"
        ]

    def _other_inputs(self, found: Remembered) -> list[str]:
        """A message for code and models that are not what they were; empty if they are. A module that is new or gone
        shows in the file that imports it."""
        changed = [name for name, digest in self.inputs.items() if found.inputs.get(name, digest) != digest]
        if not changed:
            return []
        return [
            f"what this run reads besides its data changed since its checkpoint ({', '.join(changed)}), so that steps "
            "before and after cannot be compared; put it back"
        ]

    def _lost(self, differences: list[str], step: int) -> list[str]:
        """A message for files that the checkpoint of ``step`` relies on but the folder lacks; empty if none are."""
        if not differences:
            return []
        return [
            f"the folder is not what it was at the checkpoint of step {step}, so its report would be wrong: "
            f"{', '.join(differences).replace(';', ',')}; put a backup of it there"
        ]
