"""``Learner``: turns samples and a prepared batch into a weight update; the gradient does not depend on the split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ..config import LearnerConfig
from ..models.backend import Backend
from ..models.lora import Adapters, merged_tensors
from ..models.sharded import Rows, copy_into, full
from ..models.stored import as_stored
from ..objective import Objective, TokenBatch
from ..objective.entropy_bonus import EntropyBonus
from ..types import StepOutput, TrainingSample
from . import compiled, gradients, liger, recompute
from .accelerator import LayerAccelerator
from .accumulate import Accumulated, TokenPositions, members
from .choose import runner_for
from .dealing import agree
from .forward import Progress, forward, in_rounds, logprobs_of
from .head import Beside
from .optimizer import Watched, begin, learning_rate, load_moments, make_optimizer, moments, trainable
from .pack_gradients import PackGradients
from .parallel import Parallel, Solo
from .runner import ModelRunner, RunnerSettings
from .stored import check_stored, stored_tensors
from .teacher import Teacher


class Learner:
    """A model under training: log-probs of samples, and optimizer steps on them.

    Weights and optimizer state are float32; ``config.dtype = "bfloat16"`` affects the computation only (autocast).
    Dropout is off throughout: the same weights must always give the same log-probs. ``reference`` is a frozen model for
    the KL term. With ``adapters``, which are part of the model, the reference is the model without them, and only they
    are trained and stored. ``optimizer_steps`` is the length of the whole run, for the learning rate schedule.
    ``fused``: compute the output head chunk by chunk. ``backend``: may run samples instead of the model's own forward.
    ``parallel``: the ranks that share the packs of a step; a single process by default. ``offloaded``: the optimizer's
    moments stay in CPU memory. ``objective`` changes only where its entropy bonus is adaptive, and is always the one
    for the next step.
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
        parallel: Parallel | None = None,
        offloaded: bool = False,
    ):
        assert adapters is None or (adapters.model is model and reference is None)
        self.model, self.config, self.objective = model.eval(), config, objective
        self.optimizer_steps = optimizer_steps
        self.version = 0  # of the weights: changes exactly when they do
        self.steps = 0  # optimizer steps taken or skipped as silent; the schedule counts both
        self.reference_version: int | None = None  # of the weights that the reference has, if it has those of one
        self.before_update: Callable[[], None] = lambda: None  # called before any tensor that state() returned changes
        self.tell: Callable[[str], None] = lambda text: None  # receives notes for the user
        self.teacher: Teacher | None = None  # whose log-probs on-policy distillation reads
        # Whether the update measures the policy's entropy where the batch has none: at the training temperature, and of
        # the samples that have a gradient.
        self.measure_entropy = False
        self._parameters = trainable(model)
        self._optimizer = make_optimizer(self._parameters, config, offloaded=offloaded)
        self._adapters = adapters
        if config.gradient_checkpointing:
            recompute.check(model)
        self._accelerator = self._make_accelerator()
        self._backend = backend
        self._parallel = parallel or Solo()
        # The sampler's temperature: a ratio compares log-probs of the distribution that the tokens were drawn from.
        self.settings = settings = RunnerSettings(
            temperature=temperature, budget=config.microbatch_tokens, share_prompts=config.share_prompts, fused=fused,
            autocast=torch.bfloat16 if config.dtype == "bfloat16" else None,
            gradient_checkpointing=config.gradient_checkpointing, accelerator=self._accelerator,
            ranks=self._parallel.size,
        )  # fmt: skip
        self._runner = runner_for(model, settings, backend)
        self._at_one = None  # the same at temperature 1, where that is another
        if temperature != 1:
            self._at_one = runner_for(model, dataclasses.replace(settings, temperature=1.0), backend)
        self._reference = None
        if reference is not None:
            once = dataclasses.replace(settings, release_after_use=True)
            self._reference = runner_for(reference.eval().requires_grad_(False), once, backend)
        elif adapters is not None:
            # The same model, but a runner to itself: what was verified with the adapters on is not verified without.
            self._reference = runner_for(model, settings, backend)

    def _make_accelerator(self) -> LayerAccelerator | None:
        """The accelerator for the layers of the model's own forward, if the configuration asks for one."""
        if self.config.compile:
            compiled.check(self.model)
            return compiled.Compiler(lambda text: self.tell(text))  # looked up late: ``tell`` is set after __init__
        if self.config.liger:
            liger.check(self.model)
            return liger.Liger()
        return None

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how the model is run; each was also given as a warning when it was found."""
        said = [*self._runner.messages, *(self._reference.messages if self._reference else [])]
        said += self.teacher.notes if self.teacher is not None else []
        return list(dict.fromkeys(said))

    @property
    def models(self) -> list[torch.nn.Module]:
        """The modules that it computes with: the model, the reference where that is another, and a teacher here."""
        reference = self._reference.model if self._reference is not None else self.model
        taught = self.teacher.modules if self.teacher is not None else []
        return [self.model, *([] if reference is self.model else [reference]), *taught]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, whose state belongs to the parameters of the model."""
        return self._optimizer

    def release(self) -> None:
        """Frees memory that is not needed until the next pass."""
        for runner in (self._runner, self._at_one, self._reference, self.teacher):
            if runner is not None:
                runner.release()

    def verify(self, samples: Sequence[TrainingSample]) -> None:
        """Decides the execution path on whole samples, where it is not decided yet. To be called before
        truncated samples are run, which must not decide it."""
        if not self._runner.verified:
            self._runner.packs(samples)

    def logprobs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False, progress: Progress | None = None
    ) -> Float[Tensor, "N"]:
        """Log-probs of all completion tokens, in sample order, at the temperature; float32 on the CPU, no gradient.
        Tokens that were not sampled have 0."""
        runner = self._reference if reference else self._runner
        if runner is None:
            raise ValueError("logprobs(reference=True): this learner was made without a reference model")
        with self._as_reference() if reference else nullcontext():
            quantity = "ref_logprobs" if reference else "logprobs"
            return logprobs_of(runner, samples, parallel=self._parallel, quantity=quantity, progress=progress)

    def teacher_logprobs(self, samples: Sequence[TrainingSample]) -> Float[Tensor, "N"]:
        """Log-probs of all completion tokens under the teacher, as :meth:`logprobs` gives them."""
        assert self.teacher is not None
        return self.teacher.logprobs(samples)

    def untempered(self, samples: Sequence[TrainingSample]) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
        """Log-probs and entropies of all completion tokens at temperature 1, as :meth:`logprobs` gives them."""
        return self._values(self._at_one or self._runner, samples, "entropies")

    def score_norms(self, samples: Sequence[TrainingSample]) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
        """Log-probs of all completion tokens as :meth:`logprobs` gives them, and their score norms."""
        return self._values(self._runner, samples, "score_norms")

    def _values(
        self, runner: ModelRunner, samples: Sequence[TrainingSample], beside: Beside
    ) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
        logprobs, more = forward(
            runner, samples, lambda pack: runner.values_of(pack, beside), outputs=2, parallel=self._parallel
        )
        return logprobs, more

    def _as_reference(self) -> AbstractContextManager[None]:
        """Disables the adapters, if there are any."""
        return nullcontext() if self._adapters is None else self._adapters.disabled()

    def step(
        self, samples: Sequence[TrainingSample], batch: TokenBatch, progress: Progress | None = None
    ) -> StepOutput:
        """One optimizer step: :meth:`accumulate`, then :meth:`apply`."""
        return self.apply(self.accumulate(samples, batch, progress))

    def accumulate(
        self, samples: Sequence[TrainingSample], batch: TokenBatch, progress: Progress | None = None
    ) -> Accumulated:
        """Computes the gradient of one optimizer step on ``samples`` into the parameters; ``batch`` belongs to them,
        prepared by the objective (``logprobs`` is not read).

        Samples that cannot have a gradient (:meth:`.Objective.has_gradient`) are not run; denominators still count
        them. Metrics of the objective cover the samples that were run.

        Raises NumericsError, naming the samples, when a log-prob or the loss is not finite: nothing is changed then,
        and gradients are cleared.
        """
        assert len(samples) == len(batch.group_ids)
        assert sum(len(s.token_ids) for s in samples) == len(batch.mask)
        # Not prepared: the samples are a whole step. In training a step's minibatches come prepared.
        if batch.token_weights is None:
            batch = self.objective.prepare(batch)
        done = Accumulated(samples, batch, members(samples, batch, self.objective.has_gradient(batch)))
        if progress is not None:
            # Silent samples count as finished at once.
            progress(len(samples) - len(done.active))
        if done.active:
            with self._cleared_on_failure():
                self._accumulate(done, progress)
            done.reduce(self._parallel)
        return done

    def apply(self, done: Accumulated) -> StepOutput:
        """Clips the accumulated gradient to ``max_grad_norm`` and moves the weights by it.

        Where no sample has a gradient, weights, optimizer state and ``version`` stay the same. Raises NumericsError
        when the gradient norm is not finite: weights, optimizer state, objective and counters are unchanged then, and
        gradients are cleared.
        """
        rate = learning_rate(self.steps, config=self.config, steps=self.optimizer_steps)
        count, active = len(done.samples), done.active
        metrics: dict[str, tuple[float, float]] = {
            "silent_share": (count - len(active), count), "lr": (rate, 1.0),
            "skipped_steps": (0.0 if active else 1.0, 1.0),
        }  # fmt: skip
        if self.objective.entropy_bonus.active:
            metrics["entropy_coefficient"] = (self.objective.entropy_bonus.coefficient, 1.0)
        # No optimizer step at all: with a gradient of 0, momentum and weight decay would still move the weights.
        if not active:
            self._after(done.batch)
            return StepOutput(0.0, metrics, 0.0, self.version)
        with self._cleared_on_failure():
            # Summed before the norm is taken: every rank must clip by the norm of the whole gradient.
            self._sum_gradients()
            norm = self._clip(done.samples, active)
            # Bits, not values: ranks that differ in the last one drift apart from here on.
            agree(self._parallel, {"version": self.version, "loss": done.loss.hex(), "gradient norm": norm.hex()})
            watched = Watched.before(self._parameters.values())
        if self._accelerator is not None:
            self._accelerator.report()
        # From the counter instead of a scheduler object, so that a checkpoint needs no scheduler state.
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        # ---- from here on nothing raises NumericsError, and the weights change
        self.before_update()
        self._runner.release()  # gathered copies of the old weights
        if self._backend is not None:
            begin(self._optimizer, self._backend.zeros)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
        self._after(done.batch)
        metrics |= {"grad_norm": (norm, 1.0), "learner_tokens": (done.tokens, 1.0), **watched.after(self._parallel)}
        return StepOutput(done.loss, {**metrics, **done.metrics(self.objective)}, norm, self.version)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of the weights by the names that the model's files have, tied ones under both names, for a
        process that samples from them; otherwise as :meth:`tensors`."""
        return as_stored(self.model, self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by the names that transformers gives them, tied ones under both names. With adapters, the
        weights that they and the frozen ones add up to. Tensors are made one by one. Sharded weights are gathered, so
        all ranks must iterate together."""
        if self._adapters is not None:
            yield from merged_tensors(self._adapters)
            return
        for name, tensor in self.model.state_dict().items():
            yield name, full(tensor)

    @contextmanager
    def _cleared_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._optimizer.zero_grad(set_to_none=True)
            raise

    def _after(self, batch: TokenBatch) -> None:
        """Counts the step, and moves an adaptive entropy coefficient."""
        self.steps += 1
        if batch.mean_entropy is not None and batch.mask.any():
            bonus = self.objective.entropy_bonus.after(batch.mean_entropy)
            self.objective = self.objective.replace(entropy_bonus=bonus)

    def _accumulate(self, done: Accumulated, progress: Progress | None) -> None:
        """Forward and backward over all packs; leaves the gradient of the whole step in the parameters."""
        samples, batch = done.samples, done.batch
        # The bonus needs the gradient of the current policy's entropies, so PackLoss applies it; batch.entropies hold
        # the sampler's values. The objective for the log-probs therefore has none.
        bonus, objective = self.objective.entropy_bonus, self.objective.replace(entropy_bonus=EntropyBonus())
        acts = batch.mean_entropy is not None and bonus.applies(batch.mean_entropy)
        packs = PackGradients(
            runner=self._runner, done=done, positions=TokenPositions.of(samples), objective=objective,
            bonus=bonus if acts else None,
            coefficients=self._coefficients(objective, done) if objective.sees_step else None,
            entropies=acts or (self.measure_entropy and batch.entropies is None), progress=progress,
        )  # fmt: skip
        among = self._runner.packs(samples, among=done.active)
        in_rounds(among, packs.compute, packs.idle, parallel=self._parallel)

    def _coefficients(self, objective: Objective, done: Accumulated) -> Float[Tensor, "N"]:
        """Coefficients of a rule that looks across sequences, from the log-probs of the whole step. Silent samples are
        included: they have no gradient themselves, but affect the coefficients of the others."""
        samples, batch = done.samples, done.batch
        counted = members(samples, batch, batch.mask)
        at = TokenPositions.of(samples).of_samples(counted)
        # (N,), 0 for samples without a loss token: the mask keeps the rule from reading those.
        logprobs = torch.zeros(len(batch.mask), dtype=torch.float32)
        logprobs[at] = self.logprobs([samples[i] for i in counted])
        out = objective.loss(batch.replace(logprobs=logprobs.to(batch.mask.device)))
        if self._parallel.rank == 0:  # equal on all ranks; Accumulated.reduce() sums over ranks and must count it once
            done.add(out, torch.arange(len(batch.mask)))
            done.ran += counted
        return out.packed["coefficients"]

    def _sum_gradients(self) -> None:
        """Sums gradients over ranks; a rank without a pack contributes zeros."""
        gradients.sum_over(self._parameters.values(), self._parallel)

    def _clip(self, samples: Sequence[TrainingSample], active: Sequence[int]) -> float:
        """Clips the gradient to ``max_grad_norm`` and returns its norm before that."""
        most = self.config.max_grad_norm
        return gradients.clip(self._parameters.values(), most, samples=samples, active=active)

    @torch.no_grad()
    def update_reference(self) -> None:
        """Sets the reference to (1 - mix) reference + mix policy, with mix = ``config.reference_mix``."""
        assert self._reference is not None
        assert self._reference.model is not self.model
        self.before_update()
        # By parameter, so that tied weights move once, and buffers, which are constants, not at all.
        policy = dict(self.model.named_parameters())
        for name, p in self._reference.model.named_parameters():
            p.lerp_(policy[name], self.config.reference_mix)  # exactly the policy's weight where the mix is 1
        self.reference_version = self.version if self.config.reference_mix == 1 else None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on: weights, buffers and optimizer state by name, the reference
        where it is updated, and counters. With adapters: their weights only, and a fingerprint of the frozen ones.

        The tensors are the live ones: write or copy them before the next step (see ``before_update``).
        """
        tensors = {f"model.{name}": t.detach() for name, t in self._stored().items()}
        tensors |= {f"reference.{name}": t.detach() for name, t in self._moving_reference().items()}
        meta = {
            "policy_version": self.version, "steps": self.steps, "optimizer": self.config.optimizer,
            "base": self._base, "reference_version": self.reference_version,
            "entropy_coefficient": self.objective.entropy_bonus.coefficient,
        }  # fmt: skip
        return {**tensors, **moments(self._optimizer, self._parameters)}, meta

    def load_state(self, tensors: Mapping[str, Tensor | Rows], meta: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned. Raises CheckpointError, listing the differences, where it belongs to
        another model or optimizer; nothing is changed then."""
        stored = {f"model.{name}": t for name, t in self._stored().items()}
        stored |= {f"reference.{name}": t for name, t in self._moving_reference().items()}
        differences = []
        if meta.get("optimizer") != self.config.optimizer:
            own = self.config.optimizer
            differences.append(f"optimizer: {meta.get('optimizer')!r} in the checkpoint, {own!r} here")
        if meta.get("base", "") != self._base:
            differences.append("base: the adapters of the checkpoint belong to other frozen weights than those here")
        check_stored(stored, tensors, differences)
        self.before_update()
        # What was made from the weights that are about to be overwritten.
        self._runner.release()
        # Moments first: they may still be refused, and must be before a weight is overwritten.
        load_moments(self._optimizer, self._parameters, tensors)
        with torch.no_grad():
            for name, t in stored.items():
                copy_into(t, tensors[name])
        self.version, self.steps = int(meta["policy_version"]), int(meta["steps"])
        if self._moving_reference():
            self.reference_version = meta.get("reference_version")  # checkpoints of older versions do not say it
        bonus = self.objective.entropy_bonus
        if bonus.target:  # a fixed coefficient comes from the configuration, which may have been changed
            bonus = dataclasses.replace(bonus, coefficient=float(meta["entropy_coefficient"]))
            self.objective = self.objective.replace(entropy_bonus=bonus)

    def _moving_reference(self) -> dict[str, Tensor]:
        """The reference's weights where it is updated; otherwise they can be loaded again and need no storing."""
        if not self.config.reference_every or self._reference is None:
            return {}
        return dict(self._reference.model.named_parameters())

    @property
    def _base(self) -> str:
        """A fingerprint of the frozen weights under the adapters; empty without adapters."""
        return self._adapters.base if self._adapters is not None else ""

    def _stored(self) -> dict[str, Tensor]:
        return stored_tensors(self.model, adapters=self._adapters is not None)
