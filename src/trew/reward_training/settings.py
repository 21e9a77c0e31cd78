"""The configuration of a reward model's training, from a TOML recipe or from flags, and its validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Dtype, Kernels, LearnerConfig, Overlong, Schedule, build, limits, read_table
from ..errors import ConfigError
from ..utils.toml import dump_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PairData:
    """Where preference pairs come from: a file, or the rollouts of runs, or both."""

    pairs: str = ""  # .jsonl, .json or .parquet with prompt, chosen, rejected
    runs: tuple[str, ...] = ()  # run folders of trew train: pairs of completions of one prompt, ranked by reward
    reward: str = ""  # the reward of those runs that ranks; empty = their total
    pairs_per_prompt: int = 8  # most pairs of one group of completions
    eval: str = "auto"  # a file of held-out pairs; auto = whole prompts held out of the pairs
    held_out: float = 0.1  # share of the prompts that auto holds out
    max_tokens: int = 0  # of prompt and answer; 0 = the model's positions
    overlong: Overlong = "error"  # what to do with longer pairs: error or drop


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLearner:
    """The optimizer, the batch and the loss."""

    lr: float = 1e-5
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0
    batch: int = 32  # pairs per step
    microbatch_tokens: int = 8192  # memory only: the result does not depend on it
    dtype: Dtype = "float32"  # of the computation; weights and optimizer state are float32 always
    gradient_checkpointing: bool = False
    centre: float = 0.0  # weight of (r_chosen + r_rejected)²: keeps scores around 0; 0.01 is usual

    def optimizer(self) -> LearnerConfig:
        """The settings as the learner's optimizer and schedule read them."""
        names = ("lr", "schedule", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps",
                 "max_grad_norm")  # fmt: skip
        return LearnerConfig(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardEval:
    """Agreement with held-out pairs, before, during and after training."""

    every: int = 0  # steps; 0 = only before and after


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCheckpoints:
    """When to save, and how many to keep."""

    every: int = 50  # steps; 0 = only on an interrupt
    keep: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTraining:
    """The training of one reward model."""

    model: str  # a causal language model, which gets a head, or a reward model, which is trained on
    tokenizer: str = ""  # empty = the model's
    chat_template: str = ""  # empty = the tokenizer's; "plain", or a .jinja file
    device: str = "auto"
    threads: int = 0  # 0 = torch's choice
    kernels: Kernels = "auto"  # auto = trew's own for Llama-family models, plain = the model's own forward pass
    seed: int = 0
    epochs: int = 1  # passes over the pairs
    steps: int = 0  # instead of epochs; 0 = by epochs
    out: str = ""  # run folder; empty = runs/<recipe name>
    data: PairData = field(default_factory=PairData)
    learner: RewardLearner = field(default_factory=RewardLearner)
    eval: RewardEval = field(default_factory=RewardEval)
    checkpoint: RewardCheckpoints = field(default_factory=RewardCheckpoints)


def load_settings(path: Path | None, overrides: Iterable[str] = (), *, flags: Mapping[str, Any] | None = None) -> Any:
    """The settings of a recipe with ``key=value`` overrides, then ``flags`` by their dotted names; without a recipe,
    from these only. Raises ConfigError with every problem of reading; :func:`problems` checks the values."""
    from ..config import apply_overrides

    table: dict[str, Any] = {}
    if path is None:
        apply_overrides(table, overrides)
    else:
        table = read_table(path, overrides)
    for key, value in (flags or {}).items():
        *parents, last = key.split(".")
        node = table
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{part}: expected a table, got {node!r}")
        node[last] = value
    return build(RewardTraining, table, where="")


def dumps(settings: RewardTraining) -> str:
    """The settings as TOML, which :func:`load_settings` reads back to equal settings."""
    return dump_table(dataclasses.asdict(settings))


def problems(settings: RewardTraining) -> list[str]:
    """The problems of values and combinations that can be checked without data and model, one line each."""
    s, found = settings, []

    def need(name: str, fine: bool, accepts: str) -> None:
        if not fine:
            value: Any = s
            for part in name.split("."):
                value = getattr(value, part)
            found.append(f"{name}: got {value!r}, accepts {accepts}")

    for name, value in {
        "epochs": s.epochs, "learner.batch": s.learner.batch, "learner.microbatch_tokens": s.learner.microbatch_tokens,
        "data.pairs_per_prompt": s.data.pairs_per_prompt, "checkpoint.keep": s.checkpoint.keep,
    }.items():  # fmt: skip
        need(name, value >= 1, "a whole number of at least 1")
    for name, value in {
        "steps": s.steps, "threads": s.threads, "eval.every": s.eval.every, "checkpoint.every": s.checkpoint.every,
        "learner.warmup_steps": s.learner.warmup_steps, "learner.weight_decay": s.learner.weight_decay,
        "learner.centre": s.learner.centre, "data.max_tokens": s.data.max_tokens,
    }.items():  # fmt: skip
        need(name, 0 <= value < float("inf"), "0 or more")
    need("model", bool(s.model.strip()), "a folder or a hub id: a causal language model, or a reward model")
    need("seed", s.seed >= 0, f"a whole number from 0 to {limits.WHOLE:,}")
    need("learner.lr", 0 < s.learner.lr < 1, "a number above 0 and below 1")
    need("learner.adam_beta1", 0 <= s.learner.adam_beta1 < 1, "a number from 0 up to, not including, 1")
    need("learner.adam_beta2", 0 <= s.learner.adam_beta2 < 1, "a number from 0 up to, not including, 1")
    need("learner.adam_eps", 1e-30 <= s.learner.adam_eps < float("inf"), "a number of at least 1e-30")
    need("learner.max_grad_norm", 0 < s.learner.max_grad_norm < float("inf"), "above 0")
    need("data.held_out", 0 < s.data.held_out < 1, "a number above 0 and below 1")
    need("data.overlong", s.data.overlong in ("error", "drop"), "'error' or 'drop': half an answer has no preference")
    if not s.data.pairs and not s.data.runs:
        found.append(
            "data.pairs: none given; give a .jsonl file with prompt, chosen and rejected, or data.runs, folders of "
            "trew train whose rollouts make pairs"
        )
    if s.data.reward and not s.data.runs:
        found.append(f"data.reward: got {s.data.reward!r}, but only data.runs have rewards; leave it out, or give runs")
    if s.steps and s.epochs != RewardTraining(model="").epochs:
        found.append(f"epochs: got {s.epochs}, but steps = {s.steps} counts in their place; leave out one of the two")
    return found + _without_effect(s.data)


def _without_effect(data: PairData) -> list[str]:
    """Settings that say how pairs are made or divided, where a file has them as they are to be."""
    usual, found = PairData(), []
    if data.eval != "auto" and data.held_out != usual.held_out:
        found.append(
            f"data.held_out: got {data.held_out:g}, but data.eval = {data.eval!r} has the held-out pairs; remove one "
            "of the two"
        )
    if data.pairs and not data.runs and data.pairs_per_prompt != usual.pairs_per_prompt:
        found.append(
            f"data.pairs_per_prompt: got {data.pairs_per_prompt}, but it is for data.runs, whose completions make "
            "pairs: those of a file are all taken; leave it out, or give runs"
        )
    return found
