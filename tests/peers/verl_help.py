"""verl's formulas on one batch of log-probabilities, and ours on the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from peer_compare import GROUPS, LENGTHS, MAX_LENGTH, noise, ragged_mask
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig

import trew

INDEX = np.array([f"prompt {g}" for g in GROUPS], dtype=object)


def batch(*, holes: bool = False, empty: bool = False, size: float = 0.4) -> dict[str, Tensor]:
    """Log-probabilities of four policies, advantages of both signs, and the mask."""
    rows, width = len(LENGTHS), max(LENGTHS)
    now = -noise(0, rows, width).abs() - 0.05
    mask = ragged_mask(holes=holes)
    if empty:
        mask = mask & (torch.arange(rows) != 3)[:, None]
    around = {name: (now + noise(seed, rows, width, size=size)).clamp(max=-1e-3)
              for seed, name in enumerate(("old", "ref", "mu"), start=1)}  # fmt: skip
    return {"now": now.requires_grad_(), "mask": mask, "advantages": noise(5, rows), **around}


def ours(objective: Any, data: dict[str, Tensor], **more: Any) -> tuple[Tensor, Tensor, Any]:
    """trew's loss, its gradient by the log-probabilities (B, T), and all it returned."""
    now = data["now"].detach().requires_grad_()
    fields = {"advantages": data["advantages"], "old_logprobs": data["old"], "max_length": MAX_LENGTH} | more
    made = trew.TokenBatch.from_padded(logprobs=now, mask=data["mask"], group_ids=torch.tensor(GROUPS), **fields)
    output = objective.loss(made)
    (gradient,) = torch.autograd.grad(output.loss, now)
    return output.loss.detach(), gradient, output


def actor(settings: dict[str, Any]) -> ActorConfig:
    """verl's configuration of the actor; ``policy`` holds what belongs to the policy loss."""
    settings = dict(settings)
    policy = PolicyLossConfig(**settings.pop("policy", {}))
    return ActorConfig(
        strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=len(LENGTHS), policy_loss=policy, **settings
    )  # fmt: skip


def theirs(
    mode: str,
    settings: dict[str, Any],
    data: dict[str, Tensor],
    *,
    weights: Tensor | None = None,
    kl: tuple | None = None,
) -> tuple[Tensor, Tensor]:
    """verl's policy loss and gradient by the log-probabilities; ``kl`` = (estimator, coefficient) adds its KL loss."""
    settings = dict(settings)
    aggregate = settings.pop("aggregate", "token-mean")
    scale = settings.pop("loss_scale_factor", None)
    config = actor(settings)
    config.global_batch_info["loss_scale_factor"] = scale
    now, mask = data["now"].detach().requires_grad_(), data["mask"]
    advantages = data["advantages"] if data["advantages"].dim() == 2 else data["advantages"][:, None] * mask
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=data["old"], log_prob=now, advantages=advantages, response_mask=mask.double(),
        loss_agg_mode=aggregate, config=config, rollout_is_weights=weights,
    )  # fmt: skip
    if kl is not None:
        estimator, coefficient = kl
        values = core_algos.kl_penalty(now, data["ref"], estimator)
        loss = loss + coefficient * core_algos.agg_loss(
            values, mask.double(), aggregate, loss_scale_factor=scale
        )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, now)
    return loss.detach(), gradient


def estimate(name: str, rewards: Tensor, mask: Tensor, *, per_token: Tensor | None = None, **more: Any) -> Tensor:
    """verl's advantages (B, T): the reward stands at the last token, as its reward managers put it."""
    token_rewards = torch.zeros(mask.shape, dtype=rewards.dtype)
    if rewards.dim() == 1:
        last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
        token_rewards[torch.arange(len(rewards)), last] = rewards
    if per_token is not None:
        token_rewards = token_rewards + per_token * mask
    given = {"index": INDEX, "config": AlgoConfig(gamma=1.0)} | more
    advantages, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=token_rewards, response_mask=mask.to(rewards.dtype), **given
    )
    return advantages
