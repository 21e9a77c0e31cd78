"""Checks values that can be judged without data, model or torch: one small function per table.

Each yields its problems, one line each: the setting, what it got, what it accepts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import nearest
from ..utils.addresses import ACCEPTS, split_address
from . import cluster, episodes, limits
from .episodes import changed
from .schema import (
    DEMONSTRATED,
    PAIRED,
    ClusterConfig,
    Config,
    CurriculumConfig,
    EnvironmentConfig,
    LoraConfig,
    RewardConfig,
    SetConfig,
    TeacherConfig,
)

AT_LEAST_ONE = (
    "rollout.prompts", "rollout.completions", "rollout.max_tokens", "rollout.batch", "learner.inner_updates",
    "learner.microbatch_tokens", "eval.size", "eval.samples", "steps", "checkpoint.keep",
    "learner.bad_steps", "sft.batch", "sft.max_tokens", "environment.episodes", "environment.turns",
)  # fmt: skip
AT_LEAST_ZERO = (
    "rollout.top_k", "rollout.refills", "rollout.stale_steps", "learner.minibatch_prompts", "learner.warmup_steps",
    "learner.reference_every", "eval.every", "eval.max_tokens", "checkpoint.every", "track.samples_every",
    "track.regrade_every", "threads", "learner.weight_decay", "eval.temperature", "environment.episode_tokens",
    "environment.workers", "critic.warmup_steps",
)  # fmt: skip
TRACKERS = ("trackio", "wandb", "tensorboard", "mlflow")


def validate(config: Config) -> list[str]:
    """Returns every problem with values and their combinations, one line each.

    Numbers that are too large are reported alone: the other rules may not be able to compute with them.
    """
    if problems := limits.problems(config):
        return problems
    sections = (
        _counts,
        _top,
        _data,
        _curriculum,
        _environment,
        episodes.problems,
        _rollout,
        _sft,
        _learner,
        _reference,
        _minibatches,
        _warmup,
        _teacher,
        _critic,
        _lora,
        _cluster,
        _eval,
        _rewards,
        _track,
    )
    problems = [problem for section in sections for problem in section(config)]
    return problems + config.stop.problems() + config.health.problems()


def _need(config: Config, ok: bool, name: str, accepts: str) -> Iterator[str]:
    if not ok:
        yield f"{name}: got {_value(config, name)!r}, accepts {accepts}"


def _value(config: Config, name: str) -> Any:
    section, _, key = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, key)


def _counts(c: Config) -> Iterator[str]:
    for name in AT_LEAST_ONE:
        yield from _need(c, _value(c, name) >= 1, name, "a whole number of at least 1")
    for name in AT_LEAST_ZERO:
        yield from _need(c, math.isfinite(_value(c, name)) and _value(c, name) >= 0, name, "0 or more")


def _top(c: Config) -> Iterator[str]:
    yield from _need(c, c.seed >= 0, "seed", f"a whole number from 0 to {limits.WHOLE:,}")
    yield from _need(c, bool(c.model.strip()), "model", "a folder, a hub id, or 'smollm2-135m-instruct'")
    known = c.device in ("auto", "cpu", "mps") or c.device.partition(":")[0] == "cuda"
    yield from _need(c, known, "device", "'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'")


def _data(c: Config) -> Iterator[str]:
    several = isinstance(c.data, tuple)
    for i, one in enumerate(c.sets):
        where = f"data[{i}]" if several else "data"
        if one.max_prompt_tokens < 1:
            yield f"{where}.max_prompt_tokens: got {one.max_prompt_tokens!r}, accepts a whole number of at least 1"
    if isinstance(c.data, tuple):
        yield from _sets(c, c.data)
    for i, reward in enumerate(c.rewards):
        for name in reward.sets:
            if name not in c.set_names:
                known = (
                    f"{', '.join(c.set_names)}{nearest(name, c.set_names)}" if several else "nothing with one data set"
                )
                yield f"rewards[{i}].sets: got {name!r}, accepts {known}"


def _sets(c: Config, sets: Sequence[SetConfig]) -> Iterator[str]:
    """Names and weights of several data sets."""
    if not sets:
        yield "data: got an empty list, accepts one [data] table or a [[data]] table for each data set"
    for i, one in enumerate(sets):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", one.name):
            yield (
                f"data[{i}].name: got {one.name!r}, accepts a name of letters, digits, '-', '_' and '.': every one of "
                "several data sets needs one"
            )
        elif (first := c.set_names.index(one.name)) < i:
            yield f"data[{i}].name: got {one.name!r}, which is the name of data[{first}]; names must differ"
        if not 0 < one.weight < math.inf:
            yield f"data[{i}].weight: got {one.weight!r}, accepts a number above 0; leave out a set without a share"
        if c.plays and one.task == "prompts" and not one.train:
            yield f"data[{i}].train: is empty; episodes without data cannot be one of several data sets"


def _curriculum(c: Config) -> Iterator[str]:
    own, usual, n = c.curriculum, CurriculumConfig(), max(c.rollout.completions, 1)
    most = own.high if 0 <= own.high <= 1 else 1.0
    found = [
        *_need(c, 0 <= own.share < 1, "curriculum.share", "a number from 0 (off) up to, not including, 1"),
        *_need(c, 0 <= own.high <= 1, "curriculum.high", "a pass rate from 0 to 1"),
        *_need(c, 0 <= own.low <= most, "curriculum.low", "a pass rate from 0 to curriculum.high"),
        *_need(c, 0 <= own.floor <= 1, "curriculum.floor", "a number from 0 to 1"),
        *_need(c, 0 <= own.decay <= 1, "curriculum.decay", "a number from 0 to 1"),
    ]
    yield from found
    if found:
        return
    if own.share == 0:
        for key in ("low", "high", "floor", "decay"):
            same = getattr(own, key) == getattr(usual, key)
            yield from _need(
                c, same, f"curriculum.{key}", "only its default while curriculum.share = 0; set curriculum.share"
            )
    elif not any(own.low <= k / n <= own.high for k in range(n + 1)):
        yield (
            f"curriculum.low: got {own.low:g} with curriculum.high = {own.high:g}, but with rollout.completions = {n} "
            f"a prompt's first pass rate is a multiple of 1/{n}, and none lies between them; widen the target"
        )


def _environment(c: Config) -> Iterator[str]:
    e = c.environment
    yield from _need(
        c, e.observation_tokens >= 32, "environment.observation_tokens", "at least 32, the mark of a cut included"
    )  # fmt: skip
    yield from _need(c, 0 < e.timeout_s < math.inf, "environment.timeout_s", "a number of seconds above 0")
    if not c.plays:
        unused = [f.name for f in dataclasses.fields(e) if getattr(e, f.name) != getattr(EnvironmentConfig(), f.name)]
        for key in unused:
            yield (
                f"environment.{key}: got {getattr(e, key)!r}, but no environment is named; set environment.name, or "
                "environment.tools"
            )
    if not e.name and e.args:
        yield "environment.args: is set without environment.name, which they are for"
    if not e.name and any(reward.name == "environment" for reward in c.rewards):
        yield "rewards: 'environment' is what an environment gives; set environment.name"
    if e.tools_format != "auto" and not e.tools and not e.name:
        yield f"environment.tools_format: got {e.tools_format!r} without environment.tools"


def _rollout(c: Config) -> Iterator[str]:
    r = c.rollout
    yield from _need(
        c, math.isfinite(r.temperature) and r.temperature >= limits.COLDEST, "rollout.temperature",
        f"a number of at least {limits.COLDEST:g} (greedy rollouts make every group equal)",
    )  # fmt: skip
    if (count := r.prompts * r.completions) > limits.COMPLETIONS:
        yield (
            f"rollout.prompts: got {r.prompts} with rollout.completions = {r.completions}, {count:,} completions per "
            f"step, accepts at most {limits.COMPLETIONS:,}"
        )
    yield from _need(c, 0 < r.top_p <= 1, "rollout.top_p", "a number above 0 and at most 1")
    yield from _need(c, 0 <= r.min_p < 1, "rollout.min_p", "a number from 0 up to, not including, 1")
    yield from _need(c, all(r.stop), "rollout.stop", "non-empty strings")
    if r.replay and c.cluster.rollout != "embedded":
        yield (
            f"cluster.rollout: got {c.cluster.rollout!r} with rollout.replay, where only evaluations generate "
            "anything; set cluster.rollout = 'embedded' and leave out the settings of servers, as --replay does"
        )


def _sft(c: Config) -> Iterator[str]:
    """Settings that do not belong together: those of demonstrations, and those of sampling."""
    yield from _need(c, 0 <= c.sft.epochs < math.inf, "sft.epochs", "0 (steps counts) or more")
    yield from _demonstrations(c) if c.demonstrates else _no_demonstrations(c)


def _no_demonstrations(c: Config) -> Iterator[str]:
    for name in changed(c.sft)[:1]:
        yield (
            f"sft.{name}: got {_value(c, f'sft.{name}')!r}, but [sft] is for demonstrations, and data.task is "
            f"{' + '.join(dict.fromkeys(one.task for one in c.sets))!r}; set data.task = 'demonstrations' (trew sft), "
            "or remove the table"
        )


def _demonstrations(c: Config) -> Iterator[str]:
    """What a training on demonstrations would ignore."""
    if odd := [one.task for one in c.sets if one.task not in DEMONSTRATED]:
        yield f"data.task: got {odd[0]!r} beside demonstrations, accepts {' or '.join(DEMONSTRATED)} for every set"
    yield from _pairs(c) if c.prefers else ()
    if c.rewards:
        yield f"rewards: got {len(c.rewards)}, but demonstrations are not scored; remove them"
    for section, used in _USED.items():
        for name in changed(getattr(c, section)):
            if name not in used:
                yield (
                    f"{section}.{name}: got {_value(c, f'{section}.{name}')!r}, but demonstrations leave nothing to "
                    "sample, so that it has no effect; remove it"
                )
    for i, one in enumerate(c.sets):
        where = f"data[{i}]" if isinstance(c.data, tuple) else "data"
        for name in changed(one):
            if name in ("max_prompt_tokens", "overlong", "prompt_column"):
                yield (
                    f"{where}.{name}: got {getattr(one, name)!r}, which demonstrations do not read; sft.max_tokens and "
                    "sft.overlong limit whole rows"
                )


def _pairs(c: Config) -> Iterator[str]:
    """What a training on preference pairs would ignore, or what would make pairs of something else."""
    if odd := [one.task for one in c.sets if one.task != PAIRED and one.task in DEMONSTRATED]:
        yield f"data.task: got {odd[0]!r} beside {PAIRED!r}, accepts {PAIRED!r} for every set, or for none"
    if c.sft.loss_on == "last":
        yield "sft.loss_on: got 'last', but each answer of a pair is a single one; remove it"
    if c.sft.overlong == "truncate":
        yield "sft.overlong: got 'truncate', accepts 'error' or 'drop' for pairs: answers were compared as a whole"


_USED = {
    "curriculum": (), "environment": (), "rollout": (), "eval": ("every", "size"),
    "cluster": ("launcher", "learner", "shard", "offload", "restarts", "resources_timeout_s", "hang_s"),
    "track": ("to",),
}  # fmt: skip
"""Sections that are mostly about sampling, and the settings in them that demonstrations use."""


def _learner(c: Config) -> Iterator[str]:
    learner, below_one = c.learner, "a number from 0 up to, not including, 1"
    yield from _need(c, 0 < learner.lr < 1, "learner.lr", "a number above 0 and below 1")
    yield from _need(c, 0 <= learner.adam_beta1 < 1, "learner.adam_beta1", below_one)
    yield from _need(c, 0 <= learner.adam_beta2 < 1, "learner.adam_beta2", below_one)
    # A smaller eps vanishes in float32 next to the root it is added to, and a weight without gradients divides 0 by 0.
    yield from _need(c, 1e-30 <= learner.adam_eps < math.inf, "learner.adam_eps", "a number of at least 1e-30")
    if 0 < learner.lr < 1 and 1 < learner.lr * learner.weight_decay < math.inf:
        yield (
            f"learner.weight_decay: got {learner.weight_decay} with learner.lr = {learner.lr}, accepts at most 1 / "
            f"learner.lr = {1 / learner.lr:g}: every step multiplies weights by 1 - lr x weight_decay"
        )
    yield from _need(c, 0 < learner.max_grad_norm < math.inf, "learner.max_grad_norm", "above 0")


def _reference(c: Config) -> Iterator[str]:
    mix, every = c.learner.reference_mix, c.learner.reference_every
    yield from _need(c, 0 < mix <= 1, "learner.reference_mix", "a number above 0 and at most 1")
    if mix != 1 and not every:
        yield (
            f"learner.reference_mix: got {mix}, but the reference is never updated; set learner.reference_every, or "
            "remove it"
        )
    if every and c.lora.rank:
        yield (
            f"learner.reference_every: got {every} with lora.rank = {c.lora.rank}, where the reference is the model "
            "without adapters, which never changes; set it to 0, or train all weights"
        )


def _minibatches(c: Config) -> Iterator[str]:
    minibatch, prompts = c.learner.minibatch_prompts, c.step_prompts
    key = "sft.batch" if c.demonstrates else "rollout.prompts"
    if minibatch > prompts:
        yield (
            f"learner.minibatch_prompts: got {minibatch}, which is more than {key} = {prompts}; accepts 0 (all) up to "
            "that"
        )
    elif minibatch > 0 and prompts % minibatch:
        yield (
            f"learner.minibatch_prompts: got {minibatch}, which does not divide {key} = {prompts}; choose a divisor so "
            "that all minibatches have equal size"
        )


def _warmup(c: Config) -> Iterator[str]:
    # How many steps epochs make is known with the data only: planning judges then.
    if c.demonstrates and c.sft.epochs:
        return
    # The policy takes none while the critic learns alone.
    if c.learner.warmup_steps > c.policy_steps >= 1:
        alone = " of the policy" if c.critic.warmup_steps else ""
        yield (
            f"learner.warmup_steps: got {c.learner.warmup_steps}, but the whole run has {c.policy_steps} optimizer "
            f"steps{alone}; the learning rate would never be reached"
        )


def _teacher(c: Config) -> Iterator[str]:
    t = c.teacher
    yield from _need(c, 0 < t.wait_s < math.inf, "teacher.wait_s", "a number of seconds above 0")
    if t.wait_s != TeacherConfig().wait_s and not t.endpoint:
        yield f"teacher.wait_s: got {t.wait_s:g} without teacher.endpoint, whose server it is for; remove it"
    if t.dtype != "auto" and not t.model:
        yield f"teacher.dtype: got {t.dtype!r} without teacher.model, whose weights it is for; remove it"
    if not t.endpoint:
        return
    if t.model:
        yield (
            f"teacher.endpoint: got {t.endpoint!r} with teacher.model = {t.model!r}; a run has one teacher: remove one "
            "of the two"
        )
    if split_address(t.endpoint) is None:
        yield f"teacher.endpoint: got {t.endpoint!r}, accepts {ACCEPTS}"
    if c.rollout.temperature != 1:
        yield (
            f"rollout.temperature: got {c.rollout.temperature:g} with teacher.endpoint, accepts 1: a server gives "
            "log-probs at temperature 1 only; set it to 1, or load the teacher here, as teacher.model"
        )


def _critic(c: Config) -> Iterator[str]:
    own = c.critic
    yield from _need(c, 0 < own.lr < 1, "critic.lr", "a number above 0 and below 1")
    yield from _need(c, 0 < own.clip <= limits.NUMBER, "critic.clip", "a number above 0")
    yield from _need(c, 0 <= own.head_std < math.inf, "critic.head_std", "0 (every value is 0 at first) or more")
    if own.warmup_steps >= c.steps >= 1 and own.warmup_steps > 0:
        yield (
            f"critic.warmup_steps: got {own.warmup_steps}, accepts less than steps = {c.steps}; the policy would never "
            "learn"
        )


def _lora(c: Config) -> Iterator[str]:
    lora = c.lora
    yield from _need(c, lora.rank >= 0, "lora.rank", "0 (off) or more")
    yield from _need(c, 0 < lora.alpha < math.inf, "lora.alpha", "a number above 0")
    yield from _need(
        c, lora.dropout == 0, "lora.dropout",
        "0 only: with dropout the same weights give different log-probs each time, and ratios between policies "
        "would be noise",
    )  # fmt: skip
    yield from _need(c, all(lora.targets), "lora.targets", "names of linear layers, like q_proj")
    for key in ("alpha", "targets", "base") if lora.rank == 0 else ():
        same = getattr(lora, key) == getattr(LoraConfig(), key)
        yield from _need(
            c, same, f"lora.{key}", "only its default while lora.rank = 0; set lora.rank, to 16 for example"
        )
    if lora.rank > 0 and lora.base == "bfloat16" and c.learner.dtype != "bfloat16":
        yield (
            f"lora.base: got 'bfloat16', which needs learner.dtype = 'bfloat16'; with {c.learner.dtype!r}, rounding "
            "the weights would gain nothing"
        )


def _cluster(c: Config) -> Iterator[str]:
    yield from cluster.problems(c)
    yield from _ranks(c)
    if c.cluster.colocate:
        yield from _colocated(c)
    if c.cluster.staleness > 0 and c.rollout.stale_steps > 0:
        yield (
            f"rollout.stale_steps: got {c.rollout.stale_steps} with cluster.staleness = {c.cluster.staleness}; the one "
            "makes rollouts older by a fixed number of steps, the other by as many as servers need: set one to 0"
        )


def _colocated(c: Config) -> Iterator[str]:
    """Settings whose tensors cannot leave a GPU and come back."""
    refused = {
        "learner.optimizer": (c.learner.optimizer == "adamw-8bit", "'adamw' or 'adamw-offload'"),
        "lora.base": (c.lora.base == "nf4", "'float32' or 'bfloat16'"),
    }
    for name, (bad, accepts) in refused.items():
        if bad:
            yield (
                f"{name}: got {_value(c, name)!r}, accepts {accepts} with cluster.colocate = true, where the learner "
                "leaves the GPU while servers use it"
            )


def _ranks(c: Config) -> Iterator[str]:
    """Settings of the processes that learn."""
    set_ = c.cluster
    accepts = "a whole number of at least 1, or 0 for every GPU that servers leave"
    yield from _need(c, set_.learner >= 0, "cluster.learner", accepts)
    yield from _need(c, set_.restarts >= 0, "cluster.restarts", "0 or more")
    for key in ("hang_s", "resources_timeout_s"):
        yield from _need(c, 0 < getattr(set_, key) < math.inf, f"cluster.{key}", "a number of seconds above 0")
    if set_.launcher == "torchrun" and set_.resources_timeout_s != ClusterConfig().resources_timeout_s:
        yield (
            f"cluster.resources_timeout_s: got {set_.resources_timeout_s:g} with cluster.launcher = 'torchrun', which "
            "starts on this machine at once; remove it, or set cluster.launcher = 'ray'"
        )
    if set_.launcher == "ray" and set_.colocate:
        yield (
            "cluster.colocate: got true with cluster.launcher = 'ray', which may place servers and ranks on different "
            "nodes; set cluster.launcher = 'torchrun', or remove cluster.colocate"
        )
    if set_.learner == 1:
        for key in ("shard", "offload"):
            same = getattr(set_, key) == getattr(ClusterConfig(), key)
            yield from _need(c, same, f"cluster.{key}", "only its default while cluster.learner = 1")
        return
    if set_.shard == "none" and set_.offload != "none":
        yield (
            f"cluster.offload: got {set_.offload!r} with cluster.shard = 'none', where every rank has all weights; "
            "set cluster.shard = 'fsdp'"
        )
    if set_.shard != "none":
        yield from _sharded(c)


def _sharded(c: Config) -> Iterator[str]:
    """Settings that do not work on sharded weights."""
    refused = {
        "learner.optimizer": (c.learner.optimizer == "adamw-8bit", "'adamw' or 'adamw-offload'"),
        "lora.base": (c.lora.base == "nf4", "'float32' or 'bfloat16'"),
        "learner.compile": (c.learner.compile, "false"),
        "learner.liger": (c.learner.liger, "false"),
    }
    for name, (bad, accepts) in refused.items():
        if bad:
            yield (
                f"{name}: got {_value(c, name)!r}, accepts {accepts} while weights are sharded over "
                f"cluster.learner = {c.cluster.learner} ranks; or set cluster.shard = 'none'"
            )


def _eval(c: Config) -> Iterator[str]:
    yield from _need(c, math.isfinite(c.eval.correct_at), "eval.correct_at", "a finite number")
    if 0 < c.eval.temperature < limits.COLDEST:
        yield f"eval.temperature: got {c.eval.temperature!r}, accepts 0 (greedy) or at least {limits.COLDEST:g}"
    if c.eval.samples > 1 and c.eval.temperature == 0:
        yield (
            f"eval.samples: got {c.eval.samples} with eval.temperature = 0, where all samples are identical; set "
            "eval.samples = 1 or eval.temperature = 1.0"
        )


def _rewards(c: Config) -> Iterator[str]:
    for i, reward in enumerate(c.rewards):
        yield from of_reward(reward, f"rewards[{i}]")


def of_reward(reward: RewardConfig, where: str) -> Iterator[str]:
    if not reward.name and not reward.model:
        yield (
            f'{where}.name: is required: a built-in name or path/to/file.py:function; or model = "folder" for a reward '
            "model"
        )
    if reward.model and reward.name.rpartition(":")[0].endswith(".py"):
        yield (
            f"{where}.name: got {reward.name!r} together with model = {reward.model!r}; a function and a model are two "
            "rewards: write one [[rewards]] table for each"
        )
    if not math.isfinite(reward.weight):
        yield f"{where}.weight: got {reward.weight!r}, accepts a finite number"
    if not 0 < reward.timeout_s < math.inf:
        yield f"{where}.timeout_s: got {reward.timeout_s!r}, accepts a number of seconds above 0"


def _track(c: Config) -> Iterator[str]:
    yield from _need(c, 0 <= c.track.max_failed <= 1, "track.max_failed", "a share from 0 to 1")
    for tracker in c.track.to:
        if tracker not in TRACKERS:
            yield f"track.to: got {tracker!r}, accepts {', '.join(TRACKERS)}{nearest(tracker, TRACKERS)}"
