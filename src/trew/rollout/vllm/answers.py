"""Reads the completions of a server, and refuses an answer as a whole if anything in it cannot be right.

No part of a refused answer is used: a group without its bad completion would be biased, and a server that made one
error may have made others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import EngineError
from ...types import FinishReason, Sampling, Span, Turn
from ..endings import Endings

LOWEST = -9000.0
"""Log-probs below this are not numbers: vLLM writes -9999 for NaN, minus infinity and missing values."""
ROUNDING = 1e-3
"""The largest log-prob above 0 that counts as rounding."""


FIRST = -1
"""The priority of requests that somebody waits for: lower is earlier, and others have 0."""


class BadAnswer(EngineError):
    """A server's answer cannot be right; the request may be repeated."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, which its answer must match: ``count`` completions of the prompt ``prompt_ids`` (P,). ``versions``:
    policy versions by the labels that the server may give the weights of a token."""

    prompt_ids: np.ndarray
    count: int
    sampling: Sampling
    endings: Endings
    vocabulary: int
    versions: Mapping[str, int]


def body(asked: Asked, *, seed: int, first: bool = False) -> dict[str, Any]:
    """Returns the body of ``/inference/v1/generate``; completion i gets the draws of ``seed + i``. ``first``: before
    requests that wait for a place.

    Every parameter is explicit: a server's defaults may come from the model's folder.
    """
    s = asked.sampling
    return {
        "token_ids": asked.prompt_ids.tolist(),
        "sampling_params": {
            # Greedy completions are all equal, and vLLM refuses to generate several.
            "n": 1 if s.temperature == 0 else asked.count, "seed": seed, "max_tokens": s.max_tokens, "min_tokens": 0,
            "temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
            "logprobs": 0,  # of the sampled token alone
            "stop": list(asked.endings.strings), "stop_token_ids": sorted(asked.endings.ids),
            "ignore_eos": True,  # stop_token_ids has all end tokens: the model's own list must not add to them
            "detokenize": bool(asked.endings.strings), "skip_special_tokens": True,
        },
        **({"priority": FIRST} if first else {}),
    }  # fmt: skip


def read(found: Any, asked: Asked, *, decode: Callable[[Sequence[int]], str]) -> list[Turn]:
    """Returns the turns of an answer in the order of their seeds. Raises BadAnswer if anything cannot be right."""
    greedy = asked.sampling.temperature == 0
    expected = 1 if greedy else asked.count
    try:
        choices = sorted(found["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(expected)):
            raise BadAnswer(f"{len(choices)} completions where {expected} were asked for")
        turns = [_turn(choice, asked, decode) for choice in choices]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadAnswer(f"a malformed answer: {type(error).__name__}: {error}") from None
    # The same turn for each: greedy completions are equal.
    return turns * asked.count if greedy else turns


def _turn(choice: Mapping[str, Any], asked: Asked, decode: Callable[[Sequence[int]], str]) -> Turn:
    ids: list[int] = choice["token_ids"]
    _check_tokens(ids, asked)
    text, reason = asked.endings.read(ids, decode)
    return Turn(
        context_ids=asked.prompt_ids,
        token_ids=np.array(ids, dtype=np.int64),
        logprobs=_logprobs(choice["logprobs"]["content"], ids, greedy=asked.sampling.temperature == 0),
        policy_logprobs=None,
        entropies=None,
        versions=_spans(choice["weight_versions"], len(ids), asked.versions),
        text=text,
        finish_reason=_reason(choice, ids, asked, reason),
    )


def _check_tokens(ids: Sequence[int], asked: Asked) -> None:
    if not 1 <= len(ids) <= asked.sampling.max_tokens:
        raise BadAnswer(f"a completion of {len(ids)} tokens, where 1 to {asked.sampling.max_tokens} are possible")
    # type(), because True is an int.
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < asked.vocabulary]
    if wrong:
        raise BadAnswer(f"token id {wrong[0]!r}, which is outside the model's vocabulary of {asked.vocabulary}")
    if early := asked.endings.ids.intersection(ids[:-1]):
        raise BadAnswer(f"a completion that goes on after the end token {min(early)}")


def _logprobs(content: Sequence[Mapping[str, Any]], ids: Sequence[int], *, greedy: bool) -> np.ndarray:
    """Returns log-probs (T,) under the sampling distribution, float32: 0 for greedy decoding."""
    if len(content) != len(ids):
        raise BadAnswer(f"{len(content)} log-probs for {len(ids)} tokens")
    if any(one.get("token_id", i) != i for one, i in zip(content, ids, strict=True)):
        raise BadAnswer("log-probs of other tokens than the completion's")
    values = [float(one["logprob"]) for one in content]
    wrong = [value for value in values if not (math.isfinite(value) and LOWEST < value <= ROUNDING)]
    if wrong:
        raise BadAnswer(f"a log-prob of {wrong[0]}, accepted are finite numbers of at most 0")
    if greedy:
        return np.zeros(len(ids), np.float32)
    # Rounding may leave a log-prob just above 0.
    return np.minimum(np.array(values, np.float32), np.float32(0))


def _spans(found: Sequence[Mapping[str, Any]], count: int, versions: Mapping[str, int]) -> tuple[Span, ...]:
    strange = [span["version"] for span in found if span["version"] not in versions]
    if strange:
        known = ", ".join(map(repr, versions))
        raise BadAnswer(f"tokens of weights {strange[0]!r}, which it cannot have; published are {known}")
    spans = tuple(Span(versions[span["version"]], int(span["start"]), int(span["end"])) for span in found)
    # Spans follow one another without a gap, from 0 to the end.
    bounds = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != bounds[:-1] or bounds[-1] != count:
        raise BadAnswer(f"versions that do not cover the {count} tokens of a completion")
    return spans


def _reason(choice: Mapping[str, Any], ids: Sequence[int], asked: Asked, own: FinishReason) -> FinishReason:
    """Returns the finish reason by a completion's tokens; the server's must agree."""
    said = choice["finish_reason"]
    if said == "length" and len(ids) == asked.sampling.max_tokens:
        return own
    # A server decodes token by token and may see a stop string that the whole text does not have.
    if said == "stop" and (own == "stop" or choice.get("stop_reason") in asked.endings.strings):
        return "stop"
    raise BadAnswer(
        f"a completion that was cut: it ended by {said!r} after {len(ids)} of {asked.sampling.max_tokens} tokens"
    )
