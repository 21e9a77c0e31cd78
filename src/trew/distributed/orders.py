"""Orders: what rank 0, which drives a run, has the other ranks do together with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any

from ..errors import EngineError, NumericsError, TrewError
from ..rollout import codec
from ..rollout.engine import Engine, Finished, Lost, Request
from ..rollout.source import StepRollouts
from ..types import Prompt, ScoredGroup
from .ranks import Ranks

Held = Callable[[], AbstractContextManager[None]]
"""Makes all weights whole on every rank inside a block that all ranks enter together."""
KeptOut = Callable[[], AbstractContextManager[None]]
"""Keeps interrupts out of a block: see :meth:`.Interrupts.kept_out`."""
LOOK_S = 0.1
"""The longest time for which an interrupt waits while rank 0 waits for another rank's share."""


class Orders:
    """The line from rank 0 to the others. Rank 0 gives orders; the others take one after the other.

    An order is a name with facts: start, step, generate, rollouts, measure, numerics, save, load, publish, export,
    memory, check, end. After "rollouts" all ranks compute the update together, without orders.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.heard = True  # whether the others wait for an order, rather than for this rank to compute with them

    def give(self, name: str, **facts: Any) -> None:
        self.heard = name != "rollouts"
        self.ranks.pulse.busy()  # a rank that hangs may take no order either
        self.ranks.broadcast(codec.encode({"order": name, **facts}))
        if self.heard:
            self.ranks.pulse.idle()

    def take(self) -> dict[str, Any]:
        # Waiting for an order may take any time: rank 0 may generate, score or evaluate.
        self.ranks.pulse.idle()
        order = codec.decode(self.ranks.broadcast(None))
        self.ranks.pulse.busy()
        return order

    def check(self) -> None:
        """Fails, as collective operations do, where another rank has died."""
        self.give("check")
        self.ranks.gather(None)

    def updated(self) -> None:
        """Rank 0 is through with an update: the others are, or will be, waiting for an order."""
        self.heard = True
        self.ranks.pulse.idle()


def bare(prompt: Prompt) -> Prompt:
    """A prompt without its columns, which only rewards read: they may hold anything and be long."""
    return dataclasses.replace(prompt, columns={})


class DealtEngine:
    """Deals requests over the embedded engines of all ranks: the :class:`.Engine` that rank 0 drives.

    A round begins with the first poll after a submit: every rank generates its share, prompt by prompt, and rank 0
    collects. Requests that are submitted during a round run on rank 0.

    An interrupt may end a round while this rank generates, or waits for another one's share. ``kept_out`` keeps it out
    of everything that the other ranks take part in: they would wait for the rest.
    """

    def __init__(self, own: Engine, orders: Orders, held: Held, kept_out: KeptOut) -> None:
        self.capabilities = own.capabilities
        self._own, self._orders, self._ranks, self._held = own, orders, orders.ranks, held
        self._kept_out = kept_out
        self._queued: list[Request] = []
        self._here: set[str] = set()  # requests that this rank generates in this round
        self._elsewhere: set[str] = set()  # those that other ranks generate
        self._waiting: list[int] = []  # ranks whose share is not collected yet
        self._coming: Future[bytes] | None = None  # the share of the first of them, once it is waited for
        self._round = 0
        self._open: AbstractContextManager[None] | None = None

    @property
    def version(self) -> int:
        return self._own.version

    @version.setter
    def version(self, version: int) -> None:
        if version != self.version and self._elsewhere:
            raise EngineError(f"version: got {version} while other ranks generate with {self.version}")
        self._own.version = version

    def submit(self, requests: Any) -> None:
        requests = list(requests)
        if taken := [r.id for r in requests if r.id in self._elsewhere]:
            raise EngineError(f"request {taken[0]!r}: its id belongs to an unfinished request")
        self._own.submit(requests)  # checks them all; what other ranks generate is taken out again
        # During a round the other ranks take no order: what comes then stays on this rank.
        if self._open is None:
            self._queued += requests
        else:
            self._here |= {r.id for r in requests}

    def poll(self, timeout_s: float | None = None) -> list[Finished | Lost]:
        self._ranks.beat()
        try:
            if self._queued:
                with self._kept_out():
                    self._begin()
            # Own requests first: receiving blocks until another rank has finished its whole share.
            reports = self._own.poll(timeout_s)
            self._here -= {report.id for report in reports}
            if not reports and self._waiting:
                reports = self._collect()
            # Ranks without a share, in rounds of few prompts, send an answer too. Nobody may poll again.
            while self._waiting and not self._here and not self._elsewhere:
                self._collect()
        # The other ranks wait until their answers are received, and take no order before.
        except BaseException:
            self._abandon()
            raise
        self._end_if_done()
        return reports

    def cancel(self, ids: Any) -> None:
        ids = set(ids)
        with self._kept_out():
            self._own.cancel(list(ids))
            self._queued = [r for r in self._queued if r.id not in ids]
            self._elsewhere -= ids
            self._here -= ids
            if self._waiting and not self._elsewhere:
                self._ranks.abandon(self._round)  # they stop now; their answers are taken once this rank is done too
                if not self._here:
                    self._abandon()
            self._end_if_done()

    def state(self) -> dict[str, Any]:
        return self._own.state()

    def load_state(self, state: Any) -> None:
        self._own.load_state(state)

    def _begin(self) -> None:
        shares = _shares(self._queued, self._ranks.size)
        self._round += 1
        requests = [dataclasses.replace(r, prompt=bare(r.prompt)) for share in shares[1:] for r in share]
        counts = [len(share) for share in shares[1:]]
        # The order before the gathering of weights (``held``), in which all ranks take part.
        self._orders.give("generate", round=self._round, version=self.version, requests=requests, counts=counts)
        others = [r.id for share in shares[1:] for r in share]
        self._own.cancel(others)
        self._queued, self._elsewhere = [], set(others)
        self._here = {r.id for r in shares[0]}
        self._waiting = list(range(1, self._ranks.size))
        # give() took this rank for one that waits, but now it computes.
        self._ranks.pulse.busy()
        self._open = self._held()
        self._open.__enter__()

    def _collect(self) -> list[Finished | Lost]:
        rank = self._waiting[0]
        found = codec.decode(self._received())
        if "numerics" in found:
            raise NumericsError.from_json(found["numerics"])
        if "error" in found:
            raise EngineError(f"rank {rank}: {found['error']}")
        # Others were cancelled in the meantime.
        reports = [report for report in found["reports"] if report.id in self._elsewhere]
        self._elsewhere -= {report.id for report in reports}
        if not self._waiting and self._elsewhere:
            raise EngineError(f"{len(self._elsewhere)} requests came back from no rank; this is an error of trew")
        return reports

    def _received(self) -> bytes:
        """The answer of the first rank that is waited for. After an interrupt, the next call goes on waiting for it."""
        while True:
            self._ranks.beat()  # a rank that does not send is noticed by its own pulse, not by this one's
            # An interrupt is met between two looks, where nothing is half done.
            with self._kept_out():
                coming = self._coming = self._coming or self._ranks.receiving(self._waiting[0])
                if wait([coming], LOOK_S).done:
                    self._coming = None
                    self._waiting.pop(0)
                    return coming.result()

    def _abandon(self) -> None:
        """Ends a round whose completions nobody wants any more; waits for the other ranks to notice."""
        with self._kept_out():
            self._queued, self._elsewhere, self._here = [], set(), set()
            if self._waiting:
                self._ranks.abandon(self._round)
                while self._waiting:
                    # Received to be dropped: the other rank is stuck in its sending until then.
                    self._received()
            self._end()

    def _end_if_done(self) -> None:
        if not (self._waiting or self._here or self._elsewhere):
            self._end()

    def _end(self) -> None:
        if self._open is not None:
            with self._kept_out():
                self._open.__exit__(None, None, None)
                self._open = None
                self._ranks.pulse.idle()


def _shares(requests: list[Request], size: int) -> list[list[Request]]:
    """Deals requests over ranks: consecutive requests of one prompt stay together, since they share its prefill."""
    units: list[list[Request]] = []
    for request in requests:
        if not units or units[-1][-1].prompt != request.prompt or units[-1][-1].sampling != request.sampling:
            units.append([])
        units[-1].append(request)
    return [[r for unit in units[rank::size] for r in unit] for rank in range(size)]


def generate_share(engine: Engine, ranks: Ranks, order: dict[str, Any], held: Held) -> None:
    """Generates another rank's share of a round, and sends it to rank 0."""
    # Rank 0 keeps its own share: requests and counts begin with those of rank 1.
    start = sum(order["counts"][: ranks.rank - 1])
    mine: list[Request] = order["requests"][start : start + order["counts"][ranks.rank - 1]]
    # An error is sent, not raised: rank 0 waits for this rank's answer, and decides for all.
    found: dict[str, Any]
    try:
        with held():
            found = {"reports": _generated(engine, mine, order, ranks)}
    except NumericsError as error:
        found = {"numerics": error.to_json()}
    except TrewError as error:
        found = {"error": str(error)}
    ranks.send(codec.encode(found))


def _generated(engine: Engine, requests: list[Request], order: dict[str, Any], ranks: Ranks) -> list[Finished | Lost]:
    engine.version = order["version"]
    engine.submit(requests)
    reports: list[Finished | Lost] = []
    while len(reports) < len(requests):
        reports += engine.poll()
        ranks.beat()
        if ranks.abandoned(order["round"]):
            engine.cancel([r.id for r in requests])
            break
    return reports


def bare_rollouts(rollouts: StepRollouts) -> StepRollouts:
    """What an update reads: the kept groups, without the columns of their prompts."""
    kept = tuple(
        ScoredGroup(dataclasses.replace(g.group, prompt=bare(g.group.prompt)), g.scores) for g in rollouts.trained_on
    )
    return StepRollouts(kept, kept, rollouts.baselines)


class BroadcastRollouts:
    """A source of rank 0 whose rollouts all ranks get (:meth:`.training.follower.FollowerRun.next`)."""

    def __init__(self, source: Any, orders: Orders) -> None:
        self.source, self._orders = source, orders

    def next(self, step: int) -> StepRollouts:
        try:
            found = self.source.next(step)
        except NumericsError as error:
            # The others have begun this step, and wait for its rollouts.
            self._orders.give("numerics", error=error.to_json())
            raise
        self._orders.give("rollouts", step=step, rollouts=bare_rollouts(found))
        return found

    def trained(self, step: int, version: int) -> None:
        self.source.trained(step, version)

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def load_state(self, state: Any) -> None:
        self.source.load_state(state)
