"""What cannot be honoured inside TRL's trainer, each with its reason: found before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ...objective import Objective, preset, presets

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
"""GRPOConfig's settings that the objective decides, and what says the same thing of an objective."""


def of_objective(objective: Objective) -> list[str]:
    """Why an objective cannot run in TRL, whatever the settings; empty where it can."""
    problems = []
    if "baselines" in objective.needs:
        problems.append(f"{objective.name} needs the greedy answer's reward, which TRL does not sample")
    if "advantages" in objective.needs:
        problems.append(f"{objective.name} needs advantages of a critic, which TRL's GRPOTrainer does not have")
    if objective.dynamic_sampling:
        problems.append(
            f"{objective.name} replaces groups without signal by fresh ones (dynamic sampling), and TRL generates once "
            f'per batch: pass dynamic_sampling=False to trew.preset("{objective.name}", ...)'
        )
    if objective.entropy_bonus.target:
        problems.append(
            "entropy_target: an adaptive entropy bonus has a state, and TRL's checkpoints do not keep it: accepts 0 "
            "with a fixed entropy_bonus"
        )
    return problems


def offered() -> tuple[list[str], list[str]]:
    """Presets that can run in TRL, dynamic sampling switched off, and those that cannot."""
    names = presets()
    runs = [name for name in names if not of_objective(preset(name, dynamic_sampling=False))]
    return runs, [name for name in names if name not in runs]


def of_run(objective: Objective, args: Any, *, rollout_func: Any, step_rewards: bool) -> list[str]:
    """Everything about an objective and a GRPOConfig that cannot be honoured, one line each."""
    problems = [f"objective: {problem}" for problem in of_objective(objective)]
    problems += _decided_twice(objective, args)
    needs = objective.needs
    if "rollout_logprobs" in needs and not args.use_vllm and rollout_func is None:
        problems.append(
            f"objective: {objective.name} needs the sampler's log-probs, which TRL has from vLLM or a rollout_func: "
            "set use_vllm=True, or take an objective without a correction"
        )
    if "step_rewards" in needs and not step_rewards:
        problems.append(
            f"objective: {objective.name} needs rewards of steps: put rewards.steps(function) of "
            "trew.integrations.trl among reward_funcs"
        )
    if args.use_vllm and args.vllm_importance_sampling_correction and "rollout_logprobs" not in needs:
        problems.append(
            "vllm_importance_sampling_correction: got True (TRL's default), but the objective decides how the "
            'difference to vLLM is corrected, and has no correction: pass correction="mis" to trew.preset for what TRL '
            "does by default, or set it to False"
        )
    parts, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    if parts % accumulated:
        problems.append(
            f"steps_per_generation: got {parts} with gradient_accumulation_steps = {accumulated}, accepts a multiple "
            "of it (its default is equal): an optimizer step of several generations has no denominator before the last"
        )
    return problems


def _decided_twice(objective: Objective, args: Any) -> Iterator[str]:
    """Settings that differ from TRL's defaults although the objective decides them."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in DECIDED and value != field.default:
            yield (
                f"{field.name}: got {value!r}, but the objective decides it: leave it out, and say it to trew.preset "
                f"as {DECIDED[field.name]}"
            )
    if args.beta not in (0.0, objective.beta):
        yield (
            f"beta: got {args.beta!r}, but the objective's is {objective.beta!r}: leave it out, and pass beta to "
            "trew.preset"
        )


def table() -> str:
    """The presets that run and those that do not, as the page docs/trl.md shows them."""
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
    """What has to be given beside the objective; empty where nothing has."""
    sampler = "vLLM's or a rollout_func's log-probs" if "rollout_logprobs" in objective.needs else ""
    return sampler or ("rewards.steps" if "step_rewards" in objective.needs else "")
