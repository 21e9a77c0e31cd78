"""CUDA graphs: record once what a function does to fixed buffers, and replay it in one launch.

Run from Python, a decoding step is hundreds of kernels, each of which takes longer to launch than to run. A graph
launches all of them at once. It replays exactly the same kernels on the same addresses, so the function must

    read and write only tensors whose addresses stay valid as long as the graph does,
    make no decision that depends on their contents, and copy nothing to the CPU,
    leave its result in one of them: its temporary tensors live in a pool shared by all graphs, where the next graph to
    run may overwrite them.

A function must be idempotent (two runs in a row leave the same state as one), because it is run once before recording:
libraries choose their kernels and allocate workspaces at the first call, which must not be part of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch


class Recording(Protocol):
    """A recording."""

    def replay(self) -> None: ...


class GraphRecorder(Protocol):
    """Records a function without running it, after :meth:`warm` ran it once, perhaps on other contents."""

    def warm(self, function: Callable[[], None]) -> None: ...

    def record(self, function: Callable[[], None]) -> Recording: ...


class CudaRecorder:
    """Records with torch.cuda.graph on a separate stream, because CUDA cannot record the default stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()

    def warm(self, function: Callable[[], None]) -> None:
        with torch.cuda.device(self.device):
            # The side stream starts after what the outer one has enqueued (the inputs), and the outer one goes on after
            # it.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                function()
            torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, function: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (rewards, trackers) may use the GPU meanwhile; in the default mode, an allocation
        # of theirs would make the recording fail. The explicit stream block restores the outer stream after a failure,
        # which torch.cuda.graph alone does not do.
        with (
            torch.cuda.device(self.device),
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            function()
        return graph


class Graphs:
    """Runs functions, each under a key: recorded at its first run, replayed from then on.

    ``recorder``: None = each run calls the function. After a recording fails, every run does so too; ``failed`` then
    holds the reason.
    """

    def __init__(self, recorder: GraphRecorder | None) -> None:
        self.recorder = recorder
        self.recorded: dict[Hashable, Recording] = {}
        self.failed: str | None = None

    @classmethod
    def on(cls, device: torch.device) -> Graphs:
        return cls(CudaRecorder(device) if device.type == "cuda" else None)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Runs ``function`` or replays it. Equal keys must mean equal functions of the same tensors."""
        graph = self.recorded.get(key)
        if graph is not None:
            graph.replay()
        elif self.recorder is None:
            function()
        else:
            self.recorder.warm(function)  # also does the work of this call
            try:
                self.recorded[key] = self.recorder.record(function)
            except RuntimeError as error:  # torch's, and those of CUDA
                # What warm() computed stands: a failed recording costs speed only.
                self.recorder, self.recorded = None, {}
                self.failed = str(error).strip().partition("\n")[0]
