"""Updates a server to a published version of the weights; unless every step is confirmed, the server must not be used.

    pause -> start -> update -> finish -> compare the version -> resume -> canary

Files are announced before that, so that a server in use verifies them while it still generates (:mod:`.routes`).

A sleeping server allocates memory for weights first, and for its cache once it has them.

An update may be accepted by every call and still be wrong: a tied head that was not sent, a loader that caches. So the
first request after it asks for log-probs that the policy has computed itself: the canary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import EngineError
from .answers import FIRST
from .client import ServerGone, ServerRefused, call
from .endpoint import Endpoint
from .routes import QUICK_S, Route
from .sleep import wake
from .traffic import GENERATE

TRIES = 2
"""Attempts to give a server the same version: an update from the start repairs what half an update broke."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Log-probs of the policy at temperature 1 that identify its weights: of the last tokens of each sequence in
    ``ids``. ``limit``: the largest mean difference in nats that counts as rounding."""

    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    limit: float


@dataclass(frozen=True, slots=True)
class Published:
    """A version of the weights that servers can load by ``route``. ``label`` is its name on servers, which no other run
    uses."""

    version: int
    label: str
    route: Route
    canary: Canary


@dataclass(frozen=True, slots=True)
class Updated:
    """The result of an update. ``gap``: mean difference of the canary's log-probs in nats. ``wrong_before``: the first
    attempt left wrong weights in use, so completions that were running then must not be used."""

    gap: float
    wrong_before: bool


def update(endpoint: Endpoint, published: Published, *, timeout_s: float, asleep: bool = False) -> Updated:
    """Loads these weights into a server.

    ``asleep``: the server sleeps and is woken first. ``timeout_s`` limits each step that moves weights. Raises
    EngineError if the server may have other weights: it must not be used then, and stays paused; Unproven if it has
    generated with them.
    """
    resumed = False
    for attempt in range(TRIES):
        try:
            _replace(endpoint, published, timeout_s=timeout_s, asleep=asleep)
            # From here on the server generates. Where the canary fails, what it generates until the next attempt is
            # wrong.
            before, resumed = resumed, True
            return Updated(_check_canary(endpoint, published.canary, timeout_s=timeout_s), wrong_before=before)
        # Not ServerGone: what a server that does not answer needs is a restart, which is the engine's to order.
        except (ServerRefused, StaleWeights) as error:
            if isinstance(error, ServerRefused) and error.status >= 500:
                _require_engine(endpoint, error, timeout_s=timeout_s)
            if attempt == TRIES - 1:
                if resumed:
                    raise Unproven(str(error)) from error
                raise
    raise AssertionError("unreachable")


class StaleWeights(EngineError):
    """A server reports the right version, but computes with other weights."""


class Unproven(StaleWeights):
    """A server has generated with weights that no canary has confirmed, and may go on with them."""


def _require_engine(endpoint: Endpoint, error: ServerRefused, *, timeout_s: float) -> None:
    """Raises ServerGone where the engine behind a server has died: the server still answers then, with status 500, and
    no attempt gives it weights."""
    try:
        call(endpoint, "GET", "/health", what="asking for its health", timeout_s=min(QUICK_S, timeout_s))
    except (ServerGone, ServerRefused):
        raise ServerGone(f"{error}; its engine has died") from None


def _replace(endpoint: Endpoint, published: Published, *, timeout_s: float, asleep: bool) -> None:
    quick = min(QUICK_S, timeout_s)
    what = f"weights {published.label}"
    # Running requests are kept: they continue with the new weights, after their cache has been recomputed.
    keep = {"mode": "keep", "clear_cache": "true"}
    if asleep:  # at a second attempt it changes nothing
        wake(endpoint, "weights", timeout_s=timeout_s)
    call(endpoint, "POST", "/pause", what=f"{what}: pausing", timeout_s=quick, params=keep)
    published.route.load(endpoint, what, timeout_s=timeout_s)
    # Never after a failed update: vLLM would complete the layers with whatever is in them.
    call(
        endpoint, "POST", "/finish_weight_update", what=f"{what}: finishing the update", timeout_s=timeout_s,
        body={"weight_version": published.label},
    )  # fmt: skip
    said = call(endpoint, "GET", "/weight_info", what=f"{what}: asking for its version", timeout_s=quick)
    found = said.get("weight_version") if isinstance(said, dict) else said
    if found != published.label:
        raise StaleWeights(f"server {endpoint}: got weights {published.label!r}, says that it has {found!r}")
    if asleep:
        wake(endpoint, "kv_cache", timeout_s=timeout_s)
    call(endpoint, "POST", "/resume", what=f"{what}: resuming", timeout_s=quick)


def _check_canary(endpoint: Endpoint, canary: Canary, *, timeout_s: float) -> float:
    gaps: list[float] = []
    # Only the last tokens of each sequence have log-probs of the policy to compare with.
    for ids, want in zip(canary.ids, canary.logprobs, strict=True):
        # It waits for a place among running completions, which are long: not a quick call.
        got = prompt_logprobs(endpoint, ids, timeout_s=timeout_s)
        gaps += [abs(a - b) for a, b in zip(got[-len(want) :], want, strict=True)]
    gap = math.fsum(gaps) / len(gaps)
    if not gap <= canary.limit:  # NaN must fail too
        raise StaleWeights(
            f"server {endpoint}: its log-probs differ from the policy's by {gap:.2g} nats on {len(gaps)} tokens, "
            f"although it says that it has the same weights; accepted is {canary.limit:g}. It has kept some of its old "
            "weights, or computes in another precision than learner.dtype"
        )
    return gap


def prompt_logprobs(endpoint: Endpoint, ids: Sequence[int], *, timeout_s: float) -> list[float]:
    """Returns a server's log-probs at temperature 1 of the tokens ``ids`` but the first."""
    sampling = {
        "n": 1, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0,
        "repetition_penalty": 1.0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True,
    }  # fmt: skip
    found: Any = call(
        endpoint, "POST", GENERATE, what="canary", timeout_s=timeout_s,
        # Behind the completions that wait for a place on the server, the learner would wait for all of them.
        body={"token_ids": list(ids), "sampling_params": sampling, "priority": FIRST},
    )  # fmt: skip
    try:
        # One mapping for each token from the second on, by id: {"17": {"logprob": -1.5, ...}}.
        rows = found["prompt_logprobs"][1:]
        return [float(row[str(i)]["logprob"]) for i, row in zip(ids[1:], rows, strict=True)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise StaleWeights(f"server {endpoint}: canary: a malformed answer: {type(error).__name__}: {error}") from None
