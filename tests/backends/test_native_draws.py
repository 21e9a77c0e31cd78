"""Draws by the compiled kernel: all that holds for torch's, and the same tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling_reference import uniforms_that_draw
from test_rollout_sampler import (  # noqa: F401 (the same tests, of another draw)
    test_frequencies_follow_the_distribution,
    test_inverse_of_the_cumulative_distribution,
    test_rows_that_are_not_finite_are_marked_and_others_are_not,
    test_tokens_of_probability_zero_are_never_drawn,
)
from trew.backends.cpu import sampling as compiled
from trew.backends.cpu.build import library
from trew.rollout.torch_engine import sampler
from trew.rollout.torch_engine.sampler import row_key
from trew.types import Sampling

pytestmark = pytest.mark.skipif(isinstance(library(), str), reason="there is no C compiler")


@pytest.fixture
def draw():
    return compiled.take


def test_uniforms_are_those_of_torch():
    keys = torch.tensor([row_key(seed, "uid", s) for seed in range(3) for s in range(5)]).repeat_interleave(7)
    positions = torch.arange(7).repeat(15)
    made = compiled.uniforms(keys, positions)
    assert made is not None
    assert torch.equal(made, sampler.uniforms(keys, positions))
    assert compiled.uniforms(keys[:, None], positions) is None


def test_the_compiled_kernel_draws_where_it_can(monkeypatch):
    calls, kernel = [], compiled.draw
    monkeypatch.setattr(compiled, "draw", lambda *args, **kwargs: calls.append(args) or kernel(*args, **kwargs))
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))

    def used(logits, **changes):
        calls.clear()
        uniform = torch.full((3,), 0.5, dtype=torch.float64)
        assert compiled.take(logits, uniform=uniform, sampling=Sampling(max_tokens=1, **changes)).finite.all()
        return bool(calls)

    assert used(logits)
    assert used(logits, temperature=0.0)
    assert used(logits, temperature=0.0, top_k=3)  # the best one is never cut
    assert used(logits, temperature=0.7)
    assert not used(logits, top_k=3)
    assert not used(logits, top_p=0.9)
    assert not used(logits, min_p=0.1)
    assert not used(logits.bfloat16())
    assert not used(logits[:, ::2])
    monkeypatch.setattr(compiled, "library", lambda: "there is no C compiler")
    assert not used(logits)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kernel_gives_the_same_bits_for_any_batch_and_threads(temperature):
    logits = torch.randn(9, 3001, generator=torch.Generator().manual_seed(1))
    u = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    before, seen = torch.get_num_threads(), []
    try:
        for threads, size in ((1, 9), (2, 9), (3, 4), (1, 1)):
            torch.set_num_threads(threads)
            parts = [
                compiled.draw(logits[i : i + size], uniform=u[i : i + size], temperature=temperature)
                for i in range(0, 9, size)
            ]
            seen.append((torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], dim=1)))
    finally:
        torch.set_num_threads(before)
    for tokens, floats in seen[1:]:
        assert torch.equal(tokens, seen[0][0])
        assert torch.equal(floats, seen[0][1])


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.one_of(st.integers(1, 900), st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 271, 512, 513, 4097])),
    scale=st.sampled_from([0.0, 0.01, 1.0, 5.0, 100.0, 1e30]),
    whole=st.booleans(),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    temperature=st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.7]),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 5e-324, 1 - 2**-53])),
)
def test_the_compiled_draw_is_that_of_torch(seed, vocabulary, scale, whole, masked, temperature, uniform):
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(3, vocabulary, generator=random) + 7.0
    logits = logits.round() if whole else logits  # equal ones
    hidden = torch.rand(3, vocabulary, generator=random) < masked
    hidden[:, int(torch.randint(vocabulary, (1,), generator=random))] = False
    logits = logits.masked_fill(hidden, -torch.inf)
    sampling = Sampling(max_tokens=1, temperature=temperature)
    uniforms = torch.full((3,), uniform, dtype=torch.float64)
    one, other = (of(logits, uniform=uniforms, sampling=sampling) for of in (compiled.take, sampler.draw))

    exact = logits.double().log_softmax(-1)
    entropies = -(exact.exp() * exact.nan_to_num(neginf=0)).sum(-1)
    for out in (one, other):
        assert out.finite.all()
        torch.testing.assert_close(out.entropies.double(), entropies, atol=1e-5, rtol=1e-5)
        chosen = exact.gather(1, out.tokens[:, None])[:, 0]
        torch.testing.assert_close(out.policy_logprobs.double(), chosen, atol=1e-5, rtol=1e-6)
        if temperature == 0:
            assert out.tokens.tolist() == [row.tolist().index(max(row)) for row in logits]
            assert out.logprobs.tolist() == [0, 0, 0]
            continue
        drawn_from = (logits.double() / temperature).log_softmax(-1)
        chosen = drawn_from.gather(1, out.tokens[:, None])[:, 0]
        torch.testing.assert_close(out.logprobs.double(), chosen, atol=1e-5, rtol=1e-6)
        assert chosen.min() > -110  # the least that float32 holds: none of weight 0
        for row, token in enumerate(out.tokens.tolist()):
            low, high = uniforms_that_draw(token, logits[row].double().numpy(), temperature)
            assert low - 1e-6 <= uniform <= high + 1e-6
