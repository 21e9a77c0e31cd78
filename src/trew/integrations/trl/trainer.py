"""``GRPOTrainer``: TRL's trainer, with a trew objective in place of its advantages and its loss.

TRL generates, scores, shuffles, splits, accumulates, logs and saves. We step in at three places: after generation the
objective's ``prepare`` runs once on the whole generation batch of all processes; where a generation batch covers
several optimizer steps, each step gets separate denominators; and ``_compute_loss`` evaluates the objective.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import trl  # type: ignore[import-not-found]
from accelerate.utils import gather_object
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing  # type: ignore[import-not-found]

from ...errors import ConfigError
from ...objective import Objective
from ...objective.metrics import step_metrics
from ...utils.installing import install_packages
from . import hooks, refusals, step
from .metrics import log_metrics, trl_metrics

Inputs = dict[str, Any]


class GRPOTrainer(trl.GRPOTrainer):
    """``trl.GRPOTrainer`` with one more argument, ``objective``, which decides advantages and loss.

    Everything else stays TRL's. Raises ConfigError with all reasons at once for GRPOConfig settings that the objective
    decides, and for objectives that need what TRL does not have. A reference model is loaded iff the objective has a
    beta. TRL's metrics keep their names; ours are logged as ``trew/...``.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *more: Any,
        objective: Objective,
        rollout_func: Any = None,
        **kwargs: Any,
    ):
        if not isinstance(objective, Objective):
            raise ConfigError(
                f"objective: got {objective!r}, accepts an Objective, such as trew.preset('trw-logistic')"
            )
        _check_trl()
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = trl.GRPOConfig(f"{name.split('/')[-1]}-GRPO")  # as TRL does
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        if problems := refusals.of_run(objective, args, rollout_func=rollout_func, reward_funcs=functions):
            raise ConfigError(problems)
        if "ref_logprobs" in objective.needs:
            # TRL loads a reference model iff beta != 0. A copy, since the caller's config may serve another trainer.
            args = copy.copy(args)
            args.beta = objective.beta
        self.objective = objective
        self._scored: tuple[Tensor, list[Any]] | None = None  # rewards (S, K) of all processes, own completions
        self._sums: list[Mapping[str, tuple[float, float]]] = []  # metrics of the optimizer step's micro-batches so far
        self._planned = False  # whether the buffered generation batch still lacks its optimizer steps' denominators
        super().__init__(model, reward_funcs, args, *more, rollout_func=rollout_func, **kwargs)
        # Again, since TRL adds an environment's reward to the functions only in its constructor.
        if problems := refusals.of_rewards(objective, self.reward_funcs, weights=self.reward_weights.tolist()):
            raise ConfigError(problems)
        for text in refusals.notes(objective, self.reward_weights.tolist()):
            warnings.warn(text, stacklevel=2)

    # ---- once per generation

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        # Kept aside: TRL returns these to _generate_and_score_completions, which reduces them to its own advantages
        # and drops them.
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scored = rewards, completion_ids_list
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Inputs:
        output = super()._generate_and_score_completions(inputs)
        batch = self._plan(output)
        # Global tensors to this process's rows: TRL shuffles and splits them with its own.
        mine = self._own_rows(step.carried(batch), like=output["completion_mask"])
        self._show_advantages(mine["advantages"], mine[step.MASK])
        log_metrics(self, step_metrics(batch))
        self._planned = True
        return output | mine

    def _plan(self, output: Inputs) -> Any:
        """Runs the objective's ``prepare`` on the generation batch of all processes."""
        assert self._scored is not None
        rewards, ids = self._scored
        self._scored = None
        read = [i for i, f in enumerate(self.reward_funcs) if self._reads(f)]
        mask = step.loss_mask(output)
        fields: dict[str, Any] = {
            "old_logprobs": output.get("old_per_token_logps"),
            "ref_logprobs": output.get("ref_per_token_logps"),
            "rollout_logprobs": output.get("sampling_per_token_logps"),
        }
        if self._looks_at_rollout:
            now, entropies = self._look(output)
            fields["entropies"] = entropies
            fields["old_logprobs"] = now if fields["old_logprobs"] is None else fields["old_logprobs"]
        fields = {name: self._of_all(value) for name, value in fields.items() if value is not None}
        ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        # Gathered from here on: every process computes the same plan, since groups and denominators span processes.
        everyone = self._of_all(mask.long()).bool()
        generations = self.num_generations if self.model.training else self.num_generations_eval
        truncated = gather_object(step.cut_off(ids, ends=ends))
        return step.plan(
            self.objective,
            # ``prepare`` reads only their shape and type: the policy's log-probs belong to the loss.
            logprobs=torch.zeros(everyone.shape, device=mask.device),
            mask=everyone,
            # TRL repeats each prompt in place, so that a group's completions are consecutive over all processes.
            group_ids=torch.arange(len(everyone), device=mask.device) // generations,
            # (rows of all processes, functions that count).
            rewards=rewards[:, read],
            reward_weights=self.reward_weights.to(rewards.device)[read],
            truncated=torch.tensor(truncated, device=mask.device),
            step_rewards=self._step_rewards(),
            max_length=self.max_completion_length,
            **fields,
        )

    @property
    def _looks_at_rollout(self) -> bool:
        """Whether the advantages need a forward pass at sampling time: for entropies, or for a KL in the reward."""
        components = [component for axis, component in self.objective.components() if axis != "entropy"]
        shaped = any(getattr(component, "place", "loss") != "loss" for component in components)
        return shaped or any("entropies" in component.needs for component in components)

    def _reads(self, function: Any) -> bool:
        """Whether a reward function counts; where only step rewards do, the others are merely logged."""
        of_steps = "step_rewards" in self.objective.needs and not self.objective.advantage.reads_rewards
        return hasattr(function, "taken") or not of_steps

    def _step_rewards(self) -> list[Any] | None:
        """Gathers (end, value) lists for all processes' completions; None if no reward function scores steps."""
        for function in self.reward_funcs:
            if hasattr(function, "taken"):
                return gather_object(function.taken())
        return None

    def _show_advantages(self, advantages: Tensor, mask: Tensor) -> None:
        """Replaces the advantages in TRL's completion log by ours, averaged over each completion's tokens."""
        # (B, C) -> (B,). Advantages are 0 outside of the mask.
        mean = advantages.sum(1) / mask.sum(1).clamp(min=1)
        shown = self.accelerator.gather(mean).tolist()
        logged = self._logs["advantages"]
        # TRL has appended its own for this batch just before; its log is bounded, so it may hold fewer than were added.
        for _ in range(min(len(shown), len(logged))):
            logged.pop()
        logged.extend(shown)

    # ---- once per optimizer step

    def _prepare_inputs(self, generation_batch: Any) -> Inputs:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            # An evaluation batch is a single step, and a training batch got its denominators when it was made.
            self._planned = False
            return self._coupled([inputs])[0]
        parts, size = self._buffered_inputs, self.args.gradient_accumulation_steps
        # Only after TRL has shuffled and split: which rows share an optimizer step is not known before.
        if self._planned and len(parts) > size:
            for start in range(0, len(parts), size):
                self._own_denominators(parts[start : start + size])
        self._planned = False
        # TRL's step counts micro-batches, over all passes over the buffered batch.
        place = self._step % len(parts)
        # At the first micro-batch of each optimizer step, and again in each pass over the batch: coefficients depend on
        # the current policy, which then stays fixed until the step is applied.
        if place % size == 0:
            parts[place : place + size] = self._coupled(parts[place : place + size])
        return parts[place]

    def _own_denominators(self, parts: Sequence[Inputs]) -> None:
        """Sets the denominators and token weights of the optimizer step that these micro-batches form."""
        names = ("advantages", step.MASK, *step.OF_ROWS)
        rows = {name: self._of_all(torch.cat([part[name] for part in parts])) for name in names if name in parts[0]}
        found = step.renormalised_for(self.objective, rows, max_length=self.max_completion_length)
        mine = self._own_rows(found, like=torch.cat([part[step.MASK] for part in parts]))
        start = 0
        for part in parts:
            end = start + len(part["completion_mask"])
            part |= {name: value[start:end] if value.dim() else value for name, value in mine.items()}
            start = end

    def _coupled(self, parts: list[Inputs]) -> list[Inputs]:
        """Computes the coefficients of an optimizer step whose rules couple its tokens; others pass through."""
        if not self.objective.sees_step:
            return parts
        # (B of all micro-batches, C): they are cut from one padded batch, and so have one width. Numbers are the same
        # in all.
        rows = {
            name: torch.cat([part[name] for part in parts]) if value.dim() else value
            for name, value in parts[0].items()
            if name in step.READ
        }
        seen = [self._look(part) for part in parts]
        rows |= {"logprobs": torch.cat([s[0] for s in seen]), "entropies": torch.cat([s[1] for s in seen])}
        everyone = {name: self._of_all(value) if value.dim() else value for name, value in rows.items()}
        logprobs, entropies = everyone.pop("logprobs"), everyone.pop("entropies")
        # The bonus has a gradient through the entropies, which coefficients on log-probs cannot carry: ``carrier`` adds
        # it per micro-batch.
        objective = self.objective.replace(entropy_bonus=type(self.objective.entropy_bonus)())
        batch = step.part(
            objective, everyone, logprobs=logprobs, entropies=entropies, max_length=self.max_completion_length
        )
        out = objective.loss(batch)
        log_metrics(self, {**out.metrics, **trl_metrics(self, out)})
        # Each micro-batch of each process reports an equal share, so that their sum is the step's loss.
        found = {step.COEFFICIENTS: out.coefficients, step.VALUE: out.loss / (len(parts) * self._processes)}
        mine = self._own_rows(found, like=rows[step.MASK])
        # Rows of each micro-batch.
        width = [len(part["completion_mask"]) for part in parts]
        pieces = mine[step.COEFFICIENTS].split(width)
        return [
            part | {step.COEFFICIENTS: piece, step.VALUE: mine[step.VALUE]}
            for part, piece in zip(parts, pieces, strict=True)
        ]

    # ---- once per micro-batch

    def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
        training = self.model.training
        accumulated = self.current_gradient_accumulation_steps if training else 1
        step.refuse_unplanned(inputs, micro_batches=accumulated)
        logprobs, entropies, auxiliary = self._forward(model, inputs, auxiliary=self.aux_loss_enabled)
        batch = step.part(
            self.objective, inputs, logprobs=logprobs, entropies=entropies, max_length=self.max_completion_length
        )
        if step.COEFFICIENTS in inputs:
            loss = step.carrier(self.objective, inputs, batch=batch)
        else:
            out = self.objective.loss(batch)
            loss = out.loss
            self._count({**out.metrics, **trl_metrics(self, out)}, micro_batches=accumulated)
        # Gradients are averaged over processes, but the token weights already divide by the counts of all of them.
        loss = loss * self._processes
        if self.aux_loss_enabled:
            assert auxiliary is not None
            # TRL's own term and scale: a mean over micro-batches, which the objective knows nothing about.
            loss = loss + self.router_aux_loss_coef * auxiliary / accumulated
            mean = self.accelerator.gather_for_metrics(auxiliary).mean().item()
            self._metrics["train" if training else "eval"]["aux_loss"].append(mean)
        return loss

    def _count(self, metrics: Mapping[str, tuple[float, float]], *, micro_batches: int) -> None:
        """Logs metrics once per optimizer step, as a mean over its tokens rather than a mean of micro-batch means."""
        self._sums.append(metrics)
        if len(self._sums) < micro_batches:
            return
        names = dict.fromkeys(name for part in self._sums for name in part)
        parts = {name: [part[name] for part in self._sums if name in part] for name in names}
        self._sums = []
        added = {name: (sum(v for v, _ in pairs), sum(n for _, n in pairs)) for name, pairs in parts.items()}
        log_metrics(self, self._of_all_sums(added))

    def _forward(self, model: Any, inputs: Inputs, *, auxiliary: bool = False, rows: int | None = None) -> Any:
        """Returns the completions' log-probs and entropies, (B, C), and a mixture-of-experts model's auxiliary loss."""
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            # Logits of the last C positions only, those of the completion.
            inputs["completion_ids"].size(1),
            batch_size=rows,
            compute_entropy=True,
            compute_aux_loss=auxiliary,
            **{name: inputs.get(name) for name in hooks.MODEL_INPUTS},
        )

    def _look(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Returns the current policy's log-probs and entropies, without a gradient."""
        training = self.model.training
        rows = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            logprobs, entropies, _ = self._forward(self.model, inputs, rows=rows)
        return logprobs, entropies

    # ---- processes

    @property
    def _processes(self) -> int:
        return self.accelerator.num_processes

    def _of_all(self, value: Tensor) -> Tensor:
        """Gathers the rows of all processes, in process order; (B, C) is padded on the right to the widest."""
        if self._processes == 1:
            return value
        # Booleans travel as integers and are cast back after the collective.
        whole = value.long() if value.dtype == torch.bool else value
        padded = self.accelerator.pad_across_processes(whole, dim=1) if value.dim() > 1 else whole
        return self.accelerator.gather(padded).to(value.dtype)

    def _own_rows(self, found: Mapping[str, Tensor], *, like: Tensor) -> dict[str, Tensor]:
        """Selects this process's rows from global results, cut to the width of its batch ``like`` (B, C)."""
        rows, width = like.shape
        # Every process has equally many rows, and they were gathered in process order.
        start = self.accelerator.process_index * rows
        own = {name: value[start : start + rows] if value.dim() else value for name, value in found.items()}
        return {name: value[:, :width] if value.dim() == 2 else value for name, value in own.items()}

    def _of_all_sums(self, metrics: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Adds up (sum, count) pairs over processes."""
        if self._processes == 1:
            return dict(metrics)
        # A metric may be missing on some processes. The tensors of a reduction must match, so all agree on names first.
        names = sorted({name for some in gather_object([sorted(metrics)]) for name in some})
        own = torch.tensor([metrics.get(name, (0.0, 0.0)) for name in names], device=self.accelerator.device)
        return dict(zip(names, map(tuple, self.accelerator.reduce(own, reduction="sum").tolist()), strict=True))


def _check_trl() -> None:
    """Refuses a TRL whose hooks have other signatures; warns about an untested version whose hooks match."""
    version = hooks.installed() or "of unknown version"
    if problems := hooks.misfits(trl.GRPOTrainer):
        tested = " and ".join(f"{release}.x" for release in hooks.TESTED)
        raise ConfigError(
            [f"TRL {version} does not fit: {problem}; this works with {tested}: {install_packages(hooks.WORKS)}"
             for problem in problems]
        )  # fmt: skip
    if not hooks.tested(version):
        warnings.warn(
            f"trew has not been tested with TRL {version} (but with {', '.join(hooks.TESTED)}); its hooks have the "
            "known parameters",
            stacklevel=3,
        )
