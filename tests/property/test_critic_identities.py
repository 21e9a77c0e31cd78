"""What generalised advantages and the critic's loss must be for all steps, whatever the critic says."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trew
from oracle.steps import fresh, rows_of, step_for
from trew import TokenBatch
from trew.objective.gae import GAE
from trew.objective.value import ValueLoss, value_losses

F64 = torch.float64
NEAR = {"rtol": 1e-9, "atol": 1e-12}


@st.composite
def steps(draw: st.DrawFn) -> dict:
    return step_for(
        "ppo", draw(st.integers(0, 2**31)), groups=draw(st.integers(1, 3)), size=draw(st.integers(1, 4)),
        width=draw(st.integers(1, 7)), nan=draw(st.integers(0, 2)), empty=draw(st.integers(0, 1)),
        layout=draw(st.sampled_from(["left", "right", "holes"])), rewards=(0.0, 0.5, 1.0), anywhere=True,
    )  # fmt: skip


def bare(**settings) -> trew.Objective:
    """Generalised advantages without whitening, in REINFORCE's place for its baseline."""
    return trew.preset("reinforce", **settings)


def estimated(data: dict, advantage: GAE, **settings) -> trew.LossOutput:
    return bare(**settings).replace(advantage=advantage).loss(TokenBatch.from_padded(**fresh(data)))


@settings(max_examples=25, deadline=None)
@given(data=steps(), beta=st.sampled_from([0.0, 0.1]))
def test_without_a_critic_and_without_decay_it_is_reinforce_with_its_reward_to_go(data, beta):
    blind = data | {"values": torch.zeros_like(data["values"])}
    got = estimated(blind, GAE(1.0, 1.0), beta=beta)
    wanted = bare(beta=beta, kl_place="to-go").loss(TokenBatch.from_padded(**fresh(data)))
    torch.testing.assert_close(got.coefficients, wanted.coefficients, **NEAR)


@settings(max_examples=25, deadline=None)
@given(data=steps())
def test_without_decay_an_advantage_is_the_return_less_the_value(data):
    out = estimated(data, GAE(1.0, 1.0))
    mask = data["mask"] & ~data["rewards"].isnan()[:, None]
    wanted = torch.where(mask, data["rewards"].nan_to_num(0.0)[:, None] - data["values"], 0.0)
    torch.testing.assert_close(out.advantages, wanted, **NEAR)
    # What the critic learns is then the reward alone.
    returns = out.batch.unpack(out.batch.returns)
    torch.testing.assert_close(returns, torch.where(mask, data["rewards"].nan_to_num(0.0)[:, None], 0.0), **NEAR)


@settings(max_examples=25, deadline=None)
@given(data=steps(), lam=st.floats(0.0, 1.0))
def test_a_critic_that_knows_the_rewards_leaves_no_advantage(data, lam):
    known = data | {"values": data["rewards"].nan_to_num(0.0)[:, None].expand_as(data["values"])}
    torch.testing.assert_close(estimated(known, GAE(1.0, lam)).advantages, torch.zeros_like(known["values"]), **NEAR)


@settings(max_examples=25, deadline=None)
@given(data=steps(), gamma=st.floats(0.5, 1.0), lam=st.floats(0.0, 1.0))
def test_each_advantage_follows_from_the_next(data, gamma, lam):
    """A_t = delta_t + gamma lam A_(t+1): the definition, token by token, over sampled tokens only."""
    out = estimated(data, GAE(gamma, lam))
    for row in (data["mask"].any(1) & ~data["rewards"].isnan()).nonzero().flatten().tolist():
        at = data["mask"][row].nonzero().flatten()
        A, V = out.advantages[row, at], torch.cat([data["values"][row, at], torch.zeros(1, dtype=F64)])
        reward = torch.zeros(len(at), dtype=F64)
        reward[-1] = data["rewards"][row]
        following = torch.cat([A[1:], torch.zeros(1, dtype=F64)])
        torch.testing.assert_close(A, reward + gamma * V[1:] - V[:-1] + gamma * lam * following, **NEAR)


@settings(max_examples=25, deadline=None)
@given(data=steps(), loud=st.floats(-1e6, 1e6), which=st.integers(0, 100))
def test_values_of_another_sequence_never_matter(data, loud, which):
    """Neither for advantages before whitening nor for what the critic learns; nor do values outside the mask."""
    row = which % len(data["mask"])
    other = data | {"values": torch.where(data["mask"], data["values"], loud)}
    other["values"][row] = loud
    a, b = estimated(data, GAE()), estimated(other, GAE())
    rest = torch.arange(len(data["mask"])) != row
    assert torch.equal(a.advantages[rest], b.advantages[rest])
    returns = [out.batch.unpack(out.batch.returns)[rest] for out in (a, b)]
    assert torch.equal(*returns)


@settings(max_examples=15, deadline=None)
@given(data=steps(), seed=st.integers(0, 1000))
def test_the_order_of_sequences_does_not_matter(data, seed):
    order = torch.randperm(len(data["mask"]), generator=torch.Generator().manual_seed(seed)).tolist()
    a, b = estimated(data, GAE()), estimated(rows_of(data, order), GAE())
    assert torch.equal(a.advantages[order], b.advantages)


@settings(max_examples=25, deadline=None)
@given(data=steps(), critic_lam=st.floats(0.0, 1.0), alpha=st.floats(0.05, 2.0))
def test_the_critic_and_each_length_may_have_a_lam_of_their_own(data, critic_lam, alpha):
    out = estimated(data, GAE(1.0, 0.5, critic_lam=critic_lam, length_alpha=alpha))
    critic = estimated(data, GAE(1.0, critic_lam))
    torch.testing.assert_close(out.batch.returns, critic.batch.returns, **NEAR)
    for row, length in enumerate(data["mask"].sum(1).tolist()):
        lam = max(0.0, 1 - 1 / (alpha * length)) if length else 0.0
        alone = estimated(rows_of(data, [row]), GAE(1.0, lam))
        torch.testing.assert_close(out.advantages[row], alone.advantages[0], **NEAR)


@settings(max_examples=25, deadline=None)
@given(data=steps())
def test_whitened_advantages_add_up_to_nothing(data):
    out = trew.preset("ppo").loss(TokenBatch.from_padded(**fresh(data)))
    A = out.advantages[data["mask"]]
    assert abs(float(A.sum())) < 1e-8 * max(len(A), 1)
    if A.any():
        own = out.batch.mask  # without the sequences whose reward is NaN
        assert float(out.batch.advantages[own].var()) - 1 < 1e-9


@settings(max_examples=25, deadline=None)
@given(data=steps(), seed=st.integers(0, 1000), clip=st.floats(0.05, 2.0), cut=st.integers(0, 100))
def test_the_critic_s_loss_adds_up_however_a_step_is_cut(data, seed, clip, cut):
    batch = trew.preset("ppo").prepare(TokenBatch.from_padded(**fresh(data)))
    v = batch.values + torch.randn(len(batch.mask), generator=torch.Generator().manual_seed(seed), dtype=F64)
    rule = ValueLoss(clip)
    loss, slopes = rule(v, batch=batch)
    at = cut % (batch.size + 1)
    total = torch.zeros((), dtype=F64)
    for rows in (torch.arange(at), torch.arange(at, batch.size)):
        of = torch.isin(batch.sequence_ids, rows)
        part, slope = rule(v[of], batch=batch.select(rows))
        total = total + part
        assert torch.equal(slope, slopes[of])
    torch.testing.assert_close(total, loss, **NEAR)
    assert (slopes[~batch.mask] == 0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=5), st.floats(0.05, 2.0))
def test_the_slope_of_the_critic_s_loss_is_its_derivative(rows, clip):
    v, R, old = torch.tensor(rows, dtype=F64).unbind(1)
    # On the edge of the clip, and where both terms are equal, there is no derivative.
    bounded = v.clamp(old - clip, old + clip)
    smooth = ((v - old).abs() - clip).abs() > 1e-3
    smooth &= (((bounded - R) ** 2 - (v - R) ** 2).abs() > 1e-3) | (bounded == v)
    h = 1e-6
    ends = [value_losses(v + s * h, returns=R, values=old, clip=clip)[0] for s in (1, -1)]
    slope = value_losses(v, returns=R, values=old, clip=clip)[1]
    torch.testing.assert_close(slope[smooth], ((ends[0] - ends[1]) / (2 * h))[smooth], rtol=1e-5, atol=1e-6)
