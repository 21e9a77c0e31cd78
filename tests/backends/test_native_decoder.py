"""The native decoder: the model's own logits, from its own weights as they are now, and nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import shutil
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn

import tiers
import tiny
from trew.backends.cpu import build, decoder, pages
from trew.backends.cpu.backend import CpuBackend
from trew.backends.cpu.build import SUFFIX, library
from trew.backends.cpu.decoder import PREFILL_TOKENS, CompiledDecoder, unsupported
from trew.backends.cpu.layers import NormStruct
from trew.backends.cpu.pages import PAGE, PagedCache
from trew.config import LoraConfig
from trew.models.anatomy import Norm, Transformer, describe
from trew.models.lora import attach
from trew.rollout import Renderer
from trew.rollout.engine import Request
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.rollout.torch_engine.decode import Schedule
from trew.types import Group, Prompt, Sampling

KINDS = tuple(kind for kind in tiny.KINDS if not kind.startswith("gpt"))
LONG = "a prompt that is longer than one page of the cache, and much longer than the attention window of any layer here"
PROMPTS = [Prompt(uid=f"p{i}", text=text) for i, text in enumerate(("hi", LONG, "how are you?", "x"))]
SAMPLING = Sampling(max_tokens=PAGE + 20, seed=3)

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang"))), reason="there is no C compiler")


def model(kind: str = "llama", **overrides: Any) -> Any:
    return tiny.model(kind, **{**tiny.wide(kind), **overrides})


def parts_of(m: Any) -> Transformer:
    parts = describe(m)
    assert isinstance(parts, Transformer), parts
    return parts


def engine(m: Any, *, eos: bool = False, native: bool = True, **options: Any) -> TorchEngine:
    return TorchEngine(m, Renderer(tiny.tokenizer(eos=eos)), backend=CpuBackend() if native else None, **options)


def both(m: Any, *, prompts: list[Prompt] = PROMPTS, n: int = 3, **options: Any) -> tuple[list[Group], list[Group]]:
    """The same completions natively and through the model's forward; fails where the native decoder is not used."""
    found = []
    for native in (True, False):
        e = engine(m, native=native, **options)
        found.append(generate(e, prompts, n=n, sampling=SAMPLING))
        assert not e.refused
    return found[0], found[1]


def test_the_kernels_compile():
    assert not isinstance(build.library(), str), build.library()


@pytest.mark.parametrize(("kind", "batch"), tiers.thinned([*KINDS, "mistral", "smollm3"], [128, 5], keep=2))
def test_tokens_are_the_same_and_log_probs_within_rounding(kind, batch, monkeypatch):
    calls = []
    monkeypatch.setattr(decoder.CompiledDecoder, "step", _counted(decoder.CompiledDecoder.step, calls))
    for one, other in zip(*both(model(kind), batch=batch), strict=True):
        for a, b in zip(one.rollouts, other.rollouts, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.policy_logprobs, b.policy_logprobs, atol=3e-5)
            np.testing.assert_allclose(a.entropies, b.entropies, atol=3e-5)
    assert calls


def _counted(function: Any, calls: list) -> Any:
    def call(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return call


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}),  # three queries to a key
        ("llama", {"head_dim": 48}),  # an odd number of sixteens
        ("llama", {"head_dim": 256, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"head_dim": 32, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("gemma2", {"sliding_window": PAGE + 7}),
        ("llama", {"sliding_window": 9}),  # which Llama's code does not read
    ],
)
def test_shapes(kind, overrides):
    m = model(kind, **overrides)
    torch.manual_seed(0)
    for name, p in m.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    for one, other in zip(*both(m, n=2), strict=True):
        for a, b in zip(one.rollouts, other.rollouts, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.policy_logprobs, b.policy_logprobs, atol=3e-5)


def test_prompts_longer_than_one_pass_are_computed_in_pieces(monkeypatch):
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 24)
    assert PREFILL_TOKENS > 24
    for one, other in zip(*both(model("gemma2")), strict=True):
        for a, b in zip(one.rollouts, other.rollouts, strict=True):
            np.testing.assert_allclose(a.policy_logprobs, b.policy_logprobs, atol=3e-5)


def test_bfloat16_stays_close_to_float32():
    """Teacher forced: the log-probs of given tokens, as rounding makes different tokens out of equal draws."""
    m = model(initializer_range=0.05)
    ids = list(range(40, 100))
    with torch.no_grad():
        exact = m(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    for dtype, most in ((None, 1e-5), (torch.bfloat16, 3e-2)):
        run = CompiledDecoder(parts_of(m), positions=60, autocast=dtype)
        logits = [run.add([run.open(ids[:30], 1)])[0], *(run.step(torch.tensor([token]))[0] for token in ids[30:])]
        assert all(row.dtype == torch.float32 for row in logits)
        error = (torch.stack(logits).double().log_softmax(-1) - exact[29:]).abs().max()
        assert 0 < error < most


def test_an_update_of_the_weights_is_seen_at_once():
    m = model()
    e = engine(m)
    before = generate(e, PROMPTS, n=1, sampling=SAMPLING)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.05 * torch.randn_like(p))
    after = generate(e, PROMPTS, n=1, sampling=SAMPLING)
    assert not e.refused
    expected = generate(engine(m, native=False), PROMPTS, n=1, sampling=SAMPLING)
    for a, b, c in zip(after, expected, before, strict=True):
        assert a.rollouts[0].token_ids.tolist() == b.rollouts[0].token_ids.tolist()
        assert a.rollouts[0].token_ids.tolist() != c.rollouts[0].token_ids.tolist()


@pytest.mark.parametrize("kind", tiers.some(["llama", "qwen2", "gemma3"], ["gemma3"]))
def test_adapters_decode_as_they_are_now(kind):
    pytest.importorskip("peft")
    m = model(kind)
    adapters = attach(m, LoraConfig(rank=4), name="tiny", seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn_like(p))
    for one, other in zip(*both(m), strict=True):
        for a, b in zip(one.rollouts, other.rollouts, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.policy_logprobs, b.policy_logprobs, atol=1e-4)
    with adapters.disabled():
        base = generate(engine(m), PROMPTS, n=1, sampling=SAMPLING)
    expected = generate(engine(model(kind)), PROMPTS, n=1, sampling=SAMPLING)
    assert [g.rollouts[0].token_ids.tolist() for g in base] == [g.rollouts[0].token_ids.tolist() for g in expected]
    assert "linear layers of another kind" in str(describe(m)), "the learner must not train the frozen weights"


def test_a_decoder_that_computes_something_else_is_not_used(monkeypatch):
    """A wrong description of a model (here: its norms) is found out before a token is drawn."""
    m = model()
    right = describe(m)
    assert isinstance(right, Transformer)
    wrong = Transformer(**{**{f: getattr(right, f) for f in Transformer.__slots__}, "scaling": right.scaling * 2})
    monkeypatch.setattr("trew.backends.cpu.backend.describe", lambda model, **_: wrong)
    e = engine(m)
    with pytest.warns(UserWarning, match="next-token distributions differ by .* nats .*Set kernels = 'plain'"):
        got = generate(e, PROMPTS, n=1, sampling=SAMPLING)
    assert e.refused
    assert len(e.messages) == 1
    expected = generate(engine(m, native=False), PROMPTS, n=1, sampling=SAMPLING)
    assert [g.rollouts[0].token_ids.tolist() for g in got] == [g.rollouts[0].token_ids.tolist() for g in expected]


def test_each_prompt_is_computed_once_and_each_token_fed_once(monkeypatch):
    rows: list[int] = []
    forward = CompiledDecoder._forward
    monkeypatch.setattr(CompiledDecoder, "_forward", lambda self, t, r: rows.append(len(t)) or forward(self, t, r))
    e = engine(model(), eos=True, batch=6)
    groups = generate(e, PROMPTS, n=6, sampling=SAMPLING)
    lengths = [len(c) for g in groups for c in g.rollouts]
    probe = min(8, max(len(g.rollouts[0].prompt_ids) for g in groups))
    assert len(set(lengths)) > 3, "the seed must give completions of different lengths"
    assert sum(rows) == probe + sum(len(g.rollouts[0].prompt_ids) for g in groups) + sum(lengths) - len(lengths)


def test_pages_are_given_back():
    m = model()
    run = CompiledDecoder(parts_of(m), positions=4 * PAGE)
    assert [run.open([5] * (PAGE + 1), 2), run.open([6] * 3, 2)] == [0, 1]
    total = len(run.cache.free)
    assert run.cache.per_chunk >= 12, "of one chunk, or the count below is not the whole"
    run.add([0, 0, 1])
    assert total - len(run.cache.free) == 3
    run.step(torch.tensor([1, 2, 3]))
    assert total - len(run.cache.free) == 6
    assert run.keep([1]) == [1]  # one of prompt 1's two has not started yet: its page stays
    assert total - len(run.cache.free) == 4
    run.add([1])
    assert total - len(run.cache.free) == 4
    assert run.keep([]) == []
    assert len(run.cache.free) == total
    assert sorted(run.cache.free) == list(range(total))


def test_rows_may_come_and_go_between_any_two_steps():
    parts, prompts = parts_of(model()), [[5] * (PAGE + 1), [6] * 3]

    def decoder() -> CompiledDecoder:
        made = CompiledDecoder(parts, positions=4 * PAGE)
        assert [made.open(ids, 2) for ids in prompts] == [0, 1]
        return made

    run, alone = decoder(), decoder()
    run.add([0])
    alone.add([1])
    for token in range(PAGE - 1):
        run.step(torch.tensor([token]))
    run.add([1])
    for token in range(3):  # the first row begins a page in the second of these steps
        got = run.step(torch.tensor([token, token]))
        torch.testing.assert_close(got[1:], alone.step(torch.tensor([token])))
    run.keep([1])
    torch.testing.assert_close(run.step(torch.tensor([9])), alone.step(torch.tensor([9])))


@pytest.mark.parametrize("native", [True, False])
def test_nothing_of_a_call_is_left_after_it(native, monkeypatch):
    """Not even until the garbage collector comes: the learner needs the memory of cache and weights."""
    made = []
    begin = Schedule.__init__
    monkeypatch.setattr(
        Schedule, "__init__", lambda self, runner, *a, **k: made.append(ref(runner)) or begin(self, runner, *a, **k)
    )
    gc.disable()
    try:
        generate(engine(model(), native=native), PROMPTS, n=2, sampling=SAMPLING)
        assert [runner() for runner in made] == [None]
    finally:
        gc.enable()


def test_the_cache_grows_without_moving():
    cache = PagedCache(layers=2, kv_heads=1, head_dim=16, dtype=torch.float32, chunk_bytes=1)
    first = cache.take(1)
    cache.chunks[0].fill_(7)
    address = cache.chunks[0].data_ptr()
    more = cache.take(5)
    assert len({*first, *more}) == 6
    assert cache.chunks[0].data_ptr() == address
    assert bool((cache.chunks[0] == 7).all())
    cache.give(more)
    assert sorted(cache.take(5)) == sorted(more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_against_torch(dtype):
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, delta = random(7, 48), random(7, 48)
    weight, after = nn.Parameter(random(48)), nn.Parameter(random(48))
    one, two = decoder_norm(weight, 1.0), decoder_norm(after, 1.0)
    exact = x.double() + rms(delta.double(), after.double() + 1)
    out, own = torch.empty(7, 48, dtype=dtype), x.clone()
    add_norm(own, delta, after=two, norm=one, out=out)
    torch.testing.assert_close(own.double(), exact, atol=1e-5, rtol=1e-5)
    rough = {"atol": 2e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.0, "rtol": 2**-8}
    torch.testing.assert_close(out.double(), rms(exact, weight.double() + 1), **rough)


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, *, after: Any, norm: Any, out: torch.Tensor) -> None:
    found = library()
    assert not isinstance(found, str)
    function, p, i = getattr(found, f"add_norm_{SUFFIX[out.dtype]}"), ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [p, p, NormStruct, NormStruct, p, i, i], None
    addresses = x.data_ptr(), delta if delta is None else delta.data_ptr()
    function(*addresses, NormStruct.of(after), NormStruct.of(norm), out.data_ptr(), *x.shape)


def decoder_norm(weight: nn.Parameter, offset: float) -> Any:
    return Norm(weight, 1e-6, offset)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def test_bfloat16_is_rounded_to_the_nearest_even():
    numbers = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.3895e38, float("nan"), 0.0, -2.5] * 2)
    out = torch.empty(1, 16, dtype=torch.bfloat16)
    # A weight that undoes the norm: what is written is the numbers themselves, up to float32's rounding of 1.
    for number in numbers:
        x = torch.full((1, 16), float(number))
        add_norm(x, None, after=None, norm=decoder_norm(nn.Parameter(numbers.clone()), 0.0), out=out)
    ones = torch.ones(1, 16)
    add_norm(ones, None, after=None, norm=_exact(numbers), out=out)
    torch.testing.assert_close(out[0], numbers.to(torch.bfloat16), equal_nan=True, rtol=0, atol=0)


def _exact(weight: torch.Tensor) -> Any:
    return Norm(nn.Parameter(weight), 0.0, 0.0)  # eps = 0: the norm of ones is 1 exactly


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.lm_head.register_forward_hook(lambda *a: None), "hooked or wrapped"),
        (lambda m: setattr(m.model.layers[1].mlp, "up_proj", _Other(64, 48, bias=False)), "another kind"),
        (lambda m: setattr(m.config, "hidden_act", "relu"), "activation"),
        (lambda m: m.config.rope_parameters.update(rope_type="dynamic"), "depends on the sequence length"),
        (lambda m: m.to(torch.bfloat16), "not float32"),
    ],
)
def test_models_that_are_not_as_known_are_left_to_their_own_forward(change, why):
    m = model()
    change(m)
    assert why in (unsupported(describe(m), autocast=None) or "")


class _Other(nn.Linear):
    pass


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_other_architectures_are_told_apart(kind):
    assert "is not one of" in str(describe(tiny.model(kind)))


def test_narrow_heads_and_scores_without_their_cap_are_refused():
    assert "multiples of 16" in (unsupported(describe(tiny.model("llama")), autocast=None) or "")
    m = model("gemma2")
    m.config._attn_implementation = "sdpa"
    assert "cap" in str(describe(m))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"TREW_NATIVE": "0"}, "TREW_NATIVE=0"),
        ({"CC": "no-such-compiler"}, "no C compiler 'no-such-compiler', which CC names"),
        ({"CC": "false"}, "failed"),
    ],
    ids=["switched off", "no compiler", "it fails"],
)
def test_without_kernels_the_reason_is_said(change, expected, tmp_path, monkeypatch):
    for name, value in ({"TREW_NATIVE": "1", "TREW_CACHE": str(tmp_path)} | change).items():
        monkeypatch.setenv(name, value)
    assert expected in build.library.__wrapped__()  # as in a new process: it is looked for once in each
    assert not list(tmp_path.rglob("*.so"))


def test_the_kernels_are_built_where_folders_have_spaces_in_their_names(monkeypatch):
    """Of a path with a space only what follows it was read, and loading that failed: no kernels, whatever compiler."""
    library = "/home/me/my project/.venv/lib/python3.11/site-packages/torch/lib/libgomp.so.1"
    lines = f"55d0-55d1 r--p 0 00:2b 17 {library}\n55d1-55d2 rw-p 0 00:00 0 [heap]\n55d3-55d4 r--p 0 00:00 0\n"
    monkeypatch.setattr(build.Path, "read_text", lambda self: lines)
    assert build._openmp() == library


def test_a_compiler_may_be_named_with_arguments(tmp_path, monkeypatch):
    """CC = "ccache gcc", as make takes it, was no compiler."""
    compiler = next(name for name in ("gcc", "clang", "cc") if shutil.which(name))
    monkeypatch.setenv("TREW_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", f"env {compiler} -DUNUSED='a b'")
    assert not isinstance(build.library.__wrapped__(), str)
    monkeypatch.setenv("CC", f"{compiler} '")
    assert "which CC names" in build.library.__wrapped__()


def test_the_schedule_asks_for_equal_prompts_side_by_side():
    """A contract of CompiledDecoder.add that the plain decoder relies on."""
    schedule = Schedule(
        CompiledDecoder(parts_of(model()), positions=9), sampling=SAMPLING, slots=4, stop_ids=frozenset(),
        stop_strings=(), decode=str, device=torch.device("cpu"),
    )  # fmt: skip
    for ids in ([[1, 2], [3], [4, 5]], [[6], [7, 8]]):  # those that come later begin later
        prompts = [Prompt(str(row), text="?") for row in ids]
        schedule.add(
            (np.array(row), [Request(f"{prompt.uid}{i}", prompt, i, SAMPLING) for i in range(3)])
            for row, prompt in zip(ids, prompts, strict=True)
        )
    order = [(len(row.prompt_ids), row.prompt) for row in reversed(schedule.waiting)]
    assert order == [(2, 0)] * 3 + [(2, 2)] * 3 + [(1, 1)] * 3 + [(2, 4)] * 3 + [(1, 3)] * 3
    assert pages.PAGE == PAGE
