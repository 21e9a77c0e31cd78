"""What trackers are given of a training: the rows from before a resume, and how it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trew
from recipe_help import ODD, recipe, run_folder
from trew.runs import trackers
from trew.utils.console import Display
from trew.utils.signals import Interrupted


class Told:
    """A tracker that keeps what it is given."""

    def __init__(self, subject: trackers.Subject):
        self.subject, self.rows, self.ending = subject, [], ""
        every.append(self)

    def begin(self) -> None:
        self.subject.note("begins")

    def catch_up(self, rows: trackers.Rows) -> None:
        self.rows += rows

    def log(self, step: int, values: dict[str, float]) -> None:
        self.rows.append((step, values))

    def close(self, ending: trackers.Ending) -> None:
        assert not self.ending
        self.ending = ending


every: list[Told] = []


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    every.clear()
    monkeypatch.setitem(trackers._MAKERS, "tensorboard", Told)
    monkeypatch.setattr(trackers, "problems", lambda names: [])
    text = recipe(tmp_path / "lm", chat_template="plain", steps=3, rewards=[{"name": "reward.py:odd"}],
                  eval={"size": 2, "every": 1}, checkpoint={"every": 2}, track={"to": ["tensorboard"]})  # fmt: skip
    run_folder(tmp_path, text, reward=ODD)
    return tmp_path


class Lines(Display):
    """Keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def numbers(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """The finite numbers of metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], trackers._numbers(row)) for row in rows]


def test_after_a_resume_a_tracker_has_every_row_once(place):
    run = place / "run"

    def fail(row):
        if row["step"] == 3:
            raise ValueError("after the row of step 3, which the checkpoint of step 2 does not have")

    display = Lines()
    with pytest.raises(ValueError, match="after the row"):
        trew.train(place / "r.toml", set=[f"out={run}"], on_row=fail, display=display)
    assert "note: tensorboard: begins" in display.lines
    trew.train(place / "r.toml", set=[f"out={run}"], resume=True, display=Lines())
    failed, whole = every
    assert (failed.ending, whole.ending) == ("failed", "finished")
    assert whole.rows == numbers(run)
    assert [step for step, _ in whole.rows] == [0, 1, 1, 2, 2, 3, 3]  # of each step its row and its evaluation
    assert whole.subject.name == failed.subject.name == "run"


def test_an_interrupt_is_told_from_a_failure(place):
    def interrupt(row):
        raise Interrupted("interrupted", 2)

    with pytest.raises(Interrupted):
        trew.train(place / "r.toml", set=[f"out={place / 'run'}"], on_row=interrupt, display=Lines())
    assert [told.ending for told in every] == ["interrupted"]
