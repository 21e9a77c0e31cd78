"""Decodes with a paged KV cache: every token of a prompt or a completion is a row that attends to pages.

Each prompt is computed once, and all its completions read its pages; a finished row frees its own pages. The decoder
packs the model's weights for the products when it is created, so they must not change during its lifetime.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...models.anatomy import Transformer
from ...rollout.torch_engine.sampler import Draw
from ...types import Sampling
from .arena import Arena
from .build import SUFFIX, library
from .layers import WIDEST, WIDTH, Layers, packed
from .pages import PAGE, PagedCache, PagedRows, Sequences
from .products import product
from .sampling import drawn

PREFILL_TOKENS = 2048  # prompt tokens computed at once


def unsupported(parts: Transformer | str, *, autocast: torch.dtype | None) -> str | None:
    """Says why these parts cannot be decoded here, in words that complete "because ..."; None if they can."""
    if isinstance(parts, str):
        return parts
    device = parts.embedding.weight.device
    if device.type != "cpu":
        return f"the kernels are for CPUs and it is on {device}"
    if isinstance(found := library(), str):
        return found
    if autocast not in (None, *SUFFIX):
        return f"there are none for {autocast}"
    # The kernels' loops go over whole vectors, without a tail for the rest.
    widths = parts.head_dim, parts.embedding.embedding_dim, parts.layers[0].gate.out_features
    if any(width % WIDTH for width in widths) or parts.head_dim > WIDEST:
        return f"its widths (head, hidden, intermediate: {widths}) are not all multiples of {WIDTH}"
    # Linear layers are packed in any type; these are read where they are.
    plain = [n.weight for n in parts.norms] + [parts.embedding.weight, parts.head.weight]
    if any(p.dtype != torch.float32 for p in plain):
        return "its norms, embedding or head are not float32"
    return None


@dataclass(slots=True)
class _OpenPrompt:
    """A prompt with ``left`` running or future completions; once it is computed, its first logits and its pages of keys
    and values."""

    ids: Sequence[int]
    left: int
    logits: Tensor | None = None
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    """One row being decoded."""

    prompt: int
    born: int  # number of the step before its first: its age gives its length, without a counter per row
    pages: list[int] = field(default_factory=list)  # its own, which follow the prompt's


@dataclass(frozen=True, slots=True)
class _Held:
    """A row that may go on: ``length`` tokens behind its prompt, on ``pages``."""

    prompt: int
    length: int
    pages: list[int]


class CompiledDecoder:
    """Runs rows of completions through a model; see :class:`trew.rollout.torch_engine.resuming.ResumingDecoder`. Logits
    are float32. ``positions``: maximum number of tokens of a row. ``arena``: holds the cache and the head's weights,
    and must stay leased while the decoder is in use; ``apart``: the layers' weights are there too, not in the heap.
    """

    def __init__(
        self,
        parts: Transformer,
        *,
        positions: int,
        autocast: torch.dtype | None = None,
        arena: Arena | None = None,
        apart: bool = False,
    ) -> None:
        self.parts = parts
        dtype = autocast or torch.float32
        self.layers = Layers(parts, dtype=dtype, positions=positions, arena=arena if apart else None)
        self.cache = PagedCache(
            layers=len(parts.layers), kv_heads=parts.kv_heads, head_dim=parts.head_dim, dtype=dtype, arena=arena
        )  # fmt: skip
        # float32 whatever the autocast: bfloat16 would round logits above 16 by up to 0.06.
        self.head = packed(parts.head, dtype=torch.float32, arena=self.cache.arena)
        self.numbers = itertools.count()  # of prompts
        self.prompts: dict[int, _OpenPrompt] = {}
        self.running: list[_Sequence] = []
        self.held: dict[int, _Held] = {}
        self.steps = 0
        self.newest: PagedRows | None = None  # the last step's, while no row joins or leaves
        self.full = 0  # the step at which some row needs another page

    @property
    def rows(self) -> int:
        return len(self.running)

    def active(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def open(self, prompt_ids: Sequence[int], count: int) -> int:
        number = next(self.numbers)
        self.prompts[number] = _OpenPrompt(prompt_ids, count)
        return number

    def withdraw(self, prompt: int, count: int) -> None:
        # ``left`` counts running, held and future rows alike: the prompt's pages go with the last of them.
        self.prompts[prompt].left -= count
        if not self.prompts[prompt].left:
            self.cache.give(self.prompts.pop(prompt).pages)

    @torch.no_grad()
    def add(self, prompts: Sequence[int]) -> Tensor:
        # Prompts that no earlier call has computed, each once and in order.
        fresh = [p for p in dict.fromkeys(prompts) if self.prompts[p].logits is None]
        for part in _parts(fresh, lengths=[len(self.prompts[p].ids) for p in fresh]):
            self._prefill(part)
        self.running += [_Sequence(p, self.steps) for p in prompts]
        # The tables of the last step lack the new rows.
        self.newest = None
        first = [self.prompts[p].logits for p in prompts]
        return torch.stack([logits for logits in first if logits is not None])

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Feeds one token per row (rows,); returns the logits after it."""
        return self._logits(self._forward(tokens, self._next()))

    def keep(self, alive: Sequence[int]) -> list[int]:
        """Drops all other rows; returns the old number of each remaining row, in their new order."""
        kept = set(alive)
        for number, row in enumerate(self.running):
            if number not in kept:
                self.cache.give(row.pages)
                self.withdraw(row.prompt, 1)
        self.newest = None
        order = sorted(kept)
        self.running = [self.running[number] for number in order]
        return order

    def hold(self, row: int) -> int:
        number, sequence = next(self.numbers), self.running[row]
        self.held[number] = _Held(sequence.prompt, self.steps - sequence.born, sequence.pages)
        # keep() will drop the row, and must neither free these pages nor those of the prompt.
        sequence.pages = []
        self.prompts[sequence.prompt].left += 1
        return number

    def release(self, held: int) -> None:
        row = self.held.pop(held)
        self.cache.give(row.pages)
        self.withdraw(row.prompt, 1)

    @torch.no_grad()
    def resume(self, held: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        # Each row goes on in its last page, which may be partly filled, and takes pages for the tokens to be fed.
        rows, begins = [], []
        for number, new in zip(held, tokens, strict=True):
            row = self.held.pop(number)
            length = row.length + len(new)
            pages = [*row.pages, *self.cache.take(-(-length // PAGE) - len(row.pages))]
            # Born as many steps ago as it has tokens: the next step gives its next token index ``length``.
            rows.append(_Sequence(row.prompt, self.steps - length, pages))
            begins.append(row.length)
        # One row of the pass per fed token: sequence, behind, pages are (sum of counts,).
        counts = torch.tensor([len(new) for new in tokens])
        sequence = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(counts)
        ages = [range(begin, begin + len(new)) for begin, new in zip(begins, tokens, strict=True)]
        behind = _int32([age for of_row in ages for age in of_row])
        # Page of each fed token. A completion begins on a new page, so token ``age`` lies on its page age // PAGE.
        pages = _int32([row.pages[age // PAGE] for row, of_row in zip(rows, ages, strict=True) for age in of_row])
        prompts = _int32([len(self.prompts[row.prompt].ids) for row in rows])
        found = PagedRows(
            self._sequences([(row.prompt, row.pages) for row in rows]), sequence, prompts[sequence.long()] + behind,
            pages, behind % PAGE,
        )  # fmt: skip
        logits = self._logits(self._last([token for new in tokens for token in new], found, counts)).clone()
        self.running += rows
        self.newest = None
        return logits

    def forget(self) -> None:
        for rows in (self.running, self.held.values(), self.prompts.values()):
            for row in rows:
                self.cache.give(row.pages)
        self.running, self.held, self.newest, self.prompts = [], {}, None, {}

    def close(self) -> None:
        """Lets go of all that it holds memory for, whoever still holds the decoder."""
        self.forget()
        del self.layers, self.head, self.cache

    def draw(self, logits: Tensor, *, keys: Tensor, positions: Tensor, sampling: Sampling) -> Draw:
        return drawn(logits, keys=keys, positions=positions, sampling=sampling)

    def _next(self) -> PagedRows:
        """Assigns every row's next token a place in the cache, on a new page if the last one is full."""
        self.steps += 1
        if self.newest is not None and self.steps < self.full:
            # No row came, left or filled its page: the same tables, one position on. This skips Python work per row.
            self.newest.positions.add_(1)
            self.newest.places.add_(1)
            return self.newest
        # Index of each row's next token behind its prompt.
        ages = [self.steps - row.born - 1 for row in self.running]
        places = [age % PAGE for age in ages]
        for row, place in zip(self.running, places, strict=True):
            if place == 0:
                row.pages += self.cache.take(1)
        # The fullest page takes PAGE - 1 - max(places) more tokens after this one.
        self.full = self.steps + PAGE - max(places)
        self.newest = PagedRows(
            sequences=self._sequences([(row.prompt, row.pages) for row in self.running]),
            sequence=torch.arange(self.rows, dtype=torch.int32),
            positions=_int32(
                [len(self.prompts[row.prompt].ids) + age for row, age in zip(self.running, ages, strict=True)]
            ),
            pages=_int32([row.pages[-1] for row in self.running]),
            places=_int32(places),
        )
        return self.newest

    def _prefill(self, prompts: Sequence[int]) -> None:
        """Computes prompts side by side without padding, in pieces of PREFILL_TOKENS: their keys and values, and the
        logits after each. A piece may end within a prompt: the next one reads the cache."""
        ids = [self.prompts[p].ids for p in prompts]
        for p in prompts:
            self.prompts[p].pages = self.cache.take(-(-len(self.prompts[p].ids) // PAGE))
        sequences = self._sequences([(p, []) for p in prompts])
        # Tokens of all prompts one after another, (sum of lengths,): sequence and positions tell whose each one is.
        lengths = torch.tensor([len(row) for row in ids])
        sequence = torch.arange(len(prompts), dtype=torch.int32).repeat_interleave(lengths)
        positions = torch.cat([torch.arange(int(length), dtype=torch.int32) for length in lengths])
        # Prompts have no own pages here: position p of a prompt lies on its page p // PAGE.
        pages = sequences.table[sequence.long(), (positions // PAGE).long()]
        rows = PagedRows(sequences, sequence, positions, pages, positions % PAGE)
        last = self._last([token for row in ids for token in row], rows, lengths)
        for p, logits in zip(prompts, self._logits(last), strict=True):
            self.prompts[p].logits = logits.clone()  # not a view, which would keep the logits of all prompts alive

    def _last(self, tokens: Sequence[int], rows: PagedRows, counts: Tensor) -> Tensor:
        """Feeds counts[i] tokens to sequence i, in pieces of PREFILL_TOKENS; returns the final norm's output (S, H)
        after the last one of each, in float32."""
        ids, ends = torch.tensor(tokens), counts.cumsum(0) - 1
        last = torch.empty(len(counts), self.parts.embedding.embedding_dim, dtype=torch.float32)
        of_tokens = rows.sequence, rows.positions, rows.pages, rows.places
        for begin in range(0, len(ids), PREFILL_TOKENS):
            part = slice(begin, begin + PREFILL_TOKENS)
            hidden = self._forward(ids[part], PagedRows(rows.sequences, *(t[part].contiguous() for t in of_tokens)))
            here = (ends >= begin) & (ends < begin + PREFILL_TOKENS)
            # Only last tokens go through the head: logits of all would be (tokens, V).
            last[here] = hidden[ends[here] - begin].float()
        return last

    def _sequences(self, of: Sequence[tuple[int, list[int]]]) -> Sequences:
        """Builds the kernels' tables from each sequence's (prompt, own pages)."""
        prompts = [self.prompts[p] for p, _ in of]
        # Padded to (S, width) with page 0, which is never read: a query sees its sequence up to its own position.
        pages = [[*prompt.pages, *own] for prompt, (_, own) in zip(prompts, of, strict=True)]
        width = max(map(len, pages))
        return Sequences(
            _int32([[*row, *[0] * (width - len(row))] for row in pages]),
            _int32([len(prompt.ids) for prompt in prompts]),
            _int32([len(prompt.pages) for prompt in prompts]),
        )

    def _forward(self, tokens: Tensor, rows: PagedRows) -> Tensor:
        """Returns the final norm's output (N, H), in T."""
        return self.layers.forward(self.parts.embed(tokens), rows, self.cache)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Returns the float32 logits (rows, V) of hidden states (rows, H)."""
        logits = product(hidden.float(), self.head)
        # Soft cap of the logits: cap tanh(z / cap).
        cap = self.parts.logit_cap
        return (logits / cap).tanh_().mul_(cap) if cap else logits


def _parts(prompts: Sequence[int], *, lengths: Sequence[int]) -> list[list[int]]:
    """Splits prompts, in order, into parts of at most PREFILL_TOKENS tokens, or of one longer prompt."""
    parts: list[list[int]] = []
    size = 0
    for prompt, length in zip(prompts, lengths, strict=True):
        if not parts or size + length > PREFILL_TOKENS:
            parts.append([])
            size = 0
        parts[-1].append(prompt)
        size += length
    return parts


def _int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
