"""DPO's loss and gradient against the real ``DPOTrainer._compute_loss``, for given log-probs: those of ``dpo_loss``
and of the preset ``dpo``, with which trew sft trains."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from peer_compare import TOLERANCE, WRONG, apart
from trl import DPOTrainer

import trew
from trew.objective.preference import dpo_loss

PAIRS, WIDTH = 5, 6


class Given(torch.nn.Module):
    """A model whose log-probs are given."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        super().__init__()
        self.log_probs = log_probs

    def forward(self, **_: Any) -> Any:
        others = torch.zeros_like(self.log_probs)  # TRL logs them
        return SimpleNamespace(log_probs=self.log_probs, entropy=others, mean_logits=others, is_top1=others.bool())


def theirs(logprobs: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor, beta: float) -> torch.Tensor:
    """TRL's loss of a batch [chosen, rejected]; one prompt token stands before each completion."""
    trainer = mock.MagicMock()
    trainer.model = Given(logprobs)
    trainer.accelerator = SimpleNamespace(device=logprobs.device, gather_for_metrics=lambda x: x, gather=lambda x: x)
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    for name, value in {
        "aux_loss_enabled": False, "ld_alpha": None, "precompute_ref_logps": True, "f_divergence_type": "reverse_kl",
        "loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": beta, "label_smoothing": 0.0, "use_weighting": False,
    }.items():  # fmt: skip
        setattr(trainer, name, value)
    full = torch.cat([torch.zeros(len(mask), 1, dtype=mask.dtype), mask], dim=1)
    chosen, rejected = (ref * mask).sum(1).chunk(2)
    inputs = {
        "input_ids": torch.zeros_like(full), "attention_mask": torch.ones_like(full), "completion_mask": full,
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip
    return DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)


@pytest.mark.parametrize("of", ["function", "preset"])
@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_loss_and_gradient(beta, of):
    g = torch.Generator().manual_seed(int(10 * beta))
    mask = (torch.arange(WIDTH)[None] < torch.randint(1, WIDTH + 1, (2 * PAIRS, 1), generator=g)).long()
    raw = -3 * torch.rand(2 * PAIRS, WIDTH, generator=g, dtype=torch.float64) * mask  # TRL's are 0 outside the mask
    ref = (raw - 0.5 * torch.rand(raw.shape, generator=g, dtype=torch.float64)) * mask
    logprobs = raw.clone().requires_grad_()
    loss = theirs(logprobs, ref, mask, beta)
    (gradient,) = torch.autograd.grad(loss, logprobs)

    def ours(beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        own = raw.clone().requires_grad_()
        batch = trew.TokenBatch.from_padded(
            logprobs=own, ref_logprobs=ref, mask=mask, group_ids=torch.arange(PAIRS).repeat(2),
            rewards=torch.tensor([1.0] * PAIRS + [-1.0] * PAIRS),
        )  # fmt: skip
        mine = dpo_loss(batch, beta=beta) if of == "function" else trew.preset("dpo", dpo_beta=beta).loss(batch).loss
        return mine, torch.autograd.grad(mine, own)[0]

    inside = mask.bool()
    mine, got = ours(beta)
    assert apart(mine, loss) <= TOLERANCE
    assert apart(got[inside], gradient[inside]) <= TOLERANCE
    assert apart(ours(1.5 * beta)[1][inside], gradient[inside]) >= WRONG
