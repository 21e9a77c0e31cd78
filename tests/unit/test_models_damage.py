"""A damaged model is refused, or what is odd about it named, before any weight is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny
from scorer_help import save_scorer
from trew.errors import ModelError
from trew.models import files, integrity, loading


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def table(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def only(folder: Path) -> str:
    (problem,) = loading.check(str(folder))
    assert "\n" not in problem
    return problem


@pytest.mark.parametrize(
    ("layers", "says"),
    [(1, "hold 9 tensors that a model of this config.json does not read"), (3, "lack 9 of the weights")],
)
def test_another_number_of_layers(folder, layers, says):
    table(folder / "config.json", num_hidden_layers=layers)
    problem = only(folder)
    assert says in problem
    assert f"config.json has {layers} layers, the files have 2" in problem


@pytest.mark.parametrize("layers", [30, 10_001, 10**6, 10**400])
def test_layers_without_end_are_not_built(folder, layers, monkeypatch):
    monkeypatch.setattr(loading, "_outline", None)
    table(folder / "config.json", num_hidden_layers=layers)
    assert f"{layers}"[:100] in only(folder)


@pytest.mark.parametrize("key", ["model.layers.0.self_attn.q_proj.bias", "layers.1.mlp.extra.weight", "lm_head.bias"])
def test_a_tensor_inside_the_model_that_nobody_reads_is_refused(folder, key):
    weights(folder, lambda tensors: tensors.update({key: torch.zeros(32)}))
    assert f"hold 1 tensors that a model of this config.json does not read, among them {key}" in only(folder)


def test_a_part_beside_the_model_is_named(folder):
    weights(folder, lambda tensors: tensors.update({"v_head.weight": torch.full((2,), float("nan"))}))
    notes: list[str] = []
    assert loading.check(str(folder), notes=notes) == []
    (note,) = notes
    assert "1 tensors of its files are no part of the model, among them v_head.weight" in note


def test_missing_and_misshapen_weights_are_found_before_loading(folder):
    weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    assert "lack 1 of the weights that config.json asks for, among them model.norm.weight" in only(folder)
    weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}))
    assert "have the wrong shape for 1 of the weights" in only(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_ordinary_floats(folder, dtype):
    key = "model.layers.1.mlp.up_proj.weight"
    weights(folder, lambda tensors: tensors.update({key: tensors[key].to(dtype)}))
    (stored,) = (tensor for tensor in files.stored(folder) if tensor.name == key)
    assert f"1 of its weights are stored as {stored.dtype}, among them {key}; accepts F64, F32, F16" in only(folder)


def test_a_quantised_model(folder):
    """One whose weights were saved in 4 bits: only its embeddings and norms would be trained."""
    table(folder / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert "is stored quantised" in only(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan")])
def test_one_number_that_is_not_finite(folder, dtype, number):
    key = "model.embed_tokens.weight"
    weights(folder, lambda tensors: tensors.update({k: t.to(dtype) for k, t in tensors.items()}))
    assert loading.check(str(folder)) == []
    weights(folder, lambda tensors: tensors[key][259].__setitem__(31, number))
    assert f"1 of its weights hold inf or nan, among them {key}, row 259" in only(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_and_smallest_numbers_are_finite(folder, dtype):
    info = torch.finfo(dtype)

    def extremes(tensors: dict[str, torch.Tensor]) -> None:
        low = tensors["model.norm.weight"].to(dtype)
        low[:4] = torch.tensor([info.max, info.min, info.smallest_normal / 2, -0.0], dtype=dtype)
        tensors["model.norm.weight"] = low

    weights(folder, extremes)
    assert loading.check(str(folder)) == []


@pytest.mark.parametrize("at", [0, 131_071, 131_072, 300_001, 399_999])
def test_a_number_is_found_wherever_it_is(at, tmp_path):
    """Tensors are looked at in pieces."""
    tensor = torch.zeros(4, 100_000, dtype=torch.float64)
    tensor.view(-1)[at] = float("nan")
    save_file({"a": torch.ones(3), "w": tensor, "z": torch.ones(())}, tmp_path / "f.safetensors")
    (problem,) = integrity.number_problems(integrity.tensors_of(tmp_path / "f.safetensors"), "m")
    assert f"among them w, row {at // 100_000} of" in problem


@pytest.mark.parametrize("content", ["{", "", "[]", "3", "\xff"])
@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_settings_that_cannot_be_read(folder, file, content):
    (folder / file).write_bytes(content.encode("latin-1"))
    problem = only(folder)
    assert f"{file} is not" in problem
    assert "fetch it again" in problem


def test_settings_that_are_no_file(folder):
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").mkdir()
    assert "generation_config.json is not a JSON object" in only(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("end", [260, 10**30, -1, [2, 999], "2", [1.5], True])
def test_an_end_token_that_is_no_token(folder, file, end):
    table(folder / file, eos_token_id=end)
    problem = only(folder)
    assert f"{file} has eos_token_id {end!r}" in problem
    assert "whole numbers from 0 to 259" in problem


@pytest.mark.parametrize("end", [0, 259, [1, 2], None, []])
def test_end_tokens_that_are_tokens(folder, end):
    table(folder / "generation_config.json", eos_token_id=end)
    assert loading.check(str(folder)) == []


KINDS = {
    "MixtralConfig": {"num_local_experts": 4},
    "Qwen3MoeConfig": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_whose_files_name_tensors_otherwise_are_whole(kind, tmp_path):
    """Experts are stored one by one and read as one tensor; GPT-2's files lack a prefix or have it."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": tiny.VOCAB} | dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id")
    )
    config = getattr(transformers, kind)(**sizes | KINDS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert loading.check(str(tmp_path)) == []
    weights(tmp_path, lambda tensors: [t.view(-1)[-1:].fill_(float("inf")) for t in list(tensors.values())[3:4]])
    assert "1 of its weights hold inf or nan" in only(tmp_path)


def test_a_body_saved_without_its_prefix_is_whole(folder):
    def bare(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    weights(folder, bare)
    assert loading.check(str(folder)) == []


def test_a_reward_model_is_checked_as_one(tmp_path):
    folder = save_scorer(tmp_path / "scorer")
    assert loading.check(str(folder), kind=files.scorer_problems) == []
    weights(folder, lambda tensors: tensors["score.weight"].fill_(float("nan")))
    (problem,) = loading.check(str(folder), kind=files.scorer_problems)
    assert "score.weight" in problem


def test_a_model_from_the_hub_is_judged_when_its_weights_have_come(folder, monkeypatch):
    """The check before it had the configuration alone."""
    weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("inf")))
    monkeypatch.setattr(loading, "_source", lambda name: str(folder))
    monkeypatch.setattr(loading, "_is_local", lambda name: False)
    monkeypatch.setattr(loading, "folder", lambda name: folder)
    with pytest.raises(ModelError, match=r"some/model: 1 of its weights hold inf or nan, among them model\.norm"):
        loading.load_model("some/model")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is not valid JSON"):
        loading.load_model("some/model")


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
)
def test_sizes_without_end_are_refused(folder, key):
    table(folder / "config.json", **{key: 10**7 if key == "head_dim" else 10**9})  # a model has a table of head_dim / 2
    assert loading.check(str(folder))
