"""The configuration of iterative training: a recipe of ``trew train`` with an additional table ``[iterate]``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config, Kernels, RewardConfig, build, one_set, parse, read_table, to_table
from ..errors import ConfigError, Problems
from ..reward_training.settings import PairData, RewardLearner, RewardTraining
from ..reward_training.settings import problems as training_problems
from ..rewards.names import names_of
from ..utils.toml import dump_table
from .fitting import unfit

REWARD = "reward_model"
"""The name of the learned reward in metrics and rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterate:
    """The ``[iterate]`` table. ``steps`` of the recipe is the number of policy steps in each round."""

    rounds: int = 3
    verifier: RewardConfig = field(default_factory=RewardConfig)  # ranks completions; empty = the task's own reward
    reward_model: str = ""  # what it starts from: a language model (empty = the policy's) or a reward model
    weight: float = 1.0  # of the learned reward among the recipe's [[rewards]]
    args: Mapping[str, Any] = field(default_factory=dict)  # of the reward model as a reward: batch_tokens, ...
    first_prompts: int = 0  # prompts for the first reward model; 0 = prompts, or none where it is one already
    prompts: int = 64  # per round: fresh prompts whose completions make pairs
    completions: int = 0  # of each of them; 0 = rollout.completions
    pairs_per_prompt: int = 8
    replay: float = 0.1  # share of a round's pairs that come from all rounds before
    held_out: float = 0.2  # share of the prompts whose pairs only measure
    first_lr: float = 0.0  # learning rate of the first reward model; 0 = learner.lr
    first_epochs: int = 0  # passes over the pairs of the first reward model; 0 = epochs
    epochs: int = 1  # passes over a later round's pairs, which are fewer
    learner: RewardLearner = field(default_factory=RewardLearner)  # the reward model's


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole recipe: the policy's configuration without the learned reward, and the configuration of the rounds."""

    policy: Config
    rounds: Iterate

    @property
    def kernels(self) -> Kernels:
        """The reward model's ``kernels``: plain where the policy's ``kernels`` or ``linear`` is plain."""
        return "auto" if self.policy.kernels == self.policy.linear == "auto" else "plain"

    def reward_training(self, number: int, *, model: str, pairs: Path, held: Path, out: Path) -> RewardTraining:
        """The settings of the reward model's training in round ``number``."""
        r, c = self.rounds, self.policy
        learner, epochs = r.learner, r.epochs
        if number == 0:
            learner = dataclasses.replace(learner, lr=r.first_lr or learner.lr)
            epochs = r.first_epochs or epochs
        # Later models are trew's own exports, which contain tokenizer and template; the recipe's overrides apply to the
        # policy's model only.
        first = model == (r.reward_model or c.model) == c.model
        return RewardTraining(
            model=model, tokenizer=c.tokenizer if first else "", chat_template=c.chat_template if first else "",
            device=c.device, threads=c.threads, kernels=self.kernels, seed=c.seed, epochs=epochs, out=str(out),
            data=PairData(pairs=str(pairs), eval=str(held), overlong="drop"), learner=learner,
        )  # fmt: skip


def load_recipe(path: Path, overrides: Iterable[str] = (), *, out: Path | None = None) -> Recipe:
    """Reads a recipe; raises ConfigError with every problem that can be found without data and models."""
    table = read_table(path, overrides)
    if out is not None:
        table["out"] = str(out)
    problems = Problems()
    own = table.pop("iterate", {})
    rounds = problems.attempt(lambda: build(Iterate, own, where="iterate"))
    verifier = own.get("verifier") if isinstance(own, Mapping) else None
    rewards = table.get("rewards", [])
    named = isinstance(verifier, Mapping) and isinstance(rewards, list) and rounds is not None
    # The verifier is parsed as the first of the rewards, for the same checks and path resolution, and removed again.
    policy = problems.attempt(
        lambda: parse({**table, "rewards": [verifier, *rewards]} if named else table, base=path.parent)
    )
    if rounds is not None:
        problems += round_problems(rounds, rewards if isinstance(rewards, list) else ())
    if policy is None or rounds is None or problems:
        raise ConfigError(problems)
    one_set(policy, "trew iterate")
    if found := unfit(policy):
        raise ConfigError(found)
    if named:
        rounds = dataclasses.replace(rounds, verifier=policy.rewards[0])
        policy = dataclasses.replace(policy, rewards=policy.rewards[1:])
    return Recipe(policy=policy, rounds=rounds)


def round_problems(rounds: Iterate, rewards: Sequence[Any] = ()) -> list[str]:
    """The problems of values in ``[iterate]``, one line each."""
    found = _number_problems(rounds)
    if rounds.verifier.model:
        found.append("iterate.verifier.model: a reward model cannot be the verifier; give a built-in or a function")
    if rounds.verifier.gate:
        found.append(
            "iterate.verifier.gate: got true, accepts false: the verifier measures, and a gate would decide what the "
            "policy gets for its completions"
        )
    if rounds.verifier.weight not in (0.0, RewardConfig().weight):
        found.append(
            f"iterate.verifier.weight: got {rounds.verifier.weight:g}, but the verifier measures, with weight 0; leave "
            "it out, and give what the policy is to learn from as [[rewards]]"
        )
    # Its name comes first, so that the learned reward would be called otherwise, and the verifier's curve shown as its.
    if names_of([{"name": rounds.verifier.name}]) == [REWARD]:
        found.append(
            f"iterate.verifier.name: got {rounds.verifier.name!r}, but {REWARD!r} is the name of the learned reward "
            "here; call your function otherwise"
        )
    # Model and pairs are made in the rounds: placeholders, so that only the learner's values are checked.
    dummy = RewardTraining(model="m", learner=rounds.learner, data=PairData(pairs="p"))
    found += [f"iterate.{p}" for p in training_problems(dummy)]
    if any(isinstance(r, Mapping) and r.get("name") == REWARD for r in rewards):
        found.append(f"rewards: {REWARD!r} is the name of the learned reward here; call yours otherwise")
    return found


def _number_problems(rounds: Iterate) -> list[str]:
    found = []
    least = {"rounds": 1, "prompts": 1, "pairs_per_prompt": 1, "epochs": 1, "first_epochs": 0, "first_prompts": 0,
             "completions": 0}  # fmt: skip
    for name, low in least.items():
        if getattr(rounds, name) < low:
            found.append(f"iterate.{name}: got {getattr(rounds, name)!r}, accepts a whole number of at least {low}")
    if rounds.completions == 1:
        found.append("iterate.completions: got 1, accepts 0 (as in rollout) or at least 2: pairs need two completions")
    if not 0 <= rounds.first_lr < 1:
        found.append(f"iterate.first_lr: got {rounds.first_lr!r}, accepts 0 (as learner.lr) up to, not including, 1")
    if not 0 <= rounds.replay < 1:
        found.append(f"iterate.replay: got {rounds.replay!r}, accepts a share from 0 up to, not including, 1")
    if not 0 < rounds.held_out < 1:
        found.append(f"iterate.held_out: got {rounds.held_out!r}, accepts a share above 0 and below 1")
    if not rounds.weight or not math.isfinite(rounds.weight):
        found.append(
            f"iterate.weight: got {rounds.weight!r}, accepts a finite number other than 0: the policy learns from it"
        )
    return found


def dumps(recipe: Recipe) -> str:
    """The resolved recipe as TOML, which :func:`load_recipe` reads back."""
    return dump_table(as_table(recipe))


def as_table(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as nested plain values."""
    return {**to_table(recipe.policy), "iterate": dataclasses.asdict(recipe.rounds)}
