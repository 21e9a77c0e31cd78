"""Draws a second time, in float64: what top_k, min_p and top_p leave (by sorting), and what uniforms draw a token."""

from __future__ import annotations

import numpy as np

from trew.types import Sampling


def cut_distribution(log_probs: np.ndarray, s: Sampling) -> np.ndarray:
    """(V,) probabilities: temperature, then top_k, min_p, top_p, renormalised after each. Of several
    that are equal at a threshold, all are kept."""
    p = np.exp((log_probs - log_probs.max()) / s.temperature)
    order = np.argsort(-p)
    p = p[order] / p.sum()
    if s.top_k:
        p[p < p[min(s.top_k, len(p)) - 1]] = 0
    p /= p.sum()
    if s.min_p:
        p[p < s.min_p * p[0]] = 0
    p /= p.sum()
    if s.top_p < 1:
        p[p < p[min(np.searchsorted(np.cumsum(p), s.top_p), len(p) - 1)]] = 0
    p /= p.sum()
    result = np.empty_like(p)
    result[order] = p
    return result


def uniforms_that_draw(token: int, logits: np.ndarray, temperature: float) -> tuple[float, float]:
    """The bounds between which a uniform draws ``token`` from float64 logits (V,), nothing cut."""
    p = np.exp((logits - logits.max()) / temperature)
    cumulative = np.cumsum(p / p.sum())
    return (cumulative[token - 1] if token else 0.0), cumulative[token]
