"""Reward models through the real command line, on tiny models: trained, used as rewards, step by step, in rounds."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tiny
from recipe_help import metrics
from recipe_help import recipe as recipe_of
from scorer_help import save_scorer
from trew.cli.main import main
from trew.errors import ConfigError
from trew.iterate import load_recipe
from trew.iterate.rounds import check
from trew.models import loading
from trew.rewards.model.scorer import Encoder, Scorer
from trew.runs import trackers
from trew.types import Prompt

SETTINGS = {
    "steps": 2, "seed": 0, "device": "cpu", "rewards": [], "learner": {"lr": 1e-3}, "checkpoint": {"every": 1},
    "rollout": {"prompts": 3, "completions": 4, "max_tokens": 12},
}  # fmt: skip
MINE = """
def odd(completions, **columns):
    return [float(len(c[0]["content"]) % 2) for c in completions]


def steps(completions, completion_ids, **columns):
    out = []
    for ids in completion_ids:
        cut = max(len(ids) // 2, 1)
        out.append([(cut, 0.5)] + ([(len(ids), float(len(ids) % 3))] if len(ids) > cut else []))
    return out
"""


def trew(*args: object, cwd: Path, code: int = 0) -> str:
    """The command line in this process: a new one takes seconds to import torch."""
    said = io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as end,
    ):
        main([*map(str, args)])
    assert end.value.code == code, said.getvalue()
    return said.getvalue()


def recipe(folder: Path, rewards: str, *, preset: str = "grpo", more: str = "") -> Path:
    if not (folder / "lm").exists():
        tiny.save(folder / "lm")
    (folder / "mine.py").write_text(MINE)
    path = folder / "r.toml"
    objective = {"preset": preset} if preset == "grpo-process" else {"preset": preset, "beta": 0.0}
    path.write_text(recipe_of(folder / "lm", **SETTINGS, objective=objective) + rewards + more)
    return path


def test_a_policy_is_trained_on_a_reward_model(tmp_path):
    save_scorer(tmp_path / "rm")
    rewards = (
        '[[rewards]]\nmodel = "rm"\nname = "learned"\nargs = { batch_tokens = 300 }\n'
        '[[rewards]]\nname = "arithmetic"\nweight = 0.0'
    )
    path = recipe(tmp_path, rewards)
    trew("train", path, "--out", "out", cwd=tmp_path)
    rows = metrics(tmp_path / "out")
    assert all("reward/learned" in row and "reward/arithmetic" in row for row in rows if "reward" in row)
    assert any(row.get("grad_norm", 0) > 0 for row in rows)
    table = pq.read_table(tmp_path / "out" / "rollouts" / "000001.parquet").to_pylist()
    parts = [dict(row["parts"]) for row in table]
    assert [row["score"] for row in table] == pytest.approx([p["learned"] for p in parts])
    # The same scores from the files alone: completions of the parquet, the model of the folder.
    encoder = Encoder.load(str(tmp_path / "rm"))
    scorer = Scorer(loading.load_scorer(str(tmp_path / "rm")), encoder)
    ids = [encoder.whole(Prompt("x", messages=tuple(json.loads(r["messages"]))), r["completion"]) for r in table]
    assert scorer.score(ids) == pytest.approx([p["learned"] for p in parts], abs=1e-4)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["accuracy_before"]["mean"] <= 1, "accuracy is the verifier's, though the learned reward comes first"
    trew("train", path, "--out", "out", "--resume", "--set", "steps=3", cwd=tmp_path)
    assert metrics(tmp_path / "out")[-1]["step"] == 3


@pytest.mark.parametrize("which", ["function", "token classifier", "sequence classifier"])
def test_process_supervision_trains_from_steps(tmp_path, which):
    if which == "function":
        rewards = '[[rewards]]\nname = "mine.py:steps"'
    else:
        save_scorer(tmp_path / "rm", head=which.split()[0])
        # The tiny model writes any byte; one that it writes often is the mark.
        rewards = '[[rewards]]\nmodel = "rm"\nargs = { step_mark = "`" }'
    trew("train", recipe(tmp_path, rewards, preset="grpo-process"), "--out", "out", cwd=tmp_path)
    table = pq.read_table(tmp_path / "out" / "rollouts" / "000001.parquet").to_pylist()
    assert any(len(row["step_ends"]) > 1 for row in table), "some completion must have several steps"
    check_advantages(table)


def check_advantages(table: list[dict]) -> None:
    """DeepSeekMath §4.1.3 by hand, from what the rollouts hold."""
    for uid in {row["uid"] for row in table}:
        group = [row for row in table if row["uid"] == uid]
        values = [v for row in group for v in row["step_scores"]]
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
        for row in group:
            steps = list(zip(row["step_ends"], row["step_scores"], strict=True))
            for t, advantage in enumerate(row["advantages"], start=1):
                expected = sum((v - mean) / deviation for end, v in steps if end >= t) if deviation > 1e-9 else 0.0
                assert advantage == pytest.approx(expected, abs=1e-3)


def test_process_supervision_without_steps_is_refused(tmp_path):
    path = recipe(tmp_path, '[[rewards]]\nname = "arithmetic"', preset="grpo-process")
    assert "which needs a reward for every step" in trew("train", path, "--out", "out", cwd=tmp_path, code=2)
    path = recipe(tmp_path, '[[rewards]]\nname = "mine.py:odd"', preset="grpo-process")
    assert "no reward scored any" in trew("train", path, "--out", "out2", cwd=tmp_path, code=1)


FAULTS = [
    ({"labels": 2}, "", "LlamaForSequenceClassification with 2 labels, which is not a score"),
    ({}, "batch_tokns = 4", "args.batch_tokns: unknown argument (did you mean 'batch_tokens'?)"),
    ({}, 'where = { level = "x" }', "applies to no row: it looks for {'level': 'x'}"),
    (None, "", "no such folder: rm"),
]


@pytest.mark.parametrize(("made", "args", "message"), FAULTS, ids=[m[:20] for _, _, m in FAULTS])
def test_a_bad_reward_model_is_refused_with_everything_else(tmp_path, made, args, message):
    if made is not None:
        save_scorer(tmp_path / "rm", **made)
    path = recipe(tmp_path, f'[[rewards]]\nmodel = "./rm"\nargs = {{ {args} }}')
    said = trew("train", path, "--out", "out", "--dry-run", "--set", "steps=0", cwd=tmp_path, code=2)
    if "applies to no row" in message:  # known only with data, which other problems hide
        said = trew("train", path, "--out", "out", "--dry-run", cwd=tmp_path, code=2)
    else:
        assert "steps: got 0" in said
    assert message in said.replace("./rm", "rm")


def write_pairs(folder: Path) -> None:
    rows = [{"prompt": f"{i} is", "chosen": f"{i}!", "rejected": f"{i}?"} for i in range(30)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny.save(folder / "lm")


def test_train_reward(tmp_path, server):
    write_pairs(tmp_path)
    common = ("train-reward", "--model", "lm", "--pairs", "pairs.jsonl", "--out", "rm")
    options = ("--set", "epochs=4", "learner.lr=1e-2", "learner.batch=8", "data.held_out=0.3", "device=cpu")
    said = trew(*common, *options, "--dry-run", cwd=tmp_path)
    assert "Nothing was trained" in said
    assert not (tmp_path / "rm").exists()
    said = server.run(*common, *options, cwd=tmp_path)
    assert "after:  held-out accuracy 1.000" in said
    assert "AUC" in said
    # What is offered for a recipe can be copied: it is TOML, which a table's head and a key on one line are not.
    [line] = [line for line in said.splitlines() if "in a recipe" in line]
    assert tomllib.loads(line.split("in a recipe")[1].partition("(")[0]) == {"model": "rm/final"}
    assert "already holds a finished run" in trew(*common, *options, cwd=tmp_path, code=2)
    trew("train-reward", "rm/config.toml", "--out", "rm2", cwd=tmp_path)
    first, second = (json.loads((tmp_path / n / "summary.json").read_text())["after"] for n in ("rm", "rm2"))
    assert first == second


def test_train_reward_says_everything_that_is_wrong(tmp_path):
    tiny.save(tmp_path / "lm")
    (tmp_path / "empty.jsonl").write_text("")
    said = trew("train-reward", "--model", "nowhere/", "--pairs", "empty.jsonl", "--out", "o", "--set", "epochs=0",
                cwd=tmp_path, code=2)  # fmt: skip
    for part in ("epochs: got 0", "no such folder", "empty.jsonl: has no rows"):
        assert part in said
    assert "data.pairs: none given" in trew("train-reward", "--model", "lm", "--out", "o", cwd=tmp_path, code=2)
    assert "unknown key" in trew("train-reward", "--model", "lm", "--set", "lernrate=1", cwd=tmp_path, code=2)


ROUNDS = """
[iterate]
rounds = 2
prompts = 12
first_prompts = 12
pairs_per_prompt = 3
held_out = 0.3
epochs = 2

[iterate.verifier]
name = "mine.py:odd"

[iterate.learner]
lr = 3e-3
batch = 8
"""


def test_rounds_say_beforehand_what_would_end_them_later(tmp_path, monkeypatch):
    """Each of these ended the first training of the policy, or its pairs, when the reward model was trained already."""
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    path = recipe(tmp_path, "", preset="reinforce", more=ROUNDS)
    settings = ("cluster.learner=2", "rollout.completions=1", 'track.to=["wandb"]')
    said = trew("iterate", path, "--out", "it", "--dry-run", "--set", *settings, cwd=tmp_path, code=2)
    for key in ("cluster.learner: got 2", "iterate.completions: got 0", "track.to: got 'wandb'"):
        assert key in said
    said = trew("iterate", path, "--out", "it", "--dry-run", "--set", "cluster.launcher=ray", cwd=tmp_path, code=2)
    assert "cluster.launcher: got 'ray'" in said


def test_rounds_of_policy_and_reward_model(tmp_path):
    path = recipe(tmp_path, "", more=ROUNDS)
    assert "Nothing was trained" in trew("iterate", path, "--out", "it", "--dry-run", cwd=tmp_path)
    trew("iterate", path, "--out", "it", cwd=tmp_path)
    out = tmp_path / "it"
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert all("auc" in row["reward_after"] for row in rows)
    assert rows[0]["replayed"] == 0
    for row in rows[1:]:
        assert row["replayed"] == round(row["pairs"] * 0.1 / 0.9)
        total = (out / f"round-{row['round']:02d}" / "training.jsonl").read_text().splitlines()
        assert len(total) == row["pairs"] + row["replayed"] == row["trained_pairs"]
        assert row["unjudged"] == 0
    # The reference of a round is the policy that it begins with, and the reward is the model of the round before.
    for number, (policy, reward) in {1: ("lm", "round-00"), 2: ("round-01/policy/final", "round-01")}.items():
        config = (out / f"round-{number:02d}" / "policy" / "config.toml").read_text()
        assert f'{policy}"\n' in config.splitlines(keepends=True)[0]
        assert f"{reward}/reward/final" in config
        table = pq.read_table(out / f"round-{number:02d}" / "policy" / "rollouts" / "000001.parquet").to_pylist()
        assert all(row["score"] == pytest.approx(dict(row["parts"])["reward_model"]) for row in table)
        assert all(dict(row["parts"])["odd"] in (0.0, 1.0) for row in table)
    uids = [
        {
            uid
            for f in (out / f"round-{n:02d}").rglob("rollouts/*.parquet")
            for uid in pq.read_table(f)["uid"].to_pylist()
        }
        for n in range(3)
    ]
    assert not uids[0] & uids[1], "every round draws prompts of its own"
    assert not uids[1] & uids[2]
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "<script" not in page
    # A round that is lost is made again, and with the same result.
    before = json.loads((out / "summary.json").read_text())
    shutil.rmtree(out / "round-02" / "reward")
    (out / "round-02" / "round.json").unlink()
    assert "already holds a finished run" in trew("iterate", path, "--out", "it", cwd=tmp_path, code=2)
    trew("iterate", path, "--out", "it", "--resume", cwd=tmp_path)
    after = json.loads((out / "summary.json").read_text())
    assert after["auc"] == before["auc"]
    assert after["accuracy_after"] == before["accuracy_after"]
    said = trew("iterate", path, "--out", "it", "--resume", "--set", "iterate.replay=0.5", cwd=tmp_path, code=2)
    assert "iterate.replay: the run was started with 0.1, now it is 0.5" in said
    said = trew("iterate", path, "--out", "it", "--resume", "--set", "iterate.rounds=1", cwd=tmp_path, code=2)
    assert "iterate.rounds: got 1, but it has begun round 2; give that many or more" in said
    assert json.loads((out / "summary.json").read_text()) == after, "no round is left out"


def test_rounds_with_dynamic_sampling_go_on_behind_all_prompts_that_were_drawn(tmp_path):
    path = recipe(tmp_path, "", preset="dapo", more=ROUNDS)
    # Half of the groups of two are equal: more prompts are drawn than the steps take.
    trew("iterate", path, "--out", "it", "--set", "rollout.completions=2", "iterate.completions=4", cwd=tmp_path)

    def drawn(*folders: str) -> list[str]:
        files = [f for folder in folders for f in sorted((tmp_path / "it" / folder).rglob("rollouts/*.parquet"))]
        return [uid for f in files for uid in dict.fromkeys(pq.read_table(f)["uid"].to_pylist())]

    stages = [drawn("round-00/fresh"), drawn("round-01/policy"), drawn("round-01/fresh"), drawn("round-02/policy"),
              drawn("round-02/fresh")]  # fmt: skip
    planned = SETTINGS["steps"] * SETTINGS["rollout"]["prompts"]
    assert len(stages[1]) > planned
    assert len(stages[3]) > planned
    uids = [uid for stage in stages for uid in stage]
    assert len(uids) == len(set(uids)), "no prompt is drawn twice before the data end"
    # Each stage begins where the one before has ended.
    ends = [json.loads((tmp_path / f"it/round-0{n}/policy/summary.json").read_text())["position"] for n in (1, 2)]
    assert ends[0] == len(stages[0]) + len(stages[1])
    assert ends[1] == ends[0] + len(stages[2]) + len(stages[3])


BAD_ROUNDS = [
    (["iterate.rounds=0", "iterate.replay=1.0"], ["iterate.rounds: got 0", "iterate.replay: got 1.0"]),
    (["iterate.learner.lr=2.0"], ["iterate.learner.lr: got 2.0"]),
    (["iterate.verifier.name=gsm9k"], ["unknown reward 'gsm9k' (did you mean 'gsm8k'?)"]),
    (["iterate.reward_model=/no/where"], ["no such folder: /no/where"]),
    (["eval.correct_reward=arithmetic"], ["eval.correct_reward: got 'arithmetic'"]),
    (["iterate.round=2"], ["iterate.round: unknown key (did you mean 'rounds'?)"]),
]


@pytest.mark.parametrize(("changes", "messages"), BAD_ROUNDS, ids=[c[0] for c, _ in BAD_ROUNDS])
def test_rounds_that_cannot_work_are_refused(tmp_path, changes, messages):
    path = recipe(tmp_path, "", more=ROUNDS)
    with pytest.raises(ConfigError) as error:
        check(load_recipe(path, changes, out=tmp_path / "it"))
    for message in messages:
        assert message in str(error.value)
