"""Answers an estimate's questions for decoding with CUDA graphs: see :class:`trew.models.planning.Planning`."""

from __future__ import annotations

from typing import Any

import torch

from ...models.anatomy import Transformer, describe
from ...models.planning import Product
from .graphs import Graphs
from .static import PREFILL_TOKENS
from .static_model import StaticModel, unsupported


class CudaGraphsPlanning:
    page = 0
    prefill_tokens = PREFILL_TOKENS
    scratch = 0

    def decodes(self, model: Any, *, autocast: torch.dtype | None) -> bool:
        return unsupported(describe(model, adapters=True)) is None

    def buffers(self, model: Any, *, rows: int, columns: int, dtype: torch.dtype) -> StaticModel:
        parts = describe(model, adapters=True)
        assert isinstance(parts, Transformer), parts
        return StaticModel(parts, slots=rows, columns=columns, dtype=dtype, graphs=Graphs(None))

    def product(self, *, depth: int, rows: int, dtype: torch.dtype) -> Product | None:
        return None
