"""What this machine lacks for the ``[lora]`` and ``[learner]`` settings of a run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

from ..config import Config
from ..utils.installing import install_extra, install_packages


def machine_problems(config: Config, device: str) -> list[str]:
    """Lists what this machine lacks for ``[lora]`` and ``[learner]``: packages, a compiler, or a kind of device."""
    found = _package_problems(config, device)
    if config.learner.optimizer == "adamw-offload" and not device.startswith("cuda"):
        found.append(
            f"learner.optimizer: got 'adamw-offload', which moves moments from a GPU's memory to the CPU's, but device "
            f"is {device}; set it to 'adamw', or 'adamw-8bit' if memory is short"
        )
    if config.learner.compile and (missing := compile_problem(device)):
        found.append(f"learner.compile: got true, {missing}; or set learner.compile to false")
    return found + (_liger_problems(config, device) if config.learner.liger else [])


def machine_notes(config: Config, device: str) -> list[str]:
    """Settings that this kind of device makes nothing of."""
    if config.cluster.offload == "none" or device.startswith("cuda"):
        return []
    return [
        f"cluster.offload = {config.cluster.offload!r} saves nothing on {device}: what it takes from a GPU's memory to "
        "the CPU's is there already"
    ]


def _package_problems(config: Config, device: str) -> list[str]:
    lora, optimizer = config.lora, config.learner.optimizer
    needs = [
        (lora.rank > 0, f"lora.rank: got {lora.rank}", "peft", "lora"),
        (lora.base == "nf4", f"lora.base: got {lora.base!r}", "bitsandbytes", "4bit"),
        (optimizer == "adamw-8bit", f"learner.optimizer: got {optimizer!r}", "bitsandbytes", "4bit"),
    ]
    found = []
    for what, package, extra in (need[1:] for need in needs if need[0]):
        if importlib.util.find_spec(package) is None:
            found.append(f"{what}, which needs the package {package}; it is not installed: {install_extra(extra)}")
        elif package == "bitsandbytes" and device == "mps":
            found.append(f"{what}, which does not run on mps; use device = 'cpu' or a CUDA GPU")
    return found


def compile_problem(device: str) -> str | None:
    """Says what torch.compile lacks on a device, with what to do; None if it can run."""
    # torch runs everything as it is then, without a word.
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name) == "1":
            return f"which {name}=1 in the environment switches off; unset {name}"
    if device == "mps":
        return "which is not supported on mps; use device = 'cpu' or a CUDA GPU"
    if device.startswith("cuda"):
        if importlib.util.find_spec("triton") is None:
            return f"which needs the package triton on a GPU; it is not installed: {install_packages('triton')}"
        wanted, names = "a C compiler", (os.environ.get("CC"), "gcc", "clang", "cc")
    else:
        wanted = "a C++ compiler"
        names = (os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"),)  # as torch looks for it
    if any(name and shutil.which(name) for name in names):
        return None
    return f"which needs {wanted}; there is none ({', '.join(filter(None, names))}): install gcc or clang"


def _liger_problems(config: Config, device: str) -> list[str]:
    found = []
    if not device.startswith("cuda"):
        found.append(f"learner.liger: got true, which needs a CUDA GPU, but device is {device}; set it to false")
    elif any(importlib.util.find_spec(package) is None for package in ("liger_kernel", "triton")):
        found.append(
            "learner.liger: got true, which needs the package liger-kernel; it is not installed: "
            f"{install_extra('liger')}"
        )
    if config.learner.compile:
        found.append(
            "learner.liger: got true with learner.compile = true: both fuse the same operations; set one of them to "
            "false"
        )
    return found
