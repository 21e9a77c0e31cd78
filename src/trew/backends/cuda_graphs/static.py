"""Decodes through :mod:`.static_model`: keeps rows of completions in the slots of its buffers, without gaps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...rollout.torch_engine.prompts import OpenPrompts
from ...rollout.torch_engine.sampler import Draw
from ...types import Sampling
from .static_draw import StaticDraw
from .static_model import StaticModel

PREFILL_TOKENS = 8192  # prompt tokens computed at once, including padding


class StaticDecoder(OpenPrompts[Tensor]):
    """Runs rows of completions through a model; see :class:`trew.rollout.torch_engine.decoder.Decoder`.

    Row r is slot r of ``model``, whose ``begin`` was called and which no other decoder uses. Each prompt is computed
    once: its keys and values are copied to all rows that begin with it, and to the spare slot while some of its rows
    have not begun. (One spare slot is enough: rows begin prompt by prompt.) The next :meth:`step` overwrites logits.
    """

    def __init__(self, model: StaticModel) -> None:
        super().__init__()  # held: the prompt in the spare slot, and the logits (1, V) after it
        self.model = model
        self.lengths: list[int] = []  # tokens of each row in the cache; kept here, so that a step reads no GPU value

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def active(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    @torch.no_grad()
    def add(self, prompts: Sequence[int]) -> Tensor:
        places = self._places(prompts)
        # Logits (1, V) after each prompt.
        known = {} if self.held is None else {self.held[0]: self.held[1]}
        # Where each prompt's keys and values are: the spare slot, or its first new row, where it is computed below.
        source = dict.fromkeys(known, self.model.slots) | {p: row for p, row, _ in places if p not in known}
        lengths = {p: len(self.prompt_ids[p]) for p, _, _ in places}
        for wave in _waves([p for p in lengths if p not in known], lengths=lengths):
            ids = [self.prompt_ids[p] for p in wave]
            piece = max(PREFILL_TOKENS // len(wave), 1)
            logits = self.model.prefill(ids, [source[p] for p in wave], piece=piece)
            known |= dict(zip(wave, logits.split(1), strict=True))
        for prompt, begin, end in places:
            # The first new row holds a prompt that was computed there: it is not copied to itself.
            self._copy(source[prompt], begin + (source[prompt] == begin), end, lengths[prompt])
            self.lengths += [lengths[prompt]] * (end - begin)
            # May clear self.held, whose logits ``known`` keeps.
            self.withdraw(prompt, end - begin)
        # More rows of the last prompt will come: its keys and values go to the spare slot, unless they are there.
        last = places[-1][0]
        if last in self.missing and source[last] != self.model.slots:
            self._copy(source[last], self.model.slots, self.model.slots + 1, lengths[last])
        # A copy: a view would keep the logits of the whole wave alive.
        self.held = (last, known[last].clone()) if last in self.missing else None
        self._write_lengths()
        return torch.cat([known[p].expand(end - begin, -1) for p, begin, end in places])

    def _places(self, prompts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Each prompt with its first new row and the row after its last."""
        places: list[tuple[int, int, int]] = []
        for prompt, equal in itertools.groupby(prompts):
            begin = places[-1][2] if places else self.rows
            places.append((prompt, begin, begin + len(list(equal))))
        return places

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        model, rows = self.model, self.rows
        model.tokens[:rows] = tokens
        # From the list, not from the tensor: that would wait for the GPU.
        model.step(rows, max(self.lengths))
        # Here and not in the recorded step, which has to be idempotent.
        model.lengths[:rows] += 1
        self.lengths = [length + 1 for length in self.lengths]
        return model.logits[:rows]

    def keep(self, alive: Sequence[int]) -> list[int]:
        """As cache.SlotCache.keep: the last rows move into the gaps."""
        order = list(range(len(alive)))
        gaps = sorted(set(order) - set(alive))
        # Copies at most as many rows as have left; to keep their order could take nearly the whole cache.
        for gap, row in zip(gaps, [row for row in alive if row >= len(alive)], strict=True):
            self._copy(row, gap, gap + 1, self.lengths[row])
            order[gap] = row
        self.lengths = [self.lengths[row] for row in order]
        self._write_lengths()
        return order

    def forget(self) -> None:
        super().forget()
        self.lengths = []
        self._write_lengths()

    def draw(self, logits: Tensor, *, keys: Tensor, positions: Tensor, sampling: Sampling) -> Draw:
        return StaticDraw(self.model, sampling)(logits, keys, positions)

    def _copy(self, source: int, begin: int, end: int, width: int) -> None:
        """Copies the first ``width`` columns of slot ``source`` to slots ``begin`` to ``end``, in all layers."""
        # (layers, 2, slots + 1, kv_heads, width, D); one source slot is broadcast to all others.
        cache = self.model.cache[..., :width, :]
        cache[:, :, begin:end] = cache[:, :, source : source + 1]

    def _write_lengths(self) -> None:
        """Copies the lengths to the device, and resets unused rows to position 0: a step also writes keys into the
        unused rows of its bucket."""
        lengths = self.lengths + [0] * (self.model.slots - self.rows)
        self.model.lengths.copy_(torch.tensor(lengths, dtype=torch.int64))


def _waves(prompts: Sequence[int], *, lengths: Mapping[int, int]) -> list[list[int]]:
    """Splits prompts, in order, into waves of at most PREFILL_TOKENS tokens including padding, or of one prompt."""
    waves: list[list[int]] = []
    width = 0
    for prompt in prompts:
        # Prompts of a wave are padded to its longest one.
        width = max(width, lengths[prompt])
        if not waves or (len(waves[-1]) + 1) * width > PREFILL_TOKENS:
            waves.append([])
            width = lengths[prompt]
        waves[-1].append(prompt)
    return waves
