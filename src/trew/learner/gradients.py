"""The gradient of an optimizer step as a whole: its sum over ranks, and its norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..errors import NumericsError
from ..models.sharded import full, is_sharded
from ..types import TrainingSample
from .accumulate import sample_names
from .parallel import Parallel


def sum_over(parameters: Iterable[torch.nn.Parameter], parallel: Parallel) -> None:
    """Sums gradients over ranks; a rank without a pack contributes zeros."""
    if parallel.size == 1:
        return  # a parameter without a gradient keeps None, and AdamW skips it
    parameters = list(parameters)
    # Ranks sum tensor by tensor, in order: one that is missing here would shift all that follow.
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    # The backward pass has summed those of sharded weights already.
    parallel.sum_([p.grad for p in parameters if p.grad is not None and not is_sharded(p)])


def clip(
    parameters: Iterable[torch.nn.Parameter],
    most: float,
    *,
    samples: Sequence[TrainingSample],
    active: Sequence[int],
    what: str = "the gradient norm",
    rate: str = "learner.lr",
) -> float:
    """Clips the gradient to the norm ``most`` and returns its norm before that. Raises NumericsError, naming the
    ``active`` samples, where that is not finite. ``what`` and ``rate`` name it and its learning rate there."""
    parameters = [p for p in parameters if p.grad is not None]
    # Checked before clipping, which would multiply every gradient by a NaN norm.
    norm = full(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if not torch.isfinite(norm):
        raise NumericsError(
            f"{what} is {float(norm)}, though log-probs are finite (a lower {rate}, or learner.dtype = 'float32', may "
            "help)",
            names=sample_names(active, samples), quantity="grad_norm", samples=active,
        )  # fmt: skip
    torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return float(norm)
