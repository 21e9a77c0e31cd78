"""What the processes of a study do: a check, a small model, a training. Each runs in a child of its own.

Nothing is returned through memory: a child writes a JSON file as its last act, and one that was killed leaves none.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config import load
from ..distributed import launch
from ..errors import ConfigError, NumericsError, Problems, StorageError, TrewError
from ..runs.files import write_atomic
from ..utils.secrets import redact
from ..utils.signals import Interrupted
from ..utils.toml import toml_value
from .settings import Warm

PRELOADED = (
    "trew.study.work", "trew.study.warm", "trew.training.start", "trew.backends.cpu.backend", "pyarrow.parquet",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto", "trew.runs.report.html",
)  # fmt: skip
"""What the process imports that children are forked from; a module that is not installed is left out."""


UNWRITTEN = 74  # EX_IOERR
"""The exit code of a process that could not write its result."""


def child(log: Path, result: Path, work: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """Does ``work`` with its output in ``log``, and writes what it returns, or the error that it ended with."""
    # A group of its own: signals of a terminal reach the study, which passes them on. Not a session of its own: Linux
    # shares out processors between sessions, and a study under nice would take as much as any other.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_study, daemon=True, name="trew-study").start()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(out, stream)
    started = time.monotonic()
    try:
        found = work(*arguments)
    except TrewError as error:
        found = {"error": redact(str(error)), "kind": type(error).__name__}
    except Interrupted as error:
        # Stopped alone, by whoever needed its memory. Not 1, which Python ends with after an error of the code.
        sys.stdout.flush()
        os._exit(error.exit_code)
    # The log is this process's stdout: its buffer must be in it before the result says that all is done.
    with contextlib.suppress(OSError):  # of a full disk
        sys.stdout.flush()
    found |= {"seconds": round(time.monotonic() - started, 2), "load": round(os.getloadavg()[0], 2)}
    found["cpu_seconds"] = round(time.process_time(), 2)
    try:
        write_atomic(result, lambda file: file.write(json.dumps(found).encode()))
    except StorageError:  # the log has no room for it either
        os._exit(UNWRITTEN)


def _end_with_study() -> None:
    """Ends this process as soon as the study has ended, however it did. The fork server is no help there: it lives as
    long as any process that it made."""
    if study := multiprocessing.parent_process():
        study.join()
    os.kill(os.getpid(), signal.SIGKILL)


def train(recipe: Path, overrides: Sequence[str], out: str) -> dict[str, Any]:
    """One training from its beginning, as ``trew train --overwrite`` runs it."""
    return _train(recipe, overrides, out, resume=False)


def resume(recipe: Path, overrides: Sequence[str], out: str) -> dict[str, Any]:
    """One training from its newest checkpoint, as ``trew train --resume`` runs it."""
    return _train(recipe, overrides, out, resume=True)


def _train(recipe: Path, overrides: Sequence[str], out: str, *, resume: bool) -> dict[str, Any]:
    """Trains, and returns an error of numbers that are not finite as a result of the run, not as a crash."""
    from ..training import start

    try:
        start.train(recipe, set=[*overrides, f"out={toml_value(out)}"], resume=resume, overwrite=not resume)
    except NumericsError as error:
        return {"failed": redact(str(error))}
    return {}


def make_model(recipe: Path, overrides: Sequence[str], warm: Warm, folder: Path) -> dict[str, Any]:
    """The small model for a task."""
    from . import warm as making

    return {"model": making.make(load(recipe, overrides), warm, folder)}


def check(
    recipe: Path, cells: Sequence[tuple[str, Sequence[str]]], others: Sequence[tuple[str, Sequence[str]]] = ()
) -> dict[str, Any]:
    """Checks all cells as ``trew train --dry-run`` does: the problems, each with the cells that have it. Of ``others``,
    the same cells with other values of a setting, settings and objective alone: data and tokenizer take a second."""
    from ..objective import preset
    from ..training import compatibility, planning

    def fits(overrides: Sequence[str]) -> None:
        config = planning.read(recipe, overrides)
        objective = preset(config.objective.preset, **config.objective.args)
        if problems := compatibility.problems(objective, config):
            raise ConfigError(problems)

    def planned(overrides: Sequence[str]) -> None:
        config = planning.read(recipe, overrides)
        if config.demonstrates:
            raise ConfigError(
                f"data.task: got {config.task!r}, whose runs are measured by a loss, and a study compares accuracies; "
                "name a task with rewards"
            )
        if alone := launch.alone_problems(config, "trew study"):
            raise ConfigError(alone)
        # A plan may have started processes for its rewards.
        planning.plan(config).rewards.close()

    found: dict[str, list[str]] = {}
    for name, overrides, by in [*((*cell, planned) for cell in cells), *((*cell, fits) for cell in others)]:
        problems = Problems()
        problems.attempt(functools.partial(by, overrides))
        for problem in problems:
            of = found.setdefault(problem, [])
            if name not in of:  # of several values of the tuned setting
                of.append(name)
    return {"problems": found}
