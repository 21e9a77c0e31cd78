"""Rows that go on: what was computed for a turn is kept for the next, which gets the tokens of computing all again."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import tiers
import tiny
from trew.backends.cpu.backend import CpuBackend
from trew.backends.cpu.decoder import CompiledDecoder
from trew.rollout import Renderer
from trew.rollout.engine import Earlier, Request
from trew.rollout.torch_engine import TorchEngine
from trew.rollout.torch_engine.plain import ForwardDecoder
from trew.types import Prompt, Sampling

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang"))), reason="there is no C compiler")
SAMPLING = Sampling(max_tokens=60, seed=3)
ENDS = range(20, 256, 12)  # so many that turns end before the limit
TURNS = 4
LONGEST = 400
DECODERS = {"plain": ForwardDecoder, "compiled": CompiledDecoder}


def engine(kind, decoder, **options):
    model = tiny.model(kind, **tiny.wide(kind), max_position_embeddings=512)
    backend = CpuBackend() if decoder == "compiled" else None
    return TorchEngine(model, Renderer(tiny.tokenizer(), eos_ids=ENDS), backend=backend, **options)


def said(sample, turn):
    """What comes between two turns: of different lengths, one of them longer than a page."""
    return [1 + (sample + turn + i) % 20 for i in range((3, 3, 7, 45)[(sample + turn) % 4])]


def play(engine, *, keep=True, groups=2, samples=4):
    """All turns of episodes that go on as soon as a turn has ended; with ``keep``, under the same id."""
    ids, turns, requests = {}, {}, []
    for group in range(groups):
        prompt = Prompt(f"p{group}", text="how are you today, my friend?" * (group + 1))
        opening = Earlier(np.asarray(engine.renderer.encode(prompt)), 0, LONGEST)
        for sample in range(samples):
            id = f"{group}/{sample}"
            ids[id] = opening.ids
            requests.append(Request(id, prompt, sample, SAMPLING, opening))
            turns[id] = []
    begin = {id: len(tokens) for id, tokens in ids.items()}
    of = {request.id: request for request in requests}
    engine.submit(requests)
    while of:
        for report in engine.poll():
            id = report.id.split("+")[0]
            request = of.pop(id)
            turns[id].append(report.turn)
            new = said(request.sample, len(turns[id]))
            ids[id] = np.concatenate([ids[id], report.turn.token_ids, new])
            if len(turns[id]) == TURNS or report.turn.finish_reason == "length":
                engine.cancel([report.id])
                continue
            if not keep:
                engine.cancel([report.id])
            longest = LONGEST if len(turns[id]) + 1 < TURNS else 0
            earlier = Earlier(ids[id], len(ids[id]) - begin[id], longest)
            of[id] = request
            name = id if keep else f"{id}+{len(turns[id])}"
            engine.submit([Request(name, request.prompt, request.sample, SAMPLING, earlier)])
    return turns


def same(one, other):
    assert one.keys() == other.keys()
    for id, turns in one.items():
        assert [t.token_ids.tolist() for t in turns] == [t.token_ids.tolist() for t in other[id]], id
        for a, b in zip(turns, other[id], strict=True):
            np.testing.assert_allclose(a.policy_logprobs, b.policy_logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "decoder", "batch"), tiers.thinned(["llama", "mistral", "qwen3"], DECODERS, [128, 3], keep=3)
)
def test_turns_that_go_on_equal_turns_that_are_computed_again(kind, decoder, batch, monkeypatch):
    resumed = []
    monkeypatch.setattr(DECODERS[decoder], "resume", counted(DECODERS[decoder].resume, resumed))
    kept = play(engine(kind, decoder, batch=batch))
    assert sum(resumed) >= 8, "the test must go on from held rows"
    count = len(resumed)
    again = play(engine(kind, decoder, batch=batch), keep=False)
    assert len(resumed) == count
    assert max(map(len, kept.values())) == TURNS
    same(kept, again)


@pytest.mark.parametrize("decoder", DECODERS)
def test_nothing_is_left_when_the_episodes_are_over(decoder):
    played = engine("llama", decoder)
    play(played)
    assert played._schedule is None


def test_held_rows_free_their_pages_and_prompts(monkeypatch):
    made = []
    first = CompiledDecoder.__init__
    monkeypatch.setattr(CompiledDecoder, "__init__", lambda self, *a, **k: (first(self, *a, **k), made.append(self))[0])
    closed = []
    monkeypatch.setattr(CompiledDecoder, "close", lambda self: closed.append((dict(self.held), dict(self.prompts))))
    play(engine("llama", "compiled"))
    assert closed
    assert closed[-1] == ({}, {})
    cache = made[-1].cache
    assert len(cache.free) == len(set(cache.free)) == cache.per_chunk * len(cache.chunks)


@pytest.mark.parametrize("decoder", DECODERS)
def test_only_as_many_rows_are_held_as_there_are_slots(decoder):
    """Those that ended first are freed, and their next turns computed again: the tokens stay the same."""
    few, all_at_once = engine("llama", decoder, batch=2), engine("llama", decoder)
    held, poll = [], few.poll

    def polled():
        reports = poll()
        held.append(len(few._schedule.held) if few._schedule else 0)
        return reports

    few.poll = polled
    same(play(few, samples=5), play(all_at_once, samples=5))
    assert max(held) == 2


@pytest.mark.parametrize("decoder", DECODERS)
def test_an_episode_that_goes_on_differently_takes_nothing_over(decoder):
    played = engine("llama", decoder)
    prompt = Prompt("p", text="hello there")
    opening = Earlier(np.asarray(played.renderer.encode(prompt)), 0, LONGEST)
    played.submit([Request("a", prompt, 0, SAMPLING, opening)])
    [first] = played.poll()
    other = np.concatenate([opening.ids[::-1], first.turn.token_ids, [5, 6]])
    turn = {}
    for id in ("a", "b"):
        played.submit([Request(id, prompt, 0, SAMPLING, Earlier(other, len(other) - len(opening.ids)))])
        [report] = played.poll()
        turn[id] = report.turn
    assert turn["a"].token_ids.tolist() == turn["b"].token_ids.tolist()
    np.testing.assert_allclose(turn["a"].policy_logprobs, turn["b"].policy_logprobs, atol=1e-5)


@pytest.mark.parametrize("decoder", DECODERS)
def test_new_weights_drop_what_is_held(decoder):
    played = engine("llama", decoder)
    prompt = Prompt("p", text="hello there")
    opening = Earlier(np.asarray(played.renderer.encode(prompt)), 0, LONGEST)
    played.submit([Request("a", prompt, 0, SAMPLING, opening)])
    played.poll()
    assert played._schedule is not None
    assert played._schedule.held
    played.version = 1
    assert played._schedule is None


def counted(function, calls):
    def counting(self, held, tokens):
        calls.append(len(held))
        return function(self, held, tokens)

    return counting
