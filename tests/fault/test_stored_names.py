"""Models whose weights no vLLM server would accept are refused before anything starts."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import learner_help, tiny
from transformers import AutoModelForCausalLM

from trew.cli.main import main
from trew.config import LoraConfig
from trew.models import lora
from trew.weights import stored_names

CONVERTED = {
    "mixtral": "model.layers.0.mlp.experts.gate_up_proj",
    "qwen3_moe": "model.layers.1.mlp.experts.down_proj",
    "gpt_neox": "lm_head.weight",
}
"""Kinds whose weights transformers fuses or renames, with the name of one that no file has."""


def exit_code(command: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("kind", [*tiny.KINDS, *CONVERTED, "mistral", "smollm3"])
def test_weights_are_published_as_files_hold_them(tmp_path, kind):
    """Among them models with tied heads, which files do not hold."""
    model = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path, kind))
    published = dict(learner_help.learner(model).weights())
    files = load_file(tmp_path / "model.safetensors")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert published.keys() - files.keys() <= tied
    for name, tensor in files.items():
        assert torch.equal(published[name], tensor), name
    assert stored_names.problems(str(tmp_path)) == []


@pytest.mark.parametrize("kind", CONVERTED)
def test_merged_adapters_are_published_as_files_hold_them(tmp_path, kind):
    model = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path, kind))
    names = set(load_file(tmp_path / "model.safetensors"))
    adapters = lora.attach(
        model, LoraConfig(rank=2, targets=["q_proj"] if kind != "gpt_neox" else ["query_key_value"]), name="m", seed=0
    )
    assert {name for name, _ in learner_help.learner(model, adapters=adapters).weights()} == names


@pytest.mark.parametrize("kind", CONVERTED)
def test_the_learner_keeps_the_names_that_it_loads(tmp_path, kind):
    model = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path, kind))
    held = dict(learner_help.learner(model).tensors())
    assert held.keys() == model.state_dict().keys()
    assert CONVERTED[kind] in held


def test_a_model_whose_files_have_other_names_is_refused_for_servers_alone(tmp_path, capsys):
    model = tiny.save(tmp_path / "model", "qwen3_moe")
    file = model / "model.safetensors"
    kept = {name: t for name, t in load_file(file).items() if ".mlp.experts." not in name}
    # Experts as transformers holds them, which its own files do not.
    held = AutoModelForCausalLM.from_pretrained(model).state_dict()
    save_file(kept | {name: t for name, t in held.items() if ".mlp.experts." in name}, file)
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'model = "{model}"\nsteps = 1\nout = "{tmp_path / "run"}"\n[data]\ntask = "arithmetic"\n[eval]\nsize = 8\n'
        "[rollout]\nprompts = 2\ncompletions = 2\nmax_tokens = 4\n"
    )
    assert exit_code(["train", str(recipe), "--dry-run"]) == 0
    capsys.readouterr()
    served = ["--set", 'cluster.rollout="vllm"', "cluster.servers=1"]
    assert exit_code(["train", str(recipe), "--dry-run", *served]) == 2
    said = capsys.readouterr().err
    assert "cluster.rollout: got 'vllm', accepts 'embedded' for this model" in said
    assert "model.layers.0.mlp.experts.gate_up_proj" in said
    assert not (tmp_path / "run").exists()
