"""What settings of TRL and verl are called in recipes, for messages about unknown keys. docs/from-trl-verl.md has all
of them, with their units."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BATCH = "rollout.prompts for a generation and learner.minibatch_prompts for an optimizer step, both in prompts"
_BOTH_BOUNDS = "objective.eps_low and objective.eps_high, both"
_EPOCHS = "steps, or sft.epochs with demonstrations"
_PRESET = "objective.preset"
_SAVING = "checkpoint.every, in steps of rollouts"
_TESTING = "eval.every, in steps of rollouts"
_TRACKERS = "track.to"
_WARMUP = "learner.warmup_steps, in optimizer steps"

NAMES: Mapping[str, str] = MappingProxyType({
    # TRL and transformers
    "bf16": 'learner.dtype = "bfloat16"',
    "epsilon": _BOTH_BOUNDS,
    "epsilon_high": "objective.eps_high",
    "eval_steps": _TESTING,
    "generation_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "learning_rate": "learner.lr",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout, 0 only",
    "loss_type": _PRESET,
    "lr_scheduler_type": "learner.schedule",
    "mask_truncated_completions": "objective.overlong_filtering",
    "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "steps, of rollouts and not of the optimizer",
    "num_generations": "rollout.completions",
    "num_iterations": "learner.inner_updates",
    "num_train_epochs": _EPOCHS,
    "output_dir": "out",
    "peft_config": "[lora]",
    "per_device_train_batch_size": _BATCH,
    "report_to": _TRACKERS,
    "reward_funcs": "[[rewards]]",
    "reward_weights": "the weight of each of [[rewards]]",
    "save_steps": _SAVING,
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": 'objective.preset: "dr-grpo" for none, "lite-ppo" for batch',
    "steps_per_generation": _BATCH,
    "target_modules": "lora.targets",
    "use_vllm": 'cluster.rollout = "vllm"',
    "vllm_gpu_memory_utilization": "cluster.server_args.gpu-memory-utilization",
    "vllm_importance_sampling_correction": "objective.correction",
    "warmup_ratio": _WARMUP,
    # verl
    "adv_estimator": _PRESET,
    "clip_grad": "learner.max_grad_norm",
    "clip_ratio": _BOTH_BOUNDS,
    "clip_ratio_c": 'objective.cap, of preset "dual-clip"',
    "clip_ratio_high": "objective.eps_high",
    "clip_ratio_low": "objective.eps_low",
    "custom_reward_function": "[[rewards]]",
    "entropy_coeff": "objective.entropy_bonus",
    "filter_groups": "objective.dynamic_sampling",
    "gpu_memory_utilization": "cluster.server_args.gpu-memory-utilization",
    "kl_loss_coef": "objective.beta",
    "kl_loss_type": "objective.kl",
    "logger": _TRACKERS,
    "lora_rank": "lora.rank",
    "loss_agg_mode": "objective.aggregate",
    "loss_mode": _PRESET,
    "lr_warmup_steps": _WARMUP,
    "lr_warmup_steps_ratio": _WARMUP,
    "max_response_length": "rollout.max_tokens",
    "ppo_epochs": "learner.inner_updates",
    "ppo_mini_batch_size": "learner.minibatch_prompts",
    "save_freq": _SAVING,
    "test_freq": _TESTING,
    "total_epochs": _EPOCHS,
    "total_training_steps": "steps",
    "train_batch_size": "rollout.prompts",
    "train_files": "data.train",
    "use_kl_loss": "objective.beta, 0 for none",
    "val_files": "data.eval",
})  # fmt: skip
"""Names that no section of a recipe has -> the setting that takes their place."""


PRESETS: Mapping[str, str] = MappingProxyType({
    "bnpo": "token-mean-local",  # a loss_type of TRL's, which is not the BNPO of the paper
    # adv_estimator and policy_loss.loss_mode of verl's
    "gae": "ppo", "geo_mean": "gmpo", "grpo_vectorized": "grpo", "optimal_token_baseline": "otb",
    "rloo_vectorized": "rloo", "vanilla": "dual-clip",
})  # fmt: skip
"""Algorithms of TRL and verl whose presets have another name."""


def in_a_recipe(name: str, names: Mapping[str, str] = NAMES) -> str:
    """`` (in trew: x)`` for a setting of TRL or verl, or an empty string.

    >>> in_a_recipe("num_generations")
    ' (in trew: rollout.completions)'
    >>> in_a_recipe("completions")
    ''
    """
    return f" (in trew: {names[name]})" if name in names else ""
