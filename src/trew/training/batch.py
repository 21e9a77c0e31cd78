"""Scored groups as the tensors that the objective reads, and the minibatches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import Config, LearnerConfig
from ..errors import NumericsError, RewardError
from ..objective import Objective, TokenBatch
from ..objective.batch import ReasoningSteps
from ..rollout import StepRollouts
from ..rollout.sync import sampling
from ..types import Rollout, Score, TrainingSample
from .planning import Plan


def to_batch(plan: Plan, rollouts: StepRollouts) -> tuple[list[TrainingSample], TokenBatch]:
    """The kept rollouts as samples for the policy and one packed batch for the objective, in the same order.

    Tokens that the policy did not choose stay in the stream and are masked. ``logprobs`` is NaN until the policy
    computes them, so that reading them earlier is noticed. ``rollout_logprobs`` is None under top-p, top-k or min-p:
    the sampler's log-probs are then off by the probability that was cut away, and not comparable.
    """
    flat = [
        (g, rollout, score)
        for g, scored in enumerate(rollouts.kept)
        for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True)
    ]
    made, scores = [rollout for _, rollout, _ in flat], [score for _, _, score in flat]
    samples = [TrainingSample(rollout.prompt_ids, rollout.token_ids, g) for g, rollout, _ in flat]
    lengths = torch.tensor([len(sample.token_ids) for sample in samples])
    rewards, weights = _rewards(plan, scores)
    cut = sampling(plan.config, 0, 0).truncates
    return samples, TokenBatch(
        logprobs=torch.full((int(lengths.sum()),), float("nan")),
        mask=torch.from_numpy(np.concatenate([rollout.sampled for rollout in made])),
        sequence_ids=torch.arange(len(samples)).repeat_interleave(lengths),
        group_ids=torch.tensor([g for g, _, _ in flat]),
        rewards=rewards,
        reward_weights=weights,
        rollout_logprobs=None if cut else torch.from_numpy(np.concatenate([rollout.logprobs for rollout in made])),
        entropies=_entropies(made),
        correct=torch.tensor([bool(plan.correct(score)) for score in scores]),
        truncated=torch.tensor([rollout.finish_reason == "length" for rollout in made]),
        baselines=_baselines(rollouts, [g for g, _, _ in flat]),
        max_length=plan.config.rollout.max_tokens,
        step_rewards=_step_rewards(plan, scores),
    )


def _entropies(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Per token (N,); None where an engine does not report them."""
    known = [values for rollout in rollouts if (values := rollout.entropies) is not None]
    return torch.from_numpy(np.concatenate(known)) if len(known) == len(rollouts) else None


def _baselines(rollouts: StepRollouts, groups: Sequence[int]) -> Tensor | None:
    if rollouts.baselines is None:
        return None
    return torch.tensor([rollouts.baselines[rollouts.kept[g].group.prompt.uid] for g in groups])


def _step_rewards(plan: Plan, scores: Sequence[Score]) -> ReasoningSteps | None:
    """The rewards of all steps of the rollouts, where the objective reads them; RewardError where there are none."""
    if "step_rewards" not in plan.objective.needs:
        return None
    flat = [(i, end, value) for i, score in enumerate(scores) for end, value in score.steps]
    if not flat and any(score.value is not None for score in scores):
        raise RewardError(
            f"objective {plan.config.objective.preset} learns from the steps of completions, but no reward scored any: "
            "a function returns a list of (end, value) for each completion, a reward model needs args.step_mark"
        )
    sequences, ends, values = ([entry[k] for entry in flat] for k in range(3))
    return ReasoningSteps(torch.tensor(values, dtype=torch.float64), torch.tensor(sequences, dtype=torch.int64),
                 torch.tensor(ends, dtype=torch.int64))  # fmt: skip


def _rewards(plan: Plan, scores: Sequence[Score]) -> tuple[Tensor, Tensor | None]:
    """The combined rewards (S,); or each by itself (S, K) with their weights (K,), where the objective normalises them
    one by one. NaN: not judged, or does not apply."""
    nan = float("nan")
    if not plan.objective.advantage.per_reward:
        return torch.tensor([nan if s.value is None else s.value for s in scores], dtype=torch.float32), None
    rows = [[nan if v is None else v for v in plan.rewards.each(s)] for s in scores]
    return torch.tensor(rows, dtype=torch.float32), torch.tensor([r.weight for r in plan.rewards.rewards])


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step is taken on: whole groups, with denominators and token weights of their own."""

    samples: list[TrainingSample]
    batch: TokenBatch
    positions: list[int]  # of the samples in the whole step

    @contextmanager
    def named(self) -> Iterator[None]:
        """A NumericsError raised inside names samples of the whole step instead of the minibatch."""
        try:
            yield
        except NumericsError as error:
            raise error.among(self.positions) from None


def minibatches(
    samples: Sequence[TrainingSample], batch: TokenBatch, objective: Objective, config: LearnerConfig
) -> Iterator[Minibatch]:
    """The optimizer steps on a prepared batch: ``inner_updates`` passes over minibatches of whole groups."""
    groups = int(batch.group_ids.max()) + 1
    size = config.minibatch_prompts or groups
    for _ in range(config.inner_updates):
        for start in range(0, groups, size):
            chosen = ((batch.group_ids >= start) & (batch.group_ids < start + size)).nonzero().squeeze(1)
            part = objective.renormalised_for(batch.select(chosen))
            yield Minibatch([samples[i] for i in chosen.tolist()], part, chosen.tolist())


def optimizer_steps(config: Config, groups: int) -> int:
    """How many optimizer steps are taken on so many groups."""
    size = config.learner.minibatch_prompts or groups
    return -(-groups // size) * config.learner.inner_updates


def advantages_by_uid(rollouts: StepRollouts, batch: TokenBatch) -> dict[str, list[np.ndarray]]:
    """Per-token advantages of each rollout of a prepared batch, by the prompt's uid."""
    assert batch.advantages is not None
    lengths = [len(r.token_ids) for scored in rollouts.kept for r in scored.group.rollouts]
    split = np.split(batch.advantages.numpy(), np.cumsum(lengths)[:-1])
    found: dict[str, list[np.ndarray]] = {scored.group.prompt.uid: [] for scored in rollouts.kept}
    for group, values in zip(batch.group_ids.tolist(), split, strict=True):
        found[rollouts.kept[group].group.prompt.uid].append(values)
    return found
