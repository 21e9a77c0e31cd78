"""``Learner``: from samples and a prepared batch to a weight update, with the same gradient however it is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ..config import LearnerConfig
from ..errors import CheckpointError, NumericsError
from ..objective import Objective, TokenBatch
from ..types import Metrics, StepOutput, reduce_metrics
from . import recompute
from .forward import Forward
from .optimizer import adamw, learning_rate, load_moments, moments, trainable
from .packing import Pack, Sample

Progress = Callable[[int], None]
"""Is told how many more samples are done."""


class Learner:
    """A model under training: log-probs of samples, and optimizer steps on them.

    Weights and optimizer state are float32; ``config.dtype = "bfloat16"`` concerns the computation alone (autocast).
    Dropout is off throughout: log-probs of the same weights must be the same each time. ``reference`` is a frozen
    model for the KL term. ``optimizer_steps`` is the length of the whole run, for the learning rate schedule.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: LearnerConfig,
        objective: Objective,
        optimizer_steps: int,
        temperature: float = 1.0,
        reference: PreTrainedModel | None = None,
        onednn: bool = True,
    ):
        self.model, self.config, self.objective = model.eval(), config, objective
        self.optimizer_steps = optimizer_steps
        self.policy_version = 0  # of the weights: changes exactly when they do
        self.steps = 0  # optimizer steps taken or found silent: what the schedule counts
        self._parameters = trainable(model)
        self._optimizer = adamw(self._parameters, config)
        if config.gradient_checkpointing:
            recompute.check(model)
        options: dict[str, Any] = {
            "temperature": temperature,
            "budget": config.microbatch_tokens,
            "share_prompts": config.share_prompts,
            "autocast": torch.bfloat16 if config.dtype == "bfloat16" else None,
            "onednn": onednn,
        }
        self._forward = Forward(model, **options)
        self._reference = None
        if reference is not None:
            self._reference = Forward(reference.eval().requires_grad_(False), **options)

    @property
    def notes(self) -> list[str]:
        """What the user should know about how the model is run; also given as warnings when it was found out."""
        return [*self._forward.messages, *(self._reference.messages if self._reference else [])]

    def logprobs(
        self, samples: Sequence[Sample], *, reference: bool = False, progress: Progress | None = None
    ) -> Float[Tensor, "N"]:
        """Log-probs of all completion tokens, in sample order, at the temperature; float32 on the CPU, no gradient."""
        forward = self._reference if reference else self._forward
        if forward is None:
            raise ValueError("logprobs(reference=True): this learner was made without a reference model")
        out = torch.empty(sum(len(s.completion_ids) for s in samples), dtype=torch.float32)
        tokens = _Tokens.of(samples)
        for pack in forward.packs(samples):
            values = forward.logprobs_of(pack).cpu()
            check_finite(values, pack, samples)
            out[tokens.of_samples(pack.samples)] = values
            if progress is not None:
                progress(len(pack.samples))
        return out

    def step(self, samples: Sequence[Sample], batch: TokenBatch, progress: Progress | None = None) -> StepOutput:
        """One optimizer step on ``samples``; ``batch`` is theirs, prepared by the objective (``logprobs`` not read).

        Samples that cannot have a gradient (advantage 0 or masked on every token, and no KL term) are not run; the
        denominators count them all the same. Where no sample has one, weights and optimizer state stay untouched and
        so does ``policy_version``. Metrics of the objective are over the samples that were run.

        Raises NumericsError, naming the samples, when a log-prob, the loss or the gradient is not finite: weights,
        optimizer state and counters are then as before, and gradients are cleared.
        """
        assert len(samples) == len(batch.group_ids)
        assert sum(len(s.completion_ids) for s in samples) == len(batch.mask)
        if batch.advantages is None or batch.denominators is None:
            batch = self.objective.prepare(batch)
        rate = learning_rate(self.steps, config=self.config, steps=self.optimizer_steps)
        active = self._active(samples, batch)
        if progress is not None:
            progress(len(samples) - len(active))
        metrics: list[Metrics] = [{"silent_share": (len(samples) - len(active), len(samples)), "lr": (rate, 1.0)}]
        if not active:
            self.steps += 1
            return StepOutput(0.0, {**metrics[0], "skipped_steps": (1.0, 1.0)}, 0.0, self.policy_version)
        try:
            done = self._accumulate(samples, batch, active, progress)
            norm = self._clip(samples, active)
        except BaseException:
            self._optimizer.zero_grad(set_to_none=True)
            raise
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.policy_version += 1
        metrics += [*done.metrics, {"grad_norm": (norm, 1.0), "learner_tokens": (done.tokens, 1.0),
                                    "skipped_steps": (0.0, 1.0)}]  # fmt: skip
        return StepOutput(done.loss, reduce_metrics(metrics), norm, self.policy_version)

    def _active(self, samples: Sequence[Sample], batch: TokenBatch) -> list[int]:
        """Samples with at least one token whose coefficient may differ from 0."""
        assert batch.advantages is not None
        loud = batch.mask if self.objective.beta > 0 else batch.mask & (batch.advantages != 0)
        heard = set(batch.sequence_ids[loud].tolist())
        return [i for i in range(len(samples)) if i in heard]

    def _accumulate(
        self, samples: Sequence[Sample], batch: TokenBatch, active: list[int], progress: Progress | None
    ) -> _Done:
        """Forward and backward over all packs; leaves the gradient of the whole step in the parameters."""
        done = _Done()
        packs = self._forward.packs(samples, among=active)
        # A rule that looks across sequences must see the whole step at once: coefficients first, then the gradient.
        coefficients = None
        if self.objective.couples in ("group", "batch") and len(packs) > 1:
            whole = self.objective.loss(batch.replace(logprobs=self.logprobs(samples)))
            coefficients = whole.coefficients.detach()
            done.loss, done.metrics = float(whole.loss), [whole.metrics]
        tokens = _Tokens.of(samples)
        for pack in packs:
            with self._recomputing(), self._forward.running(pack) as logits:
                logprobs = self._forward.logprobs(logits, pack).to(batch.mask.device)
                check_finite(logprobs.detach(), pack, samples)
                if coefficients is None:
                    part = self.objective.loss(batch.select(torch.tensor(pack.samples)).replace(logprobs=logprobs))
                    loss = part.loss
                    done.loss += float(loss.detach())
                    done.metrics.append(part.metrics)
                else:
                    loss = -(coefficients[tokens.of_samples(pack.samples)] * logprobs).sum()
                if not torch.isfinite(loss.detach()):
                    raise NumericsError(
                        f"the loss is {float(loss.detach())} on samples {_names(pack.samples, samples)}; the step was "
                        "not applied"
                    )
                loss.backward()
            done.tokens += pack.input_ids.size
            if progress is not None:
                progress(len(pack.samples))
        return done

    def _recomputing(self) -> AbstractContextManager[None]:
        return recompute.recomputing(self.model) if self.config.gradient_checkpointing else nullcontext()

    def _clip(self, samples: Sequence[Sample], active: Sequence[int]) -> float:
        """Gradient norm before clipping to ``max_grad_norm``."""
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not torch.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {float(norm)} on samples {_names(active, samples)} though their log-probs are "
                "finite; the step was not applied. A lower learner.lr, or learner.dtype = 'float32', may help"
            )
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
        return float(norm)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on: weights, buffers and optimizer state by name, and counters.

        The tensors are the live ones: write them before the next step, or copy them.
        """
        tensors = {f"model.{name}": t.detach() for name, t in self._stored().items()}
        meta = {"policy_version": self.policy_version, "steps": self.steps, "optimizer": "adamw"}
        return {**tensors, **moments(self._optimizer, self._parameters)}, meta

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Continues from what :meth:`state` gave. Raises CheckpointError, with the differences, where it is not of
        this model and optimizer; nothing is changed then."""
        stored = self._stored()
        saved = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        differences = [f"{name}: missing in the checkpoint" for name in stored if name not in saved]
        differences += [f"{name}: unknown to this model" for name in saved if name not in stored]
        differences += [
            f"{name}: {tuple(saved[name].shape)} {saved[name].dtype} in the checkpoint, {tuple(t.shape)} {t.dtype} here"
            for name, t in stored.items()
            if name in saved and (saved[name].shape != t.shape or saved[name].dtype != t.dtype)
        ]
        if meta.get("optimizer") != "adamw":
            differences.append(f"optimizer: {meta.get('optimizer')!r} in the checkpoint, 'adamw' here")
        if differences:
            shown = "\n  ".join(differences[:8]) + (f"\n  and {len(differences) - 8} more" if differences[8:] else "")
            raise CheckpointError(f"the checkpoint is of another model or optimizer:\n  {shown}")
        load_moments(self._optimizer, self._parameters, tensors)
        with torch.no_grad():
            for name, t in stored.items():
                t.copy_(saved[name])
        self.policy_version, self.steps = int(meta["policy_version"]), int(meta["steps"])

    def _stored(self) -> dict[str, Tensor]:
        """Parameters (frozen ones too, tied ones once) and the buffers that belong to the model's state."""
        persistent = self.model.state_dict().keys()
        buffers = {name: b for name, b in self.model.named_buffers() if name in persistent}
        return {**dict(self.model.named_parameters()), **buffers}


@dataclass(slots=True)
class _Done:
    loss: float = 0.0
    tokens: int = 0  # fed to the model, prompts and padding included
    metrics: list[Metrics] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Where each sample's tokens stand in the stream of all completion tokens."""

    bounds: np.ndarray  # (S + 1,)

    @staticmethod
    def of(samples: Sequence[Sample]) -> _Tokens:
        return _Tokens(np.concatenate([[0], np.cumsum([len(s.completion_ids) for s in samples])]))

    def of_samples(self, members: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.arange(self.bounds[i], self.bounds[i + 1]) for i in members]))


def check_finite(logprobs: Float[Tensor, "n"], pack: Pack, samples: Sequence[Sample]) -> None:
    """Raises NumericsError that names the samples of ``pack`` whose log-probs are not finite."""
    if torch.isfinite(logprobs).all():
        return
    parts = logprobs.split([len(samples[i].completion_ids) for i in pack.samples])
    broken = [i for i, part in zip(pack.samples, parts, strict=True) if not torch.isfinite(part).all()]
    raise NumericsError(
        f"log-probs that are not finite in samples {_names(broken, samples)}: broken weights, or a token that the "
        "policy gives probability 0; nothing was applied"
    )


def _names(members: Sequence[int], samples: Sequence[Sample]) -> str:
    shown = [f"{i} (group {samples[i].group})" for i in sorted(members)[:8]]
    return ", ".join(shown) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
