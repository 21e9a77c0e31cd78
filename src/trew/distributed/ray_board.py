"""What ``trew train`` and its ranks on Ray tell each other: small files in a folder that all nodes see."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SEEN_S = 15.0
"""Seconds until another node sees a new file: network file systems remember what was not there."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a rank died: ``how`` in words, with the last ``lines`` of its log."""

    rank: int
    node: str
    how: str
    lines: tuple[str, ...] = ()


class Board:
    """A folder beside the run's, since a run's own folder must be new. ``mark`` shows that a node sees this one."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self.mark = folder, mark

    @staticmethod
    def make(run: Path) -> Board:
        """A new board for the run in the folder ``run``."""
        mark = secrets.token_hex(8)
        board = Board(run.absolute().parent / f".trew-ranks-{mark}", mark)
        board.folder.mkdir(parents=True, mode=0o700)
        board._write("mark", mark)
        return board

    def seen(self, *, seconds: float = SEEN_S) -> bool:
        """Whether this process sees the folder; waits so long for it."""
        until = time.monotonic() + seconds
        while self._read("mark") != self.mark:
            if time.monotonic() > until:
                return False
            time.sleep(0.2)
        return True

    # ---- starts and deaths

    def begin(self) -> int:
        """Notes that rank 0 begins; returns how often it had begun before."""
        # Rank 0 alone counts up, so that no other process can take the same number.
        number = self.begun
        self._write(f"begun-{number}", "")
        return number

    @property
    def begun(self) -> int:
        """How often the ranks were started."""
        return len(list(self.folder.glob("begun-*")))

    def failed(self) -> None:
        """Notes that Ray Train has given up the ranks of a start."""
        self._write(f"failed-{len(list(self.folder.glob('failed-*')))}", "")

    @property
    def waiting(self) -> bool:
        """Whether no ranks run: they were not started yet, or not again."""
        # A start leaves one file, and its end another: as many of both means that nothing runs.
        return self.begun <= len(list(self.folder.glob("failed-*")))

    def died(self, start: int, death: Death) -> None:
        """Notes how a rank died, unless another one of the same start died before: that one has the cause."""
        # "x": of several ranks of a start that report, the first one wins.
        with contextlib.suppress(FileExistsError), (self.folder / f"death-{start}.json").open("x") as file:
            json.dump(asdict(death), file)

    def death(self) -> Death | None:
        """The first death of the newest start that has one."""
        for start in reversed(range(self.begun)):
            if text := self._read(f"death-{start}.json"):
                found: dict[str, Any] = json.loads(text)
                found["lines"] = tuple(found["lines"])
                return Death(**found)
        return None

    def note_opened(self) -> None:
        """Notes that rank 0 has opened the run's folder."""
        self._write("opened", "")

    @property
    def opened(self) -> bool:
        """Whether rank 0 of any start has opened the run's folder."""
        return (self.folder / "opened").exists()

    # ---- the end

    def stop(self) -> None:
        """Asks the ranks to end their step, to save and to end."""
        self._write("stop", "")

    @property
    def stopping(self) -> bool:
        return (self.folder / "stop").exists()

    def end(self, code: int) -> None:
        """Notes that the run ended by its own decision, and its exit code."""
        self._write("code", str(code))

    @property
    def code(self) -> int | None:
        """The run's exit code, once it has ended by its own decision."""
        text = self._read("code")
        return int(text) if text else None

    # ---- logs

    def log(self, start: int, rank: int) -> Path:
        """Where a rank's output goes."""
        return self.folder / f"start-{start}-rank-{rank}.log"

    def keep_logs(self, run: Path) -> None:
        """Copies what ranks printed into the run's folder, where there is one."""
        if not run.is_dir():
            return
        for path in sorted(self.folder.glob("start-*.log")):
            if path.stat().st_size:
                with contextlib.suppress(OSError):
                    (run / "ranks").mkdir(exist_ok=True, mode=0o700)
                    shutil.copy(path, run / "ranks" / f"{self.folder.name.rpartition('-')[2]}-{path.name}")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, name: str, text: str) -> None:
        # Whole or not at all: other nodes read at any time.
        aside = self.folder / f".{name}-{os.getpid()}"
        aside.write_text(text)
        aside.rename(self.folder / name)

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except OSError:
            return ""
