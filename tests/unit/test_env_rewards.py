"""What an environment gives: the sum of an episode's rewards, and what its opening may say."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

import tiny
from test_episodes import HOW, LIMITS, Scripted, prompts
from trew.env import Say, Tool
from trew.env.hosts import Hosts
from trew.env.load import Spec
from trew.env.tools.formats import READERS, TemplateFormat
from trew.env.wire import from_say
from trew.rewards.builtin import episode
from trew.rollout import Renderer
from trew.rollout.bridge import Bridges
from trew.rollout.episodes import Episodes
from trew.rollout.generate import generate
from trew.types import Rollout, Span, Turn

ENVIRONMENT = """
from trew.env import Say

def counts(row, seed):
    yield Say(({"role": "user", "content": "go"},), metrics={"difficulty": 3.0})
    for turn in range(2):
        yield Say(({"role": "user", "content": "on"},), reward=0.5, metrics={"moves": 1.0})

def early(row, seed):
    yield Say(({"role": "user", "content": "go"},), reward=5.0)
"""


def turn(reward: float | None = None, *, ids: Sequence[int] = (7,), text: str = "a") -> Turn:
    nothing = np.zeros(len(ids), np.float32)
    spans = (Span(0, 0, len(ids)),)
    return Turn(np.array([7]), np.array(ids), nothing, None, None, spans, text, "stop", reward=reward)


@pytest.mark.parametrize("rewards", [[0.1] * 10, [0.2, 0.7, 0.1], [None, 0.3, 0.3, 0.4]])
def test_rewards_of_turns_that_make_one_are_one(rewards):
    """Added one after the other, 0.1 ten times is 0.9999999999999999, which is not correct."""
    made = Rollout(tuple(map(turn, rewards)), status="finished", ending="done")
    assert episode.grade("", episode=made).score == 1.0


def test_an_opening_has_no_reward():
    said = ({"role": "user", "content": "go"},)
    assert from_say(Say(said, reward=0.0), opening=False)["reward"] == 0.0
    with pytest.raises(ValueError, match="the opening has a reward, although there was no reply yet"):
        from_say(Say(said, reward=0.0), opening=True)


def test_what_the_opening_counts_is_counted(tmp_path):
    (tmp_path / "own.py").write_text(ENVIRONMENT)
    hosts = Hosts(Spec(f"{tmp_path / 'own.py'}:counts"), size=1, timeout_s=20)
    try:
        render = Renderer(tiny.tokenizer())
        engine = Scripted(render, lambda request, turn: "hi")
        episodes = Episodes(engine, hosts, Bridges(render, most=64), limits=LIMITS, ends=render.stop_ids)
        [group] = generate(episodes, prompts(1), n=1, sampling=HOW)
    finally:
        hosts.close()
    first, *others = group.rollouts[0].turns
    assert (first.metrics["difficulty"], first.metrics["moves"]) == (3.0, 1.0)
    assert not any("difficulty" in turn.metrics for turn in others)


def test_a_stop_string_that_ends_a_call_leaves_it_readable():
    """Its text is removed from the reply, whose tokens have it."""
    render = Renderer(tiny.tokenizer())
    style = TemplateFormat("tool_call json", READERS["tool_call json"])
    bridges = Bridges(render, most=64)
    episodes = Episodes(Scripted(render, None), None, bridges, limits=LIMITS, ends=render.stop_ids, format=style)
    play = SimpleNamespace(tools=(Tool("now", "The time.", {"type": "object", "properties": {}}),))
    text = '<tool_call>{"name": "now", "arguments": {}}'
    for written, readable in ((text + "</tool_call>", True), (text + "</tool", False)):
        reply = turn(ids=render.tokens(written), text=text)
        calls, malformed = episodes._parsed(play, reply)
        assert ([call.name for call in calls], malformed is None) == (["now"] * readable, readable)
