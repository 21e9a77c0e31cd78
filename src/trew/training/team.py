"""Orders from rank 0 to the other ranks of a run; without other ranks, rank 0 does everything alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..distributed.orders import Orders, bare_rollouts
from ..learner import Policy
from ..models.sharded import Rows
from ..rollout import Engine, StepRollouts
from ..runs import checkpoint_files
from ..runs.tensor_files import TensorOnDisk
from ..types import TrainingSample
from ..weights import WeightSync

SAVING = "saving"
"""What rank 0 gives up (:meth:`.Ranks.abandon`) where a checkpoint cannot be written."""


class Team:
    """The other ranks of a run, as rank 0 sees them; without ``orders`` there are none."""

    def __init__(self, orders: Orders | None = None, *, sharded: bool = False) -> None:
        self.orders, self.sharded = orders, sharded

    @property
    def parts(self) -> int:
        """The number of ranks that write a part of every checkpoint."""
        return self.orders.ranks.size if self.orders is not None and self.sharded else 1

    @property
    def exchange(self) -> dict[str, str]:
        """How ranks on CPUs exchange shards of weights and gradients, by the name of this; empty without."""
        how = self.orders.ranks.exchange if self.orders is not None else ""
        return {"exchange between ranks": how} if how else {}

    def step(self, step: int) -> None:
        """Lets all ranks begin a step."""
        if self.orders is not None:
            self.orders.give("step", step=step)

    def measure(self, rollouts: StepRollouts) -> None:
        """Lets the other ranks compute log-probs of these rollouts together with this one."""
        if self.orders is not None:
            self.orders.give("measure", rollouts=bare_rollouts(rollouts))

    def stepped(self) -> None:
        """Notes that this rank has finished a step: the others are, or will be, waiting for an order."""
        if self.orders is not None:
            self.orders.updated()

    def save(self, root: Path, step: int) -> None:
        """Lets the other ranks write their parts of the checkpoint that this rank begins."""
        if self.orders is not None and self.parts > 1:
            self.orders.give("save", folder=str(checkpoint_files.aside(root, step, os.getpid()).resolve()))

    def give_up_saving(self) -> None:
        """Tells the other ranks that this one has failed to write a checkpoint, which ends the run: they would wait for
        the folder that was to hold their parts."""
        if self.orders is not None and self.parts > 1:
            with contextlib.suppress(RuntimeError):  # of a store that is gone with the others
                self.orders.ranks.abandon(SAVING)

    def load(self, tensors: Mapping[str, TensorOnDisk | Rows], counters: Mapping[str, Any]) -> None:
        """Lets the other ranks load the checkpoint that this rank has read."""
        if self.orders is not None:
            stored = [tensor for tensor in tensors.values() if isinstance(tensor, TensorOnDisk)]
            # Paths, not tensors: ranks share a file system, and read their own rows.
            files = {str(path.resolve()) for tensor in stored for _, _, path, _ in tensor.pieces}
            self.orders.give("load", files=sorted(files), counters=dict(counters))

    def publish(self) -> None:
        """Lets all ranks help to publish the first weights; those of later steps are published without an order."""
        if self.orders is not None:
            self.orders.give("publish")

    def memory(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The most memory that each rank has held; ``own`` is this one's."""
        if self.orders is None:
            return [dict(own)]
        self.orders.give("memory")
        return self.orders.ranks.gather(own)

    def export(self) -> None:
        """Lets the other ranks help to gather the weights."""
        if self.orders is not None and self.sharded:
            self.orders.give("export")


class Together:
    """Publishes weights that all ranks gather together; only rank 0 communicates with the engine."""

    def __init__(self, inner: WeightSync, orders: Orders) -> None:
        self._inner, self._orders = inner, orders

    def publish(self, policy: Policy, engine: Engine) -> None:
        self._orders.heard = False  # after an error here, the others may be anywhere in the computation
        self._inner.publish(policy, engine)
        self._orders.heard = True


class Gathering:
    """The other ranks' part in :class:`..weights.publisher.Publisher` of rank 0."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self._samples = samples  # of the canary
        self._version: int | None = None

    def publish(self, policy: Policy, engine: Engine | None) -> None:
        assert engine is None
        # Weights that were published already: rank 0 gathers nothing either.
        if policy.version == self._version:
            return
        self._version = policy.version
        for _ in policy.weights():
            pass
        # The canary's pass, in which all ranks take part.
        policy.untempered(self._samples)
