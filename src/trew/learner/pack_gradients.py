"""``PackGradients``: forward and backward over the packs of one optimizer step, and what each needs before it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ..errors import NumericsError
from ..objective import Objective
from ..objective.entropy_bonus import EntropyBonus
from .accumulate import Accumulated, PackLoss, TokenPositions, predicted_part
from .forward import Progress
from .packing import Pack
from .runner import ModelRunner


@dataclass(frozen=True, slots=True)
class PackGradients:
    """Runs the packs of an optimizer step one by one: gradients add up in the parameters, values in ``done``.

    Where an objective's coefficients come from depends on its scope. A rule across sequences has all of them before
    the first pack (``coefficients``). A rule per token takes whatever chunk the output head is at. A rule over a
    sequence must see it whole: in one chunk of the head, or by one more forward pass before the gradient.
    """

    runner: ModelRunner
    done: Accumulated
    positions: TokenPositions
    objective: Objective  # without an entropy bonus
    bonus: EntropyBonus | None  # None where it does not act in this step
    coefficients: Float[Tensor, "N"] | None
    entropies: bool  # whether the policy's are computed
    progress: Progress | None

    def compute(self, pack: Pack, beside: list[Pack]) -> None:
        """Runs one pack; ``beside`` are those that all ranks run in the same round, this one among them."""
        callback = self._callback(pack)
        lengths = None
        # Otherwise the log-probs of the whole step gave the coefficients, and ``ran`` lists its samples.
        if callback.coefficients is None:
            self.done.ran += pack.samples
            if self._twice(beside):
                self._fix_coefficients(callback, pack)
            elif self.objective.scope == "sequence":
                lengths = self._lengths(pack)
        self.runner.accumulate(pack, callback, entropies=self.entropies, lengths=lengths)
        self.done.tokens += pack.input_ids.size
        if self.progress is not None:
            self.progress(len(pack.samples))

    def idle(self, beside: list[Pack]) -> None:
        """Takes part in a round without a pack: as many passes as the other ranks make."""
        if self._twice(beside):
            self.runner.idle(gradient=False)
        self.runner.idle(gradient=True)

    def _callback(self, pack: Pack) -> PackLoss:
        samples, at = self.done.samples, self.positions.predicted(pack.samples)
        part = predicted_part(self.done.batch, [samples[i] for i in pack.samples], pack, len(at))
        known = None if self.coefficients is None else self.coefficients[at]
        return PackLoss(part, pack, samples, self.objective, self.bonus, self.done, at, known)

    def _fix_coefficients(self, callback: PackLoss, pack: Pack) -> None:
        logprobs = self.runner.logprobs_of(pack)
        try:
            callback.fix_coefficients(logprobs)
        except NumericsError:
            # The other ranks are about to make the second pass of this round, and would wait for this one forever.
            self.runner.idle(gradient=True)
            raise

    def _twice(self, beside: list[Pack]) -> bool:
        """Whether the ranks make a pass for log-probs before the one for gradients; equal on all of them."""
        if self.coefficients is not None or self.objective.scope != "sequence":
            return False
        return not all(self.runner.sees_whole(self._lengths(pack)) for pack in beside)

    def _lengths(self, pack: Pack) -> list[int]:
        """The numbers of predicted tokens of a pack's samples, in its order."""
        return [len(self.done.samples[i].predicted) for i in pack.samples]
