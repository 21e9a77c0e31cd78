"""Real tiny runs with what the warnings are about; and one with nothing wrong, in which nothing is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiers
import trew
from run_help import Watching, configured, rows, save_models
from trew.runs.report.html import render_report
from trew.runs.report.read import load_run
from trew.training.run import TrainingRun

REWARDS = """
def constant(completions, **columns):
    return [1.0] * len(completions)

def even(completions, completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / 16 for ids in completion_ids]

def one_token(completions, completion_ids, **columns):
    return [sum(i == 65 for i in ids) / 12 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))["native"]


def run(folder: Path, model: Path, reward: str, **settings: Any) -> tuple[Path, list[str], dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    short = {"window": 3, "no_signal": 3}
    settings = {
        "steps": 6, "rewards": [{"name": f"{folder}/rewards.py:{reward}"}],
        "rollout": {"prompts": 4, "completions": 8, "max_tokens": 12, "temperature": 1.0},
        "eval": {"size": 2, "correct_at": 0.9}, "health": short, **settings,
    }  # fmt: skip
    config, display = configured(folder, model, **settings), Watching()
    summary = trew.train(config, display=display)
    return Path(config.out), display.warnings, summary


FAR = {"lr": 0.05, "inner_updates": 4}
GRPO = {"preset": "grpo", "beta": 0.0}
WIDE = {**GRPO, "eps_low": 0.99, "eps_high": 50.0}
LOST = "leave 100.0% of the weights as they are"

CASES = {
    "no_signal": ("constant", {}, "3 steps in a row in which no completion had an advantage"),
    "zero_signal": ("constant", {}, "in 100% of groups all completions score the same"),
    "short": ("constant", {"objective": {**GRPO, "dynamic_sampling": True}}, "learn from 0 groups on average"),
    "truncated": ("even", {}, "of completions are cut off at the limit of rollout.max_tokens = 12"),
    "unchanged": ("even", {"learner": {"lr": 1e-14, "dtype": "bfloat16"}}, LOST),
    "unchanged by clipping": ("even", {"learner": {"max_grad_norm": 1e-30}}, LOST),
    "kl_old": ("even", {"learner": FAR, "objective": {"preset": "reinforce"}}, "nats per token from where it began"),
    "ratio": ("even", {"learner": {"lr": 0.02, "inner_updates": 8}, "objective": WIDE}, "have an importance"),
    "kl": ("even", {"learner": {"lr": 0.05}, "objective": {**GRPO, "beta": 1e-4}}, "3 steps in a row above 1"),
    "clipped": ("even", {"learner": {"max_grad_norm": 1e-4}}, "cut down to learner.max_grad_norm = 0.0001"),
    "entropy": ("one_token", {"steps": 8, "learner": {"lr": 0.02}, "eval": {"correct_at": 2.0}}, "entropy fell"),
}  # fmt: skip


ALWAYS = ("no_signal", "short", "truncated", "kl")
"""The others repeat them with another rule; each rule is tested on rows in ``tests/contract/test_every_setting.py``."""


@pytest.mark.parametrize("case", tiers.some(CASES, ALWAYS))
def test_what_is_wrong_is_told_while_it_runs_and_in_everything_that_it_leaves(case, model, tmp_path):
    reward, settings, says = CASES[case]
    rule = case.partition(" ")[0]
    out, warnings, summary = run(tmp_path / "run", model, reward, **settings)
    told = [text for text in warnings if says in text]
    assert len(told) == 1, warnings
    found = [w for w in summary["warnings"] if w["rule"] == rule]
    assert len(found) == 1
    assert told == [f"step {found[0]['step']}: {found[0]['text']}"]
    assert max(row["health"] for row in rows_of(out)) >= 1
    assert json.loads((out / "summary.json").read_text())["warnings"] == summary["warnings"]
    assert told[0] in (out / "events.log").read_text()
    # The report finds the same from the rows alone.
    data = load_run(out)
    assert [vars_of(f) for f in data.health] == summary["warnings"]
    page = render_report([data])
    assert page.count(f"step {found[0]['step']} (<b>{rule}</b>)") == 1


def test_a_short_run_that_learned_nothing_says_so_at_its_end_in_its_report_and_when_asked_again(model, tmp_path):
    _, warnings, _ = run(tmp_path / "run", model, "constant", steps=2)
    told = [text for text in warnings if text.startswith("Nothing was learned: none of the 2 steps had a gradient")]
    assert len(told) == 1, warnings
    assert "got the same reward (1)" in told[0]
    assert told[0].split(".")[0] in render_report([load_run(tmp_path / "run" / "run")])
    config = configured(
        tmp_path / "run", model, steps=2, rewards=[{"name": f"{tmp_path}/run/rewards.py:constant"}],
        rollout={"prompts": 4, "completions": 8, "max_tokens": 12, "temperature": 1.0},
        eval={"size": 2, "correct_at": 0.9}, health={"window": 3, "no_signal": 3},
    )  # fmt: skip
    again = Watching()
    trew.train(config, resume=True, display=again)
    assert told[0] in again.warnings


def test_graded_rewards_that_dynamic_sampling_never_counts_as_right_are_told_at_once_and_at_the_end(model, tmp_path):
    objective = {**GRPO, "dynamic_sampling": True}
    rollout = {"prompts": 4, "completions": 8, "max_tokens": 12, "refills": 1}
    settings = {"steps": 2, "objective": objective, "rollout": rollout, "eval": {"size": 2, "correct_at": 2.0}}
    out, warnings, _ = run(tmp_path / "run", model, "even", **settings)
    first = next(text for text in warnings if text.startswith("dynamic sampling kept none of the 8 groups"))
    assert "rewards differ in 8 of them, which does not count" in first
    assert "gives at least eval.correct_at = 2:" in first
    assert f"step 1: {first}" in (out / "events.log").read_text()
    assert any("Rewards differed, but dynamic sampling kept no group" in text for text in warnings)


def test_a_run_that_learned_something_does_not_say_that_it_did_not(model, tmp_path):
    out, warnings, _ = run(tmp_path / "run", model, "even", steps=2)
    assert not any("Nothing was learned" in text for text in warnings)
    assert load_run(out).outcome == []


def vars_of(finding: Any) -> dict[str, Any]:
    return {"step": finding.step, "rule": finding.rule, "text": finding.text}


def rows_of(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "health" in row]


def test_a_run_that_is_cut_off_and_continued_says_the_same(model, tmp_path, monkeypatch):
    _, _, whole = run(tmp_path / "whole", model, "constant", steps=8, checkpoint={"every": 2})
    real, calls = TrainingRun.attempt, [0]

    def attempt(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(TrainingRun, "attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", model, "constant", steps=8, checkpoint={"every": 2})
    config = configured(
        tmp_path / "cut", model, steps=8, rewards=[{"name": f"{tmp_path}/cut/rewards.py:constant"}],
        rollout={"prompts": 4, "completions": 8, "max_tokens": 12, "temperature": 1.0},
        eval={"size": 2, "correct_at": 0.9}, health={"window": 3, "no_signal": 3}, checkpoint={"every": 2},
    )  # fmt: skip
    display = Watching()
    resumed = trew.train(config, resume=True, display=display)
    assert resumed["warnings"] == whole["warnings"]
    assert [row["health"] for row in rows(config).values()][-3:] == [
        row["health"] for row in rows_of(tmp_path / "whole" / "run")
    ][-3:]


def test_a_run_without_trouble_is_left_alone(model, tmp_path):
    """Random weights never end a completion by themselves, so that being cut off is allowed here."""
    health = {"window": 5, "truncated": 0.0}
    _, warnings, summary = run(tmp_path / "run", model, "even", steps=15, learner={"lr": 1e-3}, health=health)
    assert warnings == []
    assert summary["warnings"] == []
