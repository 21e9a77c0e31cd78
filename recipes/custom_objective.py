"""An objective for recipes/custom_objective.toml: GRPO with another trust region. It works in TRL and in a loop, too.

The function's parameters are settings of the recipe's [objective] table; each has a type and a default.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import trew
from trew.objective import Objective, TokenBatch
from trew.objective.weight import Weight


@dataclass(frozen=True)
class Gaussian(Weight):
    """w = exp(-(r - 1)^2 / (2 s^2)), whatever the sign of A: no token is cut off at an edge."""

    s: float = 0.2

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return torch.exp(-((ratio - 1) ** 2) / (2 * self.s**2))

    def equation(self) -> str:
        return f"w = exp(-(r - 1)^2 / (2 * {self.s:g}^2))"


def gaussian(s: float = 0.2) -> Objective:
    """GRPO with a trust region that has no edge.

    w = exp(-(r - 1)^2 / (2 s^2))

    Use it as a pattern for objectives of your own.
    """
    return trew.preset("grpo", beta=0.0).replace(name="gaussian", weight=Gaussian(s))
