"""Draws tokens with compiled kernels: one pass over the logits instead of a dozen.

The definition of a draw, and its implementation in torch: :mod:`trew.rollout.torch_engine.sampler`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...rollout.torch_engine import sampler
from ...rollout.torch_engine.sampler import Draw
from ...types import Sampling
from .build import kernel, library

BLOCK = 256
"""Vocabulary entries that are summed before single ones are examined, as in draw.h."""


def drawn(logits: Tensor, *, keys: Tensor, positions: Tensor, sampling: Sampling) -> Draw:
    """Draws as :meth:`.decoder.Decoder.draw` does, up to rounding."""
    uniform = uniforms(keys, positions)
    # The same numbers by torch: without a library, or for tensors that the kernel does not take.
    if uniform is None:
        uniform = sampler.uniforms(keys, positions)
    return take(logits, uniform=uniform, sampling=sampling)


def take(logits: Tensor, *, uniform: Tensor, sampling: Sampling) -> Draw:
    """Draws as :func:`.sampler.draw` does; with the kernel on CPUs, unless top_k, top_p or min_p truncate."""
    if (sampling.temperature == 0 or not sampling.truncates) and accepts(logits):
        return Draw(*draw(logits, uniform=uniform, temperature=sampling.temperature))
    return sampler.draw(logits, uniform=uniform, sampling=sampling)


def accepts(logits: Tensor) -> bool:
    """Whether the kernel can draw from these logits (B, V)."""
    plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()
    return plain and logits.shape[1] > 0 and not isinstance(library(), str)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor | None:
    """Returns float64 uniforms in [0, 1) (B,) for ``keys`` and ``positions`` (B,) int64; None if the kernel does not
    support these tensors."""
    if keys.shape != positions.shape or isinstance(library(), str):
        return None
    if any(t.device.type != "cpu" or t.dtype != torch.int64 or not t.is_contiguous() for t in (keys, positions)):
        return None
    out = torch.empty(keys.shape, dtype=torch.float64)
    kernel("uniforms", None, "pppi")(keys.data_ptr(), positions.data_ptr(), out.data_ptr(), out.numel())
    return out


def draw(logits: Tensor, *, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Draws by ``uniform`` (B,) in [0, 1) from exp(logits / temperature); at temperature 0, the first largest entry.

    Returns tokens (B,) int64; (3, B) float32: their log-probs at temperature 1 and under the distribution drawn from (0
    at temperature 0), and the entropy at temperature 1; and (B,) bool: False, with token 0, where logits have NaN or
    +inf, or no finite entry.
    """
    rows, vocabulary = logits.shape
    uniform = uniform.double().contiguous()
    tokens = torch.empty(rows, dtype=torch.int64)
    floats = torch.empty(3, rows, dtype=torch.float32)
    finite = torch.empty(rows, dtype=torch.bool)
    # Block sums in float64, as in the torch version: both must find the same block for the same uniform.
    room = torch.empty(rows, -(-vocabulary // BLOCK), dtype=torch.float64)
    assert accepts(logits)
    assert uniform.shape == (rows,)
    kernel("draw", None, "ppfppppii")(
        logits.data_ptr(), uniform.data_ptr(), temperature, tokens.data_ptr(), floats.data_ptr(), finite.data_ptr(),
        room.data_ptr(), rows, vocabulary,
    )  # fmt: skip
    return tokens, floats, finite
