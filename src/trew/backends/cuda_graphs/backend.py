"""Decoding through CUDA graphs as a :class:`trew.models.backend.Backend`."""

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
    """Its weights, buffers and graphs stay between schedules as long as half of the GPU's memory is free.

    ``graphs``: makes those of a device; the backend then serves any device, and not GPUs alone.
    """

    name = "cuda_graphs"

    def __init__(self, graphs: Callable[[torch.device], Graphs] | None = None) -> None:
        self._anywhere = graphs is not None
        self._graphs = graphs or Graphs.on
        self.kept: StaticModel | None = None

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
        """In the buffers of the last schedule where they are large enough, as its graphs are good for them alone."""
        columns = work.columns
        dtype = work.autocast or torch.float32
        kept, self.kept = self.kept, None
        if kept is None or not kept.serves(slots=work.slots, columns=columns, dtype=dtype) or not kept.begin(parts):
            kept = None  # its memory is needed
            kept = StaticModel(parts, slots=work.slots, columns=columns, dtype=dtype, graphs=self._graphs(device))
            kept.begin(parts)
        self.kept = kept
        try:
            yield StaticDecoder(kept)
        finally:
            del kept
            self._settle(work, device)

    def _settle(self, work: Decoding, device: torch.device) -> None:
        """At a schedule's end: says what became of the graphs; gives the buffers back where memory is not plenty."""
        if self.kept is None:
            return
        if failed := self.kept.graphs.failed:
            self._graphs = lambda device: Graphs(None)
            self.kept.graphs.failed = None
            work.tell(f"no CUDA graphs, because recording one failed ({failed}): decoding continues, slower")
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if free + unused < total / 2:
                self.kept = None

    def reads_by_layer(self, model: Any) -> bool:
        return False

    def memory(self) -> CudaGraphsPlanning:
        return CudaGraphsPlanning()

    def zeros(self, shapes: Sequence[Sequence[int]]) -> list[Tensor] | None:
        return None

    def release(self) -> None:
        self.kept = None


def backend(*, layers: bool, products: bool) -> CudaGraphsBackend | None:
    """The backend, where a recipe's ``kernels`` allow it; ``linear`` is about CPUs."""
    return CudaGraphsBackend() if layers else None
