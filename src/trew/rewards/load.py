"""Loads the rewards of a recipe: functions and their arguments, with all problems reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..config import FUNCTION_SECONDS, RewardConfig
from ..errors import ConfigError
from ..utils.user_files import is_file_spec
from .builtin.kinds import KINDS, argument_problems, unknown_kind
from .combine import Reward
from .names import numbered
from .user.functions import UserFunction
from .user.process import Process
from .user.session import FunctionHost, Spec

if TYPE_CHECKING:
    from .model.reward_model import ModelReward

SHARES = ("none", "no_answer")
"""Names under which :func:`.metrics.summary` gives shares of completions, beside the rewards' own."""


def load_rewards(
    configs: Sequence[RewardConfig], host: FunctionHost | None
) -> tuple[list[Reward], FunctionHost | None]:
    """Loads the rewards; returns them and the process of their functions.

    Functions live in ``host``, or in a new process if it is None. Raises ConfigError with all problems at once.
    """
    specs: list[Spec] = [(config.name, dict(config.args)) for config in configs if _is_function(config)]
    if specs and host is None:
        host = Process()
    rewards, problems = _each(configs, host.load(specs) if host is not None else [])
    problems += _set_problems(configs, rewards)
    if problems:
        if host is not None:
            host.close()  # only this call knows of the process: it would outlive the error
        raise ConfigError(problems)
    return rewards, host


def _each(
    configs: Sequence[RewardConfig], functions: Sequence[UserFunction | tuple[str, ...]]
) -> tuple[list[Reward], list[str]]:
    """Every reward, and what is wrong with each alone."""
    # One entry for each function among the configurations, in their order.
    remaining = iter(functions)
    rewards: list[Reward] = []
    problems: list[str] = []
    for i, config in enumerate(configs):
        reward, found = _reward(config, next(remaining) if _is_function(config) else None)
        if _asks_whether_right(reward) and not _behind_another(config, configs[:i]):
            found.append("asks whether the answer is right, so a reward that says so must come first")
        if reward.name in SHARES:
            found.append(f"has the name of a metric, reward/{reward.name}, which is a share; give it another name")
        problems += [f"rewards[{i}] {config.name or config.model!r}: {problem}" for problem in found]
        rewards.append(reward)
    return _numbered(rewards), problems


def _is_function(config: RewardConfig) -> bool:
    """Whether it names a function in a file, neither a built-in nor a reward model."""
    return not config.model and is_file_spec(config.name)


def _asks_whether_right(reward: Reward) -> bool:
    """Whether it is a built-in that depends on the verdict of another reward."""
    return reward.is_builtin and reward.kind in KINDS and "correct" in KINDS[reward.kind].from_row


def _behind_another(config: RewardConfig, earlier: Sequence[RewardConfig]) -> bool:
    """Whether each data set that a reward judges is judged by an earlier one as well."""
    if any(not other.sets for other in earlier):
        return True
    return bool(config.sets) and set(config.sets) <= {name for other in earlier for name in other.sets}


def _numbered(rewards: Sequence[Reward]) -> list[Reward]:
    """The rewards, with the second of a name called ``name_2``: names are keys of metrics and of ``Score.parts``."""
    names = numbered(reward.name for reward in rewards)
    return [replace(reward, name=name) for reward, name in zip(rewards, names, strict=True)]


def _reward(config: RewardConfig, loaded: UserFunction | tuple[str, ...] | None) -> tuple[Reward, list[str]]:
    """One reward and what is wrong with it; ``loaded`` is its function, or what is wrong with that."""
    problems = _unused(config)
    function, model = None, None
    if config.model:
        model, found = _model(config)
        problems += found
    elif isinstance(loaded, UserFunction):
        function = loaded
    elif loaded is not None:
        problems += loaded
    elif config.name in KINDS:
        problems += argument_problems(config.name, config.args)
    else:
        problems.append(f"{unknown_kind(config.name)}; a function of your own is path/to/file.py:function")
    name = function.name if function else model.name if model else config.name
    reward = Reward(
        name, config.name, config.weight, dict(config.args), function, model, config.gate, config.verify_with,
        config.calls, config.timeout_s, config.on_failure, config.sets,
    )  # fmt: skip
    return reward, problems


def _model(config: RewardConfig) -> tuple[ModelReward | None, Sequence[str]]:
    from .model.reward_model import ModelReward  # what it needs is not imported for nothing

    try:
        return ModelReward.open(config.model, config.args, name=config.name), ()
    except ConfigError as error:
        return None, error.problems


def _unused(config: RewardConfig) -> list[str]:
    """Settings of functions that something else has been given."""
    if _is_function(config):
        return []
    defaults = {"calls": "step", "timeout_s": FUNCTION_SECONDS, "on_failure": "abort"}
    what = "a reward model" if config.model else "a built-in kind, which has its own limits"
    return [
        f"{key}: got {getattr(config, key)!r}, but it is for functions in files; this is {what}: leave it out"
        for key, default in defaults.items()
        if getattr(config, key) != default
    ]


def _set_problems(configs: Sequence[RewardConfig], loaded: Sequence[Reward]) -> list[str]:
    """Says what is wrong with the rewards together."""
    if not configs:
        return [f"rewards: none given; built in are {', '.join(KINDS)}, or path/to/file.py:function"]
    problems = []
    if all(config.weight == 0 for config in configs):
        problems.append("rewards: every weight is 0, so that nothing could be learned; give one a weight")
    if all(config.gate for config in configs) and len(configs) > 1:
        problems.append("rewards: every reward is a gate, so that there is nothing that they let through")
    return problems + _verify_problems(loaded)


def _verify_problems(rewards: Sequence[Reward]) -> list[str]:
    problems = []
    names = [reward.name for reward in rewards]
    for i, reward in enumerate(rewards):
        others = [name for name in names if name != reward.name]
        if reward.verify_with and reward.verify_with not in others:
            problems.append(
                f"rewards[{i}].verify_with: got {reward.verify_with!r}, accepts another reward of this recipe: "
                f"{', '.join(others) or 'there is none; add one, with weight = 0 if it is only to be watched'}"
            )
    return problems
