"""What rollouts' tables say that an objective did to each token, against float64 and formulas written here.

The oracle knows the model's weights before each optimizer step, the completions and their advantages. It computes
log-probs by a plain forward pass in float64, and from them ratios, weights and coefficients.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import learner_help as help
import trew
from trew.config import parse
from trew.errors import NumericsError
from trew.eval import correct_by
from trew.rollout import StepRollouts
from trew.runs.rollouts import EFFECTS, Sampler, write_rollouts
from trew.training import loop
from trew.training.attempt import Attempt
from trew.training.record import advantages_of
from trew.types import Group, Prompt, Rollout, Score, ScoredGroup, Span, TrainingSample, Turn

# Completions by group: numbers of sampled tokens and of tool output in turn, and the reward.
GROUPS = (
    (((6,), 1.0), ((3,), 0.0), ((9,), 0.25)),
    (((4,), 0.5), ((5,), 0.5)),  # silent in objectives that compare within groups
    (((3, 4, 2), 0.0), ((5,), 1.0)),  # two turns with four tokens of tool output in between
    (((4,), None), ((7,), 0.0), ((2,), 1.0)),  # one without a verdict
)
LONGEST = 16


# ------------------------------------------------------------------------------------------------------- the oracle


def clip(low: float, high: float) -> Callable[..., np.ndarray]:
    return lambda r, a: np.where(((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low)), 0.0, 1.0)


def tent(r: np.ndarray, a: np.ndarray) -> np.ndarray:
    """trw-triangular: from 1 at r = 1 to 1/2 at 1.28 where A > 0, at 0.8 where A < 0, and 0 beyond."""
    up = np.where(r > 1.28, 0.0, 1 - 0.5 * np.maximum(r - 1, 0) / 0.28)
    down = np.where(r < 0.8, 0.0, 1 - 0.5 * np.maximum(1 - r, 0) / 0.2)
    return np.where(a > 0, up, np.where(a < 0, down, 1.0))


def sequence_mean(lengths: Sequence[int], own: int) -> float:
    return 1 / (sum(n > 0 for n in lengths) * own)


def token_mean(lengths: Sequence[int], own: int) -> float:
    return 1 / sum(lengths)


def constant(lengths: Sequence[int], own: int) -> float:
    return 1 / (sum(n > 0 for n in lengths) * LONGEST)


@dataclass(frozen=True)
class Oracle:
    """An objective's own formulas."""

    weight: Callable[..., np.ndarray]
    share: Callable[[Sequence[int], int], float]
    of_sequence: bool = False  # the ratio is the geometric mean over the completion
    beta: float = 0.0  # of k3 to the reference, in the loss
    mixed_only: bool = False  # groups that are all right or all wrong carry no loss


CASES = {
    "grpo": ("grpo", {"beta": 0.0}, Oracle(clip(0.2, 0.2), sequence_mean)),
    "dapo": ("dapo", {}, Oracle(clip(0.2, 0.28), token_mean, mixed_only=True)),
    "gspo": ("gspo", {"eps_low": 0.3, "eps_high": 9.0}, Oracle(clip(0.3, 9.0), sequence_mean, of_sequence=True)),
    "gtpo": ("gtpo", {}, Oracle(clip(0.2, 0.28), token_mean, mixed_only=True)),
    "trw": ("trw-triangular", {}, Oracle(tent, sequence_mean)),
    "dr-grpo": ("dr-grpo", {}, Oracle(clip(0.2, 0.2), constant)),
    "kl": ("grpo", {"beta": 0.5}, Oracle(clip(0.2, 0.2), sequence_mean, beta=0.5)),
}


# ------------------------------------------------------------------------------------------------- a step of training


class Step:
    """A step on ``GROUPS`` with a real learner: what ``loop.update`` reads of a run, and the weights that it saw."""

    def __init__(self, case: str, *, stale: bool, fail_at: int = 0, **learner: Any) -> None:
        preset, settings, self.oracle = CASES[case]
        self.objective = trew.preset(preset, **settings)
        self.config = parse({"model": "m", "rollout": {"max_tokens": LONGEST}, "learner": learner})
        self.plan = SimpleNamespace(
            config=self.config, objective=self.objective, sampler=Sampler("embedded", "float32"),
            rewards=SimpleNamespace(rewards=[SimpleNamespace(name="r", weight=1.0)]), right=correct_by("r"),
        )  # fmt: skip
        self.start = help.model()
        reference = help.model(seed=5) if self.oracle.beta else None
        self.reference: Any = copy.deepcopy(reference)
        self.policy = help.learner(copy.deepcopy(self.start), self.objective, reference=reference, lr=2e-3, **learner)
        self.policy.version = 3
        self.before: Any = None
        self.seen: list[tuple[Any, list[TrainingSample]]] = []  # weights and samples of each applied optimizer step
        self._watch(fail_at)
        self.groups = tuple(self._group(g, shape, stale) for g, shape in enumerate(GROUPS))
        self.dropped = self._group(9, GROUPS[0], stale)
        self.attempt = Attempt(1, 3, rollouts=StepRollouts(self.groups, (self.dropped, *self.groups)))
        with contextlib.suppress(NumericsError):
            loop.update(self, self.attempt)  # type: ignore[arg-type]

    critic = None

    def learning(self) -> None:
        pass

    def _watch(self, fail_at: int) -> None:
        policy, accumulate, apply = self.policy, self.policy.accumulate, self.policy.apply

        def seen(samples: Any, batch: Any) -> Any:
            self.before = copy.deepcopy(policy.model).double(), samples
            return accumulate(samples, batch)

        def applied(done: Any) -> Any:
            if len(self.seen) + 1 == fail_at:
                raise NumericsError("the gradient norm is nan", names="0", quantity="grad_norm", samples=[0])
            out = apply(done)
            self.seen.append(self.before)
            return out

        policy.accumulate, policy.apply = seen, applied  # type: ignore[method-assign]

    def _group(self, g: int, shape: Any, stale: bool) -> ScoredGroup:
        prompt = np.random.default_rng(g).integers(0, 256, 5)
        made = tuple(self._rollout(100 * g + i, prompt, pieces, stale) for i, (pieces, _) in enumerate(shape))
        scores = tuple(Score(v, "scored" if v is not None else "timeout", {"r": v}) for _, v in shape)
        return ScoredGroup(Group(Prompt(f"p/{g}", text="q"), made), scores)

    def _rollout(self, seed: int, prompt: np.ndarray, pieces: Sequence[int], stale: bool) -> Rollout:
        """Turns of random tokens with the log-probs of the first weights; stale ones are of others nearby."""
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, 256, sum(pieces))
        known = logprobs(self.start, TrainingSample(prompt, ids, 0))
        drawn = (known + (0.3 * rng.standard_normal(len(known)) if stale else 0)).astype(np.float32)
        turns, at = [], 0
        for context, sampled in zip((0, *pieces[1::2]), pieces[::2], strict=True):
            start = at + context
            part = slice(start, start + sampled)
            turns.append(Turn(
                ids[at:start] if turns else prompt, ids[part], drawn[part], drawn[part],
                rng.uniform(0.1, 2, sampled).astype(np.float32), (Span(2 if stale else 3, 0, sampled),), "t", "stop",
            ))  # fmt: skip
            at = start + sampled
        return Rollout(tuple(turns))

    def table(self, folder: Path) -> list[dict[str, Any]]:
        """The step's table as a run writes it, read back: the rows of the groups that were trained on."""
        assert self.attempt.effects is not None
        write_rollouts(
            folder / "t.parquet", (self.dropped, *self.groups), step=1, advantages=advantages_of(self.attempt),
            trained_on=self.groups, effects=self.attempt.effects.columns(),
        )  # fmt: skip
        rows = pq.read_table(folder / "t.parquet").to_pylist()
        assert all(row[name] is None for row in rows[:3] for name in EFFECTS), "of the group that was dropped"
        return rows[3:]

    def expected(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
        """What the columns must be, from the weights before the last optimizer step on each completion."""
        masks = [self._mask(row) for row in rows]
        found: list[dict[str, np.ndarray]] = [{} for _ in rows]
        samples = [sample for _, group in self.seen for sample in group]
        order = {id(sample): i % len(rows) for i, sample in enumerate(samples)}
        for weights, members in self.seen:
            lengths = [int(masks[order[id(sample)]].sum()) for sample in members]
            for sample, own in zip(members, lengths, strict=True):
                i = order[id(sample)]
                found[i] = self._of(weights, sample, rows[i], masks[i], lengths, own)
        return found

    def _mask(self, row: dict[str, Any]) -> np.ndarray:
        scores = [value for _, value in GROUPS[row["trained_group"]]]
        right = [value is not None and value > 0.5 for value in scores]
        keeps = (0 < sum(right) < len(right)) or not self.oracle.mixed_only
        return np.array(row["sampled"]) & (row["score"] is not None and keeps)

    def _of(
        self, weights: Any, sample: TrainingSample, row: Any, mask: np.ndarray, lengths: Sequence[int], own: int
    ) -> dict[str, np.ndarray]:
        oracle, nothing = self.oracle, np.full(len(mask), np.nan)
        if not own:
            return dict.fromkeys(EFFECTS[:3], nothing)
        now, old = logprobs(weights, sample), np.array(row["sampling_logprobs"], float)
        advantages = np.array(row["advantages"], float)
        share = oracle.share(lengths, own)
        if not oracle.beta and not advantages.any():  # left out: it has no gradient
            return {"final_ratios": nothing, "weights": nothing, "coefficients": np.where(mask, 0.0, np.nan)}
        log_r = np.where(mask, now - old, 0.0)
        r = np.exp(np.full(len(mask), log_r.sum() / own) if oracle.of_sequence else log_r)
        w = oracle.weight(r, advantages)
        c = share * w * r * advantages
        if oracle.beta:
            c = c - share * oracle.beta * (1 - np.exp(logprobs(self.reference.double(), sample) - now))
        values = {"final_ratios": r, "weights": w, "coefficients": c}
        return {name: np.where(mask, value, np.nan) for name, value in values.items()}


def logprobs(net: Any, sample: TrainingSample) -> np.ndarray:
    with torch.no_grad():
        return help.plain_logprobs(net, sample).double().numpy()


def numbers(row: dict[str, Any], name: str, count: int) -> np.ndarray:
    return np.full(count, np.nan) if row[name] is None else np.array(row[name], float)


def compare(step: Step, rows: Sequence[dict[str, Any]]) -> None:
    for row, wanted in zip(rows, step.expected(rows), strict=True):
        for name, values in wanted.items():
            found = numbers(row, name, len(values))
            # Weights of hard clips are 0 or 1: a ratio within rounding of the edge would be the only excuse.
            np.testing.assert_allclose(found, values, rtol=2e-4, atol=2e-6, err_msg=f"{row['uid']} {name}")


# -------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("case", CASES)
def test_the_last_optimizer_step_on_each_token_is_recorded(tmp_path, case):
    """Stale rollouts, two minibatches of two groups, three passes."""
    step = Step(case, stale=True, minibatch_prompts=2, inner_updates=3, microbatch_tokens=32)
    rows = step.table(tmp_path)
    assert len(step.seen) == 6
    compare(step, rows)
    seen = np.concatenate([numbers(row, "weights", len(row["token_ids"])) for row in rows])
    assert (np.nanmin(seen), np.nanmax(seen)) == (0, 1) or case == "trw", "a test that never clips would show little"


def test_the_first_step_on_fresh_completions_has_a_ratio_of_1(tmp_path):
    rows = Step("grpo", stale=False).table(tmp_path)
    ratios = np.concatenate([numbers(row, "final_ratios", len(row["token_ids"])) for row in rows])
    assert set(ratios[~np.isnan(ratios)]) == {1.0}
    best = [row for row in rows if row["score"] == 1.0]
    assert len(best) == 3
    for row in best:  # 9 of the 10 completions have a verdict
        assert row["coefficients"] == pytest.approx([a / (9 * len(row["advantages"])) for a in row["advantages"]])


def test_what_has_no_value_is_null(tmp_path):
    rows = {(row["uid"], row["sample"]): row for row in Step("grpo", stale=True).table(tmp_path)}
    silent, unjudged, several = rows["p/1", 0], rows["p/3", 0], rows["p/2", 0]
    assert silent["coefficients"] == [0.0] * 4
    assert silent["final_ratios"] is silent["weights"] is None, "it was not run"
    assert all(unjudged[name] is None for name in EFFECTS)
    for name in EFFECTS[:3]:
        assert (
            [value is not None for value in several[name]]
            == several["sampled"]
            == [True] * 3 + [False] * 4 + [True] * 2
        )
    assert all(row["ref_logprobs"] is None for row in rows.values()), "there is no reference"


def test_the_references_log_probs_are_recorded(tmp_path):
    step = Step("kl", stale=True)
    for row, sample in zip(step.table(tmp_path), step.seen[0][1], strict=True):
        wanted = np.where(row["sampled"], logprobs(step.reference.double(), sample), np.nan)
        np.testing.assert_allclose(numbers(row, "ref_logprobs", len(wanted)), wanted, atol=1e-5)


@pytest.mark.parametrize(("fail_at", "applied"), [(1, 0), (4, 3)])
def test_an_update_that_is_not_applied_leaves_no_trace(tmp_path, fail_at, applied):
    """The values of the last one before it stay, and completions without any have none."""
    step = Step("grpo", stale=True, minibatch_prompts=2, inner_updates=2, fail_at=fail_at)
    rows = step.table(tmp_path)
    assert len(step.seen) == applied
    if not applied:
        assert all(row[name] is None for row in rows for name in EFFECTS)
    else:
        compare(step, rows)


def test_what_is_recorded_is_what_the_gradient_was_made_of(tmp_path):
    """To the bit: the coefficients in the table are those that the backward pass got."""
    step = Step("dr-grpo", stale=True)
    step.policy.model.load_state_dict(step.start.state_dict())
    given: list[torch.Tensor] = []
    runner = step.policy._runner
    inner = runner.accumulate

    def watched(pack: Any, rule: Any, **how: Any) -> None:
        def kept(where: slice, *values: Any) -> Any:
            slope, other = rule(where, *values)
            given.append(-slope)
            return slope, other

        inner(pack, kept, **how)

    runner.accumulate = watched  # type: ignore[method-assign]
    attempt = Attempt(1, 3, rollouts=step.attempt.rollouts)
    step.policy.version = 3
    loop.update(step, attempt)  # type: ignore[arg-type]
    assert attempt.effects is not None
    recorded = np.concatenate(attempt.effects.columns()["coefficients"])
    pushed = recorded[~np.isnan(recorded) & (recorded != 0)]
    used = torch.cat(given).numpy()
    assert sorted(pushed.tolist()) == sorted(used[used != 0].tolist())
