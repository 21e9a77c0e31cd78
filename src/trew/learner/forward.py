"""Forward passes over the samples of a step: packs dealt over ranks, in rounds, and the values of all on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import NumericsError
from ..types import TrainingSample
from .accumulate import TokenPositions, check_finite
from .dealing import failing_together, rounds
from .packing import Pack
from .parallel import Parallel
from .runner import ModelRunner

Progress = Callable[[int], None]
"""Receives the number of samples finished since the last call."""


def logprobs_of(
    runner: ModelRunner, samples: Sequence[TrainingSample], *, parallel: Parallel, quantity: str = "logprobs",
    progress: Progress | None = None,
) -> Float[Tensor, "N"]:  # fmt: skip
    """Log-probs of all completion tokens; 0 at those that were not sampled. ``quantity`` names them in errors."""
    return forward(
        runner, samples, lambda pack: (runner.logprobs_of(pack),), outputs=1, parallel=parallel, quantity=quantity,
        progress=progress,
    )[0]  # fmt: skip


def forward(
    runner: ModelRunner, samples: Sequence[TrainingSample], run: Callable[[Pack], tuple[Tensor, ...]], *,
    outputs: int, parallel: Parallel, quantity: str = "logprobs", progress: Progress | None = None,
) -> list[Tensor]:  # fmt: skip
    """The ``outputs`` values (N,) that ``run`` computes for the tokens of each pack; the first must be finite."""
    # Zeros where another rank computes the value: the sum over ranks fills it in.
    out = [torch.zeros(sum(len(s.token_ids) for s in samples), dtype=torch.float32) for _ in range(outputs)]
    tokens = TokenPositions.of(samples)

    def compute(pack: Pack, beside: list[Pack]) -> None:
        values = [value.cpu() for value in run(pack)]
        lengths = torch.tensor([len(samples[i].predicted) for i in pack.samples])
        ids = torch.arange(len(lengths)).repeat_interleave(lengths)
        check_finite(values[0], ids, pack, samples, quantity=quantity)
        for whole, part in zip(out, values, strict=True):
            whole[tokens.predicted(pack.samples)] = part
        if progress is not None:
            progress(len(pack.samples))

    in_rounds(runner.packs(samples), compute, lambda beside: runner.idle(gradient=False), parallel=parallel)
    runner.release()
    parallel.sum_(out)
    return out


def in_rounds(
    packs: Sequence[Pack],
    compute: Callable[[Pack, list[Pack]], None],
    idle: Callable[[list[Pack]], None],
    *,
    parallel: Parallel,
) -> None:
    """Calls ``compute`` for each pack of this rank, or ``idle`` where it has none left, with the packs of all ranks
    in that round. Raises a NumericsError of any rank on all of them."""
    # After an error this rank goes on idling: sharded weights are gathered by all ranks together in each pass, and
    # the others would wait for it forever.
    with failing_together(parallel):
        error: NumericsError | None = None
        for own, every in rounds([pack.input_ids.size for pack in packs], parallel):
            parallel.beat()
            beside = [packs[i] for i in every]
            if own is None or error is not None:
                idle(beside)
                continue
            try:
                compute(packs[own], beside)
            except NumericsError as found:
                error = found
        if error is not None:
            raise error
