"""A teacher: whatever gives the log-probs of another model for the policy's own tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ModelError
from ..models.backend import Backend
from ..types import TrainingSample
from .choose import runner_for
from .forward import logprobs_of
from .parallel import Parallel
from .runner import RunnerSettings


class Teacher(Protocol):
    """Log-probs of samples under a frozen model. All ranks call it together, and each gets all values."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that it keeps on the learner's device."""
        ...

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how it is run."""
        ...

    def logprobs(self, samples: Sequence[TrainingSample]) -> Float[Tensor, "N"]:
        """Log-probs of all completion tokens, in sample order; 0 at those that were not sampled. Float32 on the CPU,
        without gradient. Raises NumericsError, naming the samples, where one is not finite."""
        ...

    def release(self) -> None:
        """Frees memory that is not needed until the next call."""
        ...


class LocalTeacher:
    """A second model in this process, which runs as the reference does: packed, at the sampler's temperature."""

    def __init__(
        self, model: PreTrainedModel, *, settings: RunnerSettings, backend: Backend | None, parallel: Parallel
    ) -> None:
        own = dataclasses.replace(settings, release_after_use=True, gradient_checkpointing=False)
        self._runner = runner_for(model.eval().requires_grad_(False), own, backend)
        self._parallel = parallel
        embeddings: Any = model.get_input_embeddings()
        self._tokens = int(embeddings.weight.shape[0])

    @property
    def modules(self) -> list[nn.Module]:
        return [self._runner.model]

    @property
    def notes(self) -> list[str]:
        return [f"teacher: {text}" for text in self._runner.messages]

    def logprobs(self, samples: Sequence[TrainingSample]) -> Float[Tensor, "N"]:
        # A policy may have more rows than its tokenizer has tokens, and rarely samples one of them.
        largest = max((int(max(ids.max(initial=0) for ids in (s.prompt_ids, s.token_ids))) for s in samples), default=0)
        if largest >= self._tokens:
            raise ModelError(
                f"teacher.model: the policy sampled token {largest}, and the teacher has {self._tokens} tokens only; "
                "give a teacher with at least as many rows in its embedding as the policy"
            )
        return logprobs_of(self._runner, samples, parallel=self._parallel, quantity="teacher_logprobs")

    def release(self) -> None:
        self._runner.release()
