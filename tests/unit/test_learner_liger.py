"""learner.liger: the plain gradients with liger-kernel's functions in place of norms, gates and rotary embedding, there
in the learner's passes and nowhere else.

The functions are stand-ins in torch, which take and do what liger's do, unless liger-kernel and Triton can be imported:
then the real ones run besides, by Triton's interpreter (TRITON_INTERPRET=1) where there is no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import warnings

import pytest
import torch
from transformers.models.llama import modeling_llama

import learner_help as help
from trew.config import Config, LearnerConfig
from trew.errors import ModelError
from trew.learner import machine
from trew.learner.liger import Liger, check
from trew.objective import preset

KINDS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "gemma2", "gemma3")
REAL = (
    all(importlib.util.find_spec(name) for name in ("triton", "liger_kernel"))
    and os.environ.get("TRITON_INTERPRET") == "1"
)


def _norm(x, weight, eps, offset, casting, in_place):
    assert not in_place
    assert casting == ("gemma" if offset else "llama")
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return ((offset + weight) * y).to(x.dtype)


def _rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return modeling_llama_rope(q, k, cos, sin, unsqueeze_dim)


modeling_llama_rope = modeling_llama.apply_rotary_pos_emb
STAND_INS = {
    "liger_rms_norm": _norm,
    "liger_rope": _rope,
    "liger_swiglu": lambda a, b: torch.nn.functional.silu(a) * b,
    "liger_geglu": lambda a, b: torch.nn.functional.gelu(a, approximate="tanh") * b,
}


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="no Triton here"))])
def kernels(request, monkeypatch):
    """Where liger's functions are taken from; how often each was called."""
    if request.param == "real":
        functional = real(monkeypatch)
    else:
        functional = types.ModuleType("liger_kernel.transformers.functional")
        vars(functional).update(STAND_INS)
        package, errors = types.ModuleType("liger_kernel.transformers"), types.ModuleType("triton.errors")
        package.functional = functional
        errors.TritonError = type("TritonError", (Exception,), {})
        for module in (package, functional, errors):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for name in ("liger_kernel", "triton"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    calls = dict.fromkeys(STAND_INS, 0)

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name in STAND_INS:
        monkeypatch.setattr(functional, name, counted(name, getattr(functional, name)))
    return types.SimpleNamespace(calls=calls, functional=functional, interpreted=request.param == "real")


def real(monkeypatch):
    """liger's own, made to run by Triton's interpreter, which has no numbers with types and no libdevice."""
    import liger_kernel.ops.geglu as geglu
    import liger_kernel.ops.rms_norm as rms_norm
    import numpy as np
    import triton.language as tl
    from liger_kernel.transformers import functional
    from triton.runtime import interpreter

    def typed(value):
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return plain(value)

    plain = interpreter._implicit_cvt
    monkeypatch.setattr(interpreter, "_implicit_cvt", typed)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: 1 / tl.sqrt(x))
    monkeypatch.setattr(geglu, "tanh", lambda x: 1 - 2 / (tl.exp(2 * x) + 1))
    return functional


def step(net, **settings):
    objective, items = preset("dr-grpo"), help.samples([(4, (3, 2)), (2, (2, 1))])
    data = objective.prepare(help.batch(items, old_logprobs=help.near(net, items)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that it was given up
        return help.gradients(net, objective, items, data, fused=False, **settings)


def model(kind, **overrides):
    return help.model(kind, **({"sliding_window": 64} if kind == "mistral" else {}), **overrides)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_gradients(kind, kernels):
    net = model(kind)
    assert help.relative(step(net, liger=True), step(net)) < 1e-5
    gate = "liger_geglu" if kind.startswith("gemma") else "liger_swiglu"
    assert {name for name, count in kernels.calls.items() if count} == {"liger_rms_norm", "liger_rope", gate}


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"share_prompts": False}], ids=str)
def test_the_same_gradients_whatever_the_settings(settings, kernels):
    net = model("gemma2" if "share_prompts" in settings else "qwen3")
    assert help.relative(step(net, liger=True, **settings), step(net, **settings)) < 1e-5


def test_bfloat16_is_as_near_to_float32_as_without(kernels):
    if kernels.interpreted:
        pytest.skip("Triton's interpreter cannot multiply bfloat16 numbers")
    net = model("llama")
    exact = step(net)
    errors = [help.relative(step(net, dtype="bfloat16", liger=on), exact) for on in (False, True)]
    assert 1e-3 < errors[1] < 1.5 * errors[0]


def test_outside_the_learner_nothing_has_changed(kernels):
    net, items, ids = model("llama"), help.samples(), torch.arange(12)[None]
    names, classes = [n for n, _ in net.named_modules()], [type(m).__name__ for m in net.modules()]
    before = net(ids).logits
    forward = help.runner(net, fused=False, accelerator=Liger())
    (pack,) = forward.packs(items)

    def fail():
        with forward.running(pack):
            assert "forward" in net.model.norm.__dict__
            assert modeling_llama.apply_rotary_pos_emb is not modeling_llama_rope
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert modeling_llama.apply_rotary_pos_emb is modeling_llama_rope
    assert not any("forward" in module.__dict__ for module in net.modules())
    assert [n for n, _ in net.named_modules()] == names
    assert [type(m).__name__ for m in net.modules()] == classes
    called = dict(kernels.calls)
    assert torch.equal(net(ids).logits, before)
    assert kernels.calls == called


def test_kernels_that_are_wrong_are_found_on_the_first_samples(kernels, monkeypatch):
    right = kernels.functional.liger_swiglu
    monkeypatch.setattr(kernels.functional, "liger_swiglu", lambda a, b: 1.01 * right(a, b))
    forward = help.runner(model("llama"), fused=False, accelerator=Liger())
    with pytest.warns(UserWarning, match=r"because liger-kernel's log-probs differ by .*learner\.liger = false"):
        forward.packs(help.samples())
    assert forward.path.accelerator == ""


def test_what_fails_later_ends_with_what_to_do(kernels, monkeypatch):
    forward = help.runner(model("llama"), fused=False, accelerator=Liger())
    (pack,) = forward.packs(help.samples())

    def fail(*_):
        raise sys.modules["triton.errors"].TritonError("out of resources")

    monkeypatch.setattr(kernels.functional, "liger_rms_norm", fail)
    with pytest.raises(ModelError, match=r"learner\.liger: got true, but its kernels fail on Llama.*out of resources"):
        forward.logprobs_of(pack)


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ModelError, match=r"^learner\.liger: got true, accepts it for Gemma2.*this is GPT2LMHeadModel"):
        help.learner(help.model("gpt2"), liger=True)
    with pytest.raises(ModelError, match=r"with 'relu'; set it to false"):
        check(help.model(hidden_act="relu"))


@pytest.mark.parametrize(
    ("device", "found", "settings", "says"),
    [("cpu", True, {}, "needs a CUDA GPU, but device is cpu"), ("cuda:1", False, {}, r"install .*'liger-kernel>="),
     ("cuda", True, {"compile": True}, "learner.compile = true: both fuse the same operations")],
)  # fmt: skip
def test_where_it_cannot_run_it_is_refused(device, found, settings, says, monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: object() if found else None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    (problem,) = machine.machine_problems(Config(model="m", learner=LearnerConfig(liger=True, **settings)), device)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(problem)
