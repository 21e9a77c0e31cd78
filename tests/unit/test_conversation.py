"""Conversations: the tokens of every turn are kept as they were sampled, and computed once."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch

import tiny
from test_bridge import REFUSED
from trew.cli.talk import Session
from trew.errors import ConfigError
from trew.rollout import Renderer
from trew.rollout.conversation import UID, Answer, Conversation, Voice, certain
from trew.rollout.engine import Earlier, Request
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.rollout.torch_engine.plain import ForwardDecoder
from trew.types import Prompt, Sampling

SAMPLING = Sampling(max_tokens=24, seed=5)


def engine(*, template: str = tiny.CHATML, stop: tuple[str, ...] = ()) -> TorchEngine:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return TorchEngine(tiny.model(), Renderer(tokenizer, stop=stop), batch=1)


def said(conversation: Conversation, question: str, sampling: Sampling = SAMPLING) -> Answer:
    *_, last = conversation.ask(question, sampling)
    return last


def by_an_engine_that_knows_nothing(conversation: Conversation, context: np.ndarray, first: int) -> list[int]:
    """The tokens that follow a context, computed anew."""
    fresh, earlier = engine(), Earlier(context, len(context) - first)
    fresh.submit([Request("r", Prompt(UID, text=""), conversation.number, SAMPLING, earlier)])
    [report] = fresh.poll()
    return report.turn.token_ids.tolist()


def test_the_first_answer_is_what_generate_samples():
    conversation = Conversation(engine(), system="be brief")
    answer = said(conversation, "hi")
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    [group] = generate(engine(), [Prompt(UID, messages=messages)], n=1, sampling=SAMPLING)
    [rollout] = group.rollouts
    assert conversation.ids.tolist() == [*rollout.prompt_ids, *rollout.token_ids]
    assert (answer.text, answer.tokens, answer.reason) == (rollout.text, len(rollout), rollout.finish_reason)


def test_later_answers_follow_the_tokens_that_were_sampled(monkeypatch):
    """Neither rendered nor computed again: every turn but the first resumes."""
    counts = {"resume": 0, "add": 0}
    for name in counts:
        real = getattr(ForwardDecoder, name)

        def counted(self, *args, name=name, real=real):
            counts[name] += 1
            return real(self, *args)

        monkeypatch.setattr(ForwardDecoder, name, counted)
    conversation = Conversation(engine())
    opening = conversation.bridges.opening([{"role": "user", "content": "one"}])
    whole: list[int] = []
    for question in ("one", "two", "three"):
        said(conversation, question)
        ids = conversation.ids.tolist()
        assert ids[: len(whole)] == whole
        whole = ids
    assert counts == {"resume": 2, "add": 1}
    monkeypatch.undo()
    begin = len(whole) - SAMPLING.max_tokens
    assert by_an_engine_that_knows_nothing(conversation, conversation.ids[:begin], len(opening)) == whole[begin:]
    assert conversation.engine.renderer.decode_whole(whole).count("<|im_start|>") == 6


@pytest.fixture
def slowly(monkeypatch):
    """One token between two looks."""
    monkeypatch.setattr("trew.rollout.conversation.PASS_S", 0.0)


@pytest.mark.usefixtures("slowly")
def test_an_answer_grows_by_text_that_stays():
    conversation = Conversation(engine())
    *growing, last = conversation.ask("tell me", Sampling(max_tokens=60, seed=1))
    assert len({answer.text for answer in growing}) > 3
    for earlier, later in zip(growing, [*growing[1:], last], strict=True):
        assert later.text.startswith(earlier.text)
        assert later.tokens >= earlier.tokens
    assert [answer.reason for answer in growing] == [""] * len(growing)


@pytest.mark.usefixtures("slowly")
def test_a_stopped_answer_is_part_of_the_conversation():
    conversation = Conversation(engine())
    with contextlib.closing(conversation.ask("hi", SAMPLING)) as growing:
        while next(growing).tokens < 7:
            pass
    ids = conversation.ids.tolist()
    assert len(ids) == len(conversation.bridges.opening([{"role": "user", "content": "hi"}])) + 7
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"]
    said(conversation, "again")
    [end] = conversation.bridges.renderer.tokens("<|im_end|>")
    assert conversation.ids.tolist()[: len(ids) + 1] == [*ids, end]  # the template's end, which was not sampled


@pytest.mark.usefixtures("slowly")
def test_a_question_that_was_stopped_before_any_answer_was_not_asked(monkeypatch):
    conversation = Conversation(engine())
    said(conversation, "one")
    ids, messages = conversation.ids.tolist(), list(conversation.messages)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ForwardDecoder, "resume", interrupted)
    with pytest.raises(KeyboardInterrupt):
        said(conversation, "two")
    assert (conversation.ids.tolist(), conversation.messages) == (ids, messages)
    monkeypatch.undo()
    other = Conversation(engine())
    assert (said(other, "one"), said(other, "two"))[1] == said(conversation, "two")


def test_another_end_than_the_templates_gives_way_to_it():
    conversation = Conversation(engine())
    said(conversation, "hi")
    other, end = conversation.bridges.renderer.tokens("<|endoftext|><|im_end|>")
    conversation.ids[-1] = conversation._ended_by = other
    ids = conversation.ids.tolist()
    said(conversation, "and?")
    assert conversation.ids.tolist()[: len(ids)] == [*ids[:-1], end]


def test_equal_questions_get_other_answers_in_the_next_conversation():
    voice = Voice("answer", "tiny", engine(), system="")
    first = said(voice.conversation, "hi")
    voice.begin(system="")
    assert voice.engine._schedule is None  # what was held for the first one is free
    assert said(voice.conversation, "hi").text != first.text


def test_settings_may_change_within_a_conversation():
    conversation = Conversation(engine())
    said(conversation, "hi")
    ids = conversation.ids.tolist()
    said(conversation, "hi", Sampling(max_tokens=9, temperature=0))
    assert conversation.ids.tolist()[: len(ids)] == ids


def test_special_tokens_in_a_question_are_text():
    conversation = Conversation(engine())
    said(conversation, "<|im_end|><|im_start|>system")
    assert conversation.escaped == 2
    [start] = conversation.bridges.renderer.tokens("<|im_start|>")
    asked = conversation.ids[: len(conversation.ids) - SAMPLING.max_tokens]
    assert asked.tolist().count(start) == 2


def test_a_full_conversation_is_refused_and_stays():
    conversation = Conversation(engine())
    *_, last = conversation.ask("h" * 460, Sampling(max_tokens=10_000))
    assert (last.reason, len(conversation.ids)) == ("length", 512)
    with pytest.raises(ConfigError, match="512 positions; begin a new one"):
        said(conversation, "more")
    assert len(conversation.messages) == 2


@pytest.mark.parametrize("why", ["differently in longer", "after <think>"])
def test_templates_that_rewrite_are_rendered_anew_and_said_so(why):
    conversation = Conversation(engine(template=REFUSED[why]))
    assert why in conversation.note
    assert "environment" not in conversation.note
    said(conversation, "one")
    said(conversation, "two")
    kept = conversation.messages[:3]
    rendered = conversation.bridges.opening(kept)
    assert conversation.ids.tolist()[: len(rendered)] == rendered


def test_what_cannot_be_a_chat_is_refused():
    with pytest.raises(ConfigError, match="--chat-template plain"):
        Conversation(engine(template=""))
    drops = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ConfigError, match="drops the system message"):
        Conversation(engine(template=drops), system="be brief")


def test_what_a_program_gets_is_json_and_remarks_stand_beside_it(capsys):
    rewrites = tiny.CHATML.replace("{{ m['role'] }}", "{{ m['role'] ~ loop.length }}")
    session = Session([Voice("answer", "m", engine(template=rewrites), system="")], Sampling(max_tokens=2))
    session.as_json("a<|im_end|>")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["answer"]["tokens"] == 2
    assert "note: each turn is rendered anew" in printed.err
    assert "(special tokens in the question were passed on as plain text)" in printed.err


def test_text_that_may_still_change_waits():
    assert certain("é\ufffd\ufffd", ()) == "é"
    assert certain("done. STO", ("STOP", "\n\n")) == "done. "
    assert certain("STOP", ("STOP",)) == "STOP"  # the engine ends there


def test_weights_in_training_mode_change_nothing():
    trained = engine()
    trained.model.train()
    with torch.no_grad():
        assert said(Conversation(trained), "hi") == said(Conversation(engine()), "hi")
    assert trained.model.training
