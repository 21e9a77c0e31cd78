"""Checkpoints that survive a kill at any moment: written to a temporary folder, fsynced, hashed, then renamed.

    checkpoints/000020/   model.safetensors  optimizer.safetensors  config.json  state.json  manifest.json

Where weights are sharded over ranks, each rank writes its part (:mod:`.tensor_files`), and rank 0 everything else.

A folder under its final name is complete. Its manifest has the size and SHA-256 of every file, and loading rejects
files that do not match. Tensors are safetensors and everything else is JSON, so loading runs no code. Tensors are
stored under their names in the model, so that transformers (or peft, for adapters) can load the folder as a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from ..errors import CheckpointError, ResumeError
from ..utils import shapes
from ..utils.shapes import Count, ShapeError
from . import tensor_files
from .tensor_files import FileError, TensorOnDisk

T = TypeVar("T")

FORMAT = 3
"""Version of the layout; checkpoints of other versions are refused."""

ASIDE = ".tmp-"
"""Prefix of folders that are being written or removed."""

PART_S = 300.0
"""Seconds without any progress that rank 0 waits for the parts of other ranks."""

_NAME = re.compile(r"(\d{6,})(?:\.(\d+))?")  # the step, and a counter where the same step was saved again


@dataclass(frozen=True, slots=True)
class File:
    """A file's entry in the manifest."""

    size: Count
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """manifest.json: the files of one checkpoint."""

    format: int
    step: Count
    files: dict[str, File]


@dataclass(frozen=True, slots=True)
class StateFile:
    """state.json: everything that is not a tensor, and the number of tensors per file, so that a missing file shows."""

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
    extra_files: Callable[[Path], None] | None = None,
    read: Callable[[], None] | None = None,
    parts: int = 1,
    abandoned: Callable[[], bool] = lambda: False,
) -> Path:
    """Writes one checkpoint and returns its folder; then removes all but the ``keep`` newest ones and the one of step
    ``best``.

    The first part of a tensor's name is its file: ``model.embed.weight`` is embed.weight in model.safetensors. ``meta``
    is anything JSON can hold. ``extra_files`` may write more files into the folder. ``read`` is called once the
    tensors are no longer needed. ``parts``: the number of ranks that write into :func:`aside`, this one included; once
    ``abandoned`` returns True, missing ones are not waited for. Checkpoints of later steps are removed too: they were
    unusable when the run was resumed, otherwise it would be past them. If a write fails, older checkpoints stay,
    nothing half-written does, and CheckpointError says why.
    """
    assert keep >= 1
    root = Path(root)
    written = aside(root, step)
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Leftovers of a killed write. The run holds the folder's lock, so that no other process is writing here.
        for stray in root.glob(f"{ASIDE}*"):
            _remove(stray)
        written.mkdir()
        # Tensors first: once they are on the way to the disk, training may change them (``read``).
        tensor_files.write(written, tensors, parts=parts)
        if read is not None:
            read()
        if extra_files is not None:
            extra_files(written)
        # Waits for the other ranks' parts before the manifest, which has the hash of every file.
        _complete(written, step, meta, _counts(written, tensors, parts, abandoned))
        target = _free_name(root, step)
        # The folder's files are durable before its final name exists, and the name before the save counts as done.
        os.rename(written, target)
        _sync(root)
    except (OSError, SafetensorError, FileError) as error:
        shutil.rmtree(written, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(
            f"{root}: the checkpoint of step {step} could not be written: {reason}. Older checkpoints are "
            "unchanged. Free disk space (or lower checkpoint.keep), then continue with --resume"
        ) from error
    # Only now: until the new checkpoint is complete, an old one must not go.
    _rotate(root, target, keep=keep, best=best)
    return target


def aside(root: Path, step: int, pid: int | None = None) -> Path:
    """The folder in which process ``pid`` (this one by default) writes the checkpoint of ``step``."""
    return root / f"{ASIDE}{step:06d}-{os.getpid() if pid is None else pid}"


def save_part(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    part: int,
    parts: int,
    read: Callable[[], None] = lambda: None,
    abandoned: Callable[[], bool] = lambda: False,
) -> None:
    """Writes this rank's part into ``folder``, which rank 0 makes (:func:`aside`). An error is left there as a file,
    for rank 0 to report."""
    end = time.monotonic() + PART_S
    # Rank 0 makes the folder, perhaps on another machine: this one waits until it sees it.
    while not folder.is_dir():
        if abandoned() or time.monotonic() > end:
            return  # rank 0 died, or could not even make the folder and says why
        time.sleep(0.01)
    try:
        tensor_files.write(folder, tensors, part=part, parts=parts)
        read()
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            # What was begun makes room for the message where the disk is full: rank 0 would wait for one or the other.
            for begun in folder.glob(f"*.part-{part}-of-{parts}.writing"):
                begun.unlink()
            (folder / f"part-{part}.error").write_text(str(error), encoding="utf-8")


def _counts(folder: Path, tensors: Mapping[str, Tensor], parts: int, abandoned: Callable[[], bool]) -> dict[str, int]:
    """Waits for all parts, and returns the number of entries of each file. Raises FileError if a part is missing."""
    kinds = {name.partition(".")[0] for name in tensors}
    names = [tensor_files.file_name(kind, part=n, parts=parts) for kind in kinds for n in range(1, parts + 1)]
    _wait_for(folder, names, abandoned)
    found, counts = tensor_files.read(folder, names)
    if lacking := [name for name in tensors if name not in found]:
        raise FileError(f"{lacking[0]} is in no part")
    return counts


def _wait_for(folder: Path, names: Sequence[str], abandoned: Callable[[], bool]) -> None:
    end, before = time.monotonic() + PART_S, 0
    while missing := [name for name in names if not (folder / name).exists()]:
        if (now := _written(folder)) != before:  # a rank is still writing: the time limit is for silence
            end, before = time.monotonic() + PART_S, now
        if errors := sorted(folder.glob("part-*.error")):
            rank = int(errors[0].stem.partition("-")[2]) - 1
            raise FileError(f"rank {rank}: {errors[0].read_text(encoding='utf-8')}")
        if abandoned():
            raise FileError(f"{missing[0]} was not written: another rank died meanwhile")
        if time.monotonic() > end:
            raise FileError(
                f"{missing[0]} was not written, and nothing else for {PART_S:g} s; has that rank died, and do all "
                "ranks see this folder?"
            )
        time.sleep(0.01)


def _written(folder: Path) -> int:
    """Bytes of all files so far; one that is renamed just now may be left out."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def size(folder: Path) -> int:
    """The size of a checkpoint's files in bytes."""
    return sum(path.stat().st_size for path in folder.iterdir())


Loaded = tuple[int, dict[str, TensorOnDisk], dict[str, Any]]
"""Step, tensors (read on demand) and meta, as given to :func:`save`."""


def load_latest(root: Path) -> tuple[Loaded | None, list[str]]:
    """Loads the newest complete checkpoint; returns it with messages about everything that was skipped.

    Returns None if ``root`` does not exist or holds no checkpoint. Raises ResumeError if there are checkpoints but none
    is usable (a run must not silently start over), and CheckpointError if the newest has another format.
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
    # Newest first: the first that is whole is taken, and the broken ones on the way are told.
    for folder in reversed(_checkpoints(root)):
        try:
            loaded = load(folder)
        except _BrokenError as error:
            broken.append(f"{folder}: {error}; not used")
            continue
        return loaded, messages + broken
    if broken:
        raise ResumeError(
            "\n".join(broken) + f"\n{root}: no checkpoint is usable, and a run does not silently start over. Restore a "
            "checkpoint from a backup, or start over with --overwrite"
        )
    return None, messages


class _BrokenError(Exception):
    """A checkpoint is incomplete or damaged; the message says how."""


def newest_step(root: Path) -> int:
    """The step of the newest checkpoint, from its name; -1 if the folder has no checkpoint."""
    return max((_order(folder)[0] for folder in _checkpoints(root)), default=-1) if root.is_dir() else -1


def load_step(root: Path, step: int) -> Loaded:
    """Loads the newest checkpoint of a step. Raises ResumeError if it is damaged or missing."""
    found = _checkpoints(root) if root.is_dir() else []
    folders = [folder for folder in found if _order(folder)[0] == step]
    if not folders:
        steps = ", ".join(str(_order(folder)[0]) for folder in found) or "none"
        raise ResumeError(f"{root}: has no checkpoint of step {step}; there are: {steps}")
    try:
        return load(folders[-1])
    except _BrokenError as error:
        raise ResumeError(f"{folders[-1]}: {error}; choose another step") from None


def load(folder: Path) -> Loaded:
    """Loads one checkpoint. Verifies every file against the manifest before reading it, and the parts against each
    other.
    """
    manifest = _read_manifest(folder)
    # All hashes before any tensor: a run must not begin on a part of what was saved.
    for name, expected in manifest.files.items():
        _verify(folder, name, expected)
    if "state.json" not in manifest.files:
        raise _BrokenError("state.json is missing")
    state = _shaped(StateFile, _read_json(folder / "state.json"), "state.json")
    # A folder that was renamed or copied under another number is refused.
    for where, step in (("manifest.json", manifest.step), ("state.json", state.step)):
        if step != _order(folder)[0]:
            raise _BrokenError(f"{where} is of step {step}")
    return state.step, _tensors_of(folder, manifest, state), state.meta


def _tensors_of(folder: Path, manifest: Manifest, state: StateFile) -> dict[str, TensorOnDisk]:
    """All tensors of the checkpoint, as many in each file as its state says."""
    files = {name for name in manifest.files if name.endswith(".safetensors")}
    if missing := sorted(set(state.tensors) - files):
        raise _BrokenError(f"manifest.json does not name {missing[0]}, which has {state.tensors[missing[0]]} tensors")
    try:
        tensors, counts = tensor_files.read(folder, files)
    except FileError as error:
        raise _BrokenError(str(error)) from None
    # safetensors cannot tell that tensors are lacking, so the state counts them.
    for name, count in counts.items():
        if count != state.tensors.get(name, 0):
            raise _BrokenError(f"{name} has {count} tensors, {state.tensors.get(name, 0)} by state.json")
    return tensors


def _read_manifest(folder: Path) -> Manifest:
    table = _read_json(folder / "manifest.json")
    # Before the shape is checked: another format may have another shape, and is not a damaged checkpoint. A bool is an
    # int in Python, and an absurdly large number is damage rather than a version.
    version = table.get("format")
    if isinstance(version, int) and not isinstance(version, bool) and version != FORMAT and abs(version) < 1 << 31:
        age, advice = ("a newer", "Update trew") if version > FORMAT else ("an older", "Resume it with that version")
        raise ResumeError(
            f"{folder}: has format {version}, written by {age} trew; this version reads format {FORMAT}. {advice}, or "
            "start a new run with another out"
        )
    return _shaped(Manifest, table, "manifest.json")


def _shaped(shape: type[T], table: dict[str, Any], name: str) -> T:
    try:
        return shapes.read(shape, table, name)
    except ShapeError as error:
        raise _BrokenError(f"{error}") from None


def _verify(folder: Path, name: str, expected: File) -> None:
    """Raises _BrokenError where a file differs from its manifest entry."""
    path = folder / name
    # Names come from a file that may be damaged or foreign: a path or a link could lead outside the checkpoint.
    if Path(name).name != name or "\0" in name or path.is_symlink() or not path.is_file():
        raise _BrokenError(f"{name} is missing")
    # The size first: it finds truncation without reading gigabytes.
    if path.stat().st_size != expected.size:
        raise _BrokenError(f"{name} has {path.stat().st_size} bytes instead of {expected.size}")
    if _sha256(path) != expected.sha256:
        raise _BrokenError(f"{name} is damaged (SHA-256 differs)")


def _complete(folder: Path, step: int, meta: Mapping[str, Any], tensors: Mapping[str, int]) -> None:
    """Writes the files that go with the tensors, the manifest last: without it the folder does not count as a
    checkpoint, even where a rename is not atomic.
    """
    _write_json(folder / "state.json", {"format": FORMAT, "step": step, "tensors": dict(tensors), "meta": dict(meta)})
    files = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        files[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    _write_json(folder / "manifest.json", {"format": FORMAT, "step": step, "files": files})
    _sync(folder / "manifest.json")
    _sync(folder)


def _free_name(root: Path, step: int) -> Path:
    """``000020``, or ``000020.1`` and so on if a broken or older one has that name: nothing is ever overwritten."""
    candidates = (root / (f"{step:06d}" + (f".{n}" if n else "")) for n in range(1 << 20))
    return next(path for path in candidates if not os.path.lexists(path))


def _rotate(root: Path, newest: Path, *, keep: int, best: int | None) -> None:
    """Removes checkpoints older than those of the ``keep`` newest steps and those later than ``newest``, but not the
    last one of step ``best``. Ignores removals that fail.
    """
    found = _checkpoints(root)
    # Those behind it are of the time before a resume: see save.
    until = found.index(newest) + 1
    # The last one, where the step of the best evaluation was saved more than once.
    chosen = [folder for folder in found[:until] if _order(folder)[0] == best][-1:]
    # By steps: where one was saved again its first checkpoint was unusable, and stands in for no older one.
    steps = sorted({_order(folder)[0] for folder in found[:until]})[-keep:]
    older = [folder for folder in found[:until] if _order(folder)[0] not in steps]
    for folder in [f for f in [*older, *found[until:]] if f not in chosen]:
        # Renamed first: a kill during the removal must not leave half a checkpoint under a valid name.
        doomed = root / f"{ASIDE}old-{folder.name}"
        try:
            os.rename(folder, doomed)
        except OSError:
            continue
        _remove(doomed)


def _checkpoints(root: Path) -> list[Path]:
    """Folders with a checkpoint's name, oldest first."""
    # By number: as text, 1000000 would come before 999999.
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
    """Fsyncs a file, or a folder's entries."""
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
