"""Publishes weights as streams: servers receive them through process groups, without files."""

from __future__ import annotations

import torch

from ..learner import Policy
from ..rollout.vllm.buckets import fill
from ..rollout.vllm.engine import VllmEngine
from ..rollout.vllm.stream import Stream
from ..rollout.vllm.update import Canary
from .files import published_dtype
from .publisher import Publisher


class PublishedStream(Publisher):
    """Keeps the newest version in CPU memory and sends it to servers: at an update, and when a server has been
    restarted. ``device``: the learner's, which decides between NCCL and gloo."""

    def __init__(self, *, dtype: str, device: str, vocabulary: int, positions: int | None) -> None:
        super().__init__(dtype=dtype, vocabulary=vocabulary, positions=positions)
        self.device = device

    def _take(self, policy: Policy, engine: VllmEngine) -> tuple[Stream, Canary]:
        dtype = getattr(torch, self.dtype)
        # A copy: a server that restarts later gets this version, however far the policy has moved.
        filled = tuple(fill(policy.weights(), lambda tensor: published_dtype(tensor, dtype)))
        return Stream(policy.version, filled, self.device), self._canary(policy)
