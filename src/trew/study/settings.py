"""Settings of the small model that a study makes for itself: the table ``[warm]``."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """A Llama whose tokens are single characters, trained on problems and answers until it is sometimes right."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int = 512
    accuracy: float = 0.2  # stop at this mean probability of the right answer
    steps: int = 5000  # the most
    batch: int = 64
    lr: float = 1e-3
    seed: int = 0

    def problems(self) -> list[str]:
        """Everything wrong with the settings, one line each."""
        sizes = {"hidden": 8192, "layers": 64, "heads": 64, "intermediate": 32768, "steps": 1_000_000, "batch": 4096}
        found = [
            f"warm.{name}: got {getattr(self, name)}, accepts a whole number from 1 to {most}"
            for name, most in sizes.items()
            if not 1 <= getattr(self, name) <= most
        ]
        if not 0 < self.accuracy < 1:
            found.append(f"warm.accuracy: got {self.accuracy}, accepts a share between 0 and 1")
        if not (math.isfinite(self.lr) and self.lr > 0):
            found.append(f"warm.lr: got {self.lr}, accepts a number above 0")
        if not found and self.hidden % (2 * self.heads):
            found.append(f"warm.hidden: got {self.hidden}, accepts a multiple of twice warm.heads = {self.heads}")
        if self.seed < 0:
            found.append(f"warm.seed: got {self.seed}, accepts 0 or more")
        return found
