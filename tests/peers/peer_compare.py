"""What both peers are compared with: one ragged batch, and how far two answers are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

TOLERANCE = 1e-5  # relative
WRONG = 1e-3  # what a wrong setting must be off by at least, a hundred times as much

LENGTHS = (9, 3, 1, 6, 7, 2, 8, 4)  # of two groups of four; the longest fills the batch's width
GROUPS = (0, 0, 0, 0, 1, 1, 1, 1)
REWARDS = (1.0, 0.0, 0.5, 0.2, 0.1, 0.9, 1.0, 0.3)
MAX_LENGTH = 12  # longer than anything in the batch, as a completion limit is


@dataclass(frozen=True)
class Case:
    """One setting of a peer, ours that must agree with it, and a change to ours that must not."""

    name: str
    peer: dict[str, Any]
    preset: str
    ours: dict[str, Any]
    wrong: dict[str, Any]
    value: bool = (
        True  # False: the peer's loss value is its carrier of gradients, g A log pi, and compares with nothing
    )
    data: dict[str, Any] = field(default_factory=dict)  # how the batch of this case differs from the ordinary one
    scale: float = 1.0  # a constant the peer multiplies its loss by, where its definition differs; the case says why


def parametrize(cases: Sequence[Case]) -> Any:
    """One test per case, under its name."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest entry of the peer's."""
    ours, theirs = ours.detach().double().flatten(), theirs.detach().double().flatten()
    assert ours.shape == theirs.shape
    assert theirs.isfinite().all()
    size = float(theirs.abs().max())
    assert size > 0, "the peer's answer is zero everywhere: nothing is compared"
    return float((ours - theirs).abs().max()) / size


def same_value(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two loss values agree; they are sums of terms around 1 that may cancel, in the peer's float32."""
    return float((ours - theirs).abs()) <= TOLERANCE * float(theirs.abs()) + 1e-6


def noise(seed: int, *shape: int, size: float = 1.0) -> Tensor:
    """Normal deviates of this seed, in float64."""
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ragged_mask(lengths: Sequence[int] = LENGTHS, *, holes: bool = False) -> Tensor:
    """(B, T) loss mask; with ``holes`` every third token belongs to a tool."""
    positions = torch.arange(max(LENGTHS))[None, :]
    mask = positions < torch.tensor(lengths)[:, None]
    return mask & (positions % 3 != 1) if holes else mask
