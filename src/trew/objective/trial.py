"""Tries an objective of a user's on a small step before anything is loaded: what would fail, or learn something else
than it says, in the middle of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..utils.preserved import preserved_state
from .batch import TokenBatch
from .component import SCOPES, Component
from .kinds import ONE, SEVERAL
from .objective import LossOutput, Objective

_MADE = {"returns", "denominators", "token_weights", "mean_entropy", "prepared_by", "padded_mask"}
"""Fields of a batch that ``prepare`` adds."""
_FIELDS = {f.name for f in dataclasses.fields(TokenBatch) if f.default is None} - _MADE | {"states"}
_GROUPS, _EACH, _WIDTH = 2, 4, 5
_REWARDS = ((1.0, 0.0, 0.5, 0.0), (0.0, 1.0, 0.25, 0.75))
_LENGTHS = (5, 1, 3, 4, 2, 5, 4, 3)


def problems_of_components(objective: Objective, located: Callable[[BaseException], str]) -> list[str]:
    """What is wrong with the components by themselves, each under its axis; ``located`` says where in the user's file
    an exception came from, and what it says."""
    if not isinstance(objective.name, str) or not objective.name:
        return [f"name: got {objective.name!r}, accepts a text that names the objective"]
    found = []
    for axis in (*ONE, *SEVERAL):
        chosen = getattr(objective, axis)
        for component in chosen if axis in SEVERAL else (chosen,):
            try:
                problem = _of_component(component)
            except Exception as error:
                problem = f"its equation, needs or scope failed: {located(error)}"
            if problem:
                found.append(f"{axis} = {type(component).__name__}: {problem}")
    return found


def _of_component(component: Any) -> str:
    """What is wrong with a component beyond its kind, which the objective has checked; empty if nothing is."""
    if not dataclasses.is_dataclass(component) or not type(component).__dataclass_params__.frozen:
        return "is no frozen dataclass, and objectives are compared by value; write @dataclass(frozen=True) above it"
    if not isinstance(equation := component.equation(), str) or not equation.strip():
        return f"equation() returned {equation!r}, accepts a line of text with its numbers filled in"
    if not isinstance(component.needs, tuple) or (wrong := [n for n in component.needs if n not in _FIELDS]):
        got = wrong[0] if isinstance(component.needs, tuple) else component.needs
        return f"needs: got {got!r}, accepts a tuple of fields that a batch may have: {', '.join(sorted(_FIELDS))}"
    if component.scope not in SCOPES:
        return f"scope: got {component.scope!r}, accepts {', '.join(map(repr, SCOPES))}"
    return ""


def problem_on_a_step(objective: Objective, located: Callable[[BaseException], str]) -> str:
    """What goes wrong where the objective is computed on a step of 8 completions of different lengths that has all that
    a batch may have; empty if nothing does."""
    tried = f"tried on a step of {_GROUPS * _EACH} completions"
    try:
        with preserved_state(), torch.inference_mode(False), torch.enable_grad():
            batch = objective.prepare(_step(objective))
            output = objective.loss(batch)
            problem = _not_finite(objective, batch, output) or _beyond_scope(objective, batch, output)
            output.loss.backward()
    except DataError as error:  # our own checks of what components return, which name the component
        return f"{tried}: {error}"
    except Exception as error:
        return f"{tried}: {located(error)}"
    return f"{tried}: {problem}" if problem else ""


def _not_finite(objective: Objective, batch: TokenBatch, output: LossOutput) -> str:
    """The first component whose values are not finite."""
    for axes, values in _computed(objective, batch, output):
        if values is not None and not torch.where(batch.mask, values, 0.0).isfinite().all():
            return f"{_named(objective, axes)} gave numbers that are not finite"
    return "" if output.loss.isfinite() else "the loss is not finite"


def _computed(
    objective: Objective, batch: TokenBatch, output: LossOutput
) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
    """What each of an objective's parts has computed, per token, in the order in which they act."""
    yield ("advantage", "adjust", "shape"), batch.advantages
    yield ("aggregate",), batch.token_weights
    yield ("ratio", "correction"), output.packed["ratio"]
    yield ("correction",), output.packed.get("correction")
    yield ("weight",), output.packed["weight"]
    yield ("divergence", "nll"), output.packed["coefficients"]


def _beyond_scope(objective: Objective, batch: TokenBatch, output: LossOutput) -> str:
    """The first component of the loss that computes something else where it sees less of the step, although its scope
    says that it may: with it, the gradient would depend on how a step is cut."""
    if objective.sees_step:
        return ""
    tokens = torch.arange(len(batch.mask))
    completions = [batch.select(torch.tensor([i])) for i in range(batch.size)]
    if axes := _differing(objective, batch, output, completions, tokens):
        return (
            f"{_named(objective, axes)} gave other numbers for completions one by one than for all together, so that "
            "it must see more than its scope says; declare scope = 'batch', or 'group'"
        )
    if objective.scope == "token":
        order = torch.cat([tokens[::2], tokens[1::2]])  # every second token, so that all completions are cut
        halves = [batch.select_tokens(tokens[::2]), batch.select_tokens(tokens[1::2])]
        if axes := _differing(objective, batch, output, halves, order):
            return (
                f"{_named(objective, axes)} gave other numbers for every second token than for whole completions, so "
                "that it must see more than its scope says; declare scope = 'sequence'"
            )
    return ""


def _differing(
    objective: Objective, batch: TokenBatch, output: LossOutput, parts: Sequence[TokenBatch], order: Tensor
) -> tuple[str, ...]:
    """The first axes whose numbers are others for ``parts`` than in ``output``, which is of all tokens; ``order`` has
    the numbers of the parts' tokens."""
    outputs = [objective.loss(part) for part in parts]
    for axes, name in (
        (("ratio", "correction"), "ratio"), (("correction",), "correction"), (("weight",), "weight"),
        (("divergence", "nll"), "coefficients"),
    ):  # fmt: skip
        if name not in output.packed:
            continue
        whole = torch.where(batch.mask, output.packed[name], 0.0)[order]
        apart = torch.where(batch.mask[order], torch.cat([one.packed[name] for one in outputs]), 0.0)
        # Coefficients are as small as the average makes them.
        if not torch.allclose(whole, apart, 1e-4, 1e-5 * float(whole.abs().max())):
            return axes
    return ()


def _named(objective: Objective, axes: tuple[str, ...]) -> str:
    """The components of these axes, by their classes."""
    acting: list[tuple[str, Component]] = [(axis, c) for axis, c in objective.components() if axis in axes]
    return " or ".join(f"{axis} = {type(c).__name__}" for axis, c in acting) or axes[0]


def _step(objective: Objective) -> TokenBatch:
    """A step with everything that an objective may read, without a random generator: two groups of four completions,
    one of which has one token. The policy has moved, further from some completions than from others."""
    rows = _GROUPS * _EACH
    number = torch.arange(rows * _WIDTH, dtype=torch.float32).reshape(rows, _WIDTH)
    # Fractional multiples of irrational numbers: distinct, evenly spread over [0, 1).
    spread, other = number * 0.618034 % 1, number * 0.414214 % 1
    mask = torch.arange(_WIDTH) < torch.tensor(_LENGTHS)[:, None]
    logprobs = (-0.1 - 3 * spread).requires_grad_()
    old = -0.1 - 3 * spread - 0.6 * (other - 0.5)
    old = torch.where(old > 0, 0.0, old)
    entropies = 0.1 + 2 * other
    rewards = torch.tensor(_REWARDS).flatten()
    ends = [[(length, float(reward))] for length, reward in zip(_LENGTHS, rewards, strict=True)]
    given: dict[str, Any] = {"advantages": rewards - 0.5} if "advantages" in objective.needs else {}
    return TokenBatch.from_padded(
        logprobs=logprobs, mask=mask, group_ids=torch.arange(rows) // _EACH, rewards=rewards,
        old_logprobs=old, rollout_logprobs=old - 0.05 * spread, ref_logprobs=old - 0.2 * other,
        teacher_logprobs=old - 0.3 * spread,
        # An entropy bonus trains them.
        entropies=entropies.requires_grad_() if objective.entropy_bonus.active else entropies,
        values=spread - 0.5, score_norms=0.1 + spread, step_rewards=ends, turns=ends,
        states=[[i // _EACH] for i in range(rows)], correct=rewards == 1, truncated=torch.arange(rows) == 2,
        baselines=torch.full((rows,), 0.25), max_length=4096, **given,
    )  # fmt: skip
