"""Writes completions as parquet: one row per completion, with everything needed to judge or replay a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from ..types import Prompt, Rollout, Score, ScoredGroup
from ..utils.secrets import redact, secrets
from .files import write_atomic

Render = Callable[[Prompt], str]
Advantages = Sequence[Sequence["np.ndarray | float | None"]]
"""Per group and completion: one number, one number per token, or None if the completion was not trained on."""


def schema() -> Any:
    """The columns. Arrays have one entry per token of the completion; log-probabilities and entropies are in nats."""
    import pyarrow as pa

    floats = pa.list_(pa.float32())
    return pa.schema(
        {
            "step": pa.int64(),
            "uid": pa.string(),
            "sample": pa.int32(),
            "prompt": pa.string(),
            "messages": pa.string(),  # a chat prompt's messages as JSON; null where the prompt is plain text
            "completion": pa.string(),
            "columns": pa.string(),  # the rest of the data row, as JSON
            "prompt_ids": pa.list_(pa.int32()),
            "token_ids": pa.list_(pa.int32()),
            "sampled": pa.list_(pa.bool_()),
            "logprobs": floats,
            "sampling_logprobs": floats,
            "entropies": floats,
            "advantages": floats,
            "step_ends": pa.list_(pa.int32()),  # where rewards score steps: the number of tokens up to each step's end
            "step_scores": pa.list_(pa.float64()),
            "score": pa.float64(),
            "status": pa.string(),
            "parts": pa.map_(pa.string(), pa.float64()),
            "statuses": pa.map_(pa.string(), pa.string()),
            "extracted": pa.string(),
            "finish_reason": pa.string(),
            "policy_version": pa.int64(),
            "reward_seconds": pa.float64(),
        }
    )


def plain_prompt(prompt: Prompt) -> str:
    """Renders a prompt for people: text as it is, a chat as one ``role: content`` block per message."""
    if prompt.text is not None:
        return prompt.text
    return "\n\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in prompt.messages or ())


def write_rollouts(
    path: Path,
    groups: Iterable[ScoredGroup],
    *,
    step: int,
    advantages: Advantages | None = None,
    render: Render = plain_prompt,
    guard: Callable[[Path], AbstractContextManager[None]] | None = None,
) -> int:
    """Writes ``path`` atomically and returns the number of completions. Raises what ``write_atomic`` raises."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    hidden = secrets()  # collected once, since redact would look them up for every text
    rows = []
    for g, scored in enumerate(groups):
        group = scored.group
        shared = {
            "step": step,
            "uid": _text(group.prompt.uid, hidden),
            "prompt": _text(render(group.prompt), hidden),
            "messages": _messages(group.prompt, hidden),
            "columns": _columns(group.prompt, hidden),
        }
        for i, (rollout, score) in enumerate(zip(group.rollouts, scored.scores, strict=True)):
            advantage = None if advantages is None else _per_token(advantages[g][i], len(rollout.token_ids))
            rows.append({**shared, "sample": i, "advantages": advantage, **_sample_row(rollout, score, hidden)})
    table = pa.Table.from_pylist(rows, schema=schema())
    write_atomic(path, lambda file: pq.write_table(table, file, compression="zstd"), guard=guard)
    return len(rows)


def _sample_row(rollout: Rollout, score: Score, hidden: tuple[str, ...]) -> dict[str, Any]:
    return {
        "completion": _text(rollout.text, hidden),
        "prompt_ids": rollout.prompt_ids,
        "token_ids": rollout.token_ids,
        "sampled": rollout.sampled,
        "logprobs": rollout.policy_logprobs,
        "sampling_logprobs": rollout.logprobs,
        "entropies": rollout.entropies,
        "step_ends": [end for end, _ in score.steps] or None,
        "step_scores": [value for _, value in score.steps] or None,
        "score": score.value,
        "status": score.status,
        "parts": [(_text(name, ()), value) for name, value in score.parts.items()],
        "statuses": [(_text(name, ()), status) for name, status in score.statuses.items()],
        "extracted": None if score.extracted is None else _text(score.extracted, hidden),
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.oldest_version,
        "reward_seconds": score.seconds,
    }


def _columns(prompt: Prompt, hidden: tuple[str, ...]) -> str:
    """The other columns of the data row as JSON. Values are masked first: masking the text could break the JSON."""
    # The round trip turns whatever JSON does not know (dates, decimals) into strings that redact can see.
    plain = json.loads(json.dumps(prompt.columns, default=str))
    return _text(json.dumps(redact(plain, hidden), ensure_ascii=False), ())


def _messages(prompt: Prompt, hidden: tuple[str, ...]) -> str | None:
    if prompt.messages is None:
        return None
    turns = [{key: _text(value, hidden) for key, value in turn.items()} for turn in prompt.messages]
    return json.dumps(turns, ensure_ascii=False)


def _text(text: str, hidden: tuple[str, ...]) -> str:
    """Redacts and makes encodable: a tokenizer can produce a lone surrogate, which UTF-8 cannot hold."""
    return redact(text, hidden).encode("utf-8", "replace").decode("utf-8")


def _per_token(value: np.ndarray | float | None, length: int) -> np.ndarray | None:
    if value is None:
        return None
    array = np.asarray(value, dtype=np.float32)
    if array.ndim == 0:
        return np.full(length, array, dtype=np.float32)
    if array.shape != (length,):
        raise ValueError(f"advantages: got shape {array.shape} for a completion of {length} tokens")
    return array
