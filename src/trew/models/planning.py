"""``Planning``: what the estimate of a run asks of a backend, before there are weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Product = tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], object]]
"""How a weight is laid out, and how rows are multiplied with what that gave."""


class Planning(Protocol):
    """What the estimate of a run asks; the model's parameters have shapes alone."""

    page: int  # tokens of a page of keys and values; 0: rows of buffers
    prefill_tokens: int  # that are computed at once
    scratch: int  # bytes that a training pass works with, whatever its size

    def decodes(self, model: Any, *, autocast: torch.dtype | None) -> bool:
        """Whether the decoder runs the model's layers by its own code."""
        ...

    def buffers(self, model: Any, *, rows: int, columns: int, dtype: torch.dtype) -> Any:
        """What the decoder keeps between calls, with ``bytes``, ``cache``, ``prefill`` and ``compute``; else None."""
        ...

    def product(self, *, depth: int, rows: int, dtype: torch.dtype) -> Product | None:
        """By which code matrices are multiplied; None: by torch."""
        ...
