"""A rank other than 0: runs the same loop on the rollouts that rank 0 sends, and does what it is ordered in between."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config import parse
from ..distributed import Place
from ..distributed.launch import join
from ..distributed.orders import Orders, generate_share
from ..distributed.ranks import telling_of_lost_ranks
from ..errors import NumericsError, RankError, TrewError
from ..rollout import StepRollouts
from ..rollout.endings import facts_of
from ..runs import checkpoint_files, tensor_files
from ..runs.rollouts import Sampler
from ..runs.writer import Writer
from ..utils.memory import Peaks
from ..utils.signals import ALWAYS
from ..weights import InPlace, WeightSync
from ..weights.canary import canary_samples
from . import loop, planning
from .alone import alone
from .attempt import Attempt
from .batch import keep_schedule
from .build import parts
from .memory_record import BETWEEN, EXPORTING, GENERATING, TRAINING
from .policy_program import for_files, load
from .sft_program import reference_logprobs, samples_of
from .summary import help_to_gather
from .team import SAVING, Gathering
from .turns import TurnsOfRank, TurnsOfSource


class Over(Exception):
    """Rank 0 has ended the run."""


@alone()
def follow(place: Place) -> None:
    """Joins the ranks and follows rank 0 to the end of the run."""
    # Rank 0 gets the same signals, and decides for all.
    for signum in ALWAYS:
        signal.signal(signum, signal.SIG_IGN)
    with telling_of_lost_ranks():
        ranks = join(place)
        orders = Orders(ranks)
        with contextlib.suppress(Over):
            order = orders.take()
            if order["order"] == "start":
                _follow(FollowerRun(order["config"], Sampler(**order["sampler"]), orders, order["objective"]))
        ranks.close()


def _follow(run: FollowerRun) -> None:
    with run.writer, telling_of_lost_ranks():
        try:
            loop.train(run)  # pyrefly: ignore[bad-argument-type] - the part of TrainingRun that the loop uses
        except TrewError:
            # The same computation has failed on all ranks; rank 0 reports it, and ends the run or its process.
            run.await_order()


class FollowerRun:
    """The interface of the loop on a rank other than 0: see :class:`.run.TrainingRun`. Nothing is shown or recorded."""

    def __init__(self, table: dict[str, Any], sampler: Sampler, orders: Orders, files_there: dict[str, str]) -> None:
        config = parse(table)
        signal_numbers = [getattr(signal, name) for name in config.stop.signals]
        # Rank 0 gets the same signals here as well.
        for signum in signal_numbers:
            signal.signal(signum, signal.SIG_IGN)
        self._orders, self._ranks = orders, orders.ranks
        self._peaks = Peaks(str(self._ranks.device))
        self.plan = planning.follow(config, sampler, device=str(self._ranks.device), files_there=files_there)
        self.config, self.objective = config, self.plan.objective
        self._parts = parts(self.plan, self._ranks)
        self.policy, self.engine = self._parts.learner, None
        self.critic = self._parts.critic
        self.rollouts: Any = self
        self.weights: WeightSync
        if config.cluster.rollout == "vllm":
            facts = facts_of(self._parts.model)
            # Rank 0 publishes; this rank helps to gather the weights and to compute the canary.
            self.weights = Gathering(canary_samples(facts.vocabulary, facts.positions))
            if config.cluster.colocate:
                meet = functools.partial(self._ranks.gather, None)
                self.weights = TurnsOfRank(self.weights, self._parts.placement, meet)
                self.rollouts = TurnsOfSource(self, self._parts.placement, None)  # pyrefly: ignore[bad-argument-type]
        else:
            self.engine = self._parts.engine(self.plan)
            self.weights = InPlace()
        self._generated: list[str] = []  # requests of all rounds of generation since another order
        self.writer = Writer(background=config.checkpoint.background)
        self.policy.before_update = self.writer.release
        if self.critic is not None:
            self.critic.before_update = self.writer.release

    # ---- the loop's interface

    def steps(self) -> Iterator[int]:
        self._peaks.enter(BETWEEN)
        while True:
            yield self.await_order()["step"]

    @contextlib.contextmanager
    def attempt(self, step: int) -> Iterator[Attempt]:
        attempt = Attempt(step, self.policy.version)
        keep_schedule(self.config, self.policy, self.critic, step)
        self._peaks.enter(GENERATING)
        try:
            yield attempt
        except NumericsError as error:
            attempt.error = error
        self._peaks.enter(BETWEEN)

    def next(self, step: int) -> StepRollouts:
        """The rollouts of ``step``, from rank 0."""
        order = self.await_order()
        if order["order"] == "numerics":
            raise NumericsError.from_json(order["error"])
        if order["step"] != step:
            raise RankError(f"rank 0 sent the rollouts of step {order['step']}, this rank is at step {step}")
        # Trimmed by rank 0 to what the update reads.
        return order["rollouts"]

    def trained(self, step: int, version: int) -> None:
        """Does nothing: rank 0 keeps the source."""

    def learning(self) -> None:
        self._peaks.enter(TRAINING)

    def record(self, attempt: Attempt) -> None:
        """Records nothing."""

    def finish(self) -> dict[str, Any]:
        """Never called: :class:`Over` ends the loop."""
        return {}

    # ---- orders

    def await_order(self) -> dict[str, Any]:
        """Carries out orders until one is for the loop, and returns that. Raises Over at the end of the run."""
        while True:
            order = self._orders.take()
            name = order["order"]
            if name != "generate":
                self._end_episodes()
            if name in ("step", "rollouts", "numerics"):
                return order
            if name == "end":
                self.writer.finish()
                raise Over
            self._do[name](self, order)

    def _check(self, order: dict[str, Any]) -> None:
        # The gather alone: rank 0 fails in it where a rank has died.
        self._ranks.gather(None)

    def _publish(self, order: dict[str, Any]) -> None:
        self.weights.publish(self.policy, self.engine)  # pyrefly: ignore[bad-argument-type] - None with servers

    def _end_episodes(self) -> None:
        """Gives back what the engine holds for later turns, which would lie beside the update: rank 0 has ended all
        episodes."""
        # Not after each round: several make up a step with turns, and a turn may follow one of this rank.
        if self.engine is not None:
            self.engine.cancel(self._generated)
        self._generated = []

    def _generate(self, order: dict[str, Any]) -> None:
        assert self.engine is not None
        self._generated += [request.id for request in order["requests"]]
        generate_share(self.engine, self._ranks, order, self._parts.held)

    def _measure(self, order: dict[str, Any]) -> None:
        samples = samples_of(order["rollouts"].trained_on)
        # Computed by all ranks together; rank 0 has the result.
        self.policy.logprobs(samples)
        reference_logprobs(self.plan, self.policy, samples)

    def _save(self, order: dict[str, Any]) -> None:
        tensors, _ = self.policy.state()
        if self._parts.adapters is not None:
            tensors = for_files(tensors)
        # Parts count from 1.
        part, parts = self._ranks.rank + 1, self._ranks.size
        self.writer.run(lambda read, abandoned: checkpoint_files.save_part(
            Path(order["folder"]), tensors, part=part, parts=parts, read=read,
            abandoned=lambda: abandoned() or self._ranks.abandoned(SAVING),
        ))  # fmt: skip

    def _load(self, order: dict[str, Any]) -> None:
        files = [Path(file) for file in order["files"]]
        tensors, _ = tensor_files.read(files[0].parent, [file.name for file in files])
        load(self.policy, self.critic, tensors, order["counters"])

    def _memory(self, order: dict[str, Any]) -> None:
        self._ranks.gather({"phases": self._peaks.phases, "most": self._peaks.most})

    def _export(self, order: dict[str, Any]) -> None:
        self._peaks.enter(EXPORTING)
        help_to_gather(self.policy, self._parts.adapters)

    _do = {  # noqa: RUF012
        "check": _check, "generate": _generate, "save": _save, "load": _load, "publish": _publish, "export": _export,
        "memory": _memory, "measure": _measure,
    }  # fmt: skip
