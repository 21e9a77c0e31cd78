"""Counting memory without using any: operations on tensors that have shapes only, and what they would allocate."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Counts the bytes of storages that operations inside the block make, from their making to their release.

    What a kernel uses inside itself is not seen; sums over many tensors are within some per cent of what a process
    was seen to use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), made=False)  # what comes from outside of the block does not count
        out = func(*args, **(kwargs or {}))
        self._see(out, made=True)
        return out

    def _see(self, values: Any, *, made: bool) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self._sizes:
                    self._sizes[key] = storage.nbytes() if made else 0
                    self.live += self._sizes[key]
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
