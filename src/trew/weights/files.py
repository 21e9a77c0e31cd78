"""Publishes weights as files: numbered versions that never change, for servers that load them.

    weights/000012/model-00001.safetensors ...     all tensors, tied ones under both names
                   manifest.json                   SHA-256 and size of each file, the tensors, and the canary

A version appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import StorageError
from ..learner import Policy
from ..models import loading
from ..rollout.vllm.engine import VllmEngine
from ..rollout.vllm.environment import FORMAT
from ..rollout.vllm.routes import Files
from ..rollout.vllm.update import Canary
from .places import Place, place_for
from .publisher import Publisher

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHARD_BYTES = 64 << 20
"""The size of a file: tensors that are converted on the way are in memory twice until their file is written, and files
are hashed side by side, here while others are written."""
HEADERS = 1 << 20
"""Room for what a version's files have besides tensors."""
HASHERS = 4
"""Threads that hash files, at most."""
KEPT = 2
"""Versions that stay: one is in use while the next is written."""


class PublishedFiles(Publisher):
    """Publishes versions as files. ``run``: the run's folder; ``size``: bytes of a version (:func:`version_size`)."""

    def __init__(self, run: Path, *, dtype: str, size: int, vocabulary: int, positions: int | None) -> None:
        super().__init__(dtype=dtype, vocabulary=vocabulary, positions=positions)
        self.run, self.size = run, size
        self._place: Place | None = None

    def close(self) -> None:
        """Removes all versions."""
        super().close()
        if self._place is not None:
            self._place.close()
            self._place = None

    def _take(self, policy: Policy, engine: VllmEngine) -> tuple[Files, Canary]:
        dtype = getattr(torch, self.dtype)
        if self._place is None:
            local = all(server.endpoint.local for server in engine.servers)
            self._place = place_for(self.run, size=self.size, local=local)
        root = self._place.folder
        name = f"{policy.version:06d}"
        work = root / f".partial-{name}"
        try:
            with ThreadPoolExecutor(HASHERS, thread_name_prefix="trew-files") as threads:
                removed = threads.submit(_remove_old, root)
                if shutil.disk_usage(root).free < self.size + HEADERS:
                    removed.result()
                _require_room(root, self.size, version=policy.version)
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                files, known = _save(policy.weights(), work, dtype, threads)
            canary = self._canary(policy)
            told = {"ids": canary.ids, "logprobs": canary.logprobs}
            text = json.dumps(
                {"format": FORMAT, "version": policy.version, "files": files, "tensors": known, "canary": told}
            ).encode()
            (work / "manifest.json").write_bytes(text)
            if self._place.shared:
                _to_disk(work)
            shutil.rmtree(root / name, ignore_errors=True)
            work.rename(root / name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(work, ignore_errors=True)
            raise StorageError(
                f"{root}: weights of version {policy.version}, {_mib(self.size)}, cannot be written: "
                f"{getattr(error, 'strerror', None) or error}; free some space there, or put out on another disk"
            ) from None
        return Files(root, name, hashlib.sha256(text).hexdigest()), canary


def version_size(config: PreTrainedConfig, dtype: str) -> int:
    """Bytes of one published version of a model: all tensors of its state, tied ones under both names."""
    low = getattr(torch, dtype)
    return sum(t.numel() * stored(t, low).itemsize for t in loading.skeleton(config).state_dict().values())


def stored(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type that a tensor is published in, where floating-point numbers have ``dtype``."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def _remove_old(root: Path) -> None:
    versions = sorted(path for path in root.iterdir() if path.name.isdecimal())
    for path in versions[: -(KEPT - 1)]:
        shutil.rmtree(path, ignore_errors=True)


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
        files[path.name] = threads.submit(_size_and_digest, path)
        for name, tensor in part.items():
            known[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return {name: found.result() for name, found in files.items()}, known


def _size_and_digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _shards(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    memory: set[int] = set()
    size = 0
    for name, tensor in tensors:
        made = tensor.detach().to("cpu", stored(tensor, dtype)).contiguous()
        if made.data_ptr() in memory:  # a file cannot hold tensors that share memory
            made = made.clone()
        if part and size + made.nbytes > SHARD_BYTES:
            yield part
            part, memory, size = {}, set(), 0
        part[name] = made
        memory.add(made.data_ptr())
        size += made.nbytes
    if part:
        yield part


def _require_room(root: Path, size: int, *, version: int) -> None:
    free = shutil.disk_usage(root).free
    needed = size + HEADERS
    if free < needed:
        raise StorageError(
            f"{root}: weights of version {version} need {_mib(needed)}, {_mib(free)} are free; free some space there, "
            "or put out on another disk. No server was paused"
        )


def _to_disk(folder: Path) -> None:
    """Other machines must not see a name before the content."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
