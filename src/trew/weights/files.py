"""Publishes weights as files: numbered versions that never change, for servers that load them.

    weights/000012/model-00001.safetensors ...     all tensors, tied ones under both names
                   manifest.json                   SHA-256 and size of each file, the tensors, and the canary

A version appears whole or not at all. The canary is what the policy computes with these weights on a few fixed tokens:
a server that computes something else has other weights, whatever it says.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import EngineError, StorageError
from ..learner import Policy
from ..models import loading
from ..rollout import Engine
from ..rollout.vllm.engine import VllmEngine
from ..rollout.vllm.update import FORMAT, Published
from .canary import canary_of, canary_samples
from .places import Place, place_for

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


class PublishedFiles:
    """Brings the policy's weights to a :class:`.VllmEngine`. ``run``: the run's folder. ``dtype``: the type that the
    servers compute in, float32 or bfloat16; the files have it too. ``vocabulary``, ``positions``: of the model;
    ``size``: bytes of a version (:func:`version_size`)."""

    def __init__(self, run: Path, *, dtype: str, size: int, vocabulary: int, positions: int | None) -> None:
        self.run, self.dtype, self.size = run, dtype, size
        self.newest: Published | None = None
        self._samples = canary_samples(vocabulary, positions)
        # Another run's version 3 on a server that both use must not pass for this one's.
        self._tag = secrets.token_hex(4)
        self._place: Place | None = None

    def publish(self, policy: Policy, engine: Engine) -> None:
        """Writes the weights, and brings all servers to them. Raises StorageError, before any server is asked for
        anything, where there is no room; EngineError where no server has got the weights."""
        if not isinstance(engine, VllmEngine):
            raise EngineError(f"weights are published to vLLM servers, got {type(engine).__name__}")
        engine.update(self.write(policy, engine))

    def is_new(self, policy: Policy) -> bool:
        """Whether the policy's weights are not written yet."""
        return self.newest is None or self.newest.version != policy.version

    def write(self, policy: Policy, engine: VllmEngine) -> Published:
        """The first half of :meth:`publish`: the policy's version, written where it is new. No server is asked for
        anything."""
        if self.newest is None or self.is_new(policy):
            self.newest = self._write(policy, local=all(server.endpoint.local for server in engine.servers))
        return self.newest

    def close(self) -> None:
        """Removes all versions."""
        if self._place is not None:
            self._place.close()
            self._place = None

    # ---- writing

    def _write(self, policy: Policy, *, local: bool) -> Published:
        dtype = getattr(torch, self.dtype)
        if self._place is None:
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
            canary = canary_of(policy, self._samples, self.dtype)
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
        return Published(
            policy.version, f"{self._tag}.{policy.version}", root, name, hashlib.sha256(text).hexdigest(), canary
        )  # fmt: skip


def version_size(config: PreTrainedConfig, dtype: str) -> int:
    """Bytes of one published version of a model: all tensors of its state, tied ones under both names."""
    low = getattr(torch, dtype)
    return sum(t.numel() * _stored(t, low).itemsize for t in loading.skeleton(config).state_dict().values())


def _stored(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
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
        made = tensor.detach().to("cpu", _stored(tensor, dtype)).contiguous()
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
