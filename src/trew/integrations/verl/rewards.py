"""Offers our graders as verl's ``compute_score``: name this file in ``reward.custom_reward_function.path``.

    reward.custom_reward_function.path=pkg://trew.integrations.verl.rewards
    +reward.custom_reward_function.reward_kwargs.reward=math

``reward`` is a built-in's name or ``path/to/file.py:function``, and ``args`` its arguments. ``rewards`` is a list of
tables instead, as ``[[rewards]]`` in a recipe.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

# Absolute imports: verl may load this file by its path, where it has no parent package.
from trew.config import RewardConfig, build
from trew.config.rules import of_reward
from trew.data.verl import NOTE, columns_before, was_chat
from trew.errors import ConfigError, DataError, RewardError
from trew.rewards import KINDS, RewardSet
from trew.rewards.reward_checks import text_group
from trew.types import Prompt, Score

BY_SOURCE = {"openai/gsm8k": "gsm8k", "DigitalLearningGmbH/MATH-lighteval": "math"}
"""Default rewards for verl's own data sources."""

# Entries of extra_info that are bookkeeping, not data of the row.
OF_VERL = ("num_turns", "rollout_reward_scores", "split", "index", NOTE)
# Keys of the result, and of the trainer's own list of its scores, to which a number under this name would be added.
OWN_KEYS = ("score", "judged", "reward")
_UNKNOWN = ({"role": "user", "content": ""},)
_log = logging.getLogger(__name__)
_sets: dict[str, RewardSet] = {}
_lock = threading.Lock()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward: str = "",
    args: Mapping[str, Any] | None = None,
    rewards: Sequence[Mapping[str, Any]] = (),
    failed_score: float | None = None,
    **_: Any,
) -> dict[str, float]:
    """Scores one answer: returns ``score`` (the weighted sum) and each reward's number by :func:`keys_of`.

    The rewards see ``ground_truth``, ``data_source`` and the entries of ``extra_info`` as columns; of rows that trew
    has written, also the columns that these were made of. Of such rows a function in TRL's form gets the answer as in
    the recipe's run: as messages where the prompt is a chat. Its ``prompts`` are empty. Raises DataError if the gold is
    missing or unreadable. Where judging failed (a timeout, the sandbox), or all that was asked are functions that
    return None (not judged), raises RewardError, or returns ``failed_score`` if given, with ``judged`` 0.
    """
    chosen = _chosen(data_source, reward, args, rewards)
    extra = {k: v for k, v in (extra_info or {}).items() if k not in OF_VERL and v is not None}
    columns = {**extra, "data_source": data_source, "ground_truth": ground_truth}
    # A function that reads the gold under its own name (``answer``), or a number where verl's rows have text, finds it.
    noted = {**extra, NOTE: (extra_info or {}).get(NOTE)}
    columns |= columns_before(noted, ground_truth)
    # verl does not say what was asked. Of a chat, functions get answers as messages, as in the recipe's own run.
    asked = Prompt("verl", messages=_UNKNOWN) if was_chat(noted) else Prompt("verl", text="")
    asked = replace(asked, columns=columns)
    [scored] = chosen.score([text_group(asked, [solution_str])])
    [score] = scored.scores
    # Why a function of yours failed, at its first, second, fourth, ... failure: the status alone does not say it.
    for text in chosen.take_warnings():
        _log.warning("%s", text)
    numbers = [float("nan") if part is None else float(part) for part in score.parts.values()]
    parts = dict(zip(keys_of([*score.parts]), numbers, strict=True))
    # Beside other rewards, None counts as 0: of functions for rows of other tasks, which judge no answer of the group,
    # trew leaves out the same term.
    if score.value is not None:
        return {"score": float(score.value), "judged": 1.0, **parts}
    silent = _silent(chosen, asked, score)
    if score.status == "bad_gold" or (score.status == "not_applicable" and not silent):
        raise DataError(f"{data_source}: the gold {ground_truth!r:.80} cannot be used ({score.status}); trew rewards "
                        f"test {_blamed(chosen, score)} --data FILE finds all such rows")  # fmt: skip
    if failed_score is None:
        raise RewardError(f"{data_source}: an answer could not be judged {_why(score, silent)} failed_score=0 goes on")
    return {"score": float(failed_score), "judged": 0.0, **parts}


def _why(score: Score, silent: Sequence[str]) -> str:
    if not silent:
        return f"({score.status});"
    # trew leaves such an answer out of its group; verl needs a number.
    return f"({', '.join(silent)} returned None): not judged, which verl does not know; return a number, or"


def _silent(rewards: RewardSet, asked: Prompt, score: Score) -> list[str]:
    """The functions whose None leaves an answer without any number."""
    return [
        f"{r.function.file}:{r.function.name}"
        for r in rewards.rewards
        # One that does not apply to the row was not asked.
        if r.function is not None and score.statuses.get(r.name) == "not_applicable" and r.function.applies(asked)
    ]


def _blamed(rewards: RewardSet, score: Score) -> str:
    """The reward by which a score has its status, as trew rewards test takes it."""
    reward = next((r for r in rewards.rewards if score.statuses.get(r.name) == score.status), rewards.rewards[0])
    return reward.kind if reward.function is None else f"{reward.function.file}:{reward.function.name}"


def keys_of(names: Sequence[str]) -> list[str]:
    """The keys under which ``compute_score`` returns the numbers of the rewards ``names``. A function that is called
    like one of its own keys must not replace what verl trains on.

    >>> keys_of(["math", "score"])
    ['math', 'score_2']
    """
    keys: list[str] = []
    for name in names:
        free = (f"{name}_{i}" for i in itertools.count(2) if f"{name}_{i}" not in names)
        keys.append(next(free) if name in OWN_KEYS else name)
    return keys


def _chosen(source: str, reward: str, args: Any, rewards: Any) -> RewardSet:
    if reward and rewards:
        raise ConfigError("reward and rewards: got both, accepts one of them")
    # Options come from Hydra: its containers are no dictionaries and lists, and json.dumps below refuses them.
    one = {"name": reward or BY_SOURCE.get(source, ""), "args": _plain(args or {})}
    tables = [_plain(table) for table in rewards] or [one]
    if not tables[0].get("name") and not tables[0].get("model"):
        accepts = f"{', '.join(KINDS)}, or path/to/file.py:function"
        raise ConfigError(f"reward: got none, and {source!r} is not known; accepts {accepts}")
    # verl calls once per answer, possibly from several threads; building a set of rewards may load files.
    key = json.dumps(tables, sort_keys=True)
    with _lock:
        if key not in _sets:
            configs = [build(RewardConfig, table, where=f"rewards[{i}]") for i, table in enumerate(tables)]
            refuse(configs)
            _refuse_unread(configs)
            _sets[key] = _without_tokens(RewardSet.from_config(configs))
        return _sets[key]


def refuse(configs: Sequence[RewardConfig]) -> None:
    """Raises ConfigError for rewards that cannot be computed from what verl passes."""
    problems = [f"{c.name}: needs the answer's tokens, and verl hands over its text alone" for c in configs
                if c.name in KINDS and {"length", "token_ids"} & {*KINDS[c.name].from_row}]  # fmt: skip
    problems += [f"{c.model}: is a reward model; verl has its own place for them: reward.reward_model" for c in configs
                 if c.model]  # fmt: skip
    if problems:
        raise ConfigError(problems)


def _without_tokens(rewards: RewardSet) -> RewardSet:
    """Returns ``rewards``; raises ConfigError if one of their functions asks for tokens, of which it would get none."""
    asking = [r.name for r in rewards.rewards if r.function is not None and r.function.names_tokens]
    if asking:
        rewards.close()
        raise ConfigError(f"{', '.join(asking)}: asks for completion_ids, and verl hands over the answer's text alone")
    return rewards


def _refuse_unread(configs: Sequence[RewardConfig]) -> None:
    """Raises ConfigError for settings of rewards that would have no effect here, or that a recipe refuses."""
    problems = [f"rewards[{i}].{key}: got {value!r}, which is for trew train alone; leave it out"
                for i, c in enumerate(configs)
                for key, value in (("verify_with", c.verify_with), ("sets", c.sets)) if value]  # fmt: skip
    problems += [problem for i, c in enumerate(configs) for problem in of_reward(c, f"rewards[{i}]")]
    if problems:
        raise ConfigError(problems)


def _plain(value: Any) -> Any:
    """Converts OmegaConf containers to plain ones."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v) for v in value]
    return value
