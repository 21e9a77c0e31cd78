"""Terms that are added to the reward before advantages are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ConfigError
from .batch import TokenBatch
from .component import Component, Scope


def soft_overlong(lengths: Int[Tensor, "S"], *, max_length: int, cache: int) -> Float[Tensor, "S"]:
    """0 up to max_length - cache, falling linearly to -1 at max_length, -1 beyond: DAPO, arXiv 2503.14476 eq. 13.

    >>> soft_overlong(torch.tensor([16384, 18432, 20480, 20481]), max_length=20480, cache=4096).tolist()
    [0.0, -0.5, -1.0, -1.0]
    """
    return ((max_length - cache - lengths).to(torch.float64) / cache).clamp(-1.0, 0.0)


@runtime_checkable
class Shape(Component, Protocol):
    """A term (S,) added to the reward; if rewards are normalised one by one, it counts as one more reward."""

    scope: ClassVar[Scope] = "sequence"

    def __call__(self, batch: TokenBatch) -> Tensor: ...


@dataclass(frozen=True)
class SoftOverlong(Shape):
    """:func:`soft_overlong` as a component; needs ``max_length``."""

    cache: int = 4096

    def __post_init__(self) -> None:
        if self.cache < 1:
            raise ValueError(f"overlong_cache: got {self.cache!r}, accepts a whole number of at least 1")

    def __call__(self, batch: TokenBatch) -> Tensor:
        if batch.max_length is None:
            raise ConfigError("max_length: got None; the soft overlong punishment needs it: pass max_length")
        if self.cache > batch.max_length:
            raise ConfigError(
                f"overlong_cache: got {self.cache}, accepts at most the longest completion allowed, {batch.max_length}"
            )
        return soft_overlong(batch.lengths, max_length=batch.max_length, cache=self.cache)

    def equation(self) -> str:
        return f"R <- R + clamp((L - {self.cache} - |y|) / {self.cache}, -1, 0)      L = longest completion allowed"
