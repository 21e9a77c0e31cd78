"""Rounds of policy and reward model: what a resumed round says of itself."""

from __future__ import annotations

import dataclasses
import html
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trew.errors import ConfigError
from trew.iterate import load_recipe, page, rounds
from trew.runs import RunFolder
from trew.view.viewed import ViewedRun


def test_a_resumed_round_counts_the_seconds_of_all_its_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now, ends = [100.0], [KeyboardInterrupt(), KeyboardInterrupt(), None]

    def stage(*_: Any) -> dict[str, Any]:
        now[0] += 10.0
        if (error := ends.pop(0)) is not None:
            raise error
        return {"pairs": 1}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for name in ("sample_pairs", "_unjudged"):
        monkeypatch.setattr(rounds, name, lambda *_: None)
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


def test_a_round_says_what_was_left_out_of_its_pairs():
    row = {"pairs": 9, "replayed": 1}
    assert page._pairs(row) == page._pairs({**row, "trained_pairs": 10, "unjudged": 0}) == "9 (1)"
    told = "9 (1); 7 learned from, the others are too long; 5 completions without a verdict"
    assert page._pairs({**row, "trained_pairs": 7, "unjudged": 5}) == told


def test_rounds_that_are_killed_after_a_call_for_fewer_are_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(_recipe(tmp_path), out=tmp_path / "run")
    more = dataclasses.replace(recipe, rounds=dataclasses.replace(recipe.rounds, rounds=3))
    display: Any = SimpleNamespace(line=lambda text: None)
    last = [1]

    def one_round(_: Any, number: int) -> dict[str, Any]:
        if number > last[0]:
            raise KeyboardInterrupt
        return {"round": number}

    monkeypatch.setattr(rounds, "check", lambda *_, **__: (recipe.rounds.verifier, "arithmetic"))
    monkeypatch.setattr(rounds, "one_round", one_round)
    for name in ("summarize", "table", "write_page"):
        monkeypatch.setattr(rounds, name, lambda *_, **__: {"rounds": 1})

    def state() -> str:
        return ViewedRun(tmp_path / "run", id="run", name="run").state

    rounds.iterate(recipe, display=display)
    assert state() == "finished"
    with pytest.raises(KeyboardInterrupt):
        rounds.iterate(more, resume=True, display=display)
    assert state() == "stopped"
    last[0] = 3
    rounds.iterate(more, resume=True, display=display)
    assert state() == "finished"
    # A call that has nothing left to do takes nothing away.
    before = (tmp_path / "run" / "summary.json").stat().st_ino
    monkeypatch.setattr(RunFolder, "write_summary", lambda *_: None)
    rounds.iterate(more, resume=True, display=display)
    assert (tmp_path / "run" / "summary.json").stat().st_ino == before


def _recipe(folder: Path) -> Path:
    path = folder / "r.toml"
    path.write_text("model = 'm'\n[data]\ntask = 'arithmetic'\n[iterate]\nrounds = 1\n")
    return path


def test_rounds_do_not_go_on_with_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each round is a training of its own, so that none of them would notice."""
    said: list[str] = []
    display: Any = SimpleNamespace(line=said.append)
    recipe = load_recipe(_recipe(tmp_path), out=tmp_path / "run")
    monkeypatch.setattr(rounds, "check", lambda *_, **__: (recipe.rounds.verifier, "arithmetic"))
    monkeypatch.setattr(rounds, "one_round", lambda *_: {"round": 1})
    for name in ("summarize", "table"):
        monkeypatch.setattr(rounds, name, lambda *_, **__: {})
    noted: list[str] = []
    monkeypatch.setattr(rounds, "write_page", lambda *_, notes, **__: noted.extend(notes))
    rounds.iterate(recipe, display=display)
    before = (tmp_path / "run" / "config.toml").read_bytes()
    rounds.iterate(recipe, resume=True, display=display)
    assert not said
    other = dataclasses.replace(recipe, policy=dataclasses.replace(recipe.policy, threads=1))
    monkeypatch.setattr(rounds, "dataset", lambda _: SimpleNamespace(fingerprint="other"))
    with pytest.raises(ConfigError, match=r"data changed since the rounds began \(fingerprint \w{64}, now other\)"):
        rounds.iterate(other, resume=True, display=display)
    assert (tmp_path / "run" / "config.toml").read_bytes() == before
    rounds.iterate(recipe, resume=True, allow_changes=True, display=display)
    assert "the data changed" in said[-1]
    assert noted[-1].startswith("In or before round 2 the run went on with changes: ")
    assert "the data changed" in noted[-1]
    assert f"<p>{html.escape(noted[-1])}</p>" in page.render([], verifier="arithmetic", notes=noted)
    rounds.iterate(recipe, overwrite=True, display=display)
