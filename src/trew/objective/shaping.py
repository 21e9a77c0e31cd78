"""Reward shaping before the advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ConfigError
from .advantage import Coupling
from .batch import TokenBatch


def soft_overlong(lengths: Int[Tensor, "S"], *, max_length: int, cache: int) -> Float[Tensor, "S"]:
    """0 up to max_length - cache, falling linearly to -1 at max_length, -1 beyond: DAPO, arXiv 2503.14476 eq. 13.

    >>> import torch
    >>> soft_overlong(torch.tensor([16384, 18432, 20480, 20481]), max_length=20480, cache=4096).tolist()
    [0.0, -0.5, -1.0, -1.0]
    """
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)


@runtime_checkable
class Shape(Protocol):
    """Rewards (S,) in, rewards (S,) out."""

    couples: ClassVar[Coupling]

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor: ...

    def equation(self) -> str: ...


@dataclass(frozen=True, slots=True)
class SoftOverlong:
    """Adds :func:`soft_overlong` to the reward; needs ``max_length``."""

    cache: int
    couples: ClassVar[Coupling] = "sequence"

    def __post_init__(self) -> None:
        if self.cache < 1:
            raise ValueError(f"overlong_cache: got {self.cache!r}, accepts a whole number of at least 1")

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        if batch.max_length is None:
            raise ConfigError("max_length: got None; the soft overlong punishment needs it: pass max_length")
        if self.cache > batch.max_length:
            raise ConfigError(
                f"overlong_cache: got {self.cache}, accepts at most the longest completion allowed, {batch.max_length}"
            )
        return rewards + soft_overlong(batch.lengths, max_length=batch.max_length, cache=self.cache).to(rewards)

    def equation(self) -> str:
        return f"R <- R + clamp((L - {self.cache} - |y|) / {self.cache}, -1, 0)      L = longest completion allowed"
