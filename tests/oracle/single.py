"""Tables of numbers as batches: completions of one token, so that an objective is a function of (r, A)."""

from __future__ import annotations

import torch

import trew
from oracle.steps import F64
from trew import LossOutput, TokenBatch


def column(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=F64).reshape(-1, 1)


def table(name: str, *, ratio, advantage, old_probability: float = 1e-3, settings: dict | None = None, **fields):
    """One completion per entry, with this ratio to both other policies, and this advantage."""
    ratio, advantage = column(ratio), torch.as_tensor(advantage, dtype=F64).reshape(-1)
    old = torch.full_like(ratio, old_probability).log()
    batch = TokenBatch.from_padded(
        logprobs=(old + ratio.log()).requires_grad_(),
        mask=torch.ones_like(ratio, dtype=torch.bool),
        group_ids=torch.arange(len(ratio)),
        advantages=advantage.expand(len(ratio)),
        old_logprobs=old,
        rollout_logprobs=old,
        max_length=1,
        **fields,
    )
    return trew.preset(name, **(settings or {})).loss(batch)


def g_of(name: str, *, ratio, advantage, **more) -> list[float]:
    """g = w r: the coefficient without share and advantage. Every mean over one-token completions divides by n."""
    out = table(name, ratio=ratio, advantage=advantage, **more)
    assert torch.allclose(out.coefficients * len(out.coefficients), out.weights * out.ratios * out.advantages)
    return (out.weights * out.ratios)[:, 0].tolist()


def w_of(name: str, *, ratio, advantage, **more) -> list[float]:
    return table(name, ratio=ratio, advantage=advantage, **more).weights[:, 0].tolist()


def from_rewards(
    name: str, rewards, *, group_ids=None, lengths=None, settings: dict | None = None, **fields
) -> LossOutput:
    """On-policy completions of these lengths (1 by default) with these rewards, one group unless told."""
    rewards = torch.as_tensor(rewards, dtype=F64)
    rows = len(rewards)
    lengths = torch.ones(rows, dtype=torch.int64) if lengths is None else torch.as_tensor(lengths)
    width = int(lengths.max())
    batch = TokenBatch.from_padded(
        logprobs=torch.full((rows, width), -1.0, dtype=F64, requires_grad=True),
        mask=torch.arange(width)[None] < lengths[:, None],
        group_ids=torch.zeros(rows, dtype=torch.int64) if group_ids is None else torch.as_tensor(group_ids),
        rewards=rewards,
        **({"max_length": width} | fields),
    )
    return trew.preset(name, **(settings or {})).loss(batch)


def advantages(name: str, rewards, **more) -> list[float]:
    """The advantage of each completion's first token."""
    return from_rewards(name, rewards, **more).advantages[:, 0].tolist()
