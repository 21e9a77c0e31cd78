"""Reads and tokenises all pairs of a training; problems of all sources are reported together."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.split import content_key
from ..errors import DataError, Problems
from ..rewards.model.scorer import Encoder
from ..runs.changes import notes_on
from .pairs import Pair, divide, pairs_of_run, read_pairs
from .settings import PairData


@dataclass(frozen=True, slots=True)
class Encoded:
    """One pair as tokens of the reward model: prompt and answer together."""

    key: str
    chosen: list[int]
    rejected: list[int]

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class PairSet:
    """Training and held-out pairs, with notes on how they were chosen."""

    train: list[Pair]
    held: list[Pair]
    notes: tuple[str, ...]


def gather(config: PairData, *, seed: int) -> PairSet:
    """Reads all sources. Raises ConfigError with the problems of all of them."""
    problems = Problems()
    pairs: list[Pair] = []
    notes: list[str] = []
    if config.pairs:
        pairs += problems.attempt(lambda: read_pairs(Path(os.path.expanduser(config.pairs)))) or []
    for run in config.runs:
        pairs += problems.attempt(
            lambda run=run: pairs_of_run(
                Path(os.path.expanduser(run)), reward=config.reward, most=config.pairs_per_prompt, seed=seed
            )
        ) or []  # fmt: skip
        notes += problems.attempt(lambda run=run: notes_on(run)) or []
    held = None
    if config.eval != "auto":
        held = problems.attempt(lambda: read_pairs(Path(os.path.expanduser(config.eval))))
    if problems:
        from ..errors import ConfigError

        raise ConfigError(problems)
    found = _held_out(pairs, config, seed=seed) if held is None else _without(held, pairs)
    return dataclasses.replace(found, notes=(*notes, *found.notes))


def _held_out(pairs: Sequence[Pair], config: PairData, *, seed: int) -> PairSet:
    train, held = divide(pairs, share=config.held_out, seed=seed)
    if not held or not train:
        raise DataError(
            "data.pairs: all pairs are of one prompt, so that none can be held out; give more prompts, or a file "
            "of held-out pairs in data.eval"
        )
    return PairSet(train, held, ())


def _without(held: list[Pair], pairs: Sequence[Pair]) -> PairSet:
    """The pairs of prompts that ``held`` does not have."""
    # By prompt, not by pair: another pair of a held-out prompt would leak it into training.
    prompts = {content_key(pair.prompt) for pair in held}
    train = [pair for pair in pairs if content_key(pair.prompt) not in prompts]
    if not train:
        raise DataError("data.pairs: all their prompts are in data.eval too; nothing is left to train on")
    left_out = len(pairs) - len(train)
    notes = (f"{left_out} training pairs were left out: their prompts are in data.eval",) if left_out else ()
    return PairSet(train, held, notes)


def encode(
    pairs: Sequence[Pair], encoder: Encoder, *, limit: int | None, config: PairData, what: str
) -> tuple[list[Encoded], list[str]]:
    """The pairs as tokens, and notes. Raises DataError if the template refuses a prompt, or an answer is too long
    and ``data.overlong`` says error."""
    out, long, equal = [], [], 0
    # The smaller of both limits; 0 and None are no limit.
    limit = min((n for n in (limit, config.max_tokens) if n), default=None)
    for pair in pairs:
        both = [encoder.whole(pair.prompt, text) for text in (pair.chosen, pair.rejected)]
        # A pair is dropped, never cut: the preference may rest on the part that would be missing.
        if limit is not None and max(map(len, both)) > limit:
            long.append(max(map(len, both)))
        elif not all(both):
            raise DataError(f"prompt {pair.key}: prompt and answer together have no tokens; remove the pair")
        elif both[0] == both[1]:
            equal += 1
        else:
            out.append(Encoded(pair.key, *both))
    if long and config.overlong == "error":
        raise DataError(
            f"data: {len(long)} of {len(pairs)} {what} pairs are longer than {limit} tokens (the longest has "
            f"{max(long)}); set data.overlong = 'drop', or a higher data.max_tokens up to the model's positions"
        )
    left_out = [f"{len(long)} {what} pairs longer than {limit} tokens were left out"] if long else []
    if equal:
        left_out.append(
            f"{equal} {what} pairs were left out: both answers have the same tokens, as where they differ in what the "
            "chat template takes away"
        )
    if not out:
        raise DataError(f"data: no {what} pairs are left: {'; '.join(left_out)}")
    return out, left_out


def fingerprint(*sets: Sequence[Pair]) -> str:
    """A hash of the content and order of pairs."""
    digest = hashlib.blake2b(digest_size=16)
    for pairs in sets:
        for pair in pairs:
            for text in (pair.key, pair.chosen, pair.rejected):
                # A hash of fixed size per text, so that the borders between texts count too.
                digest.update(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())
        # Between the sets: a pair that moves from one to the other changes the hash.
        digest.update(b"|")
    return digest.hexdigest()
