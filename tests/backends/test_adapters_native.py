"""Adapters through the compiled kernels."""

from __future__ import annotations

import pytest
import torch

import cpu_help as cpu
import learner_help as help
import tiers
import tiny
from test_adapters import adapted, moved
from trew.backends.cpu import build
from trew.backends.cpu.backend import CpuBackend
from trew.config import LoraConfig
from trew.learner.autograd import AutogradRunner
from trew.learner.runner import RunnerSettings
from trew.models import lora
from trew.models.lora import Adapters
from trew.objective import preset
from trew.rollout.torch_engine.decoder import Decoding

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason="the kernels cannot be compiled here")

HEADS = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}  # as the kernels need


def adapter_gradients(own: Adapters, items, data, **settings) -> torch.Tensor:
    """All gradients of A and B after one step, as one vector; the adapters stay as they are."""
    before = {n: p.detach().clone() for n, p in own.model.named_parameters() if p.requires_grad}
    caught = {}
    one = cpu.learner(own.model, preset("grpo", beta=0.0), adapters=own, lr=1e-30, **settings)
    one._clip = lambda *_: caught.update({n: own.model.get_parameter(n).grad.clone() for n in before}) or 1.0
    one.step(items, data)
    with torch.no_grad():
        for n, t in before.items():
            own.model.get_parameter(n).copy_(t)
    by_kernels = settings.get("kernels", True) and settings.get("linear", True)
    assert one._runner.path.layers == ("cpu" if by_kernels else "")
    return torch.cat([caught[n].flatten() for n in before])


@pytest.mark.parametrize(
    ("kind", "settings"),
    tiers.thinned(
        ["llama", "smollm", "qwen2", "qwen3", "gemma"],
        [{}, {"microbatch_tokens": 25}, {"gradient_checkpointing": True}, {"linear": False}],
        keep=3,
    ),
)
def test_our_kernels_give_the_gradients_of_the_model_s_own_forward(kind, settings):
    sizes = (
        {**HEADS, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1} if kind == "smollm" else HEADS
    )
    own = moved(adapted(kind, LoraConfig(rank=5, alpha=3.0), **sizes))
    items = help.samples()
    data = preset("grpo", beta=0.0).prepare(help.batch(items, old_logprobs=help.near(own.model, items)))
    want = adapter_gradients(own, items, data, kernels=False, share_prompts=False)
    assert help.relative(adapter_gradients(own, items, data, **settings), want) < 1e-5


@pytest.mark.parametrize("frozen", [("q_proj.lora_A",), ("up_proj.lora_B",), ("down_proj.lora_A", "down_proj.lora_B")])
def test_adapters_that_are_frozen_in_part_get_no_gradient(frozen):
    own = moved(adapted("llama", LoraConfig(rank=5), **HEADS))
    for name, p in own.model.named_parameters():
        if any(part in name for part in frozen):
            p.requires_grad_(False)
    items = help.samples()
    data = preset("grpo", beta=0.0).prepare(help.batch(items, old_logprobs=help.near(own.model, items)))
    want = adapter_gradients(own, items, data, kernels=False, share_prompts=False)
    assert help.relative(adapter_gradients(own, items, data), want) < 1e-5


@pytest.mark.parametrize("base", ["float32", "bfloat16"])
def test_in_bfloat16_they_are_as_near_to_the_exact_ones_as_its_own_forward_is(base, tmp_path):
    tiny.model("llama", **HEADS).save_pretrained(tmp_path)
    config = LoraConfig(rank=5, base=base)
    errors = {"own": 0.0, "ours": 0.0}
    for seed in range(3):
        items = help.samples([(9, (30, 20)), (20, (15, 40))], seed=seed)
        data = preset("grpo", beta=0.0).prepare(help.batch(items, seed=seed))
        found = {}
        for name, dtype in (("exact", "float32"), ("own", "bfloat16"), ("ours", "bfloat16")):
            kept = config if dtype == "bfloat16" else LoraConfig(rank=5)
            model = lora.load_base(str(tmp_path), kept, device="cpu", dtype=dtype)
            own = moved(lora.attach(model, kept, name="m", seed=0))
            found[name] = adapter_gradients(own, items, data, dtype=dtype, kernels=name == "ours")
        for name in errors:
            errors[name] += help.relative(found[name], found["exact"]) / 3
    assert 1e-3 < errors["ours"] < 1.1 * errors["own"]


def test_the_reference_goes_through_the_kernels_too():
    own = moved(adapted(**HEADS))
    items = help.samples()
    mine = cpu.learner(own.model, preset("grpo", beta=0.04), adapters=own)
    plain = cpu.learner(help.model(**HEADS))
    torch.testing.assert_close(mine.logprobs(items, reference=True), plain.logprobs(items), rtol=0, atol=0)
    assert (mine.logprobs(items) - mine.logprobs(items, reference=True)).abs().max() > 1e-2


@pytest.mark.parametrize("adapters", [True, False])
def test_layers_laid_out_lie_in_the_arena_where_gradients_are_too_small_to_leave_them_room(adapters):
    model = adapted("llama", LoraConfig(rank=1), **HEADS).model if adapters else help.model("llama", **HEADS)
    backend = CpuBackend()
    with backend.decoder(model, Decoding(slots=1, longest_prompt=3, max_tokens=2)) as decoder:
        blocks = {block.untyped_storage().data_ptr() for block in backend.arena._blocks}
        laid_out = [w._kept[0] for m in decoder.layers._matrices for w in (m.qkv, m.o, m.gate, m.up, m.down)]
        assert [w.untyped_storage().data_ptr() in blocks for w in laid_out] == [adapters] * len(laid_out)


@pytest.mark.parametrize("kernels", [True, False])
def test_where_autograd_takes_memory_of_the_heap_generation_gives_back_what_it_took(kernels):
    model = adapted("llama", LoraConfig(rank=1), **HEADS).model
    backend = CpuBackend()
    runner = backend.runner(model, plain=AutogradRunner(model, RunnerSettings(fused=kernels)))
    assert (runner.path.layers == "cpu") == kernels
    with backend.decoder(model, Decoding(slots=1, longest_prompt=3, max_tokens=2)) as decoder:
        decoder.add([decoder.open([1, 2, 3], 1)])
        assert backend.arena._blocks
    assert bool(backend.arena._blocks) == kernels, "the kernels' passes take what generation leaves"
    backend.release()
    assert not backend.arena._blocks
