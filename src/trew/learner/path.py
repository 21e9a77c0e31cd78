"""How samples are run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutionPath:
    """How samples are run; the default is the model's own forward on padded rows, with logits for all tokens."""

    layers: str = ""  # the backend whose code runs the layers
    shared: bool = False
    fused: bool = False
    accelerator: str = ""  # the configuration's key
