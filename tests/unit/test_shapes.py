"""What checks annotations in the tests notices a wrong shape, in the mathematics and in its types."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from torch import Tensor

import shapes
from trew.objective import capped, distillation


@shapes._decorator(typechecker=None)
def first(x: Float[Tensor, "N"], y: Float[Tensor, "N"], *, most: int) -> Float[Tensor, "N"]:
    return (x + y.sum())[:most]


@shapes._decorator(typechecker=None)
@dataclasses.dataclass(frozen=True)
class Pair:
    x: Float[Tensor, "N"]
    y: Float[Tensor, "N"] | None = None


def test_shapes_of_arguments_results_and_fields():
    three, four = torch.ones(3), torch.ones(4)
    assert first(three, three, most=3).tolist() == [4.0] * 3
    assert first(four, four, most=4).tolist() == [5.0] * 4  # N is another number in each call
    assert Pair(three, three).y is three
    assert Pair(three).y is None
    assert all(isinstance(p.annotation, str) for p in inspect.signature(first).parameters.values()), "as written"
    for wrong in (
        lambda: first(three, four, most=3), lambda: first(three, three, most=2), lambda: first(three, three, most="3"),
        lambda: first(three, three[None], most=3), lambda: first(three.int(), three, most=3), lambda: Pair(three, four),
        lambda: Pair(None),
    ):  # fmt: skip
        shapes.begin()
        with pytest.raises(BeartypeCallHintViolation):
            wrong()


def test_the_first_calls_in_each_test_are_checked_and_at_night_all(monkeypatch):
    three, four = torch.ones(3), torch.ones(4)
    monkeypatch.setattr(shapes, "_always", False)
    for _ in range(shapes.CALLS):
        first(three, three, most=3)
    assert first(three, three, most=2).tolist() == [4.0] * 2
    monkeypatch.setattr(shapes, "_always", True)
    with pytest.raises(BeartypeCallHintViolation):
        first(three, three, most=2)
    monkeypatch.setattr(shapes, "_always", False)
    shapes.begin()
    with pytest.raises(BeartypeCallHintViolation):
        first(three, four, most=3)


def test_the_mathematics_is_decorated():
    three, four = torch.zeros(3), torch.zeros(4)
    assert distillation.teacher_gap(three, teacher_logprobs=three).tolist() == [0.0] * 3
    with pytest.raises(BeartypeCallHintViolation):
        distillation.teacher_gap(three, teacher_logprobs=four)
    with pytest.raises(BeartypeCallHintViolation):
        capped.capped_weight(three, cap="5")
