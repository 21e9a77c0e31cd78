"""The decoding loop (continuous batching): admits rows, draws one token per row and step, removes finished rows.

All per-token work is on tensors over rows; Python handles single rows only when they end (or to find stop strings).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import NumericsError
from ...types import Sampling
from ..engine import Request
from .decoder import Decoder
from .resuming import ResumingDecoder
from .sampler import Draw, row_key


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion of T tokens: arrays (T,), log-probs and entropies as in :class:`trew.types.Turn`."""

    request: Request
    prompt_ids: np.ndarray  # (P,)
    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_logprobs: np.ndarray
    entropies: np.ndarray


@dataclass(frozen=True, slots=True)
class _Held:
    """The turns of an episode so far, and the decoder's number for all that was computed for them: everything but the
    last token."""

    ids: np.ndarray
    number: int


@dataclass(frozen=True, slots=True)
class _Scheduled:
    """A request in the schedule; ``prompt`` is the decoder's number for its prompt, unless it goes on from ``held``."""

    request: Request
    prompt_ids: np.ndarray
    prompt: int
    held: _Held | None
    call: int  # number of the Schedule.add call
    order: int  # number among all requests


class Schedule:
    """Decodes completions in at most ``slots`` rows of a decoder at a time; more may be added while some are running.

    Slots 0 .. rows - 1 of all state tensors are in use: a step then reads slices, without gathers. Rows move to other
    slots when some leave. What a row has drawn so far does not move: each row keeps one place of ``tokens_out`` and
    ``floats_out`` until it ends.

    ``held`` is what was computed for episodes that may go on, by request id, so that a later turn computes only what
    is new in it. :meth:`cancel` frees it. If more are held than there are slots, those that ended first are freed:
    their next turn computes everything again.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        sampling: Sampling,
        slots: int,
        stop_ids: frozenset[int],
        stop_strings: Sequence[str],
        decode: Callable[[list[int]], str],
        device: torch.device,
    ) -> None:
        self.decoder, self.slots, self.sampling = decoder, slots, sampling
        self.stop_strings, self.text_of = tuple(stop_strings), decode
        # How many of the newest tokens to search for stop strings. A token with text has at least one byte, so a string
        # of n bytes spans at most n of those; 8 more allow for tokens without text. Decoding all tokens at every step
        # would be quadratic in the length.
        self.tail = max((len(s.encode()) for s in stop_strings), default=0) + 8
        self.device = device
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=self.device)
        self.calls = self.added = 0
        self.waiting: list[_Scheduled] = []
        self.held: dict[str, _Held] = {}

        self.row_at: dict[int, _Scheduled] = {}  # by place
        self.free = list(range(slots))  # free places
        # By place: (slots, max_tokens); and (3, slots, max_tokens) of policy log-probs, log-probs, entropies.
        self.tokens_out = torch.zeros((slots, sampling.max_tokens), dtype=torch.int64, device=self.device)
        self.floats_out = torch.zeros((3, slots, sampling.max_tokens), dtype=torch.float32, device=self.device)

        # By slot, as the decoder numbers rows.
        self.place = torch.zeros(slots, dtype=torch.int64, device=self.device)  # of the row in the slot
        self.keys = torch.zeros(slots, dtype=torch.int64, device=self.device)  # of its draws
        self.begin = torch.zeros(slots, dtype=torch.int64, device=self.device)  # number of its first draw
        self.position = torch.zeros(slots, dtype=torch.int64, device=self.device)  # tokens it has
        self.last = torch.zeros(slots, dtype=torch.int64, device=self.device)  # its newest token

    @property
    def unfinished(self) -> int:
        """The number of completions that are waiting or running."""
        return len(self.waiting) + self.decoder.rows

    def add(self, prompts: Iterable[tuple[np.ndarray, Sequence[Request]]]) -> None:
        """Queues completions: (tokens of a prompt, its requests). Each prompt is computed once for all its requests."""
        self.calls += 1
        for prompt_ids, requests in prompts:
            # Turns of an episode have a context of their own, so that one that goes on comes alone.
            held = self._found(prompt_ids, requests)
            # -1: goes on from what is held, and opens no prompt.
            prompt = -1 if held else self.decoder.open(prompt_ids.tolist(), len(requests))
            for request in requests:
                self.added += 1
                self.waiting.append(_Scheduled(request, prompt_ids, prompt, held, self.calls, self.added))
        # Rows are taken from the end of the list. Within a call the longest prompts go first: shorter ones then fit
        # beside them without moving the cache, and if memory runs out, it does so at once rather than late in the run.
        # Rows of one prompt stay together, which decoders rely on to compute it once.
        self.waiting.sort(key=lambda row: (-row.call, len(row.prompt_ids), -row.order))

    def cancel(self, ids: Collection[str]) -> None:
        """Drops completions, both waiting and running."""
        for id in self.held.keys() & ids:
            self._release(self.held.pop(id))
        for row in self.waiting:
            if row.request.id in ids and row.held is not None:
                self._release(row.held)
            elif row.request.id in ids:
                self.decoder.withdraw(row.prompt, 1)
        self.waiting = [row for row in self.waiting if row.request.id not in ids]
        # Slots change as rows leave; places are what row_at knows rows by.
        places = self.place[: self.decoder.rows].tolist()
        if gone := [slot for slot, place in enumerate(places) if self.row_at[place].request.id in ids]:
            self._drop(gone)

    def drawn(self, id: str) -> list[int]:
        """The tokens that a running request has drawn so far; none if it does not run."""
        for slot, place in enumerate(self.place[: self.decoder.rows].tolist()):
            if self.row_at[place].request.id == id:
                return self.tokens_out[place, : int(self.position[slot])].tolist()
        return []

    def advance(self) -> list[Completion]:
        """Runs one pass of the model: a prefill that admits rows and draws their first tokens, or a step that gives
        every row a token. Returns the completions that ended."""
        before = self.decoder.rows
        if self._should_admit():
            logits, first = self._admit(), before
        else:
            logits, first = self.decoder.step(self.last[:before]), 0
        ended = self._take(logits, first)
        found = self._completions(ended) if ended else []
        if ended:
            # Before the rows go: the decoder copies what it holds.
            self._hold(ended, found)
            self._drop(ended)
        return found

    def _should_admit(self) -> bool:
        """Admits rows once a quarter of the slots is free, because each admission costs a separate pass."""
        free = self.slots - self.decoder.rows
        return bool(self.waiting) and (not self.decoder.rows or free >= min(len(self.waiting), -(-self.slots // 4)))

    def _admit(self) -> Tensor:
        """Fills free slots; returns the new rows' first logits (new rows, V)."""
        first = self.decoder.rows
        # From the end of the list: see add().
        taken = [self.waiting.pop() for _ in range(min(self.slots - first, len(self.waiting)))]
        taken.sort(key=lambda row: row.held is not None)  # stable: rows of one prompt stay together
        logits = self._begun(taken)
        new = slice(first, self.decoder.rows)
        places = [self.free.pop() for _ in taken]
        self.row_at |= zip(places, taken, strict=True)
        self.place[new] = torch.tensor(places, device=self.device)
        asked = [row.request for row in taken]
        keys = [row_key(r.sampling.seed, r.prompt.uid, r.sample) for r in asked]
        self.keys[new] = torch.tensor(keys, device=self.device)
        begin = [0 if r.earlier is None else r.earlier.begin for r in asked]
        self.begin[new] = torch.tensor(begin, device=self.device)
        # A slot still holds the values of the row that left it, so everything per row is set here.
        self.position[new] = 0
        return logits

    def _begun(self, rows: Sequence[_Scheduled]) -> Tensor:
        """Starts rows, those that go on behind the others; returns their first logits."""
        new = [row.prompt for row in rows if row.held is None]
        logits = [self.decoder.add(new)] if new else []
        if resumed := [(row.held, row.prompt_ids) for row in rows if row.held is not None]:
            assert isinstance(self.decoder, ResumingDecoder)
            numbers = [held.number for held, _ in resumed]
            # The last token of the held turns was drawn and never fed: it comes first.
            tokens = [prompt_ids[len(held.ids) - 1 :].tolist() for held, prompt_ids in resumed]
            logits.append(self.decoder.resume(numbers, tokens))
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _found(self, prompt_ids: np.ndarray, requests: Sequence[Request]) -> _Held | None:
        """What is held for the episode that a request goes on with."""
        held = self.held.pop(requests[0].id, None)
        if held is not None and not np.array_equal(prompt_ids[: len(held.ids)], held.ids):
            self._release(held)  # it goes on differently: nothing may be taken over
            held = None
        return held

    def _hold(self, slots: Sequence[int], completions: Sequence[Completion]) -> None:
        """Keeps what was computed for rows whose episodes may go on."""
        decoder = self.decoder
        if not isinstance(decoder, ResumingDecoder):
            return
        for slot, done in zip(slots, completions, strict=True):
            earlier = done.request.earlier
            if earlier is not None and earlier.longest:
                ids = np.concatenate([done.prompt_ids, done.token_ids])
                self.held[done.request.id] = _Held(ids, decoder.hold(slot))
        # The oldest first: a dict keeps the order in which its entries came.
        while len(self.held) > self.slots:
            self._release(self.held.pop(next(iter(self.held))))

    def _release(self, held: _Held) -> None:
        assert isinstance(self.decoder, ResumingDecoder)
        self.decoder.release(held.number)

    def _take(self, logits: Tensor, first: int) -> list[int]:
        """Draws a token for slots ``first`` and up, and records it; returns the slots whose completion has ended."""
        new = slice(first, self.decoder.rows)
        keys, position, place = self.keys[new], self.position[new], self.place[new]
        # Draws count on through the turns of an episode.
        numbers = position + self.begin[new]
        drawn = self.decoder.draw(logits, keys=keys, positions=numbers, sampling=self.sampling)
        self.tokens_out[place, position] = drawn.tokens
        self.floats_out[:, place, position] = drawn.floats
        self.last[new] = drawn.tokens
        position += 1  # in place: position is a view of self.position
        # done (new rows,): an end token, or the limit.
        done = torch.isin(drawn.tokens, self.stop_ids) | (position >= self.sampling.max_tokens)
        # One flag for both questions: on a GPU, every value that Python looks at waits for the device.
        if bool((done | ~drawn.finite).any()):
            self._require_finite(drawn, first)
            ended = (done.nonzero().flatten() + first).tolist()
        else:
            ended = []
        if self.stop_strings:
            ended = sorted({*ended, *self._at_stop_string(first)})
        return ended

    def _at_stop_string(self, first: int) -> list[int]:
        """Returns the slots whose newest tokens complete a stop string."""
        places = self.place[first : self.decoder.rows].tolist()
        lengths = self.position[first : self.decoder.rows].tolist()
        return [
            slot
            for slot, (place, length) in enumerate(zip(places, lengths, strict=True), start=first)
            if self._has_stop_string(self.tokens_out[place, :length])
        ]

    def _has_stop_string(self, tokens: Tensor) -> bool:
        # Text, not token ids: a stop string may be tokenised in many ways, or start in the middle of a token.
        begin = max(0, len(tokens) - self.tail)
        # A tail that begins within a character may show no character at all: tokenizers that fall back to bytes (Llama
        # 2, Mistral) replace every byte of a row of them, a line break too. One of four places in a row begins one.
        for start in range(begin, max(-1, begin - 4), -1):
            text = self.text_of(tokens[start:].tolist())
            if any(string in text for string in self.stop_strings):
                # The text that is kept decides, in which bytes further back may be no character.
                whole = text if not start else self.text_of(tokens.tolist())
                return any(string in whole for string in self.stop_strings)
            if "\ufffd" not in text:
                break
        return False

    def _require_finite(self, drawn: Draw, first: int) -> None:
        bad = (~drawn.finite).nonzero().flatten().tolist()
        if bad:
            place, length = int(self.place[first + bad[0]]), int(self.position[first + bad[0]])
            request = self.row_at[place].request
            raise NumericsError(
                f"prompt {request.prompt.uid!r}, sample {request.sample}: the model's output after {length - 1} tokens "
                "is not finite; the weights are broken, or the precision is too low for them: try learner.dtype = "
                "'float32' or an earlier checkpoint",
                quantity="rollout_logprobs",
                evidence=[self._so_far(place, length)],
            )

    def _so_far(self, place: int, length: int) -> dict[str, Any]:
        """Returns an unfinished completion as plain values, under the names used in written rollouts."""
        policy_logprobs, logprobs, entropies = self.floats_out[:, place, :length].tolist()
        tokens, request = self.tokens_out[place, :length].tolist(), self.row_at[place].request
        return {
            "uid": request.prompt.uid, "sample": request.sample, "completion": self.text_of(tokens),
            "token_ids": tokens, "logprobs": policy_logprobs, "sampling_logprobs": logprobs, "entropies": entropies,
        }  # fmt: skip

    def _completions(self, slots: list[int]) -> list[Completion]:
        """Copies what the rows in these slots have drawn; their places are reused afterwards."""
        places, lengths = self.place[slots].tolist(), self.position[slots].tolist()
        # (ended rows, longest of them) -> one array per row, cut to its length.
        tokens = self.tokens_out[places, : max(lengths)].cpu().numpy()
        policy_logprobs, logprobs, entropies = self.floats_out[:, places, : max(lengths)].cpu().numpy()
        return [
            Completion(
                self.row_at[place].request, self.row_at[place].prompt_ids,
                *(values[i, :length].copy() for values in (tokens, logprobs, policy_logprobs, entropies)),
            )
            for i, (place, length) in enumerate(zip(places, lengths, strict=True))
        ]  # fmt: skip

    def _drop(self, slots: list[int]) -> None:
        """Removes rows; others move into their slots."""
        for place in self.place[slots].tolist():
            del self.row_at[place]
            self.free.append(place)
        gone = set(slots)
        order = torch.tensor(
            self.decoder.keep([slot for slot in range(self.decoder.rows) if slot not in gone]),
            dtype=torch.int64, device=self.device,
        )  # fmt: skip
        # The decoder decides which row moves where; the state per slot must follow in the same order.
        for state in (self.place, self.keys, self.begin, self.position, self.last):
            state[: len(order)] = state[order]
