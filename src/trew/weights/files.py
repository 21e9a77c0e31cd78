"""Publishes weights as files: numbered versions that never change, for servers that load them.

    weights/000012/model-00001.safetensors ...     all tensors, tied ones under both names
                   manifest.json                   BLAKE3 digest and size of each file, and the tensors

A version appears whole or not at all. It is announced to the servers in use, which verify it while they still generate
and the canary is computed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from safetensors.torch import save_file
from torch import Tensor

from ..learner import Policy
from ..models import loading
from ..rollout.vllm import handshake
from ..rollout.vllm.client import ServerGone
from ..rollout.vllm.endpoint import Endpoint
from ..rollout.vllm.engine import VllmEngine
from ..rollout.vllm.environment import FORMAT
from ..rollout.vllm.routes import Files
from ..rollout.vllm.update import Canary
from .folders import name_of, new_version
from .places import WeightFolder, place_for
from .publisher import FolderPublisher

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHARD_BYTES = 64 << 20
"""The size of a file: tensors that are converted on the way are in memory twice until their file is hashed, and files
are hashed side by side, here while others are written."""
HASHERS = 4
"""Threads that hash files, at most."""


class PublishedFiles(FolderPublisher):
    """Publishes versions as files. ``run``: the run's folder; ``size``: bytes of a version (:func:`version_size`)."""

    def __init__(self, run: Path, *, dtype: str, size: int, vocabulary: int, positions: int | None) -> None:
        super().__init__(dtype=dtype, size=size, vocabulary=vocabulary, positions=positions)
        self.run = run

    def _make_place(self, engine: VllmEngine) -> WeightFolder:
        endpoints = [server.endpoint for server in engine.servers]
        place = place_for(self.run, size=self.size, local=all(endpoint.local for endpoint in endpoints))
        # A port of this machine may lead to another one, or into a container with a shared memory of its own.
        if place.shared or all(_sees(endpoint, place.folder) for endpoint in endpoints if endpoint.socket is None):
            return place
        place.close()
        return place_for(self.run, size=self.size, local=False)

    def _take(self, policy: Policy, engine: VllmEngine) -> tuple[Files, Canary]:
        dtype, place = getattr(torch, self.dtype), self.place(engine)
        with new_version(place, policy.version, self.size) as folder:
            with ThreadPoolExecutor(HASHERS, thread_name_prefix="trew-files") as threads:
                files, known = _save(policy.weights(), folder, dtype, threads)
            manifest = {"format": FORMAT, "version": policy.version, "files": files, "tensors": known}
            text = json.dumps(manifest).encode()
            (folder / "manifest.json").write_bytes(text)
        # Servers get this digest with the update: it vouches for the manifest, and the manifest for every file.
        route = Files(place.folder, name_of(policy.version), blake3(text).hexdigest())
        # Not those that sleep or have failed: what they answer is the update's matter.
        route.announce([s.endpoint for s in engine.servers if s.version is not None and not s.asleep])
        return route, self._canary(policy)


def _sees(endpoint: Endpoint, folder: Path) -> bool:
    """Whether a server sees a folder; one that is gone is the update's matter."""
    try:
        return not handshake.refusal(endpoint, {"root": str(folder), "format": FORMAT})
    except ServerGone:
        return True


def version_size(config: PreTrainedConfig, dtype: str) -> int:
    """Returns the bytes of a published version of a model: all tensors of its state, tied ones under both names."""
    low = getattr(torch, dtype)
    return sum(t.numel() * published_dtype(t, low).itemsize for t in loading.skeleton(config).state_dict().values())


def published_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that a tensor is published in: ``dtype`` for floating-point numbers."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def _save(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, threads: ThreadPoolExecutor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes tensors into files of about ``SHARD_BYTES``, which ``threads`` hash; returns the manifest's ``files`` and
    ``tensors``."""
    files: dict[str, Future[dict[str, Any]]] = {}
    known: dict[str, Any] = {}
    for number, part in enumerate(_shards(tensors, dtype), start=1):
        path = folder / f"model-{number:05d}.safetensors"
        save_file(part, path, metadata={"format": "pt"})
        files[path.name] = threads.submit(_size_and_digest, path, part)
        for name, tensor in part.items():
            known[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return {name: found.result() for name, found in files.items()}, known


def _size_and_digest(path: Path, part: Mapping[str, Tensor]) -> dict[str, Any]:
    """Of a file that was written with these tensors. Their bytes are hashed in memory, which saves reading the file:
    one that has others does not pass when a server verifies it."""
    with path.open("rb") as file:
        # A safetensors file: 8 bytes with the length of the header, the header as JSON, then the tensors by offset.
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
    digest = blake3(size + header)
    table = json.loads(header)
    table.pop("__metadata__", None)
    for name in sorted(table, key=lambda name: table[name]["data_offsets"]):
        digest.update(part[name].reshape(-1).view(torch.uint8).numpy().data)
    return {"size": path.stat().st_size, "blake3": digest.hexdigest()}


def _shards(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    memory: set[int] = set()
    size = 0
    for name, tensor in tensors:
        # The live weight itself where device, dtype and layout are right already: weights must not change before the
        # digest of the file is known.
        made = tensor.detach().to("cpu", published_dtype(tensor, dtype)).contiguous()
        if made.data_ptr() in memory:  # a file cannot hold tensors that share memory
            made = made.clone()
        # ``part and``: a tensor that is larger than SHARD_BYTES gets a file to itself, and no empty one before it.
        if part and size + made.nbytes > SHARD_BYTES:
            yield part
            part, memory, size = {}, set(), 0
        part[name] = made
        memory.add(made.data_ptr())
        size += made.nbytes
    if part:
        yield part
