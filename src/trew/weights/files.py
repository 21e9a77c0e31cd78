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
from ..rollout.vllm.update import FORMAT, Canary, Published
from ..types import TrainingSample
from .places import Place, place_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SEQUENCES, TOKENS, SHARED = 3, 48, 16
"""The canary's sequences and their tokens; of each the first ``SHARED`` are a prompt, which two sequences share."""
SHARD_BYTES = 1 << 30
"""The size of a file: tensors that are converted on the way are in memory twice until their file is written."""
KEPT = 2
"""Versions that stay: one is in use while the next is written."""
LIMITS = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest mean difference of the canary in nats that counts as rounding, by the type that both sides compute in."""


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
        self._remove_old(root)
        name = f"{policy.version:06d}"
        work = root / f".partial-{name}"
        try:
            _require_room(root, self.size, version=policy.version)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            files, known = _save(policy.weights(), work, dtype)
            logprobs = self._logprobs(policy)
            canary = {"ids": [list(ids) for ids in self._ids()], "logprobs": logprobs}
            text = json.dumps(
                {"format": FORMAT, "version": policy.version, "files": files, "tensors": known, "canary": canary}
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
            policy.version, f"{self._tag}.{policy.version}", root, name, hashlib.sha256(text).hexdigest(),
            Canary(self._ids(), tuple(map(tuple, logprobs)), LIMITS[self.dtype]),
        )  # fmt: skip

    def _remove_old(self, root: Path) -> None:
        versions = sorted(path for path in root.iterdir() if path.name.isdecimal())
        for path in versions[: -(KEPT - 1)]:
            shutil.rmtree(path, ignore_errors=True)

    def _ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple((*s.prompt_ids.tolist(), *s.token_ids.tolist()) for s in self._samples)

    def _logprobs(self, policy: Policy) -> list[list[float]]:
        values, _ = policy.untempered(self._samples)
        return [part.tolist() for part in values.split([len(s.token_ids) for s in self._samples])]


def canary_samples(vocabulary: int, positions: int | None = None) -> list[TrainingSample]:
    """Fixed tokens, the same for every model of this vocabulary; shorter where the model has fewer positions."""
    length = min(TOKENS, (positions or TOKENS + 1) - 1)  # a server makes one token more
    ids = torch.randint(vocabulary, (SEQUENCES, length), generator=torch.Generator().manual_seed(0)).numpy()
    shared = min(SHARED, length // 2)
    # The first samples decide how the policy runs samples: two of them share a prompt, as in training.
    ids[1, :shared] = ids[0, :shared]
    return [TrainingSample(row[:shared], row[shared:], group=max(0, i - 1)) for i, row in enumerate(ids)]


def version_size(config: PreTrainedConfig, dtype: str) -> int:
    """Bytes of one published version of a model: all tensors of its state, tied ones under both names."""
    low = getattr(torch, dtype)
    return sum(t.numel() * _stored(t, low).itemsize for t in loading.skeleton(config).state_dict().values())


def _stored(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _save(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes tensors into files of about ``SHARD_BYTES``; returns the manifest's ``files`` and ``tensors``."""
    files: dict[str, Any] = {}
    known: dict[str, Any] = {}
    for number, part in enumerate(_shards(tensors, dtype), start=1):
        path = folder / f"model-{number:05d}.safetensors"
        save_file(part, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            files[path.name] = {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        for name, tensor in part.items():
            known[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return files, known


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
    needed = size + (1 << 20)  # headers and manifest
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
