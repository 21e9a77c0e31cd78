"""``Learner``: from samples and a prepared batch to a weight update, with the same gradient however it is split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ..config import LearnerConfig
from ..errors import CheckpointError, NumericsError
from ..models.backend import Backend
from ..models.lora import Adapters
from ..objective import LossOutput, Objective, TokenBatch, token_metrics
from ..objective.batch import PER_SEQUENCE, PER_TOKEN
from ..objective.entropy_bonus import EntropyBonus
from ..types import Metrics, StepOutput
from . import compiled, liger, recompute
from .accelerator import LayerAccelerator
from .choose import runner_for
from .optimizer import Watched, begin, learning_rate, load_moments, make_optimizer, moments, trainable
from .packing import Pack, Sample
from .runner import RunnerSettings

Progress = Callable[[int], None]
"""Is told how many more samples are done."""


class Learner:
    """A model under training: log-probs of samples, and optimizer steps on them.

    Weights and optimizer state are float32; ``config.dtype = "bfloat16"`` concerns the computation alone (autocast).
    Dropout is off throughout: log-probs of the same weights must be the same each time. ``reference`` is a frozen
    model for the KL term; with ``adapters``, which are in the model, it is the model without them, and only they are
    trained and stored. ``optimizer_steps`` is the length of the whole run, for the learning rate schedule. ``fused``:
    the output head is computed chunk by chunk. ``backend``: what may run samples instead of the model's own forward.
    ``objective`` changes only where its entropy bonus is adaptive: it is always the next step's.
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
        adapters: Adapters | None = None,
        fused: bool = True,
        backend: Backend | None = None,
    ):
        assert adapters is None or (adapters.model is model and reference is None)
        self.model, self.config, self.objective = model.eval(), config, objective
        self.optimizer_steps = optimizer_steps
        self.policy_version = 0  # of the weights: changes exactly when they do
        self.steps = 0  # optimizer steps taken or found silent: what the schedule counts
        self.before_update: Callable[[], None] = lambda: None  # is called whenever what state() gave is about to change
        self.tell: Callable[[str], None] = lambda text: None  # is given what the user may like to know
        self._parameters = trainable(model)
        self._optimizer = make_optimizer(self._parameters, config)
        self._adapters = adapters
        if config.gradient_checkpointing:
            recompute.check(model)
        self._accelerator = self._make_accelerator()
        self._backend = backend
        settings = RunnerSettings(
            temperature=temperature, budget=config.microbatch_tokens, share_prompts=config.share_prompts, fused=fused,
            autocast=torch.bfloat16 if config.dtype == "bfloat16" else None,
            gradient_checkpointing=config.gradient_checkpointing, accelerator=self._accelerator,
        )  # fmt: skip
        self._runner = runner_for(model, settings, backend)
        self._reference = None
        if reference is not None:
            once = dataclasses.replace(settings, release_after_use=True)
            self._reference = runner_for(reference.eval().requires_grad_(False), once, backend)
        elif adapters is not None:
            self._reference = runner_for(model, settings, backend)

    def _make_accelerator(self) -> LayerAccelerator | None:
        """What runs the model's layers in its own forward, if the configuration has something."""
        if self.config.compile:
            compiled.check(self.model)
            return compiled.Compiler(lambda text: self.tell(text))
        if self.config.liger:
            liger.check(self.model)
            return liger.Liger()
        return None

    @property
    def notes(self) -> list[str]:
        """What the user should know about how the model is run; also given as warnings when it was found out."""
        said = [*self._runner.messages, *(self._reference.messages if self._reference else [])]
        return list(dict.fromkeys(said))

    def verify(self, samples: Sequence[Sample]) -> None:
        """Decides on whole samples how they are run, where that was not decided yet: before parts of them are."""
        if not self._runner.verified:
            self._runner.packs(samples)

    def logprobs(
        self, samples: Sequence[Sample], *, reference: bool = False, progress: Progress | None = None
    ) -> Float[Tensor, "N"]:
        """Log-probs of all completion tokens, in sample order, at the temperature; float32 on the CPU, no gradient."""
        runner = self._reference if reference else self._runner
        if runner is None:
            raise ValueError("logprobs(reference=True): this learner was made without a reference model")
        out = torch.empty(sum(len(s.completion_ids) for s in samples), dtype=torch.float32)
        tokens = _Tokens.of(samples)
        with self._as_reference() if reference else nullcontext():
            for pack in runner.packs(samples):
                values = runner.logprobs_of(pack).cpu()
                lengths = torch.tensor([len(samples[i].completion_ids) for i in pack.samples])
                ids = torch.arange(len(lengths)).repeat_interleave(lengths)
                check_finite(values, ids, pack, samples, quantity="ref_logprobs" if reference else "logprobs")
                out[tokens.of_samples(pack.samples)] = values
                if progress is not None:
                    progress(len(pack.samples))
        runner.release()
        return out

    def _as_reference(self) -> AbstractContextManager[None]:
        """Adapters are off."""
        return nullcontext() if self._adapters is None else self._adapters.disabled()

    def step(self, samples: Sequence[Sample], batch: TokenBatch, progress: Progress | None = None) -> StepOutput:
        """One optimizer step on ``samples``; ``batch`` is theirs, prepared by the objective (``logprobs`` not read).

        Samples that cannot have a gradient (:meth:`.Objective.has_gradient`) are not run; the denominators count them
        all the same. Where no sample has one, weights and optimizer state stay untouched and so does
        ``policy_version``. Metrics of the objective are over the samples that were run.

        Raises NumericsError, naming the samples, when a log-prob, the loss or the gradient is not finite: weights,
        optimizer state, objective and counters are then as before, and gradients are cleared.
        """
        assert len(samples) == len(batch.group_ids)
        assert sum(len(s.completion_ids) for s in samples) == len(batch.mask)
        if batch.shares is None:
            batch = self.objective.prepare(batch)
        rate = learning_rate(self.steps, config=self.config, steps=self.optimizer_steps)
        active = _members(samples, batch, self.objective.has_gradient(batch))
        if progress is not None:
            progress(len(samples) - len(active))
        metrics: dict[str, tuple[float, float]] = {
            "silent_share": (len(samples) - len(active), len(samples)), "lr": (rate, 1.0),
            "skipped_steps": (0.0 if active else 1.0, 1.0),
        }  # fmt: skip
        if self.objective.entropy_bonus.active:
            metrics["entropy_coefficient"] = (self.objective.entropy_bonus.coefficient, 1.0)
        if not active:
            self._after(batch)
            return StepOutput(0.0, metrics, 0.0, self.policy_version)
        try:
            done = self._accumulate(samples, batch, active, progress)
            norm = self._clip(samples, active)
            watched = Watched.before(self._parameters.values())
        except BaseException:
            self._optimizer.zero_grad(set_to_none=True)
            raise
        if self._accelerator is not None:
            self._accelerator.report()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.before_update()
        if self._backend is not None:
            begin(self._optimizer, self._backend.zeros)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.policy_version += 1
        self._after(batch)
        metrics |= {"grad_norm": (norm, 1.0), "learner_tokens": (done.tokens, 1.0), **watched.after()}
        return StepOutput(done.loss, {**metrics, **done.metrics(samples, batch)}, norm, self.policy_version)

    def _after(self, batch: TokenBatch) -> None:
        """Counts the step, and moves an adaptive entropy coefficient."""
        self.steps += 1
        if batch.mean_entropy is not None and batch.mask.any():
            bonus = self.objective.entropy_bonus.after(batch.mean_entropy)
            self.objective = self.objective.replace(entropy_bonus=bonus)

    def _accumulate(
        self, samples: Sequence[Sample], batch: TokenBatch, active: list[int], progress: Progress | None
    ) -> _Done:
        """Forward and backward over all packs; leaves the gradient of the whole step in the parameters."""
        done = _Done(len(batch.mask))
        # The bonus is taken from the policy's distributions here; batch.entropies are those of the rollouts.
        bonus, objective = self.objective.entropy_bonus, self.objective.replace(entropy_bonus=EntropyBonus())
        bonus_acts = batch.mean_entropy is not None and bonus.applies(batch.mean_entropy)
        across = objective.couples in ("group", "batch")
        coefficients = self._coefficients(objective, samples, batch, done) if across else None
        tokens = _Tokens.of(samples)
        for pack in self._runner.packs(samples, among=active):
            part, at = _part(batch, pack.samples, tokens), tokens.of_samples(pack.samples)
            rule = _Rule(part, pack, samples, objective, bonus if bonus_acts else None, done, at)
            lengths = None
            if coefficients is not None:
                rule.coefficients = coefficients[at]
            else:
                done.ran += pack.samples
                if objective.couples == "sequence":
                    lengths = [len(samples[i].completion_ids) for i in pack.samples]
                    if not self._runner.sees_whole(lengths):
                        rule.look_at(self._runner.logprobs_of(pack))
                        lengths = None
            self._runner.accumulate(pack, rule, entropies=bonus_acts, lengths=lengths)
            done.tokens += pack.input_ids.size
            if progress is not None:
                progress(len(pack.samples))
        return done

    def _coefficients(
        self, objective: Objective, samples: Sequence[Sample], batch: TokenBatch, done: _Done
    ) -> Float[Tensor, "N"]:
        """Coefficients by a rule that looks across sequences: from the log-probs of the whole step, its silent samples
        included, since they decide about the others."""
        counted = _members(samples, batch, batch.mask)
        at = _Tokens.of(samples).of_samples(counted)
        logprobs = torch.zeros(len(batch.mask), dtype=torch.float32)
        logprobs[at] = self.logprobs([samples[i] for i in counted])
        out = objective.loss(batch.replace(logprobs=logprobs.to(batch.mask.device)))
        done.add(out, torch.arange(len(batch.mask)))
        done.ran += counted
        return out.packed["coefficients"]

    def _clip(self, samples: Sequence[Sample], active: Sequence[int]) -> float:
        """Gradient norm before clipping to ``max_grad_norm``."""
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not torch.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {float(norm)}, though log-probs are finite (a lower learner.lr, or "
                "learner.dtype = 'float32', may help)",
                names=_names(active, samples), quantity="grad_norm", samples=active,
            )  # fmt: skip
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
        return float(norm)

    @torch.no_grad()
    def update_reference(self) -> None:
        """The reference's weights become (1 - mix) of their own + mix of the policy's, by ``config.reference_mix``."""
        assert self._reference is not None
        assert self._reference.model is not self.model
        self.before_update()
        policy = dict(self.model.named_parameters())
        for name, p in self._reference.model.named_parameters():
            p.lerp_(policy[name], self.config.reference_mix)  # exactly W where the mix is 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on: weights, buffers and optimizer state by name, a reference that is
        updated, and counters. Of a model with adapters: these alone, and a fingerprint of the rest.

        The tensors are the live ones: write them before the next step, or copy them (see ``before_update``).
        """
        tensors = {f"model.{name}": t.detach() for name, t in self._stored().items()}
        tensors |= {f"reference.{name}": t.detach() for name, t in self._moving_reference().items()}
        meta = {
            "policy_version": self.policy_version, "steps": self.steps, "optimizer": self.config.optimizer,
            "base": self._base,
            "entropy_coefficient": self.objective.entropy_bonus.coefficient,
        }  # fmt: skip
        return {**tensors, **moments(self._optimizer, self._parameters)}, meta

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Continues from what :meth:`state` gave. Raises CheckpointError, with the differences, where it is not of
        this model and optimizer; nothing is changed then."""
        stored = {f"model.{name}": t for name, t in self._stored().items()}
        stored |= {f"reference.{name}": t for name, t in self._moving_reference().items()}
        saved = {name: t for name, t in tensors.items() if not name.startswith("optimizer.")}
        differences = [f"{name}: missing in the checkpoint" for name in stored if name not in saved]
        differences += [f"{name}: unknown to this model" for name in saved if name not in stored]
        differences += [
            f"{name}: {tuple(saved[name].shape)} {saved[name].dtype} in the checkpoint, {tuple(t.shape)} {t.dtype} here"
            for name, t in stored.items()
            if name in saved and (saved[name].shape != t.shape or saved[name].dtype != t.dtype)
        ]
        if meta.get("optimizer") != self.config.optimizer:
            own = self.config.optimizer
            differences.append(f"optimizer: {meta.get('optimizer')!r} in the checkpoint, {own!r} here")
        if meta.get("base", "") != self._base:
            differences.append("base: the adapters of the checkpoint belong to other frozen weights than those here")
        if differences:
            shown = "\n  ".join(differences[:8]) + (f"\n  and {len(differences) - 8} more" if differences[8:] else "")
            raise CheckpointError(f"the checkpoint is of another model or optimizer:\n  {shown}")
        self.before_update()
        load_moments(self._optimizer, self._parameters, tensors)
        with torch.no_grad():
            for name, t in stored.items():
                t.copy_(saved[name])
        self.policy_version, self.steps = int(meta["policy_version"]), int(meta["steps"])
        bonus = self.objective.entropy_bonus
        if bonus.target:  # a fixed coefficient is the configuration's
            bonus = dataclasses.replace(bonus, coefficient=float(meta["entropy_coefficient"]))
            self.objective = self.objective.replace(entropy_bonus=bonus)

    def _moving_reference(self) -> dict[str, Tensor]:
        """The reference's weights, where they do not stay as they were loaded."""
        if not self.config.reference_every or self._reference is None:
            return {}
        return dict(self._reference.model.named_parameters())

    @property
    def _base(self) -> str:
        """What the adapters stand in; empty without any."""
        return self._adapters.base if self._adapters is not None else ""

    def _stored(self) -> dict[str, Tensor]:
        """The adapters; without any, parameters (frozen ones too, tied ones once) and the buffers that belong to the
        model's state."""
        if self._adapters is not None:
            return dict(self._parameters)
        persistent = self.model.state_dict().keys()
        buffers = {name: b for name, b in self.model.named_buffers() if name in persistent}
        return {**dict(self.model.named_parameters()), **buffers}


def _members(samples: Sequence[Sample], batch: TokenBatch, tokens: Bool[Tensor, "N"]) -> list[int]:
    """The samples that have at least one of ``tokens``."""
    found = set(batch.sequence_ids[tokens].tolist())
    return [i for i in range(len(samples)) if i in found]


@dataclass(slots=True)
class _Done:
    """What the parts of a step gave, put together: metrics such as quantiles are of all of it, not of its parts."""

    size: int  # completion tokens of the step
    loss: float = 0.0
    tokens: int = 0  # fed to the model for a gradient, prompts and padding included
    values: dict[str, Tensor] = field(default_factory=dict)  # each (size,)
    ran: list[int] = field(default_factory=list)

    def add(self, out: LossOutput, at: Int[Tensor, "n"]) -> None:
        """The values per token of ``out`` belong ``at`` these places of the step's."""
        self.loss += float(out.loss.detach())
        for name, value in {**out.packed, "logprobs": out.batch.policy}.items():
            if name not in self.values:
                self.values[name] = torch.zeros(self.size, dtype=value.dtype, device=value.device)
            self.values[name][at] = value

    def metrics(self, samples: Sequence[Sample], batch: TokenBatch) -> Metrics:
        """The objective's, over the samples that were run."""
        ran = sorted(self.ran)
        at = _Tokens.of(samples).of_samples(ran)
        values = {name: value[at] for name, value in self.values.items()}
        seen = batch.select(torch.tensor(ran)).replace(logprobs=values["logprobs"])
        return token_metrics(seen, ratio=values["ratio"], weight=values["weight"], correction=values.get("correction"))


@dataclass(slots=True)
class _Rule:
    """The objective on the tokens of a pack, as the head asks for it: from log-probs and entropies to the derivatives
    of the loss by them. Raises NumericsError where something is not finite."""

    part: TokenBatch  # of the pack, in its order
    pack: Pack
    samples: Sequence[Sample]
    objective: Objective
    bonus: EntropyBonus | None
    done: _Done
    at: Int[Tensor, "n"]  # the pack's tokens in those of the step
    coefficients: Float[Tensor, "n"] | None = None  # where they are known beforehand

    def look_at(self, logprobs: Float[Tensor, "n"]) -> None:
        """Fixes all coefficients by the log-probs of the whole pack."""
        self.coefficients = self._of_objective(slice(0, len(self.at)), logprobs)

    def __call__(
        self, where: slice, logprobs: Float[Tensor, "m"], entropies: Float[Tensor, "m"] | None
    ) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"] | None]:
        device = logprobs.device
        if self.coefficients is None:
            coefficients = self._of_objective(where, logprobs)
        else:
            self._check(logprobs, where)
            coefficients = self.coefficients[where]
        if entropies is None or self.bonus is None:
            return -coefficients.to(device), None
        assert self.part.shares is not None
        with torch.enable_grad():
            own = entropies.to(self.part.mask.device).requires_grad_()
            term = self.bonus.loss(own, shares=self.part.shares[where])  # shares are 0 outside the mask
            (slope,) = torch.autograd.grad(term, own)
        self._add(float(term.detach()))
        return -coefficients.to(device), slope.to(device)

    def _of_objective(self, where: slice, logprobs: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        self._check(logprobs, where)
        out = self.objective.loss(_cut(self.part, where).replace(logprobs=logprobs.to(self.part.mask.device)))
        self.done.add(out, self.at[where])
        self._add(0.0)
        return out.packed["coefficients"]

    def _check(self, logprobs: Float[Tensor, "m"], where: slice) -> None:
        check_finite(logprobs, self.part.sequence_ids[where], self.pack, self.samples)

    def _add(self, value: float) -> None:
        self.done.loss += value
        if not np.isfinite(self.done.loss):
            raise NumericsError(
                f"the loss is {self.done.loss}",
                names=_names(self.pack.samples, self.samples), quantity="loss", samples=self.pack.samples,
            )  # fmt: skip


def _part(batch: TokenBatch, samples: Sequence[int], tokens: _Tokens) -> TokenBatch:
    """Of a prepared batch these samples, each of which has tokens."""
    if list(samples) != list(range(samples[0], samples[-1] + 1)):
        return batch.select(torch.tensor(samples))
    return _cut(batch, slice(int(tokens.bounds[samples[0]]), int(tokens.bounds[samples[-1] + 1])))


def _cut(batch: TokenBatch, where: slice) -> TokenBatch:
    """These tokens of a prepared batch, and their sequences."""
    ids = batch.sequence_ids[where]
    sequences = slice(int(ids[0]), int(ids[-1]) + 1)
    fields = {k: v[where] for k in PER_TOKEN if (v := getattr(batch, k)) is not None}
    fields |= {k: v[sequences] for k in PER_SEQUENCE if (v := getattr(batch, k)) is not None}
    return batch.replace(**(fields | {"sequence_ids": ids - ids[0], "step_rewards": None, "padded_mask": None}))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Where each sample's tokens stand in the stream of all completion tokens."""

    bounds: np.ndarray  # (S + 1,)

    @staticmethod
    def of(samples: Sequence[Sample]) -> _Tokens:
        return _Tokens(np.concatenate([[0], np.cumsum([len(s.completion_ids) for s in samples])]))

    def of_samples(self, members: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.arange(self.bounds[i], self.bounds[i + 1]) for i in members]))


def check_finite(
    logprobs: Float[Tensor, "n"],
    sequences: Int[Tensor, "n"],
    pack: Pack,
    samples: Sequence[Sample],
    *,
    quantity: str = "logprobs",
) -> None:
    """Raises NumericsError that names the samples of ``pack`` whose log-probs are not finite; the i-th is of its
    ``sequences[i]``-th sample."""
    finite = torch.isfinite(logprobs)
    if finite.all():
        return
    found = logprobs.to(sequences.device)
    broken = sequences[~finite.to(sequences.device)].unique().tolist()
    whose = "the reference's log-probs" if quantity == "ref_logprobs" else "log-probs"
    raise NumericsError(
        f"{whose} are not finite (broken weights, or a token that has probability 0)",
        names=_names([pack.samples[i] for i in broken], samples), quantity=quantity,
        samples=[pack.samples[i] for i in broken],
        values={pack.samples[i]: found[sequences == i].tolist() for i in broken},
    )  # fmt: skip


def _names(members: Sequence[int], samples: Sequence[Sample]) -> str:
    shown = [f"{i} (group {samples[i].group})" for i in sorted(members)[:8]]
    return ", ".join(shown) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
