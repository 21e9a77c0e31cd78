"""What changed a run's figures is in its folder afterwards: other settings on the way, data that were left out, rewards
that failed in an evaluation."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trew
from recipe_help import ODD, recipe, run_folder
from trew.cli.eval import eval as evaluate
from trew.cli.export import model as export_model
from trew.config.recipe import parse
from trew.errors import ConfigError
from trew.reward_training.data import gather
from trew.reward_training.settings import PairData
from trew.runs.report import load_run, write_report
from trew.training.planning import plan
from trew.utils.console import Silent


def train(place: Path, *settings: str, **more: bool) -> Path:
    trew.train(place / "r.toml", set=[f"out={place / 'run'}", *settings], display=Silent(), **more)
    return place / "run"


def test_adapters_of_a_checkpoint_are_merged_by_the_alpha_that_they_were_trained_with(tmp_path):
    text = recipe(tmp_path / "lm", chat_template="plain", steps=2, rewards=[{"name": "reward.py:odd"}],
                  lora={"rank": 2, "alpha": 4.0}, checkpoint={"every": 2, "keep": 9}, eval={"size": 2})  # fmt: skip
    run_folder(tmp_path, text, reward=ODD)
    train(tmp_path)
    run = train(tmp_path, "steps=4", "lora.alpha=64.0", resume=True, allow_changes=True)
    adapters = load_file(run / "checkpoints/000002/adapter_model.safetensors")
    base = load_file(tmp_path / "lm/model.safetensors")
    export_model(run, out=tmp_path / "exported", step=2)
    exported = load_file(tmp_path / "exported/model.safetensors")
    for name in (name for name in adapters if "lora_A" in name):
        weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
        change = adapters[name.replace("lora_A", "lora_B")] @ adapters[name] * 4 / 2
        assert torch.allclose(exported[weight] - base[weight], change, atol=1e-6)
        assert change.any()
    assert json.loads((tmp_path / "exported/adapter/adapter_config.json").read_text())["lora_alpha"] == 4
    assert "rank 2, alpha 4 " in (tmp_path / "exported/README.md").read_text()


def test_a_run_is_not_evaluated_on_what_it_trained_on_under_earlier_settings(tmp_path):
    text = recipe(
        tmp_path / "lm", chat_template="plain", steps=1, rewards=[{"name": "reward.py:odd"}], eval={"size": 4}
    )
    run_folder(tmp_path, text, reward=ODD)
    train(tmp_path)
    run = train(tmp_path, "steps=2", "eval.size=8", resume=True, allow_changes=True)
    with pytest.raises(ConfigError, match=r"4 of 8 evaluation prompts are in the training data.*other prompts than at"):
        evaluate(str(run))


def test_what_was_left_out_of_the_data_is_told_in_the_folder(tmp_path):
    rows = [{"prompt": f"{i} + 1?" + " and more" * (20 * (i % 3 == 0)), "answer": str(i)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"task": "prompts", "train": str(tmp_path / "rows.jsonl"), "args": {}, "overlong": "drop"}
    text = recipe(
        tmp_path / "lm",
        chat_template="plain",
        steps=1,
        rewards=[{"name": "reward.py:odd"}],
        data=data,
        eval={"size": 3},
    )
    run_folder(tmp_path, text, reward=ODD)
    run = train(tmp_path, "data.max_prompt_tokens=40")
    notes = [note for note in load_run(run).summary["notes"] if "longer than" in note]
    assert notes
    page, events = write_report(run).read_text(), (run / "events.log").read_text()
    assert all(html.escape(note) in page and f"note: {note}" in events for note in notes)


DOWN = """
CALLS = []
def style(completions, **columns):
    CALLS.append(len(completions))
    if sum(CALLS) > 4 + 4:  # those of the first evaluation and of the step
        raise RuntimeError("it is down")
    return [1.0] * len(completions)
"""


def test_rewards_that_fail_in_the_last_evaluation_are_told(tmp_path):
    rewards = [{"name": "reward.py:odd"}, {"name": "reward.py:style", "weight": 0.5, "on_failure": "skip"}]
    text = recipe(tmp_path / "lm", chat_template="plain", steps=1, rewards=rewards,
                  eval={"size": 4, "correct_reward": "odd"}, rollout={"prompts": 2, "completions": 2},
                  track={"regrade_every": 0})  # fmt: skip
    run_folder(tmp_path, text, reward=ODD + DOWN)
    run = train(tmp_path)
    (told,) = [line for line in (run / "events.log").read_text().splitlines() if "evaluation: " in line]
    assert " step 1: evaluation: reward 'style'" in told
    assert "4 of 4 completions" in told
    (row,) = [row for row in load_run(run).rows if "groups_sampled" in row]
    assert (row["groups_sampled"], row["groups_trained"]) == (2, 2)


def test_the_warnings_of_a_run_that_went_on_are_those_of_its_report(tmp_path):
    """They quote settings: the report judges all rows by those of the end."""
    text = recipe(tmp_path / "lm", chat_template="plain", steps=3, rewards=[{"name": "reward.py:odd"}],
                  rollout={"max_tokens": 2}, health={"window": 2, "truncated": 0.1}, checkpoint={"every": 3},
                  eval={"size": 2})  # fmt: skip
    run_folder(tmp_path, text, reward=ODD)
    train(tmp_path)
    run = train(tmp_path, "steps=4", "rollout.max_tokens=3", resume=True, allow_changes=True)
    data = load_run(run)
    told = [(w["step"], w["rule"], w["text"]) for w in data.summary["warnings"]]
    assert told == [(w.step, w.rule, w.text) for w in data.health]
    assert any("rollout.max_tokens = 3" in text for _, _, text in told)


def test_who_reads_the_completions_of_a_run_with_two_settings_is_told(tmp_path):
    text = recipe(tmp_path / "lm", chat_template="plain", steps=2, rewards=[{"name": "reward.py:odd"}],
                  checkpoint={"every": 2}, eval={"size": 2})  # fmt: skip
    run_folder(tmp_path, text, reward=ODD)
    run = train(tmp_path)
    assert gather(PairData(runs=(str(run),)), seed=0).notes == ()
    train(tmp_path, "steps=3", "learner.lr=1e-3", resume=True, allow_changes=True)
    told = "After step 2 the run went on with changes: learner.lr was 0.01, is 0.001"
    (of_pairs,) = gather(PairData(runs=(str(run),)), seed=0).notes
    assert told in of_pairs
    data = {"task": "rollouts", "train": str(run), "args": {"min_reward": 0.1}}
    table = {"model": str(tmp_path / "lm"), "out": str(tmp_path / "rft"), "data": data, "eval": {"size": 2}}
    settings = parse(table | {"objective": {"preset": "rft"}})
    assert sum(told in note for note in plan(settings).notes) == 1
