"""A bonus for the policy's entropy: the only term whose gradient goes through the full distribution."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from .component import Component, not_negative

HIGHEST = 1.0
"""The largest value of an adaptive coefficient."""


@dataclass(frozen=True)
class EntropyBonus(Component):
    """- coefficient sum_t share_t H_t in the loss, differentiated through ``TokenBatch.entropies``.

    With a ``target`` above 0 (nats per token) it is adaptive: it acts only while the rollouts' mean entropy is at most
    the target; the coefficient rises by ``step`` after each such optimizer step and falls by it after any other, within
    [0, 1]: Skywork-OR1, arXiv 2505.22312 §4.
    """

    coefficient: float = 0.0
    target: float = 0.0
    step: float = 0.005

    def __post_init__(self) -> None:
        not_negative(entropy_bonus=self.coefficient, entropy_target=self.target, entropy_step=self.step)

    @property
    def active(self) -> bool:
        """Whether it can ever act, so that entropies with a gradient are needed."""
        return self.coefficient > 0 or self.target > 0

    @property
    def needs(self) -> tuple[str, ...]:
        return ("entropies",)

    def applies(self, mean_entropy: float) -> bool:
        """Whether the bonus acts on a step whose rollouts have this mean entropy."""
        return self.coefficient > 0 and (not self.target or mean_entropy <= self.target)

    def after(self, mean_entropy: float) -> EntropyBonus:
        """The bonus of the next optimizer step.

        >>> EntropyBonus(0.01, target=0.2).after(0.1).coefficient, EntropyBonus(0.01, target=0.2).after(0.3).coefficient
        (0.015, 0.005)
        """
        if not self.target:
            return self
        moved = self.coefficient + (self.step if mean_entropy <= self.target else -self.step)
        # Rounded, so that going up and down again by the same steps ends at the same number, and at 0 exactly.
        return dataclasses.replace(self, coefficient=min(max(round(moved, 12), 0.0), HIGHEST))

    def loss(self, entropies: Float[Tensor, "N"], *, token_weights: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        """- coefficient sum_t share_t H_t, share_t the token weights."""
        return -self.coefficient * (token_weights * entropies).sum()

    def equation(self) -> str:
        until = f" while the mean entropy is at most {self.target:g}" if self.target else ""
        adapt = f"; ± {self.step:g} after each step" if self.target else ""
        return f"- {self.coefficient:g} sum_t share_t H_t in the loss{until}{adapt}"
