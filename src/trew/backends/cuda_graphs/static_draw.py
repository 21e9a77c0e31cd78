"""Records draws as CUDA graphs, next to the decoding steps whose logits they use."""

from __future__ import annotations

import functools

from torch import Tensor

from ...rollout.torch_engine.sampler import Draw, draw, uniforms
from ...types import Sampling
from .static_model import StaticModel, row_bucket


class StaticDraw:
    """Draws for rows of ``model``, as :func:`.sampler.draw` does. The next call overwrites the result.

    Draws with a graph from logits that :meth:`StaticModel.step` left in the model's buffer, unless top_k, top_p or
    min_p truncate the distribution: finding the threshold takes decisions that depend on the logits.
    """

    def __init__(self, model: StaticModel, sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling
        self.cuts = sampling.truncates and sampling.temperature != 0

    def __call__(self, logits: Tensor, keys: Tensor, positions: Tensor) -> Draw:
        """Draws a token per row of ``logits`` (rows, V), with draw number ``positions`` (rows,) of ``keys`` (rows,)."""
        model, rows = self.model, len(logits)
        # First logits of new rows come from add(), in a tensor of their own.
        if self.cuts or logits.data_ptr() != model.logits.data_ptr():
            return draw(logits, uniform=uniforms(keys, positions), sampling=self.sampling)
        # Into fixed buffers; rows of the bucket beyond these draw from what is left there, and nobody reads their
        # result.
        model.keys[:rows] = keys
        model.positions[:rows] = positions
        bucket = row_bucket(rows)
        # The key holds every sampling setting that an untruncated draw depends on: the graph has it baked in.
        model.graphs.run(("draw", bucket, self.sampling.temperature), functools.partial(self.compute, bucket))
        return Draw(model.drawn[:rows], model.drawn_floats[:, :rows], model.drawn_finite[:rows])

    def compute(self, rows: int) -> None:
        """The draw itself. To be recorded, so it depends on buffers only."""
        model = self.model
        uniform = uniforms(model.keys[:rows], model.positions[:rows])
        drawn = draw(model.logits[:rows], uniform=uniform, sampling=self.sampling)
        model.drawn[:rows] = drawn.tokens
        model.drawn_floats[:, :rows] = drawn.floats
        model.drawn_finite[:rows] = drawn.finite
