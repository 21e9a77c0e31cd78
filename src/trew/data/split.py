"""Separates training from evaluation: held-out rows, overlap, repeats, and a fingerprint of both together."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import DataError
from ..types import Prompt
from .draws import Permutation
from .sources import unread_eval_note


def content_key(prompt: Prompt) -> str:
    """A key that ignores white space, and the order of a countdown's numbers: equal for prompts that differ in nothing
    else."""
    if prompt.text is not None:
        key = " ".join(prompt.text.split())
    else:
        key = "\x1f".join(f"{m['role']}: {' '.join(m['content'].split())}" for m in prompt.messages or ())
    nums = prompt.columns.get("nums")
    if isinstance(nums, list) and len(nums) > 1:
        # As they are written in the prompt: with the same target, another order is the same problem.
        key = key.replace(", ".join(map(str, nums)), ", ".join(sorted(map(str, nums))))
    return key


def hold_out(prompts: Sequence[Prompt], *, size: int, seed: int, source: str) -> tuple[list[Prompt], list[Prompt], str]:
    """Returns (train, held out, note): holds out ``size`` different prompts chosen by the seed, and keeps file order.

    Removes repeats of held-out prompts from training, and counts them in the note. Raises DataError if more than half
    of the prompts would be held out.
    """
    _refuse_small(prompts, size=size, source=source)
    order = Permutation(len(prompts), "hold out", seed)
    picked: dict[str, int] = {}
    # By content: a repeat does not count as another prompt.
    for index in map(order, range(len(prompts))):
        if len(picked) == size:
            break
        picked.setdefault(content_key(prompts[index]), index)
    chosen = set(picked.values())
    held = [prompt for index, prompt in enumerate(prompts) if index in chosen]
    train = [prompt for prompt in prompts if content_key(prompt) not in picked]
    if len(held) < size or not train:
        raise DataError(
            f"{source}: eval.size = {size} rows would be held out of training, but there are only "
            f"{len(set(map(content_key, prompts)))} different prompts; lower eval.size, or give data.eval"
        )
    note = f"{source}: no test split found{_unread(source)}; {size} rows held out of training (chosen by the seed)"
    if repeats := len(prompts) - len(held) - len(train):
        note += f", and {repeats} {'repeat' if repeats == 1 else 'repeats'} of them left out"
    return train, held, note


def _refuse_small(prompts: Sequence[Prompt], *, size: int, source: str) -> None:
    if 2 * size <= len(prompts):
        return
    smaller = f"set eval.size to at most {len(prompts) // 2}, or " if len(prompts) > 1 else ""
    raise DataError(
        f"{source}: there is no test split{_unread(source)}, so eval.size = {size} rows would be held out of training, "
        f"but there are only {len(prompts)} rows; {smaller}give data.eval"
    )


def _unread(source: str) -> str:
    """In parentheses, what looks like a test split of the source and is not read; empty for nothing."""
    unread = unread_eval_note(source)
    return f" ({unread})" if unread else ""


def repeat_note(prompts: Iterable[Prompt], what: str) -> list[str]:
    """A note with the number of repeated prompts, if there are any."""
    counts = Counter(map(content_key, prompts))
    repeats = counts.total() - len(counts)
    return [f"{repeats} of {counts.total()} {what} prompts are repeats of others"] if repeats else []


def overlap_note(train: Iterable[Prompt], evaluation: Sequence[Prompt]) -> list[str]:
    """A note with the number of evaluation prompts that are in the training data, if any are."""
    known = set(map(content_key, train))
    shared = sum(content_key(prompt) in known for prompt in evaluation)
    if not shared:
        return []
    return [f"{shared} of {len(evaluation)} evaluation prompts are in the training data: accuracy will look too good"]


def fingerprint(*parts: Iterable[Prompt]) -> str:
    """SHA-256 over everything in the prompts, in order. If it differs on resume, the data changed."""
    digest = hashlib.sha256()
    for part in parts:
        for p in part:
            row = [p.uid, p.text, [dict(m) for m in p.messages or ()], dict(p.columns)]
            digest.update(json.dumps(row, sort_keys=True, default=_plain).encode() + b"\n")
        # Between the parts: a row that moves from training to evaluation changes the hash.
        digest.update(b"\x1d")
    return digest.hexdigest()


def _plain(value: Any) -> str:
    """Dates, decimals and bytes from parquet as text; of images and arrays, a hash of what is in them: as text, an
    image is its place in memory, and a long array only its ends."""
    if isinstance(value, bytes):
        return value.hex()
    if getattr(value, "ndim", 1) and callable(content := getattr(value, "tobytes", None)):
        return hashlib.sha256(content()).hexdigest()
    return str(value)
