"""``FilesEngine``: vLLM's side of published weights. Imported inside vLLM only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from . import published


@dataclass
class Init(WeightTransferInitInfo):
    """``root`` holds the versions; ``format`` is that of the trainer's manifests."""

    root: str
    format: int


@dataclass
class Update(WeightTransferUpdateInfo):
    """A version: its folder's name below ``root``, and its manifest's SHA-256 in hexadecimal."""

    folder: str
    manifest_sha256: str


class FilesEngine(WeightTransferEngine[Init, Update]):
    """Loads whole versions. The model is untouched until a version is verified, and complete once finish returns;
    after an error in between, the next complete update repairs it."""

    init_info_cls, update_info_cls = Init, Update
    supports_draft_weight_update = False

    root: Path | None = None
    loaded: published.Version | None = None  # since the last start

    def init_transfer_engine(self, init_info: Init) -> None:
        """Sets the root folder. May be repeated: a trainer that was started again calls it anew."""
        published.check_format(init_info.format)
        root = Path(init_info.root)
        if not root.is_absolute() or not root.is_dir():
            raise published.Refused(f"root: got {init_info.root!r}, accepts the absolute path of a folder on this host")
        self.root = root.resolve()

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
        version = published.read(self.root, update_info.folder, update_info.manifest_sha256)
        if version == self.loaded:
            return
        if self.loaded is not None:
            raise published.Refused(
                f"version {version.number} was sent before version {self.loaded.number} was finished; start a new "
                "update"
            )
        config = self.model_config
        published.check_model(
            version.tensors,
            started_from=published.checkpoint(Path(config.model)),
            tied=bool(getattr(config.hf_text_config, "tie_word_embeddings", False)),
        )
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_tensors(version))
        self.loaded = version

    def finish_weight_update(self) -> None:
        """Completes the layers. Raises where no version was loaded: vLLM would take on the new number without it."""
        if self.loaded is None:
            raise published.Refused("no version was loaded since start_weight_update")
        finalize_layerwise_reload(self.model, self.model_config)
        self.loaded = None

    def shutdown(self) -> None:
        """Nothing is held open."""


def _tensors(version: published.Version) -> Iterator[tuple[str, torch.Tensor]]:
    for name in version.files:
        with safe_open(version.folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                yield key, file.get_tensor(key)
