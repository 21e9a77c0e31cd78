"""PPO's estimator and losses against the program of TRL's PPOTrainer, written down here as it was in trl.experimental.

TRL 1.16 no longer has it; verl's functions, which were made from it, run in tests/peers.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import trew
from trew import TokenBatch
from trew.objective.gae import GAE
from trew.objective.value import ValueLoss

F64 = torch.float64
WIDTH = 6
NEAR = {"rtol": 1e-6, "atol": 1e-7}


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def trl(data: dict[str, Tensor], *, gamma: float, lam: float, beta: float) -> dict[str, Tensor]:
    """Steps 4 to 6 of PPOTrainer.train: rewards, advantages, returns; ``last`` are the positions of the last tokens."""
    last = data["lengths"] - 1
    positions = torch.arange(WIDTH).repeat(len(last), 1)
    padding, behind = positions > last[:, None], positions > last[:, None] + 1
    logprobs, ref = (torch.masked_fill(data[k], padding, 1.0) for k in ("old", "ref"))
    values = torch.masked_fill(data["values"], behind, 0)
    rewards = -beta * (logprobs - ref)
    # Behind the last token, except where the sequence fills the width.
    end = torch.where(last + 1 < WIDTH, last + 1, last)
    rewards[torch.arange(len(last)), end] += data["rewards"]
    later, reverse = torch.zeros(len(last), dtype=F64), []
    for t in reversed(range(WIDTH)):
        following = values[:, t + 1] if t < WIDTH - 1 else 0.0
        later = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * later
        reverse.append(later)
    raw = torch.stack(reverse[::-1], dim=1)
    mean = masked_mean(raw, ~padding)
    variance = masked_mean((raw - mean) ** 2, ~padding) * (~padding).sum() / ((~padding).sum() - 1)
    whitened = torch.masked_fill((raw - mean) * torch.rsqrt(variance + 1e-8), padding, 0)
    return {"raw": raw, "advantages": whitened, "returns": raw + values, "padding": padding}


def step(lengths: list[int], *, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    old = -torch.rand(rows, WIDTH, generator=g, dtype=F64)
    return {
        "lengths": torch.tensor(lengths), "old": old, "ref": old - torch.rand(rows, WIDTH, generator=g, dtype=F64),
        "values": torch.randn(rows, WIDTH, generator=g, dtype=F64), "rewards": torch.rand(rows, generator=g, dtype=F64),
    }  # fmt: skip


def prepared(data: dict[str, Tensor], objective: trew.Objective, lengths: Tensor) -> TokenBatch:
    mask = torch.arange(WIDTH)[None] < lengths[:, None]
    return objective.prepare(TokenBatch.from_padded(
        logprobs=data["old"], mask=mask, group_ids=torch.arange(len(mask)), rewards=data["rewards"],
        values=data["values"], old_logprobs=data["old"], ref_logprobs=data["ref"],
    ))  # fmt: skip


@pytest.mark.parametrize(("gamma", "lam", "beta"), [(1.0, 0.95, 0.0), (1.0, 0.95, 0.05), (0.9, 0.5, 0.2)])
def test_sequences_that_fill_the_width(gamma, lam, beta):
    data = step([WIDTH] * 4)
    theirs = trl(data, gamma=gamma, lam=lam, beta=beta)
    batch = prepared(data, trew.preset("ppo", gamma=gamma, lam=lam, beta=beta), data["lengths"])
    torch.testing.assert_close(batch.unpack(batch.advantages), theirs["advantages"], **NEAR)
    torch.testing.assert_close(batch.unpack(batch.returns), theirs["returns"], **NEAR)


@pytest.mark.parametrize("lam", [0.5, 0.95])
def test_shorter_sequences_are_where_we_differ(lam):
    """TRL rewards them one position behind their last token, where it has a value as well: ours with one more token."""
    data = step([3, 1, 5, 2], seed=1)
    theirs = trl(data, gamma=1.0, lam=lam, beta=0.0)
    objective = trew.preset("reinforce").replace(advantage=GAE(1.0, lam))
    longer = prepared(data, objective, data["lengths"] + 1)
    own = ~theirs["padding"]
    torch.testing.assert_close(longer.unpack(longer.advantages)[own], theirs["raw"][own], **NEAR)
    as_they_are = prepared(data, objective, data["lengths"])
    assert (as_they_are.unpack(as_they_are.advantages) - theirs["raw"])[own].abs().max() > 0.01


@pytest.mark.parametrize("clip", [0.1, 0.2, 1.0])
def test_the_losses_of_policy_and_critic(clip):
    data = step([WIDTH] * 5, seed=2)
    theirs = trl(data, gamma=1.0, lam=0.95, beta=0.0)
    g = torch.Generator().manual_seed(3)
    shape = data["old"].shape
    now = (data["old"] + 0.3 * torch.randn(shape, generator=g, dtype=F64)).clamp(max=0.0).requires_grad_()
    predicted = (data["values"] + 0.3 * torch.randn(shape, generator=g, dtype=F64)).requires_grad_()
    # ---- theirs
    bounded = torch.clamp(predicted, data["values"] - clip, data["values"] + clip)
    errors = torch.max((predicted - theirs["returns"]) ** 2, (bounded - theirs["returns"]) ** 2)
    value_loss = 0.5 * errors.mean()
    ratio, A = torch.exp(now - data["old"]), theirs["advantages"]
    policy_loss = torch.max(-A * ratio, -A * torch.clamp(ratio, 0.8, 1.2)).mean()
    wanted = torch.autograd.grad(policy_loss + value_loss, [now, predicted])
    # ---- ours
    objective = trew.preset("ppo")
    batch = prepared(data, objective, data["lengths"])
    own = now.detach().flatten().requires_grad_()
    loss = objective.loss(batch.replace(logprobs=own)).loss
    torch.testing.assert_close(loss, policy_loss, **NEAR)
    torch.testing.assert_close(torch.autograd.grad(loss, own)[0], wanted[0].flatten(), **NEAR)
    of_critic, slopes = ValueLoss(clip)(predicted.detach().flatten(), batch=batch)
    torch.testing.assert_close(of_critic, value_loss.detach(), **NEAR)
    torch.testing.assert_close(slopes, wanted[1].flatten(), **NEAR)
