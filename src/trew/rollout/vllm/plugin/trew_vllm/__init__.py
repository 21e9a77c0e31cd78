"""Registers trew's weight transfer engines in every process of vLLM."""

__version__ = "1.6"

ENGINES = {"trew_files": "FilesEngine", "trew_stream": "StreamEngine", "trew_memory": "MemoryEngine"}


def register() -> None:
    """Called by vLLM through the entry point group ``vllm.general_plugins``; may be called more than once."""
    from vllm.distributed.weight_transfer.factory import (  # pyrefly: ignore[missing-import]
        WeightTransferEngineFactory as Factory,
    )

    for name, engine in ENGINES.items():
        if name not in Factory._registry:  # a second registration raises
            Factory.register_engine(name, "trew_vllm.engine", engine)
