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


TOKEN = {"rollout_is": "token", "rollout_is_threshold": 1.2}
TIS = {"correction": "tis", "correction_high": 1.2}
NEAR, GEO = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}, {"eps_low": 0.05, "eps_high": 0.08}
OTHER_LOSSES = [
    Case("gspo", {"mode": "gspo", **NEAR, "aggregate": "seq-mean-token-mean"}, "gspo", {**GEO, **TIS},
         {"correction": "tis-sequence"}),
    Case("sapo", {"mode": "sapo", "tau_pos": 1.5, "tau_neg": 2.5}, "sapo", {"tau_pos": 1.5, "tau_neg": 2.5, **TIS},
         {"correction_high": 2.0}),
    Case("cispo", {"mode": "cispo", "clip_ratio_low": 10.0}, "cispo", {"cap": 1.2, **TIS}, {"correction_high": 2.0}),
    Case("gpg", {"mode": "gpg", "aggregate": "seq-mean-token-mean"}, "gpg", TIS, {"correction_high": 2.0}),
]  # fmt: skip


@parametrize(OTHER_LOSSES)
def test_tis_with_other_losses(case):
    data, peer = verl_help.batch(), dict(case.peer)
    loss, gradient = verl_help.theirs(peer.pop("mode"), peer, data, weights=weights(data, TOKEN))
    mu = {"rollout_logprobs": data["mu"]}
    our_loss, ours, _ = verl_help.ours(trew.preset(case.preset, **case.ours), data, **mu)
    assert apart(ours, gradient) <= TOLERANCE
    assert apart(our_loss, loss) <= TOLERANCE
    _, wrong, _ = verl_help.ours(trew.preset(case.preset, **(case.ours | case.wrong)), data, **mu)
    assert apart(wrong, gradient) >= WRONG


def test_gmpo_is_where_we_differ():
    # verl corrects a sequence by the geometric mean of its tokens' weights, ours keeps each token's own.
    data = verl_help.batch()
    c, mask = weights(data, TOKEN), data["mask"]
    mean = ((torch.where(mask, c.log(), 0.0).sum(1) / mask.sum(1)).exp())[:, None]
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    _, gradient = verl_help.theirs("geo_mean", bounds, data, weights=c)
    mu = {"rollout_logprobs": data["mu"]}
    plain = verl_help.ours(trew.preset("gmpo", eps_low=0.2, eps_high=0.28), data)[1]
    ours = verl_help.ours(trew.preset("gmpo", eps_low=0.2, eps_high=0.28, **TIS), data, **mu)[1]
    assert apart(plain * mean, gradient) <= TOLERANCE
    assert apart(plain * c, ours) <= TOLERANCE
    assert apart(ours, gradient) >= WRONG


def test_kl_cov_is_where_we_differ():
    # verl multiplies the pull back by the correction too, ours the policy gradient alone.
    data = verl_help.batch()
    c = weights(data, TOKEN)
    policy = {"policy": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}}
    _, gradient = verl_help.theirs("kl_cov", policy, data, weights=c)
    mu, share = {"rollout_logprobs": data["mu"]}, {"share": 0.3}
    both = verl_help.ours(trew.preset("kl-cov", **share, penalty=0.7), data)[1]
    push = verl_help.ours(trew.preset("kl-cov", **share, penalty=0.0), data)[1]
    ours = verl_help.ours(trew.preset("kl-cov", **share, penalty=0.7, **TIS), data, **mu)[1]
    assert apart(both * c, gradient) <= TOLERANCE
    assert apart(push * c + (both - push), ours) <= TOLERANCE
    assert apart(ours, gradient) >= WRONG
