"""Registers the weight transfer engine ``trew_files`` in every process of vLLM."""

__version__ = "1.0"

ENGINE = "trew_files"


def register() -> None:
    """Called by vLLM through the entry point group ``vllm.general_plugins``; may be called more than once."""
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory as Factory,
    )

    if ENGINE not in Factory._registry:  # a second registration raises
        Factory.register_engine(ENGINE, "trew_vllm.engine", "FilesEngine")
