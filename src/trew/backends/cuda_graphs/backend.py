"""Decodes through CUDA graphs: a :class:`trew.models.backend.Backend`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ...learner.autograd import AutogradRunner
from ...learner.body import Body
from ...learner.runner import ModelRunner
from ...models.anatomy import Transformer, describe
from ...rollout.torch_engine.decoder import Decoder, Decoding
from .graphs import Graphs
from .planning import CudaGraphsPlanning
from .static import StaticDecoder
from .static_model import StaticModel, unsupported


class CudaGraphsBackend:
    """Keeps weights, buffers and graphs between schedules while half of the GPU's memory is free.

    ``graphs``: makes the graphs of a device; with it, the backend serves any device, not only GPUs.
    """

    name = "cuda_graphs"

    def __init__(self, graphs: Callable[[torch.device], Graphs] | None = None) -> None:
        self._anywhere = graphs is not None
        self._graphs = graphs or Graphs.on
        self.held: StaticModel | None = None

    def missing(self) -> str:
        return ""

    def start(self) -> None:
        """Needs no preparation."""

    def runner(self, model: Any, *, plain: AutogradRunner) -> ModelRunner | str:
        return "it only decodes"

    def body(self, model: Any, *, autocast: torch.dtype | None, recompute: bool) -> Body | str:
        return "it only decodes"

    def decoder(self, model: Any, work: Decoding) -> AbstractContextManager[Decoder] | str:
        device = next(model.parameters()).device
        if device.type != "cuda" and not self._anywhere:
            return f"graphs are for GPUs and it is on {device}"
        parts = describe(model, adapters=True)
        if isinstance(parts, str):
            return parts
        return unsupported(parts) or self._static(parts, work, device)

    @contextmanager
    def _static(self, parts: Transformer, work: Decoding, device: torch.device) -> Iterator[Decoder]:
        """Reuses the last schedule's buffers if they are large enough: its graphs replay on those addresses only."""
        columns = work.columns
        dtype = work.autocast or torch.float32
        # Not held until it is ready: after an error in between, the next schedule makes another.
        held, self.held = self.held, None
        if held is None or not held.serves(slots=work.slots, columns=columns, dtype=dtype) or not held.begin(parts):
            held = None  # frees the old buffers before the new ones are allocated: both may not fit
            held = StaticModel(parts, slots=work.slots, columns=columns, dtype=dtype, graphs=self._graphs(device))
            held.begin(parts)
        self.held = held
        try:
            yield StaticDecoder(held)
        finally:
            del held  # this frame's reference would keep the buffers alive when _settle drops them
            self._settle(work, device)

    def _settle(self, work: Decoding, device: torch.device) -> None:
        """Ends a schedule: reports a failed recording, and frees the buffers unless memory is plentiful."""
        if self.held is None:
            return
        if failed := self.held.graphs.failed:
            # Later schedules do not try again.
            self._graphs = lambda device: Graphs(None)
            # Told once.
            self.held.graphs.failed = None
            work.tell(f"no CUDA graphs, because recording one failed ({failed}): decoding continues, slower")
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            # Memory that torch caches without a tensor in it is free for the learner too.
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if free + unused < total / 2:
                self.held = None

    def reads_by_layer(self, model: Any) -> bool:
        return False

    def memory(self) -> CudaGraphsPlanning:
        return CudaGraphsPlanning()

    def zeros(self, shapes: Sequence[Sequence[int]]) -> list[Tensor] | None:
        return None

    def release(self) -> None:
        self.held = None


def backend(*, layers: bool, products: bool) -> CudaGraphsBackend | None:
    """Makes the backend if a recipe's ``kernels`` allow it; ``linear`` only concerns CPUs."""
    return CudaGraphsBackend() if layers else None
