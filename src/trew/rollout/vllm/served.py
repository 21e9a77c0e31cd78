"""What a vLLM server says of the model that it serves, and whether that model reads the tokens of the policy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import EngineError
from . import environment
from .client import ServerGone, ServerRefused, call
from .endpoint import Endpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASK_S = 60.0
"""Limit of a question to a server."""
AWAY = (500, 503)
"""Statuses of a server whose engine has died, or that is being started; a proxy in front of it sends them too."""
LEFT = (*AWAY, 404)
"""Statuses of a server that has answered before, and does not now: a proxy forgets the way to one that restarts."""
CHUNK = 2048
"""Tokens that a server is asked to write as text at a time."""
RARE = "".join(map(chr, (*range(0xA1, 0x800), *range(0x900, 0xD000, 0x155), *range(0x1F300, 0x1FA00, 0x17))))
"""Characters that most tokenizers write with several tokens: those tokens have a text only together."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server's own model: its ``name`` in requests, ``length`` in tokens (None where it does not say), and the
    server's version of vLLM."""

    name: str
    length: int | None
    vllm: str


def served(endpoint: Endpoint, *, away: Collection[int] = AWAY) -> Served:
    """Asks a server for its model; adapters that it has beside that do not count.

    Raises ServerGone, also for a status of ``away``, and EngineError where it is another server than a vLLM of a
    version that trew knows, refuses the token, or has not exactly one model."""
    try:
        version = _ask(endpoint, "/version").get("version")
        models = [card for card in _ask(endpoint, "/v1/models").get("data", []) if not card.get("parent")]
        names = [str(card["id"]) for card in models]
        lengths = [card.get("max_model_len") for card in models]
    except ServerRefused as error:
        raise _refused(endpoint, error, away) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"server {endpoint}: its version or list of models is not as vLLM writes it ({type(error).__name__}: "
            f"{error}); a proxy may answer in its place"
        ) from None
    if not environment.supported(str(version)):
        raise EngineError(f"server {endpoint}: has vLLM {version}, accepts {environment.accepts()}")
    if len(set(names)) != 1:
        raise EngineError(
            f"server {endpoint}: serves {len(names)} models ({', '.join(names) or 'none'}), accepts one, under one name"
        )
    return Served(names[0], lengths[0] if type(lengths[0]) is int else None, str(version))


def _ask(endpoint: Endpoint, route: str) -> dict[str, Any]:
    return dict(call(endpoint, "GET", route, what=f"asking for its model, {route}", timeout_s=ASK_S))


def _refused(endpoint: Endpoint, error: ServerRefused, away: Collection[int]) -> EngineError:
    if error.status in away:
        return ServerGone(str(error))
    if error.status not in (401, 403):
        return error
    got = "another one" if endpoint.token else "none: TREW_TEACHER_TOKEN is not set"
    return EngineError(
        f"server {endpoint}: needs its token, got {got}; set TREW_TEACHER_TOKEN to what vllm serve got as --api-key"
    )


def vocabulary_problem(endpoint: Endpoint, model: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Says which token the server's tokenizer writes as another text than ``tokenizer``; empty if none.

    Every id of ``tokenizer`` is compared: in chunks, and where a chunk differs, token by token. Tokens that are parts
    of characters all look alike alone, so they are compared in the company in which they make one."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    try:
        for at in range(0, len(ids), CHUNK):
            found = _first_difference(endpoint, model, tokenizer, ids[at : at + CHUNK])
            if found is not None:
                token, theirs = found
                return f"token {token} is {_text(tokenizer, [token])!r} for the policy, and {theirs!r} for the server"
        rare = [int(i) for i in tokenizer.encode(RARE, add_special_tokens=False)]
        for at in range(0, len(rare), CHUNK):
            part = rare[at : at + CHUNK]
            if _text(tokenizer, part) != _written(endpoint, model, part):
                return "tokens that are parts of characters make other characters for the server"
    except ServerRefused as error:
        return f"it refuses to write tokens of the policy as text: {error}"
    return ""


def _first_difference(
    endpoint: Endpoint, model: str, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]
) -> tuple[int, str] | None:
    """The first token of a chunk whose text differs, and its text for the server. Chunks may differ without one: two
    versions of a library need not put the same spaces between tokens."""
    theirs = _written(endpoint, model, ids)
    if theirs == _text(tokenizer, ids):
        return None
    if len(ids) == 1:
        return ids[0], theirs
    half = len(ids) // 2
    # The second half is asked about only if the first has no such token.
    return _first_difference(endpoint, model, tokenizer, ids[:half]) or _first_difference(
        endpoint, model, tokenizer, ids[half:]
    )


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _written(endpoint: Endpoint, model: str, ids: Sequence[int]) -> str:
    body = {"model": model, "tokens": list(ids)}
    found = call(endpoint, "POST", "/detokenize", what="comparing its tokens", timeout_s=ASK_S, body=body)
    return str(found["prompt"]) if isinstance(found, dict) and "prompt" in found else repr(found)
