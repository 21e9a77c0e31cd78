"""Drawing tokens: the distribution of the draws, their numbers, and rows at the edge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny
from trew.rollout.torch_engine import sampler
from trew.rollout.torch_engine.plain import ForwardDecoder
from trew.rollout.torch_engine.sampler import row_key, uniforms
from trew.types import Sampling


@pytest.fixture
def draw():
    """What is tested; a backend has its own."""
    return sampler.draw


def splitmix64(state: int) -> int:
    """The published algorithm in Python integers, on unsigned 64-bit words."""
    word = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return z ^ (z >> 31)


def test_uniforms_are_splitmix64():
    keys = [row_key(seed, "uid", s) for seed in range(3) for s in range(5)]
    each, positions = torch.tensor(keys).repeat_interleave(7), torch.arange(7).repeat(len(keys))
    got = uniforms(each, positions).view(-1, 7)
    assert torch.equal(got, uniforms(torch.tensor(keys)[:, None], torch.arange(7)))
    for i, key in enumerate(keys):
        for position in range(7):
            state = (key + position * 0x9E3779B97F4A7C15) % (1 << 64)
            assert got[i, position].item() == (splitmix64(state) >> 11) * 2.0**-53


def test_uniforms_are_uniform_and_uncorrelated():
    keys = torch.tensor([row_key(0, f"p{i}", 0) for i in range(200)])
    u = uniforms(keys[:, None], torch.arange(100)).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u.ravel(), "uniform").pvalue > 0.01
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("changes", "kept"),
    [({}, 8), ({"temperature": 0.5}, 8), ({"top_k": 3}, 3), ({"top_p": 0.6}, 2), ({"min_p": 0.5}, 3)],
)
def test_frequencies_follow_the_distribution(changes, kept, draw):
    p = np.array([0.02, 0.4, 0.03, 0.22, 0.01, 0.2, 0.07, 0.05])
    sampling = Sampling(max_tokens=1, **changes)
    expected = p ** (1 / sampling.temperature)
    expected[np.argsort(-expected)[kept:]] = 0
    expected /= expected.sum()
    count = 20_000
    keys = torch.tensor([row_key(5, "p", i) for i in range(count)])
    out = draw(
        torch.tensor(p).log().float().expand(count, -1) + 3.0,
        uniform=uniforms(keys, torch.zeros_like(keys)),
        sampling=sampling,
    )
    seen = np.bincount(out.tokens.numpy(), minlength=8)
    assert (seen[expected == 0] == 0).all()
    alive = expected > 0
    assert stats.chisquare(seen[alive], expected[alive] * count).pvalue > 0.001
    np.testing.assert_allclose(out.logprobs.numpy(), np.log(expected[out.tokens]), atol=1e-5)
    np.testing.assert_allclose(out.policy_logprobs.numpy(), np.log(p[out.tokens]), atol=1e-5)
    np.testing.assert_allclose(out.entropies.numpy(), -(p * np.log(p)).sum(), atol=1e-5)


@pytest.mark.parametrize("vocabulary", [3, 255, 256, 257, 1000])
def test_inverse_of_the_cumulative_distribution(vocabulary, draw):
    logits = torch.randn(50, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    u = torch.linspace(0, 1 - 1e-9, 50, dtype=torch.float64)
    got = draw(logits, uniform=u, sampling=Sampling(max_tokens=1)).tokens
    cumulative = logits.double().softmax(-1).cumsum(-1)
    low = torch.where(got > 0, cumulative.gather(1, (got - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    high = cumulative.gather(1, got[:, None])[:, 0]
    assert (u >= low - 1e-6).all()
    assert (u <= high + 1e-6).all()


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("changes", [{}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.9}, {"temperature": 0.01}])
def test_tokens_of_probability_zero_are_never_drawn(u, changes, draw):
    logits = torch.full((1, 700), -torch.inf)
    logits[0, 300], logits[0, 301] = 2.0, 1.0
    sampling = Sampling(max_tokens=1, **changes)
    out = draw(logits, uniform=torch.tensor([u], dtype=torch.float64), sampling=sampling)
    assert out.tokens.item() in ((300,) if changes else (300, 301))
    assert out.finite.all()
    p = 1 / (1 + np.exp(-1))
    assert out.entropies.item() == pytest.approx(-(p * np.log(p) + (1 - p) * np.log(1 - p)), abs=1e-5)


def test_top_p_needs_many_tokens_when_the_distribution_is_flat(draw):
    logits = 1e-4 * torch.arange(5000.0).flip(0)[None]
    sampling = Sampling(max_tokens=1, top_p=0.9)
    p = logits.double().softmax(-1)[0]
    kept = int((p.cumsum(0) < 0.9).sum()) + 1
    assert 256 < kept < 5000
    for u, token in ((0.0, 0), (1 - 2**-53, kept - 1)):
        out = draw(logits, uniform=torch.tensor([u], dtype=torch.float64), sampling=sampling)
        assert abs(out.tokens.item() - token) <= 1
        assert out.logprobs.item() == pytest.approx(float((p[token] / p[:kept].sum()).log()), abs=1e-4)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_p": 0.9}])
@pytest.mark.parametrize("vocabulary", [1, 2, 17, 300])
def test_rows_that_are_not_finite_are_marked_and_others_are_not(vocabulary, changes, draw):
    good = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(0))
    rows = [good[0], torch.full((vocabulary,), -INF), torch.full((vocabulary,), NAN)]
    for bad in (NAN, INF):
        for at in (0, vocabulary // 2, vocabulary - 1):
            rows.append(torch.zeros(vocabulary).index_fill(0, torch.tensor([at]), bad))
    rows.append(good[1])
    sampling = Sampling(max_tokens=1, **changes)

    def drawn(logits):
        uniform = torch.full((len(logits),), 0.5, dtype=torch.float64)
        return draw(logits, uniform=uniform, sampling=sampling)

    out, alone = drawn(torch.stack(rows)), drawn(good)
    assert out.finite.tolist() == [True, *[False] * (len(rows) - 2), True]
    assert out.tokens.min() >= 0
    assert out.tokens.max() < vocabulary
    assert out.tokens[[0, -1]].tolist() == alone.tokens.tolist()
    assert out.policy_logprobs[[0, -1]].tolist() == alone.policy_logprobs.tolist()
    assert alone.policy_logprobs.isfinite().all()


class NoFloat64(TorchDispatchMode):
    """As on Apple GPUs: "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if isinstance(t, torch.Tensor) and (t.device.type, t.dtype) == ("mps", torch.float64):
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return found


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_apple_gpus_which_have_no_float64_draw_on_the_cpu(temperature, monkeypatch):
    """The first draw ended a run there in a TypeError; device = 'auto' takes such a GPU."""
    moved = torch.Tensor.to

    def to(self, where, *more, **named):
        # No such device is here: its tensors have shapes alone, and none can be moved to it.
        there = where == torch.device("mps")
        return self.new_empty(self.shape, device=where) if there else moved(self, where, *more, **named)

    monkeypatch.setattr(torch.Tensor, "to", to)
    decoder = ForwardDecoder(tiny.model(), slots=1, max_tokens=1)
    with FakeTensorMode(), NoFloat64():
        logits, keys = torch.empty(3, 300, device="mps"), torch.empty(3, dtype=torch.int64, device="mps")
        sampling = Sampling(max_tokens=1, temperature=temperature)
        found = decoder.draw(logits, keys=keys, positions=keys, sampling=sampling)
    assert {t.device.type for t in (found.tokens, found.floats, found.finite)} == {"mps"}
    assert (found.tokens.shape, found.floats.shape) == ((3,), (3, 3))
