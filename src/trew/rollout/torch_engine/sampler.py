"""Draws tokens by inverting the cumulative distribution at counter-based uniforms, without generator state.

A draw depends only on (seed, prompt uid, sample number, position) and that row's logits, not on the other rows of the
batch. Rows may therefore leave, join, or be resumed elsewhere and still draw the same tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...types import Sampling

_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment and multipliers
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCK = 256  # vocabulary entries per block of the two-level search


@dataclass(frozen=True, slots=True)
class Draw:
    """One token for each of B rows. Log-probabilities and entropies in nats, float32."""

    tokens: Tensor  # (B,) int64
    floats: Tensor  # (3, B): the three below, in one tensor so that a schedule records them with one copy
    finite: Tensor  # (B,) bool: False if the logits had NaN or +inf, or no finite entry

    @property
    def policy_logprobs(self) -> Tensor:
        """(B,) of the policy at temperature 1, untruncated."""
        return self.floats[0]

    @property
    def logprobs(self) -> Tensor:
        """(B,) under the distribution that was really drawn from; 0 for greedy decoding."""
        return self.floats[1]

    @property
    def entropies(self) -> Tensor:
        """(B,) of the policy at temperature 1."""
        return self.floats[2]


def row_key(seed: int, uid: str, sample: int) -> int:
    """Returns a 64-bit key, as a signed integer, for all draws of one completion: BLAKE2b of the three values.

    >>> row_key(0, "a", 0) == row_key(0, "a", 0), row_key(0, "a", 0) == row_key(0, "a", 1)
    (True, False)
    """
    # The uid goes last: it alone may contain NUL, so no two triples give the same text.
    text = f"{seed}\0{sample}\0{uid}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Returns splitmix64 of key + position x golden ratio, as float64 in [0, 1) with 53 random bits.

    keys, positions: int64, broadcast against each other. int64 products wrap around, as splitmix64 requires. float64,
    because with the 24 bits of a float32 many tokens of probability below 6e-8 could never be drawn.

    >>> (uniforms(torch.tensor([1234567]), torch.tensor([0])) * 2**53).long()  # 6457827717110365317 >> 11
    tensor([3153236189995295])
    """
    # Draw number n of a key is the n-th output of a splitmix64 generator that starts at the key.
    z = keys + (positions + 1) * _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    z = z ^ _shift(z, 31)
    # The upper 53 bits, as many as a float64 holds exactly.
    return _shift(z, 11).double() * 2.0**-53


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's >> is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(logits: Tensor, *, uniform: Tensor, sampling: Sampling) -> Draw:
    """Draws one token per row of ``logits`` (B, V), by ``uniform`` (B,) in [0, 1).

    With x = logits - max, e = exp(x), Z = sum e: log pi = x - log Z and entropy = log Z - sum(e x) / Z, at
    temperature 1. The draw is from e_T = exp(x / temperature), with entries below the threshold of top_k, min_p and
    top_p set to 0. All tokens that tie at a threshold are kept.
    """
    x = logits.float()
    x = x - x.amax(-1, keepdim=True)
    # Tokens that a model masks (-inf) must add 0 to the entropy: 0 * finite is 0, but 0 * -inf is NaN.
    x.clamp_(min=torch.finfo(torch.float32).min)
    e = x.exp()
    z = e.sum(-1)
    log_z = z.log()
    # Rounding can give a tiny negative entropy where one token has nearly all the mass.
    entropies = (log_z - torch.linalg.vecdot(e, x) / z).clamp(min=0)

    if sampling.temperature == 0:
        tokens = x.argmax(-1)
        chosen = _at(x, tokens)
        floats = torch.stack((chosen - log_z, torch.zeros_like(chosen), entropies))
        return Draw(tokens, floats, torch.isfinite(log_z))

    if sampling.temperature != 1:
        e = (x / sampling.temperature).exp()
    if sampling.truncates:
        e = e.where(e >= _threshold(e, sampling), 0.0)
    tokens, total = _invert(e, uniform)
    chosen = _at(x, tokens)
    policy_logprobs = chosen - log_z
    if sampling.temperature == 1 and not sampling.truncates:
        logprobs = policy_logprobs  # the same distribution: bitwise equal, so that ratios of the two are exactly 1
    else:
        logprobs = (chosen / sampling.temperature - total.log()).float()
    return Draw(tokens, torch.stack((policy_logprobs, logprobs, entropies)), torch.isfinite(log_z))


def _at(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _threshold(e: Tensor, sampling: Sampling) -> Tensor:
    """Returns (B, 1): the smallest entry of ``e`` (B, V), whose largest is 1, that top_k, min_p and top_p all keep."""
    vocabulary = e.shape[-1]
    # At least the smallest normal number: an entry of weight 0 must never pass as kept.
    low = e.new_full((e.shape[0], 1), torch.finfo(e.dtype).tiny)
    if 0 < sampling.top_k < vocabulary:
        # low (B, 1): the k-th largest weight; ties with it stay.
        low = torch.maximum(low, e.topk(sampling.top_k, sorted=True).values[:, -1:])
    if sampling.min_p > 0:
        low = low.clamp(min=sampling.min_p)  # min_p is relative to the largest probability, which is 1 in e
    if sampling.top_p >= 1:
        return low
    # top_p applies to the mass that top_k and min_p leave. float64: a float32 running sum over a large
    # vocabulary is off by more than the smallest tokens.
    target = sampling.top_p * e.where(e >= low, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    # 256 is nearly always enough, and grows where it is not: sorting the whole vocabulary costs 100 times more.
    k = min(256, vocabulary)
    while True:
        best = e.topk(k, sorted=True).values
        mass = best.where(best >= low, 0.0).cumsum(-1, dtype=torch.float64)
        if k == vocabulary or bool((mass[:, -1:] >= target).all()):
            # The first place where the mass is reached; rounding may leave even the last one just short of it.
            place = torch.searchsorted(mass, target).clamp(max=k - 1)
            return torch.maximum(low, best.gather(-1, place))
        k = min(8 * k, vocabulary)


def _invert(e: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of non-negative ``e`` (B, V), returns the smallest i with cumsum(e)[i] > uniform * sum(e), and
    sum(e).

    Works in two levels, so that running sums cover V / 256 blocks and one block, not V entries.
    """
    # Level 1: sums of blocks (B, blocks), to find the block in which the draw falls.
    vocabulary = e.shape[-1]
    whole = vocabulary // _BLOCK
    blocks = e[:, : whole * _BLOCK].unflatten(-1, (whole, _BLOCK)).sum(-1)
    # The rest of the vocabulary is one shorter block, possibly empty.
    blocks = torch.cat([blocks, e[:, whole * _BLOCK :].sum(-1, keepdim=True)], dim=-1)
    running = blocks.cumsum(-1, dtype=torch.float64)
    target = uniform.unsqueeze(-1) * running[:, -1:]
    block = _first_above(running, target)
    # before (B, 1): the mass of all earlier blocks.
    before = F.pad(running, (1, 0)).gather(-1, block)

    # Level 2: the weights of that block alone (B, 256), 0 beyond the end of the vocabulary.
    columns = block * _BLOCK + torch.arange(_BLOCK, device=e.device)
    inside = e.gather(-1, columns.clamp(max=vocabulary - 1)).where(columns < vocabulary, 0.0)
    tokens = block * _BLOCK + _first_above(inside.cumsum(-1, dtype=torch.float64), target - before)
    return tokens.squeeze(-1).clamp(max=vocabulary - 1), running[:, -1]  # the clamp is for rows of NaN alone


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """Returns the first entry of a running sum (B, K) above target (B, 1), but never one after the sum is complete:
    there all entries have weight 0, and rounding of the target could select one of them."""
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    place = torch.minimum(torch.searchsorted(running, target.contiguous(), right=True), last)
    return place.clamp(max=running.shape[-1] - 1)  # rows of NaN are reported later; they must not index out of range
