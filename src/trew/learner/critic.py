"""``Critic``: a model that learns to predict returns, beside the policy and with an optimizer of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ..config import CriticConfig, LearnerConfig
from ..errors import NumericsError
from ..models.sharded import Rows, copy_into
from ..objective import TokenBatch
from ..objective.value import ValueLoss
from ..types import StepOutput, TrainingSample
from . import gradients, recompute
from .accumulate import TokenPositions, check_finite, members, predicted_part
from .dealing import agree
from .forward import in_rounds, logprobs_of
from .optimizer import learning_rate, load_moments, make_optimizer, moments, trainable
from .packing import Pack
from .parallel import Parallel, Solo
from .runner import RunnerSettings
from .stored import check_stored, stored_tensors
from .value_runner import ValueRunner

PREFIX, MOMENTS = "critic.", "critic_optimizer."
"""Prefixes of its tensors' names in a checkpoint."""


class Critic:
    """Values of samples, and optimizer steps toward their returns.

    ``learner`` decides how it is trained, but for the rate: packs, dtype, checkpointing, optimizer, schedule, norm.
    ``optimizer_steps`` is the length of the whole run. The model must have a value head (:func:`.with_value_head`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: CriticConfig,
        learner: LearnerConfig,
        optimizer_steps: int,
        parallel: Parallel | None = None,
    ) -> None:
        self.model = model.eval()
        self.config = dataclasses.replace(learner, lr=config.lr)
        self.optimizer_steps = optimizer_steps
        self.steps = 0  # optimizer steps; the schedule counts them
        self.before_update: Callable[[], None] = lambda: None  # called before any tensor that state() returned changes
        self._rule = ValueLoss(config.clip)
        self._parameters = trainable(model)
        self._optimizer = make_optimizer(self._parameters, self.config)
        self._parallel = parallel or Solo()
        if learner.gradient_checkpointing:
            recompute.check(model)
        self._runner = ValueRunner(model, RunnerSettings(
            budget=learner.microbatch_tokens, share_prompts=learner.share_prompts,
            autocast=torch.bfloat16 if learner.dtype == "bfloat16" else None,
            gradient_checkpointing=learner.gradient_checkpointing, ranks=self._parallel.size,
        ))  # fmt: skip

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how the model is run."""
        return [f"critic: {message}" for message in self._runner.messages]

    def values(self, samples: Sequence[TrainingSample]) -> Float[Tensor, "N"]:
        """The value of the state in which each completion token was chosen; float32 on the CPU, no gradient. 0 at
        tokens that were not sampled. Raises NumericsError, naming the samples, where one is not finite."""
        return logprobs_of(self._runner, samples, parallel=self._parallel, quantity="values")

    def step(self, samples: Sequence[TrainingSample], batch: TokenBatch) -> StepOutput:
        """One optimizer step on ``samples``; ``batch`` belongs to them, prepared by the objective, with ``values`` and
        ``returns``. Every sample with a loss token counts, whatever its advantage.

        Raises NumericsError where a value, the loss or the gradient norm is not finite: nothing is changed then.
        """
        rate = learning_rate(self.steps, config=self.config, steps=self.optimizer_steps)
        active = members(samples, batch, batch.mask)
        # The schedule goes on without a step, as the policy's does: both then end with the run.
        if not active:
            self.steps += 1
            return StepOutput(0.0, {}, 0.0, self.steps)
        try:
            loss, predictions = self._accumulate(samples, batch, active)
            gradients.sum_over(self._parameters.values(), self._parallel)
            norm = gradients.clip(
                self._parameters.values(), self.config.max_grad_norm, samples=samples, active=active,
                what="the critic's gradient norm", rate="critic.lr",
            )  # fmt: skip
            # Bits, not values: ranks that differ in the last one drift apart from here on.
            agree(self._parallel, {"critic's step": self.steps, "loss": loss.hex(), "gradient norm": norm.hex()})
        except BaseException:
            self._optimizer.zero_grad(set_to_none=True)
            raise
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.before_update()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        metrics = {
            "value_loss": (loss, 1.0), "critic_grad_norm": (norm, 1.0), "critic_lr": (rate, 1.0),
            **self._rule.metrics(predictions, batch=batch),
        }  # fmt: skip
        return StepOutput(loss, metrics, norm, self.steps)

    def _accumulate(
        self, samples: Sequence[TrainingSample], batch: TokenBatch, active: Sequence[int]
    ) -> tuple[float, Float[Tensor, "N"]]:
        """Forward and backward over all packs; the loss, and the predictions of before the update."""
        tokens, total = TokenPositions.of(samples), torch.zeros((), dtype=torch.float64)
        predictions = torch.zeros(len(batch.mask), dtype=torch.float32)

        def compute(pack: Pack, beside: list[Pack]) -> None:
            at = tokens.predicted(pack.samples)
            part = predicted_part(batch, [samples[i] for i in pack.samples], pack, len(at))

            def rule(where: slice, values: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
                check_finite(values, part.sequence_ids[where], pack, samples, quantity="values")
                own = values.to(part.mask.device)
                # Kept per token: explained variance is no sum, and must not depend on how the step was cut into packs.
                predictions[at[where]] = own
                loss, slopes = self._rule(own, batch=part.select_tokens(where))
                total.add_(loss.double())
                return slopes.to(values), None

            self._runner.accumulate(pack, rule)

        # Every rank has all of the critic's weights: one without a pack has no pass to take part in.
        in_rounds(self._runner.packs(samples, among=active), compute, lambda beside: None, parallel=self._parallel)
        self._runner.release()
        self._parallel.sum_([total, predictions])
        if not torch.isfinite(total):
            raise NumericsError(f"the critic's loss is {float(total)}", names="all", quantity="value_loss")
        return float(total), predictions

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on: weights and optimizer state by name, and counters. The tensors are
        the live ones: write or copy them before the next step (see ``before_update``)."""
        tensors = {f"{PREFIX}{name}": t.detach() for name, t in self._stored().items()}
        state = moments(self._optimizer, self._parameters)
        tensors |= {f"{MOMENTS}{name.removeprefix('optimizer.')}": t for name, t in state.items()}
        return tensors, {"critic_steps": self.steps}

    def load_state(self, tensors: Mapping[str, Tensor | Rows], meta: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned. Raises CheckpointError where it belongs to another model or optimizer;
        nothing is changed then."""
        stored = {f"{PREFIX}{name}": t for name, t in self._stored().items()}
        own = {name: t for name, t in tensors.items() if name.startswith(PREFIX)}
        check_stored(stored, own)
        self.before_update()
        load_moments(self._optimizer, self._parameters, {
            f"optimizer.{name.removeprefix(MOMENTS)}": t for name, t in tensors.items() if name.startswith(MOMENTS)
        })  # fmt: skip
        with torch.no_grad():
            for name, t in stored.items():
                copy_into(t, own[name])
        self.steps = int(meta["critic_steps"])

    def _stored(self) -> dict[str, Tensor]:
        return stored_tensors(self.model, adapters=False)


def without_critic(tensors: Mapping[str, Tensor | Rows]) -> dict[str, Tensor | Rows]:
    """A checkpoint's tensors but for those of a critic."""
    return {name: t for name, t in tensors.items() if not name.startswith((PREFIX, MOMENTS))}
