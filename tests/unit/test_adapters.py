"""Adapters: what they change, what they leave exactly as it was, and what becomes of them."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import learner_help as help
import tiny
from trew.config import LoraConfig, parse
from trew.errors import CheckpointError, ModelError
from trew.models import loading, lora
from trew.models.lora import Adapters
from trew.objective import preset
from trew.runs import checkpoint_files
from trew.training import planning

IDS = torch.arange(40).reshape(2, 20)
LORA = LoraConfig(rank=4, alpha=8.0)


def adapted(kind: str = "llama", config: LoraConfig = LORA, *, seed: int = 0, **overrides) -> Adapters:
    return lora.attach(help.model(kind, **overrides), config, name="base", seed=seed)


def moved(own: Adapters) -> Adapters:
    """The same adapters away from 0, so that they change every layer."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in lora.lora_layers(own.model).values():
            layer.lora_B["default"].weight.normal_(std=0.05, generator=draw)
    return own


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def step(own, seed: int = 0) -> None:
    items = help.samples(seed=seed)
    own.step(items, own.objective.prepare(help.batch(items, seed=seed)))


def learner(own: Adapters, **settings):
    return help.learner(own.model, adapters=own, steps=4, schedule="cosine", **settings)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_nothing_changes_at_first_and_without_them_the_model_is_its_base_exactly(kind):
    own = adapted(kind)
    base = logits(help.model(kind))
    assert torch.equal(logits(own.model), base)
    moved(own)
    assert (logits(own.model) - base).abs().max() > 0.1
    with own.disabled():
        assert torch.equal(logits(own.model), base)
    assert (logits(own.model) - base).abs().max() > 0.1
    trained = {n for n, p in own.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_merged_model_is_the_adapted_one_within_rounding_and_leaves_it_as_it_was(kind, tmp_path):
    own = moved(adapted(kind))
    before = {n: p.clone() for n, p in own.model.named_parameters()}
    own.export(tiny.tokenizer(), tmp_path / "final")
    expected = logits(own.model)
    assert all(torch.equal(p, before[n]) for n, p in own.model.named_parameters())
    loaded = loading.load_model(str(tmp_path / "final"))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert (logits(loaded) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert not lora.lora_layers(loaded)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft's own
def test_the_adapter_folder_is_peft_s_own_format(tmp_path):
    import peft

    own = moved(adapted())
    own.export(tiny.tokenizer(), tmp_path)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    loaded = peft.PeftModel.from_pretrained(help.model(), str(tmp_path / "adapter"))
    assert torch.equal(logits(loaded), logits(own.model))


def test_adapters_go_where_they_are_told_and_the_head_stays_free():
    assert set(lora.lora_layers(adapted("smollm").model)) == set(lora.linear_layers(help.model("smollm")))
    own = adapted(config=LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    assert {name.rpartition(".")[2] for name in lora.lora_layers(own.model)} == {"q_proj", "v_proj"}
    with pytest.raises(ModelError, match=r"lora.targets: got 'q_prj', accepts down_proj, .*did you mean 'q_proj'"):
        adapted(config=LoraConfig(rank=2, targets=("q_prj",)))
    with pytest.raises(ModelError, match=r"lora.targets: got 'lm_head'"):
        adapted(config=LoraConfig(rank=2, targets=("lm_head",)))


def test_the_seed_decides_what_they_start_from():
    first, same, other = (dict(adapted(seed=s).model.named_parameters()) for s in (1, 1, 2))
    a = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(first[a], same[a])
    assert not torch.equal(first[a], other[a])
    assert first[a].abs().max() <= first[a].shape[1] ** -0.5


def test_only_adapters_learn_and_the_reference_is_the_base():
    own = adapted()
    before = {n: p.detach().clone() for n, p in own.model.named_parameters()}
    mine = learner(own, objective=preset("grpo", beta=0.04))
    items = help.samples()
    plain = help.learner(help.model(), reference=help.model())
    reference = mine.logprobs(items, reference=True)
    data = help.batch(items, ref_logprobs=reference)
    mine.step(items, mine.objective.prepare(data))
    changed = {n for n, p in own.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if "lora_B" in n}  # while B = 0, A has no gradient
    assert torch.equal(mine.logprobs(items, reference=True), reference)
    torch.testing.assert_close(reference, plain.logprobs(items, reference=True), rtol=0, atol=0)
    assert (mine.logprobs(items) - reference).abs().max() > 1e-4


def test_gradients_are_those_of_the_product_of_the_two_matrices():
    """dA = s B^T dW, dB = s dW A^T, with dW of the merged model, trained whole."""
    own = moved(adapted())
    plain = lora.merged(own).requires_grad_(True)
    items = help.samples()
    data = help.batch(items)
    whole = {}
    for net in (own.model, plain):
        for name, p in net.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p, name=name: whole.__setitem__(name, p.grad.clone()))
    help.learner(own.model, adapters=own).step(items, data)
    merged_weights = {n: layer.lora_A["default"].weight for n, layer in lora.lora_layers(own.model).items()}
    factors = {
        n: (layer.lora_A["default"].weight.detach().clone(), layer.lora_B["default"].weight.detach().clone())
        for n, layer in lora.lora_layers(moved(adapted()).model).items()
    }
    help.learner(plain).step(items, data)
    for name, (a, b) in factors.items():
        full = whole[f"{name}.weight"]
        assert help.relative(whole[f"{name}.lora_A.default.weight"], 2.0 * b.T @ full) < 1e-4, name
        assert help.relative(whole[f"{name}.lora_B.default.weight"], 2.0 * full @ a.T) < 1e-4, name
    assert merged_weights.keys() == factors.keys()


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
def test_a_checkpoint_holds_adapters_alone_and_continues_to_the_bit(optimizer, tmp_path):
    settings = {"optimizer": optimizer, "lr": 1e-2}
    config = LoraConfig(rank=48)  # large enough for 8-bit moments
    straight = learner(adapted(config=config, intermediate_size=96), **settings)
    for k in range(4):
        step(straight, k)
    first = learner(adapted(config=config, intermediate_size=96), **settings)
    for k in range(2):
        step(first, k)
    checkpoint_files.save(tmp_path, 2, *first.state(), keep=1)
    loaded, _ = checkpoint_files.load_latest(tmp_path)
    assert loaded is not None
    _, tensors, meta = loaded
    assert all("lora_" in name for name in tensors)
    assert any(t.dtype == torch.uint8 for t in tensors.values()) == (optimizer == "adamw-8bit")
    second = learner(adapted(config=config, intermediate_size=96, seed=9), **settings)
    second.load_state(tensors, meta)
    for k in range(2, 4):
        step(second, k)
    expected, got = straight.state(), second.state()
    assert got[1] == expected[1]
    assert got[0].keys() == expected[0].keys()
    assert all(torch.equal(t, expected[0][name]) for name, t in got[0].items())


def test_a_checkpoint_on_another_base_is_refused():
    own = learner(adapted())
    step(own)
    other = help.model()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 4] += 1
    with pytest.raises(CheckpointError, match="base: "):
        learner(lora.attach(other, LORA, name="base", seed=0)).load_state(*own.state())
    with pytest.raises(CheckpointError, match=r"lora_A.default.weight: \(4, 32\) .* in the checkpoint, \(2, 32\)"):
        learner(adapted(config=LoraConfig(rank=2, alpha=8.0))).load_state(*own.state())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2"])
def test_a_base_in_bfloat16_computes_what_one_in_float32_computes_in_bfloat16(kind, stored, tmp_path):
    folder = str(tiny.save(tmp_path / "m", kind))
    loading.load_model(folder).to(stored).save_pretrained(folder)
    out = []
    for base in ("float32", "bfloat16"):
        config = LoraConfig(rank=4, base=base)
        model = lora.load_base(folder, config, device="cpu", dtype="bfloat16")
        kinds = {p.dtype for layer in lora.linear_layers(model).values() for p in layer.parameters()}
        assert kinds == {getattr(torch, base)}
        own = moved(lora.attach(model, config, name="base", seed=0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out.append(logits(own.model))
        torch.testing.assert_close(logits(lora.merged(own)), out[-1].float(), rtol=0.1, atol=0.3)
    assert torch.equal(*out)


@pytest.mark.parametrize("kind", ["llama", "smollm", "qwen3", "gpt_neox"])
def test_four_bit_bases(kind, tmp_path):
    """One model in both modes (bitsandbytes would have two on some CPUs), trainable, merged from what it computes."""
    folder = str(tiny.save(tmp_path / "m", kind))
    config = LoraConfig(rank=4, base="nf4")
    model = lora.load_base(folder, config, device="cpu", dtype="float32")
    assert lora.parameter_count(model) == lora.parameter_count(tiny.model(kind))
    own = moved(lora.attach(model, config, name="base", seed=0))
    quiet = logits(own.model)
    loud = own.model(input_ids=IDS).logits
    torch.testing.assert_close(quiet, loud.detach(), rtol=1e-6, atol=1e-6)
    loud.sum().backward()
    own.export(tiny.tokenizer(), tmp_path / "final")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    assert (logits(merged) - quiet).abs().max() < 1e-4 * quiet.abs().max()
    assert "quantization_config" not in json.loads((tmp_path / "final" / "config.json").read_text())
    layer = next(iter(lora.linear_layers(merged)))
    plain = tiny.model(kind).get_parameter(f"{layer}.weight")
    assert 0.01 < help.relative(merged.get_parameter(f"{layer}.weight").detach(), plain.detach()) < 0.5


@pytest.mark.parametrize(
    ("base", "rank", "merged", "told"),
    [("bfloat16", 2, True, True), ("nf4", 2, True, True), ("bfloat16", 2, False, False), ("float32", 2, True, False),
     ("float32", 0, True, False)],
)  # fmt: skip
def test_rounding_what_adapters_have_learned_is_told_before_a_run(base, rank, merged, told, tmp_path):
    """A final/ that has adapters merged into it: in 4 bits, it is the model from before they were trained."""
    tiny.save(tmp_path)
    if merged:
        (tmp_path / "adapter").mkdir()
    config = parse({
        "model": str(tmp_path), "chat_template": "plain", "data": {"task": "arithmetic"},
        "lora": {"rank": rank, "base": base}, "learner": {"dtype": "bfloat16"},
    })  # fmt: skip
    notes = [note for note in planning.plan(config).notes if note.startswith("lora.base")]
    assert len(notes) == told
    assert all(note.startswith(f"lora.base: '{base}' rounds the weights of {tmp_path}") for note in notes)
