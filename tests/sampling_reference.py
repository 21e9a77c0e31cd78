"""What top_k, min_p and top_p leave of a distribution, written a second time: by sorting, in float64."""

from __future__ import annotations

import numpy as np

from trew.types import Sampling


def cut_distribution(log_probs: np.ndarray, s: Sampling) -> np.ndarray:
    """(V,) probabilities: temperature, then top_k, min_p, top_p, renormalised after each. Expects no ties."""
    p = np.exp((log_probs - log_probs.max()) / s.temperature)
    order = np.argsort(-p)
    p = p[order] / p.sum()
    if s.top_k:
        p[s.top_k :] = 0
    p /= p.sum()
    if s.min_p:
        p[p < s.min_p * p[0]] = 0
    p /= p.sum()
    if s.top_p < 1:
        p[1:][np.cumsum(p)[:-1] >= s.top_p] = 0
    p /= p.sum()
    result = np.empty_like(p)
    result[order] = p
    return result
