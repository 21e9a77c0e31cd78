"""``SftProgram``: the training of a policy on demonstrations or preference pairs. What is held out is measured by its
loss."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import NumericsError
from ..eval import wilson
from ..learner import Policy
from ..objective.preferred import PreferenceWeight
from ..objective.segments import segment_sum
from ..rollout import StepRollouts
from ..types import ScoredGroup, TrainingSample
from ..utils.shapes import Count
from . import guards
from .planning import Plan
from .policy_program import PolicyProgram
from .policy_state import LearnerCounters, PolicyState, StatefulParts
from .remembered import Shapes

RESAMPLES = 1000
"""Draws of the bootstrap behind the interval of a held-out loss."""


@dataclass
class SftState(PolicyState):
    """The state of this training besides weights and optimizer."""

    best_loss: float | None = None  # of an evaluation after training began


@dataclass(frozen=True, slots=True)
class _Interval:
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class _SavedLoss:
    """The result of :func:`held_out_loss`, or of :func:`held_out_pairs`."""

    loss: _Interval
    rows: Count
    tokens: Count
    seconds: float
    perplexity: float | None = None
    accuracy: _Interval | None = None
    margin: float | None = None


SHAPES = Shapes(LearnerCounters, SftState, StatefulParts, _SavedLoss)


class SftProgram(PolicyProgram):
    """A :class:`PolicyProgram` whose rollouts are rows of data."""

    @property
    def remembers(self) -> Shapes:
        return SHAPES

    def evaluate(self) -> dict[str, Any]:
        """Measures the mean loss of the held-out rows, per token or per pair; logs a row, updates the best step."""
        state, start = self.state, time.monotonic()
        assert isinstance(state, SftState)
        rows = self.plan.demonstrations
        assert rows is not None
        samples = samples_of(rows.held)
        # Ranks compute together: one that is interrupted alone would leave the others waiting.
        alone = self.team.orders is None
        stoppable = self.interrupts.anywhere("during an evaluation; continue with --resume")
        name = f"evaluating after step {state.step}" if state.step else "evaluating before training"
        calm = stoppable if alone else contextlib.nullcontext()
        with calm, guards.memory(self, lambda: "evaluating"), self.display.bar(name, len(samples)) as bar:
            self.team.measure(StepRollouts(tuple(rows.held), ()))
            logprobs = self.policy.logprobs(samples, progress=bar.advance)
            ref = reference_logprobs(self.plan, self.policy, samples)
        # Demonstrations have a loss by token; pairs, one by pair.
        if ref is None:
            found = held_out_loss(logprobs.numpy(), samples, seed=self.config.seed)
        else:
            found = held_out_pairs(self.plan, logprobs - ref, samples)
        found |= {"rows": len(rows.held), "seconds": time.monotonic() - start}
        loss = found["loss"]
        # Strictly better: of equal evaluations the earliest stays the best. Step 0 has no checkpoint.
        if state.step and (state.best_loss is None or loss["mean"] < state.best_loss):
            state.best_step, state.best_loss = state.step, loss["mean"]
        row = {
            "step": state.step, "eval_loss": loss["mean"], "eval_loss_low": loss["low"], "eval_loss_high": loss["high"],
            "eval_n": found["rows"],
        }  # fmt: skip
        if ref is None:
            row["eval_perplexity"] = found["perplexity"]
        else:
            row |= {"eval_preference_accuracy": found["accuracy"]["mean"], "eval_preference_margin": found["margin"]}
        self.folder.log(row)
        self.trackers.log(state.step, row)
        self.display.row(row)
        return found


def samples_of(rows: Sequence[ScoredGroup]) -> list[TrainingSample]:
    """Rows as the learner reads them."""
    return [
        TrainingSample(r.prompt_ids, r.token_ids, g, r.sampled)
        for g, row in enumerate(rows)
        for r in row.group.rollouts
    ]


def held_out_loss(logprobs: np.ndarray, samples: Sequence[TrainingSample], *, seed: int) -> dict[str, Any]:
    """The mean of -log p over all answer tokens, in nats, with a percentile bootstrap interval over whole rows, whose
    tokens are not independent. Raises NumericsError if a log-prob is not finite."""
    # (N,) over all rows -> one array per sample, cut to its answers' tokens.
    ends = np.cumsum([len(sample.token_ids) for sample in samples])[:-1]
    parts = [part[s.predicted] for part, s in zip(np.split(logprobs.astype(np.float64), ends), samples, strict=True)]
    # By row: a row may be several samples, whose tokens are not independent.
    sums = np.zeros(max(s.group for s in samples) + 1)
    counts = np.zeros_like(sums)
    for sample, part in zip(samples, parts, strict=True):
        sums[sample.group] -= part.sum()
        counts[sample.group] += len(part)
    mean = float(sums.sum() / counts.sum())
    if not np.isfinite(mean):
        raise NumericsError("the held-out loss is not finite: the model's weights are broken")
    return {
        # exp() of more than 709 is infinite, which JSON cannot hold.
        "loss": _interval(sums, counts, seed=seed), "perplexity": float(np.exp(min(mean, 700.0))),
        "tokens": int(counts.sum()),
    }  # fmt: skip


def _interval(sums: np.ndarray, counts: np.ndarray, *, seed: int) -> dict[str, float | None]:
    """The mean over all counts, with a percentile bootstrap interval over whole rows; of one row, which says nothing
    about others, without one."""
    if len(sums) == 1:
        return {"mean": float(sums[0] / counts[0]), "low": None, "high": None}
    rng = np.random.default_rng(seed)
    # (RESAMPLES, rows) of indexes, drawn with replacement.
    draws = rng.integers(0, len(sums), (RESAMPLES, len(sums)))
    low, high = np.quantile(sums[draws].sum(1) / counts[draws].sum(1), [0.025, 0.975])
    return {"mean": float(sums.sum() / counts.sum()), "low": float(low), "high": float(high)}


def reference_logprobs(plan: Plan, policy: Policy, samples: Sequence[TrainingSample]) -> torch.Tensor | None:
    """The reference's log-probs of pairs, which their loss needs; None for demonstrations. All ranks call it."""
    return policy.logprobs(samples, reference=True) if plan.config.prefers else None


def held_out_pairs(plan: Plan, log_ratios: torch.Tensor, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """DPO's loss of pairs with a bootstrap interval over pairs, the share of them with a positive margin with its score
    interval, and the mean margin. Raises NumericsError if a log-ratio is not finite."""
    weight = plan.objective.weight
    assert isinstance(weight, PreferenceWeight)
    lengths = torch.tensor([len(s.token_ids) for s in samples])
    # Not by weight.margins(), which compares all completions with all: more memory than a run has for many pairs. An
    # answer is one turn, so that all of its tokens are compared.
    ids = torch.arange(len(samples)).repeat_interleave(lengths)
    z = weight.beta * segment_sum(log_ratios.double(), ids=ids, size=len(samples))
    # The chosen answer is the first of each pair, as in every row of preference data.
    found = (z[::2] - z[1::2]).numpy()
    if not np.isfinite(found).all():
        raise NumericsError("the held-out loss is not finite: the model's weights are broken")
    one = np.ones_like(found)
    return {
        # -log sigmoid(m) = log(1 + exp(-m)), without overflow.
        "loss": _interval(np.logaddexp(0.0, -found), one, seed=plan.config.seed),
        # No bootstrap: where all pairs are right, or none is, every draw is, and its interval would be a point.
        "accuracy": wilson(float((found > 0).sum()), len(found))._asdict(),
        "margin": float(found.mean()), "tokens": len(log_ratios),
    }  # fmt: skip
