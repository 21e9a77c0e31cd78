"""The embedded engine against the plain forward pass and against transformers' own generation."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch

import tiers
import tiny
from sampling_reference import cut_distribution
from trew.errors import EngineError, NumericsError
from trew.rollout import Renderer
from trew.rollout.endings import ModelFacts
from trew.rollout.generate import generate
from trew.rollout.requests import Earlier, Request
from trew.rollout.torch_engine import TorchEngine
from trew.rollout.torch_engine.plain import ForwardDecoder
from trew.rollout.torch_engine.sampler import Draw
from trew.types import Group, Prompt, Rollout, Sampling

TEXTS = ("hi", "a longer prompt than the others, well beyond any window", "how are you?", "x")  # ragged on purpose
PROMPTS = [Prompt(uid=f"p{i}", text=text) for i, text in enumerate(TEXTS)]
SAMPLING = Sampling(max_tokens=20, seed=3)


def model(kind: str = "llama", *, seed: int = 0):
    return tiny.model(kind, seed=seed, **WIDTHS(kind))


# tests/backends runs all of this with a backend, which needs models of other widths.
def WIDTHS(kind: str) -> dict[str, Any]:
    return {}


def BACKEND() -> Any:
    return None


def engine(
    kind: str = "llama", *, seed: int = 0, batch: int = 128, stop: tuple[str, ...] = (), **options
) -> TorchEngine:
    renderer = Renderer(tiny.tokenizer(**options), stop=stop)
    return TorchEngine(model(kind, seed=seed), renderer, batch=batch, backend=BACKEND())


def plain_log_probs(model, group: Group, completion: Rollout) -> torch.Tensor:
    """(T, V) log-probabilities of each next token, from one forward pass over one row without cache and padding."""
    ids = torch.tensor([[*group.rollouts[0].prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[len(group.rollouts[0].prompt_ids) - 1 : -1]


def tokens(groups: list[Group]) -> list[list[int]]:
    return [c.token_ids.tolist() for g in groups for c in g.rollouts]


@pytest.mark.parametrize("batch", [128, 5])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_logprobs_and_entropies_agree_with_the_plain_forward(kind, batch):
    e = engine(kind, batch=batch)
    for group in generate(e, PROMPTS, n=3, sampling=SAMPLING):
        for c in group.rollouts:
            reference = plain_log_probs(e.model, group, c)
            chosen = reference.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0].numpy()
            entropies = -(reference.exp() * reference).sum(-1).numpy()
            np.testing.assert_allclose(c.policy_logprobs, chosen, atol=1e-4)
            np.testing.assert_allclose(c.logprobs, chosen, atol=1e-4)
            np.testing.assert_allclose(c.entropies, entropies, atol=1e-4)
            assert c.sampled.all()
            assert 1 <= len(c) <= 20


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_greedy_equals_transformers_generate(kind):
    e = engine(kind, eos=False, chat=False)
    for prompt in PROMPTS:
        (group,) = generate(e, [prompt], n=1, sampling=Sampling(max_tokens=12, temperature=0))
        ids = torch.tensor(group.rollouts[0].prompt_ids)[None]
        with torch.no_grad():
            expected = e.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
            )
        assert group.rollouts[0].token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
        assert (group.rollouts[0].logprobs == 0).all()


CHANGES = [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}, {"temperature": 1.5, "min_p": 0.05}]


@pytest.mark.parametrize(("kind", "changes"), tiers.thinned(["llama", "gemma3", "gpt2"], CHANGES, keep=3))
def test_draws_do_not_depend_on_the_batch(kind, changes):
    sampling = dataclasses.replace(SAMPLING, **changes)
    together = tokens(generate(engine(kind), PROMPTS, n=3, sampling=sampling))
    for batch in (1, 2, 3, 7):
        assert tokens(generate(engine(kind, batch=batch), PROMPTS, n=3, sampling=sampling)) == together
    alone = [t for p in PROMPTS for t in tokens(generate(engine(kind), [p], n=3, sampling=sampling))]
    assert alone == together
    backwards = generate(engine(kind), PROMPTS[::-1], n=3, sampling=sampling)
    assert tokens(backwards[::-1]) == together


def test_more_samples_extend_the_group():
    assert tokens(generate(engine(), PROMPTS[:1], n=5, sampling=SAMPLING))[:2] == tokens(
        generate(engine(), PROMPTS[:1], n=2, sampling=SAMPLING)
    )


def test_seed_uid_and_sample_number_all_change_the_draws():
    base = tokens(generate(engine(), PROMPTS[:1], n=2, sampling=SAMPLING))
    assert base[0] != base[1]
    assert base != tokens(generate(engine(), PROMPTS[:1], n=2, sampling=dataclasses.replace(SAMPLING, seed=4)))
    renamed = dataclasses.replace(PROMPTS[0], uid="other")
    assert base != tokens(generate(engine(), [renamed], n=2, sampling=SAMPLING))
    assert base == tokens(generate(engine(), PROMPTS[:1], n=2, sampling=SAMPLING))


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.6}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.7},
     {"temperature": 1.3, "top_k": 30, "min_p": 0.02, "top_p": 0.8}],
)  # fmt: skip
def test_sampling_logprobs_are_those_of_the_cut_distribution(changes):
    sampling = dataclasses.replace(SAMPLING, **changes)
    e = engine("qwen2")
    for group in generate(e, PROMPTS, n=2, sampling=sampling):
        for c in group.rollouts:
            reference = plain_log_probs(e.model, group, c).double().numpy()
            for row, token, logprob, cut in zip(reference, c.token_ids, c.policy_logprobs, c.logprobs, strict=True):
                assert logprob == pytest.approx(row[token], abs=1e-4)
                # Two tokens at the threshold may be equal in one computation and not in the other, by their last bits.
                ties = [row + tie * np.linspace(0, 1e-5, len(row)) for tie in (0, 1, -1)]
                wanted = [np.log(max(cut_distribution(r, sampling)[token], 1e-30)) for r in ties]
                assert any(cut == pytest.approx(value, abs=2e-4) for value in wanted), (cut, wanted)


def test_a_stop_token_ends_the_completion_and_stays_in_it():
    e = engine()
    first = generate(e, PROMPTS, n=4, sampling=SAMPLING)
    stop = e.renderer.stop_ids
    assert stop == {258}
    ended = [c for g in first for c in g.rollouts if c.finish_reason == "stop"]
    cut = [c for g in first for c in g.rollouts if c.finish_reason == "length"]
    assert ended, "the seed must show both ways to end"
    assert cut, "the seed must show both ways to end"
    for c in ended:
        assert c.token_ids[-1] in stop
        assert not set(c.token_ids[:-1]) & stop
        assert c.text == e.renderer.decode(c.token_ids[:-1])
        assert "<|im_end|>" not in c.text
    for c in cut:
        assert len(c) == SAMPLING.max_tokens
        assert not set(c.token_ids) & stop


def test_end_tokens_of_the_generation_configuration_count():
    e = engine()
    free = generate(e, PROMPTS[:2], n=4, sampling=SAMPLING)
    token = int(free[0].rollouts[0].token_ids[3])
    e.model.generation_config.eos_token_id = [token]
    for before, after in zip(free, generate(e, PROMPTS[:2], n=4, sampling=SAMPLING), strict=True):
        for b, a in zip(before.rollouts, after.rollouts, strict=True):
            expected = b.token_ids.tolist()
            if token in expected:
                expected = expected[: expected.index(token) + 1]
            assert a.token_ids.tolist() == expected
            assert (a.finish_reason == "stop") == (expected[-1] in (token, 258))


@pytest.mark.parametrize("where", ["sampling", "renderer"])
def test_a_stop_string_ends_the_completion_and_is_cut(where):
    free = generate(engine(eos=False, chat=False), PROMPTS, n=3, sampling=SAMPLING)
    decode = engine().renderer.decode
    pairs = ((c.token_ids, i) for g in free for c in g.rollouts for i in range(4, 12))
    ids, i = next((ids, i) for ids, i in pairs if (ids[i : i + 2] < 94).all())  # two printable ASCII bytes
    string = decode(ids[i : i + 2])
    assert len(string) == 2
    e = engine(eos=False, chat=False, stop=(string,) if where == "renderer" else ())
    sampling = SAMPLING if where == "renderer" else dataclasses.replace(SAMPLING, stop=("not in any", string))
    stopped = generate(e, PROMPTS, n=3, sampling=sampling)
    for before, after in zip(free, stopped, strict=True):
        for b, a in zip(before.rollouts, after.rollouts, strict=True):
            text = e.renderer.decode(b.token_ids)
            at = text.find(string)
            assert a.finish_reason == ("stop" if at >= 0 else "length")
            assert a.text == (text[:at] if at >= 0 else text)
            assert a.token_ids.tolist() == b.token_ids[: len(a)].tolist()
            if at >= 0:  # it ends with the very token that completes the string
                assert string in decode(a.token_ids)
                assert string not in decode(a.token_ids[:-1])
            else:
                assert len(a) == len(b)
    assert any(c.finish_reason == "stop" for g in stopped for c in g.rollouts)
    assert any(c.finish_reason == "length" for g in stopped for c in g.rollouts)


@pytest.mark.parametrize(
    ("said", "reason"), [("你好吗我很好\nabc", "stop"), ("吗好\nabc", "stop"), ("你好吗你好吗你好abc", "length")]
)
@pytest.mark.parametrize("broken", [False, True])
def test_a_stop_string_among_tokens_of_single_bytes_ends_the_completion_at_once(said, reason, broken, monkeypatch):
    """Their decoder (Llama 2, Mistral) replaces all bytes from the middle of a character on, line breaks too: the
    completion went on. Where they are broken further back, the text has no line break: it ended as if cut off."""
    renderer = Renderer(tiny.byte_fallback_tokenizer(), stop=("\n",))
    script = [3 + 0xE4] * broken + renderer.tokens(said)

    def scripted(self, logits, *, keys, positions, sampling):
        return Draw(torch.tensor(script)[positions], torch.zeros(3, len(logits)), torch.ones(len(logits)).bool())

    monkeypatch.setattr(ForwardDecoder, "draw", scripted)
    e = TorchEngine(tiny.model("llama", vocab_size=300), renderer)
    sampling = Sampling(max_tokens=len(script))
    [turn] = generate(e, [Prompt("a", text="abc")], n=1, sampling=sampling)[0].rollouts[0].turns
    ends = next((n for n in range(len(script)) if "\n" in renderer.decode(script[: n + 1])), len(script) - 1)
    assert turn.token_ids.tolist() == script[: ends + 1]
    assert turn.finish_reason == ("length" if broken else reason)
    assert "\n" not in turn.text


def test_a_special_token_can_be_a_stop_string():
    free = generate(engine(eos=False, chat=False), PROMPTS, n=8, sampling=SAMPLING)
    token = next(int(t) for g in free for c in g.rollouts for t in c.token_ids if t >= 256)
    sampling = dataclasses.replace(SAMPLING, stop=(tiny.SPECIAL[token - 256],))
    e = engine(eos=False, chat=False)
    ended = [c for g in generate(e, PROMPTS, n=8, sampling=sampling) for c in g.rollouts if c.finish_reason == "stop"]
    assert ended
    assert all(c.token_ids[-1] == token for c in ended)


def test_finished_rows_leave_the_batch_and_waiting_ones_come_in():
    e = engine(batch=6)
    seen: list[tuple[int, int]] = []
    e.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    groups = generate(e, PROMPTS, n=6, sampling=SAMPLING)
    lengths = [len(c) for g in groups for c in g.rollouts]
    assert len(set(lengths)) > 3, "the seed must give completions of different lengths"
    steps = [rows for rows, width in seen if width == 1 and rows > 0]
    assert max(steps) <= 6
    prefills = [shape for shape in seen if shape[1] > 1]
    singles = sum(len(g.rollouts[0].prompt_ids) == 1 for g in groups)
    assert sum(rows for rows, _ in prefills) == len(PROMPTS) - singles, "each prompt is computed exactly once"
    # a completion of T tokens is fed T - 1 times: no step is spent on a row that has ended
    assert sum(steps) == sum(lengths) - len(lengths) + singles


def test_progress_counts_completions():
    counts: list[int] = []
    generate(engine(batch=4), PROMPTS, n=3, sampling=SAMPLING, progress=counts.append)
    assert sum(counts) == 12
    assert min(counts) >= 1


def test_groups_keep_order_and_carry_prompt_and_version():
    e = engine()
    e.version = 17
    groups = generate(e, PROMPTS, n=2, sampling=SAMPLING)
    assert [g.prompt for g in groups] == PROMPTS
    for g, text in zip(groups, TEXTS, strict=True):
        assert g.rollouts[0].prompt_ids.tolist() == e.renderer.tokenizer(text)["input_ids"]
        assert [c.oldest_version for c in g.rollouts] == [17, 17]
    assert generate(e, [], n=2, sampling=SAMPLING) == []


def test_one_token_is_enough():
    (group,) = generate(engine(), PROMPTS[:1], n=3, sampling=Sampling(max_tokens=1))
    assert [len(c) for c in group.rollouts] == [1, 1, 1]


def test_weights_are_read_anew_each_time():
    e = engine(eos=False)
    before = tokens(generate(e, PROMPTS, n=2, sampling=SAMPLING))
    with torch.no_grad():
        for parameter in e.model.parameters():
            parameter.data.mul_(1.1)  # through .data: torch does not count this as a change
    after = generate(e, PROMPTS, n=2, sampling=SAMPLING)
    assert tokens(after) != before
    for group in after:
        for c in group.rollouts:
            chosen = plain_log_probs(e.model, group, c).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
            np.testing.assert_allclose(c.policy_logprobs, chosen.numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_training_goes_on_as_if_nothing_had_been_generated(kind):
    fresh, used = model(kind), engine(kind)
    used.model.train()
    used.model.get_submodule("model").layers[0].eval()  # a mode of its own
    fresh.train()
    fresh.get_submodule("model").layers[0].eval()
    generate(used, PROMPTS, n=2, sampling=SAMPLING)
    assert [m.training for m in used.model.modules()] == [m.training for m in fresh.modules()]
    assert not any("forward" in m.__dict__ for m in used.model.modules())
    ids = torch.arange(12)[None]
    for each in (fresh, used.model):
        each(input_ids=ids, labels=ids).loss.backward()
    for a, b in zip(fresh.parameters(), used.model.parameters(), strict=True):
        assert a.grad is not None
        assert not b.is_inference()
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


def test_modes_come_back_after_an_error():
    e = engine()
    e.model.train()
    with torch.no_grad():
        e.model.get_output_embeddings().weight[5] = float("nan")
    with pytest.raises(NumericsError):
        generate(e, PROMPTS, n=1, sampling=SAMPLING)
    assert e.model.training
    assert not any("forward" in m.__dict__ for m in e.model.modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_that_is_not_finite_names_the_prompt(value, temperature):
    e = engine()
    with torch.no_grad():
        e.model.get_input_embeddings().weight[e.renderer.tokenizer("?")["input_ids"]] = value
    with pytest.raises(NumericsError, match=r"prompt 'p2', sample 0: .* not finite"):
        generate(e, PROMPTS, n=2, sampling=Sampling(max_tokens=3, temperature=temperature, seed=1, top_k=2))


def test_too_long_for_the_model_is_said_before_generating():
    e = engine()
    e.model.forward = None  # must not be called
    with pytest.raises(EngineError, match=r"'p1': 55 prompt tokens \+ max_tokens = 500 .* 512 positions"):
        generate(e, PROMPTS, n=2, sampling=Sampling(max_tokens=500))


@pytest.mark.parametrize(
    ("in_episode", "keys"),
    [
        (False, ["rollout.max_tokens", "eval.max_tokens", "data.max_prompt_tokens"]),
        (True, ["environment.episode_tokens"]),
    ],
)
def test_what_is_too_long_for_the_model_is_told_with_the_keys_that_decide(in_episode, keys):
    with pytest.raises(EngineError, match="more than the model's 64 positions") as caught:
        ModelFacts(9, positions=64).check(PROMPTS[0], [1] * 50, 15, in_episode=in_episode)
    assert re.findall(r"\w+\.\w+_tokens", str(caught.value)) == keys


def test_a_turn_of_an_episode_is_told_from_a_prompt():
    e = engine()
    turn = Request("r", PROMPTS[0], 0, Sampling(max_tokens=500), Earlier(np.full(20, 7)))
    with pytest.raises(EngineError, match=r"20 tokens of its .* set environment\.episode_tokens to at most 512"):
        e.submit([turn])


def test_prompts_that_cannot_be_computed_are_refused():
    e = engine()
    with pytest.raises(EngineError, match="'empty': has no tokens"):
        generate(e, [Prompt(uid="empty", text="")], n=1, sampling=SAMPLING)
    foreign = TorchEngine(tiny.model(vocab_size=256), e.renderer)
    with pytest.raises(EngineError, match="token id 258 is outside the model's vocabulary of 256"):
        generate(foreign, [Prompt(uid="a", text="<|im_end|>")], n=1, sampling=SAMPLING)
    with pytest.raises(EngineError, match="at least 1"):
        generate(e, PROMPTS, n=0, sampling=SAMPLING)
    with pytest.raises(EngineError, match="at least 1"):
        TorchEngine(e.model, e.renderer, batch=0)


def test_bfloat16_autocast_stays_close_and_reports_float32():
    exact, cast = engine(), engine()
    cast.autocast = torch.bfloat16
    a = generate(exact, PROMPTS, n=2, sampling=Sampling(max_tokens=1, seed=3))
    b = generate(cast, PROMPTS, n=2, sampling=Sampling(max_tokens=1, seed=3))
    pairs = [(x, y) for g, h in zip(a, b, strict=True) for x, y in zip(g.rollouts, h.rollouts, strict=True)]
    same = [(x, y) for x, y in pairs if x.token_ids[0] == y.token_ids[0]]
    assert len(same) >= len(pairs) - 2
    assert any(x.policy_logprobs[0] != y.policy_logprobs[0] for x, y in same), "nothing was computed in bfloat16"
    for x, y in same:
        assert y.policy_logprobs.dtype == np.float32
        assert x.policy_logprobs[0] == pytest.approx(y.policy_logprobs[0], abs=0.15)
