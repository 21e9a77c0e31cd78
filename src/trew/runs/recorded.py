"""Reads the rollouts of an earlier run back from its tables, exactly as that run trained on them.

Everything that an update depends on is in ``rollouts/NNNNNN.parquet``: tokens, log-probs, versions, scores, and which
groups were trained on. The rest of the folder is consulted only where a table is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ReplayError
from ..rollout import StepRollouts
from ..types import Group, Prompt, Rollout, Score, ScoredGroup, Span, Turn
from ..utils.metric_rows import is_evaluation
from .rollouts import EFFECTS, Sampler, schema
from .rows import decode_row

Row = dict[str, Any]
_ARRAYS = ("prompt_ids", "token_ids", "sampled", "logprobs", "sampling_logprobs", "entropies")
_OPTIONAL = frozenset(
    {"messages", "turns", "logprobs", "entropies", "advantages", "step_ends", "step_scores", "score", "baseline",
     "extracted", "policy_version", "trained_group", "conversation"}
)  # fmt: skip
"""Columns that may be null."""
_UNUSED = ("advantages", "policy_version", "conversation", *EFFECTS)
"""Columns that follow from others: what the run computed from its rollouts is computed again."""


class RecordedRollouts:
    """The tables of the run in ``folder``. Raises ReplayError if it has none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "rollouts").is_dir() or not any((folder / "rollouts").glob("*.parquet")):
            raise ReplayError(f"{folder}: has no rollouts/*.parquet; give the folder of a run of trew train")
        self._rows = {row["step"]: row for row in _rows(folder / "metrics.jsonl") if not is_evaluation(row)}

    def path(self, step: int) -> Path:
        return self.folder / "rollouts" / f"{step:06d}.parquet"

    @property
    def steps(self) -> int:
        """The number of steps that the run recorded."""
        # Both count: a step without completions has a row and no table.
        return max([*self._rows, *(int(p.stem) for p in self.path(0).parent.glob("*.parquet") if p.stem.isdecimal())])

    def check(self, steps: int) -> None:
        """Raises ReplayError if the tables of the first ``steps`` steps are not all there and readable."""
        if steps > self.steps:
            raise ReplayError(
                f"steps: got {steps}, but {self.folder} has rollouts of {self.steps} steps; set steps to that or fewer"
            )
        for step in range(1, steps + 1):
            if not self.is_empty(step):
                _footer(self.path(step))

    def is_empty(self, step: int) -> bool:
        """Whether nothing was sampled in ``step``. Raises ReplayError if its table is missing."""
        path = self.path(step)
        if path.exists():
            return False
        if (row := self._rows.get(step)) is not None and "groups_sampled" not in row:
            return True  # the engine's numbers were not finite: the step has a row and no completions
        raise ReplayError(f"{path}: is missing; put it back, or set steps = {step - 1}")

    def sampler(self, step: int) -> Sampler:
        """What sampled the completions of ``step``."""
        try:
            return Sampler.from_metadata(_footer(self.path(step)).schema.to_arrow_schema().metadata or {})
        except KeyError:
            raise ReplayError(f"{self.path(step)}: {_OLDER}") from None

    def fingerprint(self, step: int) -> str:
        """Identifies a table by its footer, which has the sizes, offsets and extremes of all columns."""
        footer = b"" if self.is_empty(step) else _footer_bytes(self.path(step))
        return hashlib.blake2b(footer, digest_size=16).hexdigest()

    def read(self, step: int) -> StepRollouts:
        """The rollouts of ``step``. Raises ReplayError if its table is missing or damaged."""
        if self.is_empty(step):
            return StepRollouts((), ())
        path = self.path(step)
        try:
            found = _step(_table(path), step)
            # Without a row (metrics.jsonl was lost), the table alone is believed.
            wanted = self._rows.get(step, {}).get("groups_sampled", len(found.sampled))
            if wanted != len(found.sampled):
                raise ValueError(f"{len(found.sampled)} groups, where metrics.jsonl counts {wanted}")
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ReplayError(f"{path}: is damaged ({error}); put a backup of it there") from None
        return found


_OLDER = "was written by an older version of trew, without all that a replay needs; run it again"


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    yield from (row for line in lines if (row := decode_row(line)) is not None)


def _opened(path: Path, read: Callable[[], Any]) -> Any:
    """The result of ``read``. Raises ReplayError if the file cannot be read as Parquet."""
    import pyarrow as pa

    try:
        return read()
    except (pa.ArrowException, OSError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ReplayError(f"{path}: cannot be read as a table of rollouts ({why}); put a backup of it there") from None


def _footer(path: Path) -> Any:
    import pyarrow.parquet as pq

    return _opened(path, lambda: pq.read_metadata(path))


def _footer_bytes(path: Path) -> bytes:
    """The footer of a Parquet file: its length is in the eight bytes at the end."""

    def read() -> bytes:
        with path.open("rb") as file:
            # Length of the footer, then b"PAR1".
            file.seek(-8, 2)
            size = int.from_bytes(file.read(4), "little")
            file.seek(-8 - size, 2)
            return file.read(size)

    return _opened(path, read)


def _table(path: Path) -> Any:
    """The columns of a table, whose names and types are those that a run writes."""
    import pyarrow.parquet as pq

    wanted = [field for field in schema() if field.name not in _UNUSED]
    names = [field.name for field in wanted]
    # The footer first: a table of another version is refused by name, before its columns fail to convert.
    there = {field.name: field.type for field in _footer(path).schema.to_arrow_schema()}
    if any(field.name not in there for field in wanted):
        raise ReplayError(f"{path}: {_OLDER}")
    if other := [field.name for field in wanted if there[field.name] != field.type]:
        raise ReplayError(f"{path}: column {other[0]} is not one that a run of trew writes")
    table = _opened(path, lambda: pq.read_table(path, columns=names, page_checksum_verification=True))
    if lacking := [n for n in names if n not in _OPTIONAL and table[n].null_count]:
        raise ReplayError(f"{path}: is damaged (column {lacking[0]} has empty entries); put a backup of it there")
    return table


def _step(table: Any, step: int) -> StepRollouts:
    """The rollouts of a table. Raises ValueError if its columns contradict one another."""
    # ---- columns to rows
    columns = {
        name: _arrays(table[name]) if name in _ARRAYS else table[name].to_pylist() for name in table.column_names
    }
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if other := {row["step"] for row in rows} - {step}:
        raise ValueError(f"it holds step {min(other)}")
    # ---- rows to groups, in the order in which they were sampled
    members = _members(rows)
    uids: set[str] = set()
    groups = [_group(rows, uids) for rows in members]
    # ---- and those that were trained on, in the order of training
    order = _trained_on(members)
    # A null is of a run without greedy baselines; NaN, of a prompt without one.
    baselines = {groups[i].group.prompt.uid: members[i][0]["baseline"] for i in order}
    return StepRollouts(
        tuple(groups[i] for i in order), tuple(groups), None if None in baselines.values() or not order else baselines
    )


def _members(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each group. Raises ValueError unless groups and their completions are numbered in order."""
    members: list[list[Row]] = []
    for row in rows:
        if row["group"] == len(members):
            members.append([])
        if row["group"] != len(members) - 1 or row["sample"] != len(members[-1]):
            raise ValueError(f"completion {row['sample']} of group {row['group']} is out of order")
        members[-1].append(row)
    return members


def _trained_on(members: Sequence[Sequence[Row]]) -> list[int]:
    """The groups that the step learned from, in its order; dropped groups have no number."""
    places = {first["trained_group"]: i for i, (first, *_) in enumerate(members) if first["trained_group"] is not None}
    if sorted(places) != list(range(len(places))):
        raise ValueError("groups that were trained on are missing")
    return [places[i] for i in range(len(places))]


def _arrays(column: Any) -> list[np.ndarray | None]:
    """The lists of a column as arrays of their own; None for a null."""
    lists = column.combine_chunks()
    values, offsets = lists.values, lists.offsets.to_numpy()
    if values.null_count:
        raise ValueError("a list has empty entries")
    flat = values.to_numpy(zero_copy_only=False)
    # Token ids as elsewhere: int64.
    flat = flat.astype(np.int64) if flat.dtype == np.int32 else flat
    # A null list and an empty one have equal offsets.
    known = lists.is_valid().to_numpy(zero_copy_only=False)
    # Copies: views would keep the arrays of the whole table alive.
    return [flat[a:b].copy() if ok else None for a, b, ok in zip(offsets, offsets[1:], known, strict=False)]


def _group(rows: Sequence[Row], uids: set[str]) -> ScoredGroup:
    """A group of a table; its uid joins ``uids``. Two whose uids were masked to the same text get different ones."""
    first = rows[0]
    if any(row["uid"] != first["uid"] or row["trained_group"] != first["trained_group"] for row in rows):
        raise ValueError(f"the completions of group {first['group']} are of several")
    uid = first["uid"] if first["uid"] not in uids else f"{first['uid']}~{first['group']}"
    uids.add(uid)
    columns = json.loads(first["columns"])
    if first["messages"] is None:
        prompt = Prompt(uid, text=first["prompt"], columns=columns)
    else:
        prompt = Prompt(uid, messages=tuple(json.loads(first["messages"])), columns=columns)
    return ScoredGroup(Group(prompt, tuple(map(_rollout, rows))), tuple(map(_score, rows)))


def _rollout(row: Row) -> Rollout:
    tokens = row["token_ids"]
    _check_tokens(row)
    # A single turn has no entry of its own: it is made from the columns.
    turns = row["turns"] or [
        {
            "context": len(row["prompt_ids"]), "sampled": len(tokens), "text": row["completion"],
            "finish_reason": row["finish_reason"], "state": None, "messages": "[]", "calls": "[]", "reward": None,
            "metrics": (),
        }
    ]  # fmt: skip
    spans = [Span(**span) for span in row["versions"]]
    # Positions count from the first token after the prompt, so that the first turn's context begins below 0.
    made, at = [], -len(row["prompt_ids"])
    for turn in turns:
        start = at + turn["context"]
        end = start + turn["sampled"]
        # Of later turns, what stands between the policy's tokens.
        context = row["prompt_ids"] if at < 0 else tokens[at:start]
        # Spans of versions are stored for the whole completion, and belong to one turn each.
        own = tuple(Span(s.version, s.start - start, s.end - start) for s in spans if start <= s.start and s.end <= end)
        made.append(_turn(row, turn, context, slice(start, end), own))
        at = end
    found = Rollout(tuple(made), row["rollout_status"], row["rollout_error"], row["ending"])
    # What was put together must give back the columns it came from.
    if (
        len(found.token_ids) != len(tokens)
        or (found.sampled != row["sampled"]).any()
        or len(found.versions) != len(spans)
    ):
        raise ValueError("turns or versions do not cover the tokens")
    return found


def _check_tokens(row: Row) -> None:
    tokens = row["token_ids"]
    for name in ("sampled", "sampling_logprobs", "logprobs", "entropies"):
        if row[name] is not None and len(row[name]) != len(tokens):
            raise ValueError(f"{len(row[name])} {name} for {len(tokens)} tokens")
    if (tokens < 0).any() or (row["prompt_ids"] < 0).any() or not len(row["prompt_ids"]):
        raise ValueError("a token id is negative, or a prompt is empty")


def _turn(row: Row, turn: Row, context: np.ndarray, part: slice, versions: tuple[Span, ...]) -> Turn:
    def of(name: str) -> np.ndarray | None:
        return None if row[name] is None else row[name][part]

    return Turn(
        context, row["token_ids"][part], row["sampling_logprobs"][part], of("logprobs"), of("entropies"), versions,
        turn["text"], turn["finish_reason"], turn["state"], tuple(json.loads(turn["messages"])),
        tuple(json.loads(turn["calls"])), turn["reward"], dict(turn["metrics"]),
    )  # fmt: skip


def _score(row: Row) -> Score:
    steps = zip(row["step_ends"] or (), row["step_scores"] or (), strict=True)
    return Score(
        row["score"], row["status"], dict(row["parts"]), row["extracted"], row["reward_seconds"], tuple(steps),
        dict(row["statuses"]), dict(row["part_seconds"]),
    )  # fmt: skip
