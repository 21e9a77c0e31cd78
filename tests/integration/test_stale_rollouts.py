"""Training on completions of older weights: which weights, and the same bits after a kill."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from forks import wait_for
from recipe_help import assert_equal_weights, run_folder, training_rows

RECIPE = """
model = "lm"
chat_template = "plain"
steps = 5
seed = 1
[data]
task = "arithmetic"
[[rewards]]
name = "reward.py:odd"
[rollout]
prompts = 2
completions = 4
max_tokens = 6
stale_steps = 2
[objective]
preset = "grpo"
[learner]
lr = 1e-2
[eval]
size = 2
[checkpoint]
every = 1
[track]
samples_every = 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return run_folder(tmp_path_factory.mktemp("stale"), RECIPE)


@pytest.fixture(scope="module")
def stale(server, folder) -> Path:
    server.run("train", "r.toml", "--out", "stale", cwd=folder)
    return folder / "stale"


def tokens(run: Path, step: int) -> list[Any]:
    paths = sorted((run / "rollouts").glob("*.parquet"))
    return pq.read_table(paths[step - 1], columns=["uid", "sample", "token_ids"]).to_pylist()


def test_each_step_learns_from_the_weights_of_two_steps_ago(server, folder, stale):
    assert [row["staleness"] for row in training_rows(stale)] == [0, 1, 2, 2, 2]
    assert [row["policy_version"] for row in training_rows(stale)] == [1, 2, 3, 4, 5]
    # A run whose weights hardly move samples every step from the first weights.
    still = folder / "still"
    server.run("train", "r.toml", "--out", "still", "--set", "rollout.stale_steps=0", "learner.lr=1e-30", cwd=folder)
    assert [tokens(stale, step) == tokens(still, step) for step in range(1, 6)] == [True, True, True, False, False]
    # Prompts do not depend on it.
    assert [row["uid"] for row in tokens(stale, 4)] == [row["uid"] for row in tokens(still, 4)]
    assert training_rows(stale)[0]["canary_gap"] < 1e-5
    assert training_rows(stale)[3]["canary_gap"] is None, "nothing could be compared"


def test_with_a_correction_the_kl_of_one_update_is_that_to_the_sampler(server, folder):
    """It was that of the policy to itself: 0, whatever the policy had moved since it sampled."""
    set_ = ("--set", "steps=3", "objective.beta=0.0")
    for out, more in (("corrected", ("objective.correction=tis",)), ("plain", ())):
        server.run("train", "r.toml", "--out", out, *set_, *more, cwd=folder)
    corrected, plain = training_rows(folder / "corrected"), training_rows(folder / "plain")
    assert all("kl_old" not in row and row["kl"] == row["kl_rollout"] for row in corrected)
    assert corrected[2]["kl"] > 1e-3
    # Without one, the sampler is what the ratio is measured against.
    assert "kl_old" not in plain[0]
    assert all(row["kl_old"] == row["kl_rollout"] == row["kl"] > 1e-3 for row in plain[1:])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), marks=pytest.mark.nightly, id="grpo"),
        pytest.param(("objective.preset=remax", "objective.correction=tis"), id="remax"),
    ],
)
def test_a_killed_run_goes_on_to_the_bit(server, folder, settings):
    """What was sampled ahead comes back from the checkpoint; baselines too."""
    whole, out = f"whole-{len(settings)}", f"killed-{len(settings)}"
    server.run("train", "r.toml", "--out", whole, "--set", "steps=5", *settings, cwd=folder)
    command = server.start(
        "train", "r.toml", "--out", out, "--set", "steps=5", *settings, cwd=folder, hold="trew.training.loop:update:4"
    ).held()
    wait_for(lambda: (folder / out / "checkpoints" / "000003" / "manifest.json").exists())
    command.kill(signal.SIGKILL)
    command.wait()
    assert "continuing after step 3" in server.run("train", "r.toml", "--out", out, "--resume", cwd=folder)
    assert [tokens(folder / out, step) for step in range(1, 6)] == [tokens(folder / whole, s) for s in range(1, 6)]
    assert_equal_weights(folder / whole, folder / out)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("objective.preset=reinforce",), 'correction = "tis"'),
        (("rollout.top_p=0.9",), "rollout.top_p = 0.9 cuts the sampling distribution"),
        (("rollout.stale_steps=-1",), "rollout.stale_steps: got -1, accepts 0 or more"),
    ],
)
def test_what_would_not_notice_is_refused(server, folder, settings, said):
    text = server.run("train", "r.toml", "--dry-run", "--set", *settings, cwd=folder, code=2)
    assert said in " ".join(text.split())
