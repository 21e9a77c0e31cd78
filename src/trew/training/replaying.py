"""Decides whether a run can train on the rollouts of an earlier one, and whether it follows that run."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config, RewardConfig, dumps, to_table
from ..errors import ReplayError, TrewError
from ..objective import Objective
from ..rewards import RewardSet
from ..rewards.names import names_of
from ..rollout import StepRollouts
from ..rollout.chat import Renderer
from ..rollout.endings import reads_otherwise
from ..runs import changes, redact_config
from ..runs.recorded import RecordedRollouts
from ..runs.rollouts import Sampler
from ..utils.secrets import MASK
from ..utils.toml import flatten
from .changes import settings

HOW_SAMPLED = "rollout."
FREE_OF_SAMPLING = frozenset({"rollout.batch", "rollout.overlap", "rollout.replay"})
"""Settings of ``rollout`` that leave no trace in the rollouts; all others describe them, and cannot change."""

LEARNED = ("objective.", "learner.", "lora.", "critic.", "teacher.", "eval.correct_", "environment.turns")
"""Prefixes of settings that decide what is learned from given rollouts. Turns: they bound the length of a completion,
which some objectives divide by."""
ROUNDING = frozenset(
    {"learner.microbatch_tokens", "learner.bad_steps", "learner.dtype", "learner.gradient_checkpointing",
     "learner.compile", "learner.liger", "learner.share_prompts", "teacher.dtype", "teacher.wait_s"}
)  # fmt: skip
"""Those among them that change no more than rounding: the canary notices where that becomes too much. Another address
of a teacher is none of them: what answers there may be another model."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The rollouts of an earlier run, as this run may learn from them.

    ``departures`` are the settings that let this run learn something else than that one did; without any, it follows
    it: its policy has the weights that sampled the rollouts.
    """

    recorded: RecordedRollouts
    sampler: Sampler
    first: StepRollouts  # of the first step that has some
    departures: tuple[str, ...] = ()
    rewards: tuple[Mapping[str, Any], ...] = ()  # the recorded run's settings of them

    @property
    def follows(self) -> bool:
        return not self.departures

    @property
    def lacking(self) -> frozenset[str]:
        """Fields of a batch that the rollouts do not have."""
        scores = [score for group in self.first.sampled for score in group.scores]
        turns = [t for group in self.first.sampled for rollout in group.group.rollouts for t in rollout.turns]
        has = {
            "baselines": self.first.baselines is not None,
            "step_rewards": any(score.steps for score in scores),
            "states": all(turn.state is not None for turn in turns),
        }
        return frozenset(name for name, there in has.items() if not there)

    @property
    def notes(self) -> list[str]:
        run = self.recorded.folder
        said = [f"trains on the rollouts of {run}; nothing is generated but evaluations"]
        if not self.follows:
            said.append(
                f"{', '.join(self.departures)} differ from {run}, so that its completions count as those of other "
                "weights: old log-probs are the recorded sampler's, or the policy's where the objective has a "
                "correction for the sampler"
            )
        return said


def prepare(config: Config, objective: Objective | None, problems: list[str]) -> Replay | None:
    """The replay that ``config`` asks for; None if it asks for none, or has problems, which are added."""
    if not config.rollout.replay:
        return None
    folder = Path(config.rollout.replay)
    try:
        own = _own_settings(folder, config.steps)
        recorded = RecordedRollouts(folder)
        recorded.check(config.steps)
        if own is None:
            raise ReplayError(f"{folder}: has no config.toml; give the folder of a run of trew train")
        numbers = [step for step in range(1, config.steps + 1) if not recorded.is_empty(step)]
        if not numbers:
            raise ReplayError(f"{folder}: nothing was sampled in its first {config.steps} steps")
        first, sampler = recorded.read(numbers[0]), recorded.sampler(numbers[0])
    except (TrewError, OSError) as error:
        problems.append(f"rollout.replay: {error}")
        return None
    if folder.resolve() == Path(config.out).resolve():
        problems.append(f"out: {config.out} is the run that is replayed; give another folder (--out)")
    # The recorded settings were redacted when they were written: only redacted ones compare equal to them.
    then, now = _settings(own), _settings(tomllib.loads(redact_config(dumps(config))))
    problems += [
        f"{key}: got {now.get(key)!r}, but the rollouts of {folder} were sampled with {then.get(key)!r}; a replay "
        "cannot change how they were sampled: leave it out"
        for key in sorted({*then, *now})
        if key.startswith(HOW_SAMPLED) and key not in FREE_OF_SAMPLING and then.get(key) != now.get(key)
    ]
    given = tuple(reward for reward in own.get("rewards") or () if isinstance(reward, Mapping))
    return Replay(recorded, sampler, first, _departures(then, now, config, objective), given)


def _own_settings(folder: Path, steps: int) -> dict[str, Any] | None:
    """The settings that a run made its first ``steps`` under; None if they are not known. Raises ReplayError if some of
    these steps were made under others: none of its settings would be those of all rollouts."""
    changed = changes.in_folder(folder)
    if first := next((change for change in changed if change.step < steps and change.is_other_run), None):
        raise ReplayError(
            f"{folder}: went on with changes after step {first.step}: {first.what}; "
            f"replay steps of one setting, the first {first.step} (steps={first.step}), or another run"
        )
    then = changes.settings_at(changed, steps, now="")
    return tomllib.loads(then) if then else settings(folder)


def _settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by dotted name, with defaults for those that an older run did not have."""
    return {**flatten(to_table(Config(model=""))), **flatten(dict(table))}


def _departures(
    then: Mapping[str, Any], now: Mapping[str, Any], config: Config, objective: Objective | None
) -> tuple[str, ...]:
    # Prefixes of the settings that decide what this run learns.
    prefixes: tuple[str, ...] = LEARNED
    if config.learner.schedule != "constant":
        prefixes += ("steps",)  # the schedule's length
    if config.lora.rank or config.critic.head_std:
        prefixes += ("seed",)  # of the first weights of adapters, and of a critic's head
    if objective is not None and objective.advantage.per_reward and config.rewards:
        prefixes += ("rewards.",)
    changed = [key for key in sorted({*then, *now}) if key.startswith(prefixes) and then.get(key) != now.get(key)]
    return tuple(key for key in changed if key not in ROUNDING)


def token_problems(replay: Replay, renderer: Renderer) -> list[str]:
    """What is wrong where this tokenizer and chat template do not make the recorded prompts' tokens. The opening of an
    episode is its environment's; there the tokenizer must make the recorded texts of the tokens that were sampled."""
    for group in replay.first.sampled:
        prompt, recorded = group.group.prompt, group.group.rollouts[0].prompt_ids.tolist()
        if group.group.rollouts[0].ending:
            if any(reads_otherwise(turn, renderer) for rollout in group.group.rollouts for turn in rollout.turns):
                return [
                    f"rollout.replay: {replay.recorded.folder} has other texts for replies to prompt {prompt.uid!r} "
                    "than this tokenizer makes of their tokens; give the model and tokenizer of that run"
                ]
            continue
        texts = [prompt.text] if prompt.text is not None else [m.get("content", "") for m in prompt.messages or ()]
        if any(MASK in (text or "") for text in texts):
            continue  # the table has a mask where the prompt had a secret
        if list(renderer.encode(prompt)) != recorded:
            dated = ", with the date of that day in place of today's" * renderer.is_dated(prompt)
            return [
                f"rollout.replay: {replay.recorded.folder} has other tokens for prompt {prompt.uid!r} than this "
                "tokenizer and chat template make of it; give the model, tokenizer and chat_template of that run"
                f"{dated}"
            ]
    return []


def reward_problems(replay: Replay, rewards: RewardSet, *, one_by_one: bool = False) -> list[str]:
    """What is wrong where the rollouts have the scores of other rewards. ``one_by_one``: the objective reads each
    reward's own number, so that weights and gates are this run's."""
    names: Sequence[str] = sorted({name for g in replay.first.sampled for s in g.scores for name in s.parts})
    if names == sorted(rewards.names):
        return _other_settings(replay, rewards, () if one_by_one else ("weight", "gate"))
    return [
        f"rewards: got {', '.join(rewards.names)}, but {replay.recorded.folder} has the scores of {', '.join(names)}; "
        "a replay learns from those: give the same rewards"
    ]


def _other_settings(replay: Replay, rewards: RewardSet, combining: Sequence[str]) -> list[str]:
    """The settings of rewards that the recorded scores do not have; ``combining`` are those that add them up."""
    then = dict(zip(names_of(replay.rewards), replay.rewards, strict=True))
    usual = RewardConfig()
    return [
        f"rewards: {reward.name}: got {key} = {now!r}, but the scores in {replay.recorded.folder} were given with "
        f"{before!r}, and a replay learns from those: leave it out"
        for reward in rewards.rewards
        if reward.name in then
        for key in (*combining, "args", "sets")
        if not _equal(before := then[reward.name].get(key, getattr(usual, key)), now := getattr(reward, key))
    ]


def _equal(then: Any, now: Any) -> bool:
    """Whether a recorded setting is this one; what was masked may be anything."""
    one, other = flatten({"": then}), flatten({"": now})
    masked = {key for key, value in one.items() if isinstance(value, str) and MASK in value}
    return _plain(one, masked) == _plain(other, masked)


def _plain(table: Mapping[str, Any], masked: Set[str]) -> dict[str, Any]:
    """Lists as tuples, and without what is masked."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items() if k not in masked}
