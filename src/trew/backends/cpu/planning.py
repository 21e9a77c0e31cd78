"""Answers an estimate's questions for the compiled kernels: see :class:`trew.models.planning.Planning`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...models.anatomy import describe
from ...models.planning import Product
from . import decoder, pages, training
from .linears import available
from .products import WeightMatrix, fits, product

FEW = 256
"""Maximum number of rows for which the estimate packs a matrix once for many products, as decoding does."""


@dataclass(frozen=True)
class CpuPlanning:
    """``layers``, ``products``: as in the backend."""

    layers: bool
    products: bool
    page: int = pages.PAGE
    prefill_tokens: int = decoder.PREFILL_TOKENS
    # In bytes; SHARED counts floats.
    scratch: int = 4 * training.SHARED

    def decodes(self, model: Any, *, autocast: torch.dtype | None) -> bool:
        return self.layers and decoder.unsupported(describe(model, adapters=True), autocast=autocast) is None

    def buffers(self, model: Any, *, rows: int, columns: int, dtype: torch.dtype) -> None:
        # The cache is paged, and nothing is kept between calls.
        return None

    def product(self, *, depth: int, rows: int, dtype: torch.dtype) -> Product | None:
        if not (self.products and available(torch.device("cpu"), dtype) and fits(depth, dtype)):
            return None
        return (lambda w: WeightMatrix.packed(w, dtype=dtype)) if rows <= FEW else WeightMatrix.of, product
