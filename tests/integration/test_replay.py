"""``trew train --replay``: the bits of the run that is replayed, of another replay, and what cannot be replayed."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiers
import tiny
from forks import wait_for
from ranks_help import free_port, variables
from recipe_help import ODD, assert_equal_weights, final_weights, metrics, run_folder
from trew.runs import changes
from trew.runs.changes import RunChange

RECIPE = """
model = "lm"
chat_template = "plain"
steps = 4
seed = 1
[data]
task = "arithmetic"
[[rewards]]
name = "reward.py:odd"
[rollout]
prompts = 2
completions = 4
max_tokens = 6
[objective]
preset = "grpo"
[learner]
lr = 1e-2
[eval]
size = 2
correct_at = 0.5
[checkpoint]
every = 2
[track]
samples_every = 0
"""
EVEN = """
def even(completions, completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""
TIMES = ("seconds", "tokens_per_second")
OFF_POLICY = ("objective.preset=dr-grpo", "learner.lr=2e-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = run_folder(tmp_path_factory.mktemp("replay"), RECIPE, reward=ODD + EVEN)
    tiny.model("llama", initializer_range=0.1, seed=1).save_pretrained(place / "other")
    tiny.tokenizer(chat=False).save_pretrained(place / "other")
    tiny.tokenizer(chat=False, bos=True).save_pretrained(place / "begins")
    return place


@pytest.fixture(scope="module")
def run(server, folder) -> Path:
    server.run("train", "r.toml", "--out", "run", cwd=folder)
    return folder / "run"


def rows(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.endswith(TIMES)} for row in metrics(run)]


def effects(run: Path, step: int) -> list[float | None]:
    """Ratios and coefficients of all tokens of a step."""
    columns = ("final_ratios", "weights", "coefficients")
    lists = pq.read_table(run / f"rollouts/{step:06d}.parquet").to_pylist()
    return [value for row in lists for name in columns for value in row[name] or [None]]


SETTINGS = {
    "dropped groups": ("objective.preset=dapo", "rollout.refills=2", "learner.inner_updates=2",
                       "learner.minibatch_prompts=1", "eval.correct_at=0.75"),
    "baselines and older weights": ("objective.preset=remax", "objective.correction=tis", "rollout.stale_steps=2"),
    "cut distributions and adapters": ("objective.preset=gdpo", "rollout.top_p=0.9", "lora.rank=2"),
    "a reference": ("objective.beta=0.1", "learner.reference_every=2"),
}  # fmt: skip


@pytest.mark.parametrize("case", tiers.some(SETTINGS, ["dropped groups"]))
def test_a_replay_is_the_run_to_the_bit(server, folder, case):
    name = case.replace(" ", "-")
    server.run("train", "r.toml", "--out", name, "--set", *SETTINGS[case], cwd=folder)
    assert "nothing is generated but evaluations" in server.run("train", "--replay", name, cwd=folder)
    assert_equal_weights(folder / name, folder / f"{name}-replay")
    assert rows(folder / name) == rows(folder / f"{name}-replay")
    assert effects(folder / name, 4) == effects(folder / f"{name}-replay", 4)
    steps = [row for row in rows(folder / name) if "loss" in row]
    if case == "dropped groups":
        assert any(row["groups_sampled"] > 2 for row in steps), "nothing was dropped"
    if case == "baselines and older weights":
        assert [row["staleness"] for row in steps] == [0, 1, 2, 2]


def test_two_replays_are_equal(server, folder, run):
    """Also where they depart from the run; then no token counts as one of this run's weights after the first update."""
    for out in ("one", "two"):
        said = server.run("train", "--replay", "run", "--out", out, "--set", *OFF_POLICY, cwd=folder)
        assert "learner.lr, objective.preset differ from" in " ".join(said.split())
    assert rows(folder / "one") == rows(folder / "two")
    assert (folder / "one/rollouts/000004.parquet").read_bytes() == (
        folder / "two/rollouts/000004.parquet"
    ).read_bytes()
    assert_equal_weights(folder / "one", folder / "two")
    with pytest.raises(AssertionError):
        assert_equal_weights(folder / "one", run)
    steps = [row for row in rows(folder / "one") if "loss" in row]
    assert [row["staleness"] for row in steps] == [0, 2, 4, 6], (
        "updates on both sides since the model that both began with"
    )
    assert [row["fresh_share"] for row in steps] == [1, 0, 0, 0]
    assert [row["canary_gap"] is None for row in steps] == [False, True, True, True]
    # The ratio is measured against the sampler, as the recorded log-probs are not this policy's.
    assert steps[0]["ratio"] == 1
    assert all(row["ratio"] != 1 for row in steps[1:])
    # A replay of a replay that departed is one that follows it.
    server.run("train", "--replay", "one", "--out", "again", cwd=folder)
    assert_equal_weights(folder / "one", folder / "again")


def test_ranks_replay_what_one_process_sampled(server, folder, run):
    port = free_port()
    ranks = [
        server.start(
            "train", "--replay", "run", "--out", "ranks", "--set", "cluster.learner=2", cwd=folder,
            **variables(rank, 2, port),
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [command.wait() for command in ranks] == [0, 0], ranks[0].text()
    first, second = final_weights(run), final_weights(folder / "ranks")
    # Adam's first updates at a rate of 1e-2 magnify what is left of rounding.
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-3
    a, b = ([row for row in rows(out) if "loss" in row] for out in (run, folder / "ranks"))
    assert [row["grad_norm"] for row in a] == pytest.approx([row["grad_norm"] for row in b], rel=1e-3)
    for step in (1, 2, 3, 4):  # what each rank computed of its own completions is in the one table
        alone, together = effects(run, step), effects(folder / "ranks", step)
        assert len(together) > 8
        assert together == pytest.approx(alone, rel=1e-3, abs=1e-5)


def test_a_killed_replay_goes_on_to_the_bit(server, folder, run):
    command = server.start(
        "train", "--replay", "run", "--out", "killed", cwd=folder, hold="trew.training.loop:update:4"
    ).held()
    wait_for(lambda: (folder / "killed/checkpoints/000002/manifest.json").exists())
    command.kill(signal.SIGKILL)
    command.wait()
    assert "continuing after step 2" in server.run("train", "r.toml", "--out", "killed", "--resume", cwd=folder)
    assert_equal_weights(folder / "killed", run)
    assert [effects(folder / "killed", step) for step in (1, 2, 3, 4)] == [effects(run, s) for s in (1, 2, 3, 4)]


def test_a_resumed_replay_notices_other_rollouts(server, folder, run):
    shutil.copytree(run, folder / "moved")
    server.run("train", "--replay", "moved", "--out", "half", "--set", "steps=2", cwd=folder)
    table = pq.read_table(folder / "moved/rollouts/000001.parquet")
    changed = table.set_column(table.column_names.index("score"), "score", [[0.25] * 8])
    pq.write_table(changed, folder / "moved/rollouts/000001.parquet")
    said = server.run("train", "--replay", "moved", "--out", "half", "--resume", "--set", "steps=4", cwd=folder, code=2)
    assert "are not those that this run has trained on" in " ".join(said.split())


def test_a_step_without_completions_is_one_again(server, folder, run):
    """Such a step has a row of metrics, and no table."""
    shutil.copytree(run, folder / "gap")
    (folder / "gap/rollouts/000003.parquet").unlink()
    said = server.run("train", "--replay", "gap", "--out", "no", cwd=folder, code=2)
    assert "000003.parquet: is missing" in " ".join(said.split())
    lines = (folder / "gap/metrics.jsonl").read_text().splitlines()
    without = [json.dumps({"step": 3, "bad_steps": 1}) if '"step": 3' in line else line for line in lines]
    (folder / "gap/metrics.jsonl").write_text("\n".join(without) + "\n")
    server.run("train", "--replay", "gap", cwd=folder)
    steps = [row for row in rows(folder / "gap-replay") if "bad_steps" in row]
    assert [row.get("policy_version") for row in steps] == [1, 2, None, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "model=other"), "were sampled from another model"),
        (("--set", "tokenizer=begins"), "has other tokens for prompt"),
        (("--set", "steps=5"), "steps: got 5, but"),
        (("--set", "rollout.completions=8"), "rollout.completions: got 8, but the rollouts of"),
        (("--set", "rewards=[{name = 'reward.py:even'}]"), "has the scores of odd; a replay learns from those"),
        (("--set", "rewards=[{name = 'reward.py:odd', weight = 2.0}]"), "odd: got weight = 2.0, but the scores in"),
        (("--set", "objective.preset=reinforce"), 'correction = "tis"'),
        (("--set", "objective.preset=remax"), "the rollouts that are replayed have none"),
        (("--set", "objective.preset=grpo-process"), "which needs a reward for every step"),
        (("--out", "run"), "is the run that is replayed"),
        (("--set", "cluster.rollout=vllm", "cluster.servers=1"), "where only evaluations generate anything"),
    ],
)
def test_what_cannot_be_replayed(server, folder, run, arguments, said):
    before = sorted(path.name for path in run.iterdir())
    text = server.run("train", "--replay", "run", *arguments, "--overwrite", cwd=folder, code=2)
    assert said in " ".join(text.split())
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (2, "went on with changes after step 2: its temperature changed; replay steps of one setting, the first 2"),
        (9, "two were sampled with 0.5; a replay cannot change how they were sampled"),
    ],
)
def test_a_run_that_went_on_under_other_settings_is_replayed_up_to_there_and_by_those(server, folder, run, step, said):
    """Which rollouts are of which settings, config.toml does not tell."""
    shutil.copytree(run, folder / "two", dirs_exist_ok=True)
    text = (run / "config.toml").read_text().replace("temperature = 1.0", "temperature = 0.5", 1)
    (folder / "two/changes.jsonl").write_text(changes.write([RunChange(step, text, ("its temperature changed",))]))
    assert said in " ".join(server.run("train", "--replay", "two", cwd=folder, code=2).split())


def test_a_run_that_has_left_the_recorded_weights_says_so(server, folder, run):
    """The table of step 2 has log-probs of weights that this run does not reach."""
    shutil.copytree(run, folder / "left")
    path = folder / "left/rollouts/000002.parquet"
    table = pq.read_table(path)
    other = [[value - 0.5 for value in row] for row in table["sampling_logprobs"].to_pylist()]
    place = table.column_names.index("sampling_logprobs")
    kind = table["sampling_logprobs"].type
    pq.write_table(table.set_column(place, "sampling_logprobs", pa.array(other, kind)), path)
    said = " ".join(server.run("train", "--replay", "left", cwd=folder, code=2).split())
    assert "both at policy version 1" in said
    assert "This run has left the weights of" in said


def test_a_dry_run_says_what_would_be_replayed(server, folder, run):
    said = server.run("train", "--replay", "run", "--dry-run", "--out", "dry", cwd=folder)
    assert "trains on the rollouts of" in " ".join(said.split())
    assert "# --replay" in said
    assert "RECIPE: is missing" in server.run("train", cwd=folder, code=2)
