"""What ``trew view`` has of everything: visits of a prompt, names of rewards, numbers of evaluations."""

from dataclasses import replace
from pathlib import Path

import pytest

from trew.runs import RunFolder
from trew.types import Score
from trew.view import prompts
from view_help import CONFIG, client, get, group, write_step


def test_of_very_many_visits_the_first_and_the_last_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST_VISITS", 4)
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config(CONFIG.format(steps=7, seed=0, lr=1e-3))
        for step in range(1, 8):
            write_step(run, step, group("a", "x", "y"), *([group("b", "x")] if step < 5 else []))
    page = client(tmp_path)
    for uid, steps, total in (("a", [1, 2, 6, 7], 7), ("b", [1, 2, 3, 4], 4)):
        found = get(page, "runs/x/prompt", uid=uid)
        assert ([visit["step"] for visit in found["visits"]], found["total"]) == (steps, total)
    found = get(page, "runs/x/prompt", uid="a", offset=3)
    assert [visit["step"] for visit in found["visits"]] == [4, 5, 6, 7]


def test_every_reward_can_be_searched_for_though_the_first_completion_was_not_judged(tmp_path: Path) -> None:
    lost = group("a", "x", "y")
    lost = replace(lost, scores=(Score(None, "environment_error"),) * 2)
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        write_step(run, 1, lost, group("b", "x", "y"))
    page = client(tmp_path)
    assert get(page, "runs/x/rollouts", limit=1)["rows"][0]["parts"] == {}
    assert get(page, "runs/x/steps")["parts"] == ["right", "form"]


def test_all_that_evaluations_measured_is_given(tmp_path: Path) -> None:
    known = {"low": None, "high": None, "n": 8}
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config('model = "none"\n')
        for step, value in ((0, 0.5), (2, 0.75)):
            of_set = {"eval_accuracy/a": 0.5, "eval_low/a": 0.1, "eval_high/a": 0.9, "eval_n/a": 8}
            row = {"eval_accuracy": value, "eval_low": 0.25, "eval_high": 1.0, "eval_n": 8, **of_set}
            run.log({"step": step, **row, "eval_auc": value + 0.125, "eval_loss": 1 - value})
    found = get(client(tmp_path), "runs/x/metrics")
    assert found["eval_others"] == {
        "auc": [{"step": 0, "accuracy": 0.625, **known}, {"step": 2, "accuracy": 0.875, **known}],
        "loss": [{"step": 0, "accuracy": 0.5, **known}, {"step": 2, "accuracy": 0.25, **known}],
    }
    with RunFolder.open(tmp_path / "y") as run:
        run.write_config('model = "none"\n')
        row = {"eval_loss": 0.5, "eval_loss_low": 0.25, "eval_loss_high": 1.0, "eval_n": 8}
        run.log({"step": 0, **row, "eval_preference_accuracy": 0.75, "eval_preference_margin": float("nan")})
    found = get(client(tmp_path), "runs/y/metrics")
    assert found["eval_others"] == {"preference_accuracy": [{"step": 0, "accuracy": 0.75, **known}]}
