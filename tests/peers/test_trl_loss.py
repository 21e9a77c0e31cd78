"""Our losses and gradients against TRL's ``_compute_loss``, of all parameters of a model, for given advantages.

The behaviour policy's log-probabilities differ from the current ones, as in any inner iteration but the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import trl_help
from peer_compare import MAX_LENGTH, TOLERANCE, WRONG, Case, apart, noise, parametrize, same_value
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

import trew
from trew.objective.correction import Correction
from trew.objective.segments import segment_mean

CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
OURS = {"eps_low": 0.2, "eps_high": 0.28}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08}
GEO = {"eps_low": 0.05, "eps_high": 0.08}
NO_DROP = {"dynamic_sampling": False}
PLAIN_KL = {"use_bias_correction_kl": False}
GAMMA = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0}
REF, MU, BOTH = {"ref": True}, {"mu": True}, {"ref": True, "mu": True}

CASES = [
    # every loss type
    Case("grpo", {"loss_type": "grpo", **CLIP}, "grpo", {**OURS, "beta": 0.0}, {"eps_high": 0.2}),
    Case("bnpo", {"loss_type": "bnpo", **CLIP}, "token-mean-local", {**OURS, "microbatch": 8}, {"microbatch": 4}),
    Case("bnpo in two parts", {"loss_type": "bnpo", **CLIP}, "token-mean-local", {**OURS, "microbatch": 4},
         {"microbatch": 8}, data={"parts": 2}),
    Case("dr_grpo", {"loss_type": "dr_grpo", **CLIP}, "dr-grpo", OURS, {"aggregate": "token-mean"}),
    Case("dapo", {"loss_type": "dapo", **CLIP}, "dapo", {**OURS, **NO_DROP}, {"eps_high": 0.2}),
    Case("dapo in two parts", {"loss_type": "dapo", **CLIP}, "dapo", {**OURS, **NO_DROP},
         {"aggregate": "seq-mean-token-mean"}, data={"parts": 2}),
    Case("grpo in two parts", {"loss_type": "grpo", **CLIP}, "grpo", {**OURS, "beta": 0.0},
         {"aggregate": "token-mean"}, data={"parts": 2}),
    Case("cispo", {"loss_type": "cispo", "epsilon_high": 1.2}, "cispo", {"cap": 1.2}, {"cap": 1.4}),
    Case("cispo, hardly capped", {"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", {"cap": 5.0}, {"cap": 1.2}),
    Case("sapo", {"loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5}, "sapo",
         {"tau_pos": 1.5, "tau_neg": 2.5}, {"tau_neg": 1.5}),
    Case("luspo", {"loss_type": "luspo", **SEQUENCE}, "luspo", GEO, {"aggregate": "seq-mean-token-mean"}),
    Case("luspo, token ratio", {"loss_type": "luspo", **CLIP}, "grpo",
         {**OURS, "beta": 0.0, "aggregate": "seq-mean-token-sum"}, {"aggregate": "seq-mean-token-mean"}),
    Case("vespo", {"loss_type": "vespo"}, "vespo", {}, {"lam_neg": 1.5}),
    Case("vespo, other curve", {"loss_type": "vespo", **GAMMA}, "vespo",
         {"k_pos": 1.5, "lam_pos": 2.5, "k_neg": 2.0, "lam_neg": 1.0}, {"k_pos": 2.0}),
    # ratio of the sequence
    Case("gspo", {"loss_type": "grpo", **SEQUENCE}, "gspo", GEO, {"eps_low": 0.2, "eps_high": 0.28}),
    Case("gspo-token", {"loss_type": "grpo", **SEQUENCE}, "gspo-token", GEO, {"eps_low": 0.2, "eps_high": 0.28}),
    Case("gspo, not the token ratio", {"loss_type": "grpo", **SEQUENCE}, "gspo", GEO, {"ratio": "grpo"}),
    Case("gspo, token mean", {"loss_type": "dapo", **SEQUENCE}, "gspo", {**GEO, "aggregate": "token-mean"},
         {"aggregate": "seq-mean-token-mean"}),
    Case("gspo, constant", {"loss_type": "dr_grpo", **SEQUENCE}, "gspo", {**GEO, "aggregate": "constant"},
         {"aggregate": "token-mean"}),
    Case("cispo, sequence ratio", {"loss_type": "cispo", **SEQUENCE, "epsilon_high": 1.05}, "cispo",
         {"cap": 1.05, "ratio": "gspo"}, {"ratio": "grpo"}),
    Case("sapo, sequence ratio", {"loss_type": "sapo", **SEQUENCE}, "sapo", {"ratio": "gspo"}, {"ratio": "grpo"}),
    # the second bound
    Case("two-sided", {"loss_type": "dapo", "epsilon": 0.1, "delta": 1.3}, "two-sided",
         {"eps_low": 0.1, "eps_high": 0.1, "delta": 1.3, "beta": 0.0, **NO_DROP}, {"delta": 4.0}),
    Case("two-sided is dual clip in the gradient", {"loss_type": "dapo", "epsilon": 0.1, "delta": 1.3}, "dual-clip",
         {"eps_low": 0.1, "eps_high": 0.1, "cap": 1.3}, {"cap": 3.0}),
    # KL to the reference, in the loss
    Case("k3", {"loss_type": "grpo", "beta": 0.3, **PLAIN_KL, **CLIP}, "grpo", {**OURS, "beta": 0.3, "kl": "k3"},
         {"kl": "k2"}, data=REF),
    Case("k3, corrected", {"loss_type": "grpo", "beta": 0.3, **CLIP}, "grpo",
         {**OURS, "beta": 0.3, "kl": "k3-corrected"}, {"kl": "k3"}, data=REF),
    Case("k3, corrected, token mean", {"loss_type": "dapo", "beta": 0.3, **CLIP}, "dapo",
         {**OURS, **NO_DROP, "beta": 0.3, "kl": "k3-corrected"}, {"beta": 0.2}, data=REF),
    Case("k3, constant", {"loss_type": "dr_grpo", "beta": 0.3, **PLAIN_KL, **CLIP}, "dr-grpo",
         {**OURS, "beta": 0.3, "kl": "k3"}, {"beta": 0.0}, data=REF),
    Case("k3, sequence ratio", {"loss_type": "grpo", "beta": 0.3, **PLAIN_KL, **SEQUENCE}, "gspo",
         {**GEO, "beta": 0.3, "kl": "k3"}, {"beta": 0.2}, data=REF),
    Case("k3 with cispo", {"loss_type": "cispo", "beta": 0.3, **PLAIN_KL, "epsilon_high": 1.2}, "cispo",
         {"cap": 1.2, "beta": 0.3, "kl": "k3"}, {"beta": 0.2}, data=REF),
    Case("gmpo with KL", {"epsilon": 0.2, "epsilon_high": 0.3, "beta": 0.3}, "gmpo",
         {"eps_low": 0.2, "eps_high": 0.3, "beta": 0.3, "kl": "k3"}, {"kl": "k2"}, data={**REF, "gmpo": True}),
    # selection of tokens and sequences
    Case("high-entropy tokens", {"loss_type": "dapo", "top_entropy_quantile": 0.4, **CLIP}, "high-entropy-tokens",
         {**OURS, **NO_DROP, "share": 0.4}, {"share": 0.5}),
    Case("high-entropy tokens, KL on all", {"loss_type": "dapo", "top_entropy_quantile": 0.4, "beta": 0.3, **PLAIN_KL,
         **CLIP}, "high-entropy-tokens", {**OURS, **NO_DROP, "share": 0.4, "beta": 0.3, "kl": "k3"}, {"share": 1.0},
         data=REF),
    Case("off-policy mask, by the old policy", {"loss_type": "grpo", "off_policy_mask_threshold": 0.05, **CLIP}, "grpo",
         {**OURS, "beta": 0.0, "correction": "opsm", "opsm_delta": 0.05}, {"opsm_delta": 0.5}, data={"seed": 8}),
    Case("off-policy mask, by the sampler", {"loss_type": "grpo", "off_policy_mask_threshold": 0.05, **CLIP}, "grpo",
         {**OURS, "beta": 0.0, "correction": "opsm", "opsm_delta": 0.05}, {"opsm_delta": 0.5}, data=MU),
    Case("deepseek-v3.2", {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.3, "off_policy_mask_threshold": 0.05},
         "deepseek-v3.2", {"delta": 0.05, "beta": 0.3}, {"kl": "k3"}, data={**BOTH, "old_is_mu": True}),
    # TRL's bonus is a mean over tokens, whatever the loss type's; ours is weighed like the loss.
    Case("entropy bonus", {"loss_type": "dapo", "entropy_coef": 0.3, **CLIP}, "dapo",
         {**OURS, **NO_DROP, "entropy_bonus": 0.3}, {"entropy_bonus": 0.2}),
    # geometric mean
    Case("gmpo", {"epsilon": 0.2, "epsilon_high": 0.3}, "gmpo", {"eps_low": 0.2, "eps_high": 0.3}, {"eps_high": 0.2},
         data={"gmpo": True}),
    # the sampler's log-probabilities differ from the trainer's: TRL's ratio of the two is given
    Case("vespo, tis", {"loss_type": "vespo"}, "vespo", {"correction": "tis", "correction_high": 1.2},
         {"correction_high": 1.5}, data={**MU, "kappa": "token_truncate"}),
    Case("vespo, mis-token", {"loss_type": "vespo"}, "vespo", {"correction": "mis-token", "correction_high": 1.2},
         {"correction": "tis"}, data={**MU, "kappa": "token_mask"}),
    Case("gspo, tis-sequence", {"loss_type": "grpo", **SEQUENCE}, "gspo",
         {**GEO, "correction": "tis-sequence", "correction_high": 1.2}, {"correction_high": 3.0},
         data={**MU, "kappa": "sequence_truncate"}),
    Case("sapo, tis", {"loss_type": "sapo"}, "sapo", {"correction": "tis", "correction_high": 1.2},
         {"correction_high": 1.5}, data={**MU, "kappa": "token_truncate"}),
    Case("cispo, off-policy mask", {"loss_type": "cispo", "epsilon_high": 1.2, "off_policy_mask_threshold": 0.05},
         "cispo", {"cap": 1.2, "correction": "opsm", "opsm_delta": 0.05}, {"opsm_delta": 0.5}, data=MU),
    # KL beside other surrogates
    Case("k3 with vespo", {"loss_type": "vespo", "beta": 0.3, **PLAIN_KL}, "vespo", {"beta": 0.3}, {"beta": 0.2},
         data=REF),
    Case("k3 with luspo", {"loss_type": "luspo", "beta": 0.3, **PLAIN_KL, **SEQUENCE}, "luspo", {**GEO, "beta": 0.3},
         {"beta": 0.2}, data=REF),
    Case("k3, corrected, with sapo", {"loss_type": "sapo", "beta": 0.3}, "sapo", {"beta": 0.3, "kl": "k3-corrected"},
         {"kl": "k3"}, data=REF),
    # what a batch may look like
    Case("tool tokens, grpo", {"loss_type": "grpo", **CLIP}, "grpo", {**OURS, "beta": 0.0},
         {"aggregate": "seq-mean-token-sum"}, data={"holes": True}),
    Case("tool tokens, dapo", {"loss_type": "dapo", **CLIP}, "dapo", {**OURS, **NO_DROP},
         {"eps_low": 0.9, "eps_high": 9.0}, data={"holes": True}),
    Case("tool tokens, vespo", {"loss_type": "vespo"}, "vespo", {}, {"lam_pos": 1.0}, data={"holes": True}),
    Case("tool tokens, gmpo", {"epsilon": 0.2, "epsilon_high": 0.3}, "gmpo", {"eps_low": 0.2, "eps_high": 0.3},
         {"eps_low": 0.4}, data={"gmpo": True, "holes": True}),
    Case("two-sided, sequence ratio", {"loss_type": "dapo", "delta": 1.1, **SEQUENCE}, "two-sided",
         {**GEO, "delta": 1.1, "beta": 0.0, "ratio": "gspo", **NO_DROP}, {"delta": 4.0}),
    Case("a clip that hardly acts", {"loss_type": "grpo", "epsilon": 10.0}, "grpo",
         {"eps_low": 10.0, "eps_high": 10.0, "beta": 0.0}, {"eps_low": 0.2}),
    Case("tool tokens, gspo", {"loss_type": "grpo", **SEQUENCE}, "gspo", GEO, {"aggregate": "token-mean"},
         data={"holes": True}),
    Case("advantages per token", {"loss_type": "dapo", **CLIP}, "dapo", {**OURS, **NO_DROP}, {"eps_low": 0.1},
         data={"advantages": "token"}),
    Case("on-policy, old left out", {"loss_type": "grpo"}, "grpo", {"beta": 0.0}, {"aggregate": "token-mean"},
         data={"old": False}),
]  # fmt: skip


def objective(preset: str, settings: dict) -> trew.Objective:
    """A preset with settings; ``ratio`` takes another preset's."""
    settings = dict(settings)
    ratio = settings.pop("ratio", None)
    made = trew.preset(preset, **settings)
    return made.replace(ratio=trew.preset(ratio).ratio) if ratio else made


def setting(case: Case) -> tuple:
    """The trainer of a case and the batch of it."""
    data = dict(case.data)
    parts = data.pop("parts", 1)
    settings = dict(case.peer)
    rows = 8 // parts
    if parts > 1:
        settings["gradient_accumulation_steps"] = parts
    kinds = {"kind": GMPOTrainer, "config": GMPOConfig} if data.get("gmpo") else {}
    made = trl_help.trainer(settings, rows=rows, **kinds)
    inputs = trl_help.batch(advantages=data.get("advantages", "sequence"), holes=data.get("holes", False))
    now = trl_help.forward(made.model, inputs)[0].detach()
    if data.get("old", True):
        inputs["old_per_token_logps"] = now + noise(data.get("seed", 3), *now.shape, size=0.3)
    if data.get("ref"):
        inputs["ref_per_token_logps"] = now + noise(4, *now.shape, size=0.4)
    if data.get("mu"):
        inputs["sampling_per_token_logps"] = now + noise(5, *now.shape, size=0.3)
    if "kappa" in data:
        inputs["importance_sampling_ratio"] = trl_s_ratio(inputs, data["kappa"], high=1.2)
        made.use_vllm = made.vllm_importance_sampling_correction = True  # what the engine itself is for is not needed
    if data.get("old_is_mu"):
        inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
    return made, inputs, parts


def trl_s_ratio(inputs: dict, mode: str, *, high: float) -> torch.Tensor:
    """pi_old / mu of tokens (B, T) or sequences (B, 1), cut or set to 0 above ``high``, as TRL's trainer does."""
    log_kappa = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * trl_help.loss_mask(inputs)
    kappa = (log_kappa.sum(1, keepdim=True) if mode.startswith("sequence") else log_kappa).exp()
    return kappa.clamp(max=high) if mode.endswith("truncate") else kappa.masked_fill(kappa > high, 0.0)


@parametrize(CASES)
def test_loss_and_gradient(case):
    made, inputs, parts = setting(case)
    loss, gradient = trl_help.theirs(made, inputs, parts=parts)
    our_loss, our_gradient, _ = trl_help.ours(objective(case.preset, case.ours), made.model, inputs)
    assert apart(our_gradient * case.scale, gradient) <= TOLERANCE
    assert same_value(our_loss * case.scale, loss)
    # The comparison can tell: the same with one setting changed is far off.
    _, wrong, _ = trl_help.ours(objective(case.preset, case.ours | case.wrong), made.model, inputs)
    assert apart(wrong * case.scale, gradient) >= WRONG


def test_constant_is_the_completion_limit():
    # Dr. GRPO divides by the longest completion allowed, not by the batch's width.
    made, inputs, _ = setting(Case("dr_grpo", {"loss_type": "dr_grpo"}, "dr-grpo", {}, {}))
    _, gradient = trl_help.theirs(made, inputs)
    ours = [
        trl_help.ours(trew.preset("dr-grpo"), made.model, inputs, advantages=inputs["advantages"], max_length=n)[1]
        for n in (MAX_LENGTH, inputs["completion_ids"].shape[1])
    ]
    assert apart(ours[0], gradient) <= TOLERANCE
    assert apart(ours[1], gradient) >= WRONG


def test_corrected_kl_of_a_sequence_ratio_is_where_we_differ():
    # TRL multiplies k3 by the ratio of the configured level, here s_i; ours and the paper's is the token's, whose
    # derivative is r d. What TRL has instead, per token: s (1 - e^-d) + s mean_t k3, the second from differentiating s.
    beta = 0.3
    case = Case("", {"loss_type": "grpo", "beta": beta, **SEQUENCE}, "gspo", {}, {}, data=REF)
    made, inputs, _ = setting(case)
    _, gradient = trl_help.theirs(made, inputs)
    mask = trl_help.loss_mask(inputs)
    lengths = mask.sum(1, keepdim=True)
    logprobs = trl_help.forward(made.model, inputs)[0]
    d = (logprobs - inputs["ref_per_token_logps"]).detach()
    k3 = torch.where(mask, torch.expm1(-d) + d, 0.0)
    log_r = torch.where(mask, (logprobs - inputs["old_per_token_logps"]).detach(), 0.0)
    s = (log_r.sum(1, keepdim=True) / lengths).exp()
    made.model.zero_grad()
    theirs_kl = s * -torch.expm1(-d) + s * k3.sum(1, keepdim=True) / lengths
    (torch.where(mask, beta * theirs_kl / lengths / len(mask) * logprobs, 0.0)).sum().backward()
    their_kl = trl_help.gradient(made.model)
    _, without, _ = trl_help.ours(trew.preset("gspo", **GEO), made.model, inputs)
    assert apart(without + their_kl, gradient) <= TOLERANCE
    _, corrected, _ = trl_help.ours(trew.preset("gspo", **GEO, beta=beta, kl="k3-corrected"), made.model, inputs)
    assert apart(corrected, gradient) >= WRONG


@dataclass(frozen=True)
class MeanOfSequence(Correction):
    """Another correction's mean over each sequence, for all its tokens."""

    rule: Correction

    def __call__(self, batch):
        c = self.rule(batch)
        return segment_mean(c, mask=batch.mask, ids=batch.sequence_ids, size=batch.size)[batch.sequence_ids]

    def equation(self):
        return f"mean over the sequence of {self.rule.equation()}"


@pytest.mark.parametrize(("mode", "correction"), [("token_truncate", "tis"), ("token_mask", "mis-token")])
def test_a_token_s_correction_of_a_sequence_ratio_is_where_we_differ(mode, correction):
    # TRL multiplies s_i A by c_t and differentiates s_i, so that every token gets the sequence's mean of c. Ours stays
    # with its token, as GSPO-token (and verl, tests/peers/test_verl_correction.py) has it. The value is the same.
    made, inputs, _ = setting(Case("", {"loss_type": "grpo", **SEQUENCE}, "", {}, {}, data={**MU, "kappa": mode}))
    loss, gradient = trl_help.theirs(made, inputs)
    ours = trew.preset("gspo", **GEO, correction=correction, correction_high=1.2)
    our_loss, our_gradient, _ = trl_help.ours(ours, made.model, inputs)
    assert same_value(our_loss, loss)
    assert apart(our_gradient, gradient) >= WRONG
    spread = ours.replace(correction=(MeanOfSequence(ours.correction[0]),))
    assert apart(trl_help.ours(spread, made.model, inputs)[1], gradient) <= TOLERANCE


def test_sign_matters():
    made, inputs, _ = setting(Case("dapo", {"loss_type": "dapo"}, "dapo", {}, {}))
    _, gradient = trl_help.theirs(made, inputs)
    ours = trl_help.ours(trew.preset("dapo", **NO_DROP), made.model, inputs, advantages=-inputs["advantages"])[1]
    assert apart(ours, gradient) >= 1


@pytest.mark.parametrize(("target", "sign"), [(9.0, 1), (0.1, -1)])
def test_adaptive_entropy_coefficient(target, sign):
    # The same rule moves the coefficient. TRL asks the step before whether to apply the bonus, we the rollouts at hand.
    settings = {"loss_type": "dapo", "use_adaptive_entropy": True, "entropy_target": target, "entropy_coef": 0.1,
                "entropy_coef_delta": 0.004}  # fmt: skip
    made, inputs, _ = setting(Case("adaptive", settings, "dapo", {}, {}))
    bonus = trew.preset("dapo", entropy_bonus=0.1, entropy_target=target, entropy_step=0.004).entropy_bonus
    mask = trl_help.loss_mask(inputs)
    for step in range(1, 4):
        trl_help.theirs(made, inputs)
        bonus = bonus.after(float(trl_help.forward(made.model, inputs)[1][mask].mean()))
        assert made.entropy_coef == pytest.approx(bonus.coefficient, abs=1e-9)
        assert bonus.coefficient == pytest.approx(0.1 + sign * 0.004 * step, abs=1e-9)


@pytest.mark.parametrize("shift", [0, 1])
def test_log_probabilities_are_trl_s(shift):
    made = trl_help.trainer({})
    inputs = trl_help.batch()
    ids, attention = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    logps, entropies, _ = made._get_per_token_logps_and_entropies(
        made.model, ids, attention, inputs["completion_ids"].shape[1], compute_entropy=True
    )
    mine = trl_help.forward(made.model, inputs)
    mask = trl_help.loss_mask(inputs)
    for theirs, ours in zip((logps, entropies), mine, strict=True):
        distance = apart(ours.roll(shift, dims=1)[mask], theirs[mask])
        assert distance <= TOLERANCE if shift == 0 else distance >= WRONG
