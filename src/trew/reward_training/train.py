"""Trains a reward model on preference pairs: the same run folder, checks, checkpoints and resume as ``trew train``.

Dropout is off and pairs are drawn by position, so that seed and data decide everything. Chosen and rejected of a pair
are in the same forward pass (:mod:`.packed`, :mod:`.plain`); a step's gradient does not depend on how it is split.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from .. import __version__, runs
from ..data import PromptStream
from ..errors import CheckpointError, ConfigError, NumericsError, Problems
from ..learner import recompute
from ..learner.optimizer import learning_rate, load_moments, make_optimizer, moments, trainable
from ..models import files, loading
from ..rewards.model.scorer import Encoder, Scorer
from ..runs import RunFolder, checkpoint_files, read_config
from ..training import backends
from ..utils.console import Bar, Display
from ..utils.signals import Interrupted, Interrupts
from .agreement import agreement
from .data import Encoded, encode, fingerprint, gather
from .loss import bradley_terry
from .packed import best
from .plain import Pairs
from .settings import RewardTraining, dumps
from .settings import problems as value_problems


@dataclass(frozen=True)
class RewardPlan:
    """A training that can start: checked settings and tokenised pairs, but no weights yet."""

    settings: RewardTraining
    encoder: Encoder
    train: list[Encoded]
    held: list[Encoded]
    device: str
    fingerprint: str
    notes: tuple[str, ...]
    example: str  # the first chosen text as the model reads it

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        s = self.settings
        return s.steps or -(-len(self.train) * s.epochs // s.learner.batch)


def plan(settings: RewardTraining, *, found: Sequence[str] = ()) -> RewardPlan:
    """Checks and gathers everything but the weights. Raises ConfigError with every problem, ``found`` among them."""
    s = settings
    problems = Problems([*found, *value_problems(s)])
    device = problems.attempt(lambda: loading.resolve_device(s.device))
    notes: list[str] = []
    bad = (
        loading.check(
            s.model, tokenizer=s.tokenizer, chat_template=s.chat_template, kind=files.base_problems, notes=notes
        )
        if s.model
        else [""]
    )
    problems += [line for line in bad if line]
    encoder = limit = None
    if not bad:
        load = {"tokenizer": s.tokenizer, "chat_template": s.chat_template}
        encoder = problems.attempt(lambda: Encoder.load(s.model, **load))
        limit = problems.attempt(lambda: loading.positions(s.model))
    told = any(p.startswith(("data.pairs: none", "data.held_out")) for p in problems)
    pairs = None if told else problems.attempt(lambda: gather(s.data, seed=s.seed))
    train: list[Encoded] = []
    held: list[Encoded] = []
    if pairs is not None and encoder is not None:
        notes += pairs.notes
        for name, these, into in (("training", pairs.train, train), ("held-out", pairs.held, held)):
            done = problems.attempt(
                lambda these=these, name=name: encode(these, encoder, limit=limit, config=s.data, what=name)
            )
            if done is not None:
                into += done[0]
                notes += done[1]
    if problems or encoder is None or pairs is None or device is None:
        raise ConfigError(problems)
    result = RewardPlan(
        s, encoder, train, held, device, fingerprint(pairs.train, pairs.held), tuple(notes),
        encoder.tokenizer.decode(train[0].chosen),
    )  # fmt: skip
    if s.learner.warmup_steps > result.steps:
        raise ConfigError(
            f"learner.warmup_steps: got {s.learner.warmup_steps}, but the whole training has {result.steps} steps; "
            "the learning rate would never be reached"
        )
    return result


@dataclass
class _State:
    """What a training must remember besides weights and optimizer."""

    step: int = 0
    seconds: float = 0.0
    before: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    evaluated: int = -1
    saved: int = -1


@dataclass
class _Job:
    plan: RewardPlan
    model: Any
    pairs: Pairs  # how they run through it
    notes: tuple[str, ...]
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    sampler: PromptStream
    display: Display
    interrupts: Interrupts
    state: _State = field(default_factory=_State)


def train_reward(
    settings: RewardTraining, *, resume: bool = False, overwrite: bool = False, display: Display | None = None
) -> dict[str, Any]:
    """The whole training; returns what is in summary.json. ``out/final`` holds the model in Hugging Face layout.

    Raises ConfigError with every problem of settings, data and model before weights are loaded. ``resume`` continues
    from the newest complete checkpoint; ``overwrite`` starts over in a used folder.
    """
    display = display or Display()
    ready = plan(settings, found=runs.problems(settings.out, resume=resume, overwrite=overwrite))
    interrupts = Interrupts()
    with RunFolder.open(settings.out, resume=resume, overwrite=overwrite) as run, contextlib.ExitStack() as ending:
        if run.resumed:
            _refuse_changes(run, settings)
        run.write_config(dumps(settings))
        job = _build(ready, display, interrupts)
        display.line(_headline(job))
        for note in (*ready.notes, *job.notes, *run.messages):
            display.line(f"note: {note}")
        if run.resumed:
            _restore(job, run)
        ending.enter_context(interrupts)  # from here on there is something to save
        _steps(job, run)
        loading.export(job.model, ready.encoder.tokenizer, run.final)
        summary = _summary(job)
        run.write_summary(summary)
        for line in describe(summary):
            display.line(line)
        return summary


def _build(ready: RewardPlan, display: Display, interrupts: Interrupts) -> _Job:
    s = ready.settings
    if s.threads:
        torch.set_num_threads(s.threads)
    torch.manual_seed(s.seed)
    model: Any = loading.load_scorer(s.model, device=ready.device, new_head=True)
    loading.check_vocab(model, ready.encoder.tokenizer)
    text = model.config.get_text_config()
    if text.pad_token_id is None:  # so that others can score several texts at once
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
    optimizer = make_optimizer(parameters, s.learner.optimizer())
    sampler = PromptStream(len(ready.train), seed=s.seed)
    return _Job(ready, model, pairs, (note,) if note else (), parameters, optimizer, sampler, display, interrupts)


def _steps(job: _Job, run: RunFolder) -> None:
    """All steps from the current one on, and the evaluations and checkpoints that are due."""
    s, state, last = job.plan.settings, job.state, job.plan.steps
    with job.display.bar("training", last, done=state.step) as bar:
        while True:
            due = state.step in (0, last) or bool(s.eval.every and state.step % s.eval.every == 0)
            if due and state.evaluated != state.step and not (job.interrupts.asked and state.step < last):
                _evaluate(job, run)
            every = s.checkpoint.every
            save = bool(every) and (state.step == last or state.step % every == 0)
            if state.step and (save or job.interrupts.asked) and state.saved != state.step:
                _save(job, run)
            if state.step == last:
                return
            job.interrupts.stop_if_asked(f"saved step {state.step} of {last}; continue with --resume")
            _step(job, run, bar)


def _step(job: _Job, run: RunFolder, bar: Bar) -> None:
    start = time.monotonic()
    s, state = job.plan.settings, job.state
    config = s.learner.optimizer()
    pairs = [job.plan.train[i] for i in job.sampler.take(state.step * s.learner.batch, s.learner.batch)]
    rate = learning_rate(state.step, config=config, steps=job.plan.steps)
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    job.optimizer.zero_grad(set_to_none=True)
    loss, (chosen, rejected) = job.pairs.accumulate(pairs, centre=s.learner.centre)
    parameters = list(job.parameters.values())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not math.isfinite(float(norm)) or not math.isfinite(loss):
        raise NumericsError(
            f"step {state.step + 1}: the loss is {loss:g} and the gradient norm {float(norm):g}; nothing was applied. "
            "A lower learner.lr, or learner.dtype = 'float32', may help"
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, norm)
    job.optimizer.step()
    state.step += 1
    seconds = time.monotonic() - start
    state.seconds += seconds
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    row = {
        "step": state.step, "loss": loss, "pair_accuracy": sum((m > 0) + 0.5 * (m == 0) for m in margins) / len(pairs),
        "margin": sum(margins) / len(pairs), "mean_score": (sum(chosen) + sum(rejected)) / (2 * len(pairs)),
        "grad_norm": float(norm), "lr": rate, "seconds": seconds, "tokens_per_second": sum(map(len, pairs)) / seconds,
    }  # fmt: skip
    run.log(row)
    bar.advance()
    bar.note(f"loss {loss:.3f}")


def judge(model: Pairs, pairs: Sequence[Encoded], *, seed: int = 0) -> dict[str, Any]:
    """How well the model agrees with pairs: see :func:`agreement`; and the mean loss."""
    good, bad = model.scores(pairs)
    if not all(map(math.isfinite, [*good, *bad])):
        raise NumericsError("the model gives scores that are not finite: its weights are broken")
    loss = bradley_terry(torch.tensor(good), rejected=torch.tensor(bad)).mean()
    found = agreement(good, rejected=bad, clusters=[p.key for p in pairs], seed=seed)
    return {**found, "loss": float(loss)}


def _evaluate(job: _Job, run: RunFolder) -> None:
    state = job.state
    try:
        with job.interrupts.anywhere("during an evaluation; continue with --resume"):
            result = judge(job.pairs, job.plan.held, seed=job.plan.settings.seed)
    except Interrupted:
        if state.step and state.saved != state.step:
            _save(job, run)  # the evaluation is made up for when the training is resumed
        raise
    state.before = state.before or result
    state.last, state.evaluated = result, state.step
    a = result["accuracy"]
    run.log(
        {"step": state.step, "eval_accuracy": a["mean"], "eval_low": a["low"], "eval_high": a["high"],
         "eval_auc": result["auc"]["mean"], "eval_loss": result["loss"], "eval_n": result["pairs"]}
    )  # fmt: skip
    job.display.line(f"step {state.step}: {_figures(result)}")


def _save(job: _Job, run: RunFolder) -> None:
    state = job.state
    state.saved = state.step
    tensors = {f"model.{name}": p.detach() for name, p in job.parameters.items()}
    tensors |= moments(job.optimizer, job.parameters)
    meta = {"state": dataclasses.asdict(state), "data": job.plan.fingerprint}
    checkpoint_files.save(run.checkpoints, state.step, tensors, meta, keep=job.plan.settings.checkpoint.keep)


def _restore(job: _Job, run: RunFolder) -> None:
    loaded, messages = checkpoint_files.load_latest(run.checkpoints)
    for message in messages:
        job.display.warn(message)
    if loaded is None:
        job.display.line(f"note: {run.folder} has no checkpoint yet; starting at step 1")
        run.rewind(-1)
        return
    step, tensors, meta = loaded
    if set(meta) != {"state", "data"} or set(meta["state"]) != {f.name for f in dataclasses.fields(_State)}:
        raise CheckpointError(f"{run.checkpoints}: the checkpoint of step {step} is not one of trew train-reward")
    if meta["data"] != job.plan.fingerprint:
        raise CheckpointError(
            f"{run.folder}: the pairs changed since this training began; give the same data, or start a new one with "
            "another out"
        )
    saved = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in job.parameters.items()}:
        raise CheckpointError(f"{run.checkpoints}: the checkpoint of step {step} is of another model")
    load_moments(job.optimizer, job.parameters, tensors)
    with torch.no_grad():
        for name, p in job.parameters.items():
            p.copy_(saved[name])
    job.state = _State(**meta["state"])
    run.rewind(step, evaluated=job.state.evaluated == step)
    job.display.line(f"note: continuing after step {step}")


_FREE = ("out", "device", "threads", "learner.microbatch_tokens", "eval.every", "checkpoint.")


def _refuse_changes(run: RunFolder, settings: RewardTraining) -> None:
    """Refuses to continue under settings that would make it another training."""
    text = read_config(run.folder)
    if text is None:
        return
    try:
        before, now = _flat(tomllib.loads(text)), _flat(tomllib.loads(dumps(settings)))
    except ValueError as error:
        raise CheckpointError(f"{run.folder / 'config.toml'}: cannot be read ({error}); put a backup there") from None
    changed = [
        f"{key}: the training was started with {before.get(key)!r}, now it is {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not key.startswith(_FREE)
    ]
    if changed:
        raise ConfigError([*changed, f"{run.folder}: continue with the same settings, or start anew elsewhere (out)"])


def _flat(table: dict[str, Any], where: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        out |= _flat(value, f"{where}{key}.") if isinstance(value, dict) else {f"{where}{key}": value}
    return out


def _headline(job: _Job) -> str:
    p = job.plan
    count = sum(parameter.numel() for parameter in job.parameters.values())
    device = p.device if p.device != "cpu" else f"{torch.get_num_threads()} CPU threads"
    return (
        f"reward model from {p.settings.model} ({count / 1e6:.3g} M parameters) on {device}; {len(p.train)} training "
        f"and {len(p.held)} held-out pairs, {p.steps} steps of {p.settings.learner.batch}"
    )


def _figures(result: dict[str, Any]) -> str:
    a, u = result["accuracy"], result["auc"]
    return (
        f"held-out accuracy {a['mean']:.3f} ({a['low']:.3f} to {a['high']:.3f}), AUC {u['mean']:.3f} "
        f"({u['low']:.3f} to {u['high']:.3f}), loss {result['loss']:.3f}; {result['pairs']} pairs of "
        f"{result['prompts']} prompts"
    )


def describe(summary: dict[str, Any]) -> list[str]:
    """The figures of a finished training, two lines."""
    return [f"before: {_figures(summary['before'])}", f"after:  {_figures(summary['after'])}"]


def _summary(job: _Job) -> dict[str, Any]:
    p, state = job.plan, job.state
    return {
        "task": "reward model", "model": p.settings.model, "seed": p.settings.seed, "steps": state.step,
        "seconds": state.seconds, "pairs": len(p.train), "before": state.before, "after": state.last,
        "versions": {
            "trew": __version__, "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": p.device,
    }  # fmt: skip
