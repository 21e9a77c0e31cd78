"""A run's parts put together, exported and summed up: what ``loop`` moves data between."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import transformers

from .. import __version__
from ..config import Config, to_table
from ..data import PromptSampler
from ..diagnostics.health import Facts, Health
from ..diagnostics.monitors import Monitors
from ..learner import Learner
from ..models import loading
from ..models.lora import Adapters, parameter_count
from ..rollout import Engine
from ..rollout.torch_engine import TorchEngine
from ..runs import Run
from ..runs.writer import Writer
from ..utils.console import Display
from ..utils.signals import Interrupts
from . import backends, planning
from .planning import Plan


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
    best_step: int = -1  # the step with the best evaluation after training began, the earliest of equals
    best_accuracy: float | None = None
    bad_steps: int = 0  # steps in a row that were not applied, for numbers that are not finite
    unjudged: int = 0  # steps in a row in which no completion had a value


class Remembers(Protocol):
    """Something that counts or warns over several steps: its state is in every checkpoint."""

    def state(self) -> dict[str, Any]:
        """As JSON can hold it, and not changed afterwards."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state` was taken."""
        ...


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
    health: Health = field(default_factory=lambda: Health(Facts()))
    writer: Writer = field(default_factory=Writer)

    @property
    def remembering(self) -> dict[str, Remembers]:
        """Whatever else must go on as if the run had never stopped, by its name in checkpoints."""
        return {
            "engine": self.engine, "monitors": self.monitors, "rewards": self.plan.rewards, "health": self.health,
        }  # fmt: skip

    @property
    def config(self) -> Config:
        return self.plan.config


def build(plan: Plan, display: Display, interrupts: Interrupts) -> Job:
    """Loads the model and puts the parts together."""
    config = plan.config
    if config.threads:
        torch.set_num_threads(config.threads)
    backend = backends.of(config, plan.device)
    if backend is not None:
        backend.start()
    model, adapters = planning.load(plan)
    reference = None
    if "ref_logprobs" in plan.objective.needs and adapters is None:
        reference = planning.load_reference(plan, backend)
    autocast = torch.bfloat16 if config.learner.dtype == "bfloat16" else None
    engine = TorchEngine(model, plan.renderer, batch=config.rollout.batch, autocast=autocast, backend=backend)
    learner = Learner(
        model, config=config.learner, objective=plan.objective, optimizer_steps=config.optimizer_steps,
        temperature=config.rollout.temperature, reference=reference, adapters=adapters,
        fused=config.kernels == "auto", backend=backend,
    )  # fmt: skip
    plan.rewards.load(device=plan.device, decode=plan.renderer.decode)
    sampler = PromptSampler(len(plan.train), seed=config.seed, shuffle=config.data.shuffle)
    monitors = Monitors(plan.rewards.rewards, shuffled=config.data.shuffle)
    writer = Writer(display.line, background=config.checkpoint.background)
    learner.before_update, learner.tell = writer.release, display.line
    return Job(
        plan, model, engine, learner, sampler, display, interrupts, adapters=adapters, monitors=monitors, writer=writer,
        health=Health(Facts.of(to_table(config))),
    )  # fmt: skip


def export(job: Job, run: Run) -> None:
    """The result: an ordinary model folder; beside a merged model, the adapters alone."""
    tokenizer = job.plan.renderer.tokenizer
    if job.adapters is None:
        loading.export(job.model, tokenizer, run.final)
    else:
        job.adapters.export(tokenizer, run.final)


def headline(job: Job) -> str:
    """What runs on what."""
    c = job.config
    size = f"{short(parameter_count(job.model))} parameters"
    if job.adapters is not None:
        size += f", {short(sum(p.numel() for p in job.model.parameters() if p.requires_grad))} of adapters trained"
    device = job.plan.device if job.plan.device != "cpu" else f"{torch.get_num_threads()} CPU threads"
    return (
        f"{c.objective.preset}: {c.model} ({size}, {c.learner.dtype}) on {device}; {c.data.task}, {c.steps} "
        f"steps of {c.rollout.prompts} x {c.rollout.completions}{_without_kernels(job)}"
    )


def _without_kernels(job: Job) -> str:
    """Why a run takes the plain path although a backend was asked for; empty where it does not."""
    backend = backends.of(job.config, job.plan.device)
    missing = "" if backend is None or job.config.kernels == "plain" else backend.missing()
    return f"; on the plain path of PyTorch, which is slower, because {missing}" if missing else ""


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
        "warnings": [asdict(finding) for finding in job.health.found],
        "best": {"step": s.best_step, "accuracy": s.best_accuracy},
        "versions": {
            "trew": __version__, "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": job.plan.device,
    }  # fmt: skip
