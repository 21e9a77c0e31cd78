"""What TRL's trainer is told that needs no TRL: which answers count as correct."""

from __future__ import annotations

import pytest

import trew
from trew.errors import ConfigError
from trew.integrations.trl import refusals, rewards


@pytest.mark.parametrize("name", ["pass-at-k", "online-rft", "topr", "gtpo", "grpo-s"])
def test_several_rewards_do_not_say_which_answers_are_correct(name: str) -> None:
    objective = trew.preset(name, dynamic_sampling=False)
    (text,) = refusals.notes(objective, [1.0, 0.5])
    assert "weighted sum of rewards is above 0" in text
    assert not refusals.notes(objective, [1.0])
    assert not refusals.notes(objective, [1.0, 0.0])  # the other one is only logged
    assert not refusals.notes(trew.preset("grpo"), [1.0, 0.5])


def test_a_gate_decides_which_answers_are_correct() -> None:
    both = rewards.together([{"name": "gsm8k", "gate": True}, {"name": "format"}])
    formed = "<think>a</think>\n<answer>#### {}</answer>"
    answers = [formed.format(72), formed.format(71), "#### 72"]
    found = both(prompts=["?"] * 3, completions=answers, answer=["72"] * 3)
    assert [value > 0 for value in found] == [True, False, True]


@pytest.mark.parametrize(
    ("given", "says"), [({"sets": ["a"]}, "rows are of one set"), ({"weight": float("nan")}, "accepts a finite number")]
)
def test_settings_of_a_recipe_that_would_have_no_effect_are_refused(given: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rewards.together([{"name": "gsm8k", **given}, {"name": "format"}])
