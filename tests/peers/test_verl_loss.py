"""Our losses and their gradients by log pi against every policy loss of verl, for given advantages."""

from __future__ import annotations

import pytest
import torch
import verl_help
from peer_compare import MAX_LENGTH, TOLERANCE, WRONG, Case, apart, noise, parametrize, same_value
from verl.trainer.ppo import core_algos

import trew
from trew.integrations.verl import registered

BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
OURS = {"eps_low": 0.2, "eps_high": 0.28}
NEAR = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
GEO = {"eps_low": 0.05, "eps_high": 0.08}
SEQ = "seq-mean-token-mean"
NO_CLIP = {"eps_low": 0.9, "eps_high": 1.9}
NO_DROP = {"dynamic_sampling": False}

# vanilla is dual clip with cap 3 unless told otherwise; far caps switch it off. DPPO's anchor, the sampler, is given as
# verl's old policy. value=False: verl's DPPO reports -g A log pi, the paper and ours -w r A; a tent reports w r A, 0
# for a clipped token, where PPO has its clipped surrogate.
CASES = [
    Case("vanilla", {"mode": "vanilla", **BOUNDS}, "dual-clip", OURS, NO_CLIP),
    Case("vanilla, near cap", {"mode": "vanilla", **BOUNDS, "clip_ratio_c": 1.4}, "dual-clip", {**OURS, "cap": 1.4},
         {"cap": 3.0}),
    Case("vanilla, no cap", {"mode": "vanilla", **BOUNDS, "clip_ratio_c": 1e4}, "dapo", {**OURS, **NO_DROP},
         {"eps_low": 0.1}),
    Case("vanilla, no cap, as ppo", {"mode": "vanilla", "clip_ratio_c": 1e4}, "ppo-clip", {}, {"eps_low": 0.1}),
    Case("vanilla, no cap, as a tent", {"mode": "vanilla", **BOUNDS, "clip_ratio_c": 1e4}, "trw-triangular",
         {**OURS, "w0": 1.0, "w2": 1.0, "aggregate": "token-mean"}, {"w0": 0.5, "w2": 0.5}, value=False),
    Case("two-sided", {"mode": "vanilla", **BOUNDS, "clip_ratio_c": 1.4}, "two-sided",
         {**OURS, "delta": 1.4, "beta": 0.0, **NO_DROP}, {"delta": 4.0}),
    Case("lite-ppo's loss", {"mode": "vanilla", "clip_ratio_c": 1e4}, "lite-ppo", {}, NO_CLIP),
    Case("reinforce-pp's loss", {"mode": "vanilla", "clip_ratio_c": 1e4}, "reinforce-pp", {"beta": 0.0},
         NO_CLIP),
    Case("gspo", {"mode": "gspo", **NEAR, "aggregate": SEQ}, "gspo", GEO, {"eps_low": 0.2, "eps_high": 0.2}),
    Case("gspo, token mean", {"mode": "gspo", **NEAR}, "gspo", {**GEO, "aggregate": "token-mean"}, {"aggregate": SEQ}),
    Case("gspo, sum over tokens: luspo", {"mode": "gspo", **NEAR, "aggregate": "seq-mean-token-sum"}, "luspo", GEO,
         {"aggregate": SEQ}),
    Case("gspo, advantages per token", {"mode": "gspo", **NEAR, "aggregate": SEQ}, "gspo-token", GEO,
         {"eps_low": 0.2, "eps_high": 0.2}, data={"per_token": True}),
    Case("sapo", {"mode": "sapo", "tau_pos": 1.5, "tau_neg": 2.5}, "sapo", {"tau_pos": 1.5, "tau_neg": 2.5},
         {"tau_pos": 2.5}),
    Case("cispo", {"mode": "cispo", **BOUNDS}, "cispo", {"cap": 1.28, "floor": 0.8}, {"floor": 0.0}),
    Case("cispo, no floor", {"mode": "cispo", "clip_ratio_low": 10.0, "clip_ratio_high": 0.2}, "cispo", {"cap": 1.2},
         {"cap": 5.0}),
    Case("cispo on the sampler's log-probabilities: aipo", {"mode": "cispo", "clip_ratio_low": 10.0, "clip_ratio_high":
         0.2}, "aipo", {"cap": 1.2}, {"cap": 5.0}, data={"anchor": "mu"}),
    Case("dppo_tv", {"mode": "dppo_tv", "clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 1e4}, "dppo-tv",
         {"delta": 0.1}, {"delta": 0.15}, value=False, data={"anchor": "mu"}),
    Case("dppo_tv, capped", {"mode": "dppo_tv", "clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 1.3},
         "dppo-tv", {"delta": 0.1, "cap": 1.3}, {"cap": 2.0}, value=False, data={"anchor": "mu"}),
    Case("dppo_kl", {"mode": "dppo_kl", "clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 1e4},
         "dppo-kl", {"delta": 0.05}, {"delta": 0.5}, value=False, data={"anchor": "mu"}),
    Case("dppo_kl, capped", {"mode": "dppo_kl", "clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 1.3},
         "dppo-kl", {"delta": 0.05, "cap": 1.3}, {"cap": 2.0}, value=False, data={"anchor": "mu"}),
    Case("dro", {"mode": "dro", "policy": {"dro_beta": 0.3}}, "dro", {"tau": 0.3}, {"tau": 0.1}),
    Case("dro, sequence mean", {"mode": "dro", "policy": {"dro_beta": 0.3}, "aggregate": SEQ}, "dro",
         {"tau": 0.3, "aggregate": SEQ}, {"aggregate": "token-mean"}, data={"holes": True}),
    Case("gpg", {"mode": "gpg", "aggregate": SEQ}, "gpg", {}, {"aggregate": "token-mean"}),
    Case("opo's loss", {"mode": "gpg"}, "opo", {}, {"aggregate": SEQ}),
    Case("remax's loss", {"mode": "gpg"}, "remax", {"beta": 0.0}, {"aggregate": SEQ}),
    Case("reinforce's loss", {"mode": "gpg", "aggregate": "seq-mean-token-sum"}, "reinforce", {"beta": 0.0},
         {"aggregate": SEQ}),
    Case("geo_mean", {"mode": "geo_mean", **BOUNDS}, "gmpo", OURS, {"eps_high": 0.2}),
    Case("kl_cov", {"mode": "kl_cov", "policy": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}}, "kl-cov",
         {"share": 0.3, "penalty": 0.7}, {"share": 0.2}),
    Case("kl_cov, one token at least", {"mode": "kl_cov", "policy": {"kl_cov_ratio": 1e-4, "ppo_kl_coef": 1.0}},
         "kl-cov", {"share": 1e-4}, {"share": 0.3}),
    # Every token that qualifies is taken, so that two random draws cannot differ.
    Case("clip_cov", {"mode": "clip_cov", **BOUNDS, "policy": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1,
         "clip_cov_ub": 0.8}}, "clip-cov", {**OURS, "share": 1.0, "cov_low": 0.1, "cov_high": 0.8}, {"cov_low": 0.4}),
    Case("clip_cov, wide clip", {"mode": "clip_cov", "clip_ratio_low": 1.0, "clip_ratio_high": 1.0, "policy":
         {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.8}}, "clip-cov",
         {"share": 1.0, "cov_low": 0.1, "cov_high": 0.8}, {"cov_high": 0.3}),
    # aggregation
    Case("sequence mean", {"mode": "vanilla", **BOUNDS, "aggregate": SEQ}, "dual-clip", {**OURS, "aggregate": SEQ},
         {"aggregate": "token-mean"}),
    Case("sequence sum", {"mode": "vanilla", **BOUNDS, "aggregate": "seq-mean-token-sum"}, "dual-clip",
         {**OURS, "aggregate": "seq-mean-token-sum"}, {"aggregate": SEQ}),
    Case("constant", {"mode": "vanilla", **BOUNDS, "aggregate": "seq-mean-token-sum-norm", "clip_ratio_c": 1e4,
         "loss_scale_factor": MAX_LENGTH}, "dr-grpo", OURS, {"aggregate": "seq-mean-token-sum"}),
    Case("token mean, tool tokens", {"mode": "vanilla", **BOUNDS}, "dual-clip", OURS, {"aggregate": SEQ},
         data={"holes": True}),
    Case("sequence mean, an empty sequence", {"mode": "vanilla", **BOUNDS, "aggregate": SEQ}, "dual-clip",
         {**OURS, "aggregate": SEQ}, {"aggregate": "token-mean"}, data={"empty": True}),
    Case("constant, an empty sequence", {"mode": "vanilla", **BOUNDS, "aggregate": "seq-mean-token-sum-norm",
         "clip_ratio_c": 1e4, "loss_scale_factor": MAX_LENGTH}, "dr-grpo", OURS, {"aggregate": "token-mean"},
         data={"empty": True}),
    # verl's geometric mean divides by all rows, also by those without a token; ours by those with one.
    Case("geo_mean, an empty sequence", {"mode": "geo_mean", **BOUNDS}, "gmpo", OURS, {"eps_high": 0.2},
         data={"empty": True}, scale=7 / 8),
    Case("gspo, tool tokens", {"mode": "gspo", **NEAR, "aggregate": SEQ}, "gspo", GEO, {"eps_low": 0.2},
         data={"holes": True}),
    Case("advantages per token", {"mode": "vanilla", **BOUNDS}, "dual-clip", OURS, {"eps_low": 0.1},
         data={"per_token": True}),
    Case("far apart", {"mode": "vanilla", **BOUNDS}, "dual-clip", OURS, {"cap": 1e4}, data={"size": 2.0}),
    Case("k1", {"mode": "vanilla", **BOUNDS}, "dual-clip", {**OURS, "beta": 0.3, "kl": "k1"}, {"kl": "k2"},
         data={"kl": ("k1", 0.3)}),
    Case("k2", {"mode": "vanilla", **BOUNDS}, "dual-clip", {**OURS, "beta": 0.3, "kl": "k2"}, {"kl": "k3"},
         data={"kl": ("k2", 0.3)}),
    Case("k3", {"mode": "vanilla", **BOUNDS}, "dual-clip", {**OURS, "beta": 0.3, "kl": "k3"}, {"kl": "k2"},
         data={"kl": ("low_var_kl", 0.3)}),
    Case("k3, sequence mean", {"mode": "vanilla", "clip_ratio_c": 1e4, "aggregate": SEQ}, "grpo",
         {"beta": 0.3, "kl": "k3"}, {"beta": 0.04}, data={"kl": ("k3", 0.3)}),
    Case("k3, constant", {"mode": "vanilla", "clip_ratio_c": 1e4, "aggregate": "seq-mean-token-sum-norm",
         "loss_scale_factor": MAX_LENGTH}, "dr-grpo", {"beta": 0.3, "kl": "k3"}, {"beta": 0.04},
         data={"kl": ("k3", 0.3)}),
    Case("reinforce-pp-baseline", {"mode": "vanilla", "clip_ratio_c": 1e4}, "reinforce-pp-baseline", {"beta": 0.3},
         {"kl": "k3"}, data={"kl": ("k2", 0.3)}),
]  # fmt: skip


def setting(case: Case) -> tuple:
    """verl's answer, our batch, and our extra fields."""
    data = dict(case.data)
    batch = verl_help.batch(**{k: data[k] for k in ("holes", "empty", "size") if k in data})
    if data.get("per_token"):
        batch["advantages"] = noise(6, *batch["mask"].shape)
    peer = dict(case.peer)
    more = {"ref_logprobs": batch["ref"]} if "kl" in data else {}
    if data.get("anchor") == "mu":
        more = {"rollout_logprobs": batch["old"], "old_logprobs": batch["now"].detach()}
    answer = verl_help.theirs(peer.pop("mode"), peer, batch, kl=data.get("kl"))
    return answer, batch, more


@parametrize(CASES)
def test_loss_and_gradient(case):
    (loss, gradient), batch, more = setting(case)
    our_loss, ours, _ = verl_help.ours(trew.preset(case.preset, **case.ours), batch, **more)
    assert apart(ours * case.scale, gradient) <= TOLERANCE
    assert same_value(our_loss * case.scale, loss) or not case.value
    _, wrong, _ = verl_help.ours(trew.preset(case.preset, **(case.ours | case.wrong)), batch, **more)
    assert apart(wrong * case.scale, gradient) >= WRONG


def test_sign_matters():
    case = CASES[0]
    (_, gradient), batch, _ = setting(case)
    batch["advantages"] = -batch["advantages"]
    assert apart(verl_help.ours(trew.preset(case.preset, **case.ours), batch)[1], gradient) >= 1


def test_every_policy_loss_is_covered():
    # bypass_mode picks one of the others.
    covered = {case.peer["mode"] for case in CASES}
    theirs = set(core_algos.POLICY_LOSS_REGISTRY) - set(registered())
    assert theirs - covered == {"bypass_mode"}


def test_dro_is_kimi_s_loss_where_an_answer_is_one_token():
    # Kimi's residual is of the whole answer's log-ratio, verl's of each token's: they meet at length 1.
    batch = verl_help.batch()
    batch["mask"] = batch["mask"] & (torch.arange(batch["mask"].shape[1]) == 0)[None, :]
    _, gradient = verl_help.theirs("dro", {"policy": {"dro_beta": 0.3}, "aggregate": "seq-mean-token-sum"}, batch)
    ours, wrong = (verl_help.ours(trew.preset("kimi", tau=tau), batch)[1] for tau in (0.3, 0.1))
    assert apart(ours, gradient) <= TOLERANCE
    assert apart(wrong, gradient) >= WRONG


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_alone(kind):
    batch = verl_help.batch(size=1.0)
    now = batch["now"].detach().requires_grad_()
    values = core_algos.kl_penalty(now, batch["ref"], kind)
    gradient = torch.autograd.grad((values * batch["mask"]).sum() / batch["mask"].sum(), now)[0]
    batch["advantages"] = torch.zeros(len(now), dtype=torch.float64)
    more = {"ref_logprobs": batch["ref"]}
    loss, ours, _ = verl_help.ours(trew.preset("dual-clip", beta=1.0, kl=kind), batch, **more)
    assert apart(ours, gradient) <= TOLERANCE
    assert apart(loss, values[batch["mask"]].mean()) <= TOLERANCE
    other = "k2" if kind != "k2" else "k3"
    assert apart(verl_help.ours(trew.preset("dual-clip", beta=1.0, kl=other), batch, **more)[1], gradient) >= WRONG


@pytest.mark.parametrize("aggregate", ["token-mean", SEQ, "seq-mean-token-sum"])
def test_micro_batches_of_a_step_add_up_to_the_same(aggregate):
    # verl is told the step's token and sequence counts; ours keeps them from ``prepare``.
    data = verl_help.batch()
    now, mask = data["now"].detach().requires_grad_(), data["mask"]
    config = verl_help.actor({})
    config.global_batch_info.update(batch_num_tokens=int(mask.sum()), global_batch_size=len(mask))
    total = torch.zeros((), dtype=torch.float64)
    for rows in ([0, 1, 2], [3, 4, 5], [6, 7]):
        advantages = data["advantages"][rows][:, None] * mask[rows]
        total = total + core_algos.compute_policy_loss_vanilla(
            old_log_prob=data["old"][rows], log_prob=now[rows], advantages=advantages,
            response_mask=mask[rows].double(), loss_agg_mode=aggregate, config=config,
        )[0]  # fmt: skip
    (gradient,) = torch.autograd.grad(total, now)

    mine = data["now"].detach().requires_grad_()
    objective = trew.preset("dual-clip", aggregate=aggregate)
    batch = trew.TokenBatch.from_padded(
        logprobs=mine, mask=mask, group_ids=torch.arange(len(mask)), advantages=data["advantages"],
        old_logprobs=data["old"],
    )  # fmt: skip
    prepared = objective.prepare(batch)
    parts = [objective.loss(prepared.select(torch.tensor(rows))).loss for rows in ([7, 0], [1, 2, 3, 4], [5, 6])]
    (ours,) = torch.autograd.grad(sum(parts), mine, retain_graph=True)
    assert apart(ours, gradient) <= TOLERANCE
    # A part taken for a step of its own is not the same.
    alone = [
        objective.loss(objective.renormalised_for(prepared.select(torch.tensor(r)))).loss
        for r in ([7, 0], [1, 2, 3, 4, 5, 6])
    ]
    assert apart(torch.autograd.grad(sum(alone), mine)[0], gradient) >= WRONG


def test_k3_is_cut_at_ten_there():
    # verl limits the value of k3 to 10 and so loses its gradient there; ours limits only the log-ratio, to 20.
    data = verl_help.batch()
    data["now"] = now = (data["now"].detach() - 4.0).requires_grad_()  # so that the reference's stay below 0
    reference = now.detach() + 3.0  # exp(3) - 1 - 3 = 16
    values = core_algos.kl_penalty(now, reference, "k3")
    assert bool((values == 10).all())
    assert float(torch.autograd.grad(values.sum(), now)[0].abs().max()) == 0
    data["advantages"] = torch.zeros(len(now), dtype=torch.float64)
    _, ours, _ = verl_help.ours(trew.preset("dual-clip", beta=1.0, kl="k3"), data, ref_logprobs=reference)
    assert float(ours[data["mask"]].sum()) == pytest.approx(1 - torch.tensor(3.0).exp().item(), rel=1e-6)
