"""What gpu.py asks of another process: prints the machine, its GPU (null where torch sees none) and the versions as one
line of JSON; with a folder as argument, saves a tiny model there too."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from pathlib import Path

import torch
import transformers

import trew
from demo import machine
from work import SHAPES, save_model


def gpu() -> dict[str, object] | None:
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {
        "name": device.name, "count": torch.cuda.device_count(), "memory_bytes": total, "free_bytes": free,
        "capability": f"{device.major}.{device.minor}", "multiprocessors": device.multi_processor_count,
        "cuda": torch.version.cuda,
    }  # fmt: skip


def main() -> None:
    versions = {"trew": trew.__version__, "python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__}  # fmt: skip
    for name in ("triton", "trl", "peft", "vllm"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    if len(sys.argv) > 1:
        save_model(Path(sys.argv[1]), SHAPES["tiny"])
    print(json.dumps({"machine": machine(), "gpu": gpu(), "versions": versions}))


if __name__ == "__main__":
    main()
