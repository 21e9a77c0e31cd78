"""Numbers worked by hand, or from the papers: divergences, aggregation, and losses of their own kind."""

from __future__ import annotations

import math

import pytest
import torch

import trew
from oracle.single import column
from trew import TokenBatch
from trew.objective.preference import trpa_loss

F64 = torch.float64
NEAR = {"abs": 1e-9}


def divergence(kl: str, pi, ref, *, old=None) -> tuple[float, list[float]]:
    """Value (mean over the tokens) and derivative d per token: one-token completions without an advantage, beta = 1."""
    n = len(pi)
    old = pi if old is None else old
    batch = TokenBatch.from_padded(
        logprobs=column(pi).log().requires_grad_(), mask=torch.ones(n, 1, dtype=torch.bool), group_ids=torch.arange(n),
        advantages=torch.zeros(n, dtype=F64), old_logprobs=column(old).log(), ref_logprobs=column(ref).log(),
    )  # fmt: skip
    out = trew.preset("grpo", beta=1.0, kl=kl).loss(batch)
    return out.loss.item(), (-out.coefficients[:, 0] * n).tolist()


@pytest.mark.parametrize(
    ("kl", "pi", "ref", "value", "slope"),
    [("k1", 0.5, 0.25, 0.6931471806, 1.0), ("k2", 0.5, 0.25, 0.2402265070, 0.6931471806),
     ("k3", 0.5, 0.25, 0.1931471806, 0.5), ("k3-corrected", 0.5, 0.25, 0.1931471806, 0.6931471806),
     ("k3", 0.25, 0.5, 0.3068528194, -1.0), ("k1", 0.25, 0.5, -0.6931471806, 1.0),
     ("k2", 0.25, 0.5, 0.2402265070, -0.6931471806)],
)  # fmt: skip
def test_estimators_at_one_token(kl, pi, ref, value, slope):
    got, (d,) = divergence(kl, [pi], [ref])
    assert got == pytest.approx(value, **NEAR)
    assert d == pytest.approx(slope, **NEAR)


PI, REF, OLD = [0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.6, 0.2, 0.2]
REVERSE = [p * (math.log(p / q) - 0.0252671539) for p, q in zip(PI, REF, strict=True)]  # grad KL(pi || ref) exactly
FORWARD = [0.1, -0.1, 0.0]


def expected(kl: str, sampled_from: list[float]) -> tuple[float, list[float]]:
    """Value and logit gradient over three actions, in expectation over the policy that sampled."""
    value, gradient = 0.0, [0.0] * 3
    for action, chance in enumerate(sampled_from):
        v, (d,) = divergence(kl, [PI[action]], [REF[action]], old=[sampled_from[action]])
        value += chance * v
        for logit in range(3):
            gradient[logit] += chance * d * ((logit == action) - PI[logit])
    return value, gradient


def test_the_divergences_themselves():
    reverse = sum(p * math.log(p / q) for p, q in zip(PI, REF, strict=True))
    forward = sum(q * math.log(q / p) for p, q in zip(PI, REF, strict=True))
    assert (reverse, forward) == (pytest.approx(0.0252671539, **NEAR), pytest.approx(0.0258154085, **NEAR))
    assert pytest.approx([0.09893820, -0.09388477, -0.00505343], abs=1e-8) == REVERSE


@pytest.mark.parametrize(
    ("kl", "value", "gradient"),
    [("k1", 0.0252671539, [0.0, 0.0, 0.0]), ("k2", 0.0248624073, REVERSE), ("k3", 0.0252671539, FORWARD),
     ("k3-corrected", 0.0252671539, REVERSE)],
)  # fmt: skip
def test_what_each_estimator_pushes_along_on_policy(kl, value, gradient):
    got, slope = expected(kl, PI)
    assert got == pytest.approx(value, **NEAR)
    assert slope == pytest.approx(gradient, **NEAR)


@pytest.mark.parametrize(
    ("kl", "value", "gradient", "tolerance"),
    [("k3-corrected", 0.0252671539, REVERSE, 1e-9), ("k3", 0.0230163830, [0.0933333, -0.0826667, -0.0106667], 1e-7)],
)
def test_only_the_corrected_estimator_stays_true_off_policy(kl, value, gradient, tolerance):
    got, slope = expected(kl, OLD)
    assert got == pytest.approx(value, **NEAR)
    assert slope == pytest.approx(gradient, abs=tolerance)


# ---------------------------------------------------------------- aggregation


@pytest.mark.parametrize(
    ("aggregate", "value", "first", "last"),
    [("seq-mean-token-mean", 0.0, 1 / 4, 1 / 12), ("token-mean", -0.5, 1 / 8, 1 / 8),
     ("seq-mean-token-sum", -2.0, 0.5, 0.5), ("constant", -0.2, 0.05, 0.05),
     ("prompt-mean-token-mean", -0.5, 1 / 8, 1 / 8)],
)  # fmt: skip
def test_aggregation(aggregate, value, first, last):
    """Two completions of 2 and 6 tokens with token losses +1 and -1, longest allowed 10."""
    mask = torch.arange(6)[None] < torch.tensor([[2], [6]])
    batch = TokenBatch.from_padded(
        logprobs=torch.full((2, 6), -1.0, dtype=F64, requires_grad=True), mask=mask, group_ids=torch.tensor([0, 0]),
        advantages=torch.tensor([-1.0, 1.0], dtype=F64), max_length=10,
    )  # fmt: skip
    out = trew.preset("grpo", beta=0.0, aggregate=aggregate).loss(batch)
    assert out.loss.item() == pytest.approx(value, abs=1e-12)
    assert -out.coefficients[0, 0].item() == pytest.approx(first, abs=1e-12)
    assert out.coefficients[1, 5].item() == pytest.approx(last, abs=1e-12)


def test_local_token_mean_with_micro_batches_of_one_is_the_sequence_mean():
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(5)[None] < torch.tensor([[2], [5], [1], [4]])
    fields = {
        "logprobs": torch.full((4, 5), -1.0, dtype=F64, requires_grad=True), "mask": mask,
        "group_ids": torch.zeros(4, dtype=torch.int64), "advantages": torch.randn(4, generator=g, dtype=F64),
    }  # fmt: skip
    local = trew.preset("token-mean-local", microbatch=1).loss(TokenBatch.from_padded(**fields))
    mean = trew.preset("grpo", beta=0.0).loss(TokenBatch.from_padded(**fields))
    assert torch.allclose(local.coefficients, mean.coefficients, rtol=1e-12)


# ---------------------------------------------------------------- the rest


def test_kimi():
    """tau = 0.1, log-ratio of the whole completion 0.2: C = A - tau Z."""
    old = torch.full((2, 2), -1.0, dtype=F64)
    logprobs = old + torch.tensor([[0.3, -0.1], [0.15, 0.05]], dtype=F64)
    batch = TokenBatch.from_padded(
        logprobs=logprobs.requires_grad_(), mask=torch.ones(2, 2, dtype=torch.bool), group_ids=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 0.0], dtype=F64), old_logprobs=old,
    )  # fmt: skip
    got = trew.preset("kimi").loss(batch).coefficients * 2
    assert got.tolist() == [pytest.approx([0.48, 0.48], **NEAR), pytest.approx([-0.52, -0.52], **NEAR)]


COVARIANCE = [0.95, -0.95, -0.95, 0.95]  # of A = (1, 1, -1, -1) and l = (-0.1, -2, -0.1, -2)


def covariance_batch() -> TokenBatch:
    l = column([-0.1, -2.0, -0.1, -2.0])
    return TokenBatch.from_padded(
        logprobs=l.requires_grad_(), mask=torch.ones(4, 1, dtype=torch.bool), group_ids=torch.zeros(4).long(),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=F64), old_logprobs=l.detach() - 0.1,
    )  # fmt: skip


@pytest.mark.parametrize(("low", "high"), [(0.94, 0.96), (-0.96, -0.94), (0.95 + 1e-9, 2.0), (-1.0, 1.0)])
def test_clip_cov_silences_tokens_by_covariance(low, high):
    settings = {"share": 1.0, "cov_low": low, "cov_high": high}
    got = trew.preset("clip-cov", **settings).loss(covariance_batch()).coefficients[:, 0]
    silent = [low < cov < high for cov in COVARIANCE]
    assert [value == 0 for value in got.tolist()] == silent


@pytest.mark.parametrize(("share", "drawn"), [(2e-4, 1), (0.02, 2), (0.5, 50)])
def test_clip_cov_draws_a_share_of_all_tokens(share, drawn):
    """max(1, floor(share N)) of the 100 tokens, from those inside the band only."""
    g = torch.Generator().manual_seed(0)
    l, a = -2 * torch.rand(100, 1, generator=g, dtype=F64), torch.randn(100, generator=g, dtype=F64)
    batch = TokenBatch.from_padded(
        logprobs=l.requires_grad_(), mask=torch.ones(100, 1, dtype=torch.bool), group_ids=torch.arange(100),
        advantages=a, old_logprobs=l.detach(),
    )  # fmt: skip
    covariance = ((a - a.mean()) * (l.detach()[:, 0] - l.mean().detach())).numpy()
    for low, high in ((0.0, 0.5), (0.05, 0.1)):
        settings = {"share": share, "cov_low": low, "cov_high": high}
        out = trew.preset("clip-cov", **settings).loss(batch)
        silent = out.weights[:, 0] == 0
        inside = (covariance > low) & (covariance < high)
        assert int(silent.sum()) == min(drawn, int(inside.sum()))
        assert inside[silent.numpy()].all()
        assert torch.equal(trew.preset("clip-cov", **settings).loss(batch).weights, out.weights)


def test_trpa():
    """beta = 0.1, c = 2.5, z = (0.2, -0.1): h = 0.075; tokens share their completion's coefficient."""
    ref = torch.full((2, 2), -1.0, dtype=F64)
    l = (ref + torch.tensor([[0.3, 0.1], [-0.1, 0.0]], dtype=F64)).requires_grad_()
    batch = TokenBatch.from_padded(
        logprobs=l, mask=torch.tensor([[True, True], [True, False]]), group_ids=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 0.0], dtype=F64), ref_logprobs=ref,
    )  # fmt: skip
    loss = trpa_loss(batch, levels=torch.tensor([1, 2]))
    assert loss.item() == pytest.approx(0.6563501408, **NEAR)
    (gradient,) = torch.autograd.grad(loss, l)
    size = 0.1203146960
    assert gradient.tolist() == [pytest.approx([-size / 2] * 2, **NEAR), pytest.approx([size, 0.0], **NEAR)]


@pytest.mark.parametrize(("mean", "acts", "after"), [(0.1, True, 0.035), (0.3, False, 0.025)])
def test_adaptive_entropy_bonus(mean, acts, after):
    """Acts while the mean entropy is at most the target of 0.2, and moves by 0.005 after the step."""
    entropies = torch.full((2, 1), mean, dtype=F64, requires_grad=True)
    batch = TokenBatch.from_padded(
        logprobs=column([-1.0, -2.0]).requires_grad_(), mask=torch.ones(2, 1, dtype=torch.bool),
        group_ids=torch.tensor([0, 0]), rewards=torch.tensor([1.0, 0.0], dtype=F64), entropies=entropies,
    )  # fmt: skip
    objective = trew.preset("dapo", entropy_bonus=0.03, entropy_target=0.2)
    loss = objective.loss(batch).loss
    plain = trew.preset("dapo").loss(batch).loss
    assert (loss - plain).item() == pytest.approx(-0.03 * mean if acts else 0.0, abs=1e-12)
    assert objective.entropy_bonus.after(mean).coefficient == pytest.approx(after)


def test_kl_cov_pulls_back_the_tokens_with_the_largest_covariance():
    batch = covariance_batch()
    got = (trew.preset("kl-cov", share=0.5, penalty=0.3).loss(batch).coefficients[:, 0] * 4).tolist()
    r = math.exp(0.1)
    assert got == pytest.approx([r - 0.3, r, -r, -r - 0.3])
