"""What ``trew demo`` proposes at its end does what it says, on a tiny random model."""

import re
import shlex

import pyarrow.parquet as pq
import pytest

import tiny
from trew.cli.main import main


def command(*args: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(list(args))
    assert not end.value.code


def test_the_evaluation_that_the_demo_proposes_has_problems_of_another_kind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model")
    command("demo", "--model", "model", "--out", "demo", "--set", "steps=1", "eval.size=6", "rollout.completions=2")
    said = capsys.readouterr().out
    [proposed] = re.findall(r"^ +trew (eval demo .*?)   the trained model", said, re.MULTILINE)
    command(*shlex.split(proposed), "--completions", "asked.parquet")
    asked = pq.read_table("asked.parquet")["prompt"].to_pylist()
    assert len(asked) == 6
    assert all(" - " in prompt and " + " not in prompt for prompt in asked)
    # No recipes of ours are in this folder: the demo's own recipe is proposed in place of one.
    [proposed] = re.findall(r"^ +trew (train .*?)  +the recipe of this run", said, re.MULTILINE)
    command(*shlex.split(proposed))
    assert "to runs/mine" in " ".join(capsys.readouterr().out.split())


def test_the_demo_of_turns_runs_where_its_help_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model")
    settings = ("steps=1", "eval.size=1", "rollout.prompts=1", "rollout.completions=2", "learner.minibatch_prompts=0")
    command("demo", "--task", "guess", "--model", "model", "--set", *settings)
    [folder] = (tmp_path / "runs").iterdir()
    command("demo", "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert f"default runs/demo, or runs/{folder.name}." in re.sub(r"[│ ]+", " ", said)
