"""trackio and TensorBoard, which keep their files on this machine."""

from __future__ import annotations

import contextvars
import importlib
from collections.abc import Mapping
from typing import Any

from .tracker import Ending, Rows, Subject


class Trackio:
    def __init__(self, subject: Subject):
        self._subject = subject
        self._trackio: Any = None
        # Where trackio looks for the active run; in the caller's context, init() would end the caller's.
        self._apart = contextvars.Context()

    def begin(self) -> None:
        trackio: Any = importlib.import_module("trackio")
        about = self._subject
        self._apart.run(trackio.init, project=about.project, name=about.name, config=about.config, embed=False)
        self._trackio = trackio

    def catch_up(self, rows: Rows) -> None:
        for step, values in rows:
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._apart.run(self._trackio.log, dict(values), step=step)

    def close(self, ending: Ending) -> None:
        if self._trackio is not None:
            self._apart.run(self._trackio.finish)


class Tensorboard:
    def __init__(self, subject: Subject):
        self._folder, self._config = subject.folder / "tensorboard", subject.config
        self._tensorboard: Any = None
        self._writer: Any = None  # from the first row on, which says where a resumed run goes on

    def begin(self) -> None:
        self._tensorboard = importlib.import_module("torch.utils.tensorboard")

    def catch_up(self, rows: Rows) -> None:
        # Its files are in the run's folder, and go on there; a tracker that the run was not begun with has none.
        if not self._folder.exists():
            for step, values in rows:
                self.log(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            # What the folder has from there on is of before a resume, and would be shown a second time. An evaluation
            # comes after the row of its step, which stays.
            first = step + any(name.startswith("eval_") for name in values)
            self._writer = self._tensorboard.SummaryWriter(str(self._folder), purge_step=first)
            self._writer.add_text("config", "\n".join(f"    {k} = {v}" for k, v in self._config.items()))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # At every step, so that a run that is killed leaves its curves.
        self._writer.flush()

    def close(self, ending: Ending) -> None:
        if self._writer is not None:
            self._writer.close()
