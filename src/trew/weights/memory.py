"""Publishes weights in memory that servers on this host read: segments of host memory, or blocks on a shared GPU."""

from __future__ import annotations

import torch

from ..learner import Policy
from ..rollout.vllm.buckets import fill
from ..rollout.vllm.engine import VllmEngine
from ..rollout.vllm.memory import OnGpu, Segments, gpu_of, segment, segment_name
from ..rollout.vllm.update import Canary
from .files import published_dtype
from .folders import name_of, new_version
from .places import WeightFolder, in_shared_memory
from .publisher import FolderPublisher, Publisher


class PublishedSegments(FolderPublisher):
    """Keeps the two newest versions in shared memory."""

    def _make_place(self, engine: VllmEngine) -> WeightFolder:
        return in_shared_memory(self.size)

    def _take(self, policy: Policy, engine: VllmEngine) -> tuple[Segments, Canary]:
        dtype, place = getattr(torch, self.dtype), self.place(engine)
        with new_version(place, policy.version, self.size) as folder:
            names = map(segment_name, range(1 << 16))
            buckets = tuple(
                filled.bucket
                for filled in fill(
                    policy.weights(), lambda tensor: published_dtype(tensor, dtype),
                    lambda size: segment(folder / next(names), size),
                )
            )  # fmt: skip
            canary = self._canary(policy)
        return Segments(policy.version, place.folder, name_of(policy.version), buckets), canary


class PublishedOnGpu(Publisher):
    """Keeps the newest version on the learner's GPU, ``device``, for servers that have the same one. While it is taken,
    the one before is there as well: a server may be reading it."""

    def __init__(self, *, dtype: str, device: str, vocabulary: int, positions: int | None) -> None:
        super().__init__(dtype=dtype, vocabulary=vocabulary, positions=positions)
        self.device, self.gpu = device, gpu_of(device)

    def close(self) -> None:
        """Gives up the version; its memory is free once servers have let go of it."""
        super().close()
        # Looks for blocks that servers have closed already, and frees them now.
        torch.cuda.ipc_collect()

    def _take(self, policy: Policy, engine: VllmEngine) -> tuple[OnGpu, Canary]:
        dtype = getattr(torch, self.dtype)
        filled = tuple(
            fill(
                policy.weights(), lambda tensor: published_dtype(tensor, dtype),
                lambda size: torch.empty(size, dtype=torch.uint8, device=self.device),
            )
        )  # fmt: skip
        return OnGpu(policy.version, self.gpu, filled), self._canary(policy)
