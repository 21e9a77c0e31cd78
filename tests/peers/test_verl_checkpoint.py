"""The model of a checkpoint of verl, merged by verl's own program as our message says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM

import tiny
from trew.models import loading


def test_what_the_message_says_makes_a_model_of_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    actor = tmp_path / "global_step_5" / "actor"
    own = tiny.save(actor / "huggingface", chat=True)
    weights = AutoModelForCausalLM.from_pretrained(own).state_dict()
    (own / "model.safetensors").unlink()
    torch.save(weights, actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 1}))
    (problem,) = loading.check(str(own))
    said = re.search(r"environment: python (-m verl\.model_merger .+), then model = 'merged'$", problem)
    assert said is not None, problem
    subprocess.run([sys.executable, *shlex.split(said[1])], check=True, capture_output=True, timeout=300)
    assert loading.check("merged") == []
    merged = AutoModelForCausalLM.from_pretrained("merged").state_dict()
    assert {name: weight.shape for name, weight in merged.items()} == {n: w.shape for n, w in weights.items()}
    # verl's program rounds them, as docs/models.md says.
    assert all(torch.equal(merged[name].float(), weight.bfloat16().float()) for name, weight in weights.items())
