"""Exports a recipe as a verl command that runs the same, and lists what does not carry over."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import Config, RewardConfig, one_set
from ...data.load import make_task
from ...errors import ConfigError, nearest
from ...models.default import DEFAULT_MODEL
from ...objective import Objective, preset
from ...objective.advantage import PassAtK
from ...objective.capped import Tapered
from ...objective.correction import Correction, MaskedImportance, TruncatedImportance
from ...objective.imitation import CorrectOnly
from ...objective.options import Options
from ...rewards import KINDS
from ...rewards.names import judge_rank, names_of
from ...utils.user_files import is_file_spec
from .offered import exact, offer
from .rewards import keys_of, refuse

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_METRIC = "algorithm.filter_groups.metric"
ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"  # our default model is made from it
OWN = ("correction", "correction_low", "correction_high", "opsm_delta", "overlong_filtering", "overlong_cache",
       "entropy_bonus", "entropy_target", "entropy_step", "nll")  # fmt: skip
"""Objective settings that in verl belong to other parts than the policy loss."""

CARRIED = {
    "": "model steps seed rewards out",
    "data.": "task train eval prompt_column args max_prompt_tokens overlong shuffle",
    "rollout.": "prompts completions max_tokens temperature top_p top_k",
    "objective.": "preset args",
    "learner.": "lr schedule warmup_steps weight_decay adam_beta1 adam_beta2 max_grad_norm minibatch_prompts "
    "inner_updates microbatch_tokens gradient_checkpointing",
    "lora.": "rank alpha",
    "eval.": "every size samples temperature",
    "checkpoint.": "every keep",
    "track.": "to",
}
"""Recipe keys that the command carries over; any other key that is not at its default is reported as lost."""


@dataclass(frozen=True, slots=True)
class Export:
    """A verl command: ``keys`` and values in Hydra's syntax, ``environment`` variables, commands to run ``before``, and
    the settings that are ``lost``, one line each."""

    keys: dict[str, str]
    environment: dict[str, str]
    before: tuple[str, ...]
    lost: tuple[str, ...]

    def script(self) -> str:
        """Renders the export as a shell script."""
        lines = [
            "#!/bin/sh",
            "set -e",
            "# Made by trew export verl, for verl 0.9 with trew installed in its environment.",
        ]
        lines += [f"# Does not carry over: {line}" for line in self.lost]
        lines += list(self.before)
        command = [*(f"{k}={shlex.quote(v)}" for k, v in self.environment.items()), "python3 -m verl.trainer.main_ppo"]
        arguments = [shlex.quote(f"{key}={value}") for key, value in self.keys.items()]
        return "\n".join([*lines, " \\\n    ".join([" ".join(command), *arguments])]) + "\n"


def export(
    config: Config,
    *,
    files: tuple[str, str] = ("", ""),
    recipe: str = "recipe.toml",
    changes: Sequence[str] = (),
) -> Export:
    """Builds the command for ``config``, which was read from the file ``recipe`` with key=value ``changes``.

    ``files`` are those of the converted prompts, by default named after the recipe: as the script takes files that
    exist as they are, those of another recipe must not have the same names.

    Raises ConfigError if its objective cannot run in verl at all.
    """
    train, test = files
    files = train or f"{Path(recipe).stem}-train.parquet", test or f"{Path(recipe).stem}-test.parquet"
    # The functions below add to the list what they cannot express.
    lost = list(_lost(config))
    keys = _run(config, files, lost) | _sizes(config, lost) | _optimizer(config, lost)
    keys |= _reward(config)
    more, environment = _objective(config, lost)
    return Export(keys | more, environment, tuple(_before(recipe, changes, files)), tuple(lost))


def _run(config: Config, files: tuple[str, str], lost: list[str]) -> dict[str, str]:
    trackers, model = ["console", *config.track.to], config.model
    if model == DEFAULT_MODEL:
        model = ON_HUB
        lost.append(f"model = {DEFAULT_MODEL!r}: the weights as published, {ON_HUB}, which differ a little")
    name = config.out.replace("\\", "/").rpartition("/")[2] or "run"
    keys = {
        "data.train_files": _path(files[0]), "data.val_files": _path(files[1]),
        "data.shuffle": hydra(one_set(config, "verl's command").shuffle),
        "data.seed": str(config.seed), "actor_rollout_ref.model.path": _path(model), f"{ROLLOUT}name": "vllm",
        f"{ROLLOUT}tensor_model_parallel_size": "1", "trainer.n_gpus_per_node": "1", "trainer.nnodes": "1",
        "trainer.total_training_steps": str(config.steps),
        # verl stops at whichever comes first. An epoch has at least one step, so that this bound is never the first.
        "trainer.total_epochs": str(config.steps),
        # Never 0: a recipe without periodic evaluations still evaluates at its end.
        "trainer.test_freq": str(config.eval.every or config.steps),
        # -1: never.
        "trainer.save_freq": str(config.checkpoint.every or -1),
        "trainer.max_actor_ckpt_to_keep": str(config.checkpoint.keep), "trainer.logger": hydra(trackers),
        "trainer.project_name": "trew", "trainer.experiment_name": hydra(name),
        "trainer.default_local_dir": hydra(config.out or f"runs/{name}"),
        "actor_rollout_ref.model.enable_gradient_checkpointing": hydra(config.learner.gradient_checkpointing),
    }  # fmt: skip
    if config.lora.rank:
        keys |= {"actor_rollout_ref.model.lora_rank": str(config.lora.rank),
                 "actor_rollout_ref.model.lora_alpha": exact(config.lora.alpha)}  # fmt: skip
    return keys


def _sizes(config: Config, lost: list[str]) -> dict[str, str]:
    """Batches and lengths. verl counts prompts as we do, and multiplies by ``rollout.n`` itself."""
    data, rollout, learner = one_set(config, "verl's command"), config.rollout, config.learner
    if config.curriculum.share:
        lost.append(f"curriculum.share = {config.curriculum.share:g}: verl goes through the prompts in order")
    longest = data.max_prompt_tokens + rollout.max_tokens
    if data.overlong == "truncate":
        lost.append("data.overlong = 'truncate': verl stops with an error at a longer prompt here")
    return {
        "data.train_batch_size": str(rollout.prompts), f"{ROLLOUT}n": str(rollout.completions),
        "data.max_prompt_length": str(data.max_prompt_tokens), "data.max_response_length": str(rollout.max_tokens),
        "data.filter_overlong_prompts": hydra(data.overlong == "drop"), "data.truncation": "error",
        f"{ROLLOUT}temperature": exact(rollout.temperature), f"{ROLLOUT}top_p": exact(rollout.top_p),
        # verl switches top_k off by -1, not by 0.
        f"{ROLLOUT}top_k": str(rollout.top_k or -1), f"{ROLLOUT}val_kwargs.n": str(config.eval.samples),
        f"{ROLLOUT}val_kwargs.temperature": exact(config.eval.temperature),
        f"{ROLLOUT}val_kwargs.do_sample": hydra(config.eval.temperature > 0),
        f"{ACTOR}ppo_mini_batch_size": str(learner.minibatch_prompts or rollout.prompts),
        f"{ACTOR}ppo_epochs": str(learner.inner_updates), f"{ACTOR}use_dynamic_bsz": "True",
        # verl refuses a budget that its longest sequence does not fit into.
        f"{ACTOR}ppo_max_token_len_per_gpu": str(max(learner.microbatch_tokens, longest)),
    }  # fmt: skip


def _optimizer(config: Config, lost: list[str]) -> dict[str, str]:
    """Optimizer and schedule. verl's learning rate changes once per step, ours with every optimizer step."""
    learner, optim = config.learner, f"{ACTOR}optim."
    updates = (
        -(-config.rollout.prompts // (learner.minibatch_prompts or config.rollout.prompts)) * learner.inner_updates
    )
    warmup = -(-learner.warmup_steps // updates)  # optimizer steps to steps, rounded up
    keys = {
        f"{optim}lr": exact(learner.lr), f"{optim}weight_decay": exact(learner.weight_decay),
        f"{optim}betas": hydra([learner.adam_beta1, learner.adam_beta2]),
        # -1: none, verl's default.
        f"{optim}lr_warmup_steps": str(warmup or -1), f"{optim}clip_grad": exact(learner.max_grad_norm),
    }  # fmt: skip
    if learner.weight_decay and not config.lora.rank:  # adapters have neither
        lost.append(f"learner.weight_decay = {learner.weight_decay:g}: acts on norms and biases too there")
    if learner.schedule == "cosine":
        keys[f"{optim}lr_scheduler_type"] = "cosine"
    elif learner.schedule != "constant":
        lost.append(f"learner.schedule = {learner.schedule!r}: the rate stays constant after the warmup here")
    if updates > 1 and (learner.schedule == "cosine" or warmup):
        lost.append(
            f"learner.schedule, warmup_steps: the rate moves once per step there, not with its {updates} updates"
        )
    if warmup:
        lost.append(f"learner.warmup_steps = {learner.warmup_steps}: verl's warmup begins with a step of rate 0")
    return keys


def _reward(config: Config) -> dict[str, str]:
    # Only what differs from the defaults, so that the command stays readable.
    default = RewardConfig()
    tables = [{k: v for k, v in dataclasses.asdict(r).items() if k == "name" or v != getattr(default, k)}
              for r in _unwatched(_rewards(config))]  # fmt: skip
    where = "reward.custom_reward_function."
    return {f"{where}path": "pkg://trew.integrations.verl.rewards", f"{where}name": "compute_score",
            f"+{where}reward_kwargs.rewards": hydra(tables)}  # fmt: skip


def _unwatched(rewards: Sequence[RewardConfig]) -> list[RewardConfig]:
    # Nothing in verl watches how often two rewards disagree: compute_score refuses the setting, and _lost tells it.
    return [dataclasses.replace(reward, verify_with="") for reward in rewards]


def _rewards(config: Config) -> Sequence[RewardConfig]:
    if config.plays:
        raise ConfigError("environment: is not exported: verl plays episodes by agent loops of its own; leave it out")
    if config.demonstrates:
        raise ConfigError("data.task: demonstrations are not exported: verl trains on them by verl.trainer.sft_trainer")
    rewards = config.rewards or make_task(one_set(config, "verl's command")).rewards(())
    if not rewards:
        raise ConfigError("rewards: got none, and the task has none of its own; verl needs one as well")
    refuse(rewards)
    names, judge = _names(rewards), config.eval.correct_reward
    if judge and judge not in names:
        raise ConfigError(f"eval.correct_reward: got {judge!r}{nearest(judge, names)}, accepts {', '.join(names)}")
    return rewards


def _names(rewards: Sequence[RewardConfig]) -> list[str]:
    return names_of([dataclasses.asdict(reward) for reward in rewards])


def _parts(config: Config) -> dict[str, str]:
    """The key under which our compute_score returns each reward's number, by the reward's name."""
    names = _names(_rewards(config))
    return dict(zip(names, keys_of(names), strict=True))


def _objective(config: Config, lost: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the keys that select the objective in verl, and the environment with TREW_VERL where it is needed."""
    name, args = config.objective.preset, dict(config.objective.args)
    if is_file_spec(name):
        settings = "".join(f", {key}={value!r}" for key, value in args.items())
        raise ConfigError(
            f"objective.preset: got {name!r}, accepts a preset here: a command has no place for code of your own; make "
            f"the objective in a module that VERL_USE_EXTERNAL_MODULES names, and there call "
            f"trew.integrations.verl.register('{name.rpartition(':')[2]}', trew.preset({name!r}{settings}))"
        )
    # First the settings that verl implements elsewhere: with a correction, say, no objective could be offered at all.
    # One that is switched off has nothing to implement, and may switch off what the preset has.
    off = Options()
    elsewhere = {key: args.pop(key) for key in [k for k, v in args.items() if k in OWN and v != getattr(off, k)]}
    objective = preset(name, **args)
    found = offer(objective)
    estimator = _estimator(found.advantage)
    if found.loss or not estimator:
        raise ConfigError(f"objective.preset: {name} cannot run in verl: {found.loss or found.advantage}")
    # Settings at the preset's defaults need no registered variant: the plugin has the preset under its own name.
    args = args if objective != preset(name) else {}
    called = f"trew-{name}" if not args else f"{name}-of-recipe"
    keys = {f"{ACTOR}policy_loss.loss_mode": called, "algorithm.adv_estimator": estimator.replace("trew", called)}
    # "<...>" stands for a number that only a recipe has: see offered._of_loss.
    keys |= {k: str(config.rollout.max_tokens) if v.startswith("<") else v for k, v in found.settings}
    if estimator == "gdpo":
        keys |= _gdpo(config, elsewhere, lost)
    if _METRIC in keys:
        keys[_METRIC] = _compared(config, objective, punished=bool(elsewhere.get("overlong_cache")))
    elif objective.keep:
        lost.append(
            f"groups without signal stay: verl's old trainer, which its estimator {estimator} needs, has no filter"
        )
    if config.eval.correct_reward or len(_parts(config)) > 1:
        lost += _otherwise_correct(objective)
    keys |= _elsewhere(config, elsewhere, lost)
    return keys, {"TREW_VERL": json.dumps({called: {"preset": name, **args}})} if args else {}


def _otherwise_correct(objective: Objective) -> Iterator[str]:
    """Yields what an objective takes for correct in verl, where it reads which answers are."""
    if isinstance(objective.advantage, PassAtK | CorrectOnly):
        yield "which answers are correct: verl hands an estimator the sum of all rewards, and above 0 is correct"
    if isinstance(objective.weight, Tapered):
        yield "which answers are correct: a loss of verl's sees no rewards, and an advantage above 0 is correct"


def _gdpo(config: Config, own: dict[str, Any], lost: list[str]) -> dict[str, str]:
    """Returns the keys of verl's gdpo, and takes out of ``own`` what it does not read."""
    if cache := own.pop("overlong_cache", 0):
        lost.append(
            f"objective.overlong_cache = {cache}: verl's gdpo reads each reward, and the penalty is in their sum"
        )
    return {"+algorithm.gdpo_reward_keys": hydra([*_parts(config).values()]),
            "+algorithm.gdpo_reward_weights": hydra([r.weight for r in _rewards(config)])}  # fmt: skip


def _compared(config: Config, objective: Objective, *, punished: bool) -> str:
    """What verl's filter of groups compares, which ``objective`` does too: whether answers are right, or the sum of all
    rewards; ``punished``: verl's own sum has the length penalty in it, by which equal answers would seem to differ."""
    parts = _parts(config)
    if objective.dynamic_sampling and (punished or len(parts) > 1):
        return hydra(parts[config.eval.correct_reward or _judge(config)])
    return "score" if punished else "reward"


def _judge(config: Config) -> str:
    """The name of the reward that says which answers are right where the recipe names none."""
    rewards = _rewards(config)
    ranks = [judge_rank(name=r.name, model=bool(r.model), gate=r.gate, weight=r.weight) for r in rewards]
    return _names(rewards)[ranks.index(min(ranks))]  # the first of equals


def _elsewhere(config: Config, own: dict[str, Any], lost: list[str]) -> dict[str, str]:
    """Maps objective settings outside the loss to verl's keys; those without a key are lost."""
    keys: dict[str, str] = {}
    if own.get("entropy_bonus") and not own.get("entropy_target"):
        keys[f"{ACTOR}entropy_coeff"] = exact(own.pop("entropy_bonus"))
    if cache := own.pop("overlong_cache", 0):
        buffer = {"enable": True, "len": cache, "penalty_factor": 1.0, "log": False}
        keys |= {"reward.reward_manager.name": "dapo", "+reward.reward_kwargs.overlong_buffer_cfg": hydra(buffer),
                 "+reward.reward_kwargs.max_resp_len": str(config.rollout.max_tokens)}  # fmt: skip
    if own.get("correction"):
        keys |= _own_correction(config, own, lost)
    lost += [
        f"objective.{key} = {value!r}: {_ELSEWHERE.get(key, 'verl has no such rule')}" for key, value in own.items()
    ]
    return keys


def _own_correction(config: Config, own: dict[str, Any], lost: list[str]) -> dict[str, str]:
    """Takes the settings of the correction out of ``own``, and returns verl's keys for it."""
    rule = own["correction"]
    given = {key: own.pop(key) for key in ("correction", "correction_low", "correction_high") if key in own}
    rules = preset(config.objective.preset, **given).correction
    keys = _correction([r for r in rules if r.mismatch])
    if rules and (not keys or len(rules) > 1):
        part = "opsm" if keys else rule
        lost.append(f"objective.correction = {rule!r}: verl's algorithm.rollout_correction has no {part}")
    return keys


def _correction(rules: Sequence[Correction]) -> dict[str, str]:
    """Returns the keys of verl's equivalent correction; empty if it has none."""
    # verl applies one rule.
    [rule] = rules if len(rules) == 1 else [None]
    if not isinstance(rule, TruncatedImportance | MaskedImportance):
        return {}
    if isinstance(rule, TruncatedImportance) and rule.low > 0:
        return {}
    masked = isinstance(rule, MaskedImportance)
    # verl requires a lower bound above 0. 1e-9 masks nothing: verl clamps log-ratios at -20, and exp(-20) is 2e-9.
    threshold = f"'{exact(rule.low or 1e-9)}_{exact(rule.high)}'" if masked else exact(rule.high)
    where = "algorithm.rollout_correction."
    return {f"{where}rollout_is": rule.level, f"{where}rollout_is_threshold": threshold,
            f"{ROLLOUT}calculate_log_probs": "True",
            "+actor_rollout_ref.actor.policy_loss.rollout_correction": "${algorithm.rollout_correction}"}  # fmt: skip


def _estimator(reason: str) -> str:
    """Returns ``trew`` for ours, or the verl estimator that a reason names; empty for one that needs a critic."""
    own = reason.partition("adv_estimator=")[2]
    return "trew" if not reason else "" if own == "gae" else own


_ELSEWHERE = {
    "overlong_filtering": "verl has no such filter",
    "entropy_bonus": "verl's bonus has a fixed coefficient only",
    "entropy_target": "verl's bonus has a fixed coefficient only",
    "entropy_step": "verl's bonus has a fixed coefficient only",
    "nll": "verl has no likelihood of correct answers beside its losses",
}


def _before(recipe: str, changes: Sequence[str], files: tuple[str, str]) -> Iterator[str]:
    """Yields commands that convert the recipe's own training and evaluation prompts to verl's rows."""
    changed = " --set " + " ".join(map(shlex.quote, changes)) if changes else ""
    for split, path in zip(("train", "test"), map(shlex.quote, files), strict=True):
        made = f"trew data convert {shlex.quote(recipe)} {path} --to verl --split {split}{changed}"
        # Told, since it may be of another recipe, or of this one before it was changed.
        there = shlex.quote(
            f"{path}: exists, and is taken as it is; remove it to convert the prompts of {recipe} again"
        )
        yield f"if [ -e {path} ]; then echo {there} >&2; else {made}; fi"


def _lost(config: Config) -> Iterator[str]:
    # By exclusion, so that a key added to the recipe later is reported instead of dropped in silence.
    default = _leaves(dataclasses.asdict(Config(model="")))
    carried = {f"{table}{key}" for table, keys in CARRIED.items() for key in keys.split()}
    bfloat16 = config.learner.dtype == "bfloat16"  # verl's own
    for key, value in _leaves(dataclasses.asdict(config)).items():
        known = key in carried or key.startswith(("objective.args.", "data.args."))
        if not known and value != default.get(key) and not (key == "learner.dtype" and bfloat16):
            yield f"{key} = {value!r}"
    for i, reward in enumerate(config.rewards):
        if reward.verify_with:
            yield f"rewards[{i}].verify_with = {reward.verify_with!r}: verl does not watch where two rewards disagree"
    yield from _done_otherwise(config)
    precision = ", every random draw, and precision: verl computes in bfloat16 unless told otherwise"
    yield f"the order of prompts{' and every random draw' if bfloat16 else precision}"


def _done_otherwise(config: Config) -> Iterator[str]:
    """What verl does with rewards and prompts of this kind."""
    if any(reward.name not in KINDS and not reward.model for reward in config.rewards):
        yield (
            "not judged, None of a reward function: verl needs a number, so that None is an error there, or 0 beside "
            "other rewards; +reward.custom_reward_function.reward_kwargs.failed_score=0 gives such answers 0"
        )
    data = one_set(config, "verl's command")
    if data.task == "prompts" and not data.args.get("chat"):
        yield "prompts that are strings: trew gives them as they are, verl as a user's message in the chat template"


def _leaves(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _leaves(value, f"{where}{key}.") if isinstance(value, Mapping) and value else {f"{where}{key}": value}
    return found


def hydra(value: Any) -> str:
    """Renders a value in Hydra's override syntax: bare keys, quoted strings.

    >>> hydra([{"name": "math", "weight": 1.0, "args": {"require_boxed": True}}])
    "[{name: 'math', weight: 1.0, args: {require_boxed: true}}]"
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {hydra(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(hydra, value)) + "]"
    if isinstance(value, str):
        # Hydra takes a backslash as an escape before a quote alone, the closing one too: there each counts twice.
        return "'" + re.sub(r"(\\+)(?='|\Z)", r"\1\1", value).replace("'", "\\'") + "'"
    return json.dumps(value)


def _path(text: str) -> str:
    """Renders a path for Hydra, without quotes where it needs none: Hydra splits at commas, and reads 1 as a number.

    >>> _path("data/train.parquet"), _path("lr=1,2/train.parquet")
    ('data/train.parquet', "'lr=1,2/train.parquet'")
    """
    bare = re.fullmatch(r"(\.{0,2}/|[A-Za-z_])[\w./-]*", text, re.ASCII)
    return text if bare and text.lower() not in ("null", "true", "false", "nan", "inf") else hydra(text)
