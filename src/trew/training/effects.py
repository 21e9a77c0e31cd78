"""``TokenEffects``: what the objective did to each token of a step, as the rollouts' tables record it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..learner import Accumulated
from ..objective import TokenBatch
from ..types import TrainingSample

_COLUMNS = {"ratio": "final_ratios", "weight": "weights", "coefficients": "coefficients"}
"""Columns of the tables by the learner's names for their values."""


class TokenEffects:
    """The values of the last optimizer step on each completion: importance ratio r, weight w(r, A) and coefficient C.

    Only steps that were applied count. NaN stands for no value: before the first of them, and at tokens without loss.
    """

    def __init__(self, samples: Sequence[TrainingSample], batch: TokenBatch) -> None:
        self._bounds = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
        self._sampled = batch.mask
        self._others = {"ref_logprobs": batch.ref_logprobs, "teacher_logprobs": batch.teacher_logprobs}
        self._values = {name: torch.full((len(batch.mask),), torch.nan) for name in _COLUMNS}

    def add(self, done: Accumulated, positions: Sequence[int]) -> None:
        """Takes over the values of an optimizer step on the samples at ``positions``, consecutive ones."""
        # Packed: the tokens of consecutive samples are one range.
        start, end = self._bounds[positions[0]], self._bounds[positions[-1] + 1]
        for name, values in done.per_token().items():
            self._values[name][start:end] = values

    def columns(self) -> dict[str, list[np.ndarray]]:
        """One array (T,) per sample for each column of the table, NaN where a token has no value."""
        found = {_COLUMNS[name]: values for name, values in self._values.items()}
        for name, values in self._others.items():
            if values is not None:
                found[name] = torch.where(self._sampled, values, torch.nan)
        return {name: np.split(values.numpy(), self._bounds[1:-1]) for name, values in found.items()}
