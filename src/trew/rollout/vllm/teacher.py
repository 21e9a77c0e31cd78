"""A teacher behind a vLLM server: the log-probs of the policy's tokens, as the server's model reads them in a prompt.

    each step: the server's model by name, and the log-probs of a fixed text   ->  the model of the run's beginning?
    each sample: its tokens as a prompt                                        ->  one log-prob for each of them

A server says nothing when its model is exchanged for another of the same name, so its numbers are compared.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from queue import Empty
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import EngineError, ModelError, NumericsError
from ...learner.dealing import failing_together
from ...learner.parallel import Parallel
from ...types import TrainingSample
from .answers import LOWEST, ROUNDING, BadAnswer
from .client import ServerGone, ServerRefused, call
from .endpoint import Endpoint
from .served import ASK_S, AWAY, LEFT, Served, served
from .traffic import Traffic

COMPLETIONS = "/v1/completions"
MOST_OPEN = 256
"""Samples that the server works on at a time."""
TRIES = 3
"""Requests for one sample, and returns of a server in one step, after which the run ends."""
LEAST = -math.log(2**20)
"""The likeliest of a million tokens has at least this log-prob."""
LIMIT = 0.05
"""The largest mean difference in nats between two readings of the fixed text by one model: a server in bfloat16 rounds
otherwise where other requests run beside it."""
TEXT = (
    "A train leaves at nine and covers 240 km in three hours. Its mean speed is 240 / 3 = 80 km/h, so that it would "
    "need five hours for 400 km. def mean(values): return sum(values) / len(values)"
)
"""The text by whose log-probs a model is recognised."""
READ = 64
"""The most tokens of that text that are read."""
_BEAT_S = 0.5
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Known:
    """By what a run recognises its teacher: the name, and its log-probs of the tokens ``ids`` but the first."""

    name: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return {"model": self.name, "ids": list(self.ids), "logprobs": list(self.logprobs)}

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Known:
        return cls(str(table["model"]), tuple(map(int, table["ids"])), tuple(map(float, table["logprobs"])))


class EndpointTeacher:
    """A :class:`.Teacher` on a server that was started by others. Rank 0 asks it, and all ranks get the numbers.

    ``request_timeout_s``: without progress for so long, the server counts as hung. ``wait_s``: how long the run waits
    for a server that is gone to come back. ``known``: how an earlier part of the run knew its teacher; None in a new
    run. ``tell`` receives warnings.
    """

    def __init__(
        self, endpoint: Endpoint, *, request_timeout_s: float, wait_s: float, parallel: Parallel,
        known: Known | None = None, tell: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.endpoint, self.wait_s, self.tell = endpoint, wait_s, tell
        self.known = known
        # Nothing is known to answer at the address before meet(): it may be a wrong one.
        self._away: Collection[int] = AWAY
        self._parallel = parallel
        self._traffic = Traffic(hang_s=request_timeout_s)

    @property
    def modules(self) -> list[nn.Module]:
        return []

    @property
    def notes(self) -> list[str]:
        return []

    def release(self) -> None:
        """Holds no memory."""

    def close(self) -> None:
        """Ends the thread that asks."""
        self._traffic.stop()

    def meet(self, ids: Sequence[int]) -> Known:
        """Reads the tokens ``ids`` of a fixed text with the server's model, which is the run's teacher from here on.
        Raises EngineError where ``known`` is another."""
        now = served(self.endpoint)
        if self.known is None:
            # One place stays free: the server generates a token behind what it reads.
            ids = ids[: min(READ, (now.length or READ) - 1)]
        found = Known(now.name, tuple(ids), tuple(self._probe(now, ids)))
        self._compare(self.known or found, found)
        self.known = self.known or found
        self._away = LEFT
        return self.known

    def logprobs(self, samples: Sequence[TrainingSample]) -> Float[Tensor, "N"]:
        # 0 on the other ranks, so that the sum over all ranks is what rank 0 has read.
        out = torch.zeros(sum(len(s.token_ids) for s in samples), dtype=torch.float32)
        failed: EngineError | ModelError | None = None
        asks = self._parallel.rank == 0
        # The others wait in the end of failing_together, for as long as rank 0 reads or its server is away.
        with nullcontext() if asks else self._parallel.waiting(), failing_together(self._parallel):
            if asks:
                try:
                    out = torch.from_numpy(np.concatenate([*self._all(samples), np.zeros(0, np.float32)]))
                except (EngineError, ModelError) as error:
                    failed = error
        # Told to all ranks, which would otherwise wait for the sum.
        said = self._parallel.gather(None if failed is None else str(failed))[0]
        if failed is not None:
            raise failed
        if said is not None:
            raise EngineError(said)
        self._parallel.sum_([out])
        return out

    # ---- rank 0

    def _all(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Log-probs (N,) of each sample; 0 at tokens that were not sampled."""
        found: dict[int, np.ndarray] = {}
        returns = 0
        while len(found) < len(samples):
            before = len(found)
            try:
                # After each return: another model may be back under the same name.
                name = self._recognised().name
                self._gather(samples, found, name)
            except ServerGone as error:
                # Only returns without progress count: a long step may outlive several restarts.
                returns = 0 if len(found) > before else returns + 1
                if returns > TRIES:
                    raise EngineError(f"teacher.endpoint: {error}; it went away {returns} times at the same samples") \
                        from None  # fmt: skip
                self._await(error)
        # All of them at once, so that the evidence of the step is whole.
        broken = {i: row for i, row in found.items() if not np.isfinite(row).all()}
        if broken:
            raise NumericsError(
                "the teacher's log-probs are not finite (broken weights, or a token that has probability 0)",
                names=", ".join(f"{i} (group {samples[i].group})" for i in sorted(broken)[:8]),
                quantity="teacher_logprobs", samples=sorted(broken),
                values={i: row.tolist() for i, row in broken.items()},
            )  # fmt: skip
        return [found[i] for i in range(len(samples))]

    def _gather(self, samples: Sequence[TrainingSample], found: dict[int, np.ndarray], name: str) -> None:
        """Asks for the samples that are not in ``found``, and adds them. Raises ServerGone once the server is gone;
        what came before stays."""
        waiting = deque((i, 1) for i in range(len(samples)) if i not in found)
        flights: dict[object, tuple[int, int]] = {}
        try:
            while waiting or flights:
                while waiting and len(flights) < MOST_OPEN:
                    # A new key for every request: no answer to a dropped one is taken for another's.
                    key, (i, attempt) = object(), waiting.popleft()
                    flights[key] = (i, attempt)
                    self._traffic.send(key, self.endpoint, _body(name, _ids(samples[i])), path=COMPLETIONS)
                key, answer = self._answer()
                if key not in flights:  # of a request that was dropped
                    continue
                self._traffic.taken(key)
                i, attempt = flights.pop(key)
                try:
                    found[i] = self._read(answer, samples[i], name)
                except BadAnswer as error:
                    if attempt == TRIES:
                        raise EngineError(f"teacher.endpoint: server {self.endpoint}: gave {error}, {TRIES} times") \
                            from None  # fmt: skip
                    self.tell(f"teacher.endpoint: server {self.endpoint}: gave {error}; it is asked again")
                    waiting.append((i, attempt + 1))
        finally:
            for key in flights:
                self._traffic.drop(key)

    def _answer(self) -> tuple[Any, Any]:
        while True:
            # Says that this rank makes progress, while the others wait for it.
            self._parallel.beat()
            try:
                return self._traffic.answers.get(timeout=_BEAT_S)
            except Empty:
                continue

    def _read(self, answer: Any, sample: TrainingSample, name: str) -> np.ndarray:
        """The log-probs (N,) of a sample's tokens."""
        if isinstance(answer, ServerRefused):
            raise self._meant(answer)
        if isinstance(answer, Exception):
            raise answer
        # Entry i of read() is of token i + 1 of prompt and completion, so that the completion begins at P - 1.
        values = read(answer, _ids(sample), name)[len(sample.prompt_ids) - 1 :]
        kept = np.zeros(len(sample.token_ids), np.float32)
        kept[sample.predicted] = values[sample.predicted]
        return kept

    def _recognised(self) -> Known:
        """What is known of the teacher. Raises EngineError where the server has another model by now."""
        known = self.known
        assert known is not None, "meet() comes first"
        now = served(self.endpoint, away=self._away)
        self._compare(known, Known(now.name, known.ids, tuple(self._probe(now, known.ids))))
        return known

    def _compare(self, known: Known, found: Known) -> None:
        if found.name != known.name:
            raise EngineError(
                f"teacher.endpoint: server {self.endpoint}: serves {found.name!r}, and this run has learned from "
                f"{known.name!r}; serve that again, and continue with --resume"
            )
        gaps = [abs(a - b) for a, b in zip(found.logprobs, known.logprobs, strict=True)]
        gap = math.fsum(gaps) / len(gaps)
        if not gap <= LIMIT:  # NaN must fail too
            raise EngineError(
                f"teacher.endpoint: server {self.endpoint}: its log-probs of a fixed text differ by {gap:.2g} nats per "
                f"token from those at the beginning of this run, accepted is {LIMIT:g}: it has other weights under the "
                f"name {known.name!r}, or other settings; serve the same model again, and continue with --resume"
            )

    def _probe(self, now: Served, ids: Sequence[int]) -> list[float]:
        """The log-probs of the tokens ``ids`` but the first. Raises EngineError where they are none."""
        what = "log-probs of a fixed text"
        try:
            answer = call(
                self.endpoint, "POST", COMPLETIONS, what=what, timeout_s=max(ASK_S, self._traffic.hang_s),
                body=_body(now.name, ids) | {"prompt_logprobs": 1},
            )  # fmt: skip
            values = read(answer, ids, now.name)
            _check_likeliest(answer)
        except ServerRefused as error:
            raise self._meant(error) from None
        except BadAnswer as error:
            raise EngineError(f"teacher.endpoint: server {self.endpoint}: {what}: gave {error}") from None
        if not np.isfinite(values).all():
            raise EngineError(
                f"teacher.endpoint: server {self.endpoint}: {what} are not finite: its model's weights are broken"
            )
        return values.tolist()

    def _meant(self, error: ServerRefused) -> EngineError | ModelError:
        """What a refused request means: a server on its way down or up counts as gone; what else it says, it would say
        again."""
        if error.status in self._away:
            return ServerGone(str(error))
        if error.status == 400:
            return ModelError(
                f"teacher.endpoint: {error}; the teacher cannot read a completion of the policy: give one with the "
                "policy's tokens and positions"
            )
        return EngineError(f"teacher.endpoint: {error}")

    def _await(self, error: ServerGone) -> None:
        """Waits until a server that is gone has its model again."""
        self.tell(f"teacher.endpoint: {error}; waiting up to {self.wait_s:g} s for it (teacher.wait_s)")
        until = time.monotonic() + self.wait_s
        while True:
            self._parallel.beat()
            try:
                self._recognised()
            except ServerGone as later:
                if time.monotonic() > until:
                    raise EngineError(
                        f"teacher.endpoint: {later}; it did not come back within {self.wait_s:g} s (teacher.wait_s); "
                        "start it again, and continue with --resume"
                    ) from None
                time.sleep(min(_LOOK_S, self.wait_s / 10))
            else:
                self.tell(f"teacher.endpoint: server {self.endpoint}: is back")
                return


def _ids(sample: TrainingSample) -> list[int]:
    return [*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]


def _body(name: str, ids: Sequence[int]) -> dict[str, Any]:
    """The request for the log-probs of tokens. Every parameter is explicit: a server's defaults may come from the
    model's folder. One token has to be generated, and is not used."""
    return {
        "model": name, "prompt": list(ids), "prompt_logprobs": 0, "max_tokens": 1, "n": 1, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "seed": 0, "ignore_eos": True, "add_special_tokens": False,
    }  # fmt: skip


def read(found: Any, ids: Sequence[int], name: str) -> np.ndarray:
    """The log-probs (P - 1,) of a prompt's tokens ``ids`` (P,) but the first, float32; minus infinity where the model
    gives a token no probability, or no number. Raises BadAnswer if anything cannot be right.

    >>> rows = [None, {"7": {"logprob": -1.5}, "2": {"logprob": -0.5}}]
    >>> read({"model": "t", "choices": [{"prompt_logprobs": rows}]}, [3, 7], "t").tolist()
    [-1.5]
    """
    try:
        if found["model"] != name:
            raise BadAnswer(f"an answer of the model {found['model']!r} instead of {name!r}")
        (choice,) = found["choices"]
        rows = choice["prompt_logprobs"]
        if len(rows) != len(ids) or rows[0] is not None:
            raise BadAnswer(f"{len(rows)} log-probs for {len(ids)} tokens")
        # One mapping for each token from the second on, by id, with the likeliest token's beside it.
        values = np.array([float(row[str(i)]["logprob"]) for i, row in zip(ids[1:], rows[1:], strict=True)], np.float64)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"a malformed answer: {type(error).__name__}: {error}") from None
    if (values > ROUNDING).any():
        raise BadAnswer(f"a log-prob of {values.max():g}, accepted are numbers of at most 0")
    finite = np.isfinite(values) & (values > LOWEST)
    return np.where(finite, np.minimum(values, 0.0), -np.inf).astype(np.float32)


def _check_likeliest(found: Any) -> None:
    """Raises BadAnswer where the values of the likeliest tokens of a prompt cannot be log-probs: a server that was
    started to give logits does so under the same name."""
    likeliest = [
        max(float(one["logprob"]) for one in row.values()) for row in found["choices"][0]["prompt_logprobs"][1:]
    ]
    wrong = [value for value in likeliest if not LEAST <= value <= ROUNDING]
    if wrong:
        raise BadAnswer(
            f"a likeliest token with a log-prob of {wrong[0]:g}, accepted are numbers from {LEAST:.3g} to 0; start the "
            "server without --logprobs-mode raw_logits or processed_logits"
        )
