"""Models that read what the policy wrote, a teacher or a critic: whether they fit the run, before anything is loaded;
and the teacher itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import ConfigError, EngineError, ResumeError, TrewError
from ..models import files, loading
from ..objective import Objective
from ..runs import RunFolder
from ..utils.console import Display
from ..utils.secrets import token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..rollout.vllm.endpoint import Endpoint

SHOWN = 3
"""Tokens that a message about two vocabularies names."""


def problems(config: Config, objective: Objective | None) -> list[str]:
    """Why the teacher's files, or a missing teacher, or the critic's files do not fit the run."""
    found = _damaged("teacher", config.teacher.model) + _critic_problems(config)
    if objective is None:
        return found
    reads, name = objective.distillation, config.objective.preset
    if reads and not config.taught:
        found.append(
            f"teacher.model: is empty, but {name} with objective.distill = {reads:g} learns from a teacher; give a "
            "folder or hub id of a model with the policy's tokens, or teacher.endpoint, a server of one"
        )
    if config.taught and not reads:
        key, got = ("model", config.teacher.model) if config.teacher.model else ("endpoint", config.teacher.endpoint)
        found.append(
            f"teacher.{key}: got {got!r}, but {name} does not learn from a teacher; set "
            "objective.distill above 0, or choose opd as objective.preset"
        )
    return found


def _critic_problems(config: Config) -> list[str]:
    own = config.critic
    if found := _damaged("critic", own.model, files.base_problems):
        return found
    if own.model and own.head_std and loading.is_here(own.model) and loading.scores(own.model):
        return [
            f"critic.head_std: got {own.head_std:g}, but {own.model} is a reward model, whose score is the value at "
            "first; remove it"
        ]
    return []


def _damaged(who: str, model: str, kind: files.Kind | None = None) -> list[str]:
    found = loading.check(model, kind=kind) if model else []
    return [f"{who}.{problem.removeprefix(f'{who}.')}" for problem in found]


def vocabulary_problems(config: Config, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Why a teacher or a critic would read other texts than the policy writes: its tokenizer gives some ids another
    meaning."""
    if tokenizer is None:
        return []
    found = []
    for who, model in (("teacher", config.teacher.model), ("critic", config.critic.model)):
        if not model or not loading.is_here(model):
            continue
        try:
            its = loading.load_tokenizer(model).get_vocab()
        except TrewError as error:
            found.append(f"{who}.model: {error}")
        else:
            found += [f"{who}.model: {problem}" for problem in mismatch(tokenizer.get_vocab(), its, model, who)]
    return found


def mismatch(own: Mapping[str, int], its: Mapping[str, int], name: str, who: str) -> list[str]:
    """Says which tokens of the policy the model ``name`` knows by another id, or not at all; empty if none. Tokens that
    only this model has do no harm: the policy does not sample them.

    >>> mismatch({"a": 0, "b": 1}, {"a": 0, "b": 1, "<pad>": 2}, "t", "teacher")
    []
    >>> mismatch({"a": 0, "b": 1}, {"a": 1, "b": 0}, "t", "teacher")[0].partition(";")[0]
    "t has another vocabulary than the policy: 2 of 2 tokens differ ('a' is 0 for the policy, 1 for the teacher, ...)"
    """
    differ = [token for token, number in own.items() if its.get(token) != number]
    if not differ:
        return []
    first = min(differ, key=lambda token: own[token])
    there = its.get(first, "none")
    return [
        f"{name} has another vocabulary than the policy: {len(differ)} of {len(own)} tokens differ ({first!r} is "
        f"{own[first]} for the policy, {there} for the {who}{', ...' if len(differ) > 1 else ''}); a {who} reads the "
        "ids that the policy samples: give one whose tokenizer is the policy's"
    ]


def refuse_short(config: Config, most: int) -> None:
    """Raises ConfigError if the ``most`` tokens of a prompt and completion exceed a teacher's or critic's positions."""
    for who, model in (("teacher", config.teacher.model), ("critic", config.critic.model)):
        limit = loading.positions(model) if model else None
        if limit is not None and most > limit:
            raise ConfigError(
                f"{who}.model: {model} has {limit} positions, and prompts with their completions take up to {most}; "
                f"lower rollout.max_tokens or {config.length_key}"
            )


# ---- a teacher on a server


def endpoint_of(config: Config) -> Endpoint:
    """Where a teacher's server listens; its token comes from the environment."""
    from ..rollout.vllm.endpoint import Endpoint

    return Endpoint.parse(config.teacher.endpoint, token("TREW_TEACHER_TOKEN"))


def served_note(config: Config, tokenizer: PreTrainedTokenizerBase, most: int) -> str:
    """Checks that the model on a teacher's server reads the policy's tokens, as many as the ``most`` of a prompt and
    completion, and says which it is. Raises ConfigError where it does not, or where the server does not answer."""
    from ..rollout.vllm import served

    endpoint = endpoint_of(config)
    try:
        found = served.served(endpoint)
        problem = served.vocabulary_problem(endpoint, found.name, tokenizer)
    except EngineError as error:
        raise ConfigError(f"teacher.endpoint: {error}") from None
    if problem:
        raise ConfigError(
            f"teacher.endpoint: {found.name} on server {endpoint} has another vocabulary than the policy: {problem}; a "
            "teacher reads the ids that the policy samples: give one whose tokenizer is the policy's"
        )
    # The server generates a token behind what it reads.
    if found.length is not None and most + 1 > found.length:
        raise ConfigError(
            f"teacher.endpoint: server {endpoint} has max_model_len = {found.length}, and prompts with their "
            f"completions take up to {most}, and one more token; start it with --max-model-len {most + 1}, or lower "
            f"rollout.max_tokens or {config.length_key}"
        )
    return f"teacher: {found.name} on server {endpoint} (vLLM {found.vllm}), which has the policy's tokens"


def meet(
    teacher: Any, tokenizer: PreTrainedTokenizerBase, folder: RunFolder, display: Display, ending: contextlib.ExitStack
) -> None:
    """Makes a teacher on a server ready for this run, on rank 0: the server must have the model from which an earlier
    part of the run has learned. A new run remembers it in teacher.json."""
    from ..rollout.vllm.teacher import TEXT, EndpointTeacher

    assert isinstance(teacher, EndpointTeacher)
    ending.callback(teacher.close)

    def tell(text: str) -> None:
        display.warn(text)
        folder.event(text)

    teacher.tell = tell
    teacher.known = _remembered(folder) if folder.resumed else None
    # The tokens of the first meeting: log-probs are compared one by one.
    known = teacher.known.ids if teacher.known else [int(i) for i in tokenizer.encode(TEXT, add_special_tokens=False)]
    folder.write_teacher(teacher.meet(known).to_json())


def _remembered(folder: RunFolder) -> Any:
    """What a run knew of its teacher when it began; None if it never met one."""
    from ..rollout.vllm.teacher import Known

    path = folder.folder / "teacher.json"
    try:
        return Known.from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResumeError(
            f"{path}: cannot be read ({type(error).__name__}: {error}), so that it is not certain from which teacher "
            "this run has learned; delete it if the server's model is the same"
        ) from None
