"""The public types of environments: what a generator yields becomes one Say."""

from __future__ import annotations

import pytest

from trew.env import Say, Tool

USER = {"role": "user", "content": "higher"}


@pytest.mark.parametrize("said", ["higher", USER, [USER], (USER,), Say((USER,))])
def test_what_a_generator_yields_becomes_messages(said):
    assert Say.of(said).messages == (USER,)


def test_a_say_is_kept_whole():
    said = Say((USER,), reward=0.1, metrics={"moves": 3}, state="7")
    assert Say.of(said) is said


def test_messages_are_copied_so_that_an_environment_may_reuse_its_own():
    message = dict(USER)
    said = Say.of(message)
    message["content"] = "lower"
    assert said.messages == (USER,)


def test_a_tool_compares_by_what_the_policy_sees_of_it():
    parameters = {"type": "object", "properties": {}}
    assert Tool("now", "The time.", parameters, print) == Tool("now", "The time.", parameters)
