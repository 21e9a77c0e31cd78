"""The decoder for GPUs, on the CPU: the model's own logits, and steps that could be recorded as CUDA graphs.

A recording on the CPU (:class:`Traced`) replays operations on the very tensors that they were seen with, as a CUDA
graph does: what Python decided when it was made is in it for good.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from trew.adapters import attach
from trew.config import LoraConfig
from trew.native import Transformer, describe
from trew.rollout import Renderer
from trew.rollout.torch_engine import TorchEngine, static, static_model
from trew.rollout.torch_engine.generic import ForwardDecoder
from trew.rollout.torch_engine.graphs import Graphs
from trew.rollout.torch_engine.sampler import draw, uniforms
from trew.rollout.torch_engine.static import StaticDecoder
from trew.rollout.torch_engine.static_draw import StaticDraw
from trew.rollout.torch_engine.static_model import COLUMNS, StaticModel
from trew.types import Group, Prompt, Sampling

KINDS = (*(kind for kind in tiny.KINDS if not kind.startswith("gpt")), "mistral", "smollm3")
LONG = "a prompt that is a good deal longer than all others, and much longer than the window of any layer here"
PROMPTS = [Prompt(uid=f"p{i}", text=text) for i, text in enumerate(("hi", LONG, "how are you?", "x"))]
SAMPLING = Sampling(max_tokens=40, seed=3)


class Traced:
    """A recorder for CPUs."""

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def warm(self, function: Callable[[], None]) -> None:
        function()

    def record(self, function: Callable[[], None]) -> Traced._Trace:
        self.made += 1
        return self._Trace(self, make_fx(lambda: function())())

    class _Trace:
        def __init__(self, of: Traced, graph: Callable[[], None]) -> None:
            self.of, self.graph = of, graph

        def replay(self) -> None:
            self.of.replayed += 1
            self.graph()


def parts_of(m: Any) -> Transformer:
    parts = describe(m, adapters=True)
    assert isinstance(parts, Transformer), parts
    return parts


def static_of(m: Any, *, slots: int = 5, columns: int = COLUMNS, **options: Any) -> StaticModel:
    found = StaticModel(
        parts_of(m), slots=slots, columns=columns, **{"dtype": torch.float32, "graphs": Graphs(None), **options}
    )
    assert found.begin(parts_of(m))
    return found


def engine(m: Any, *, eos: bool = False, **options: Any) -> TorchEngine:
    return TorchEngine(m, Renderer(tiny.tokenizer(eos=eos)), **options)


def generated(e: TorchEngine, *, n: int = 3, sampling: Sampling = SAMPLING) -> list[Group]:
    return e.generate(PROMPTS, n=n, sampling=sampling)


def same(one: list[Group], other: list[Group], *, atol: float = 3e-5) -> None:
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a.completions, b.completions, strict=True):
            assert x.token_ids.tolist() == y.token_ids.tolist()
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=atol)
            np.testing.assert_allclose(x.entropies, y.entropies, atol=atol)


# ------------------------------------------------------------------------------------- the same as the model's forward


@pytest.mark.parametrize("batch", [128, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_and_log_probs_within_rounding(kind, batch, monkeypatch):
    steps = []
    compute = StaticModel.compute
    monkeypatch.setattr(StaticModel, "compute", lambda self, *args: steps.append(args) or compute(self, *args))
    m = tiny.model(kind)
    e = engine(m, batch=batch, _graphs=lambda device: Graphs(None))
    same(generated(e), generated(engine(m, batch=batch, native=False)))
    assert e.native
    assert len(steps) > SAMPLING.max_tokens - 2


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}),
        ("llama", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("gemma2", {"sliding_window": 50}),
    ],
)
def test_shapes(kind, overrides):
    m = tiny.model(kind, **overrides)
    torch.manual_seed(0)
    for name, p in m.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    same(generated(engine(m, _graphs=lambda device: Graphs(None))), generated(engine(m, native=False)))


def test_completions_that_end_and_come_in_at_different_times():
    """Stop tokens, a stop string, and six completions a prompt through five slots."""
    m = tiny.model()
    sampling = Sampling(max_tokens=40, seed=3, stop=("e",), temperature=1.2)
    recorder = Traced()
    e = engine(m, eos=True, batch=5, _graphs=lambda device: Graphs(recorder))
    found = generated(e, n=6, sampling=sampling)
    same(found, generated(engine(m, eos=True, batch=5, native=False), n=6, sampling=sampling))
    lengths = {len(c) for g in found for c in g.completions}
    assert len(lengths) > 5, "the seed must give completions of different lengths"
    assert recorder.replayed > recorder.made > 1


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3"])
def test_prompts_in_pieces_and_in_waves(kind, monkeypatch):
    monkeypatch.setattr(static, "PREFILL_TOKENS", 24)
    m = tiny.model(kind)
    same(generated(engine(m, _graphs=lambda device: Graphs(None))), generated(engine(m, native=False)))


def test_each_prompt_is_computed_once(monkeypatch):
    computed: list[list[int]] = []
    prefill = StaticModel.prefill

    def counted(self: StaticModel, prompts: Any, slots: Any, **options: Any) -> torch.Tensor:
        computed.extend(prompts)
        return prefill(self, prompts, slots, **options)

    monkeypatch.setattr(StaticModel, "prefill", counted)
    m = tiny.model()
    found = generated(engine(m, batch=5, _graphs=lambda device: Graphs(None)), n=7)
    same(found, generated(engine(m, batch=5, native=False), n=7))
    assert sorted(map(len, computed[1:])) == sorted(len(g.prompt_ids) for g in found)  # the first is the probe


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_adapters_decode_as_they_are_now(kind):
    pytest.importorskip("peft")
    m = tiny.model(kind)
    adapters = attach(m, LoraConfig(rank=4), name="tiny", seed=0)
    e = engine(m, _graphs=lambda device: Graphs(Traced()))
    plain = generated(engine(tiny.model(kind), native=False))
    same(generated(e), plain, atol=1e-4)  # B is 0
    torch.manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn_like(p))
    same(generated(e), generated(engine(m, native=False)), atol=1e-4)
    with adapters.disabled():
        same(generated(e), plain, atol=1e-4)
    assert e.native


def test_bfloat16_stays_close_to_float32():
    """Teacher forced: the log-probs of given tokens, as rounding makes different tokens out of equal draws."""
    for kind in ("llama", "gemma2"):
        m = tiny.model(kind, initializer_range=0.05)
        ids = list(range(40, 100))
        with torch.no_grad():
            exact = m(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
            run = StaticDecoder(static_of(m, dtype=dtype), [ids[:30]], n=1)
            logits = [run.add([0])[0], *(run.step(torch.tensor([token]))[0].clone() for token in ids[30:])]
            assert all(row.dtype == torch.float32 for row in logits)
            error = (torch.stack(logits).double().log_softmax(-1) - exact[29:]).abs().max()
            assert 0 < error < most


def test_bfloat16_through_the_engine():
    m = tiny.model(initializer_range=0.05)
    e = engine(m, autocast=torch.bfloat16, _graphs=lambda device: Graphs(Traced()))
    for group in generated(e):
        with torch.no_grad():
            for c in group.completions:
                ids = torch.tensor([[*group.prompt_ids.tolist(), *c.token_ids.tolist()]])
                logits = m(ids).logits[0, len(group.prompt_ids) - 1 : -1]
                exact = logits.log_softmax(-1).gather(-1, torch.as_tensor(c.token_ids)[:, None])[:, 0]
                np.testing.assert_allclose(c.logprobs, exact, atol=5e-2)
    assert e.native


# --------------------------------------------------------------------------------------------------------- rows


def test_rows_may_come_and_go_between_any_two_steps():
    """Against the model's forward, with moves, refills and a prompt whose completions begin at different times."""
    m = tiny.model("gemma3")
    prompts = [list(range(5, 40)), [7, 8, 9], [1]]
    run = StaticDecoder(static_of(m), prompts, n=4)
    plain = ForwardDecoder(m, prompts, n=4, slots=5, max_tokens=40)
    draws = torch.Generator().manual_seed(0)

    def step() -> None:
        tokens = torch.randint(0, 256, (run.rows,), generator=draws)
        torch.testing.assert_close(run.step(tokens), plain.step(tokens), atol=1e-4, rtol=0)

    with torch.no_grad():
        for prompt, alive in (([0, 0, 0, 0, 1], [1, 4]), ([1, 1, 1], [0, 3, 4]), ([2], [3]), ([2, 2, 2], [0, 1, 2, 3])):
            torch.testing.assert_close(run.add(prompt), plain.add(prompt), atol=1e-4, rtol=0)
            for _ in range(3):
                step()
            assert run.keep(alive) == plain.keep(alive)
            step()
            assert run.rows == plain.rows == len(alive)


def test_rows_that_nobody_has_stay_harmless():
    """Three rows of a bucket of four: the fourth, whose place a longer row had, computes something finite."""
    m = tiny.model()
    model = static_of(m)
    run = StaticDecoder(model, [[5, 6, 7], [8]], n=4)
    run.add([0, 0, 1, 1])
    run.step(torch.tensor([1, 2, 3, 4]))
    run.keep([0, 1, 2])
    run.step(torch.tensor([1, 2, 3]))
    assert model.lengths.tolist() == [5, 5, 3, 0, 0, 0, 0, 0]
    assert bool(model.logits[:4].isfinite().all())


def test_a_second_call_sees_nothing_of_the_first():
    """Numbers that broke in one call must not reach the next one through masked columns."""
    m = tiny.model()
    e = engine(m, _graphs=lambda device: Graphs(None))
    expected = generated(e)
    assert e._static is not None
    e._static.cache.fill_(torch.nan)
    same(generated(e), expected, atol=0)


# ------------------------------------------------------------------------------------------------- what is kept


def test_buffers_and_graphs_serve_later_calls_with_new_weights():
    m = tiny.model()
    recorder = Traced()
    e = engine(m, _graphs=lambda device: Graphs(recorder))
    before = generated(e)
    kept, made = e._static, recorder.made
    torch.manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.05 * torch.randn_like(p))
    after = generated(e)
    assert e._static is kept
    assert recorder.made == made, "the graphs of the first call serve the second"
    same(after, generated(engine(m, native=False)))
    assert before[0].completions[0].token_ids.tolist() != after[0].completions[0].token_ids.tolist()


@pytest.mark.parametrize("change", ["longer", "more", "replaced"])
def test_buffers_are_made_anew_where_they_do_not_fit(change):
    m = tiny.model()
    e = engine(m, _graphs=lambda device: Graphs(Traced()))
    generated(e, n=2)
    kept = e._static
    n, sampling = 2, SAMPLING
    if change == "longer":
        sampling = Sampling(max_tokens=COLUMNS, seed=3)
    elif change == "more":
        n = 4
    else:  # as load_state_dict(assign=True) does
        m.load_state_dict({k: v.clone() for k, v in tiny.model(seed=1).state_dict().items()}, assign=True)
    same(generated(e, n=n, sampling=sampling), generated(engine(m, native=False), n=n, sampling=sampling), atol=1e-4)
    assert e._static is not kept
    kept = e._static
    generated(e, n=1)
    assert e._static is kept, "what is larger than needed serves as well"


def test_the_room_that_an_earlier_call_left_changes_no_bit():
    """A run that is resumed has only the room that its own calls need."""
    m = tiny.model()
    wide, fresh = (engine(m, _graphs=lambda device: Graphs(None)) for _ in range(2))
    generated(wide, n=6, sampling=Sampling(max_tokens=300, seed=3))
    same(generated(wide), generated(fresh), atol=0)
    assert wide._static is not None
    assert fresh._static is not None
    assert wide._static.cache.shape != fresh._static.cache.shape


def test_weights_in_the_type_of_the_computation_are_not_copied():
    m = tiny.model()
    packed = static_of(m).packed
    assert packed.head.weight.data_ptr() == m.lm_head.weight.data_ptr()
    assert packed.layers[0].down.weight.data_ptr() == m.model.layers[0].mlp.down_proj.weight.data_ptr()
    assert packed.layers[0].qkv.own
    assert static_of(m, dtype=torch.bfloat16).packed.head.own


# --------------------------------------------------------------------------------- what stands between it and a graph


class Strict(TorchDispatchMode):
    """Fails at operations that bring a tensor's content to Python, or Python's into a tensor: they are no kernels."""

    BANNED = ("_local_scalar_dense", "item", "nonzero", "masked_select", "lift_fresh", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in self.BANNED or (name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_the_same_operations_whatever_is_in_the_buffers(kind, dtype):
    """Recorded on some rows, replayed on others: all that a step depends on is in its buffers."""
    m = tiny.model(kind)
    model = static_of(m, dtype=dtype)
    run = StaticDecoder(model, [list(range(9)), [3, 4]], n=2)
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
        wanted = draw(
            model.logits[:3], uniform=uniforms(keys, torch.tensor([5, 0, 9])), sampling=drawing.sampling, native=False
        )
        model.drawn.zero_()
        model.drawn_floats.zero_()
        model.drawn_finite.zero_()
        trace()
    for name in ("tokens", "logprobs", "sampling_logprobs", "entropies", "finite"):
        torch.testing.assert_close(getattr(drawn, name), getattr(wanted, name), atol=0, rtol=0, equal_nan=True)
    assert drawn.finite.tolist() == [True, False, True]
    assert bool(drawn.entropies[0] > 0)


@pytest.mark.parametrize(
    "cut", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.01}]
)
def test_all_ways_of_sampling(cut):
    m = tiny.model()
    recorder = Traced()
    e = engine(m, batch=5, _graphs=lambda device: Graphs(recorder))
    for sampling in (SAMPLING, Sampling(max_tokens=20, seed=1, **cut)):  # one after the other in the same buffers
        same(generated(e, sampling=sampling), generated(engine(m, batch=5, native=False), sampling=sampling))
    assert e._static is not None
    drawn = {key[2] for key in e._static.graphs.recorded if key[0] == "draw"}
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
    e = engine(m, _graphs=lambda device: Graphs(Broken()))
    with pytest.warns(
        UserWarning, match=r"no CUDA graphs, .*not permitted when stream is capturing\): decoding goes on"
    ):
        found = generated(e)
    same(found, generated(engine(m, native=False)))
    assert e.native
    assert len(e.messages) == 1
    same(generated(e), found, atol=0)
    larger = generated(e, n=6)  # in new buffers, for which nothing is recorded any more
    same(larger, generated(engine(m, native=False), n=6))
    assert len(e.messages) == 1


def test_few_graphs_serve_all_steps():
    recorder = Traced()
    model = static_of(tiny.model(), slots=40, columns=3 * COLUMNS, graphs=Graphs(recorder))
    run = StaticDecoder(model, [[5] * 230], n=40)
    run.add([0] * 40)
    seen = set()
    for _ in range(100):
        run.step(torch.zeros(run.rows, dtype=torch.int64))
        run.keep(range(max(1, run.rows - 1)))
        seen |= set(model.graphs.recorded)
    assert seen == {(n, 256) for n in (40, 32, 24, 16)} | {(n, 512) for n in (16, 8, 4, 2, 1)}
    assert recorder.made == len(seen)


# ------------------------------------------------------------------------------------------------- proof and refusal


def test_a_decoder_that_computes_something_else_is_not_used(monkeypatch):
    m = tiny.model()
    right = parts_of(m)
    wrong = Transformer(**{**{f: getattr(right, f) for f in Transformer.__slots__}, "scaling": right.scaling * 2})
    monkeypatch.setattr("trew.rollout.torch_engine.engine.describe", lambda model, **_: wrong)
    e = engine(m, _graphs=lambda device: Graphs(None))
    with pytest.warns(UserWarning, match=r"native one differs from it by .* nats\. Set kernels = \"plain\""):
        got = generated(e)
    assert not e.native
    assert e._static is None
    same(got, generated(engine(m, native=False)), atol=0)


@pytest.mark.parametrize("fault", ["stale", "error"])
def test_the_proof_covers_a_step_too(fault, monkeypatch):
    """A step that writes nothing, and one of an operation that the device does not have."""

    def compute(self: StaticModel, rows: int, columns: int) -> None:
        if fault == "error":
            raise RuntimeError("not implemented for this device")

    monkeypatch.setattr(StaticModel, "compute", compute)
    m = tiny.model()
    e = engine(m, _graphs=lambda device: Graphs(None))
    with pytest.warns(UserWarning, match="differs from it" if fault == "stale" else r"failed \(not implemented"):
        got = generated(e)
    same(got, generated(engine(m, native=False)), atol=0)


def test_weights_below_float32_are_left_to_the_models_own_forward():
    m = tiny.model().to(torch.bfloat16)
    assert "not float32" in (static_model.unsupported(describe(m)) or "")
    e = engine(m, _graphs=lambda device: Graphs(None))
    generated(e)
    assert e._static is None
    assert e.messages == []
    assert "is not one of" in (static_model.unsupported(describe(tiny.model("gpt2"))) or "")


def test_a_cpu_never_takes_it_by_itself():
    e = engine(tiny.model())
    generated(e)
    assert e._static is None


# ------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_on_a_gpu_give_what_the_models_forward_gives(kind):
    m = tiny.model(kind).to("cuda")
    e, eager = engine(m, batch=5), engine(m, batch=5, _graphs=lambda device: Graphs(None))
    found = generated(e)
    assert e._static is not None
    assert e.native
    assert e.messages == []
    assert len(e._static.graphs.recorded) > 2
    same(found, generated(eager))
    same(found, generated(engine(m, batch=5, native=False)), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_graphs_on_a_gpu_see_new_weights(autocast):
    m = tiny.model(initializer_range=0.1).to("cuda")
    e = engine(m, autocast=autocast)
    first = generated(e)
    kept = e._static
    same(generated(e), first, atol=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.05 * torch.randn_like(p))
    second = generated(e)
    assert e._static is kept
    same(second, generated(engine(m, autocast=autocast, _graphs=lambda device: Graphs(None))))
    assert first[0].completions[0].token_ids.tolist() != second[0].completions[0].token_ids.tolist()
