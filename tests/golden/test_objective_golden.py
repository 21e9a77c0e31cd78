"""Numbers worked by hand, or from the papers: any change here is a change of the mathematics."""

from __future__ import annotations

import math

import pytest
import torch

import trew
from trew.objective.advantage import group_centred, group_normalized
from trew.objective.aggregate import Constant, SequenceMeanTokenMean, TokenMean
from trew.objective.batch import TokenBatch
from trew.objective.divergence import kl_derivative, kl_value
from trew.objective.shaping import soft_overlong
from trew.objective.weight import Clip, clip_weight, triangular_weight

F64 = torch.float64


def one_group(right: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=F64)
    return rewards, torch.zeros(size, dtype=torch.int64)


@pytest.mark.parametrize(
    ("right", "size", "ddof", "std_eps", "high", "low"),
    [
        (4, 8, 1, 0.0, 0.9354143467, -0.9354143467),
        (4, 8, 1, 1e-4, 0.9352393794, -0.9352393794),
        (4, 8, 0, 0.0, 1.0, -1.0),
        (1, 8, 1, 0.0, 2.4748737342, -0.3535533906),
        (1, 8, 1, 1e-4, 2.4741739321, -0.3534534185),
        (1, 8, 0, 0.0, 2.6457513111, -0.3779644730),
        (7, 8, 1, 0.0, 0.3535533906, -2.4748737342),
        (1, 4, 1, 0.0, 1.5, -0.5),
        (1, 4, 1, 1e-4, 1.4997000600, -0.4999000200),
        (1, 4, 0, 0.0, 1.7320508076, -0.5773502692),
        (1, 2, 1, 0.0, 0.7071067812, -0.7071067812),
    ],
)
def test_group_normalized(right, size, ddof, std_eps, high, low):
    rewards, ids = one_group(right, size)
    got = group_normalized(rewards, group_ids=ids, ddof=ddof, std_eps=std_eps)
    assert got[0].item() == pytest.approx(high, abs=1e-9)
    assert got[-1].item() == pytest.approx(low, abs=1e-9)


@pytest.mark.parametrize(
    ("right", "size", "high", "low"), [(4, 8, 0.5, -0.5), (1, 8, 0.875, -0.125), (1, 4, 0.75, -0.25)]
)
def test_group_centred(right, size, high, low):
    rewards, ids = one_group(right, size)
    got = group_centred(rewards, group_ids=ids)
    assert (got[0].item(), got[-1].item()) == (high, low)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.7, 1e-9, -3.3, 1e6])
@pytest.mark.parametrize("size", [1, 2, 31])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equal_rewards_have_exactly_no_advantage(value, size, dtype):
    rewards = torch.full((size,), value, dtype=dtype)
    ids = torch.zeros(size, dtype=torch.int64)
    assert torch.equal(group_normalized(rewards, group_ids=ids), torch.zeros_like(rewards))
    assert torch.equal(group_centred(rewards, group_ids=ids), torch.zeros_like(rewards))


def test_nan_rewards_stay_out_of_the_statistics():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, math.nan], dtype=F64)
    got = group_normalized(rewards, group_ids=torch.zeros(5, dtype=torch.int64))
    assert got.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0.0])


# r, A, eps_low, eps_high -> value of the surrogate, w
CLIP_TABLE = [
    (1.8, 1, 0.2, 1.2, 0), (1.4, 1, 0.2, 1.2, 0), (1.25, 1, 0.2, 1.2, 0), (1.0, 1, 0.2, 1.0, 1), (0.9, 1, 0.2, 0.9, 1),
    (0.4, 1, 0.2, 0.4, 1), (1.8, -1, 0.2, -1.8, 1), (1.4, -1, 0.2, -1.4, 1), (1.25, -1, 0.2, -1.25, 1),
    (1.0, -1, 0.2, -1.0, 1), (0.9, -1, 0.2, -0.9, 1), (0.4, -1, 0.2, -0.8, 0),
    (1.8, 1, 0.28, 1.28, 0), (1.4, 1, 0.28, 1.28, 0), (1.25, 1, 0.28, 1.25, 1),
]  # fmt: skip


@pytest.mark.parametrize(("r", "a", "eps_high", "value", "w"), CLIP_TABLE)
def test_clip_table(r, a, eps_high, value, w):
    ratio, advantages = torch.tensor([r], dtype=F64), torch.tensor([a], dtype=F64)
    assert clip_weight(ratio, advantages=advantages, eps_high=eps_high).item() == w
    got = Clip(eps_high=eps_high).surrogate(ratio, advantages=advantages)
    assert got.item() == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("r", "a", "w"),
    [(1.14, 1, 0.75), (1.28 - 1e-12, 1, 0.5), (1.3, 1, 0), (0.7, 1, 1), (0.9, -1, 0.75), (0.8 + 1e-12, -1, 0.5),
     (0.7, -1, 0), (1.3, -1, 1), (1.0, 1, 1), (1.0, -1, 1)],
)  # fmt: skip
def test_triangular_table(r, a, w):
    got = triangular_weight(torch.tensor([r], dtype=F64), advantages=torch.tensor([a], dtype=F64))
    assert got.item() == pytest.approx(w, abs=1e-9)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_symmetric_triangle_ignores_the_sign(sign):
    ratio = torch.tensor([1.14, 0.9, 1.3, 0.7], dtype=F64)
    got = triangular_weight(ratio, advantages=torch.full((4,), sign, dtype=F64), symmetric=True)
    assert got.tolist() == pytest.approx([0.75, 0.75, 0.0, 0.0])


@pytest.mark.parametrize(
    ("p", "ref", "values", "slopes"),
    [
        (0.5, 0.25, (0.6931471806, 0.2402265070, 0.1931471806), (1.0, 0.6931471806, 0.5)),
        (0.25, 0.5, (-0.6931471806, 0.2402265070, 0.3068528194), (1.0, -0.6931471806, -1.0)),
    ],
)
def test_kl(p, ref, values, slopes):
    p, ref = torch.tensor([p], dtype=F64).log(), torch.tensor([ref], dtype=F64).log()
    for estimator, value, slope in zip(("k1", "k2", "k3"), values, slopes, strict=True):
        assert kl_value(p, ref_logprobs=ref, estimator=estimator).item() == pytest.approx(value, abs=1e-9)
        assert kl_derivative(p, ref_logprobs=ref, estimator=estimator).item() == pytest.approx(slope, abs=1e-9)


def test_k3_in_the_loss_pushes_along_the_forward_kl():
    """Expected logit gradients over three actions: k2 gives reverse KL, k3 forward KL, k1 nothing."""
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=F64).log()
    pi, ref = logits.exp(), torch.tensor([0.4, 0.4, 0.2], dtype=F64)
    score = torch.eye(3, dtype=F64) - pi  # d log pi(a) / d logits
    expected = {
        "k1": [0.0, 0.0, 0.0],
        "k2": [0.0989382026, -0.0938847718, -0.0050534308],
        "k3": [0.1, -0.1, 0.0],
    }
    for estimator, want in expected.items():
        slope = kl_derivative(pi.log(), ref_logprobs=ref.log(), estimator=estimator)
        assert ((pi * slope) @ score).tolist() == pytest.approx(want, abs=1e-8)


AGGREGATES = [
    (SequenceMeanTokenMean(), 0.0, 0.25, 1 / 12),
    (TokenMean(), 0.5, 0.125, 0.125),
    (Constant(), 0.2, 0.05, 0.05),
]


@pytest.mark.parametrize(("aggregate", "value", "first", "last"), AGGREGATES)
def test_aggregation(aggregate, value, first, last):
    """T = (2, 6), advantages -1 and +1 (token losses +1 and -1), L = 10; share of a token of each."""
    mask = torch.arange(6)[None] < torch.tensor([[2], [6]])
    batch = TokenBatch.from_padded(
        logprobs=torch.zeros(2, 6, dtype=F64), mask=mask, group_ids=torch.tensor([0, 0]),
        advantages=torch.tensor([-1.0, 1.0], dtype=F64), max_length=10,
    )  # fmt: skip
    out = trew.preset("grpo", beta=0.0).replace(aggregate=aggregate).loss(batch)
    assert out.loss.item() == pytest.approx(-value, abs=1e-12)
    assert -out.coefficients[0, 0].item() == pytest.approx(first, abs=1e-12)
    assert out.coefficients[1, 5].item() == pytest.approx(last, abs=1e-12)


def test_soft_overlong():
    lengths = torch.tensor([16384, 17408, 18432, 20480, 20481, 1])
    got = soft_overlong(lengths, max_length=20480, cache=4096)
    assert got.tolist() == [0.0, -0.25, -0.5, -1.0, -1.0, 0.0]
    assert soft_overlong(torch.tensor([90]), max_length=100, cache=20).item() == -0.5
