"""Our plugin as verl calls it: ``ppo_loss`` on nested tensors, cut into micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import torch
import verl_help
from peer_compare import GROUPS, LENGTHS, MAX_LENGTH
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

import trew
from trew.integrations.verl import offer
from trew.integrations.verl.offered import bypasses

PROMPT = 2  # tokens of every prompt


def nested(values: Tensor, rows: list[int]) -> Tensor:
    """Rows of (B, T) at their own lengths, as verl sends them about."""
    return torch.nested.as_nested_tensor([values[i, : LENGTHS[i]] for i in rows], layout=torch.jagged)


def micro_batch(data: dict[str, Tensor], rows: list[int], step: dict[str, Any]) -> TensorDict:
    """What the actor's loss is given for these rows; ``step`` is what verl says about the mini-batch."""
    wide = data["advantages"] if data["advantages"].dim() == 2 else data["advantages"][:, None] * data["mask"]
    fields = {"response_mask": data["mask"].double(), "old_log_probs": data["old"], "advantages": wide,
              "ref_log_prob": data["ref"], "responses": torch.zeros_like(data["mask"], dtype=torch.int64)}  # fmt: skip
    if "weights" in data:
        fields["rollout_is_weights"] = data["weights"]
    made = {name: nested(value, rows) for name, value in fields.items()}
    zeros = [torch.zeros(PROMPT, dtype=torch.int64) for _ in rows]
    made["prompts"] = torch.nested.as_nested_tensor(zeros, layout=torch.jagged)
    batch = TensorDict(made, batch_size=len(rows))
    tu.assign_non_tensor(batch, **step)
    return batch


def config_of(objective: Any, **more: Any) -> Any:
    """verl's configuration of the actor with the settings that the objective needs there."""
    settings: dict[str, Any] = {}
    for key, value in offer(objective).settings:
        if key.startswith("actor_rollout_ref.actor."):
            kinds = {"kl_loss_coef": float, "use_kl_loss": bool}
            name = key.rpartition(".")[2]
            settings[name] = MAX_LENGTH if name == "loss_scale_factor" else kinds.get(name, str)(value)
    policy = dict(more.pop("policy", {}))
    if bypasses(objective):
        policy = {"rollout_correction": {"bypass_mode": True}} | policy
    return verl_help.actor(settings | {"policy": policy} | more)


def through_verl(
    name: str, objective: Any, data: dict[str, Tensor], *, parts: list[list[int]], ranks: int = 1, **more: Any
) -> tuple[Tensor, Tensor]:
    """(loss, gradient by the log-probabilities): the sum over micro-batches, the mean over ranks."""
    config = config_of(objective, **({"policy": {"loss_mode": name}} | more))
    step = {"dp_size": ranks, "batch_num_tokens": int(data["mask"].sum()), "global_batch_size": len(data["mask"])}
    now = data["now"].detach().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        # The log-probability of a token stands where the one before it was read.
        flat = torch.cat([torch.nn.functional.pad(now[i, : LENGTHS[i]], (PROMPT - 1, 1)) for i in rows])
        total = total + ppo_loss(config, {"log_probs": flat}, micro_batch(data, rows, step))[0] / ranks
    (gradient,) = torch.autograd.grad(total, now)
    return total.detach(), gradient


def _sampler(objective: Any, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """What verl's bypass mode calls the old policy is the sampler."""
    return {"rollout_logprobs": data["old"]} if bypasses(objective) else {}


def through_trew(objective: Any, data: dict[str, Tensor], **more: Any) -> tuple[Tensor, Tensor]:
    """The same of trew itself, on the whole batch at once; verl counts all sequences."""
    now = data["now"].detach().requires_grad_()
    batch = trew.TokenBatch.from_padded(
        logprobs=now, mask=data["mask"], advantages=data["advantages"], old_logprobs=data["old"],
        ref_logprobs=data["ref"], group_ids=torch.tensor(GROUPS), max_length=MAX_LENGTH,
        **(_sampler(objective, data) | more),
    )  # fmt: skip
    loss = objective.loss(batch).loss
    (gradient,) = torch.autograd.grad(loss, now)
    return loss.detach(), gradient
