"""The real default model, and real data where they are: run with ``make test-slow``, which fetches the model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trew.config import DataConfig
from trew.data import load_task
from trew.models import loading
from trew.models.default import DEFAULT_MODEL, cached
from trew.rollout import Renderer
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.types import Sampling

ROOT = Path(__file__).parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(cached() is None, reason="the default model is not here: make fetch"),
]


def trew(*args: str | Path, cwd: Path, timeout: float) -> str:
    command = [sys.executable, "-m", "trew", *map(str, args)]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_the_engine_are_those_of_the_plain_forward_pass(temperature):
    model = loading.load_model(DEFAULT_MODEL)
    tokenizer = loading.load_tokenizer(DEFAULT_MODEL)
    prompts = load_task(DataConfig(task="arithmetic"), eval_size=3, seed=0).eval
    engine = TorchEngine(model, Renderer(tokenizer), batch=4)
    groups = generate(engine, prompts, n=2, sampling=Sampling(max_tokens=24, temperature=temperature, seed=1))
    assert len(groups) == 3
    for group in groups:
        for c in group.rollouts:
            ids = torch.tensor(np.concatenate([group.rollouts[0].prompt_ids, c.token_ids]))[None]
            with torch.no_grad():
                logits = model(ids).logits[0, len(group.rollouts[0].prompt_ids) - 1 : -1].float()
            chosen = torch.from_numpy(c.token_ids)[:, None]
            for scale, recorded in ((1.0, c.policy_logprobs), (temperature, c.logprobs)):
                plain = torch.log_softmax(logits / scale, dim=-1).gather(1, chosen)[:, 0]
                np.testing.assert_allclose(recorded, plain.numpy(), atol=1e-4)
            entropy = torch.distributions.Categorical(logits=logits).entropy()
            np.testing.assert_allclose(c.entropies, entropy.numpy(), atol=1e-3)


def test_a_short_demo_learns_and_leaves_all_its_files(tmp_path):
    settings = ("steps=6", "eval.size=40", "learner.warmup_steps=0")
    out = trew("demo", "--out", tmp_path / "demo", "--set", *settings, cwd=tmp_path, timeout=900)
    run = tmp_path / "demo"
    for name in ("config.toml", "metrics.jsonl", "summary.json", "report.html", "final/model.safetensors"):
        assert (run / name).exists(), name
        assert name.split("/")[0] in out or name == "config.toml"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["accuracy"] for row in rows if "accuracy" in row]
    assert len(accuracy) == 6
    assert np.mean(accuracy[-2:]) > np.mean(accuracy[:2])


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not here")
def test_the_gsm8k_recipe_runs_on_a_local_model_and_local_data(tmp_path):
    recipe = ROOT / "recipes" / "gsm8k.toml"
    here = (f"model={DEFAULT_MODEL}", f"data.train={GSM8K}")
    out = trew("train", recipe, "--dry-run", "--set", *here, cwd=tmp_path, timeout=300)
    count = re.search(r"^data: (\d+) training and \d+ held-out prompts", out, re.M)
    assert count is not None
    assert 7400 < int(count[1]) <= 7473  # the recipe leaves overlong ones out
    assert not (tmp_path / "runs").exists()

    tiny = ("steps=1", "rollout.prompts=4", "rollout.completions=2", "rollout.max_tokens=16", "eval.size=4",
            "eval.max_tokens=16", "eval.every=0", "learner.minibatch_prompts=2", "checkpoint.every=0")  # fmt: skip
    trew("train", recipe, "--out", tmp_path / "run", "--set", *here, *tiny, cwd=tmp_path, timeout=600)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step = next(row for row in rows if "reward" in row)
    assert 0 <= step["reward"] <= 1
    assert abs(step["ratio"] - 1) < 0.05
    assert step["completion_length"] <= 16
