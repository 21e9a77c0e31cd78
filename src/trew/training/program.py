"""What every training is, whatever it trains: steps, with evaluations and checkpoints between them, in a folder from
which a stopped one continues. ``trew train`` and ``trew train-reward`` are programs."""

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
from ..runs import RunFolder, checkpoint_files, redact
from ..runs.writer import Writer
from ..utils.console import Display
from ..utils.signals import Interrupted, Interrupts
from . import remembered
from .changes import refuse_lost
from .remembered import Progress, Remembered


@dataclass(frozen=True, slots=True)
class Timetable:
    """How many steps there are, and what is done between them; ``..._every`` counts steps, 0 = never."""

    steps: int
    evaluate_every: int  # beside before the first step and after the last
    save_every: int
    keep: int  # checkpoints


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint holds of a model and its optimizer. The tensors are the live ones: the writer is released
    before they change."""

    tensors: Mapping[str, Tensor]
    counters: Mapping[str, Any]
    beside: Callable[[Path], None] | None = None  # writes more files into the checkpoint's folder


class Stateful(Protocol):
    """Something that counts or warns over several steps: its state is in every checkpoint."""

    def state(self) -> dict[str, Any]:
        """As JSON can hold it, and not changed afterwards."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues where :meth:`state` was taken."""
        ...


@dataclass(kw_only=True)
class Program(ABC):
    """A training between its steps: it evaluates, saves and stops where that is due, and continues from its newest
    complete checkpoint. A subclass says what is trained; whoever takes the steps counts them in ``state``."""

    timetable: Timetable
    fingerprint: str  # of the data
    folder: RunFolder
    display: Display
    interrupts: Interrupts
    state: Progress = field(default_factory=Progress)
    writer: Writer = field(default_factory=Writer)

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Measures the current weights, records the figures in the folder, and returns what ``state`` keeps of them.
        May be left by Interrupted; it is then made up for when the training is resumed."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """The model's and the optimizer's state."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Continues from what :meth:`snapshot` gave; raises CheckpointError, and changes nothing, where that is of
        another model or optimizer."""

    @property
    @abstractmethod
    def remembers(self) -> remembered.Shapes:
        """The shapes of what checkpoints remember of this kind of training."""

    @property
    def stateful(self) -> dict[str, Stateful]:
        """What else must continue as if the training had never stopped, by its name in checkpoints."""
        return {}

    @property
    def keep(self) -> int:
        """How many checkpoints stay."""
        return self.timetable.keep

    @property
    def best(self) -> int | None:
        """The step whose checkpoint stays whatever comes later."""
        return None

    def restored(self) -> None:  # noqa: B027 - most programs have nothing to do
        """Is called when everything is as the checkpoint has it, before the folder is changed."""

    # ---- from step to step

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left. Between two of them the training evaluates, saves, and stops if it
        was asked to."""
        last = self.timetable.steps
        while True:
            state, asked = self.state, self.interrupts.asked
            # Also right after a resume: the training may have stopped between a step and its evaluation.
            if self._evaluation_due() and not (asked and state.step < last):
                self._evaluate()
            if state.step and (self._checkpoint_due() or self.interrupts.asked):
                self.save()
            if state.step == last:
                self.writer.finish()
                return
            if self.interrupts.asked:
                self.writer.finish()  # before it is said that it was saved
            self.interrupts.stop_if_asked(self.saved())
            yield self.state.step + 1

    def saved(self) -> str:
        """What an interrupted training says."""
        if not self.state.step:
            return "before the first step was done; start again with --resume"
        return f"saved step {self.state.step} of {self.timetable.steps}; continue with --resume"

    @contextlib.contextmanager
    def rollback_on_interrupt(self) -> Iterator[None]:
        """What an interrupt ends inside is as if it had never begun: the training is as before, and saved so."""
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
        state.before = state.before or found
        state.last_eval, state.evaluated = found, state.step

    def _checkpoint_due(self) -> bool:
        step, every = self.state.step, self.timetable.save_every
        return bool(every) and (step in (self.best, self.timetable.steps) or step % every == 0)

    # ---- checkpoints

    def save(self) -> None:
        """Begins one complete checkpoint: weights, optimizer, and everything that the training must remember. Does
        nothing where this step has one."""
        state = self.state
        if state.saved == state.step:
            return
        state.saved = state.step
        model = self.snapshot()
        meta = {
            "learner": dict(model.counters), "state": dataclasses.asdict(state), "data": self.fingerprint,
            "remembered": {name: part.state() for name, part in self.stateful.items()},
            "record": dataclasses.asdict(self.folder.ledger.record()),
        }  # fmt: skip
        meta = redact(meta, keep=choices())  # a warning that waits may quote a completion
        self.writer.save(
            self.folder.checkpoints, state.step, model.tensors, meta, keep=self.keep, best=self.best,
            beside=model.beside,
        )  # fmt: skip

    def restore(self, *, allow_changes: bool = False) -> None:
        """Continues from the newest complete checkpoint; a training that was stopped before its first one starts at
        step 1, and says so. Raises ResumeError where that would lose what was done, or where the checkpoint is of
        something else; ConfigError where it is past the last step."""
        folder = self.folder
        loaded, messages = checkpoint_files.load_latest(folder.checkpoints)
        for message in messages:
            self.display.warn(message)
        if loaded is None:
            refuse_lost(folder)
            self.display.line(f"note: {folder.folder} has no checkpoint yet; starting at step 1")
            folder.rewind(-1)
            return
        step, tensors, meta = loaded
        found = remembered.read(self.remembers, meta, step, folder.checkpoints)
        if step > self.timetable.steps:
            raise ConfigError(
                f"steps: got {self.timetable.steps}, but {folder.folder} has done {step}; give that many or more"
            )
        gone = folder.ledger.differences(found.record, step)
        for change in self._other_data(found) + self._lost(gone, step):
            if not allow_changes:
                raise ResumeError(f"{change}, start a new run with another out, or go on with --allow-changes")
            self.display.warn(change.rpartition(";")[0])
        # From here on everything fits: what follows changes the training, and then its folder.
        try:
            self.load(tensors, meta["learner"])
        except CheckpointError as error:
            raise ResumeError(f"{folder.checkpoints}: {error}") from None
        for name, part in self.stateful.items():
            part.load_state(meta["remembered"][name])
        self.state = found.state
        self.restored()
        folder.rewind(step, evaluated=self.state.evaluated == step, size=None if gone else found.record.rows.size)
        self.display.line(f"note: continuing after step {step}")

    def _other_data(self, found: Remembered) -> list[str]:
        """That the data are not those of the checkpoint, and what to do; empty where they are."""
        if found.data == self.fingerprint:
            return []
        return [
            f"{self.folder.folder}: the data changed since this run began (fingerprint {found.data}, now "
            f"{self.fingerprint}); give the same data"
        ]

    def _lost(self, differences: list[str], step: int) -> list[str]:
        """That the folder lacks what the checkpoint of ``step`` counts on, and what to do; empty where it does not."""
        if not differences:
            return []
        return [
            f"{self.folder.folder}: is not what it was at the checkpoint of step {step}, so its report would be wrong: "
            f"{', '.join(differences).replace(';', ',')}; put a backup of it there"
        ]
