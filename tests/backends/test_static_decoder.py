"""The decoder for GPUs, on the CPU: the model's own tokens and logits, what is kept between calls, and its proof."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiers
import tiny
from static_help import KINDS, SAMPLING, Traced, engine, generated, held, parts_of, same, static_of
from trew.backends.cuda_graphs import static, static_model
from trew.backends.cuda_graphs.graphs import Graphs
from trew.backends.cuda_graphs.static import StaticDecoder
from trew.backends.cuda_graphs.static_model import COLUMNS, StaticModel
from trew.config import LoraConfig
from trew.models.anatomy import Transformer, describe
from trew.models.lora import attach
from trew.rollout.torch_engine.plain import ForwardDecoder
from trew.types import Sampling

# ------------------------------------------------------------------------------------- the same as the model's forward


@pytest.mark.parametrize(("kind", "batch"), tiers.thinned(KINDS, [128, 5], keep=2))
def test_tokens_are_the_same_and_log_probs_within_rounding(kind, batch, monkeypatch):
    steps = []
    compute = StaticModel.compute
    monkeypatch.setattr(StaticModel, "compute", lambda self, *args: steps.append(args) or compute(self, *args))
    m = tiny.model(kind)
    e = engine(m, batch=batch, graphs=lambda device: Graphs(None))
    same(generated(e), generated(engine(m, batch=batch, native=False)))
    assert not e.refused
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
        ("llama", {"sliding_window": 9}),  # which Llama's code does not read
    ],
)
def test_shapes(kind, overrides):
    m = tiny.model(kind, **overrides)
    torch.manual_seed(0)
    for name, p in m.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    e = engine(m, graphs=lambda device: Graphs(None))
    same(generated(e), generated(engine(m, native=False)))
    assert not e.refused


def test_completions_that_end_and_come_in_at_different_times():
    """Stop tokens, a stop string, and six completions a prompt through five slots."""
    m = tiny.model()
    sampling = Sampling(max_tokens=40, seed=3, stop=("e",), temperature=1.2)
    recorder = Traced()
    e = engine(m, eos=True, batch=5, graphs=lambda device: Graphs(recorder))
    found = generated(e, n=6, sampling=sampling)
    same(found, generated(engine(m, eos=True, batch=5, native=False), n=6, sampling=sampling))
    lengths = {len(c) for g in found for c in g.rollouts}
    assert len(lengths) > 5, "the seed must give completions of different lengths"
    assert recorder.replayed > recorder.made > 1


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3"])
def test_prompts_in_pieces_and_in_waves(kind, monkeypatch):
    monkeypatch.setattr(static, "PREFILL_TOKENS", 24)
    waves: list[tuple[list[int], int]] = []
    prefill = StaticModel.prefill

    def watched(self: StaticModel, prompts: Any, slots: Any, *, piece: int) -> torch.Tensor:
        waves.append(([len(ids) for ids in prompts], piece))
        return prefill(self, prompts, slots, piece=piece)

    monkeypatch.setattr(StaticModel, "prefill", watched)
    m = tiny.model(kind)
    same(generated(engine(m, graphs=lambda device: Graphs(None))), generated(engine(m, native=False)))
    assert any(max(lengths) > piece for lengths, piece in waves), "a prompt in pieces"
    assert [len(lengths) for lengths, _ in waves[-3:]] == [1, 2, 1], "the longest alone, then what fits beside it"


def test_each_prompt_is_computed_once(monkeypatch):
    computed: list[list[int]] = []
    prefill = StaticModel.prefill

    def counted(self: StaticModel, prompts: Any, slots: Any, **options: Any) -> torch.Tensor:
        computed.extend(prompts)
        return prefill(self, prompts, slots, **options)

    monkeypatch.setattr(StaticModel, "prefill", counted)
    m = tiny.model()
    found = generated(engine(m, batch=5, graphs=lambda device: Graphs(None)), n=7)
    same(found, generated(engine(m, batch=5, native=False), n=7))
    assert sorted(map(len, computed[1:])) == sorted(len(g.rollouts[0].prompt_ids) for g in found)  # [0]: the probe


@pytest.mark.parametrize("kind", tiers.some(["llama", "qwen2", "gemma3"], ["qwen2"]))
def test_adapters_decode_as_they_are_now(kind):
    pytest.importorskip("peft")
    m = tiny.model(kind)
    adapters = attach(m, LoraConfig(rank=4), name="tiny", seed=0)
    e = engine(m, graphs=lambda device: Graphs(Traced()))
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
    assert not e.refused


def test_bfloat16_stays_close_to_float32():
    """Teacher forced: the log-probs of given tokens, as rounding makes different tokens out of equal draws."""
    for kind in ("llama", "gemma2"):
        m = tiny.model(kind, initializer_range=0.05)
        ids = list(range(40, 100))
        with torch.no_grad():
            exact = m(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
            run = StaticDecoder(static_of(m, dtype=dtype))
            logits = [
                run.add([run.open(ids[:30], 1)])[0],
                *(run.step(torch.tensor([token]))[0].clone() for token in ids[30:]),
            ]
            assert all(row.dtype == torch.float32 for row in logits)
            error = (torch.stack(logits).double().log_softmax(-1) - exact[29:]).abs().max()
            assert 0 < error < most


def test_bfloat16_through_the_engine():
    m = tiny.model(initializer_range=0.05)
    e = engine(m, autocast=torch.bfloat16, graphs=lambda device: Graphs(Traced()))
    for group in generated(e):
        with torch.no_grad():
            for c in group.rollouts:
                ids = torch.tensor([[*group.rollouts[0].prompt_ids.tolist(), *c.token_ids.tolist()]])
                logits = m(ids).logits[0, len(group.rollouts[0].prompt_ids) - 1 : -1]
                exact = logits.log_softmax(-1).gather(-1, torch.as_tensor(c.token_ids)[:, None])[:, 0]
                np.testing.assert_allclose(c.policy_logprobs, exact, atol=5e-2)
    assert not e.refused


# --------------------------------------------------------------------------------------------------------- rows


def test_rows_may_come_and_go_between_any_two_steps():
    """Against the model's forward, with moves, refills and a prompt whose completions begin at different times."""
    m = tiny.model("gemma3")
    prompts = [list(range(5, 40)), [7, 8, 9], [1]]
    run = StaticDecoder(static_of(m))
    plain = ForwardDecoder(m, slots=5, max_tokens=40)
    for decoder in (run, plain):
        assert [decoder.open(ids, 4) for ids in prompts] == [0, 1, 2]
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
    run = StaticDecoder(model)
    one, two = run.open([5, 6, 7], 4), run.open([8], 4)
    run.add([one, one, two, two])
    run.step(torch.tensor([1, 2, 3, 4]))
    run.keep([0, 1, 2])
    run.step(torch.tensor([1, 2, 3]))
    assert model.lengths.tolist() == [5, 5, 3, 0, 0, 0, 0, 0]
    assert bool(model.logits[:4].isfinite().all())


def test_a_second_call_sees_nothing_of_the_first():
    """Numbers that broke in one call must not reach the next one through masked columns."""
    m = tiny.model()
    e = engine(m, graphs=lambda device: Graphs(None))
    expected = generated(e)
    kept = held(e)
    assert kept is not None
    kept.cache.fill_(torch.nan)
    same(generated(e), expected, atol=0)


# ------------------------------------------------------------------------------------------------- what is kept


def test_buffers_and_graphs_serve_later_calls_with_new_weights():
    m = tiny.model()
    recorder = Traced()
    e = engine(m, graphs=lambda device: Graphs(recorder))
    before = generated(e)
    kept, made = held(e), recorder.made
    torch.manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.05 * torch.randn_like(p))
    after = generated(e)
    assert held(e) is kept
    assert recorder.made == made, "the graphs of the first call serve the second"
    same(after, generated(engine(m, native=False)))
    assert before[0].rollouts[0].token_ids.tolist() != after[0].rollouts[0].token_ids.tolist()


@pytest.mark.parametrize("change", tiers.some(["longer", "more", "replaced"], ["replaced"]))
def test_buffers_are_made_anew_where_they_do_not_fit(change):
    m = tiny.model()
    e = engine(m, graphs=lambda device: Graphs(Traced()))
    generated(e, n=2)
    kept = held(e)
    n, sampling = 2, SAMPLING
    if change == "longer":
        sampling = Sampling(max_tokens=COLUMNS, seed=3)
    elif change == "more":
        n = 4
    else:  # as load_state_dict(assign=True) does
        m.load_state_dict({k: v.clone() for k, v in tiny.model(seed=1).state_dict().items()}, assign=True)
    same(generated(e, n=n, sampling=sampling), generated(engine(m, native=False), n=n, sampling=sampling), atol=1e-4)
    assert held(e) is not kept
    kept = held(e)
    generated(e, n=1)
    assert held(e) is kept, "what is larger than needed serves as well"


def test_the_room_that_an_earlier_call_left_changes_no_bit():
    """A run that is resumed has only the room that its own calls need."""
    m = tiny.model()
    wide, fresh = (engine(m, graphs=lambda device: Graphs(None)) for _ in range(2))
    generated(wide, n=6, sampling=Sampling(max_tokens=300, seed=3))
    same(generated(wide), generated(fresh), atol=0)
    large, small = held(wide), held(fresh)
    assert large is not None
    assert small is not None
    assert large.cache.shape != small.cache.shape


def test_weights_in_the_type_of_the_computation_are_not_copied():
    m = tiny.model()
    packed = static_of(m).packed
    assert packed.head.weight.data_ptr() == m.lm_head.weight.data_ptr()
    assert packed.layers[0].down.weight.data_ptr() == m.model.layers[0].mlp.down_proj.weight.data_ptr()
    assert packed.layers[0].qkv.own
    assert static_of(m, dtype=torch.bfloat16).packed.head.own


# ------------------------------------------------------------------------------------------------- proof and refusal


def test_a_decoder_that_computes_something_else_is_not_used(monkeypatch):
    m = tiny.model()
    right = parts_of(m)
    wrong = Transformer(**{**{f: getattr(right, f) for f in Transformer.__slots__}, "scaling": right.scaling * 2})
    monkeypatch.setattr("trew.backends.cuda_graphs.backend.describe", lambda model, **_: wrong)
    e = engine(m, graphs=lambda device: Graphs(None))
    with pytest.warns(UserWarning, match="next-token distributions differ by .* nats .*Set kernels = 'plain'"):
        got = generated(e)
    assert e.refused
    assert held(e) is None
    same(got, generated(engine(m, native=False)), atol=0)


@pytest.mark.parametrize("fault", ["stale", "error"])
def test_the_proof_covers_a_step_too(fault, monkeypatch):
    """A step that writes nothing, and one of an operation that the device does not have."""

    def compute(self: StaticModel, rows: int, columns: int) -> None:
        if fault == "error":
            raise RuntimeError("not implemented for this device")

    monkeypatch.setattr(StaticModel, "compute", compute)
    m = tiny.model()
    e = engine(m, graphs=lambda device: Graphs(None))
    with pytest.warns(
        UserWarning, match="distributions differ by" if fault == "stale" else "raise RuntimeError: not implemented"
    ):
        got = generated(e)
    same(got, generated(engine(m, native=False)), atol=0)


def test_weights_below_float32_are_left_to_the_models_own_forward():
    m = tiny.model().to(torch.bfloat16)
    assert "not float32" in (static_model.unsupported(describe(m)) or "")
    e = engine(m, graphs=lambda device: Graphs(None))
    generated(e)
    assert held(e) is None
    assert e.messages == []
    assert "is not one of" in (static_model.unsupported(describe(tiny.model("gpt2"))) or "")


def test_a_cpu_never_takes_it_by_itself():
    e = engine(tiny.model())
    generated(e)
    assert held(e) is None
