"""``Planning``: the figures of a backend for the memory estimate of a run, before any weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Product = tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], object]]
"""(packs a weight, multiplies rows with a packed weight)."""


class Planning(Protocol):
    """Answers the estimate's questions; the model's parameters have shapes but no data."""

    page: int  # tokens per page of the KV cache; 0: no pages, one buffer row per completion
    prefill_tokens: int  # prompt tokens computed at once
    scratch: int  # bytes of scratch memory of a training pass, independent of its size

    def decodes(self, model: Any, *, autocast: torch.dtype | None) -> bool:
        """Whether the decoder runs the model's layers with the backend's own code."""
        ...

    def buffers(self, model: Any, *, rows: int, columns: int, dtype: torch.dtype) -> Any:
        """What the decoder keeps between calls, with ``bytes``, ``cache``, ``prefill`` and ``compute``; or None."""
        ...

    def product(self, *, depth: int, rows: int, dtype: torch.dtype) -> Product | None:
        """Returns the code that multiplies matrices; None: torch does."""
        ...
