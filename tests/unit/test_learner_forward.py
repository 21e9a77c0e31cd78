"""Both layouts against the plain, unpadded forward pass of one sequence at a time."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch

import learner_help as help
import tiny
from trew.learner import attention
from trew.learner.autograd import COMPARED, AutogradRunner, first_samples
from trew.learner.path import ExecutionPath
from trew.types import TrainingSample


def by_sample(forward: AutogradRunner, items, method) -> dict[int, torch.Tensor]:
    out = {}
    for pack in forward.packs(items):
        lengths = [len(items[i].token_ids) for i in pack.samples]
        out |= dict(zip(pack.samples, getattr(forward, method)(pack).split(lengths), strict=True))
    return out


@pytest.mark.parametrize("budget", [4096, 20])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "logits"])
def test_logprobs_equal_the_plain_forward(kind, share, budget, fused):
    net, items = help.model(kind), help.samples()
    forward = help.runner(net, temperature=0.8, budget=budget, share_prompts=share, fused=fused)
    logprobs = by_sample(forward, items, "logprobs_of")
    assert forward.path == ExecutionPath(shared=share, fused=fused)
    assert sorted(logprobs) == [i for i, s in enumerate(items) if len(s.token_ids)]
    with torch.no_grad():
        for i, got in logprobs.items():
            torch.testing.assert_close(got, help.plain_logprobs(net, items[i], temperature=0.8), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_eager_attention_too(kind):
    net, items = help.model(kind), help.samples()
    net.set_attn_implementation("eager")
    forward = help.runner(net)
    for i, got in by_sample(forward, items, "logprobs_of").items():
        with torch.no_grad():
            torch.testing.assert_close(got, help.plain_logprobs(net, items[i]), rtol=0, atol=1e-5)
    assert forward.path.shared
    assert net.config._attn_implementation == "eager"


def test_the_models_own_attention_is_back_afterwards_even_after_an_error():
    net, items = help.model(), help.samples()
    before = net.config._attn_implementation
    forward = help.runner(net)
    (pack,) = forward.packs(items)
    inside = []

    def fail():
        with forward.running(pack):
            inside.append(net.config._attn_implementation)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [attention.NAME]
    assert net.config._attn_implementation == before


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_a_window_shorter_than_a_sequence_falls_back_to_plain_rows(kind):
    net, items = tiny.model(kind), help.samples()  # window 8
    forward = help.runner(net)
    with pytest.warns(UserWarning, match="attention window of 8 tokens is shorter than some sequences"):
        logprobs = by_sample(forward, items, "logprobs_of")
    assert all(pack.mask is not None for pack in forward.packs(items))  # said once
    assert all(pack.mask is None for pack in forward.packs(help.samples([(3, (4, 5))])))  # these are within the window
    assert len(forward.messages) == 1
    for i, got in logprobs.items():
        with torch.no_grad():
            torch.testing.assert_close(got, help.plain_logprobs(net, items[i]), rtol=0, atol=1e-5)


def test_packed_rows_that_come_out_wrong_are_found_on_the_first_samples(monkeypatch):
    right = attention.blocks

    def wrong(segments, **where):
        """An architecture that does not see the whole prefix."""
        return right([dataclasses.replace(s, prefix_length=max(s.prefix_length - 1, 0)) for s in segments], **where)

    monkeypatch.setattr(attention, "blocks", wrong)
    net, items = help.model(), help.samples()
    forward = help.runner(net)
    with pytest.warns(UserWarning, match="packed rows' log-probs differ by"):
        logprobs = by_sample(forward, items, "logprobs_of")
    assert not forward.path.shared
    for i, got in logprobs.items():
        with torch.no_grad():
            torch.testing.assert_close(got, help.plain_logprobs(net, items[i]), rtol=0, atol=1e-5)


def test_packed_rows_are_compared_once_sequences_fit_into_a_window_if_the_first_did_not(monkeypatch):
    right = attention.blocks

    def wrong(segments, **where):
        """An architecture that does not see the whole prefix."""
        return right([dataclasses.replace(s, prefix_length=max(s.prefix_length - 1, 0)) for s in segments], **where)

    monkeypatch.setattr(attention, "blocks", wrong)
    net, short = tiny.model("gemma3"), help.samples([(3, (4, 5))])  # window 8
    forward = help.runner(net)
    with pytest.warns(UserWarning, match="is shorter than some sequences"):
        forward.packs(help.samples())
    with pytest.warns(UserWarning, match="packed rows' log-probs differ by"):
        logprobs = by_sample(forward, short, "logprobs_of")
    for i, got in logprobs.items():
        with torch.no_grad():
            torch.testing.assert_close(got, help.plain_logprobs(net, short[i]), rtol=0, atol=1e-5)


def test_packed_rows_that_raise_fall_back_too(monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("no such mask\nlong story")

    monkeypatch.setattr(attention, "sdpa_attention_forward", broken)
    with pytest.warns(UserWarning, match="packed rows raise ValueError: no such mask. Set learner"):
        assert by_sample(help.runner(help.model()), help.samples(), "logprobs_of")


def test_an_architecture_without_position_ids_is_refused_by_its_signature(monkeypatch):
    net = help.model()
    forward = type(net).forward

    def bare(self, input_ids, attention_mask=None, logits_to_keep=0):
        return forward(self, input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep)

    monkeypatch.setattr(type(net), "forward", bare)
    runner = help.runner(net)
    with pytest.warns(UserWarning, match="its forward does not take position_ids"):
        runner.packs(help.samples())
    assert not runner.path.shared


def test_nothing_is_said_where_sharing_was_not_asked_for():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward = help.runner(tiny.model("gemma2"), share_prompts=False)
        by_sample(forward, help.samples(), "logprobs_of")
    assert forward.messages == []


@pytest.mark.parametrize("share", [True, False])
def test_bfloat16_autocast_is_close_to_float32(share):
    net, items = help.model("qwen3"), help.samples()
    exact = by_sample(help.runner(net, share_prompts=share), items, "logprobs_of")
    rounded = by_sample(help.runner(net, share_prompts=share, autocast=torch.bfloat16), items, "logprobs_of")
    difference = torch.cat([exact[i] - rounded[i] for i in exact])
    assert 0 < difference.abs().max() < 0.2
    assert difference.abs().mean() < 0.03
    assert all(p.dtype == torch.float32 for p in net.parameters())


def test_long_samples_are_compared_in_part():
    """All logits of a few long sequences, in float32, can be more than the memory that the step itself takes."""
    net, long = help.model(), 3 * COMPARED
    prompt = np.arange(long) % 200
    plain = [TrainingSample(prompt, np.arange(long) % 190 + i, 0) for i in range(2)]
    late = np.arange(long) == long - 5
    episode = TrainingSample(prompt[:7], np.arange(long) % 190, 1, late)
    few = first_samples(net, [*plain, episode], None)
    assert [len(sample.prompt_ids) for sample in few] == [COMPARED, COMPARED, 7]
    assert [len(sample.token_ids) for sample in few] == [COMPARED, COMPARED, long - 4]
    assert [len(sample.predicted) for sample in few] == [COMPARED, COMPARED, 1]
    assert few[0].prompt_ids.tolist() == prompt[-COMPARED:].tolist()  # next to the completion
    short = help.samples()
    assert all(
        np.array_equal(a.token_ids, b.token_ids)
        for a, b in zip(first_samples(net, short[:2], None), short, strict=False)
    )
