"""benchmarks/recipes.py on made-up run folders: what it keeps and draws of each kind of run, and its rows; and what
benchmarks/environments.py keeps of runs of recipes with environments."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from trew.config import load
from trew.data.tasks.arithmetic import Arithmetic
from trew.iterate import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own(monkeypatch):
    """benchmarks/recipes.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("recipes")


def made_up(folder: Path, rows: list[dict[str, Any]], **summary: Any) -> None:
    """A run folder of a finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text("")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"steps": max(row["step"] for row in rows), **summary}))


def test_a_recipe_that_learns_from_rows_is_measured_by_its_loss(own, tmp_path):
    run, files = tmp_path / "sft", tmp_path / "sft-files"
    rows = [{"step": 0, "eval_loss": 3.0, "eval_loss_low": 2.5, "eval_loss_high": 3.5}]
    rows += [{"step": step, "loss": 3.0 - step} for step in (1, 2)]
    rows += [{"step": 2, "eval_loss": 1.5, "eval_loss_low": 1.25, "eval_loss_high": 2.0}]
    made_up(run, rows, task="demonstrations", device="cpu", other="is not kept")
    files.mkdir()
    for when, mean in (("before", 0.25), ("after", 0.75)):
        (files / f"{when}.json").write_text(json.dumps({"result": {"accuracy": {"mean": mean}, "n": 8, "seconds": 1}}))
    row = own.measured("sft", run, ("threads=1",))
    assert (row["recipe"], row["set"], row["task"]) == ("sft.toml", ["threads=1"], "demonstrations")
    assert row["held_out"]["eval_loss"] == {"before": 3.0, "after": 1.5}
    assert row["held_out"]["eval_loss_high"] == {"before": 3.5, "after": 2.0}
    assert row["curves"]["loss"]["first"] == 1.5  # of two steps: both
    assert row["graded"]["after"] == {"accuracy": {"mean": 0.75}, "n": 8}
    assert "other" not in row
    own.draw("sft", run, tmp_path / "sft.svg")
    picture = (tmp_path / "sft.svg").read_text()
    assert all(text in picture for text in ("loss, nats per token", "held out, 95 %", ">3<"))


def test_rounds_are_measured_and_drawn_one_after_the_other(own, tmp_path):
    run = tmp_path / "iterative"
    for number, (before, after) in enumerate([(0.25, 0.5), (0.5, 0.75)], start=1):
        held = {step: {"step": step, "eval_accuracy": mean, "eval_low": mean - 0.1, "eval_high": mean + 0.1}
                for step, mean in ((0, before), (2, after))}  # fmt: skip
        steps = [{"step": 1, "accuracy": before}, {"step": 2, "accuracy": after}]
        made_up(run / f"round-{number:02d}" / "policy", [held[0], *steps, held[2]], model="of the round", device="cpu")
    (run / "summary.json").write_text(json.dumps({"model": "the first", "rounds": 2, "rows": [{"round": 0}]}))
    assert own.column(run, "accuracy") == ([1, 2, 3, 4], [0.25, 0.5, 0.5, 0.75])
    assert own.column(run, "eval_accuracy") == ([0, 2, 2, 4], [0.25, 0.5, 0.5, 0.75])
    row = own.measured("iterative", run, ())
    assert (row["model"], row["rounds"], row["device"], row["rows"]) == ("the first", 2, "cpu", [{"round": 0}])
    assert row["held_out"]["eval_accuracy"] == {"before": 0.25, "after": 0.75}
    assert "graded" not in row
    own.draw("iterative", run, tmp_path / "iterative.svg")
    assert "accuracy by the verifier" in (tmp_path / "iterative.svg").read_text()


def test_rows_for_recipes_repeat_no_problem_and_none_that_models_are_graded_by(own, tmp_path):
    config = load(ROOT / "recipes" / "arithmetic.toml", own.GRADED)
    _, graded, _ = Arithmetic(**config.data.args).generate(eval_size=config.eval.size, seed=config.seed)
    taught = [row["messages"] for row in own.demonstrations()]
    assert len(taught) == 400
    assert [message["role"] for message in taught[0]] == ["user", "assistant"]

    def problem(text: str) -> str:
        return text.removeprefix("What is ").partition("?")[0]

    def orders(text: str) -> set[str]:
        left, op, right = text.split()
        return {text, f"{right} + {left}"} if op == "+" else {text}

    asked = [problem(first["content"]) for first, _ in taught]
    others = {other for prompt in graded for other in orders(prompt.columns["expression"])}
    assert not others & set(asked)
    assert sum(len(orders(text) & set(asked)) for text in asked) == len(asked)
    rows = list(own.pairs())
    assert rows == list(own.pairs())
    assert [problem(row["prompt"][0]["content"]) for row in rows] == asked
    assert [row["chosen"] for row in rows] == [answer["content"] for _, answer in taught]
    assert all(int(row["chosen"]) != int(row["rejected"]) for row in rows)
    recipe = own.RECIPES["dpo"].recipe("dpo", tmp_path)
    assert recipe.read_text() == (ROOT / "recipes" / "dpo.toml").read_text()
    assert (recipe.parent / "pairs.jsonl").read_text().count("\n") == 400


def test_settings_of_measured_recipes_are_accepted(own, tmp_path):
    for name, wanted in own.RECIPES.items():
        if wanted.recipe is not own.from_page:
            read = load_recipe if wanted.command == "iterate" else load
            read(wanted.recipe(name, tmp_path), wanted.set)


def test_runs_of_environments_are_kept_and_never_mixed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    environments = importlib.import_module("environments")
    now = environments.today("grid")
    assert environments.today("guess, random hints")["environment.args"] == {"hints": "random"}

    def row(seed: int, level: float, **changed: Any) -> dict[str, Any]:
        return {"environment": "grid", "seed": seed, "settings": {**now, **changed}, "success": [level] * 4}

    old, new = [row(0, 0.1, steps=4), row(1, 0.2, steps=4)], [row(1, 0.9)]
    rows = environments.merged(old, new)
    assert [(each["seed"], each["success"][0]) for each in rows] == [(0, 0.1), (1, 0.9)]
    assert [environments.changes(each, now) for each in rows] == ["steps = 4", ""]
    drawn = environments.picture(rows)
    assert "grid (earlier recipe)" in drawn
    heights = {float(height) for height in re.findall(r'class="tc-line tc-s\d"[^>]*d="M[\d.]+ ([\d.]+)L', drawn)}
    assert len(heights) == 2  # the mean of both would be one line
