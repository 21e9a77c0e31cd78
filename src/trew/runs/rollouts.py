"""Writes completions as parquet: one row per completion, with everything needed to judge or replay a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..types import Prompt, Rollout, Score, ScoredGroup
from ..utils.secrets import redact, secrets
from .files import write_atomic

Render = Callable[[Prompt], str]
Advantages: TypeAlias = "Sequence[Sequence[np.ndarray | float | None]]"
"""Per group and completion: one number, one number per token, or None if the completion was not trained on."""
Effects = Mapping[str, Sequence[np.ndarray]]
"""Columns of ``EFFECTS``: one array (T,) per completion that was trained on, NaN where a token has no value."""
EFFECTS = ("final_ratios", "weights", "coefficients", "ref_logprobs", "teacher_logprobs")
"""What the last optimizer step on a completion did to each of its tokens, and log-probs of the reference and teacher.
"""


@dataclass(frozen=True, slots=True)
class Sampler:
    """What sampled the completions of a table: its log-probs agree with a learner's only as far as this allows."""

    engine: str  # cluster.rollout of the run
    dtype: str  # learner.dtype of the run

    def to_metadata(self) -> dict[str, str]:
        """For the metadata of a table's schema."""
        return {"trew.engine": self.engine, "trew.dtype": self.dtype}

    @staticmethod
    def from_metadata(metadata: Mapping[bytes, bytes]) -> Sampler:
        """Restores the result of :meth:`to_metadata`. Raises KeyError if it is missing."""
        return Sampler(metadata[b"trew.engine"].decode(), metadata[b"trew.dtype"].decode())


def schema() -> Any:
    """The columns. Arrays have one entry per token of the completion; log-probabilities and entropies are in nats."""
    import pyarrow as pa

    floats = pa.list_(pa.float32())
    turn = {"context": pa.int32(), "sampled": pa.int32(), "text": pa.string(), "finish_reason": pa.string(),
            "state": pa.string(), "messages": pa.string(), "calls": pa.string(), "reward": pa.float64(),
            "metrics": pa.map_(pa.string(), pa.float64())}  # fmt: skip
    span = {"version": pa.int64(), "start": pa.int32(), "end": pa.int32()}
    return pa.schema(
        {
            "step": pa.int64(),
            "group": pa.int32(),  # the number of the prompt's group among those sampled in the step
            "trained_group": pa.int32(),  # its number among those trained on; null where it was dropped
            "uid": pa.string(),
            "sample": pa.int32(),
            "prompt": pa.string(),
            "messages": pa.string(),  # a chat prompt's messages as JSON; null where the prompt is plain text
            "completion": pa.string(),
            "columns": pa.string(),  # the rest of the data row, as JSON
            "prompt_ids": pa.list_(pa.int32()),
            "token_ids": pa.list_(pa.int32()),
            "sampled": pa.list_(pa.bool_()),
            "turns": pa.list_(pa.struct(turn)),  # numbers of context and answer tokens per turn; null for a single turn
            "versions": pa.list_(pa.struct(span)),  # which weights sampled which of the tokens
            "logprobs": floats,
            "sampling_logprobs": floats,
            "entropies": floats,
            "advantages": floats,
            **dict.fromkeys(EFFECTS, floats),  # null at tokens without a value
            "step_ends": pa.list_(pa.int32()),  # where rewards score steps: the number of tokens up to each step's end
            "step_scores": pa.list_(pa.float64()),
            "score": pa.float64(),
            "status": pa.string(),
            "parts": pa.map_(pa.string(), pa.float64()),
            "statuses": pa.map_(pa.string(), pa.string()),
            "part_seconds": pa.map_(pa.string(), pa.float64()),
            "baseline": pa.float64(),  # the greedy answer's; NaN if it has none, null without a greedy baseline
            "extracted": pa.string(),
            "finish_reason": pa.string(),
            "rollout_status": pa.string(),
            "rollout_error": pa.string(),
            "ending": pa.string(),  # why an episode ended; empty if a completion is none
            "conversation": pa.string(),  # all messages of an episode as JSON; null where a completion is none
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
    trained_on: Sequence[ScoredGroup] = (),
    effects: Effects | None = None,
    baselines: Mapping[str, float] | None = None,
    sampler: Sampler | None = None,
    render: Render = plain_prompt,
    guard: Callable[[Path], AbstractContextManager[None]] | None = None,
) -> int:
    """Writes ``path`` atomically and returns the number of completions. Raises what ``write_atomic`` raises.

    ``trained_on`` are those of ``groups`` that the step learned from, in its order, and ``effects`` are on their
    completions, one after the other. ``baselines``: rewards of greedy answers by uid. ``sampler`` goes into the table's
    metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    hidden = secrets()  # collected once, since redact would look them up for every text
    # By identity: groups hold arrays, whose comparison is no truth value. Where an epoch ends within a step, a row of
    # data may be in it twice.
    places: dict[int, list[int]] = {}
    for i, group in reversed(list(enumerate(trained_on))):
        places.setdefault(id(group), []).append(i)
    rows = []
    for g, scored in enumerate(groups):
        group = scored.group
        # What all completions of a prompt have.
        shared = {
            "step": step,
            "group": g,
            # None: sampled and dropped, by dynamic sampling for example.
            "trained_group": at.pop() if (at := places.get(id(scored))) else None,
            "baseline": None if baselines is None else baselines.get(group.prompt.uid),
            "uid": _text(group.prompt.uid, hidden),
            "prompt": _text(render(group.prompt), hidden),
            "messages": _messages(group.prompt, hidden),
            "columns": _columns(group.prompt, hidden),
        }
        for i, (rollout, score) in enumerate(zip(group.rollouts, scored.scores, strict=True)):
            # (T,) float32, or None.
            advantage = None if advantages is None else _per_token(advantages[g][i], len(rollout.token_ids))
            rows.append({**shared, "sample": i, "advantages": advantage, **_sample_row(rollout, score, hidden)})
    table = pa.Table.from_pylist(rows, schema=schema().with_metadata(sampler.to_metadata() if sampler else None))
    # Columns of effects come as arrays: see _effect.
    for name, values in (effects or {}).items():
        table = table.set_column(table.column_names.index(name), table.field(name), _effect(values, table, trained_on))
    # With checksums, so that a replay notices a byte that has changed.
    how = {"compression": "zstd", "write_page_checksum": True}
    write_atomic(path, lambda file: pq.write_table(table, file, **how), guard=guard)
    return len(rows)


def _effect(values: Sequence[np.ndarray], table: Any, trained_on: Sequence[ScoredGroup]) -> Any:
    """A column of ``EFFECTS``: the ``values`` of the completions that were trained on, with null for NaN; null at
    completions without any."""
    import pyarrow as pa

    # (groups + 1,): completions of trained groups before each, in the order of ``values``.
    starts = np.cumsum([0, *(len(scored.group.rollouts) for scored in trained_on)])
    places = zip(table["trained_group"].to_pylist(), table["sample"].to_pylist(), strict=True)
    # (T,) for each row of the table, empty where it was not trained on.
    of_rows = [np.empty(0, np.float32) if g is None else values[starts[g] + i] for g, i in places]
    flat = np.concatenate(of_rows).astype(np.float32)
    offsets = np.cumsum([0, *map(len, of_rows)]).astype(np.int32)
    # Built from the buffers: Python objects for millions of tokens would take seconds.
    # Null where no token has a value, which differs from a list of nulls.
    empty = [not (~np.isnan(of_row)).any() for of_row in of_rows]
    return pa.ListArray.from_arrays(offsets, pa.array(flat, mask=np.isnan(flat)), mask=pa.array(empty))


def _sample_row(rollout: Rollout, score: Score, hidden: tuple[str, ...]) -> dict[str, Any]:
    """The columns of one completion. Secrets (``hidden``) are redacted in every text that a model or an environment
    wrote; token ids stay, since a replay must learn from the same ones."""
    return {
        "completion": _text(rollout.text, hidden),
        "prompt_ids": rollout.prompt_ids,
        "token_ids": rollout.token_ids,
        "sampled": rollout.sampled,
        "turns": _turns(rollout, hidden)
        if len(rollout.turns) > 1 or any(t.state is not None for t in rollout.turns)
        else None,
        "ending": rollout.ending,
        "conversation": _json(rollout.conversation, hidden) if rollout.ending else None,
        "versions": [{"version": s.version, "start": s.start, "end": s.end} for s in rollout.versions],
        "logprobs": rollout.policy_logprobs,
        "sampling_logprobs": rollout.logprobs,
        "entropies": rollout.entropies,
        "step_ends": [end for end, _ in score.steps] or None,
        "step_scores": [value for _, value in score.steps] or None,
        "score": score.value,
        "status": score.status,
        # Not masked: readers know rewards by their names.
        "parts": [(_text(name, ()), value) for name, value in score.parts.items()],
        "statuses": [(_text(name, ()), status) for name, status in score.statuses.items()],
        "part_seconds": [(_text(k, ()), v) for k, v in score.part_seconds.items()],
        "extracted": None if score.extracted is None else _text(score.extracted, hidden),
        "finish_reason": rollout.finish_reason,
        "rollout_status": rollout.status,
        "rollout_error": _text(rollout.error, hidden),
        "policy_version": rollout.oldest_version,
        "reward_seconds": score.seconds,
    }


def _turns(rollout: Rollout, hidden: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "context": len(turn.context_ids), "sampled": len(turn.token_ids), "text": _text(turn.text, hidden),
            "finish_reason": turn.finish_reason, "state": None if turn.state is None else _text(turn.state, hidden),
            "messages": _json(turn.messages, hidden), "calls": _json(turn.calls, hidden), "reward": turn.reward,
            "metrics": [(_text(name, ()), value) for name, value in turn.metrics.items()],
        }
        for turn in rollout.turns
    ]  # fmt: skip


def _columns(prompt: Prompt, hidden: tuple[str, ...]) -> str:
    """The other columns of the data row as JSON. Values are masked first: masking the text could break the JSON."""
    return _json(prompt.columns, hidden)


def _json(value: Any, hidden: tuple[str, ...]) -> str:
    # The round trip turns whatever JSON does not know (dates, decimals) into strings that redact can see.
    plain = json.loads(json.dumps(value, default=str))
    return _text(json.dumps(redact(plain, hidden), ensure_ascii=False), ())


def _messages(prompt: Prompt, hidden: tuple[str, ...]) -> str | None:
    if prompt.messages is None:
        return None
    return _json([dict(message) for message in prompt.messages], hidden)


def _text(text: str, hidden: tuple[str, ...]) -> str:
    """Redacts and makes encodable: a tokenizer can produce a lone surrogate, which UTF-8 cannot hold."""
    return redact(text, hidden).encode("utf-8", "replace").decode("utf-8")


def _per_token(value: np.ndarray | float | None, length: int) -> np.ndarray | None:
    if value is None:
        return None
    array = np.asarray(value, dtype=np.float32)
    # One number for the whole completion.
    if array.ndim == 0:
        return np.full(length, array, dtype=np.float32)
    if array.shape != (length,):
        raise ValueError(f"advantages: got shape {array.shape} for a completion of {length} tokens")
    return array
