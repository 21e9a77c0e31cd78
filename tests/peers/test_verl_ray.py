"""On a local Ray cluster: verl's worker processes know our losses, its reward worker scores with our graders, and its
trainer makes our advantages of the scores, over its transfer queue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import verl_ray
from peer_compare import TOLERANCE, WRONG, apart
from test_verl_plugin import with_metadata

import tiny
import trew

TEXTS = ["So.\n#### 4", "#### 5", "it is #### 4", "no", "\\boxed{1}", "so \\boxed{7}", "\\boxed{\\frac{14}{2}}", "7"]
GOLDS = ["4"] * 4 + ["7"] * 4
SOURCES = ["openai/gsm8k"] * 4 + ["DigitalLearningGmbH/MATH-lighteval"] * 4
UIDS = ["a", "b"] * 4  # the prompts stand interleaved
MINE = {"mine": {"preset": "grpo", "beta": 0.0, "std_eps": 1e-6}}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the processes say."""
    folder = tmp_path_factory.mktemp("ray")
    words = tiny.tokenizer()
    words.save_pretrained(folder / "tokenizer")
    keys = [
        "actor_rollout_ref.actor.use_dynamic_bsz=True", "algorithm.adv_estimator=mine",
        f"actor_rollout_ref.model.path={folder / 'tokenizer'}", "transfer_queue.backend.SimpleStorage."
        "num_data_storage_units=1", "reward.custom_reward_function.path=pkg://trew.integrations.verl.rewards",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.TREW_VERL='{json.dumps(MINE)}'",
    ]  # fmt: skip
    job = {"keys": keys, "responses": [words.encode(text, add_special_tokens=False) for text in TEXTS], "golds": GOLDS,
           "sources": SOURCES, "uids": UIDS, "out": str(folder / "out.json")}  # fmt: skip
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    env = os.environ | {"PYTHONPATH": with_metadata(folder), "VERL_USE_EXTERNAL_MODULES": "", "HOME": str(folder),
                        "TREW_VERL": json.dumps(MINE)}  # fmt: skip
    done = subprocess.run([sys.executable, "-W", "ignore", verl_ray.__file__, str(path)], capture_output=True,
                          text=True, timeout=900, env=env)  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(Path(job["out"]).read_text()) | {"lengths": [len(row) for row in job["responses"]]}


def test_worker_processes_know_our_losses(found):
    assert found["another"]
    assert {"trew-dapo", "trew-vespo", "mine"} <= set(found["losses"])
    assert {"trew-dapo", "mine"} <= set(found["estimators"])


def test_the_reward_worker_scores_with_our_graders(found):
    assert found["scores"] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def test_the_trainer_makes_our_advantages(found):
    lengths = torch.tensor(found["lengths"])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    groups = torch.tensor([ord(uid) for uid in UIDS])

    def ours(ids):
        batch = trew.TokenBatch.from_padded(
            logprobs=torch.zeros(mask.shape, dtype=torch.float64), mask=mask,
            rewards=torch.tensor(found["scores"]), group_ids=ids,
        )  # fmt: skip
        prepared = trew.preset("grpo", **{k: v for k, v in MINE["mine"].items() if k != "preset"}).prepare(batch)
        return prepared.unpack(prepared.advantages)[mask]

    theirs = torch.tensor([value for row in found["advantages"] for value in row])
    assert apart(ours(groups), theirs) <= TOLERANCE
    assert apart(ours(groups.sort().values), theirs) >= WRONG
