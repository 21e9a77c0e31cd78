"""generate: groups from an engine that reports turns one by one, in any order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engine_help import ScriptedEngine
from trew.errors import EngineError, NumericsError
from trew.rollout.engine import Request
from trew.rollout.generate import generate
from trew.types import Group, Prompt, Sampling

PROMPTS = [Prompt(f"p{i}", text="?") for i in range(7)]
SAMPLING = Sampling(max_tokens=9, seed=2)


def test_groups_and_their_rollouts_keep_their_order():
    engine = ScriptedEngine(batch=5, text_of=lambda request: f"{request.prompt.uid} {request.sample}")
    groups = generate(engine, PROMPTS, n=4, sampling=SAMPLING)
    assert [group.prompt for group in groups] == PROMPTS
    assert [[r.text for r in g.rollouts] for g in groups] == [[f"{p.uid} {i}" for i in range(4)] for p in PROMPTS]
    assert engine.poll() == []
    assert generate(engine, [], n=4, sampling=SAMPLING) == []


def test_requests_are_submitted_prompt_by_prompt():
    """The order that a prompt's shared computation, and bits of batched products, depend on."""
    engine = ScriptedEngine()
    generate(engine, PROMPTS, n=3, sampling=SAMPLING)
    assert [(r.prompt.uid, r.sample) for r in engine.submitted] == [(p.uid, i) for p in PROMPTS for i in range(3)]
    assert all(request.sampling is SAMPLING for request in engine.submitted)
    assert all(request.prompt is PROMPTS[int(request.prompt.uid[1:])] for request in engine.submitted)


def test_prompts_of_equal_uid_are_told_apart():
    groups = generate(ScriptedEngine(), [PROMPTS[0], PROMPTS[0]], n=2, sampling=SAMPLING)
    assert [len(group.rollouts) for group in groups] == [2, 2]


def test_status_says_whether_a_rollout_was_cut_off():
    groups = generate(ScriptedEngine(), PROMPTS, n=4, sampling=SAMPLING)
    rollouts = [r for group in groups for r in group.rollouts]
    assert {(r.finish_reason, r.status) for r in rollouts} == {("stop", "finished"), ("length", "truncated")}
    assert {len(r.turns) for r in rollouts} == {1}


def test_each_group_is_given_away_once_as_soon_as_it_is_whole():
    engine, given, counts = ScriptedEngine(batch=5), {}, []

    def on_group(number: int, group: Group) -> None:
        assert number not in given
        assert sum(counts) >= sum(len(g.rollouts) for g in given.values()) + 4
        given[number] = group

    groups = generate(engine, PROMPTS, n=4, sampling=SAMPLING, progress=counts.append, on_group=on_group)
    assert sorted(given) == list(range(7))
    assert all(given[number] is group for number, group in enumerate(groups))
    assert sum(counts) == 28
    assert min(counts) >= 1
    assert len(counts) > 1


def test_groups_are_given_away_while_others_are_generated():
    engine, left = ScriptedEngine(batch=2), []

    def on_group(number: int, group: Group) -> None:
        left.append(len(engine._open))

    generate(engine, PROMPTS, n=2, sampling=SAMPLING, on_group=on_group)
    assert left[0] > 0
    assert left[-1] == 0


def test_what_the_engine_loses_is_named():
    engine = ScriptedEngine(loses=lambda request: request.prompt.uid == "p3" and request.sample == 1)
    with pytest.raises(EngineError, match=r"'p3', sample 1: its server died"):
        generate(engine, PROMPTS, n=2, sampling=SAMPLING)
    assert engine.poll() == [], "the others are cancelled"
    engine = ScriptedEngine(batch=99, loses=lambda request: True)
    with pytest.raises(EngineError, match=r"'p\d', sample \d: its server died") as error:
        generate(engine, PROMPTS, n=40, sampling=dataclasses.replace(SAMPLING, max_tokens=1))
    assert "more" in str(error.value)
    assert str(error.value).count("its server died") == 3, "a few stand for all"


@pytest.mark.parametrize("error", [NumericsError("x", quantity="rollout_logprobs"), KeyboardInterrupt()])
def test_a_failure_leaves_the_engine_without_these_requests(error):
    engine = ScriptedEngine()
    engine.failure = error
    with pytest.raises(type(error)):
        generate(engine, PROMPTS, n=2, sampling=SAMPLING)
    assert engine.poll() == []

    def on_group(number: int, group: Group) -> Any:
        raise error

    with pytest.raises(type(error)):
        generate(engine, PROMPTS, n=2, sampling=SAMPLING, on_group=on_group)
    assert engine.poll() == []
    assert len(generate(engine, PROMPTS, n=2, sampling=SAMPLING)) == 7


def test_requests_of_others_are_not_taken_for_its_own():
    engine = ScriptedEngine()
    engine.submit([Request("mine", PROMPTS[0], 0, SAMPLING)])
    with pytest.raises(EngineError, match="'mine'"):
        generate(engine, PROMPTS, n=2, sampling=SAMPLING)


@pytest.mark.parametrize("n", [0, -1])
def test_at_least_one_completion_is_asked_for(n):
    engine = ScriptedEngine()
    with pytest.raises(EngineError, match=f"n: got {n}"):
        generate(engine, PROMPTS, n=n, sampling=SAMPLING)
    assert engine.submitted == []
