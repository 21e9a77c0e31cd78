"""CUDA graphs: record once what a function does to fixed buffers, and replay it in one launch.

Run from Python, a decoding step is hundreds of kernels, each of which takes longer to launch than to run. A graph
launches all of them at once. What it replays are the very same kernels on the very same addresses; so the function must

    read and write tensors alone that stay where they are as long as the graph does,
    decide nothing by what is in them, and ask for nothing to be brought to the CPU,
    leave its result in one of them: what it makes on the way lives in a pool that all graphs share, so that the next
    one to run may overwrite it.

A function must be repeatable (run twice in a row, it leaves what one run leaves), as it is run once before it is
recorded: libraries choose their kernels and take their workspaces at the first call, which must not be part of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch


class Recorded(Protocol):
    """What was recorded."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Records ``function`` without running it; it has been run before, perhaps on other contents."""

    def warm(self, function: Callable[[], None]) -> None: ...

    def record(self, function: Callable[[], None]) -> Recorded: ...


class CudaRecorder:
    """By torch.cuda.graph, on a stream of its own, as recording cannot be done on the default one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()

    def warm(self, function: Callable[[], None]) -> None:
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                function()
            torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, function: Callable[[], None]) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (rewards, trackers) may use the GPU meanwhile; they are no part of the graph.
        # The outer stream is put back also where the recording fails, which torch.cuda.graph alone does not do.
        with (
            torch.cuda.device(self.device),
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            function()
        return graph


class Graphs:
    """Runs functions, each under a key: recorded at its first run, replayed from then on.

    ``recorder``: None = each run calls the function. The same happens from the first recording that fails on;
    ``failed`` then says why.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.recorded: dict[Hashable, Recorded] = {}
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
                self.recorder, self.recorded = None, {}
                self.failed = str(error).strip().partition("\n")[0]
