"""What a training computes with: versions, device, threads, kernels. What it promises to the bit, it promises for the
same ones."""

from __future__ import annotations

import platform

import torch
import transformers

from .. import __version__
from ..models.backend import Backend


def versions() -> dict[str, str]:
    """Of trew, Python, PyTorch and transformers, by name."""
    return {
        "trew": __version__, "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip


def arithmetic(device: str, backend: Backend | None) -> dict[str, str]:
    """What else decides how numbers are rounded, by name: the kind of device, and on a CPU the number of threads, which
    divide sums, and whose kernels compute. A run without a compiler takes PyTorch's."""
    kind = torch.device(device).type
    if kind != "cpu":
        return {"device": kind}
    compiled = backend is not None and not backend.missing()
    return {
        "device": kind, "threads": str(torch.get_num_threads()), "kernels": "trew's" if compiled else "PyTorch's"
    }  # fmt: skip
