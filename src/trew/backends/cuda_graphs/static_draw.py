"""Draws that are recorded as a CUDA graph together with the steps whose logits they take."""

from __future__ import annotations

import functools

from torch import Tensor

from ...rollout.torch_engine.sampler import Draw, draw, uniforms
from ...types import Sampling
from .static_model import StaticModel, row_bucket


class StaticDraw:
    """Draws for rows of ``model``, as :func:`.sampler.draw` does. What it returns is overwritten by the next call.

    Logits that :meth:`StaticModel.step` left in the model's buffer are drawn from by a graph, unless top_k, top_p or
    min_p cut the distribution, which looks at the logits on the way.
    """

    def __init__(self, model: StaticModel, sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling
        self.cuts = sampling.truncates and sampling.temperature != 0

    def __call__(self, logits: Tensor, keys: Tensor, positions: Tensor) -> Draw:
        """A token for each row of ``logits`` (rows, V), by draw number ``positions`` (rows,) of ``keys`` (rows,)."""
        model, rows = self.model, len(logits)
        if self.cuts or logits.data_ptr() != model.logits.data_ptr():
            return draw(logits, uniform=uniforms(keys, positions), sampling=self.sampling)
        model.keys[:rows] = keys
        model.positions[:rows] = positions
        bucket = row_bucket(rows)
        # All of the sampling that a draw without cuts depends on is in the key.
        model.graphs.run(("draw", bucket, self.sampling.temperature), functools.partial(self.compute, bucket))
        return Draw(model.drawn[:rows], model.drawn_floats[:, :rows], model.drawn_finite[:rows])

    def compute(self, rows: int) -> None:
        """The draw itself: to be recorded, so a function of buffers alone."""
        model = self.model
        uniform = uniforms(model.keys[:rows], model.positions[:rows])
        drawn = draw(model.logits[:rows], uniform=uniform, sampling=self.sampling)
        model.drawn[:rows] = drawn.tokens
        model.drawn_floats[:, :rows] = drawn.floats
        model.drawn_finite[:rows] = drawn.finite
