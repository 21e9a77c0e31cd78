"""The estimate against what the backends really take."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

import learner_help as help
import tiers
from test_estimate import WIDE, config, made, saved, with_critic
from trew.backends.cpu import build, training
from trew.backends.cpu import runner as forward
from trew.backends.cpu.decoder import CompiledDecoder
from trew.backends.cpu.runner import NativeBody
from trew.backends.cpu.stack import ALL, Stack
from trew.backends.cuda_graphs.graphs import Graphs
from trew.backends.cuda_graphs.static_model import StaticModel
from trew.config import LoraConfig
from trew.estimate import passes
from trew.estimate.memory import cache, laid_out, memory, saved_activations, work
from trew.estimate.sizes import sizes_of
from trew.estimate.storages import StorageCount
from trew.learner.packing import pack_shared
from trew.models import backends, loading, lora
from trew.models.anatomy import describe

native = pytest.mark.skipif(isinstance(build.library(), str), reason="the kernels cannot be compiled here")


@native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_a_layer_keeps_is_what_the_formula_says(kind, dtype, tmp_path):
    folder = saved(tmp_path, kind, **WIDE)
    c = config(folder, dtype=dtype)
    net = loading.load_model(folder)
    body = NativeBody.of(net, dtype=getattr(torch, dtype), recompute=False)
    assert isinstance(body, NativeBody)
    pack, sizes = pack_shared(help.samples(), budget=4096)[0], sizes_of(c)
    found = []
    for layers in (1, 3):
        few = replace(body.parts, layers=body.parts.layers[:1] * layers)
        row = NativeBody(few, body.dtype).row(pack)
        found.append(Stack(few, dtype=body.dtype, split=lora.split).bytes(row, keep=ALL))
    tokens, (one, three) = pack.input_ids.size, found
    assert (three - one) / 2 == pytest.approx(saved_activations(sizes, c) * tokens, rel=0.01)
    rest = one - saved_activations(sizes, c) * tokens - work(sizes, c) * tokens - 4 * training.SHARED
    assert 0 < rest < torch.get_num_threads() << 20  # what each thread works with


@native
def test_micro_batches_are_those_of_all_layers_and_not_of_the_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "PACK_TOKENS", 1)
    monkeypatch.setattr(forward, "PACK_PROMPTS", 1)
    folder = saved(tmp_path, num_hidden_layers=6, **WIDE)
    c = config(folder, rollout={"prompts": 6, "completions": 4, "max_tokens": 10})
    net, found = loading.load_model(folder), {}
    for size in (1 << 17, 1 << 20):
        monkeypatch.setattr(forward, "PACK_BYTES", size)
        real = passes.batch(c, net, prompt=12, vocabulary=100)
        assert (made(c).load.passes, made(c).load.tokens) == (len(real.packs), real.largest.input_ids.size)
        found[size] = len(real.packs)
    assert found[1 << 17] > found[1 << 20]


@native
def test_a_critics_own_forward_counts_beside_the_memory_of_the_kernels(tmp_path):
    """They run the policy alone; and a process keeps what the critic's pass took while it generates."""
    c = config(saved(tmp_path, **WIDE), rollout={"prompts": 8, "completions": 8, "max_tokens": 60})
    alone, taught = made(c), with_critic(c)
    assert alone.load.body is None
    passing = taught.memory.parts["training"]["critic pass"]
    assert passing > taught.load.critic.activations > taught.memory.parts["training"]["activations"]
    for phase in ("generating", "training"):
        extra = taught.memory.total(phase) - alone.memory.total(phase)
        assert extra > 12 * taught.load.critic.weights + taught.load.critic.activations


@native
def test_cache_and_laid_out_weights_are_as_large_as_the_formulas_say(tmp_path):
    folder = saved(tmp_path, **WIDE)
    c = config(folder, rollout={"prompts": 40, "completions": 8, "max_tokens": 100, "batch": 256})
    found = made(c, prompt=70)
    parts = describe(loading.load_model(folder))
    decoder = CompiledDecoder(parts, positions=170)
    prompts = [decoder.open(list(range(70)), 8) for _ in range(40)]
    for _ in range(100):
        if not decoder.rows:
            decoder.add([p for p in prompts[:32] for _ in range(8)])
        decoder.step(torch.zeros(256, dtype=torch.int64))
    real = sum(chunk.numel() * 4 for chunk in decoder.cache.chunks)
    assert cache(found.sizes, c, found.load) == pytest.approx(real, rel=0.05)
    assert found.load.native_decode
    assert laid_out(found.sizes, c, found.load) == 4 * (found.sizes.linear + found.sizes.head)


@native
def test_the_proof_counts_where_a_vocabulary_is_large(tmp_path):
    folder = saved(tmp_path, vocab_size=40_000, **WIDE)
    own = {"prompts": 2, "completions": 4, "max_tokens": 96}
    parts = made(config(folder, lora=LoraConfig(rank=4), rollout=own), prompt=96).memory.parts
    logits = 4 * 40_000 * 96
    assert logits <= parts["training"]["proof"] + parts["training"]["gradients"] < 1.1 * logits
    assert parts["generating"]["kept"] + parts["generating"]["step"] >= logits
    plain = dataclasses.replace(config(folder, rollout=own, share_prompts=False), kernels="plain", linear="plain")
    assert made(plain, prompt=96).memory.parts["training"]["proof"] == 0, "there is nothing to compare"


BUFFERS = [("llama", "float32"), ("llama", "bfloat16"), ("gemma3", "float32"), ("gemma3", "bfloat16")]


@pytest.mark.parametrize(("kind", "dtype"), tiers.some(BUFFERS, BUFFERS[-1:], name=tuple))
def test_buffers_of_generation_on_a_gpu(kind, dtype, tmp_path, monkeypatch):
    """As they are made, for a model of more layers than those that are tried; the CPU stands for a GPU."""
    monkeypatch.setattr(backends, "BY_DEVICE", {"cpu": "cuda_graphs"})
    layers = {"num_hidden_layers": 6} | ({"layer_types": ["full_attention"] * 6} if kind == "gemma3" else {})
    folder = saved(tmp_path, kind, **layers)
    c = config(folder, dtype=dtype, rollout={"max_tokens": 300})
    e = made(c)
    parts = describe(loading.load_model(folder))
    assert not isinstance(parts, str)
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    real = StaticModel(parts, slots=12, columns=512, dtype=types[dtype], graphs=Graphs(None))
    generating, training = e.memory.parts["generating"], e.memory.parts["training"]
    assert generating["laid out"] + generating["cache"] == real.bytes
    assert generating["cache"] == real.cache.numel() * real.cache.element_size()
    assert training["cache"] == generating["cache"], "with this much memory they stay"
    with StorageCount() as storages, torch.no_grad():
        for _ in range(2):
            storages.peak = before = storages.live
            real.prefill([[0] * 12] * 3, range(3), piece=100)
            real.compute(16, 512)
    assert generating["step"] == pytest.approx(storages.peak - before, rel=0.02)
    full = dataclasses.replace(e.load, free=2 * e.memory.total("generating") - 1)
    assert "cache" not in memory(e.sizes, c, full).parts["training"]
    assert made(dataclasses.replace(c, kernels="plain")).load.static is None


def test_buffers_of_an_evaluation_stay_while_a_gpu_trains_if_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "BY_DEVICE", {"cpu": "cuda_graphs"})
    c = config(saved(tmp_path), rollout={"max_tokens": 300})
    e = made(c, held_out=100)
    sampled = {phase: e.memory.parts[phase]["cache"] for phase in ("generating", "evaluating")}
    assert sampled["evaluating"] > 4 * sampled["generating"]

    def cached(free: int) -> int:
        return memory(e.sizes, c, dataclasses.replace(e.load, free=free)).parts["training"].get("cache", 0)

    largest = 2 * e.memory.total("evaluating")
    assert [cached(largest), cached(largest - 1)] == [sampled["evaluating"], sampled["generating"]]
    assert cached(2 * e.memory.total("generating") - 1) == 0
