"""Checks, detaches and widens what ``TokenBatch.from_padded`` is given, or refuses it with a DataError."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import DataError

HALF = (torch.float16, torch.bfloat16)

ABOVE_ZERO = 1e-3
"""The most by which rounding raises a log-probability above 0 that was computed in 32 bits or more."""

ABOVE_ZERO_HALF = 0.25
"""The same in 16 bits: neighbouring bfloat16 numbers near a logit of 60 differ by 0.25."""

Sizes = tuple[int | str, ...]
"""Sizes: a number stands for itself, a letter for any size of at least 1."""


def expect(name: str, value: Any, *shapes: Sizes, like: Tensor) -> Tensor:
    """``value``, if it is a tensor of one of the shapes on the device of ``like``; otherwise raises DataError."""
    accepts = " or ".join(f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})" for shape in shapes)
    if not isinstance(value, Tensor):
        raise DataError(f"{name}: got {kind(value)}, accepts a tensor {accepts}")
    if not any(_fits(value.shape, shape) for shape in shapes):
        raise DataError(f"{name}: got shape {tuple(value.shape)}, accepts {accepts}")
    if value.device != like.device:
        raise DataError(f"{name}: got a tensor on {value.device}, accepts {like.device}, where logprobs are")
    # One made in inference mode cannot take part in a loss with a gradient.
    return value.clone() if value.is_inference() else value


def _fits(got: Sequence[int], shape: Sizes) -> bool:
    return len(got) == len(shape) and all(
        n == size if isinstance(size, int) else n >= 1 for n, size in zip(got, shape, strict=True)
    )


def kind(value: Any) -> str:
    """Describes an argument's type, for messages."""
    return "None" if value is None else f"a {type(value).__name__}"


def policy(value: Any) -> Tensor:
    """``logprobs`` in float32 at least, with its gradient."""
    if not isinstance(value, Tensor) or value.dim() != 2 or not value.is_floating_point():
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind(value)
        raise DataError(f"logprobs: got {got}, accepts a floating-point tensor (B, T)")
    return wide(value)


def wide(value: Tensor) -> Tensor:
    """``value`` in float32 at least: bfloat16 has 8 bits of precision, too few for ratios near 1, weights and sums."""
    return value.to(torch.float32) if value.dtype in HALF or not value.is_floating_point() else value


def of_stream(name: str, value: Tensor, *, like: Tensor) -> Tensor:
    """Log-probs (N,) in float32 at least, with their gradient. ``TokenBatch.replace``, by which a part of a prepared
    step gets the policy's, checks and widens nothing."""
    if value.shape != like.shape:
        # (N, 1), as gather() leaves them, would be broadcast against the others to (N, N).
        raise DataError(
            f"{name}: got shape {tuple(value.shape)}, accepts {tuple(like.shape)}: one for each token of the batch, "
            "without those outside the mask that it was made with; of a tensor (B, T) these are its entries [mask]"
        )
    # A mean that is NaN is left to what counts bad steps.
    made = wide(value)
    if made.numel() and (mean := float(made.detach().mean())) > _rounding(value):
        raise DataError(
            f"{name}: got a mean of {mean:g}, accepts log-probabilities, 0 at most; these look like negative "
            f"log-likelihoods: pass -{name}"
        )
    return made


def _rounding(value: Tensor) -> float:
    """The most by which rounding raises a log-probability of this type above 0."""
    return ABOVE_ZERO_HALF if value.dtype in HALF else ABOVE_ZERO


def flags(name: str, value: Any, shape: Sizes, *, like: Tensor) -> Bool[Tensor, "..."]:
    """A mask as bool. Refuses all but 0 and 1: an additive mask (0 and -inf) or a weighted one would be misread."""
    value = expect(name, value, shape, like=like)
    if value.dtype == torch.bool:
        return value
    if not ((value == 0) | (value == 1)).all():
        other = value[(value != 0) & (value != 1)][0].item()
        raise DataError(f"{name}: got {other}, accepts True and False, or 1 and 0")
    return value.to(torch.bool)


def whole(name: str, value: Any, shape: Sizes, *, like: Tensor) -> Tensor:
    """Whole numbers as int64. Refuses floats instead of truncating them."""
    value = expect(name, value, shape, like=like)
    if value.is_floating_point():
        raise DataError(f"{name}: got {value.dtype}, accepts whole numbers: pass {name}.long() if they are")
    return value.to(torch.int64)


def stream(name: str, value: Any, mask: Bool[Tensor, "B T"], *, keep_gradient: bool = False) -> Tensor:
    """The entries of a (B, T) tensor at ``mask``. Refuses entries that are not finite."""
    packed = wide(expect(name, value, tuple(mask.shape), like=mask))[mask]
    return finite(name, packed if keep_gradient else packed.detach(), where=" inside the mask")


def squares(name: str, value: Any, mask: Bool[Tensor, "B T"]) -> Tensor:
    """The entries of a (B, T) tensor at ``mask``. Refuses entries that are not finite or below 0."""
    packed = stream(name, value, mask)
    if bool((packed < 0).any()):
        raise DataError(f"{name}: got {float(packed.min()):.4g} inside the mask, accepts 0 or more")
    return packed


def log_probabilities(name: str, value: Any, mask: Bool[Tensor, "B T"], *, keep_gradient: bool = False) -> Tensor:
    """The entries of a (B, T) tensor at ``mask``. Refuses what cannot be log-probs: not finite, or above 0 by more than
    rounding.

    Negative log-likelihoods would turn every push around, and the policy would unlearn what was right.
    """
    packed = stream(name, value, mask, keep_gradient=keep_gradient)
    above = packed.detach() > _rounding(value)
    if not above.any():
        return packed
    got = f"{packed.detach().max().item():g} and {int(above.sum())} of {packed.numel()} above 0 inside the mask"
    # Above 0 on average: the sign is wrong throughout. Otherwise only some are too large.
    if packed.detach().mean() > 0:
        raise DataError(
            f"{name}: got {got}, accepts log-probabilities, 0 at most; these look like negative log-likelihoods: pass "
            f"-{name}"
        )
    raise DataError(
        f"{name}: got {got}, accepts log-probabilities, 0 at most: logits, or rounding where they were computed in 16 "
        "bits? Compute them as logits.float().log_softmax(-1), of the sampled token"
    )


def finite(name: str, value: Tensor, *, where: str = "") -> Tensor:
    """``value``, if it has neither NaN nor inf."""
    bad = ~value.detach().isfinite()
    if bad.any():
        places = f"{int(bad.sum())} of {value.numel()} places{where}"
        raise DataError(f"{name}: got {value.detach()[bad][0].item()} in {places}, accepts finite numbers")
    return value


def numbers(name: str, value: Any, *shapes: Sizes, like: Tensor) -> Tensor:
    """Detached numbers, in float32 at least; NaN is allowed."""
    return wide(expect(name, value, *shapes, like=like).detach())


def limit(name: str, value: Any) -> int | None:
    """A number of tokens, at least 1, or None."""
    if value is not None and not (isinstance(value, Integral) and int(value) >= 1):
        raise DataError(f"{name}: got {value!r}, accepts a whole number of at least 1")
    return None if value is None else int(value)
