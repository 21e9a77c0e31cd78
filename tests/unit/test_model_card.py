"""The model card by itself: what it says of evaluations, from a recipe and rows of metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollouts_help import rollout
from trew.cli.model_card import card
from trew.config import parse
from trew.runs.rollouts import write_rollouts
from trew.types import Group, Prompt, Score, ScoredGroup


def card_of(folder: Path, table: dict[str, Any], *rows: dict[str, Any], step: int) -> str:
    (folder / "config.toml").write_text("")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = parse({"model": "m"} | table, base=folder)
    return card(config, folder, step, name="mine", base_folder=None)


def loss(step: int, n: int, low: float | None, high: float | None) -> dict[str, Any]:
    return {"step": step, "eval_loss": 2.0, "eval_loss_low": low, "eval_loss_high": high, "eval_n": n}


def test_the_loss_of_a_single_row_is_said_without_an_interval(tmp_path):
    data = {"task": "demonstrations", "train": "rows.jsonl"}
    text = card_of(tmp_path, {"data": data, "steps": 2}, loss(0, 1, None, None), loss(2, 9, 1.5, 2.5), step=2)
    assert "| before training | 2.0000 | – | 1 |" in text
    assert "| this model (step 2) | 2.0000 | 1.5000 to 2.5000 | 9 |" in text


def test_figures_are_said_to_be_of_the_data_that_they_are_of(tmp_path):
    data = {"task": "prompts", "train": "org/train-set", "eval": "org/other-set"}
    row = {"step": 2, "eval_accuracy": 0.5, "eval_low": 0.3, "eval_high": 0.7, "eval_n": 20}
    text = card_of(tmp_path, {"data": data, "steps": 2, "rewards": [{"name": "gsm8k"}]}, row, step=2)
    assert "On held-out prompts of `org/other-set`, 1 completion each" in text
    assert "| prompts | `org/train-set` |" in text
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["model-index"][0]["results"][0]["dataset"] == {"name": "org/other-set", "type": "org/other-set"}
    assert head["datasets"] == ["org/train-set"]


def test_the_model_of_the_end_is_made_again_without_a_checkpoint(tmp_path):
    table = {"data": {"task": "gsm8k"}, "steps": 2, "checkpoint": {"every": 0}}
    assert "trew export model RUN --out FOLDER" in card_of(tmp_path, table, step=2)
    assert "trew export model RUN --step 1 --out FOLDER" in card_of(tmp_path, table, step=1)


def test_a_checkpoint_has_the_time_and_the_warnings_up_to_its_step(tmp_path):
    warnings = [{"step": step, "rule": "kl", "text": f"moved by {step}"} for step in (1, 2)]
    summary = {"steps": 2, "seconds": 7200.0, "device": "cpu", "warnings": warnings}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": 1, "seconds": 1800.0}, {"step": 2, "seconds": 5400.0}]
    table = {"data": {"task": "gsm8k"}, "steps": 2}
    early, late = (card_of(tmp_path, table, *rows, step=step) for step in (1, 2))
    assert "0.50 hours of steps" in early
    assert ("moved by 1" in early, "moved by 2" in early) == (True, False)
    assert "2.00 hours of steps" in late
    assert "moved by 2" in late


def test_a_checkpoint_is_not_said_to_have_changes_that_came_after_it(tmp_path):
    """A run that went on from step 4 under another learning rate: the model of step 4 has not seen it."""
    line = {"step": 4, "config": "", "settings": ["learner.lr was 0.1, is 0.2"], "others": [], "versions": []}
    (tmp_path / "changes.jsonl").write_text(json.dumps(line) + "\n")
    table = {"data": {"task": "gsm8k"}, "steps": 6}
    told = ["learner.lr was 0.1, is 0.2" in card_of(tmp_path, table, step=step) for step in (2, 4, 5, 6)]
    assert told == [False, False, True, True]


def test_a_run_that_was_killed_has_its_warnings_and_the_versions_of_its_checkpoint(tmp_path):
    """Without a summary, the card had neither, as if nothing had been wrong."""
    rows = [{"step": step, "truncated_share": 0.8} for step in range(1, 13)]
    made = {"trew": "1.0", "python": "3.12", "torch": "2.9", "transformers": "5.0", "threads": "4"}
    (tmp_path / "checkpoints/000012").mkdir(parents=True)
    (tmp_path / "checkpoints/000012/state.json").write_text(json.dumps({"meta": {"made_with": made}}))
    table = {"data": {"task": "gsm8k"}, "steps": 20}
    text = card_of(tmp_path, table, *rows, step=12)
    assert "* `80% of completions are cut off" in text
    assert "| versions | `trew 1.0, python 3.12, torch 2.9, transformers 5.0` |" in text
    early = card_of(tmp_path, table, *rows, step=4)
    assert "cut off at" not in early, "the warning is of step 10"
    assert "| versions |" not in early, "this checkpoint is gone"


def test_the_time_of_a_short_run_is_in_seconds(tmp_path):
    """It took 0.00 hours."""
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 2, "seconds": 12.34, "device": "cpu"}))
    table = {"data": {"task": "gsm8k"}, "steps": 2}
    assert "| 12.3 seconds of steps on `cpu` |" in card_of(tmp_path, table, step=2)


TEMPLATE, PLAIN = "messages need the chat template", "text is given as it is, without a chat template"
OWN = {"task": "prompts", "train": "rows.jsonl", "eval": "rows.jsonl"}


@pytest.mark.parametrize(
    ("data", "said"),
    [(OWN, [True, True]), (OWN | {"args": {"chat": True}}, [True, False]), ({"task": "gsm8k"}, [True, False]),
     ({"task": "demonstrations", "train": "rows.jsonl"}, [True, True])],
)  # fmt: skip
def test_how_to_ask_is_said_as_the_recipe_has_it(tmp_path: Path, data: dict[str, Any], said: list[bool]) -> None:
    rewards = [{"name": "gsm8k"}] if data["task"] == "prompts" else []
    text = card_of(tmp_path, {"data": data, "steps": 2, "rewards": rewards}, step=2)
    assert [TEMPLATE in text, PLAIN in text] == said


@pytest.mark.parametrize(
    ("given", "said"),
    [({"text": "2 + 2 ="}, [False, True]), ({"messages": ({"role": "user", "content": "2 + 2?"},)}, [True, False])],
)
def test_how_to_ask_is_said_as_the_run_was_asked(tmp_path: Path, given: dict[str, Any], said: list[bool]) -> None:
    """Every card asked for the chat template, also of a run on plain text."""
    group = ScoredGroup(Group(Prompt("0", **given), (rollout(2, text="4"),)), (Score(1.0),))
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts" / "000002.parquet", [group], step=2)
    text = card_of(tmp_path, {"data": OWN, "steps": 2, "rewards": [{"name": "gsm8k"}]}, step=2)
    assert [TEMPLATE in text, PLAIN in text] == said


def test_rollouts_that_cannot_be_read_leave_it_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "000002.parquet").write_bytes(b"PAR1 no table")
    text = card_of(tmp_path, {"data": {"task": "gsm8k"}, "steps": 2}, step=2)
    assert [TEMPLATE in text, PLAIN in text] == [True, False]
