"""Names that objectives used to have are refused with the new ones."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import trew
from trew.objective.weight import Clip


@pytest.mark.parametrize(
    ("old", "new"), [("pieces", "components"), ("couples", "scope"), ("as_step", "renormalised_for")]
)
def test_an_old_member_of_an_objective_is_refused_with_its_new_name(old, new):
    objective = trew.preset("grpo")
    with pytest.raises(AttributeError, match=f"{old} was renamed {new}"):
        getattr(objective, old)
    assert hasattr(objective, new)


@pytest.mark.parametrize(
    ("room", "old", "new"),
    [
        ("filter", "Keep", "GroupFilter"),
        ("filter", "Prune", "LossMask"),
        ("filter", "Select", "TokenMask"),
        ("filter", "Finished", "UncutCompletions"),
        ("advantage", "Relative", "BaselineAdvantage"),
        ("advantage", "Given", "ExternalAdvantages"),
        ("scale", "Unit", "NoScaling"),
    ],
)
def test_an_old_class_is_refused_with_its_new_name(room, old, new):
    with pytest.raises(ImportError, match=f"{old} was renamed {new}"):
        exec(f"from trew.objective.{room} import {old}")  # noqa: S102
    module = importlib.import_module(f"trew.objective.{room}")
    assert inspect.isclass(getattr(module, new))
    assert not hasattr(module, "nothing")


def test_an_old_field_of_a_batch_is_refused_with_its_new_name():
    batch = trew.TokenBatch.from_padded(
        logprobs=-torch.ones(1, 1), mask=torch.ones(1, 1), advantages=torch.ones(1), group_ids=torch.zeros(1).long()
    )
    for use in (lambda: batch.shares, lambda: batch.replace(shares=None)):
        with pytest.raises((AttributeError, TypeError), match="shares was renamed token_weights"):
            use()
    assert pickle.loads(pickle.dumps(batch)).size == copy.copy(batch).size == 1  # noqa: S301


def test_a_name_that_never_was_is_refused_and_copies_work():
    objective = trew.preset("grpo")
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = objective.nothing
    assert copy.deepcopy(objective) == pickle.loads(pickle.dumps(objective)) == objective  # noqa: S301


def test_a_component_that_declares_its_scope_by_the_old_name_is_refused():
    """Ignored, its scope would be "token": it would be computed in parts, with a wrong gradient."""
    with pytest.raises(TypeError, match="couples was renamed scope"):

        @dataclass(frozen=True)
        class Own(Clip):
            couples: ClassVar = "batch"
