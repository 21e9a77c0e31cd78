"""What components of one's own return and change: of another shape it would be read at the wrong places."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import trew
from trew.errors import DataError
from trew.objective.adjust import Adjust
from trew.objective.advantage import Advantage
from trew.objective.aggregate import Aggregate
from trew.objective.correction import Correction
from trew.objective.divergence import Divergence
from trew.objective.filter import GroupFilter, LossMask, TokenMask
from trew.objective.ratio import Ratio
from trew.objective.shaping import Shape
from trew.objective.weight import Weight

GRPO = trew.preset("grpo", beta=0.0)
N, S = 12, 4


def own(kind: type, returned: Any, /, **members: Any) -> Any:
    """A component of this kind whose call returns ``returned``."""
    made = type("Own", (kind,), {"__call__": lambda *_, **__: returned, "equation": lambda _: "own"} | members)
    return dataclass(frozen=True)(made)()


def batch(logprobs: torch.Tensor | None = None) -> trew.TokenBatch:
    old = -0.5 - torch.rand(S, N // S, generator=torch.Generator().manual_seed(0))
    return trew.TokenBatch.from_padded(
        logprobs=old + 0.1 if logprobs is None else logprobs, old_logprobs=old, mask=torch.ones_like(old),
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]), group_ids=torch.tensor([0, 0, 1, 1]),
    )  # fmt: skip


def divergence(value: Any, derivative: Any) -> Divergence:
    return own(Divergence, None, value=lambda *_: value, derivative=lambda *_: derivative)


TOKENS, COLUMN, SEQUENCES = torch.ones(N), torch.ones(N, 1), torch.ones(S)

OF_ANOTHER_SHAPE = {
    "a weight in a column": {"weight": own(Weight, COLUMN)},
    "a weight of sequences": {"weight": own(Weight, SEQUENCES)},
    "a surrogate in a column": {"weight": own(Weight, TOKENS, surrogate=lambda *_, **__: COLUMN)},
    "a ratio in a column": {"ratio": own(Ratio, COLUMN)},
    "a correction in a column": {"correction": (own(Correction, COLUMN),)},
    "a divergence in a column": {"divergence": (divergence(COLUMN, TOKENS),)},
    "a derivative in a column": {"divergence": (divergence(TOKENS, COLUMN),)},
    "advantages of tokens": {"advantage": own(Advantage, TOKENS)},
    "advantages of sequences": {"advantage": own(Advantage, SEQUENCES, per_token=True)},
    "advantages in a column": {"advantage": own(Advantage, torch.ones(S, 1))},
    "changed advantages in a column": {"adjust": (own(Adjust, COLUMN),)},
    "token weights in a column": {"aggregate": own(Aggregate, COLUMN)},
    "a term of the reward in a column": {"shape": (own(Shape, torch.ones(S, 1)),)},
    "a filter of tokens": {"keep": (own(GroupFilter, TOKENS.bool()),)},
    "a filter of numbers": {"keep": (own(GroupFilter, SEQUENCES),)},
    "a loss mask of one": {"prune": (own(LossMask, torch.tensor([True])),)},
    "a token mask in a column": {"select": (own(TokenMask, COLUMN.bool()),)},
}


@pytest.mark.parametrize("choice", OF_ANOTHER_SHAPE.values(), ids=OF_ANOTHER_SHAPE)
def test_another_shape_is_refused(choice):
    with pytest.raises(DataError, match=r"Own: returned (float32|bool) of shape .*, accepts .*for each"):
        GRPO.replace(**choice).loss(batch())


def test_advantages_of_tokens_are_declared():
    """Without the declaration, the first S of them were taken for those of the S sequences."""
    values = torch.arange(N).double()
    with pytest.raises(DataError, match="per_token = True"):
        GRPO.replace(advantage=own(Advantage, values)).prepare(batch())
    declared = GRPO.replace(advantage=own(Advantage, values, per_token=True)).prepare(batch())
    assert declared.advantages is not None
    assert declared.advantages.tolist() == values.tolist()


def test_one_number_counts_for_all():
    half = GRPO.replace(weight=own(Weight, 0.5)).loss(batch())
    assert half.weights.tolist() == torch.full((S, N // S), 0.5).tolist()
    assert half.metrics["weight"] == (6.0, 12.0)


class _Undetached(Weight):
    """w = r, computed from the policy's log-probs with their gradient."""

    def __call__(self, ratio, *, advantages, batch):
        return torch.exp(batch.logprobs - batch.old)

    def equation(self):
        return "w = r"


class _Square(Divergence):
    """A pull whose value has a gradient, beside its derivative."""

    def value(self, batch):
        return 0.5 * (batch.logprobs - batch.old) ** 2

    def derivative(self, batch):
        return batch.logprobs - batch.old

    def equation(self):
        return "log(r)^2 / 2"


class _Confident(Adjust):
    """Advantages that depend on the policy."""

    def __call__(self, advantages, *, batch):
        return advantages * batch.logprobs.exp()

    def equation(self):
        return "A pi"


UNDETACHED = {"weight": _Undetached(), "divergence": (_Square(),), "adjust": (_Confident(),)}


@pytest.mark.parametrize("axis", UNDETACHED)
def test_no_gradient_goes_through_components(axis):
    """The gradient is that of the coefficients, also where a component of one's own has not detached what it reads."""
    logprobs = (-torch.rand(S, N // S, generator=torch.Generator().manual_seed(1))).requires_grad_()
    out = GRPO.replace(**{axis: UNDETACHED[axis]}).loss(batch(logprobs))
    out.loss.backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -out.coefficients)
    assert not out.weights.requires_grad


def test_no_gradient_goes_through_advantages_that_are_given():
    logprobs = (-torch.rand(S, N // S, generator=torch.Generator().manual_seed(1))).requires_grad_()
    given = batch(logprobs)
    out = GRPO.loss(given.replace(advantages=given.logprobs.exp()))
    out.loss.backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -out.coefficients)


IN_PLACE = {
    "ratio": {"weight": own(Weight, None, __call__=lambda self, ratio, **_: ratio.clamp_(max=1.0))},
    "advantages": {"weight": own(Weight, None, __call__=lambda self, ratio, advantages, batch: advantages.mul_(0.5))},
    "rewards": {"keep": (own(GroupFilter, None, __call__=lambda self, batch: batch.rewards.sub_(0.5) > -1),)},
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_component_that_changes_what_it_is_given_is_refused(name):
    """The others, and the next call, would read something else than the caller gave."""
    with pytest.raises(DataError, match=f"^{name}: was changed in place by a component"):
        GRPO.replace(**IN_PLACE[name]).loss(batch())


def test_tensors_without_a_count_of_changes_are_accepted():
    with torch.inference_mode():
        given = batch()
    assert GRPO.loss(given).loss.isfinite()


def test_an_unknown_scope_is_refused_where_it_is_declared():
    """Its loss ended in 'tuple.index(x): x not in tuple'."""
    with pytest.raises(TypeError, match=r"^Own: got scope = 'sequences', accepts 'token', 'sequence', "):
        own(Weight, 1.0, scope="sequences")


class _Silent(Weight):
    """A weight of one's own without a line for the equation."""

    def __call__(self, ratio, *, advantages, batch):
        return ratio


def _plain(ratio, *, advantages, batch):
    return ratio


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"weight": _plain}, r"^weight: got <function _plain .*, accepts an object of a class derived from "
         r"trew\.objective\.weight\.Weight: derive a class from it$"),
        ({"weight": _Undetached}, r"^weight: got <class .*Undetached.*\.Weight: call the class$"),
        ({"weight": _Confident()}, r"^weight: got .*, accepts an object of a class derived from .*Weight"),
        ({"weight": _Silent()}, r"^weight: got .*: its class has no equation\(self\), which returns"),
        ({"adjust": (_plain,)}, r"^adjust: got <function _plain .* derived from trew\.objective\.adjust\.Adjust"),
        ({"adjust": _Confident()}, r"^adjust: got .*, accepts a tuple of components, \(\) for none$"),
        ({"nll": 0.1}, r"^nll: got 0.1, accepts an object of a class derived from .*CorrectLikelihood"),
    ],
)  # fmt: skip
def test_what_is_no_component_of_its_axis_is_refused(choices, said):
    """It was accepted: repr ended in 'function' object has no attribute 'equation', the equation had a line None."""
    made = copy.copy(GRPO)
    for axis, given in choices.items():
        object.__setattr__(made, axis, given)  # past the hints, which tests check and programs do not
    with pytest.raises(ValueError, match=said):
        made.__post_init__()


def test_a_part_that_no_objective_has_is_refused_with_the_nearest():
    """It ended in a TypeError of __init__()."""
    said = r"^wieght: is no part of an objective \(did you mean 'weight'\?\); accepts name, advantage, "
    with pytest.raises(ValueError, match=said):
        GRPO.replace(wieght=_Undetached())


def test_a_component_of_one_s_own_that_says_its_equation_is_in_the_objective_s():
    assert "weight     w = r" in repr(GRPO.replace(weight=_Undetached()))
