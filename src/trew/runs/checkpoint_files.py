"""Checkpoints that survive a kill at any instant: written aside, fsynced, hashed, then renamed.

    checkpoints/000020/   model.safetensors  optimizer.safetensors  config.json  state.json  manifest.json

A folder under its final name is complete; its manifest has the size and SHA-256 of every file, and loading trusts
nothing that does not match. Tensors are safetensors, everything else JSON: loading runs no code. Tensors have the names
in their files that they have in the model, so that transformers (peft, for adapters) loads the folder as a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError, ResumeError
from ..utils import shapes
from ..utils.shapes import Count, ShapeError

T = TypeVar("T")

FORMAT = 3
"""Version of the layout; a checkpoint with another one is refused."""

ASIDE = ".tmp-"
"""How the names of folders begin that are being written or removed."""

_NAME = re.compile(r"(\d{6,})(?:\.(\d+))?")  # step, and a counter where the same step was saved again


@dataclass(frozen=True, slots=True)
class File:
    """A file as the manifest knows it."""

    size: Count
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """manifest.json: what belongs together."""

    format: int
    step: Count
    files: dict[str, File]


@dataclass(frozen=True, slots=True)
class StateFile:
    """state.json: what is no tensor, and how many tensors there are by file, so that no file can be missing."""

    format: int
    step: Count
    tensors: dict[str, Count]
    meta: dict[str, object]


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    keep: int,
    best: int | None = None,
    beside: Callable[[Path], None] | None = None,
    read: Callable[[], None] | None = None,
) -> Path:
    """Writes one checkpoint and returns its folder; then removes all but the ``keep`` newest up to this step, and that
    of step ``best``.

    Each tensor goes to the file that its name begins with: ``model.embed.weight`` is embed.weight in model.safetensors.
    ``meta`` is whatever JSON can hold; ``beside`` may write more files into the folder that it is given. ``read`` is
    called when the tensors are no longer needed. Checkpoints of later steps are removed too: they were unusable when
    the run was resumed, or it would be past them. When something cannot be written, the older ones stay, nothing
    half-written does, and CheckpointError says why.
    """
    assert keep >= 1
    root = Path(root)
    aside = root / f"{ASIDE}{step:06d}-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stray in root.glob(f"{ASIDE}*"):
            _remove(stray)
        aside.mkdir()
        _write_tensors(aside, tensors)
        if read is not None:
            read()
        if beside is not None:
            beside(aside)
        _complete(aside, step, meta, Counter(_file_of(name) for name in tensors))
        target = _free_name(root, step)
        os.rename(aside, target)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(
            f"{root}: the checkpoint of step {step} could not be written: {reason}. Older checkpoints are as they "
            "were. Make room or give another place (out, checkpoint.keep), then continue with --resume"
        ) from error
    _rotate(root, target, keep=keep, best=best)
    return target


def size(folder: Path) -> int:
    """Bytes of a checkpoint's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


Loaded = tuple[int, dict[str, Tensor], dict[str, Any]]
"""Step, tensors and meta, as they were given to :func:`save`."""


def load_latest(root: Path) -> tuple[Loaded | None, list[str]]:
    """The newest complete checkpoint, and messages about everything that was passed over.

    None when there is no checkpoint in ``root``, or no ``root``. CheckpointError when there are some and none of them
    is usable (a run must not silently start over), or when the newest was written in another format.
    """
    root = Path(root)
    messages: list[str] = []
    if not root.is_dir():
        return None, messages
    for entry in sorted(root.iterdir()):
        if entry.name.startswith(ASIDE):
            messages.append(f"{entry}: left behind by an interrupted write or removal; ignored")
        elif not _is_checkpoint(entry):
            messages.append(f"{entry}: is not a checkpoint of trew; ignored")
    broken = []
    for folder in reversed(_checkpoints(root)):
        try:
            loaded = load(folder)
        except _BrokenError as error:
            broken.append(f"{folder}: {error}; not used")
            continue
        return loaded, messages + broken
    if broken:
        raise ResumeError(
            "\n".join(broken) + f"\n{root}: no checkpoint is usable, and the run is not silently started over. Put a "
            "backup of one there, or begin anew with --overwrite"
        )
    return None, messages


class _BrokenError(Exception):
    """A checkpoint that is incomplete or damaged; says in which way."""


def load(folder: Path) -> Loaded:
    """One checkpoint, every file verified against the manifest before it is read, and all parts against each other."""
    manifest = _read_manifest(folder)
    for name, expected in manifest.files.items():
        _verify(folder, name, expected)
    if "state.json" not in manifest.files:
        raise _BrokenError("state.json is missing")
    state = _shaped(StateFile, _read_json(folder / "state.json"), "state.json")
    for where, step in (("manifest.json", manifest.step), ("state.json", state.step)):
        if step != _order(folder)[0]:
            raise _BrokenError(f"{where} is of step {step}")
    tensors: dict[str, Tensor] = {}
    files = {name for name in manifest.files if name.endswith(".safetensors")}
    for name in sorted(files | set(state.tensors)):
        if name not in files:
            raise _BrokenError(f"manifest.json does not name {name}, which has {state.tensors[name]} tensors")
        found = _load_tensors(folder / name)
        if len(found) != state.tensors.get(name, 0):
            raise _BrokenError(f"{name} has {len(found)} tensors, {state.tensors.get(name, 0)} by state.json")
        tensors |= found
    return state.step, tensors, state.meta


def _read_manifest(folder: Path) -> Manifest:
    table = _read_json(folder / "manifest.json")
    version = table.get("format")
    if isinstance(version, int) and not isinstance(version, bool) and version != FORMAT and abs(version) < 1 << 31:
        age, advice = ("a newer", "Update trew") if version > FORMAT else ("an older", "Continue with that version")
        raise ResumeError(
            f"{folder}: was written in format {version} by {age} trew; this one reads format {FORMAT}. {advice}, or "
            "start a new run with another out"
        )
    return _shaped(Manifest, table, "manifest.json")


def _shaped(shape: type[T], table: dict[str, Any], name: str) -> T:
    try:
        return shapes.read(shape, table, name)
    except ShapeError as error:
        raise _BrokenError(f"{error}") from None


def _verify(folder: Path, name: str, expected: File) -> None:
    """Raises where a file is not the one that the manifest means."""
    path = folder / name
    if Path(name).name != name or "\0" in name or path.is_symlink() or not path.is_file():
        raise _BrokenError(f"{name} is missing")
    if path.stat().st_size != expected.size:
        raise _BrokenError(f"{name} has {path.stat().st_size} bytes instead of {expected.size}")
    if _sha256(path) != expected.sha256:
        raise _BrokenError(f"{name} is damaged (SHA-256 differs)")


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return {f"{path.stem}.{key}": tensor for key, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise _BrokenError(f"{path.name} is not a safetensors file: {error}") from None


def _file_of(name: str) -> str:
    """The file that a tensor is in, by its name."""
    return f"{name.partition('.')[0]}.safetensors"


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, key = name.partition(".")
        parts.setdefault(part, {})[key] = tensor.detach().cpu().contiguous()
    for part, members in parts.items():
        save_file(members, folder / f"{part}.safetensors", metadata={"format": "pt"})


def _complete(folder: Path, step: int, meta: Mapping[str, Any], tensors: Mapping[str, int]) -> None:
    """Writes what belongs to the tensors; the manifest last: without it nothing in the folder counts, even where a
    rename is not atomic."""
    _write_json(folder / "state.json", {"format": FORMAT, "step": step, "tensors": dict(tensors), "meta": dict(meta)})
    files = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        files[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    _write_json(folder / "manifest.json", {"format": FORMAT, "step": step, "files": files})
    _sync(folder / "manifest.json")
    _sync(folder)


def _free_name(root: Path, step: int) -> Path:
    """``000020``, or ``000020.1`` and so on where a broken or older one has the name: none is ever overwritten."""
    candidates = (root / (f"{step:06d}" + (f".{n}" if n else "")) for n in range(1 << 20))
    return next(path for path in candidates if not os.path.lexists(path))


def _rotate(root: Path, newest: Path, *, keep: int, best: int | None) -> None:
    """Removes what is older than the ``keep`` newest, or later than ``newest``; what cannot be removed stays, and so
    does the last one of step ``best``."""
    found = _checkpoints(root)
    until = found.index(newest) + 1
    chosen = [folder for folder in found[:until] if _order(folder)[0] == best][-1:]
    for folder in [f for f in [*found[: max(until - keep, 0)], *found[until:]] if f not in chosen]:
        # Renamed first: a kill in the middle of the removal must not leave half a checkpoint under a good name.
        doomed = root / f"{ASIDE}old-{folder.name}"
        try:
            os.rename(folder, doomed)
        except OSError:
            continue
        _remove(doomed)


def _checkpoints(root: Path) -> list[Path]:
    """Folders named as checkpoints, oldest first."""
    return sorted((p for p in root.iterdir() if _is_checkpoint(p)), key=_order)


def _is_checkpoint(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Forces a file or a folder's entries onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return shapes.json_object(path.read_bytes(), path.name)
    except FileNotFoundError:
        raise _BrokenError(f"{path.name} is missing") from None
    except (OSError, ShapeError) as error:
        raise _BrokenError(f"{path.name} cannot be read: {error}") from None
