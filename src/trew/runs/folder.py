"""The run folder: complete (a report needs nothing else), append-only, readable by public tools, free of secrets.

config.toml  changes.jsonl  metrics.jsonl  rollouts/000001.parquet  evals/000000.parquet  checkpoints/  final/
summary.json  memory.json  teacher.json  report.html  events.log  failed_reward.json  bad_steps/000007.json  run.lock
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError, StorageError
from ..types import ScoredGroup
from ..utils.metric_rows import is_evaluation
from ..utils.secrets import redact
from . import changes
from .config_file import read_config, redact_config
from .files import ASIDE, append_synced, make_private, storage, write_atomic
from .layout import LOCK, RUN, Layout, has_run, problems
from .lock import Lock
from .record import Recorder, step_files
from .rollouts import Advantages, Effects, Render, Sampler, plain_prompt, write_rollouts
from .rows import decode_row, encode_row, scalar


class RunFolder:
    """An open, locked run folder. Every write either completes, or raises StorageError and changes nothing."""

    def __init__(self, folder: Path, lock: Lock, *, resumed: bool, layout: Layout = RUN):
        self.folder, self.layout = folder, layout
        self.resumed = resumed  # the folder held a run, and this one continues it
        self.messages: tuple[str, ...] = (f"{folder}: {lock.stale}",) if lock.stale else ()
        self.recorder = Recorder(folder)  # the folder's contents, for checkpoints
        self._lock = lock

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], *, resume: bool = False, overwrite: bool = False, layout: Layout = RUN
    ) -> "RunFolder":
        """Creates (mode 0700) or opens ``folder`` and locks it; raises ConfigError with every problem found.

        ``resume`` starts a new run if there is nothing to continue. ``overwrite`` deletes the run's own files and
        nothing else. This is cheap: call it before loading anything.
        """
        folder = Path(folder)
        # ---- may it be used at all, as far as that shows without touching it
        if found := problems(folder, resume=resume, overwrite=overwrite, layout=layout):
            raise ConfigError(found)
        # ---- the folder, and the lock on it
        try:
            folder.parent.mkdir(exist_ok=True)
            make_private(folder.resolve())  # follows a link: whoever gives a link to a folder means that folder
            with tempfile.TemporaryFile(dir=folder):  # permission bits can lie (root, network mounts); a write cannot
                pass
            # Locked before anything is deleted or written: the folder may be another run's.
            lock = Lock(folder / LOCK)
        except OSError as error:
            raise ConfigError(
                f"out: {folder} cannot be used: {error.strerror}; choose another folder for the run"
            ) from None
        # ---- its contents, now that nobody else writes here
        run = cls(folder, lock, resumed=resume and has_run(folder, layout), layout=layout)
        try:
            run._prepare(overwrite)
        except BaseException:
            lock.release()
            raise
        return run

    def _prepare(self, overwrite: bool) -> None:
        with storage(self.folder):
            if overwrite:
                for path in [p for p in self.folder.iterdir() if self.layout.owns(p.name)]:
                    _remove(path)
            for name in self.layout.made:
                make_private(self.folder / name)
            for folder in (self.folder, *(self.folder / name for name in ("rollouts", "evals", "bad_steps"))):
                # Temporary files of a killed process; the lock rules out a live one.
                for left in folder.glob(f".*{ASIDE}"):
                    left.unlink()
        for message in self.messages:
            self.event(message)

    @property
    def checkpoints(self) -> Path:
        """The folder for checkpoints."""
        return self.folder / "checkpoints"

    @property
    def final(self) -> Path:
        """The folder for the trained model."""
        return self.folder / "final"

    def write_config(self, text: str) -> None:
        """Writes the resolved configuration, with secrets masked."""
        # "replace": a setting may hold a lone surrogate, which UTF-8 cannot.
        write_atomic(self.folder / "config.toml", lambda f: f.write(redact_config(text).encode("utf-8", "replace")))

    def go_on_with(
        self, text: str, step: int, *, free: Sequence[str], accepted: changes.Accepted = changes.NOTHING
    ) -> list[changes.RunChange]:
        """Replaces the configuration of a run that goes on after ``step``, and records what changed with it, but for
        settings that begin with one of ``free``. Returns all changes of the run so far."""
        path = self.folder / changes.FILE
        before, now = read_config(self.folder), redact_config(text)
        known = changes.in_folder(self.folder)
        found: list[changes.RunChange] = []
        rows = self.folder / self.layout.rows
        parts = self.layout.parts and any(self.folder.glob(self.layout.parts))
        # Otherwise nothing is left of what was before.
        if step > 0 or parts or (rows.is_file() and rows.stat().st_size):
            found = changes.add(known, step, before=before or now, now=now, free=free, accepted=accepted)
        # Before config.toml: a crash in between leaves both sides of the difference.
        if found:
            write_atomic(path, lambda f: f.write(changes.write(found).encode("utf-8", "replace")))
        else:
            path.unlink(missing_ok=True)
        for change in found:
            if change not in known:
                self.event(f"{self.layout.unit} {change.step}: {change.told(self.layout.unit)}")
        self.write_config(text)
        return found

    def finished(self) -> dict[str, Any] | None:
        """The content of summary.json; None while the run is not finished."""
        try:
            found = json.loads((self.folder / "summary.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; skips lines that are not rows."""
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [row for line in lines if (row := decode_row(line)) is not None]

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends one row to metrics.jsonl and fsyncs it; ``row`` needs a whole number ``step``."""
        # bool is an int, and no step.
        if isinstance(row.get("step"), bool) or not isinstance(row.get("step"), int):
            raise ValueError(f"a metrics row needs a whole number 'step', got {row.get('step')!r}")
        # One line, one write: a reader that follows the file sees whole rows.
        line = (json.dumps(redact(encode_row({"step": row["step"], **row})), allow_nan=False) + "\n").encode()
        path = self.folder / "metrics.jsonl"
        with storage(path):
            append_synced(path, line)

    def write_rollouts(
        self,
        step: int,
        groups: Iterable[ScoredGroup],
        *,
        advantages: Advantages | None = None,
        trained_on: Sequence[ScoredGroup] = (),
        effects: Effects | None = None,
        baselines: Mapping[str, float] | None = None,
        sampler: Sampler | None = None,
        render: Render = plain_prompt,
    ) -> Path:
        """Writes a step's completions to rollouts/NNNNNN.parquet; the arguments are those of
        :func:`.rollouts.write_rollouts`."""
        path = self.folder / "rollouts" / f"{step:06d}.parquet"
        self.recorder.forget(path)
        write_rollouts(
            path, groups, step=step, advantages=advantages, trained_on=trained_on, effects=effects,
            baselines=baselines, sampler=sampler, render=render,
        )  # fmt: skip
        return path

    def write_eval(self, step: int, groups: Iterable[ScoredGroup], *, render: Render = plain_prompt) -> Path:
        """Writes the completions of an evaluation after ``step`` to evals/NNNNNN.parquet."""
        path = self.folder / "evals" / f"{step:06d}.parquet"
        self.recorder.forget(path)
        write_rollouts(path, groups, step=step, render=render)
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, which marks the run as finished. Non-finite numbers become null."""
        text = json.dumps(redact(_plain(summary)), indent=2, allow_nan=False) + "\n"
        write_atomic(self.folder / "summary.json", lambda f: f.write(text.encode()))

    def write_memory(self, record: Mapping[str, Any]) -> None:
        """Writes memory.json. Best effort, as nothing is read from it again."""
        text = json.dumps(redact(dict(record)), indent=1, allow_nan=False) + "\n"
        with contextlib.suppress(StorageError):
            write_atomic(self.folder / "memory.json", lambda f: f.write(text.encode()))

    def write_teacher(self, known: Mapping[str, Any]) -> None:
        """Writes teacher.json: by what the run recognises its teacher on a server."""
        text = json.dumps(dict(known), allow_nan=False) + "\n"
        write_atomic(self.folder / "teacher.json", lambda f: f.write(text.encode()))

    def write_failure(self, evidence: Mapping[str, Any]) -> Path:
        """Writes failed_reward.json: the completions that a reward failed on, and its traceback."""
        path = self.folder / "failed_reward.json"
        plain = json.loads(json.dumps(evidence, default=str))  # columns may hold parquet types that JSON does not have
        text = json.dumps(redact(plain), indent=2) + "\n"
        write_atomic(path, lambda f: f.write(text.encode()))
        return path

    def write_bad_step(self, step: int, evidence: Mapping[str, Any]) -> Path:
        """Writes bad_steps/NNNNNN.json: the non-finite values of a step, as strings such as "nan" and "-inf"."""
        folder = self.folder / "bad_steps"
        with storage(folder):
            # Made when it is first needed: most runs have none.
            make_private(folder)
        path = folder / f"{step:06d}.json"
        self.recorder.forget(path)
        text = json.dumps(redact(_as_text(evidence)), indent=1, allow_nan=False, default=str) + "\n"
        write_atomic(path, lambda f: f.write(text.encode()))
        return path

    def event(self, text: str, *, once: bool = False) -> None:
        """Appends a dated line to events.log; with ``once``, only if it is not there from an earlier session. Best
        effort: on a full disk the next metrics row reports the error."""
        path = self.folder / "events.log"
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        line = f" {' '.join(''.join(c if c.isprintable() else ' ' for c in redact(text)).split())}\n"
        data = line.encode("utf-8", "replace")
        with contextlib.suppress(OSError):
            if not (once and path.is_file() and data in path.read_bytes()):
                append_synced(path, stamp.encode() + data)

    def rewind(self, step: int, *, evaluated: bool = True, size: int | None = None) -> list[str]:
        """Removes everything after ``step``, so that nothing that a resumed run repeats is there twice: metrics rows, a
        partial last line, rollouts, evaluations, the summary. Returns a message for each thing removed.

        ``step`` = -1 removes all of them. ``evaluated`` says whether an evaluation of the weights after ``step`` stays;
        it is False if the checkpoint does not record that evaluation, so that it is repeated. ``size`` is the number
        of bytes of metrics.jsonl that the checkpoint records; nothing after them stays, whatever its step.
        """
        messages = self._rewind_metrics(step, evaluated, size)
        with storage(self.folder):
            for name, path in list(step_files(self.folder)):
                # Of an evaluation that is repeated, the file of ``step`` itself goes too.
                if int(path.stem) > step - (name.startswith("evals/") and not evaluated):
                    self.recorder.forget(path)
                    path.unlink()
                    messages.append(f"{name}: dropped because it was written after step {step}")
            # The summary marks a finished run, which this one no longer is once anything was taken back.
            if messages or step < 0:
                self._reopen()
        for message in messages:
            self.event(message)
        return messages

    def go_on(self) -> None:
        """Removes summary and report, which are those of a finished run: this one is about to take more steps."""
        with storage(self.folder):
            self._reopen()

    def _reopen(self) -> None:
        # Killed before its new end, a run would have the report of its old one.
        for name in ("summary.json", "report.html"):
            (self.folder / name).unlink(missing_ok=True)

    def _rewind_metrics(self, step: int, evaluated: bool, size: int | None) -> list[str]:
        path = self.folder / "metrics.jsonl"
        try:
            # By "\n", so that what stands behind the last one shows.
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        partial = lines.pop()  # the text after the last newline: empty unless the run was killed while writing
        messages = ["metrics.jsonl: dropped a partial last line"] if partial else []
        kept, at = [], 0
        for number, line in enumerate(lines, 1):
            # Lines within the recorded size were compared with the checkpoint's hash and stay whatever they hold.
            known = size is not None and at < size
            # The newline that split() took away counts too.
            at += len(line) + 1
            why = "" if known else _out_of_place(line, number, step, evaluated)
            if not why and not known and size is not None:
                why = f"dropped line {number}, which the checkpoint of step {step} does not record"
            if why:
                messages.append(f"metrics.jsonl: {why}")
            else:
                kept.append(line + b"\n")
        if messages:
            write_atomic(path, lambda f: f.writelines(kept))
        return messages

    def close(self) -> None:
        """Releases the folder's lock."""
        self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _out_of_place(line: bytes, number: int, step: int, evaluated: bool) -> str:
    """Says why a row does not belong in a run that continues after ``step``; empty if it does."""
    row = decode_row(line)
    if row is None:
        return f"dropped line {number}, which is not a metrics row"
    if row["step"] > step:
        return f"dropped a row of step {row['step']}, which is after step {step}"
    if row["step"] == step and is_evaluation(row) and not evaluated:
        return f"dropped the evaluation after step {step}, which is repeated"
    return ""


def _plain(value: Any) -> Any:
    """Converts ``value`` to JSON types; non-finite numbers become None."""
    # A namedtuple, which would otherwise become a list without names.
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, os.PathLike):
        return str(value)
    value = scalar(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_text(value: Any) -> Any:
    """Replaces non-finite numbers in ``value`` by strings.

    >>> _as_text({"a": [1.0, float("nan"), float("-inf")]})
    {'a': [1.0, 'nan', '-inf']}
    """
    if isinstance(value, Mapping):
        return {str(k): _as_text(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_text(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
