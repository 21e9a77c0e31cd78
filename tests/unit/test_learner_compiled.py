"""learner.compile: the plain gradients from compiled layers, in force in the learner's passes and nowhere else."""

from __future__ import annotations

import functools
import re
import warnings

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

import learner_help as help
import tiers
import tiny
from trew.config import Config, LearnerConfig, LoraConfig
from trew.errors import ModelError
from trew.learner import compiled, machine
from trew.learner.compiled import Compiler
from trew.models import lora
from trew.models.anatomy import describe
from trew.objective import preset

PLAIN = {"fused": False}
needs_compiler = pytest.mark.skipif(machine.compile_problem("cpu") is not None, reason="there is no C++ compiler here")


@pytest.fixture
def traced(monkeypatch):
    """All of torch.compile but the C++ at its end, which takes ten seconds a model; in the default tier without its
    graphs of the backward pass either, which take as long as all else."""
    monkeypatch.setattr(compiled, "_compiled", _traced)


@functools.cache
def _traced(forward):
    return torch.compile(forward, backend="aot_eager" if tiers.tier() == "nightly" else "eager", dynamic=True)


def step(net, **settings):
    objective, items = preset("dr-grpo"), help.samples()
    data = objective.prepare(help.batch(items, old_logprobs=help.near(net, items)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that it was given up
        return help.gradients(net, objective, items, data, **PLAIN, **settings)


@needs_compiler
@pytest.mark.nightly  # C++ of seventeen kernels, half a minute; the default tier runs the graphs that become it
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_the_same_gradients_from_compiled_code(again):
    net = help.model()
    with inductor.patch(compile_threads=1):  # no processes that import torch, for so little
        got = step(net, compile=True, gradient_checkpointing=again)
    assert 0 < help.relative(got, step(net, gradient_checkpointing=again)) < 1e-5  # 0: nothing was compiled


SETTINGS = {
    "llama": ("llama", {}), "gemma3": ("gemma3", {}), "gpt2": ("gpt2", {}),
    "recomputed": ("llama", {"gradient_checkpointing": True}), "unshared": ("gpt2", {"share_prompts": False}),
    "several packs": ("llama", {"microbatch_tokens": 25}),
}  # fmt: skip


@pytest.mark.parametrize("name", tiers.some(SETTINGS, ["recomputed", "several packs"]))
def test_the_same_gradients_whatever_the_settings(name, traced):
    kind, settings = SETTINGS[name]
    net = help.model(kind)
    assert help.relative(step(net, compile=True, **settings), step(net, **settings)) < 1e-5


def test_layers_do_compute_again_in_the_backward_pass(traced, monkeypatch):
    calls = []
    again = compiled._again
    monkeypatch.setattr(compiled, "_again", lambda run, *args, **kwargs: calls.append(1) or again(run, *args, **kwargs))
    step(help.model(), compile=True)
    assert not calls
    step(help.model(), compile=True, gradient_checkpointing=True)
    assert calls


def test_bfloat16_is_as_near_to_float32_as_without(traced):
    net = help.model()
    exact = step(net)
    errors = [help.relative(step(net, dtype="bfloat16", compile=c), exact) for c in (False, True)]
    assert 1e-3 < errors[1] < 1.1 * errors[0]


@pytest.mark.nightly  # half a minute beside other tests; a run compares adapters' gradients with the plain ones itself
def test_adapters_get_the_same_gradients_and_the_reference_is_the_model_without_them(traced):
    config = LoraConfig(rank=3, alpha=3.0)
    own = lora.attach(help.model(num_hidden_layers=1), config, name="m", seed=0)  # adapters of each layer are a graph
    with torch.no_grad():
        for name, p in own.model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    items, objective = help.samples(), preset("grpo", beta=0.04)
    found = {}
    for compile in (False, True):
        one = help.learner(own.model, objective, adapters=own, compile=compile, **PLAIN)
        reference = one.logprobs(items, reference=True)
        one._clip = lambda *_: 1.0
        one._optimizer.step = lambda *_: None
        one._optimizer.zero_grad = lambda **_: None
        one.step(items, objective.prepare(help.batch(items, ref_logprobs=reference, old_logprobs=one.logprobs(items))))
        parameters = [p for p in own.model.parameters() if p.requires_grad]
        found[compile] = reference, torch.cat([p.grad.flatten() for p in parameters])
        for p in parameters:
            p.grad = None
        assert one._runner.path.accelerator == ("compile" if compile else "")
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=1e-5)
    assert help.relative(found[True][1], found[False][1]) < 1e-5


def test_other_lengths_are_not_compiled_anew(traced):
    net = help.model()
    one = help.learner(net, compile=True, **PLAIN)
    objective = preset("dr-grpo")

    def train(shape, seed):
        items = help.samples(shape, seed=seed)
        one.logprobs(items)
        one.step(items, objective.prepare(help.batch(items, old_logprobs=help.near(net, items))))

    train([(9, (4, 6)), (7, (5, 3))], 0)
    graphs = counters["stats"]["unique_graphs"]
    for seed, shape in enumerate([[(5, (8, 8, 2))], [(30, (3, 40))], [(2, (1, 2))] * 5, help.RAGGED], start=1):
        train(shape, seed)
    assert counters["stats"]["unique_graphs"] == graphs


def test_graphs_end_at_attention_over_packed_rows_and_nowhere_else(traced):
    torch._dynamo.reset()
    counters["graph_break"].clear()
    step(help.model(), compile=True)
    breaks = counters["graph_break"]
    assert breaks
    assert all("attend at" in reason for reason in breaks), breaks


def test_outside_the_learner_the_model_is_as_it_was(traced):
    net, items = help.model(**tiny.wide("llama")), help.samples()
    names, ids = list(net.state_dict()), torch.arange(24).view(2, 12)
    forward = help.runner(net, fused=False, accelerator=Compiler())
    (pack,) = forward.packs(items)
    graphs = counters["stats"]["unique_graphs"]
    before = net(ids).logits

    def fail():
        with forward.running(pack):
            assert all("forward" in layer.__dict__ for layer in net.model.layers)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not any("forward" in module.__dict__ for module in net.modules())
    assert torch.equal(net(ids).logits, before)
    assert not isinstance(describe(net), str)
    assert list(net.state_dict()) == names
    assert counters["stats"]["unique_graphs"] == graphs  # nor was it compiled for what is no pass


def test_a_layer_that_somebody_else_has_wrapped_stays_wrapped(traced):
    net, items = help.model(), help.samples()
    layer, calls = net.model.layers[1], []
    plain = layer.forward
    layer.forward = wrapper = lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs)
    forward = help.runner(net, fused=False, accelerator=Compiler(), gradient_checkpointing=True)
    (pack,) = forward.packs(items)
    with forward.running(pack):
        assert calls
    assert layer.forward is wrapper


def spoiled(monkeypatch, change):
    """Compiled code that is wrong."""
    monkeypatch.setattr(compiled, "_compiled", lambda forward: lambda *args, **kwargs: change(forward(*args, **kwargs)))


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return 1.01 * dy


@pytest.mark.parametrize(
    ("change", "told"),
    [(lambda x: x * 1.01, "log-probs differ by"), (_WrongBackward.apply, "gradients differ by"),
     (lambda x: x.view(-1)[:1], "raise ")],
)  # fmt: skip
def test_wrong_code_is_found_on_the_first_samples_and_not_used(change, told, monkeypatch):
    spoiled(monkeypatch, change)
    items = help.samples()
    forward = help.runner(help.model("gpt2"), fused=False, accelerator=Compiler())
    with pytest.warns(UserWarning, match=f"as they are, because compiled layers.* {told}.*learner.compile = false"):
        packs = forward.packs(items)
    assert forward.path.accelerator == ""
    got = torch.cat([forward.logprobs_of(pack) for pack in packs])
    plain = help.runner(help.model("gpt2"), fused=False)
    torch.testing.assert_close(got, torch.cat([plain.logprobs_of(pack) for pack in plain.packs(items)]))


def test_what_fails_to_compile_later_ends_with_what_to_do(traced, monkeypatch):
    forward = help.runner(help.model(), fused=False, accelerator=Compiler())
    (pack,) = forward.packs(help.samples())
    monkeypatch.setattr(compiled, "_compiled", lambda forward: _fails)
    with pytest.raises(ModelError, match=r"^learner\.compile: got true, but torch.compile fails on LlamaForCausalLM"):
        forward.logprobs_of(pack)


def _fails(*args, **kwargs):
    from torch._dynamo.exc import InternalTorchDynamoError

    raise InternalTorchDynamoError("no such node\nand a long story")


def test_what_compiling_took_is_told_once(traced):
    one, told = help.learner(help.model(), compile=True, **PLAIN), []
    one.tell = told.append
    items, objective = help.samples(), preset("dr-grpo")
    for _ in range(2):
        one.step(items, objective.prepare(help.batch(items, old_logprobs=help.near(one.model, items))))
    torch._dynamo.reset()
    assert len(told) <= 1  # none where an earlier test has left the graphs
    one.step(items, objective.prepare(help.batch(items, old_logprobs=help.near(one.model, items))))
    assert told[-1].startswith("note: learner.compile: passes with something to compile took ")


def test_a_model_whose_layers_cannot_be_told_is_refused(monkeypatch):
    monkeypatch.setattr(compiled.recompute, "layers", lambda model: [])
    with pytest.raises(ModelError, match="it cannot be told what the layers of LlamaForCausalLM are"):
        help.learner(help.model(), compile=True)


@pytest.mark.parametrize(
    ("device", "says"),
    [("cpu", "needs a C\\+\\+ compiler; there is none"), ("cuda", "needs a C compiler; there is none"),
     ("mps", "not supported on mps")],
)  # fmt: skip
def test_without_a_compiler_it_is_refused(device, says, monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: object())
    config = Config(model="m", learner=LearnerConfig(compile=True))
    (problem,) = machine.machine_problems(config, device)
    assert problem.startswith("learner.compile: got true, ")
    assert re.search(says, problem)
    assert not machine.machine_problems(Config(model="m"), device)


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_where_torch_is_told_to_compile_nothing_it_is_refused(name, monkeypatch):
    """torch runs the layers as they are then, and says nothing."""
    monkeypatch.setenv(name, "1")
    (problem,) = machine.machine_problems(Config(model="m", learner=LearnerConfig(compile=True)), "cpu")
    assert problem == (
        f"learner.compile: got true, which {name}=1 in the environment switches off; unset {name}; or set "
        "learner.compile to false"
    )
    assert not machine.machine_problems(Config(model="m"), "cpu")


def test_on_a_gpu_it_needs_triton(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert "needs the package triton" in str(machine.compile_problem("cuda:1"))
