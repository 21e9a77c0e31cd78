"""Rounds of policy and reward model: what a resumed round says of itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trew.iterate import rounds


def test_a_resumed_round_counts_the_seconds_of_all_its_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now, ends = [100.0], [KeyboardInterrupt(), KeyboardInterrupt(), None]

    def stage(*_: Any) -> dict[str, Any]:
        now[0] += 10.0
        if (error := ends.pop(0)) is not None:
            raise error
        return {"pairs": 1}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rounds, "sample_pairs", lambda *_: None)
    monkeypatch.setattr(rounds, "train_reward_model", stage)
    made: Any = SimpleNamespace(
        round=lambda number: tmp_path / "round-00", first_prompts=1, verifier_name="odd",
        display=SimpleNamespace(line=lambda text: None), recipe=SimpleNamespace(rounds=SimpleNamespace(rounds=2)),
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            rounds.one_round(made, 0)
        now[0] += 1000.0  # while nothing runs
    row = rounds.one_round(made, 0)
    assert row is not None
    assert row["seconds"] == 30.0
    assert [path.name for path in (tmp_path / "round-00").iterdir()] == ["round.json"]
    assert rounds.one_round(made, 0) == row == json.loads((tmp_path / "round-00" / "round.json").read_text())
