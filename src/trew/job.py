"""A run's parts put together, saved, restored and summed up: what ``loop`` moves data between."""

from __future__ import annotations

import dataclasses
import platform
import resource
import sys
import tomllib
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from . import __version__, models, setup
from .adapters import Adapters, parameter_count
from .config import Config, dumps
from .data import PromptSampler
from .display import Display
from .errors import CheckpointError, ConfigError
from .interrupt import Interrupts
from .learner import Learner, checkpoint
from .rewards.monitors import Monitors
from .rollout import Engine
from .rollout.torch_engine import TorchEngine
from .setup import Plan
from .track import Run, redact


@dataclass
class State:
    """What a run must remember besides weights and optimizer: all of it is in every checkpoint."""

    step: int = 0
    position: int = 0  # prompts drawn so far
    tokens: int = 0  # completion tokens generated in training
    seconds: float = 0.0
    before: dict[str, Any] | None = None  # evaluation before training
    last_eval: dict[str, Any] | None = None
    evaluated: int = -1  # the last step whose weights were evaluated
    saved: int = -1  # the last step that has a checkpoint
    silent: int = 0  # steps in a row in which no group had a signal


@dataclass
class Job:
    """A plan with its model loaded: the parts that ``train`` moves data between."""

    plan: Plan
    model: Any
    engine: Engine
    learner: Learner
    sampler: PromptSampler
    display: Display
    interrupts: Interrupts
    adapters: Adapters | None = None
    state: State = field(default_factory=State)
    monitors: Monitors = field(default_factory=Monitors)
    unjudged: int = 0  # steps in a row in which no completion had a value; counted anew after a resume

    @property
    def config(self) -> Config:
        return self.plan.config


def build(plan: Plan, display: Display, interrupts: Interrupts) -> Job:
    """Loads the model and puts the parts together."""
    config = plan.config
    if config.threads:
        torch.set_num_threads(config.threads)
    model, adapters = setup.load(plan)
    reference = None
    if "ref_logprobs" in plan.objective.needs and adapters is None:
        reference, _ = setup.load(plan)
    onednn = config.linear == "auto"
    autocast = torch.bfloat16 if config.learner.dtype == "bfloat16" else None
    native = config.kernels == "auto"
    engine = TorchEngine(
        model, plan.renderer, batch=config.rollout.batch, autocast=autocast, onednn=onednn, native=native
    )
    learner = Learner(
        model, config=config.learner, objective=plan.objective, optimizer_steps=config.optimizer_steps,
        temperature=config.rollout.temperature, reference=reference, adapters=adapters, onednn=onednn, kernels=native,
    )  # fmt: skip
    plan.rewards.load(device=plan.device, decode=plan.renderer.decode)
    sampler = PromptSampler(len(plan.train), seed=config.seed, shuffle=config.data.shuffle)
    monitors = Monitors(plan.rewards.rewards, shuffled=config.data.shuffle)
    return Job(plan, model, engine, learner, sampler, display, interrupts, adapters=adapters, monitors=monitors)


def save(job: Job, run: Run) -> None:
    """One complete checkpoint: weights, optimizer, and the state of the run."""
    tensors, meta = job.learner.state()
    meta = {"learner": meta, "state": dataclasses.asdict(job.state), "data": job.plan.fingerprint}
    checkpoint.save(run.checkpoints, job.state.step, tensors, meta, keep=job.config.checkpoint.keep)


def restore(job: Job, run: Run) -> None:
    """Continues from the newest complete checkpoint; a folder without any starts at the beginning, and says so."""
    loaded = checkpoint.load_latest(run.checkpoints)
    if loaded is None:
        job.display.line(f"note: {run.folder} has no checkpoint yet; starting at step 1")
        run.rewind(-1)
        return
    step, tensors, meta, messages = loaded
    for message in messages:
        job.display.warn(message)
    known = {f.name for f in dataclasses.fields(State)}
    if not {"learner", "state", "data"} <= set(meta) or set(meta["state"]) != known:
        raise CheckpointError(
            f"{run.checkpoints}: the checkpoint of step {step} is not of this version of trew; continue with the "
            "version that wrote it, or start a new run with another out"
        )
    if meta["data"] != job.plan.fingerprint:
        raise CheckpointError(
            f"{run.folder}: the training data changed since this run began; give the same data, or start a new run "
            "with another out"
        )
    job.learner.load_state(tensors, meta["learner"])
    job.engine.policy_version = job.learner.policy_version
    job.state = State(**meta["state"])
    run.rewind(step, evaluated=job.state.evaluated == step)
    job.display.line(f"note: continuing after step {step}")


def export(job: Job, run: Run) -> None:
    """The result: an ordinary model folder; beside a merged model, the adapters alone."""
    tokenizer = job.plan.renderer.tokenizer
    if job.adapters is None:
        models.export(job.model, tokenizer, run.final)
    else:
        job.adapters.export(tokenizer, run.final)


# May differ between the start of a run and its continuation: they do not change what is learned, or only from here on.
FREE = (
    "steps",
    "out",
    "device",
    "threads",
    "rollout.batch",
    "rollout.overlap",
    "learner.microbatch_tokens",
    "eval.every",
    "checkpoint.",
    "track.",
)


def refuse_changes(run: Run, config: Config) -> None:
    """Refuses to continue a run under a configuration that would make it another run; raises with each difference."""
    try:
        text = run.read_config()
        table = None if text is None else tomllib.loads(text)
    except ValueError as error:  # not TOML, or not even UTF-8
        raise CheckpointError(
            f"{run.folder / 'config.toml'}: cannot be read ({error}), so it is not known whether this run has the same "
            "settings; put a backup of it there, or remove it to go on with the settings given now"
        ) from None
    if table is None:
        return
    before, now = flatten(table), flatten(tomllib.loads(redact(dumps(config))))
    changed = [
        f"{key}: the run was started with {before.get(key)!r}, now it is {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not key.startswith(FREE)
    ]
    if changed:
        raise ConfigError(
            [*changed, f"{run.folder}: continue with the same settings, or start a new run elsewhere (out)"]
        )


def flatten(table: Any, where: str = "") -> dict[str, Any]:
    """
    >>> flatten({"a": {"b": 1}, "c": [{"d": 2}]})
    {'a.b': 1, 'c.0.d': 2}
    """
    if isinstance(table, list) and any(isinstance(v, dict) for v in table):
        table = {str(i): v for i, v in enumerate(table)}
    if not isinstance(table, dict):
        return {where: table}
    return {k: v for name, value in table.items() for k, v in flatten(value, f"{where}.{name}".lstrip(".")).items()}


def headline(job: Job) -> str:
    """What runs on what."""
    c = job.config
    size = f"{short(parameter_count(job.model))} parameters"
    if job.adapters is not None:
        size += f", {short(sum(p.numel() for p in job.model.parameters() if p.requires_grad))} of adapters trained"
    device = job.plan.device if job.plan.device != "cpu" else f"{torch.get_num_threads()} CPU threads"
    return (
        f"{c.objective.preset}: {c.model} ({size}, {c.learner.dtype}) on {device}; {c.data.task}, {c.steps} "
        f"steps of {c.rollout.prompts} x {c.rollout.completions}"
    )


def short(count: int) -> str:
    """
    >>> short(134515008), short(1234), short(7)
    ('135 M', '1.23 k', '7')
    """
    return next(
        (f"{count / u:.3g} {name}" for u, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= u), str(count)
    )


def peak_memory_bytes(device: str) -> int:
    """The most memory the run held at once: on the GPU where it ran on one, else of the process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, kibibytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def summarize(job: Job, after: dict[str, Any]) -> dict[str, Any]:
    """The figures of a finished run."""
    c, s = job.config, job.state
    assert s.before is not None
    return {
        "task": c.data.task, "model": c.model, "objective": c.objective.preset, "seed": c.seed, "steps": s.step,
        "seconds": s.seconds, "tokens_per_second": s.tokens / max(s.seconds, 1e-9),
        "peak_memory_bytes": peak_memory_bytes(job.plan.device), "n_eval": after["n"],
        "accuracy_before": s.before["accuracy"], "accuracy_after": after["accuracy"],
        "before": s.before, "after": after,
        "versions": {
            "trew": __version__, "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": job.plan.device,
    }  # fmt: skip
