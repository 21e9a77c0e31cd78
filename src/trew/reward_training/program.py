"""``RewardProgram``: the training of a reward model, with its steps on pairs, its evaluation and its checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data import PromptStream
from ..errors import NumericsError
from ..learner import recompute
from ..learner.optimizer import learning_rate, load_moments, make_optimizer, moments, trainable
from ..learner.stored import check_stored
from ..models import backends, loading
from ..models.sharded import Rows, copy_into
from ..rewards.model.scorer import Scorer
from ..runs import RunFolder
from ..runs.writer import Writer
from ..training.program import Program, Snapshot, Timetable
from ..training.remembered import Progress, Shapes
from ..utils.console import Bar, Display
from ..utils.shapes import Count
from ..utils.signals import Interrupts
from .agreement import agreement
from .data import Encoded
from .loss import bradley_terry
from .packed import best
from .plain import Pairs
from .planning import RewardPlan


@dataclass(frozen=True, slots=True)
class _Bounds:
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Agreement:
    """The result of :func:`measure`."""

    pairs: Count
    prompts: Count
    accuracy: _Bounds
    auc: _Bounds
    margin: float
    mean_score: float
    loss: float


@dataclass(frozen=True, slots=True)
class _Counters:
    optimizer: str


@dataclass(frozen=True, slots=True)
class _Nothing:
    """No part counts over several steps."""


SHAPES = Shapes(_Counters, Progress, _Nothing, _Agreement)


@dataclass(kw_only=True)
class RewardProgram(Program):
    """A plan with its model loaded."""

    plan: RewardPlan
    model: Any
    pairs: Pairs  # runs pairs through the model
    notes: tuple[str, ...]
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    order: PromptStream  # of the training pairs, by position

    @property
    def remembers(self) -> Shapes:
        return SHAPES

    def step(self, bar: Bar) -> None:
        """Takes one optimizer step on the next pairs and logs its metrics."""
        start = time.monotonic()
        s, state = self.plan.settings, self.state
        config = s.learner.optimizer()
        # By position in the stream, which follows from the step: a resumed training draws the same pairs.
        pairs = [self.plan.train[i] for i in self.order.take(state.step * s.learner.batch, s.learner.batch)]
        rate = learning_rate(state.step, config=config, steps=self.plan.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss, (chosen, rejected) = self.pairs.accumulate(pairs, centre=s.learner.centre)
        parameters = list(self.parameters.values())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # Before the update: a step that is not finite leaves the weights as they are.
        if not math.isfinite(float(norm)) or not math.isfinite(loss):
            raise NumericsError(
                f"step {state.step + 1}: the loss is {loss:g} and the gradient norm {float(norm):g}; nothing was "
                "applied. A lower learner.lr, or learner.dtype = 'float32', may help"
            )
        torch.nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, norm)
        self.writer.release()  # a checkpoint being written reads the same tensors that change now
        self.optimizer.step()
        state.step += 1
        seconds = time.monotonic() - start
        state.seconds += seconds
        row = {"step": state.step, "loss": loss, **_scores(chosen, rejected), "grad_norm": float(norm), "lr": rate,
               "seconds": seconds, "tokens_per_second": sum(map(len, pairs)) / seconds}  # fmt: skip
        self.folder.log(row)
        bar.advance()
        bar.note(f"loss {loss:.3f}")

    def evaluate(self) -> dict[str, Any]:
        """Measures agreement with the held-out pairs and logs it."""
        with self.interrupts.anywhere("during an evaluation; continue with --resume"):
            result = measure(self.pairs, self.plan.held, seed=self.plan.settings.seed)
        a, step = result["accuracy"], self.state.step
        self.folder.log(
            {"step": step, "eval_accuracy": a["mean"], "eval_low": a["low"], "eval_high": a["high"],
             "eval_auc": result["auc"]["mean"], "eval_loss": result["loss"], "eval_n": result["pairs"]}
        )  # fmt: skip
        self.display.line(f"step {step}: {figures(result)}")
        return result

    def snapshot(self) -> Snapshot:
        return Snapshot({**self._stored(), **moments(self.optimizer, self.parameters)}, {"optimizer": "adamw"})

    def load(self, tensors: Mapping[str, Tensor | Rows], counters: Mapping[str, Any]) -> None:
        stored = self._stored()
        # All names and shapes before anything is overwritten.
        check_stored(stored, tensors)
        load_moments(self.optimizer, self.parameters, tensors)
        with torch.no_grad():
            for name, tensor in stored.items():
                copy_into(tensor, tensors[name])

    def _stored(self) -> dict[str, Tensor]:
        return {f"model.{name}": p.detach() for name, p in self.parameters.items()}


def _scores(chosen: Sequence[float], rejected: Sequence[float]) -> dict[str, float]:
    """Metrics of a step's scores."""
    count, margins = len(chosen), [c - r for c, r in zip(chosen, rejected, strict=True)]
    return {
        "pair_accuracy": sum((m > 0) + 0.5 * (m == 0) for m in margins) / count,
        "margin": sum(margins) / count,
        "mean_score": (sum(chosen) + sum(rejected)) / (2 * count),
    }


def measure(model: Pairs, pairs: Sequence[Encoded], *, seed: int = 0) -> dict[str, Any]:
    """The model's agreement with pairs (see :func:`agreement`) and its mean loss. Raises NumericsError if a score is
    not finite."""
    good, bad = model.scores(pairs)
    if not all(map(math.isfinite, [*good, *bad])):
        raise NumericsError("the model gives scores that are not finite: its weights are broken")
    loss = bradley_terry(torch.tensor(good), rejected=torch.tensor(bad)).mean()
    found = agreement(good, rejected=bad, clusters=[p.key for p in pairs], seed=seed)
    return {**found, "loss": float(loss)}


def figures(result: dict[str, Any]) -> str:
    """An evaluation in one line."""
    a, u = result["accuracy"], result["auc"]
    return (
        f"held-out accuracy {a['mean']:.3f} ({a['low']:.3f} to {a['high']:.3f}), AUC {u['mean']:.3f} "
        f"({u['low']:.3f} to {u['high']:.3f}), loss {result['loss']:.3f}; {result['pairs']} pairs of "
        f"{result['prompts']} prompts"
    )


def build(ready: RewardPlan, folder: RunFolder, display: Display, interrupts: Interrupts) -> RewardProgram:
    """Loads the model and assembles its training."""
    s = ready.settings
    if s.threads:
        torch.set_num_threads(s.threads)
    torch.manual_seed(s.seed)
    model: Any = loading.load_scorer(s.model, device=ready.device, new_head=True)
    loading.check_vocab(model, ready.encoder.tokenizer)
    text = model.config.get_text_config()
    # transformers' classifiers refuse batches of several texts without a padding token: the exported model needs one.
    if text.pad_token_id is None:
        tokenizer = ready.encoder.tokenizer
        known = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        text.pad_token_id = known
    if s.learner.gradient_checkpointing:
        recompute.check(model)
    autocast = torch.bfloat16 if s.learner.dtype == "bfloat16" else None
    scorer = Scorer(model, ready.encoder, budget=s.learner.microbatch_tokens, autocast=autocast)
    backend = backends.find(ready.device, layers=s.kernels == "auto", products=False)
    pairs, note = best(scorer, ready.train, backend=backend, again=s.learner.gradient_checkpointing)
    parameters = trainable(model)
    return RewardProgram(
        plan=ready, model=model, pairs=pairs, notes=(note,) if note else (), parameters=parameters,
        optimizer=make_optimizer(parameters, s.learner.optimizer()), order=PromptStream(len(ready.train), seed=s.seed),
        timetable=Timetable(ready.steps, s.eval.every, s.checkpoint.every, s.checkpoint.keep),
        device=ready.device, fingerprint=ready.fingerprint, folder=folder, display=display, interrupts=interrupts,
        writer=Writer(display.line), backend=backend,
    )  # fmt: skip
