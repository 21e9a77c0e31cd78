"""The versions that a training computes with: what it promises to the bit, it promises for the same ones."""

from __future__ import annotations

import platform

import torch
import transformers

from .. import __version__


def versions() -> dict[str, str]:
    """Of trew, Python, PyTorch and transformers, by name."""
    return {
        "trew": __version__, "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
