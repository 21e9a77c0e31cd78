"""On-policy distillation as part of an objective: numbers by hand, the formulas of other trainers, refusals."""

from __future__ import annotations

import math

import pytest
import torch

import trew
from oracle.single import column
from oracle.steps import F64, fresh, step_for
from trew import TokenBatch
from trew.errors import DataError
from trew.objective.distillation import Distillation, teacher_gap

NEAR = {"rtol": 1e-12, "atol": 1e-14}


def tokens(pi, teacher, *, old=None, **fields) -> TokenBatch:
    """Completions of one token with these probabilities, each a group."""
    return TokenBatch.from_padded(
        logprobs=column(pi).log().requires_grad_(), mask=torch.ones(len(pi), 1, dtype=torch.bool),
        group_ids=torch.arange(len(pi)), old_logprobs=None if old is None else column(old).log(),
        teacher_logprobs=column(teacher).log(), **fields,
    )  # fmt: skip


def test_by_hand_without_any_reward():
    """log(0.5 / 0.25) = 0.693147, halved by the coefficient; two tokens share the mean."""
    out = trew.preset("opd", distill=0.5).loss(tokens([0.25, 0.5], [0.5, 0.25]))
    assert out.advantages[:, 0].tolist() == pytest.approx([0.3465735903, -0.3465735903], abs=1e-9)
    assert out.coefficients[:, 0].tolist() == pytest.approx([0.1732867951, -0.1732867951], abs=1e-9)
    assert out.metrics["kl_teacher"] == pytest.approx((0.0, 2.0), abs=1e-9)


def test_a_teacher_that_agrees_teaches_exactly_nothing():
    for dtype in (torch.float32, F64):
        data = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
                for k, v in step_for("opd", 3).items()}  # fmt: skip
        out = trew.preset("opd").loss(TokenBatch.from_padded(**data | {"teacher_logprobs": data["old_logprobs"]}))
        assert not out.advantages.any()
        assert not out.coefficients.any()
        assert out.metrics["kl_teacher"][0] == 0


def test_the_policy_that_sampled_is_compared_and_not_the_current_one():
    """slime, NeMo-RL and Tinker: fixed through all updates on a step. The ratio 1.6 is clipped since A > 0."""
    batch = tokens([0.4, 0.2], [0.5, 0.5], old=[0.25, 0.25])
    out = trew.preset("opd").loss(batch)
    assert out.advantages[:, 0].tolist() == pytest.approx([math.log(2)] * 2, abs=1e-12)
    assert out.weights[:, 0].tolist() == [0.0, 1.0]
    prepared = trew.preset("opd").prepare(batch)
    moved = prepared.replace(logprobs=prepared.policy + 0.01)
    assert torch.equal(trew.preset("opd").loss(moved).batch.advantages, prepared.advantages)


@pytest.mark.parametrize("name", ["grpo", "reinforce-pp", "entropy-advantage", "gtpo", "rloo"])
def test_it_is_added_to_finished_advantages(name):
    """After baseline, scale and whitening, which would rescale a coefficient in nats."""
    data = step_for(name, 5)
    plain, both = (
        trew.preset(name, distill=c, dynamic_sampling=False).loss(TokenBatch.from_padded(**fresh(data)))
        for c in (0.0, 0.7)
    )
    gap = torch.where(data["mask"], data["teacher_logprobs"] - data["old_logprobs"], 0.0)
    torch.testing.assert_close(both.advantages, plain.advantages + 0.7 * gap, **NEAR)
    assert "  adjust     A_t <- A_t + 0.7 log(pi_teacher / pi_old)" in trew.preset(name, distill=0.7).equation()


def slime(advantages, student, teacher, c):
    """``apply_opd_kl_to_advantages``: the reverse KL of each token, taken off."""
    return advantages - c * (student - teacher)


def tinker(advantages, sampled, teacher, c, mask):
    """``incorporate_kl_penalty`` without discount: minus the reverse KL, added."""
    return advantages + -c * mask * ((sampled - teacher) * mask)


def nemo(previous, teacher, mask):
    """``OPDAdvantageEstimator``: the gap alone."""
    return (teacher - previous).detach() * mask


def test_the_formulas_of_other_trainers():
    data = step_for("grpo", 7)
    mask, old, teacher = data["mask"], data["old_logprobs"], data["teacher_logprobs"]
    base = trew.preset("grpo").loss(TokenBatch.from_padded(**fresh(data))).advantages
    got = trew.preset("grpo", distill=0.3).loss(TokenBatch.from_padded(**fresh(data))).advantages
    torch.testing.assert_close(got, slime(base, old, teacher, 0.3) * mask, **NEAR)
    torch.testing.assert_close(got, tinker(base, old, teacher, 0.3, mask.double()), **NEAR)
    alone = trew.preset("opd").loss(TokenBatch.from_padded(**fresh(data))).advantages
    torch.testing.assert_close(alone, nemo(old, teacher, mask), **NEAR)


def test_on_policy_it_is_the_gradient_of_the_kl_to_the_teacher():
    """The same as a k2 term with the teacher as the reference, and in expectation the gradient of KL(pi || teacher)."""
    data = step_for("grpo", 9, off_policy=0.0)
    data |= {"old_logprobs": data["logprobs"].detach()}
    distilled = trew.preset("grpo", beta=0.0, distill=0.4).loss(TokenBatch.from_padded(**fresh(data)))
    pulled = trew.preset("grpo", beta=0.4, kl="k2").loss(
        TokenBatch.from_padded(**fresh(data | {"ref_logprobs": data["teacher_logprobs"]}))
    )
    torch.testing.assert_close(distilled.coefficients, pulled.coefficients, **NEAR)

    logits = torch.tensor([0.3, -0.4, 1.1], dtype=F64, requires_grad=True)
    teacher = torch.tensor([0.2, 0.7, 0.1], dtype=F64).log()
    policy = logits.log_softmax(0)
    (want,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    gap = teacher_gap(policy, teacher_logprobs=teacher)
    expected = -sum(
        policy[a].exp().detach() * gap[a]
        * torch.autograd.grad(policy[a], logits, retain_graph=True)[0]
        for a in range(3)
    )  # fmt: skip
    torch.testing.assert_close(expected, want, **NEAR)


def test_a_completion_without_a_reward_learns_from_the_teacher_alone():
    rewards = torch.tensor([math.nan, 1.0], dtype=F64)
    alone = trew.preset("opd").loss(tokens([0.25, 0.5], [0.5, 0.25], rewards=rewards))
    assert (alone.coefficients != 0).all()
    assert alone.batch.denominators.tokens == 2
    # With rewards in the advantages, a missing one leaves the completion out, as everywhere.
    mixed = trew.preset("reinforce", distill=1.0).loss(tokens([0.25, 0.5], [0.5, 0.25], rewards=rewards))
    assert (mixed.coefficients[:, 0] != 0).tolist() == [False, True]


def test_what_is_missing_is_named():
    data = step_for("opd", 1)
    with pytest.raises(DataError, match=r"teacher_logprobs: got None; grpo needs it for its adjust: A_t <- A_t . 0.5"):
        trew.preset("grpo", distill=0.5).loss(TokenBatch.from_padded(**data | {"teacher_logprobs": None}))
    with pytest.raises(DataError, match=r"^rewards: got None; give rewards .* or teacher_logprobs"):
        TokenBatch.from_padded(**data | {"teacher_logprobs": None, "rewards": None, "step_rewards": None})
    with pytest.raises(ValueError, match="distill: got 0"):
        Distillation(0.0)


def test_given_advantages_are_final():
    data = step_for("grpo", 1) | {"advantages": torch.full((12,), 0.5, dtype=F64)}
    del data["rewards"]
    out = trew.preset("grpo", distill=0.5).loss(TokenBatch.from_padded(**data))
    assert set(out.advantages[data["mask"]].tolist()) == {0.5}
