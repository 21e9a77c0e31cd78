"""Decodes through the model's own forward pass: works for any Hugging Face causal language model."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ...types import Sampling
from .cache import SlotCache
from .prompts import OpenPrompts
from .sampler import Draw, draw, uniforms

PREFILL_TOKENS = 8192  # prompt tokens computed at once, including padding
WITHOUT_FLOAT64 = frozenset({"mps"})
"""Devices without float64, which draws compute in."""


class ForwardDecoder(OpenPrompts[tuple[DynamicCache, Tensor]]):
    """Runs rows of completions through a model's ``forward``; see :class:`.decoder.Decoder`.

    Each prompt is computed once for all rows that begin with it. If they do not all begin at the same time, its cache
    is held for the rest. Rows begin prompt by prompt, so holding one prompt is enough. (If another prompt comes in
    between, the first one is computed again.)
    """

    def __init__(self, model: Any, *, slots: int, max_tokens: int) -> None:
        self.model, self.slots, self.max_tokens = model, slots, max_tokens
        self.device = next(model.parameters()).device
        # Not all architectures take position_ids or logits_to_keep.
        self.accepts = inspect.signature(model.forward).parameters
        super().__init__()  # held: a prompt with its cache and the logits after it
        self.forget()

    def forget(self) -> None:
        super().forget()
        self.cache = SlotCache(self.slots)
        self._holds = itertools.count()
        self._held_rows: dict[int, DynamicCache] = {}  # by number

    @property
    def rows(self) -> int:
        return self.cache.rows

    def active(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def add(self, prompts: Sequence[int]) -> Tensor:
        logits = []
        # Each prompt once, in the order of its rows.
        for wave in self._waves(list(dict.fromkeys(prompts))):
            held, self.held = self.held, None  # this wave uses it, or drops it
            cache, scores = held[1] if held and held[0] == wave[0] else self._prefill(wave)
            # The rows of this wave, several for one prompt.
            members = [p for p in prompts if p in set(wave)]
            # source[i]: the row of the prefill that new row i copies.
            source = torch.tensor([wave.index(p) for p in members], device=self.device)
            lengths = [len(self.prompt_ids[p]) for p in members]
            self.cache.add(cache, source=source, lengths=lengths, room=self.max_tokens)
            logits.append(scores[source])
            last = wave[-1]
            # More rows of the last prompt will come: keep its part of the prefill, and only that.
            if self.missing[last] > members.count(last):
                self.held = last, (_one_row(cache, len(wave) - 1), scores[-1:].clone())
            for prompt in wave:
                self.withdraw(prompt, members.count(prompt))
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def step(self, tokens: Tensor) -> Tensor:
        cache = self.cache
        # Positions count from each row's own first token, not from the buffer's first column.
        starts = torch.tensor(cache.starts, device=self.device)
        columns = torch.arange(cache.begin, cache.end + 1, device=self.device)
        return self._call(
            tokens[:, None],
            cache,
            # mask (rows, columns): each row sees its own columns and the new one; positions (rows, 1).
            mask=columns >= starts[:, None],
            positions=cache.end - starts[:, None],
            ragged=max(cache.starts) > cache.begin,
        )

    def keep(self, alive: Sequence[int]) -> list[int]:
        return self.cache.keep(list(alive))

    def hold(self, row: int) -> int:
        number = next(self._holds)
        self._held_rows[number] = self.cache.copy(row)
        return number

    def release(self, held: int) -> None:
        del self._held_rows[held]

    def resume(self, held: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        logits: dict[int, Tensor] = {}
        order: list[int] = []
        # Side by side only where equally many tokens are fed: no padding stands between old and new tokens then.
        for count in dict.fromkeys(map(len, tokens)):
            alike = [number for number, new in enumerate(tokens) if len(new) == count]
            found = self._resumed([self._held_rows.pop(held[n]) for n in alike], [tokens[n] for n in alike])
            order += alike
            logits |= zip(alike, found, strict=True)
        # Rows were appended by length of their new tokens; callers expect the order that they asked in.
        self.cache.reorder(self.rows - len(order), order)
        return torch.stack([logits[number] for number in range(len(held))])

    def _resumed(self, rows: list[DynamicCache], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Appends rows to the cache, with tokens fed to them, equally many to each; returns the logits after them."""
        lengths = [row.get_seq_length() for row in rows]
        width, new = max(lengths), len(tokens[0])
        cache = _side_by_side(rows, width)
        # Rows are padded on the left: starts (rows,) is each one's first column.
        starts = torch.tensor([width - length for length in lengths], device=self.device)
        columns = torch.arange(width + new, device=self.device)
        logits = self._call(
            torch.tensor([list(row) for row in tokens], device=self.device),
            cache,
            mask=columns >= starts[:, None],
            positions=columns[width:] - starts[:, None],
            ragged=len(set(lengths)) > 1,
        )
        every = torch.arange(len(rows), device=self.device)
        self.cache.add(cache, source=every, lengths=[n + new for n in lengths], room=self.max_tokens)
        return logits

    def draw(self, logits: Tensor, *, keys: Tensor, positions: Tensor, sampling: Sampling) -> Draw:
        if logits.device.type not in WITHOUT_FLOAT64:
            return draw(logits, uniform=uniforms(keys, positions), sampling=sampling)
        # On the CPU, which draws the same tokens.
        found = draw(logits.cpu(), uniform=uniforms(keys.cpu(), positions.cpu()), sampling=sampling)
        return Draw(*(values.to(logits.device) for values in (found.tokens, found.floats, found.finite)))

    def _waves(self, prompts: list[int]) -> list[list[int]]:
        """Splits prompts, longest first, into batches of bounded padded size; a held prompt is a separate batch."""
        waves: list[list[int]] = []
        for prompt in prompts:
            # The first prompt of a wave is its longest, so it gives the padded width.
            fits = waves and (len(waves[-1]) + 1) * len(self.prompt_ids[waves[-1][0]]) <= PREFILL_TOKENS
            alone = self.held is not None and waves and waves[-1][0] == self.held[0]
            if fits and not alone:
                waves[-1].append(prompt)
            else:
                waves.append([prompt])
        return waves

    def _prefill(self, prompts: list[int]) -> tuple[DynamicCache, Tensor]:
        """Computes prompts; returns their left-padded cache, and the logits (prompts, V) after their last tokens."""
        ids = [self.prompt_ids[p] for p in prompts]
        width = max(map(len, ids))
        # Token 0 as padding: any id will do, for it is masked.
        tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in ids], device=self.device)
        starts = torch.tensor([width - len(row) for row in ids], device=self.device)
        columns = torch.arange(width, device=self.device)
        cache = DynamicCache()  # without a configuration, so that sliding-window layers are kept whole
        logits = self._call(
            tokens,
            cache,
            mask=columns >= starts[:, None],
            # Padding would have negative positions, which tables of positions cannot look up.
            positions=(columns - starts[:, None]).clamp(min=0),
            ragged=len({len(row) for row in ids}) > 1,
        )
        return cache, logits

    def _call(self, tokens: Tensor, cache: Cache, *, mask: Tensor, positions: Tensor, ragged: bool) -> Tensor:
        """Returns the model's logits (rows, V) at the last column. Passes a mask only if it hides something: a
        mask costs speed."""
        extra: dict[str, Any] = {}
        if "position_ids" in self.accepts:
            extra["position_ids"] = positions
        if "logits_to_keep" in self.accepts:
            extra["logits_to_keep"] = 1
        output = self.model(
            input_ids=tokens,
            attention_mask=mask.long() if ragged else None,
            past_key_values=cache,
            use_cache=True,
            **extra,
        )
        return output.logits[:, -1]


def _one_row(cache: DynamicCache, row: int) -> DynamicCache:
    """A copy of one row of a prefill cache, so that the others can be freed."""
    copy = DynamicCache()
    for index, layer in enumerate(cache.layers):
        keys, values = _tensors(layer)
        copy.update(keys[row : row + 1].clone(), values[row : row + 1].clone(), index)
    return copy


def _side_by_side(rows: Sequence[DynamicCache], width: int) -> DynamicCache:
    """One cache of several rows, padded on the left to ``width`` columns with zeros: memory that holds NaN would reach
    the attention's sum although it is masked."""
    joined = DynamicCache()
    for index in range(len(rows[0].layers)):
        pairs = [_tensors(row.layers[index]) for row in rows]
        padded = [[torch.nn.functional.pad(x, (0, 0, width - x.shape[2], 0)) for x in pair] for pair in pairs]
        joined.update(torch.cat([keys for keys, _ in padded]), torch.cat([values for _, values in padded]), index)
    return joined


def _tensors(layer: Any) -> tuple[Tensor, Tensor]:
    assert isinstance(layer, DynamicLayer)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values
