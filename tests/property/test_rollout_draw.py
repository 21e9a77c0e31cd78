"""Any logits, any sampling settings, any uniform: the drawn token is the one that inverts the cut distribution."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import example, given, settings

from sampling_reference import cut_distribution
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
)
@example(32250144, 228, 0.01, Sampling(max_tokens=1, temperature=0.3, top_k=20, top_p=0.3), 0.5)  # a tie
def test_a_draw_inverts_the_cut_distribution(seed, vocabulary, scale, sampling, uniform):
    logits = scale * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)) + 7.0
    out = draw(logits, uniform=torch.full((3,), uniform, dtype=torch.float64), sampling=sampling)
    for row in range(3):
        log_probs = logits[row].double().log_softmax(-1).numpy()
        p = cut_distribution(log_probs, sampling)
        token = int(out.tokens[row])
        # A value within rounding of a threshold may fall on either side; then the neighbouring cuts are right too.
        nearby = [
            cut_distribution(log_probs, _moved(sampling, f))[token] for f in (1 - 1e-5, 1.0, 1 + 1e-5)
        ]  # fmt: skip
        assert max(nearby) > 0
        assert any(abs(np.log(q) - float(out.logprobs[row])) < 1e-3 for q in nearby if q > 0)
        assert abs(float(out.policy_logprobs[row]) - log_probs[token]) < 1e-4
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
