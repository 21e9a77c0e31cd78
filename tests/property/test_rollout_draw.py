"""Any logits, any sampling settings, any uniform: the drawn token is the one that inverts the cut distribution."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import example, given, settings

from sampling_reference import cut_distribution, uniforms_that_draw
from trew.rollout.torch_engine.sampler import draw
from trew.types import Sampling


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.integers(2, 900),
    scale=st.sampled_from([0.01, 1.0, 5.0]),
    sampling=st.builds(
        Sampling,
        max_tokens=st.just(1),
        temperature=st.sampled_from([0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 1, 2, 20, 10_000]),
        top_p=st.sampled_from([1e-6, 0.3, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.01, 0.5]),
    ),
    uniform=st.floats(0, 1, exclude_max=True),
    native=st.booleans(),
)
@example(32250144, 228, 0.01, Sampling(max_tokens=1, temperature=0.3, top_k=20, top_p=0.3), 0.5, False)  # a tie
def test_a_draw_inverts_the_cut_distribution(seed, vocabulary, scale, sampling, uniform, native):
    logits = scale * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)) + 7.0
    out = draw(logits, uniform=torch.full((3,), uniform, dtype=torch.float64), sampling=sampling, native=native)
    for row in range(3):
        log_probs = logits[row].double().log_softmax(-1).numpy()
        p = cut_distribution(log_probs, sampling)
        token = int(out.tokens[row])
        # A value within rounding of a threshold may fall on either side; then the neighbouring cuts are right too.
        nearby = [
            cut_distribution(log_probs, _moved(sampling, f))[token] for f in (1 - 1e-5, 1.0, 1 + 1e-5)
        ]  # fmt: skip
        assert max(nearby) > 0
        assert any(abs(np.log(q) - float(out.sampling_logprobs[row])) < 1e-3 for q in nearby if q > 0)
        assert abs(float(out.logprobs[row]) - log_probs[token]) < 1e-4
        assert abs(float(out.entropies[row]) + float((np.exp(log_probs) * log_probs).sum())) < 1e-4
        if nearby[0] == nearby[1] == nearby[2]:
            cumulative = np.cumsum(p)
            assert cumulative[token] >= uniform - 1e-5
            assert cumulative[token] - p[token] <= uniform + 1e-5


def _moved(s: Sampling, factor: float) -> Sampling:
    return Sampling(
        max_tokens=1, temperature=s.temperature, top_k=s.top_k,
        top_p=min(1.0, s.top_p * factor) if s.top_p < 1 else 1.0, min_p=s.min_p * factor,
    )  # fmt: skip


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
    one, other = (draw(logits, uniform=uniforms, sampling=sampling, native=native) for native in (True, False))

    exact = logits.double().log_softmax(-1)
    entropies = -(exact.exp() * exact.nan_to_num(neginf=0)).sum(-1)
    for out in (one, other):
        assert out.finite.all()
        torch.testing.assert_close(out.entropies.double(), entropies, atol=1e-5, rtol=1e-5)
        chosen = exact.gather(1, out.tokens[:, None])[:, 0]
        torch.testing.assert_close(out.logprobs.double(), chosen, atol=1e-5, rtol=1e-6)
        if temperature == 0:
            assert out.tokens.tolist() == [row.tolist().index(max(row)) for row in logits]
            assert out.sampling_logprobs.tolist() == [0, 0, 0]
            continue
        drawn_from = (logits.double() / temperature).log_softmax(-1)
        chosen = drawn_from.gather(1, out.tokens[:, None])[:, 0]
        torch.testing.assert_close(out.sampling_logprobs.double(), chosen, atol=1e-5, rtol=1e-6)
        assert chosen.min() > -110  # the least that float32 holds: none of weight 0
        for row, token in enumerate(out.tokens.tolist()):
            low, high = uniforms_that_draw(token, logits[row].double().numpy(), temperature)
            assert low - 1e-6 <= uniform <= high + 1e-6
