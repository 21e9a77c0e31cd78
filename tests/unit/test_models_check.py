"""Every model problem is one clear line, before any weight is loaded."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path

import huggingface_hub.constants
import pytest

import tiny
from trew.models import loading


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "whole", chat=True)


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def only(problems: list[str]) -> str:
    assert len(problems) == 1, problems
    assert "\n" not in problems[0]
    return problems[0]


def edit(path: Path, **changes) -> None:
    table = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**table, **changes}.items() if v is not None}))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_good_models_have_no_problems(kind, tmp_path):
    assert loading.check(str(tiny.save(tmp_path / kind, kind))) == []


def test_checking_keeps_no_weights(folder, monkeypatch):
    import transformers

    auto, made = transformers.AutoModelForCausalLM, []
    real = auto.from_pretrained
    monkeypatch.setattr(auto, "from_pretrained", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    assert loading.check(str(folder)) == []
    assert [{p.device.type for p in model.parameters()} for model, _ in made] == [{"meta"}]


def test_missing_folder_names_the_nearest(folder):
    problem = only(loading.check(str(folder.parent / "modle")))
    assert "no such folder" in problem
    assert "did you mean 'model'?" in problem


def test_a_file_instead_of_a_folder(folder, tmp_path):
    assert "is a file, not a folder" in only(loading.check(str(folder / "config.json")))
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    assert "is a GGUF file, not a folder" in only(loading.check(str(gguf)))


def test_no_configuration(folder):
    (folder / "config.json").unlink()
    assert "has no config.json" in only(loading.check(str(folder)))
    (folder / "adapter_config.json").write_text("{}")
    problem = only(loading.check(str(folder)))
    assert "adapter without its base model" in problem
    assert f"PeftModel.from_pretrained(base, {str(folder)!r}).merge_and_unload().save_pretrained('merged')" in problem


def test_adapters_below_the_model_that_has_them_are_not_to_be_merged_again(folder):
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    problem = only(loading.check(str(folder / "adapter")))
    assert problem.endswith("(the folder above it has the two merged): give that one")


@pytest.mark.parametrize("named", [".", "actor", "actor/huggingface"])
def test_a_checkpoint_of_verl_is_to_be_merged_by_verl(folder, tmp_path, named):
    """It had no config.json, or was an incomplete download."""
    actor = tmp_path / "global_step_5" / "actor"
    actor.mkdir(parents=True)
    (folder / "model.safetensors").unlink()
    folder.rename(actor / "huggingface")  # configuration and tokenizer
    for rank in range(2):
        (actor / f"model_world_size_2_rank_{rank}.pt").write_bytes(b"x")
    problem = only(loading.check(str(tmp_path / "global_step_5" / named)))
    assert "is of a checkpoint of verl" in problem
    assert f"python -m verl.model_merger merge --backend fsdp --local_dir {actor} --target_dir merged" in problem
    assert problem.endswith("then model = 'merged'")


def test_a_checkpoint_of_trl_is_a_model(folder):
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json"):
        (folder / name).write_bytes(b"x")
    assert loading.check(str(folder)) == []


@pytest.mark.parametrize("text", ["{", "", "[]", "\xff"])
def test_a_broken_configuration(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json is not" in only(loading.check(str(folder)))


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "has no weights" in only(loading.check(str(folder)))
    (folder / "pytorch_model.bin").write_bytes(b"x")
    problem = only(loading.check(str(folder)))
    assert "pickle" in problem
    assert "save_pretrained" in problem


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_weights_that_are_cut_off(folder, keep):
    file = folder / "model.safetensors"
    whole_size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:keep])
    problem = only(loading.check(str(folder)))
    assert str(file) in problem
    assert "fetch it again" in problem
    if keep == -1:
        assert f"has {whole_size - 1} bytes, its header says {whole_size}" in problem


def test_a_git_lfs_pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "Git LFS pointer" in only(loading.check(str(folder)))


def test_shards(folder):
    single = folder / "model.safetensors"
    single.rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    problem = only(loading.check(str(folder)))
    assert "lacks 1 of 2 weight files (model-00002-of-00002.safetensors)" in problem
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert loading.check(str(folder)) == []
    index.write_text("{")
    assert "not a valid index" in only(loading.check(str(folder)))


def test_a_model_with_code_of_its_own_is_refused(folder):
    marker = folder.parent / "ran"
    code = f"open({str(marker)!r}, 'w')\n"
    (folder / "modeling_own.py").write_text(code)
    auto_map = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    edit(folder / "config.json", auto_map=auto_map, model_type="own", architectures=["OwnForCausalLM"])
    problem = only(loading.check(str(folder)))
    assert "brings its own Python code" in problem
    with pytest.raises(loading.ModelError):
        loading.load_model(str(folder))
    assert not marker.exists()


def test_an_unknown_kind_names_the_nearest(folder):
    edit(folder / "config.json", model_type="lama")
    problem = only(loading.check(str(folder)))
    assert "model_type 'lama' (did you mean 'llama'?)" in problem
    edit(folder / "config.json", model_type=None)
    assert "no model_type" in only(loading.check(str(folder)))


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("t5", "T5ForConditionalGeneration"), ("bert", "BertForMaskedLM"), ("llama", "LlamaForSequenceClassification")],
)
def test_a_model_that_does_not_generate(folder, kind, architecture):
    edit(folder / "config.json", model_type=kind, architectures=[architecture])
    problem = only(loading.check(str(folder)))
    assert f"{architecture}, not a causal language model" in problem


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("bart", "BartForCausalLM"), ("whisper", "WhisperForCausalLM"), ("roberta", "RobertaForCausalLM")],
)
def test_a_model_that_numbers_positions_itself_is_refused(folder, kind, architecture):
    """Its log-probs differed by tenths of a nat beside a longer sequence, or by 2 nats from those of the model."""
    edit(folder / "config.json", model_type=kind, architectures=[architecture])
    assert f"is of type {kind}, which numbers positions itself" in only(loading.check(str(folder)))


@pytest.mark.parametrize(
    ("key", "value", "accepts"),
    [
        ("model_type", ["llama"], "a text, such as 'llama'"),
        ("model_type", {}, "a text"),
        ("architectures", 5, "a list of texts, such as ['LlamaForCausalLM']"),
        ("architectures", "LlamaForCausalLM", "a list of texts"),
    ],
)
def test_an_architecture_that_is_no_name_is_refused(folder, key, value, accepts):
    """It ended in a TypeError."""
    edit(folder / "config.json", **{key: value})
    assert f"config.json has {key} = {value!r}, accepts {accepts}" in only(loading.check(str(folder)))


def test_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert "has none of tokenizer.json" in only(loading.check(str(folder)))
    assert loading.check(str(folder), tokenizer=str(tiny.save(folder.parent / "other"))) == []
    assert "tokenizer: no such folder" in only(loading.check(str(folder), tokenizer="./nowhere"))


def test_a_tokenizer_of_another_model(folder, tmp_path):
    small = tiny.model(vocab_size=200)
    small.save_pretrained(folder)
    problem = only(loading.check(str(folder)))
    assert "the tokenizer has 260 tokens, the model 200" in problem
    with pytest.raises(loading.ModelError, match="the tokenizer has 260 tokens, the model 200"):
        loading.check_vocab(small, tiny.tokenizer())
    with pytest.raises(loading.ModelError, match="the model 5000"):
        loading.check_vocab(tiny.model(vocab_size=5000), tiny.tokenizer())
    loading.check_vocab(tiny.model(vocab_size=320), tiny.tokenizer())  # rounded up, as many models are


def test_chat_templates(folder, tmp_path):
    assert loading.check(str(folder), chat_template="plain") == []
    file = tmp_path / "t.jinja"
    assert "no such file" in only(loading.check(str(folder), chat_template=str(file)))
    file.write_text(tiny.CHATML)
    assert loading.check(str(folder), chat_template=str(file)) == []
    file.write_text("hello")
    assert "never mentions messages" in only(loading.check(str(folder), chat_template=str(file)))
    file.write_bytes(b"\xff messages")
    assert "not UTF-8" in only(loading.check(str(folder), chat_template=str(file)))


def test_all_problems_at_once(folder):
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    assert len(loading.check(str(folder), chat_template="nowhere.jinja")) == 3


@pytest.mark.parametrize("name", ["some-org/some-model", "some-model"])
def test_a_hub_id_when_the_hub_is_forbidden(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    problem = only(loading.check(name))
    assert f"{name!r} is not in the local hub cache and HF_HUB_OFFLINE is set" in problem
    assert "smollm2-135m-instruct" in problem


def test_a_hub_id_when_the_hub_cannot_be_reached(monkeypatch):
    class Hub:
        def model_info(self, *args, **kwargs):
            raise ConnectionError("name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    problem = only(loading.check("some-org/some-model"))
    assert "no such folder here, and the hub cannot be reached (name or service not known)" in problem


def test_a_hub_id_that_does_not_exist_or_is_gated(monkeypatch):
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    for kind, status in ((RepositoryNotFoundError, 404), (GatedRepoError, 403)):
        response = types.SimpleNamespace(status_code=status, headers={}, request=None)

        class Hub:
            def model_info(self, *args, error=kind, answer=response, **kwargs):
                raise error("no", response=answer)

        monkeypatch.setattr("huggingface_hub.HfApi", Hub)
        problem = only(loading.check("some-org/some-model"))
        assert "no such model, or it is gated or private" in problem
