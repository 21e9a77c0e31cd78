"""The decoding loop: prompts come in as rows, every step gives each row a token, finished rows leave.

Everything per token is a tensor over rows; Python looks at single rows when they end (or have stop strings).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ...errors import EngineError
from ...types import Sampling
from .cache import SlotCache
from .sampler import Draw, draw, row_key, uniforms

_PREFILL_TOKENS = 8192  # prompt tokens, padding included, that are computed at once


@dataclass(frozen=True, slots=True)
class Finished:
    """One completion, T tokens, as arrays (T,)."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    sampling_logprobs: np.ndarray
    entropies: np.ndarray


class Decoder:
    """One ``generate`` call: R = prompts x n completions through at most ``slots`` rows at a time.

    Completion number p * n + s is sample s of prompt p. Slots 0 .. rows - 1 of all state tensors are in use.
    """

    def __init__(
        self,
        model: Any,
        prompt_ids: Sequence[Sequence[int]],
        *,
        uids: Sequence[str],
        n: int,
        sampling: Sampling,
        slots: int,
        stop_ids: frozenset[int],
        stop_strings: Sequence[str],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.model, self.prompt_ids, self.uids, self.n, self.sampling = model, prompt_ids, uids, n, sampling
        self.stop_strings, self.decode = tuple(stop_strings), decode
        # a stop string is looked for in as many last tokens as it has bytes, and some for tokens without text
        self.tail = max((len(s.encode()) for s in stop_strings), default=0) + 8
        self.device = next(model.parameters()).device
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=self.device)
        self.accepts = inspect.signature(model.forward).parameters
        # Taken from the end: the longest prompts first, as shorter ones then fit beside them without moving anything,
        # and as what needs most memory should fail at once if it must.
        self.waiting = sorted(range(len(prompt_ids) * n), key=lambda r: (len(prompt_ids[r // n]), -r))
        self.held: tuple[int, DynamicCache, Tensor] | None = (
            None  # a prompt with completions still waiting: cache, logits
        )

        total, longest = len(self.waiting), sampling.max_tokens
        self.tokens_out = torch.zeros((total, longest), dtype=torch.int64, device=self.device)
        self.floats_out = torch.zeros((3, total, longest), dtype=torch.float32, device=self.device)
        self.lengths = [0] * total

        self.cache = SlotCache(slots)
        self.completion = torch.zeros(slots, dtype=torch.int64, device=self.device)  # which one sits in the slot
        self.keys = torch.zeros(slots, dtype=torch.int64, device=self.device)  # of its draws
        self.position = torch.zeros(slots, dtype=torch.int64, device=self.device)  # tokens it has
        self.last = torch.zeros(slots, dtype=torch.int64, device=self.device)  # its newest token

    def run(self, progress: Callable[[int], None]) -> Iterator[int]:
        """Decodes everything; yields each prompt's number when its last completion has finished. ``progress`` gets the
        number of completions that have just finished."""
        missing = [self.n] * len(self.prompt_ids)
        while self.waiting or self.cache.rows:
            before = self.cache.rows
            if self._should_admit():
                logits, first = self._admit(), before
            else:
                logits, first = self._forward(), 0
            ended = self._take(logits, first)
            if ended:
                progress(len(ended))
                for row in self._drop(ended):
                    missing[row // self.n] -= 1
                    if not missing[row // self.n]:
                        yield row // self.n

    def finished(self, prompt: int) -> list[Finished]:
        """The completions of a prompt that has been yielded."""
        rows = slice(prompt * self.n, (prompt + 1) * self.n)
        longest = max(self.lengths[rows])
        tokens = self.tokens_out[rows, :longest].cpu().numpy()
        floats = self.floats_out[:, rows, :longest].cpu().numpy()
        return [
            Finished(tokens[i, :k].copy(), *(floats[j, i, :k].copy() for j in range(3)))
            for i, k in enumerate(self.lengths[rows])
        ]

    # ---- rows come in

    def _should_admit(self) -> bool:
        """A quarter of the slots at a time, as each admission costs a pass of its own."""
        free = self.cache.slots - self.cache.rows
        return bool(self.waiting) and (not self.cache.rows or free >= min(len(self.waiting), -(-self.cache.slots // 4)))

    def _admit(self) -> Tensor:
        """Fills free slots; returns the new rows' first logits (rows, V)."""
        free = self.cache.slots - self.cache.rows
        taken = [self.waiting.pop() for _ in range(min(free, len(self.waiting)))]
        first = self.cache.rows
        prompts = list(dict.fromkeys(r // self.n for r in taken))
        logits = []
        for wave in self._waves(prompts):
            held, self.held = self.held, None
            cache, scores = held[1:] if held and held[0] == wave[0] else self._prefill(wave)
            members = [r for r in taken if r // self.n in set(wave)]
            source = torch.tensor([wave.index(r // self.n) for r in members], device=self.device)
            lengths = [len(self.prompt_ids[r // self.n]) for r in members]
            self.cache.add(cache, source=source, lengths=lengths, room=self.sampling.max_tokens)
            logits.append(scores[source])
            if self.waiting and self.waiting[-1] // self.n == wave[-1]:
                self.held = wave[-1], _one_row(cache, len(wave) - 1), scores[-1:].clone()
        new = slice(first, self.cache.rows)
        self.completion[new] = torch.tensor(taken, device=self.device)
        keys = [row_key(self.sampling.seed, self.uids[r // self.n], r % self.n) for r in taken]
        self.keys[new] = torch.tensor(keys, device=self.device)
        self.position[new] = 0
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _waves(self, prompts: list[int]) -> list[list[int]]:
        """Cuts prompts, longest first, into batches of bounded size; a held prompt is a batch of its own."""
        waves: list[list[int]] = []
        for prompt in prompts:
            fits = waves and (len(waves[-1]) + 1) * len(self.prompt_ids[waves[-1][0]]) <= _PREFILL_TOKENS
            alone = self.held is not None and waves and waves[-1][0] == self.held[0]
            if fits and not alone:
                waves[-1].append(prompt)
            else:
                waves.append([prompt])
        return waves

    def _prefill(self, prompts: list[int]) -> tuple[DynamicCache, Tensor]:
        """The cache of left-padded prompts, and the logits (prompts, V) after their last tokens."""
        ids = [self.prompt_ids[p] for p in prompts]
        width = max(map(len, ids))
        tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in ids], device=self.device)
        starts = torch.tensor([width - len(row) for row in ids], device=self.device)
        columns = torch.arange(width, device=self.device)
        cache = DynamicCache()  # without a configuration, so that sliding-window layers are kept whole
        logits = self._call(
            tokens,
            cache,
            mask=columns >= starts[:, None],
            positions=(columns - starts[:, None]).clamp(min=0),
            ragged=len({len(row) for row in ids}) > 1,
        )
        return cache, logits

    # ---- one step

    def _forward(self) -> Tensor:
        """Feeds every row's newest token; returns logits (rows, V)."""
        cache = self.cache
        starts = torch.tensor(cache.starts, device=self.device)
        columns = torch.arange(cache.begin, cache.end + 1, device=self.device)
        return self._call(
            self.last[: cache.rows, None],
            cache,
            mask=columns >= starts[:, None],
            positions=cache.end - starts[:, None],
            ragged=max(cache.starts) > cache.begin,
        )

    def _call(self, tokens: Tensor, cache: Cache, *, mask: Tensor, positions: Tensor, ragged: bool) -> Tensor:
        """The model's logits (rows, V) at the last column. A mask that hides nothing is left out: it costs speed."""
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

    def _take(self, logits: Tensor, first: int) -> list[int]:
        """Draws a token for slots ``first`` and up, and records it; returns the slots whose completion has ended."""
        new = slice(first, self.cache.rows)
        keys, position, completion = self.keys[new], self.position[new], self.completion[new]
        drawn = draw(logits, uniform=uniforms(keys, position), sampling=self.sampling)
        self.tokens_out[completion, position] = drawn.tokens
        self.floats_out[:, completion, position] = torch.stack(
            (drawn.logprobs, drawn.sampling_logprobs, drawn.entropies)
        )
        self.last[new] = drawn.tokens
        position += 1  # in place: a view of the state
        done = torch.isin(drawn.tokens, self.stop_ids) | (position >= self.sampling.max_tokens)
        if bool((done | ~drawn.finite).any()):
            self._require_finite(drawn, first)
            ended = (done.nonzero().flatten() + first).tolist()
        else:
            ended = []
        if self.stop_strings:
            ended = sorted({*ended, *self._at_stop_string(first)})
        return ended

    def _at_stop_string(self, first: int) -> list[int]:
        """Slots whose newest tokens complete a stop string."""
        completions = self.completion[first : self.cache.rows].tolist()
        lengths = self.position[first : self.cache.rows].tolist()
        found = []
        for slot, (row, length) in enumerate(zip(completions, lengths, strict=True), start=first):
            text = self.decode(self.tokens_out[row, max(0, length - self.tail) : length].tolist())
            if any(string in text for string in self.stop_strings):
                found.append(slot)
        return found

    def _require_finite(self, drawn: Draw, first: int) -> None:
        bad = (~drawn.finite).nonzero().flatten().tolist()
        if bad:
            row = int(self.completion[first + bad[0]])
            raise EngineError(
                f"prompt {self.uids[row // self.n]!r}, sample {row % self.n}: the model's output after "
                f"{int(self.position[first + bad[0]]) - 1} tokens is not finite; the weights are broken, or the "
                "precision is too low for them: try learner.dtype = 'float32' or an earlier checkpoint"
            )

    def _drop(self, ended: list[int]) -> list[int]:
        """Takes ended completions out of their slots; returns their numbers."""
        rows = self.cache.rows
        numbers = self.completion[ended].tolist()
        for row, length in zip(numbers, self.position[ended].tolist(), strict=True):
            self.lengths[row] = length
        gone = set(ended)
        order = torch.tensor(
            self.cache.keep([slot for slot in range(rows) if slot not in gone]), dtype=torch.int64, device=self.device
        )
        for state in (self.completion, self.keys, self.position, self.last):
            state[: len(order)] = state[order]
        return numbers


def _one_row(cache: DynamicCache, row: int) -> DynamicCache:
    """A copy of one row of a prefill cache, so that the others can be freed."""
    copy = DynamicCache()
    for index, layer in enumerate(cache.layers):
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        copy.update(layer.keys[row : row + 1].clone(), layer.values[row : row + 1].clone(), index)
    return copy
