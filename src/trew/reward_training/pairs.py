"""Preference pairs: reads them from files, makes them from scored rollouts, splits them by prompt, writes them.

A row of a file has ``prompt`` (text, or a list of messages), ``chosen`` and ``rejected`` (text, or the assistant's
message in a list). Without ``prompt``, chosen and rejected are whole conversations that differ in the last turn only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.files import read_rows
from ..data.preferences import parse_pair
from ..data.rows import BadRow, RowProblems
from ..data.split import content_key
from ..errors import DataError
from ..runs.files import write_atomic
from ..types import Message, Prompt, ScoredGroup


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, the first better than the second."""

    prompt: Prompt
    chosen: str
    rejected: str

    @property
    def key(self) -> str:
        """The prompt's identity: pairs with equal keys must not be split between training and evaluation."""
        return self.prompt.uid


def prompt_key(prompt: str | Sequence[Message]) -> str:
    """A short hash of a prompt's content: equal prompts have equal keys, whatever their source."""
    content = prompt if isinstance(prompt, str) else json.dumps([dict(m) for m in prompt], sort_keys=True)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def make_pair(prompt: str | Sequence[Message], *, chosen: str, rejected: str) -> Pair:
    """A pair whose prompt's uid is the hash of its content."""
    uid = prompt_key(prompt)
    known = Prompt(uid, text=prompt) if isinstance(prompt, str) else Prompt(uid, messages=tuple(prompt))
    return Pair(known, chosen, rejected)


# --------------------------------------------------------------------------------------------------------------------
# Files


def read_pairs(path: Path) -> list[Pair]:
    """Reads the pairs of a .jsonl, .json or .parquet file. Raises DataError that lists the invalid rows."""
    rows = read_rows(path)
    problems = RowProblems(str(path))
    pairs = []
    for row in rows:
        try:
            pairs.append(_pair(row.values))
        except BadRow as error:
            problems.add(row.place, str(error))
    problems.raise_if_any(len(rows))
    return pairs


def _pair(columns: Mapping[str, Any]) -> Pair:
    prompt, chosen, rejected = parse_pair(columns)
    return make_pair(prompt, chosen=chosen, rejected=rejected)


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """Writes pairs as JSON Lines, atomically."""
    lines = []
    for pair in pairs:
        prompt = pair.prompt.text if pair.prompt.messages is None else [dict(m) for m in pair.prompt.messages]
        row = {"prompt": prompt, "chosen": pair.chosen, "rejected": pair.rejected}
        lines.append(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    write_atomic(path, lambda file: file.writelines(lines))


# --------------------------------------------------------------------------------------------------------------------
# From rollouts


@dataclass(frozen=True, slots=True)
class ValuedText:
    """A completion's text and its value."""

    text: str
    value: float


def rank(
    prompt: str | Sequence[Message], outcomes: Sequence[ValuedText], *, most: int, rng: np.random.Generator
) -> list[Pair]:
    """At most ``most`` pairs of different texts with different values, drawn without replacement; all if there are
    fewer. Texts that occur several times in the group count once."""
    # Of equal texts the last value counts, at the place of the first.
    texts = list({o.text: o for o in outcomes}.values())
    # Strictly greater: equal values say nothing about which text is better.
    better = [(a, b) for a in texts for b in texts if a.value > b.value]
    # Drawn, not the first ones: those would all pair the same few texts. Sorted, to keep the order of the group.
    if len(better) > most:
        better = [better[i] for i in sorted(rng.choice(len(better), size=most, replace=False))]
    return [make_pair(prompt, chosen=a.text, rejected=b.text) for a, b in better]


def pairs_of_groups(groups: Iterable[ScoredGroup], *, reward: str, most: int, seed: int) -> list[Pair]:
    """Makes pairs from scored completions, ranked by the reward ``reward``; completions without a value are skipped.

    Raises DataError for episodes.
    """
    rng = np.random.default_rng(seed)
    out = []
    for scored in groups:
        _need_single_turns("groups", [completion.ending for completion in scored.group.rollouts])
        prompt = scored.group.prompt
        outcomes = [
            ValuedText(completion.text, value)
            for completion, score in zip(scored.group.rollouts, scored.scores, strict=True)
            if (value := score.parts.get(reward)) is not None
        ]
        out += rank(prompt.text if prompt.text is not None else prompt.messages or (), outcomes, most=most, rng=rng)
    return out


def pairs_of_run(folder: Path, *, reward: str, most: int, seed: int) -> list[Pair]:
    """Makes pairs from the rollouts of a run of trew, ranked by one of its rewards (the total if ``reward`` is empty).

    Raises DataError if the folder has no rollouts, no such reward, or no group with different values, and for episodes.
    """
    files = sorted((folder / "rollouts").glob("*.parquet"))
    if not files:
        raise DataError(f"{folder}: has no rollouts/*.parquet; give the folder of a run of trew train")
    rng = np.random.default_rng(seed)
    pairs: list[Pair] = []
    known: set[str] = set()
    for file in files:
        # By file, which is by step: a prompt that was drawn in two steps makes two groups.
        groups: dict[str, list[dict[str, Any]]] = {}
        rows = _rollout_rows(file)
        # Tables of older runs lack the column, and have no episodes.
        _need_single_turns(str(folder), [row.get("ending") for row in rows])
        for row in rows:
            groups.setdefault(row["uid"], []).append(row)
            known.update(name for name, _ in row["parts"])
        for members in groups.values():
            pairs += rank(_prompt_of(members[0]), _outcomes(members, reward), most=most, rng=rng)
    if reward and reward not in known:
        raise DataError(f"{folder}: no reward is called {reward!r}; accepts {', '.join(sorted(known)) or 'none'}")
    if not pairs:
        raise DataError(
            f"{folder}: makes no pairs: in no group of its rollouts are two different completions with different "
            f"values of {reward or 'the reward'}; take another run, or another reward"
        )
    return pairs


def _need_single_turns(where: str, endings: Iterable[str | None]) -> None:
    """Raises DataError if a completion is an episode: one that ended for a reason of episodes."""
    # Its prompt and its last reply would make a pair of answers that nobody gave to that prompt.
    if any(endings):
        raise DataError(
            f"{where}: got episodes of an environment, accepts completions of one turn: a pair is a prompt with two "
            "answers, and between the row of an episode and its last reply stand other turns; take a run without an "
            "environment"
        )


def _rollout_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a rollouts table. Raises DataError if the file cannot be read as one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ["uid", "prompt", "completion", "score", "parts"]
    try:
        # Tables of older runs lack these.
        names += [name for name in ("messages", "ending") if name in pq.read_schema(file).names]
        rows = pq.read_table(file, columns=names).to_pylist()
    except (pa.ArrowException, OSError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{file}: cannot be read as rollouts ({first})") from None
    if rows and "messages" not in rows[0]:
        raise DataError(f"{file}: was written by an older trew, without the prompts' messages; run it again")
    return rows


def _prompt_of(row: dict[str, Any]) -> Any:
    """The text of a row's prompt, or its messages."""
    return row["prompt"] if row["messages"] is None else json.loads(row["messages"])


def _outcomes(rows: Sequence[dict[str, Any]], reward: str) -> list[ValuedText]:
    """The completions of a group that have a value."""
    values = [dict(row["parts"]).get(reward) if reward else row["score"] for row in rows]
    return [ValuedText(row["completion"], v) for row, v in zip(rows, values, strict=True) if v is not None]


def divide(pairs: Sequence[Pair], *, share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Splits pairs into training and held-out ones by whole prompts: about ``share`` of the prompts are held out, and
    each side has at least one if there are two.

    A prompt's side depends only on its content and ``seed``, so it keeps it when pairs are added. Only where one side
    would be empty, the prompt nearest to the border changes sides.

    >>> pairs = [make_pair(f"q{i}", chosen="a", rejected="b") for i in range(50)]
    >>> train, held = divide(pairs, share=0.2, seed=0)
    >>> len(train) + len(held), {p.key for p in train} & {p.key for p in held}
    (50, set())
    """

    def place(key: str) -> float:  # uniform in [0, 1)
        digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    # In the order of their places, so that the held-out prompts are the first.
    keys = sorted(dict.fromkeys(pair.key for pair in pairs), key=place)
    count = sum(place(key) < share for key in keys)
    if len(keys) >= 2:
        count = min(max(count, 1), len(keys) - 1)
    first = set(keys[:count])
    # Also what differs from them in white space alone: it would leak them into training.
    held = {content_key(pair.prompt) for pair in pairs if pair.key in first}
    return (
        [pair for pair in pairs if content_key(pair.prompt) not in held],
        [pair for pair in pairs if content_key(pair.prompt) in held],
    )
