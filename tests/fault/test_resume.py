"""A run that is killed anywhere and resumed is the run that was never killed: weights, optimizer, rows, completions.

Real processes and SIGKILL for the whole group, at instants that ``crashing`` knows. Each kind of run is killed again
and again, at another instant each time, before it may finish. ``benchmarks/crash.py`` does the same at random.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch

import crashing
import tiers
from crashing import Watched, differences
from forks import wait_for

KILLS = {
    "grpo": ["metrics row/torn:4", "rotation/before:1", "completions/after:2", "report/before:1"],
    "dapo": ["reward/within:3", "learning/after:2", "manifest/before:1", "learning/after:3"],
    "sets": ["reward/within:4", "learning/after:2", "manifest/before:1", "learning/after:3"],
    "all": ["inner update/within:5", "inner update/before:14"],
    "lora-8bit": ["tensors/after:2"],
    "opd": ["meeting/after:1", "answer/before:17", "inner update/within:6", "teacher/after:2"],  # in steps 0, 2, 3, 4
}  # fmt: skip
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def undisturbed(server, folder: Path, kind: str) -> Path:
    """A run that was never killed; made once."""
    whole = folder / f"{kind}-whole"
    if not whole.exists():
        assert crashing.run(server, folder, crashing.recipe(folder, kind, steps=STEPS), "--out", whole)[0] == 0
    return whole


@pytest.mark.parametrize("kind", tiers.some(KILLS, ("all", "opd")))
def test_killed_and_resumed_equals_never_killed(server, folder, kind):
    with crashing.served(folder, kind):
        whole, cut, told = undisturbed(server, folder, kind), folder / f"{kind}-cut", ""
        recipe = crashing.recipe(folder, kind, steps=STEPS)
        for instant in KILLS[kind]:
            code, output = crashing.run(server, folder, recipe, "--out", cut, "--resume", instant=instant)
            assert code == -9, f"{instant} was not reached: {output}"
            told += output
        code, output = crashing.run(server, folder, recipe, "--out", cut, "--resume")
        assert code == 0, output
    assert re.search(r"continuing after step [1-9]", told + output), "every run began at its beginning again"
    assert differences(whole, cut) == []


def test_a_torn_row_is_dropped_and_its_step_is_there_once(server, folder):
    """What the kill leaves is half a line; what the resumed run leaves is every step once."""
    recipe = crashing.recipe(folder, "grpo", steps=3)
    code, _ = crashing.run(server, folder, recipe, "--out", "torn", instant="metrics row/torn:4")
    assert code == -9
    metrics = folder / "torn" / "metrics.jsonl"
    assert not metrics.read_text().endswith("\n")
    assert crashing.run(server, folder, recipe, "--out", "torn", "--resume")[0] == 0
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 2, 3]
    assert "dropped a partial last line" in (folder / "torn" / "events.log").read_text()


def test_a_kill_while_the_next_step_is_under_way_and_a_checkpoint_too(server, folder):
    """In the background: the run generates, the writer writes, both die."""
    recipe = crashing.recipe(folder, "grpo", steps=STEPS)
    command = server.start("train", recipe, "--out", "both", cwd=folder, hold="trew.runs.checkpoint_files:_complete:1")
    command.held()
    wait_for(lambda: len(list((folder / "both" / "rollouts").glob("*.parquet"))) > 2 or command.ended())  # it goes on
    command.kill(9).wait()
    left = [p.name for p in (folder / "both" / "checkpoints").iterdir()]
    assert left == [left[0]]
    assert left[0].startswith(".tmp-000002")
    code, output = crashing.run(server, folder, recipe, "--out", "both", "--resume")
    assert code == 0, output
    assert ".tmp-000002" in output
    assert "left behind by an interrupted write or removal; ignored" in output
    assert differences(undisturbed(server, folder, "grpo"), folder / "both") == []


def test_warnings_go_on_where_they_were(server, folder):
    """What is told the first, second, fourth ... time, and what is told once in many steps, is told as if nothing had
    happened: the lines of the resumed run are the last ones of the whole run."""
    path = crashing.recipe(folder, "waits", steps=6, checkpoint={"every": 2, "background": True}, eval={"every": 0})
    (folder / "reward.py").write_text(crashing.REWARDS + FAILS)
    path.write_text(re.sub(r"reward\.py:odd", "reward.py:fails", path.read_text()).replace(
        'name = ', 'on_failure = "skip"\nname = ', 1))  # fmt: skip

    def told(run: str) -> list[str]:
        lines = (folder / run / "events.log").read_text().splitlines()
        return [found[1] for line in lines if (found := re.search(r"(step \d+: .*)", line)) and "dropped" not in line]

    assert crashing.run(server, folder, path, "--out", "told")[0] == 0
    code, output = crashing.run(server, folder, path, "--out", "told-cut", instant="generation/before:6")
    assert code == -9, output
    before = len(told("told-cut"))
    code, output = crashing.run(server, folder, path, "--out", "told-cut", "--resume")
    assert code == 0, output
    after = int(re.search(r"continuing after step (\d+)", output)[1])
    again = [line for line in told("told") if int(line.split()[1].rstrip(":")) > after]
    assert any("times)" in line for line in again), told("told")
    assert told("told-cut")[before:] == again


FAILS = """
def fails(completions, completion_ids, **columns):
    if completion_ids[0][0] % 2:
        raise ValueError("odd")
    return [float(len(ids) % 2) for ids in completion_ids]
"""


def test_a_checkpoint_is_a_model_that_others_load(server, folder):
    from transformers import AutoModelForCausalLM

    whole = undisturbed(server, folder, "grpo")
    newest = crashing.newest(whole)
    final = AutoModelForCausalLM.from_pretrained(whole / "final").state_dict()
    loaded, info = AutoModelForCausalLM.from_pretrained(newest, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(tensor, final[name]) for name, tensor in loaded.state_dict().items())


def test_a_checkpoint_of_adapters_is_an_adapter_that_peft_loads(server, folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    whole = undisturbed(server, folder, "lora-8bit")
    newest = crashing.newest(whole)
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about attributes that transformers renamed
        merged = PeftModel.from_pretrained(base, newest).merge_and_unload().state_dict()
    final = AutoModelForCausalLM.from_pretrained(whole / "final").state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, final[name], rtol=0, atol=1e-6)


def test_phases_are_where_they_are_said_to_be(server, folder):
    """The instrument itself: a kill during the inner update finds the run there."""
    recipe = crashing.recipe(folder, "grpo", steps=STEPS)
    watched = Watched.start(server, folder, recipe, "--out", "watched")
    assert watched.wait_for(lambda run: run.phase[0] == "inner update")
    watched.kill()
    assert not (folder / "watched" / "rollouts" / "000004.parquet").exists()
