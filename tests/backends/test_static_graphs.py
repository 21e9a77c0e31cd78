"""What stands between a decoding step and a CUDA graph of it; and, where there is a GPU, the graphs themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import tiers
import tiny
from static_help import KINDS, SAMPLING, Traced, engine, generated, held, parts_of, same, static_of
from trew.backends.cuda_graphs.graphs import Graphs
from trew.backends.cuda_graphs.static import StaticDecoder
from trew.backends.cuda_graphs.static_draw import StaticDraw
from trew.backends.cuda_graphs.static_model import COLUMNS
from trew.rollout.torch_engine.sampler import draw, uniforms
from trew.types import Sampling


class Strict(TorchDispatchMode):
    """Fails at operations that bring a tensor's content to Python, or Python's into a tensor: they are no kernels."""

    BANNED = ("_local_scalar_dense", "item", "nonzero", "masked_select", "lift_fresh", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in self.BANNED or (name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "dtype"), tiers.thinned(KINDS, [torch.float32, torch.bfloat16], keep=2))
def test_a_step_is_the_same_operations_whatever_is_in_the_buffers(kind, dtype):
    """Recorded on some rows, replayed on others: all that a step depends on is in its buffers."""
    m = tiny.model(kind)
    model = static_of(m, dtype=dtype)
    run = StaticDecoder(model)
    assert [run.open(list(range(9)), 2), run.open([3, 4], 2)] == [0, 1]
    run.add([0, 1, 1])
    compute = functools.partial(model.compute, 4, COLUMNS)
    with torch.no_grad():
        with Strict():
            compute()
        trace = make_fx(lambda: compute())()
        addresses = [t.data_ptr() for t in (model.cache, model.logits, model.tokens, model.lengths)]
        model.cache.normal_()
        model.tokens.copy_(torch.tensor([9, 200, 31, 0, 0, 0, 0, 0]))
        model.lengths.copy_(torch.tensor([30, 2, 117, 0, 0, 0, 0, 0]))
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(1.1)
        assert model.packed.load(parts_of(m))
        content = model.cache.clone()
        compute()
        wanted, cache = model.logits.clone(), model.cache.clone()
        assert not torch.equal(cache, content)
        model.cache.copy_(content)
        model.logits.zero_()
        trace()
        torch.testing.assert_close(model.logits, wanted, atol=0, rtol=0)
        torch.testing.assert_close(model.cache, cache, atol=0, rtol=0)
        compute()  # repeatable: a second run leaves what the first left
        torch.testing.assert_close(model.logits, wanted, atol=0, rtol=0)
        torch.testing.assert_close(model.cache, cache, atol=0, rtol=0)
    assert addresses == [t.data_ptr() for t in (model.cache, model.logits, model.tokens, model.lengths)]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_a_draw_is_the_same_operations_whatever_is_in_the_buffers(temperature):
    model = static_of(tiny.model())
    drawing = StaticDraw(model, Sampling(max_tokens=4, temperature=temperature))
    keys = torch.tensor([3, -7, 1 << 60])
    model.logits.normal_()
    compute = functools.partial(drawing.compute, 4)
    with torch.no_grad():
        with Strict():
            compute()
        trace = make_fx(lambda: compute())()
        model.logits.normal_().mul_(3)
        model.logits[0, 7:] = -torch.inf
        model.logits[1, 5] = torch.nan
        drawn = drawing(model.logits[:3], keys, torch.tensor([5, 0, 9]))
        wanted = draw(model.logits[:3], uniform=uniforms(keys, torch.tensor([5, 0, 9])), sampling=drawing.sampling)
        model.drawn.zero_()
        model.drawn_floats.zero_()
        model.drawn_finite.zero_()
        trace()
    for name in ("tokens", "policy_logprobs", "logprobs", "entropies", "finite"):
        torch.testing.assert_close(getattr(drawn, name), getattr(wanted, name), atol=0, rtol=0, equal_nan=True)
    assert drawn.finite.tolist() == [True, False, True]
    assert bool(drawn.entropies[0] > 0)


CUTS = {
    "greedy": {"temperature": 0.0}, "colder": {"temperature": 0.7}, "top-p": {"top_p": 0.8},
    "top-k and min-p": {"top_k": 5, "min_p": 0.01},
}  # fmt: skip


@pytest.mark.parametrize("name", tiers.some(CUTS, ("top-k and min-p",)))
def test_all_ways_of_sampling(name):
    cut, m = CUTS[name], tiny.model()
    recorder = Traced()
    e = engine(m, batch=5, graphs=lambda device: Graphs(recorder))
    for sampling in (SAMPLING, Sampling(max_tokens=20, seed=1, **cut)):  # one after the other in the same buffers
        same(generated(e, sampling=sampling), generated(engine(m, batch=5, native=False), sampling=sampling))
    assert held(e) is not None
    drawn = {key[2] for key in held(e).graphs.recorded if key[0] == "draw"}
    assert drawn == {1.0, *([] if "temperature" not in cut else [cut["temperature"]])}


def test_the_strict_mode_and_the_trace_would_notice():
    """What the test above looks for is found where it is there."""
    x, y = torch.arange(4.0), torch.zeros(4)
    for waits in (lambda: x.max().item(), lambda: x[x > 1], lambda: x + torch.tensor(1.0), lambda: bool(x.any())):
        with pytest.raises(AssertionError, match="waits"), Strict():
            waits()
    trace = make_fx(lambda: y.copy_(x * len(x)))()
    x.fill_(7.0)
    trace()
    assert y.tolist() == [28.0] * 4


class Broken(Traced):
    """A recorder whose second recording fails."""

    def record(self, function: Callable[[], None]) -> Any:
        if self.made:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return super().record(function)


def test_a_recording_that_fails_costs_speed_alone():
    m = tiny.model()
    e = engine(m, graphs=lambda device: Graphs(Broken()))
    with pytest.warns(
        UserWarning, match=r"no CUDA graphs, .*not permitted when stream is capturing\): decoding continues"
    ):
        found = generated(e)
    same(found, generated(engine(m, native=False)))
    assert not e.refused
    assert len(e.messages) == 1
    same(generated(e), found, atol=0)
    larger = generated(e, n=6)  # in new buffers, for which nothing is recorded any more
    same(larger, generated(engine(m, native=False), n=6))
    assert len(e.messages) == 1


def test_few_graphs_serve_all_steps():
    recorder = Traced()
    model = static_of(tiny.model(), slots=40, columns=3 * COLUMNS, graphs=Graphs(recorder))
    run = StaticDecoder(model)
    run.open([5] * 230, 40)
    run.add([0] * 40)
    seen = set()
    for _ in range(100):
        run.step(torch.zeros(run.rows, dtype=torch.int64))
        run.keep(range(max(1, run.rows - 1)))
        seen |= set(model.graphs.recorded)
    assert seen == {(n, 256) for n in (40, 32, 24, 16)} | {(n, 512) for n in (16, 8, 4, 2, 1)}
    assert recorder.made == len(seen)


# ------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_on_a_gpu_give_what_the_models_forward_gives(kind):
    m = tiny.model(kind).to("cuda")
    e, eager = engine(m, batch=5), engine(m, batch=5, graphs=lambda device: Graphs(None))
    found = generated(e)
    assert e.messages == []
    assert not e.refused
    assert held(e) is not None, torch.cuda.memory_summary(abbreviated=True)
    assert len(held(e).graphs.recorded) > 2
    same(found, generated(eager))
    same(found, generated(engine(m, batch=5, native=False)), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_graphs_on_a_gpu_see_new_weights(autocast):
    m = tiny.model(initializer_range=0.1).to("cuda")
    e = engine(m, autocast=autocast)
    first = generated(e)
    kept = held(e)
    same(generated(e), first, atol=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.05 * torch.randn_like(p))
    second = generated(e)
    assert held(e) is kept
    same(second, generated(engine(m, autocast=autocast, graphs=lambda device: Graphs(None))))
    assert first[0].rollouts[0].token_ids.tolist() != second[0].rollouts[0].token_ids.tolist()
