"""Our train-inference corrections against verl's ``rollout_corr_helper``, in its vanilla policy loss."""

from __future__ import annotations

from typing import Any

import torch
import verl_help
from peer_compare import TOLERANCE, WRONG, Case, apart, parametrize
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

import trew

CASES = [
    Case("tis", {"rollout_is": "token", "rollout_is_threshold": 1.2}, "dual-clip",
         {"correction": "tis", "correction_high": 1.2}, {"correction_high": 2.0}),
    Case("tis-sequence", {"rollout_is": "sequence", "rollout_is_threshold": 1.2}, "dual-clip",
         {"correction": "tis-sequence", "correction_high": 1.2}, {"correction_high": 2.0}),
    Case("icepop", {"rollout_is": "token", "rollout_is_threshold": "0.7_1.3"}, "dual-clip",
         {"correction": "icepop", "correction_low": 0.7, "correction_high": 1.3}, {"correction_low": 0.5}),
    Case("mis", {"rollout_is": "sequence", "rollout_is_threshold": "0.5_3.0"}, "dual-clip",
         {"correction": "mis", "correction_low": 0.5}, {"correction": "tis-sequence"}),
]  # fmt: skip


def weights(data: dict[str, torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    """verl's weights (B, T)."""
    made, _, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=data["old"], rollout_log_prob=data["mu"], response_mask=data["mask"].double(), **settings
    )
    return made.batch["rollout_is_weights"] if hasattr(made, "batch") else made["rollout_is_weights"]


@parametrize(CASES)
def test_loss_and_gradient(case):
    data = verl_help.batch()
    loss, gradient = verl_help.theirs("vanilla", {}, data, weights=weights(data, case.peer))
    mu = {"rollout_logprobs": data["mu"]}
    our_loss, ours, _ = verl_help.ours(trew.preset(case.preset, **case.ours), data, **mu)
    assert apart(ours, gradient) <= TOLERANCE
    assert apart(our_loss, loss) <= TOLERANCE
    _, wrong, _ = verl_help.ours(trew.preset(case.preset, **(case.ours | case.wrong)), data, **mu)
    assert apart(wrong, gradient) >= WRONG
