"""The learner's own layers and fused head against the model's own forward and autograd."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import pytest
import torch

import cpu_help as cpu
import learner_help as help
import tiers
import tiny
from trew.backends.cpu import build
from trew.backends.cpu import runner as runner_module
from trew.backends.cpu.backend import CpuBackend
from trew.backends.cpu.head import CompiledHead
from trew.backends.cpu.runner import KernelRunner
from trew.backends.cpu.stack import Stack
from trew.errors import NumericsError
from trew.learner import fused_head
from trew.learner.fused_head import FusedHead
from trew.learner.path import ExecutionPath
from trew.objective import preset
from trew.types import TrainingSample

FAMILIES = ("llama", "smollm", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
needs_library = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))


def model(kind: str, *, windowed: bool = False) -> Any:
    """Heads of 16 numbers, as the kernels need; norms and biases that are not all alike."""
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "smollm":
        sizes |= {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    if kind.startswith("gemma"):
        sizes |= {"query_pre_attn_scalar": 16} if kind != "gemma" else {}
    net = (tiny if windowed else help).model(kind, **sizes)
    if kind == "gemma2":
        net.set_attn_implementation("eager")  # the only one that caps scores
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in net.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return net


def prepared(net, name: str = "grpo", *, seed: int = 0, **options):
    items = help.samples(seed=seed)
    objective = preset(name, **options)
    count = sum(len(s.token_ids) for s in items)
    data = help.batch(items, old_logprobs=help.near(net, items), ref_logprobs=help.near(net, items, seed=2),
                      entropies=torch.ones(count))  # fmt: skip
    return objective, items, objective.prepare(data)


WAYS: dict[str, dict[str, Any]] = {
    "default": {}, "several packs": {"microbatch_tokens": 25}, "recomputed": {"gradient_checkpointing": True},
    "unshared": {"share_prompts": False, "microbatch_tokens": 40}, "plain products": {"linear": False},
}  # fmt: skip


@needs_library
@pytest.mark.parametrize(("kind", "how"), tiers.thinned(FAMILIES, WAYS, keep=2))
def test_gradients_equal_those_of_the_models_own_forward(kind, how):
    net, settings = model(kind), WAYS[how]
    objective, items, data = prepared(net, beta=0.1, entropy_bonus=0.2)
    own = cpu.learner(copy.deepcopy(net), objective, temperature=0.9, **settings)
    assert (own._runner.path.layers == "cpu") == settings.get("linear", True)
    got = cpu.gradients(net, objective, items, data, temperature=0.9, **settings)
    want = cpu.gradients(net, objective, items, data, temperature=0.9, kernels=False, share_prompts=False)
    assert help.relative(got, want) < 1e-5
    assert not own._runner.messages


@needs_library
@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_windows_shorter_than_the_sequences_need_no_other_way(kind):
    net = model(kind, windowed=True)  # of 8 positions
    objective, items, data = prepared(net)
    got = cpu.gradients(net, objective, items, data)
    want = cpu.gradients(net, objective, items, data, kernels=False, share_prompts=False)
    assert help.relative(got, want) < 1e-5


@needs_library
@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 200])
def test_attention_over_many_tiles(prompt):
    net = model("qwen3")
    items = help.samples([(prompt, (1, 70, 130)), (5, (33, 64))])
    objective = preset("grpo", beta=0.0)
    data = objective.prepare(help.batch(items))
    got = cpu.gradients(net, objective, items, data)
    want = cpu.gradients(net, objective, items, data, kernels=False, share_prompts=False)
    assert help.relative(got, want) < 1e-5


@needs_library
@pytest.mark.parametrize("kind", ["smollm", "qwen2", "gemma3"])
def test_bfloat16_gradients_are_as_near_to_the_exact_ones_as_those_of_autocast(kind):
    net, objective = model(kind), preset("grpo", beta=0.0)
    errors = torch.zeros(2)
    for seed in range(3):
        items = help.samples([(9, (30, 20)), (20, (15, 40))], seed=seed)
        data = objective.prepare(help.batch(items, seed=seed))
        exact = cpu.gradients(net, objective, items, data, kernels=False, share_prompts=False)
        for i, on in enumerate((True, False)):
            got = cpu.gradients(net, objective, items, data, dtype="bfloat16", kernels=on)
            errors[i] += help.relative(got, exact) / 3
    assert 1e-3 < errors[0] < 1.1 * errors[1]


@needs_library
def test_weights_that_change_are_seen_at_once_also_in_bfloat16():
    net, items = model("llama"), help.samples()
    own = cpu.learner(net, dtype="bfloat16")
    before = own.logprobs(items)
    with torch.no_grad():
        net.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    assert (own.logprobs(items) - before).abs().max() > 0.01
    assert isinstance(own._runner.chosen, KernelRunner)


@needs_library
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_weights_that_move_to_other_memory_are_found_there(kind):
    net, items = model(kind), help.samples()
    own = cpu.learner(net, preset("grpo", beta=0.0))
    inner = net.model
    moves = {
        "a matrix": lambda: setattr(inner.layers[0].mlp.down_proj.weight, "data", other(inner.layers[0].mlp.down_proj)),
        "a norm": lambda: setattr(
            inner.layers[1].input_layernorm.weight, "data", other(inner.layers[1].input_layernorm)
        ),
        "embeddings": lambda: setattr(inner.embed_tokens.weight, "data", other(inner.embed_tokens)),
        "another parameter": lambda: setattr(
            inner.layers[0].mlp.up_proj, "weight", torch.nn.Parameter(other(inner.layers[0].mlp.up_proj))
        ),
    }

    def other(module):
        return (module.weight.detach() * 1.3).clone()

    before = own.logprobs(items)
    for name, move in moves.items():
        move()
        got = own.logprobs(items)
        assert (got - before).abs().max() > 1e-4, name
        with torch.no_grad():
            want = torch.cat([help.plain_logprobs(net, s) for s in items])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        before = got


@needs_library
def test_a_matrix_that_several_layers_share_gets_the_sum_of_their_gradients():
    net = model("llama")
    first, second = net.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    second.input_layernorm.weight = first.input_layernorm.weight
    objective, items, data = prepared(net)
    got = cpu.gradients(net, objective, items, data, microbatch_tokens=25)
    want = cpu.gradients(net, objective, items, data, kernels=False, share_prompts=False)
    assert help.relative(got, want) < 1e-5


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_there_before_does_not_matter(dtype):
    """Memory of passes is used again: every number in it is written before it is read."""
    net = model("qwen3")
    objective, items, data = prepared(net, beta=0.1)
    backend, found = CpuBackend(), []
    for filled in (0, 255):
        own = cpu.learner(copy.deepcopy(net), objective, dtype=dtype, backend=backend)
        own.verify(items)
        with backend.arena.lease() as arena:
            arena.alloc(1 << 24, dtype=torch.uint8).fill_(filled)  # 255: no number
        caught = {}
        own._clip = lambda *_, own=own, caught=caught: caught.update(
            {n: p.grad.clone() for n, p in own.model.named_parameters()}
        ) or 1.0  # fmt: skip
        own.step(items, data)
        found.append(caught)
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


@needs_library
def test_frozen_parameters_get_no_gradient():
    net, items = model("qwen3"), help.samples()
    first, second = net.model.layers
    for p in (net.model.embed_tokens.weight, first.mlp.up_proj.weight, second.self_attn.q_norm.weight):
        p.requires_grad_(False)
    objective = preset("grpo", beta=0.0)
    data = objective.prepare(help.batch(items))
    got = cpu.gradients(net, objective, items, data)
    want = cpu.gradients(net, objective, items, data, kernels=False)
    assert help.relative(got, want) < 1e-5


@needs_library
def test_kernels_that_come_out_wrong_are_found_on_the_first_samples(monkeypatch):
    right = Stack.forward

    def wrong(self, *given, **more):
        last, hidden, memory = right(self, *given, **more)
        return last, hidden * 1.5, memory

    monkeypatch.setattr(Stack, "forward", wrong)
    net, items = model("llama"), help.samples()
    objective = preset("grpo", beta=0.0)
    data = objective.prepare(help.batch(items))
    own = cpu.learner(net, objective)
    with pytest.warns(UserWarning, match="trained through its own forward, because the kernels' log-probs differ by"):
        got = own.logprobs(items)
    assert own._runner.path == ExecutionPath(shared=True, fused=True)
    with torch.no_grad():
        want = torch.cat([help.plain_logprobs(net, s) for s in items])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert own.step(items, data).grad_norm > 0


def test_a_head_that_does_more_than_a_product_is_found_on_the_first_samples(monkeypatch):
    net, items = help.model("gpt2"), help.samples()
    forward = type(net).forward

    def scaled(self, **given):
        out = forward(self, **given)
        out.logits = out.logits * 0.5
        return out

    scaled.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(net), "forward", scaled)
    own = cpu.runner(net)
    with pytest.warns(UserWarning, match="logits are made for all tokens at once"):
        (pack,) = own.packs(items)
    assert own.path == ExecutionPath(shared=True)
    assert pack.samples[0] == 0
    with torch.no_grad():
        want = help.plain_logprobs(net, items[0])
    torch.testing.assert_close(own.logprobs_of(pack)[: len(want)], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_entropies_and_log_probs_at_temperature_1_are_those_of_the_plain_path(temperature):
    net, items = help.model("smollm"), help.samples()
    native, plain = (cpu.learner(net, kernels=on, temperature=temperature).untempered(items) for on in (True, False))
    for got, want in zip(native, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_score_norms_are_those_of_the_plain_path(temperature):
    net, items = help.model("smollm"), help.samples()
    native, plain = (cpu.learner(net, kernels=on, temperature=temperature).score_norms(items) for on in (True, False))
    for got, want in zip(native, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


CHUNKED = ["grpo", "gspo", "gspo-token", "cispo", "dapo", "kl-cov", "gtpo"]


@pytest.mark.parametrize(("kind", "name", "rows"), tiers.thinned(["gpt2", "smollm"], CHUNKED, [1, 3, 256], keep=3))
def test_the_objective_may_be_asked_chunk_by_chunk(kind, name, rows, monkeypatch):
    monkeypatch.setattr(fused_head, "ELEMENTS", 1)
    monkeypatch.setattr(fused_head, "ROWS", rows)
    net = help.model(kind)
    options: dict[str, Any] = {"share": 0.2} if name == "kl-cov" else {}
    objective, items, data = prepared(net, name, **options)
    want = cpu.gradients(net, objective, items, data, kernels=False)
    assert help.relative(cpu.gradients(net, objective, items, data), want) < 1e-5
    metrics = [cpu.learner(copy.deepcopy(net), objective, kernels=on).step(items, data) for on in (True, False)]
    assert metrics[0].loss == pytest.approx(metrics[1].loss, abs=1e-5)
    assert metrics[0].metrics.keys() == metrics[1].metrics.keys()
    for key, (total, count) in metrics[1].metrics.items():
        if key == "changed_share":  # whether a weight moves at all may be a matter of the last bit
            continue
        assert metrics[0].metrics[key] == (pytest.approx(total, rel=1e-3, abs=1e-4), count), key


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize(("cap", "temperature"), [(0.0, 1.0), (0.0, 0.7), (5.0, 1.3)])
def test_the_fused_head_equals_autograd_in_float64(cap, temperature, compiled, monkeypatch):
    monkeypatch.setattr(fused_head, "ELEMENTS", 1)
    monkeypatch.setattr(fused_head, "ROWS", 4)
    monkeypatch.setattr(fused_head, "BLOCK", 8)
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=g) for shape in ((5, 6), (37, 6), (37,)))
    rows, tokens = torch.tensor([0, 0, 1, 4, 2, 4, 4]), torch.tensor([3, 36, 0, 16, 5, 16, 1])
    c, s = torch.randn(7, generator=g), torch.randn(7, generator=g)

    h, w, b = (t.double().requires_grad_() for t in (hidden, weight, bias))
    z = h @ w.t() + b
    z = (cap * (z / cap).tanh() if cap else z) / temperature
    log_p = z.log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)[rows]
    ((c * log_p[rows, tokens]).sum() + (s * entropies).sum()).backward()

    kind = CompiledHead if compiled else FusedHead
    head = kind(torch.nn.Parameter(weight), torch.nn.Parameter(bias), cap=cap, temperature=temperature)
    values, got = head.values(hidden, rows=rows, tokens=tokens, beside="entropies")
    torch.testing.assert_close(values.double(), log_p[rows, tokens], rtol=0, atol=3e-6)
    assert got is not None
    torch.testing.assert_close(got.double(), entropies, rtol=0, atol=3e-6)
    _, norms = head.values(hidden, rows=rows, tokens=tokens, beside="score_norms")
    p = log_p.detach().exp()[rows]
    want = (torch.nn.functional.one_hot(tokens, 37) - p).square().sum(-1)  # the score, written out
    assert norms is not None
    torch.testing.assert_close(norms.double(), want, rtol=1e-5, atol=1e-6)

    def rule(where, logprobs, entropy):
        torch.testing.assert_close(logprobs, values[where])
        torch.testing.assert_close(entropy, got[where])
        return c[where], s[where]

    for _ in range(2):  # gradients add up
        by_hidden = head.accumulate(hidden, rule, rows=rows, tokens=tokens, entropies=True)
    assert h.grad is not None
    torch.testing.assert_close(by_hidden.double(), h.grad, rtol=1e-5, atol=1e-5)
    assert head.bias is not None
    for ours, theirs in ((head.weight.grad, w.grad), (head.bias.grad, b.grad)):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours.double(), 2 * theirs, rtol=0, atol=3e-5)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_library), False])
def test_impossible_tokens_and_extreme_logits_stay_finite(compiled):
    bias = torch.nn.Parameter(torch.tensor([-torch.inf, 0.0, 0.0, 1e4, -1e4]))
    for part in (slice(0, 3), slice(3, 5)):
        own = torch.nn.Parameter(bias.detach()[part].clone())
        head = (CompiledHead if compiled else FusedHead)(torch.nn.Parameter(torch.zeros(len(own), 2)), own)
        first, second = torch.tensor([0]), torch.tensor([1])
        values, entropies = head.values(torch.zeros(1, 2), rows=first, tokens=second, beside="entropies")
        assert entropies is not None
        assert values.tolist() == pytest.approx([-0.693147 if part.start == 0 else -2e4], rel=1e-6)
        assert entropies.tolist() == pytest.approx([0.693147 if part.start == 0 else 0.0], abs=1e-6)


def test_chunks_keep_sequences_whole():
    head = FusedHead(torch.nn.Parameter(torch.zeros(1 << 21, 1)))  # chunks of ROWS tokens
    size = fused_head.ROWS
    assert [(c.start, c.stop) for c in head.chunks(size + 1)] == [(0, size), (size, size + 1)]
    lengths = [size - 1, 1, 1, 2 * size, 3]
    bounds = [(c.start, c.stop) for c in head.chunks(sum(lengths), lengths)]
    assert bounds == [(0, size), (size, size + 1), (size + 1, 3 * size + 1), (3 * size + 1, 3 * size + 4)]
    assert head.holds([fused_head.WHOLE])
    assert not head.holds([fused_head.WHOLE + 1])
    assert FusedHead(torch.nn.Parameter(torch.zeros(1 << 9, 1))).holds([4 << 12])


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_sequences_too_long_to_be_seen_whole_by_the_head(name, monkeypatch):
    net = help.model("smollm")
    objective, items, data = prepared(net, name)
    want = cpu.gradients(net, objective, items, data, kernels=False)
    monkeypatch.setattr(FusedHead, "holds", lambda self, lengths: False)
    monkeypatch.setattr(fused_head, "ELEMENTS", 1)
    monkeypatch.setattr(fused_head, "ROWS", 2)
    assert help.relative(cpu.gradients(net, objective, items, data), want) < 1e-5


@needs_library
def test_broken_weights_are_named_and_nothing_is_applied():
    net, items = model("llama"), help.samples()
    objective = preset("grpo", beta=0.0)
    data = objective.prepare(help.batch(items))
    own = cpu.learner(net, objective)
    own.logprobs(items)
    with torch.no_grad():
        net.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(NumericsError, match=r"log-probs are not finite .*in samples"):
        own.step(items, data)
    assert all(p.grad is None for p in net.parameters())


@needs_library
def test_models_that_the_kernels_are_not_for():
    assert not cpu.runner(help.model("llama")).path.layers  # heads of 8
    assert not cpu.runner(help.model("gpt2")).path.layers
    hooked = model("llama")
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not cpu.runner(hooked).path.layers
    assert not cpu.runner(model("llama"), kernels=False).path.layers
    watched = model("llama")
    watched.lm_head.weight.register_hook(lambda gradient: gradient)
    assert cpu.runner(watched).path == ExecutionPath(shared=True)


@needs_library
def test_a_group_with_a_long_prompt_is_not_cut_for_the_kernels_sake(monkeypatch):
    """Cut into packs of the size that kernels like, each of these completions would compute the prompt again."""
    net = help.model("smollm")
    prompt = np.arange(40) % 9 + 1
    items = [TrainingSample(prompt, np.arange(10) % 7 + 1, group=0) for _ in range(6)]
    monkeypatch.setattr(runner_module, "PACK_TOKENS", 40)
    monkeypatch.setattr(runner_module, "PACK_BYTES", 1)
    forward = cpu.runner(net, budget=4096)
    assert [pack.input_ids.size for pack in forward.packs(items)] == [40 + 6 * 9]
    assert forward.path.layers
    assert all(pack.input_ids.size <= 60 for pack in cpu.runner(net, budget=60).packs(items))


@needs_library
def test_it_is_said_where_the_kernels_leave_nothing_to_compile():
    with pytest.warns(UserWarning, match="learner.compile: got true, which does nothing where LlamaForCausalLM"):
        own = cpu.learner(model("llama"), compile=True)
    assert own._runner.path.layers
    assert own._runner.path.accelerator == ""
    assert len(own.notes) == 1
