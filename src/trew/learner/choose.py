"""Chooses the runner of a model: a backend's, where the first samples match the model's own forward, or the plain
one."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ..models.backend import Backend
from ..models.sharded import is_sharded
from ..models.verified import Verified
from ..types import TrainingSample
from .autograd import TOLERANCE, AutogradRunner, by_sample, first_samples
from .head import Beside, LossCallback
from .packing import Pack
from .path import ExecutionPath
from .runner import ModelRunner, RunnerSettings


def runner_for(model: PreTrainedModel, settings: RunnerSettings, backend: Backend | None) -> ModelRunner:
    """The runner for sharded weights, or the plain runner, or the backend's with the plain one behind it."""
    if any(is_sharded(p) for p in model.parameters()):
        from .sharded_runner import ShardedRunner  # imports FSDP, which takes long

        return ShardedRunner(model, settings)
    plain = AutogradRunner(model, settings)
    found = "there is no backend" if backend is None else backend.runner(model, plain=plain)
    return plain if isinstance(found, str) else VerifiedRunner(found, plain)


class VerifiedRunner:
    """Uses ``candidate`` unless its log-probs of the first samples differ from the model's own forward, then ``plain``.
    Implements :class:`.runner.ModelRunner`."""

    def __init__(self, candidate: ModelRunner, plain: AutogradRunner) -> None:
        self.model, self.settings = candidate.model, candidate.settings
        self._plain = plain
        self._choice: Verified[ModelRunner] = Verified(
            candidate, plain, instead=f"{type(self.model).__name__}: trained through its own forward",
            subject="the kernels", remedy="kernels = 'plain'",
        )  # fmt: skip
        self._compared = False

    @property
    def chosen(self) -> ModelRunner:
        """The runner in use."""
        return self._choice.chosen

    @property
    def messages(self) -> list[str]:
        # The plain runner's messages concern the user only once it is in use.
        candidates = [self._choice.candidate, *([self._plain] if self._choice.refused else [])]
        return [*self._choice.messages, *(text for runner in candidates for text in runner.messages)]

    @property
    def path(self) -> ExecutionPath:
        return self.chosen.path

    @property
    def verified(self) -> bool:
        return self._compared and self.chosen.verified

    def packs(self, samples: Sequence[TrainingSample], *, among: Sequence[int] | None = None) -> list[Pack]:
        if not self._compared:
            self._compare(samples, among)
        return self.chosen.packs(samples, among=among)

    def _compare(self, samples: Sequence[TrainingSample], among: Sequence[int] | None) -> None:
        """Compares the candidate, in float32, with the model's own forward."""
        few = first_samples(self.model, samples, among)
        if not few:
            return
        want = by_sample(self._plain.exact(), few)
        self._choice.compare(lambda runner: by_sample(runner.exact(), few), want, tolerance=TOLERANCE)
        # One sample has no prompt to share, and NaN weights match anything: compare again on the next samples then.
        self._compared = self._choice.refused or (len(few) > 1 and not bool(want.isnan().any()))

    def logprobs_of(self, pack: Pack) -> Float[Tensor, "n"]:
        return self.chosen.logprobs_of(pack)

    def values_of(self, pack: Pack, beside: Beside) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        return self.chosen.values_of(pack, beside)

    def accumulate(
        self, pack: Pack, rule: LossCallback, *, entropies: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        self.chosen.accumulate(pack, rule, entropies=entropies, lengths=lengths)

    def idle(self, *, gradient: bool) -> None:
        self.chosen.idle(gradient=gradient)

    def sees_whole(self, lengths: Sequence[int]) -> bool:
        return self.chosen.sees_whole(lengths)

    def release(self) -> None:
        self.chosen.release()

    def exact(self) -> ModelRunner:
        return self.chosen.exact()
