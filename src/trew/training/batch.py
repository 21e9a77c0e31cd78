"""Converts scored groups to the tensors that the objective reads, and splits a step into minibatches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import Config, LearnerConfig
from ..errors import NumericsError, RewardError
from ..learner import Learner
from ..learner.critic import Critic
from ..objective import Objective, TokenBatch
from ..objective.batch import ReasoningSteps
from ..objective.turns import Turns, number_states
from ..rollout import StepRollouts
from ..rollout.sync import sampling
from ..types import Rollout, Score, TrainingSample
from .planning import Plan


def to_batch(plan: Plan, rollouts: StepRollouts) -> tuple[list[TrainingSample], TokenBatch]:
    """Converts the rollouts to train on to samples for the policy and one packed batch for the objective.

    Tokens that the policy did not choose stay in the stream and are masked. ``logprobs`` is NaN until the policy
    computes it, so that reading it too early shows. ``rollout_logprobs`` is None of demonstrations, and under top-p,
    top-k or min-p: the sampler renormalised after the cut, so its log-probs are not comparable with the policy's.
    """
    # Sample i of the step is entry i of everything below: groups in order, and rollouts within a group.
    flat = [
        (g, rollout, score)
        for g, scored in enumerate(rollouts.trained_on)
        for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True)
    ]
    made, scores = [rollout for _, rollout, _ in flat], [score for _, _, score in flat]
    samples = [TrainingSample(r.prompt_ids, r.token_ids, g, r.sampled) for g, r, _ in flat]
    lengths = torch.tensor([len(sample.token_ids) for sample in samples])
    rewards, weights = _rewards(plan, scores)
    right = plan.right
    # A temperature of 0 counts as cut, too: greedy decoding has no log-probs to compare.
    cut = plan.config.demonstrates or sampling(plan.config, 0, 0).truncates
    return samples, TokenBatch(
        # Of N tokens: logprobs, mask, sequence_ids, rollout_logprobs, entropies. Of S samples: group_ids, rewards,
        # correct, truncated, baselines.
        logprobs=torch.full((int(lengths.sum()),), float("nan")),
        mask=torch.from_numpy(np.concatenate([rollout.sampled for rollout in made])),
        sequence_ids=torch.arange(len(samples)).repeat_interleave(lengths),
        group_ids=torch.tensor([g for g, _, _ in flat]),
        rewards=rewards,
        reward_weights=weights,
        rollout_logprobs=None if cut else torch.from_numpy(np.concatenate([rollout.logprobs for rollout in made])),
        entropies=_entropies(made),
        # Unjudged (None) counts as not correct here; its reward is NaN, which keeps it out of all statistics.
        correct=torch.tensor([bool(right(score)) for score in scores]),
        truncated=torch.tensor([was_cut_off(rollout) for rollout in made]),
        baselines=_baselines(rollouts, [g for g, _, _ in flat]),
        max_length=plan.config.sampled_tokens,
        step_rewards=_step_rewards(plan, scores),
        turns=_turns(plan, made, scores),
    )


def was_cut_off(rollout: Rollout) -> bool:
    """Whether a limit of tokens cut off what the policy said. An episode whose turns are used up has said all of it."""
    return rollout.status == "truncated" and rollout.ending not in ("turns", "wrong_end")


def _entropies(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Per token (N,); None if an engine does not report them."""
    known = [values for rollout in rollouts if (values := rollout.entropies) is not None]
    return torch.from_numpy(np.concatenate(known)) if len(known) == len(rollouts) else None


def _baselines(rollouts: StepRollouts, groups: Sequence[int]) -> Tensor | None:
    if rollouts.baselines is None:
        return None
    return torch.tensor([rollouts.baselines[rollouts.trained_on[g].group.prompt.uid] for g in groups])


def _step_rewards(plan: Plan, scores: Sequence[Score]) -> ReasoningSteps | None:
    """The step rewards of all rollouts, if the objective reads them. Raises RewardError if there are none."""
    if "step_rewards" not in plan.objective.needs:
        return None
    flat = [(i, end, value) for i, score in enumerate(scores) for end, value in score.steps]
    if not flat and any(score.value is not None for score in scores):
        raise RewardError(
            f"objective {plan.config.objective.preset} learns from the steps of completions, but no reward scored any: "
            "a function returns a list of (end, value) for each completion, a reward model needs args.step_mark"
        )
    # One list each of the samples, ends and values in flat.
    sequences, ends, values = ([entry[k] for entry in flat] for k in range(3))
    return ReasoningSteps(torch.tensor(values, dtype=torch.float64), torch.tensor(sequences, dtype=torch.int64),
                 torch.tensor(ends, dtype=torch.int64))  # fmt: skip


def _turns(plan: Plan, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Turns | None:
    """The turns of all rollouts and what each earned, if the objective reads them; no states if a turn has none."""
    if "turns" not in plan.objective.needs:
        return None
    ends = [rollout.turn_ends for rollout in rollouts]
    rewards = [reward for own, score in zip(ends, scores, strict=True) for reward in turn_rewards(score, own)]
    states = [turn.state for rollout in rollouts for turn in rollout.turns]
    # Turns of each rollout (S,); below, rewards and ends are of all turns in order.
    counts = torch.tensor([len(own) for own in ends], dtype=torch.int64)
    return Turns(
        torch.tensor(rewards, dtype=torch.float64),
        torch.arange(len(ends)).repeat_interleave(counts),
        torch.tensor([end for own in ends for end in own], dtype=torch.int64),
        None if None in states else number_states(states),
    )


def turn_rewards(score: Score, ends: Sequence[int]) -> list[float]:
    """What each turn earned, given where turns end: the rewards of the steps within it. Without steps the last turn
    earned the whole value.

    >>> turn_rewards(Score(1.2, steps=((3, 0.2), (9, 1.0))), [3, 6, 9]), turn_rewards(Score(1.2), [3, 6, 9])
    ([0.2, 0.0, 1.0], [0.0, 0.0, 1.2])
    """
    rewards = [0.0] * len(ends)
    for end, value in score.steps or ((ends[-1], score.value or 0.0),):
        # A step that ends behind the last token is none that a reward can return.
        # bisect_left finds the turn in which the step ends.
        rewards[bisect_left(ends, end)] += value
    return rewards


def _rewards(plan: Plan, scores: Sequence[Score]) -> tuple[Tensor, Tensor | None]:
    """The combined rewards (S,); for an objective that normalises each reward separately, all rewards (S, K) with
    their weights (K,). NaN: not judged, or not applicable."""
    nan = float("nan")  # not 0: missing rewards must not enter a group's mean
    if not plan.objective.advantage.per_reward:
        return torch.tensor([nan if s.value is None else s.value for s in scores], dtype=torch.float32), None
    rows = [[nan if v is None else v for v in plan.rewards.each(s)] for s in scores]
    return torch.tensor(rows, dtype=torch.float32), torch.tensor([r.weight for r in plan.rewards.rewards])


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The data of one optimizer step: whole groups, with denominators and token weights for this minibatch."""

    samples: list[TrainingSample]
    batch: TokenBatch
    positions: list[int]  # of the samples in the whole step

    @contextmanager
    def named(self) -> Iterator[None]:
        """Renumbers the samples in a NumericsError raised inside: of the whole step instead of the minibatch."""
        try:
            yield
        except NumericsError as error:
            raise error.among(self.positions) from None


def minibatches(
    samples: Sequence[TrainingSample], batch: TokenBatch, objective: Objective, config: LearnerConfig
) -> Iterator[Minibatch]:
    """Yields the minibatches of a prepared batch: ``inner_updates`` passes over it, in whole groups."""
    # Advantages were computed over the whole step; only denominators and token weights are redone per minibatch.
    # Whole groups, because a prompt is computed once for all its completions, and some objectives compare them.
    groups = int(batch.group_ids.max()) + 1
    size = config.minibatch_prompts or groups
    for _ in range(config.inner_updates):
        for start in range(0, groups, size):
            # Indexes (S',) of the samples in the next groups.
            chosen = ((batch.group_ids >= start) & (batch.group_ids < start + size)).nonzero().squeeze(1)
            part = objective.renormalised_for(batch.select(chosen))
            yield Minibatch([samples[i] for i in chosen.tolist()], part, chosen.tolist())


def optimizer_steps(config: Config, groups: int) -> int:
    """The number of optimizer steps on this many groups."""
    size = config.learner.minibatch_prompts or groups
    return -(-groups // size) * config.learner.inner_updates


def keep_schedule(config: Config, policy: Learner, critic: Critic | None, step: int) -> None:
    """Moves the learning rates' schedules to where a run is before ``step``: optimizer steps that earlier steps lacked,
    as dynamic sampling dropped groups or a number was not finite, count too, so that the schedules end with the run."""
    each = config.optimizer_steps // max(config.steps, 1)
    policy.steps = max(policy.steps, each * max(step - 1 - config.critic.warmup_steps, 0))
    if critic is not None:
        critic.steps = max(critic.steps, each * (step - 1))


def advantages_by_uid(rollouts: StepRollouts, batch: TokenBatch) -> dict[str, list[np.ndarray]]:
    """Per-token advantages of each rollout of a prepared batch, by the prompt's uid."""
    assert batch.advantages is not None
    lengths = [len(r.token_ids) for scored in rollouts.trained_on for r in scored.group.rollouts]
    # Borders between rollouts in the packed stream.
    split = np.split(batch.advantages.numpy(), np.cumsum(lengths)[:-1])
    found: dict[str, list[np.ndarray]] = {scored.group.prompt.uid: [] for scored in rollouts.trained_on}
    for group, values in zip(batch.group_ids.tolist(), split, strict=True):
        found[rollouts.trained_on[group].group.prompt.uid].append(values)
    return found
