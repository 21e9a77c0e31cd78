"""The decoding loop: prompts come in as rows, every step gives each row a token, finished rows leave.

Everything per token is a tensor over rows; Python looks at single rows when they end (or have stop strings).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import NumericsError
from ...types import Sampling
from .decoder import Decoder
from .sampler import Draw, row_key


@dataclass(frozen=True, slots=True)
class Finished:
    """One completion, T tokens, as arrays (T,)."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    sampling_logprobs: np.ndarray
    entropies: np.ndarray


class Schedule:
    """One ``generate`` call: R = prompts x n completions through at most ``slots`` rows of a decoder at a time.

    Completion number p * n + s is sample s of prompt p. Slots 0 .. rows - 1 of all state tensors are in use.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt_ids: Sequence[Sequence[int]],
        *,
        uids: Sequence[str],
        n: int,
        sampling: Sampling,
        slots: int,
        stop_ids: frozenset[int],
        stop_strings: Sequence[str],
        decode: Callable[[list[int]], str],
        device: torch.device,
    ) -> None:
        self.decoder, self.slots, self.uids, self.n, self.sampling = decoder, slots, uids, n, sampling
        self.stop_strings, self.text_of = tuple(stop_strings), decode
        # a stop string is looked for in as many last tokens as it has bytes, and some for tokens without text
        self.tail = max((len(s.encode()) for s in stop_strings), default=0) + 8
        self.device = device
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=self.device)
        # Taken from the end: the longest prompts first, as shorter ones then fit beside them without moving anything,
        # and as what needs most memory should fail at once if it must.
        self.waiting = sorted(range(len(prompt_ids) * n), key=lambda r: (len(prompt_ids[r // n]), -r))

        total, longest = len(self.waiting), sampling.max_tokens
        self.tokens_out = torch.zeros((total, longest), dtype=torch.int64, device=self.device)
        self.floats_out = torch.zeros((3, total, longest), dtype=torch.float32, device=self.device)
        self.lengths = [0] * total

        self.completion = torch.zeros(slots, dtype=torch.int64, device=self.device)  # which one sits in the slot
        self.keys = torch.zeros(slots, dtype=torch.int64, device=self.device)  # of its draws
        self.position = torch.zeros(slots, dtype=torch.int64, device=self.device)  # tokens it has
        self.last = torch.zeros(slots, dtype=torch.int64, device=self.device)  # its newest token

    def run(self, progress: Callable[[int], None]) -> Iterator[int]:
        """Decodes everything; yields each prompt's number when its last completion has finished. ``progress`` gets the
        number of completions that have just finished."""
        missing = [self.n] * len(self.uids)
        while self.waiting or self.decoder.rows:
            before = self.decoder.rows
            if self._should_admit():
                logits, first = self._admit(), before
            else:
                logits, first = self.decoder.step(self.last[:before]), 0
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

    def _should_admit(self) -> bool:
        """A quarter of the slots at a time, as each admission costs a pass of its own."""
        free = self.slots - self.decoder.rows
        return bool(self.waiting) and (not self.decoder.rows or free >= min(len(self.waiting), -(-self.slots // 4)))

    def _admit(self) -> Tensor:
        """Fills free slots; returns the new rows' first logits (rows, V)."""
        first = self.decoder.rows
        taken = [self.waiting.pop() for _ in range(min(self.slots - first, len(self.waiting)))]
        logits = self.decoder.add([r // self.n for r in taken])
        new = slice(first, self.decoder.rows)
        self.completion[new] = torch.tensor(taken, device=self.device)
        keys = [row_key(self.sampling.seed, self.uids[r // self.n], r % self.n) for r in taken]
        self.keys[new] = torch.tensor(keys, device=self.device)
        self.position[new] = 0
        return logits

    def _take(self, logits: Tensor, first: int) -> list[int]:
        """Draws a token for slots ``first`` and up, and records it; returns the slots whose completion has ended."""
        new = slice(first, self.decoder.rows)
        keys, position, completion = self.keys[new], self.position[new], self.completion[new]
        drawn = self.decoder.draw(logits, keys=keys, positions=position, sampling=self.sampling)
        self.tokens_out[completion, position] = drawn.tokens
        self.floats_out[:, completion, position] = drawn.floats
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
        completions = self.completion[first : self.decoder.rows].tolist()
        lengths = self.position[first : self.decoder.rows].tolist()
        found = []
        for slot, (row, length) in enumerate(zip(completions, lengths, strict=True), start=first):
            text = self.text_of(self.tokens_out[row, max(0, length - self.tail) : length].tolist())
            if any(string in text for string in self.stop_strings):
                found.append(slot)
        return found

    def _require_finite(self, drawn: Draw, first: int) -> None:
        bad = (~drawn.finite).nonzero().flatten().tolist()
        if bad:
            row, length = int(self.completion[first + bad[0]]), int(self.position[first + bad[0]])
            prompt, sample = self.uids[row // self.n], row % self.n
            raise NumericsError(
                f"prompt {prompt!r}, sample {sample}: the model's output after {length - 1} tokens is not finite; the "
                "weights are broken, or the precision is too low for them: try learner.dtype = 'float32' or an earlier "
                "checkpoint",
                quantity="rollout_logprobs",
                evidence=[self._so_far(row, length)],
            )

    def _so_far(self, row: int, length: int) -> dict[str, Any]:
        """A completion that is being decoded, as plain values."""
        logprobs, sampling_logprobs, entropies = self.floats_out[:, row, :length].tolist()
        tokens = self.tokens_out[row, :length].tolist()
        return {
            "uid": self.uids[row // self.n], "sample": row % self.n, "completion": self.text_of(tokens),
            "token_ids": tokens, "logprobs": logprobs, "sampling_logprobs": sampling_logprobs, "entropies": entropies,
        }  # fmt: skip

    def _drop(self, ended: list[int]) -> list[int]:
        """Takes ended completions out of their slots; returns their numbers."""
        rows = self.decoder.rows
        numbers = self.completion[ended].tolist()
        for row, length in zip(numbers, self.position[ended].tolist(), strict=True):
            self.lengths[row] = length
        gone = set(ended)
        order = torch.tensor(
            self.decoder.keep([slot for slot in range(rows) if slot not in gone]), dtype=torch.int64, device=self.device
        )
        for state in (self.completion, self.keys, self.position, self.last):
            state[: len(order)] = state[order]
        return numbers
