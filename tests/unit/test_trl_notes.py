"""What our part of TRL does that needs no TRL: notes, and rewards that a recipe could have."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trew
from trew.errors import ConfigError, DataError
from trew.integrations.trl import refusals, rewards, step
from trew.rewards import KINDS


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


def test_episodes_of_one_prompt_are_one_group_whose_environments_no_function_gets(tmp_path: Path) -> None:
    code = "def some(completions):\n    return [None if c == 'b' else float(c == 'a') for c in completions]"
    (tmp_path / "mine.py").write_text(code)
    both = rewards.together([{"name": "gsm8k"}, {"name": f"{tmp_path}/mine.py:some"}])
    given = {"answer": ["72"] * 3, "image": [np.arange(2), np.arange(2), np.arange(2)]}
    given["environments"] = [object() for _ in range(3)]
    # The mean of the others stands in for the number that is missing: only within a group is there any.
    assert both(prompts=["?"] * 3, completions=["a", "b", "c"], **given) == [1.0, 0.5, 0.0]
    given["image"][2] = np.arange(3)
    assert both(prompts=["?"] * 3, completions=["a", "b", "c"], **given) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("old", [None, torch.full((2, 2), -0.5)])
def test_a_sampler_without_a_value_for_a_token_stops_no_plan(old: torch.Tensor | None) -> None:
    given = {
        "mask": torch.ones(2, 2),
        "group_ids": torch.zeros(2, dtype=torch.int64),
        "rewards": torch.tensor([1.0, 0]),
    }
    sampler = torch.tensor([[-0.5, float("nan")], [-0.5, -0.5]])
    batch = step.plan(
        trew.preset("aipo"), logprobs=torch.zeros(2, 2), old_logprobs=old, rollout_logprobs=sampler, **given
    )
    assert batch.advantages is not None
    assert batch.advantages.sign().tolist() == [1, 1, -1, -1]


def test_a_column_that_no_grader_reads_is_refused() -> None:
    # With an answer among the columns, that would have been its gold.
    with pytest.raises(
        ConfigError, match=r"columns: got 'golds' \(did you mean 'gold'\?\), accepts gold, ground_truth, "
    ):
        rewards.of("gsm8k", columns={"golds": "final"})
    with pytest.raises(ConfigError, match="reads no column"):
        rewards.of("format", columns={"gold": "final"})
    mapped = rewards.of("gsm8k", columns={"gold": "final"})
    assert mapped(prompts=["?"], completions=["#### 72"], final=["72"], answer=["3"]) == [1.0]
    assert rewards.of("math", columns={"solution": "final"}).columns == {"solution": "final"}
    programs = rewards.of("code_func", columns={"asserts": "checks", "entry_point": "name", "setup": "before"})
    assert programs.columns["setup"] == "before"


WITHOUT_GOLD = {"arithmetic": "gold", "math": "gold", "code_stdin": "tests", "code_func": "asserts"}


@pytest.mark.parametrize("kind", WITHOUT_GOLD)
def test_data_without_a_column_that_the_grader_reads_are_refused_at_the_first_batch(kind: str) -> None:
    """Every reward was None, and TRL trained to its end with a loss of 0."""
    given: dict[str, Any] = {"prompts": ["1 + 2 = "] * 2, "completions": ["3"] * 2, "result": ["3"] * 2}
    for grade in (rewards.of(kind), rewards.together([{"name": kind}])):
        with pytest.raises(DataError) as refused:
            grade(**given)
        said = str(refused.value)
        assert f"the data have no column that {kind} reads its gold from" in said
        assert KINDS[kind].looks_for in said
        assert "they have ['result']" in said
        assert f"columns={{{WITHOUT_GOLD[kind]!r}: '...'}}" in said
    assert rewards.of(kind, columns={WITHOUT_GOLD[kind]: "result"}).columns


def test_a_column_that_is_empty_in_some_rows_leaves_these_unjudged() -> None:
    said: dict[str, Any] = {"prompts": ["1 + 2 = "] * 2, "completions": ["3"] * 2}
    for grade in (rewards.of("arithmetic"), rewards.together([{"name": "arithmetic"}])):
        assert grade(**said, answer=[None, None]) == [None, None]
        assert grade(**said, answer=["3", None])[0] == 1
        assert grade(**said, other=["3", "3"]) == [None, None]  # as the data of an evaluation may be
    assert rewards.of("format")(**said) == [0.0, 0.0]


def test_a_new_setting_whose_default_is_a_list_is_at_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class GRPOConfig:
        stops: list[str] = dataclasses.field(default_factory=list)

    monkeypatch.setitem(sys.modules, "trl", types.SimpleNamespace(GRPOConfig=GRPOConfig))
    nothing = dataclasses.make_dataclass("TrainingArguments", [])
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(TrainingArguments=nothing))
    assert list(refusals._unknown(GRPOConfig())) == []
    (text,) = refusals._unknown(GRPOConfig(stops=["a"]))
    assert text.startswith("stops: got ['a'], which is newer")
