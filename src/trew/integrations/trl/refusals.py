"""Finds what cannot be honoured inside TRL's trainer, with reasons, before anything is loaded."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from ...objective import Objective, preset, presets
from ...objective.advantage import PassAtK
from ...objective.capped import Tapered
from ...objective.entropy_shares import EntropySequenceShares, EntropyTokenShares
from ...objective.imitation import DEMONSTRATED, CorrectOnly
from ...objective.shaping import SoftOverlong

DECIDED = {
    "loss_type": "the preset's name",
    "epsilon": "eps_low",
    "epsilon_high": "eps_high (cap for cispo)",
    "delta": "the preset two-sided, or dual-clip",
    "importance_sampling_level": "the presets gspo, gspo-token, gmpo",
    "scale_rewards": "the presets dr-grpo (none), lite-ppo (batch)",
    "multi_objective_aggregation": "the preset gdpo",
    "mask_truncated_completions": "overlong_filtering=True",
    "top_entropy_quantile": "the preset high-entropy-tokens",
    "entropy_coef": "entropy_bonus",
    "use_adaptive_entropy": "entropy_bonus, without adaptation",
    "entropy_coef_min": "entropy_bonus, without adaptation",
    "entropy_coef_max": "entropy_bonus, without adaptation",
    "entropy_coef_delta": "entropy_bonus, without adaptation",
    "entropy_target": "entropy_bonus, without adaptation",
    "sapo_temperature_neg": "tau_neg of sapo",
    "sapo_temperature_pos": "tau_pos of sapo",
    "vespo_k_pos": "k_pos of vespo",
    "vespo_lambda_pos": "lam_pos of vespo",
    "vespo_k_neg": "k_neg of vespo",
    "vespo_lambda_neg": "lam_neg of vespo",
    "off_policy_mask_threshold": 'correction="opsm" with opsm_delta',
    "use_bias_correction_kl": 'kl="k3" or kl="k3-corrected"',
    "vllm_importance_sampling_mode": 'correction="tis", "tis-sequence", "mis", "mis-token" or "icepop"',
    "vllm_importance_sampling_clip_max": "correction_high",
    "vllm_importance_sampling_clip_min": "correction_low",
    "vllm_importance_sampling_cap": "correction_high",
}
"""GRPOConfig settings that the objective decides, and the equivalent in an objective."""

TRLS = frozenset({
    "beta", "cache_implementation", "cast_lm_head_to_fp32", "chat_template_kwargs", "disable_dropout",
    "ds3_gather_for_generation", "generation_batch_size", "generation_kwargs", "log_completions",
    "log_completions_hub_repo", "log_multimodal", "log_unique_prompts", "max_completion_length",
    "max_tool_calling_iterations", "min_p", "model_init_kwargs", "num_completions_to_print", "num_generations",
    "num_generations_eval", "num_iterations", "pad_to_multiple_of", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "repetition_penalty", "reward_weights", "router_aux_loss_coef", "shuffle_dataset", "steps_per_generation",
    "sync_ref_model", "temperature", "top_k", "top_p", "transformers_continuous_batching_config",
    "trust_remote_code", "use_transformers_continuous_batching", "use_transformers_paged", "use_vllm",
    "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_group_port",
    "vllm_importance_sampling_correction", "vllm_max_model_length", "vllm_mode", "vllm_model_impl",
    "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
    "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
})  # fmt: skip
"""GRPOConfig settings that keep TRL's meaning here."""

CUTS = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None)}
"""Settings under which the sampler's log-probs differ from the policy's, and the values that switch them off."""


def of_objective(objective: Objective) -> list[str]:
    """Lists why an objective cannot run in TRL under any settings; empty if it can."""
    problems = []
    if "baselines" in objective.needs:
        problems.append(f"{objective.name} needs the greedy answer's reward, which TRL does not sample")
    if isinstance(objective.advantage, DEMONSTRATED):
        problems.append(f"{objective.name} needs demonstrations, and TRL's GRPOTrainer samples its completions")
    if "advantages" in objective.needs:
        problems.append(f"{objective.name} needs advantages of a critic, which TRL's GRPOTrainer does not have")
    if "teacher_logprobs" in objective.needs:
        problems.append(f"{objective.name} needs log-probs of a teacher, which TRL's GRPOTrainer does not compute")
    if "values" in objective.needs:
        problems.append(f"{objective.name} needs values of a critic, which TRL's GRPOTrainer does not have")
    if "score_norms" in objective.needs:
        problems.append(f"{objective.name} needs sums of squared probabilities, which TRL's forward pass does not give")
    if "turns" in objective.needs:
        problems.append(f"{objective.name} needs the turns of each episode, which TRL does not hand over")
    if objective.dynamic_sampling:
        problems.append(
            f"{objective.name} replaces groups without signal by fresh ones (dynamic sampling), and TRL generates once "
            f'per batch: pass dynamic_sampling=False to trew.preset("{objective.name}", ...)'
        )
    if objective.nll.active:
        problems.append(
            f"{objective.name} learns the likelihood of correct completions (nll), and TRL's trainer does not count "
            "their tokens over the optimizer step: accepts nll = 0"
        )
    if objective.entropy_bonus.target:
        problems.append(
            "entropy_target: an adaptive entropy bonus has a state, and TRL's checkpoints do not keep it: accepts 0 "
            "with a fixed entropy_bonus"
        )
    return problems


def offered() -> tuple[list[str], list[str]]:
    """Returns the presets that can run in TRL with dynamic sampling off, and those that cannot."""
    names = presets()
    runs = [name for name in names if not of_objective(preset(name, dynamic_sampling=False))]
    return runs, [name for name in names if name not in runs]


def of_run(objective: Objective, args: Any, *, rollout_func: Any = None, reward_funcs: Sequence[Any] = ()) -> list[str]:
    """Lists everything in an objective, a GRPOConfig and reward functions that cannot be honoured, one line each."""
    problems = [f"objective: {problem}" for problem in of_objective(objective)]
    problems += _decided_twice(objective, args)
    problems += _unknown(args)
    problems += _of_sampler(objective, args, rollout_func=rollout_func)
    problems += of_rewards(objective, reward_funcs, weights=args.reward_weights)
    problems += _teaches_nothing(objective, args)
    parts, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    if parts % accumulated:
        problems.append(
            f"steps_per_generation: got {parts} with gradient_accumulation_steps = {accumulated}, accepts a multiple "
            "of it (its default is equal): an optimizer step of several generations has no denominator before the last"
        )
    return problems


def _decided_twice(objective: Objective, args: Any) -> Iterator[str]:
    """Yields settings that differ from TRL's defaults although the objective decides them."""
    # A setting at its default looks the same as one that was never given, so only other values are refused.
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in DECIDED and value != _default(field):
            yield (
                f"{field.name}: got {value!r}, but the objective decides it: leave it out, and say it to trew.preset "
                f"as {DECIDED[field.name]}"
            )
    # Not in DECIDED: TRL's beta also loads the reference model, and the objective's own value is no conflict.
    if args.beta not in (0.0, objective.beta):
        yield (
            f"beta: got {args.beta!r}, but the objective's is {objective.beta!r}: leave it out, and pass beta to "
            "trew.preset"
        )


def _default(field: dataclasses.Field[Any]) -> Any:
    # A list or a table as default is made by a factory; compared with none, it would never be at its default.
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _unknown(args: Any) -> Iterator[str]:
    """Yields settings unknown to this version of trew: dropping one that shapes the loss would be silent."""
    # What GRPOConfig inherits from TrainingArguments configures the loop, not the loss.
    general = {field.name for field in dataclasses.fields(importlib.import_module("transformers").TrainingArguments)}
    for field in dataclasses.fields(importlib.import_module("trl").GRPOConfig):
        if field.name not in {*DECIDED, *TRLS, *general} and getattr(args, field.name) != _default(field):
            yield (
                f"{field.name}: got {getattr(args, field.name)!r}, which is newer than what trew knows of TRL, so that "
                "it cannot say whether the objective is to decide it: leave it out, or update trew"
            )


def _of_sampler(objective: Objective, args: Any, *, rollout_func: Any) -> Iterator[str]:
    """Checks the sampler's log-probs: where they come from, and who corrects for them."""
    reads = "rollout_logprobs" in objective.needs
    if reads and not args.use_vllm and rollout_func is None:
        yield (
            f"objective: {objective.name} needs the sampler's log-probs, which TRL has from vLLM or a rollout_func: "
            "set use_vllm=True, or take an objective without a correction"
        )
    corrects = objective.ratio.anchor == "rollout" or any(rule.mismatch for rule in objective.correction)
    if args.use_vllm and args.vllm_importance_sampling_correction and not corrects:
        yield (
            "vllm_importance_sampling_correction: got True (TRL's default), but the objective decides how the "
            'difference to vLLM is corrected, and has no correction: pass correction="mis" to trew.preset for what TRL '
            "does by default, or set it to False"
        )
    for name, value in _cuts(args).items() if reads else ():
        yield (
            f"{name}: got {value!r}, accepts {CUTS[name][0]!r} here: {objective.name} reads the sampler's "
            "log-probs, and those of a changed distribution are not the policy's"
        )


def _cuts(args: Any) -> dict[str, Any]:
    """Returns the settings that change the distribution that the sampler draws from."""
    # generation_kwargs overrides the fields, as it does in TRL's own generation config.
    given = {name: getattr(args, name) for name in CUTS} | (args.generation_kwargs or {})
    return {name: given[name] for name in CUTS if given[name] not in CUTS[name]}


def of_rewards(objective: Objective, functions: Sequence[Any], *, weights: Sequence[float] | None) -> list[str]:
    """Lists why an objective that needs step rewards cannot run with these reward functions; empty if it can."""
    if "step_rewards" not in objective.needs:
        return []
    # ``taken`` marks what rewards.steps has made.
    scoring = [hasattr(function, "taken") for function in functions]
    problems = []
    if sum(scoring) != 1:
        problems.append(
            f"objective: {objective.name} needs rewards of steps: put one rewards.steps(function) of "
            f"trew.integrations.trl among reward_funcs; got {sum(scoring)}"
        )
    if objective.advantage.reads_rewards:
        return problems
    weights = [1.0] * len(functions) if weights is None else weights
    return problems + _weight_problems(objective, weights, scoring)


def notes(objective: Objective, weights: Sequence[float]) -> list[str]:
    """Lists what a run takes otherwise than its user may expect: which answers are correct, if several rewards have
    these ``weights``."""
    reads = isinstance(objective.advantage, PassAtK | CorrectOnly | EntropyTokenShares | EntropySequenceShares)
    if not (reads or isinstance(objective.weight, Tapered)) or sum(weight != 0 for weight in weights) < 2:
        return []
    return [
        f"{objective.name} asks which answers are correct: here those whose weighted sum of rewards is above 0. "
        "Of several reward functions, one for form alone makes wrong answers correct, too. Make the one that decides a "
        "gate of the others: rewards.together of trew.integrations.trl"
    ]


def _weight_problems(objective: Objective, weights: Sequence[float], scoring: Sequence[bool]) -> list[str]:
    # Not strict: an environment's reward is in the functions only after TRL's constructor, and weights may count it.
    given = list(zip(weights, scoring, strict=False))
    problems = []
    if any(weight for weight, of_steps in given if not of_steps):
        problems.append(
            f"reward_funcs: {objective.name} reads the rewards of steps alone, so that the others (an environment's "
            "get_reward among them) would be dropped: take them out, add them to the steps, or give them a weight of 0 "
            "in reward_weights to have them logged"
        )
    if any(weight != 1 for weight, of_steps in given if of_steps):
        problems.append(
            f"reward_weights: {objective.name} reads the steps' own numbers: accepts 1 for the function that scores "
            "steps"
        )
    return problems


def _teaches_nothing(objective: Objective, args: Any) -> Iterator[str]:
    """Yields settings under which no completion could have an advantage, or all would be punished."""
    advantage, size = objective.advantage, args.num_generations
    if isinstance(advantage, PassAtK) and advantage.k >= size:
        yield (
            f"k: got {advantage.k}, accepts less than num_generations = {size}: whether one of all completions is "
            "right says nothing about any single one"
        )
    for shape in objective.shape:
        if isinstance(shape, SoftOverlong) and shape.cache > args.max_completion_length:
            yield (
                f"overlong_cache: got {shape.cache}, accepts at most max_completion_length = "
                f"{args.max_completion_length}"
            )


def table() -> str:
    """Returns the presets that run and those that do not, as the table of docs/trl.md."""
    runs, refused = offered()
    alone = [name for name in runs if not of_objective(preset(name)) and not _from_elsewhere(preset(name))]
    sampled = [name for name in runs if "dynamic_sampling" in " ".join(of_objective(preset(name)))]
    elsewhere = [name for name in runs if _from_elsewhere(preset(name))]
    rows = {
        "as they are": alone,
        "with `dynamic_sampling=False`": sampled,
        "with something more": [f"{name} ({_from_elsewhere(preset(name))})" for name in elsewhere],
        "not": [f"{name} ({of_objective(preset(name))[0].partition(' needs ')[2]})" for name in refused],
    }
    lines = [f"| {how} | {', '.join(names)} |" for how, names in rows.items()]
    return "\n".join(["| runs in TRL | presets |", "|---|---|", *lines])


def _from_elsewhere(objective: Objective) -> str:
    """Returns what a run must supply besides the objective; empty if nothing is needed."""
    sampler = "vLLM's or a rollout_func's log-probs" if "rollout_logprobs" in objective.needs else ""
    return sampler or ("rewards.steps" if "step_rewards" in objective.needs else "")
