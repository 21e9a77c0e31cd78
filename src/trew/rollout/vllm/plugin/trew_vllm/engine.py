"""vLLM's side of published weights: files, streams, shared memory. Imported inside vLLM only."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # pyrefly: ignore[missing-import]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # pyrefly: ignore[missing-import]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (  # pyrefly: ignore[missing-import]
    get_layerwise_info,
)
from vllm.platforms import current_platform  # pyrefly: ignore[missing-import]

from . import memory, published, stream
from .ahead import Ahead


@dataclass
class Init(WeightTransferInitInfo):
    """``root`` holds the versions; ``format`` is that of the trainer's manifests. ``folder`` and ``manifest_digest``
    announce a version, as :class:`Update` names it: it is verified while the server generates."""

    root: str
    format: int
    folder: str = ""
    manifest_digest: str = ""


@dataclass
class Update(WeightTransferUpdateInfo):
    """A version: its folder's name below ``root``, and its manifest's BLAKE3 digest in hexadecimal."""

    folder: str
    manifest_digest: str


class FilesEngine(WeightTransferEngine[Init, Update]):
    """Loads whole versions. The model is untouched until a version is verified, and complete once finish returns;
    after an error in between, the next complete update repairs it."""

    init_info_cls, update_info_cls = Init, Update
    supports_draft_weight_update = False

    root: Path | None = None
    loaded: published.Version | None = None  # since the last start

    @functools.cached_property
    def ahead(self) -> Ahead:
        """The version that was announced last."""
        return Ahead()

    def init_transfer_engine(self, init_info: Init) -> None:
        """Sets the root folder, and begins to verify a version that is announced. May be repeated: a trainer that was
        started again calls it anew."""
        published.check_format(init_info.format)
        root = Path(init_info.root)
        if not root.is_absolute() or not root.is_dir():
            raise published.Refused(f"root: got {init_info.root!r}, accepts the absolute path of a folder on this host")
        self.root = root.resolve()
        if init_info.folder:
            self.ahead.begin(self.root, init_info.folder, init_info.manifest_digest)

    def start_weight_update(self) -> None:
        """Touches nothing: layers are given up only for a version that has been verified."""
        self.loaded = None

    def update_weights(self, update_info: dict) -> None:
        """Overrides the base class, which synchronizes an accelerator that a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Verifies a version, then loads it into the model's layers. One that is loaded is loaded: a trainer may ask
        again when it has not got the answer."""
        if self.root is None:
            raise published.Refused("init_weight_transfer_engine was not called")
        # Verified before the layers are given up.
        version = self.ahead.take(self.root, update_info.folder, update_info.manifest_digest)
        if version == self.loaded:
            return
        if self.loaded is not None:
            raise published.Refused(
                f"version {version.number} was sent before version {self.loaded.number} was finished; start a new "
                "update"
            )
        self._check_model(version.tensors)
        self._load(_tensors(version))
        self.loaded = version

    def _check_model(self, tensors: Mapping[str, published.Tensor]) -> None:
        config = self.model_config
        published.check_model(
            tensors,
            started_from=published.checkpoint(Path(config.model)),
            tied=bool(getattr(config.hf_text_config, "tie_word_embeddings", False)),
        )

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gives up the layers' weights for these. Where they do not all come, layers that are incomplete get their old
        weights back: the next update would otherwise go on counting where this one ended."""
        _forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(tensors)
        except BaseException:
            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                info.loaded_weights, info.load_numel = [], 0
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        """Completes the layers. Raises where no version was loaded: vLLM would take on the new number without it."""
        if self.loaded is None:
            raise published.Refused("no version was loaded since start_weight_update")
        finalize_layerwise_reload(self.model, self.model_config)
        self.loaded = None

    def shutdown(self) -> None:
        """Nothing is held open."""


@dataclass
class StreamInit(WeightTransferInitInfo):
    """``torch`` and ``backend`` are the trainer's, of a stream; the others are as in :class:`Init`, for files."""

    format: int
    root: str = ""
    torch: str = ""
    backend: str = ""
    folder: str = ""
    manifest_digest: str = ""


def _files(init: StreamInit | MemoryInit) -> Init:
    return Init(init.root, init.format, init.folder, init.manifest_digest)


@dataclass
class StreamUpdate(WeightTransferUpdateInfo):
    """``offer``: a stream, see :mod:`trew_vllm.stream`. Otherwise files, as in :class:`Update`."""

    offer: dict[str, Any] | None = None
    folder: str = ""
    manifest_digest: str = ""


class StreamEngine(FilesEngine):
    """Receives versions as streams, and loads files too. What can be known beforehand is checked before the model is
    touched; a stream that breaks off leaves a part of it in the model, which the next complete update repairs."""

    init_info_cls, update_info_cls = StreamInit, StreamUpdate

    def init_transfer_engine(self, init_info: StreamInit) -> None:
        """Checks that the trainer can send to this process, or sets the root folder."""
        if init_info.torch:
            published.check_format(init_info.format)
            stream.check_sender(init_info.torch, init_info.backend, self.device)
        else:
            super().init_transfer_engine(_files(init_info))

    def receive_weights(self, update_info: StreamUpdate) -> None:
        """Joins the trainer's group and loads what comes."""
        if update_info.offer is None:
            super().receive_weights(Update(update_info.folder, update_info.manifest_digest))
            return
        if self.loaded is not None:
            raise published.Refused(f"version {self.loaded.number} was not finished; start a new update")
        offer = stream.read(update_info.offer, self.device)
        self._check_model(offer.tensors)
        parallel = self.parallel_config
        # Rank 0 is the trainer; workers of all data-parallel engines follow.
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        with contextlib.closing(stream.Receiver(offer, rank=rank, device=self.device)) as receiver:
            tensors = receiver.tensors()
            self._load(tensors)
            for _ in tensors:  # the trainer also sends what the model has no use for
                pass
        # Without files: only its number and its tensors are known.
        self.loaded = published.Version(Path(), "", offer.version, (), offer.tensors)


@dataclass
class MemoryInit(WeightTransferInitInfo):
    """``root`` has the segments; ``gpu``: the UUID of the GPU that weights are on. The others, and ``root``, are as in
    :class:`Init`, for files."""

    format: int
    root: str = ""
    gpu: str = ""
    folder: str = ""
    manifest_digest: str = ""


@dataclass
class MemoryUpdate(WeightTransferUpdateInfo):
    """``memory``: a version in shared memory, see :mod:`trew_vllm.memory`. Otherwise files, as in :class:`Update`."""

    memory: dict[str, Any] | None = None
    folder: str = ""
    manifest_digest: str = ""


class MemoryEngine(FilesEngine):
    """Loads versions out of the trainer's memory, and files too. Everything is verified before the model is touched,
    and nothing stays mapped afterwards."""

    init_info_cls, update_info_cls = MemoryInit, MemoryUpdate

    def init_transfer_engine(self, init_info: MemoryInit) -> None:
        """Checks that this process can open the trainer's memory."""
        if init_info.gpu:
            published.check_format(init_info.format)
            memory.check_gpu(init_info.gpu, self.device)
        else:
            super().init_transfer_engine(_files(init_info))

    def receive_weights(self, update_info: MemoryUpdate) -> None:
        """Maps a version, verifies and loads it, and lets go of it."""
        if update_info.memory is None:
            super().receive_weights(Update(update_info.folder, update_info.manifest_digest))
            return
        try:
            if self.loaded is not None:
                raise published.Refused(f"version {self.loaded.number} was not finished; start a new update")
            offer = memory.read(update_info.memory, self.device)
            self._check_model(offer.tensors)
        except BaseException:
            # The trainer counts a reader for every handle: those that are not opened must be given back.
            memory.release(update_info.memory.get("handles") or ())
            raise
        with contextlib.closing(memory.Mapped(offer, root=self.root, device=self.device)) as mapped:
            self._load(mapped.tensors())
        self.loaded = published.Version(Path(), "", offer.version, (), offer.tensors)


def _forget_packed_experts(model: Any) -> None:
    """Has experts on CPUs packed anew. vLLM packs them as it makes their kernel, which it keeps: it would read weights
    that come later as if they were packed. On GPUs it is done with each load."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _tensors(version: published.Version) -> Iterator[tuple[str, torch.Tensor]]:
    for name in version.files:
        with safe_open(version.folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                yield key, file.get_tensor(key)
