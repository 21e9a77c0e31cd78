"""Verifies a published version of weights before anything of it is loaded.

Imports the standard library and blake3 only: vLLM's environment has both, trew's need not have vLLM.

A version is a folder, named by its number with at least six digits, of safetensors files and ``manifest.json``:

    {"format": 2, "version": 12, "files": {"model.safetensors": {"size": 1024, "blake3": "..."}},
     "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [64]}}}

Other keys of the manifest are the trainer's. Dtypes are named as in torch. The digest is BLAKE3: each server hashes
every byte of every version, and many processors have no instructions for SHA-256.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

FORMAT = 2
"""Of manifests. A server reads this one and refuses all others."""
MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20
HEADER_BYTES = 100 << 20  # the limit of the safetensors library itself
HASHERS = 4
"""Files that are hashed at the same time, at most."""
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The element types that weights are published in: their names in safetensors headers and in manifests."""
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_FOLDER = re.compile(r"[0-9]{6,12}")
_SHOWN = 3


class Refused(ValueError):
    """A version that is not loaded; the model has not been touched."""


@dataclass(frozen=True)
class Tensor:
    """What is known of a tensor without its values."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}".strip()


@dataclass(frozen=True)
class Version:
    """A published version whose files have been verified: their names, and all tensors in them. ``stamps``: each file's
    identity from before it was read, see :func:`unchanged`."""

    folder: Path
    manifest_digest: str
    number: int
    files: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    stamps: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)


def check_format(got: Any) -> None:
    """Raises Refused where the trainer writes another format of manifests than this package reads."""
    if got != FORMAT:
        raise Refused(
            f"trew-vllm: the trainer publishes format {got!r}, this server reads format {FORMAT}; install the "
            "trew-vllm of the trainer's version beside vLLM (trew cluster install-vllm)"
        )


def read(root: Path, folder: str, manifest_digest: str) -> Version:
    """Reads and verifies version ``folder`` below ``root``: its manifest, and size, digest and header of every file.

    Raises Refused, with what was found and what was expected, where anything is missing, damaged or not as the manifest
    says."""
    if not _FOLDER.fullmatch(folder):
        raise Refused(f"folder {folder!r} is not the number of a version")
    place = root / folder
    if place.is_symlink() or not place.is_dir():
        raise Refused(f"version {folder} is not a folder below {root}")
    # The manifest is verified by the digest that came over HTTP, and everything else by the manifest.
    manifest = _manifest(place / MANIFEST, manifest_digest)
    check_format(manifest.get("format"))
    if manifest.get("version") != int(folder):
        raise Refused(f"{folder} holds version {manifest.get('version')!r}")
    files, told = _table(manifest, "files"), _tensors(_table(manifest, "tensors"))
    with ThreadPoolExecutor(HASHERS) as threads:
        verified = dict(zip(files, threads.map(lambda name: _verified(place, name, files[name]), files), strict=True))
    found: dict[str, Tensor] = {}
    for name, (held, _) in verified.items():
        # Which of the two would be loaded last is not defined.
        if twice := sorted(found.keys() & held.keys()):
            raise Refused(f"{_label(place / name)}: {twice[0]} is also in another file")
        found |= held
    if difference := differences(found, told, "the files", "the manifest"):
        raise Refused(f"version {folder}: {difference}")
    stamps = {name: stamp for name, (_, stamp) in verified.items()}
    return Version(place, manifest_digest, int(folder), tuple(files), found, stamps)


def unchanged(version: Version) -> bool:
    """Whether nobody has written to the files of a version, or put others in their place, since they were verified."""
    try:
        return all(_stamp_of(version.folder / name) == stamp for name, stamp in version.stamps.items())
    except Refused:
        return False


def _stamp_of(path: Path) -> tuple[int, ...]:
    # Opened: network file systems ask the server then, and not for every question about a path.
    with open_file(path) as file:
        return _stamp(file)


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    """Which file it is, and when it was changed last; the last of these times cannot be set back."""
    it = os.fstat(file.fileno())
    return it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns


def _label(path: Path) -> str:
    """A file's name in messages: vLLM masks absolute paths in what it answers."""
    return f"{path.parent.name}/{path.name}"


def _manifest(path: Path, digest: str) -> dict[str, Any]:
    with open_file(path) as file:
        # A byte more than is accepted shows a file that is too large.
        text = file.read(MANIFEST_BYTES + 1)
    if len(text) > MANIFEST_BYTES:
        raise Refused(f"{_label(path)} is larger than {MANIFEST_BYTES} bytes")
    if (got := digest_of(text)) != digest:
        raise Refused(
            f"{_label(path)} is not the one that was published: its BLAKE3 digest is {got}, expected {digest}"
        )
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise Refused(f"{_label(path)} is not JSON: {error}") from None
    if not isinstance(manifest, dict):
        raise Refused(f"{_label(path)} is not a JSON object")
    return manifest


def _table(manifest: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    table = manifest.get(key)
    if not isinstance(table, dict) or not table or not all(isinstance(v, dict) for v in table.values()):
        raise Refused(f"{MANIFEST}: {key!r} is not a table of tables")
    return table


def _tensors(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    try:
        return {name: Tensor(str(v["dtype"]), tuple(map(int, v["shape"]))) for name, v in table.items()}
    except (KeyError, TypeError, ValueError):
        raise Refused(f"{MANIFEST}: 'tensors' needs dtype and shape of each") from None


def _verified(place: Path, name: str, expected: Mapping[str, Any]) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """The tensors in a file whose size and digest are as expected, and its stamp."""
    if not _FILE.fullmatch(name):
        raise Refused(f"{MANIFEST}: {name!r} is not the name of a safetensors file")
    path = place / name
    with open_file(path) as file:
        stamp = _stamp(file)  # before it is read: what is written meanwhile changes it
        size = os.fstat(file.fileno()).st_size
        if size != expected.get("size"):
            raise Refused(f"{_label(path)} is half written or damaged: {size} bytes, expected {expected.get('size')}")
        if (got := _digest_of_file(file)) != expected.get("blake3"):
            raise Refused(f"{_label(path)} is damaged: its BLAKE3 digest is {got}, expected {expected.get('blake3')}")
        file.seek(0)
        return header(file, path), stamp


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file that is no link. Raises Refused where there is none."""
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise Refused(f"{_label(path)} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Refused(f"{_label(path)} is not a regular file")
    return file


def digest_of(data: bytes) -> str:
    """The BLAKE3 digest in hexadecimal, as manifests and requests have it."""
    return blake3(data).hexdigest()


def _digest_of_file(file: BinaryIO) -> str:
    digest, block = blake3(), memoryview(bytearray(1 << 20))
    while count := file.readinto(block):  # type: ignore[attr-defined]
        digest.update(block[:count])
    return digest.hexdigest()


def header(file: BinaryIO, path: Path) -> dict[str, Tensor]:
    """The tensors that a safetensors file says it holds: a length of 8 bytes, then JSON."""
    size = int.from_bytes(file.read(8), "little")
    if size > HEADER_BYTES:
        raise Refused(f"{_label(path)} is not a safetensors file: its header would have {size} bytes")
    try:
        table = json.loads(file.read(size))
        table.pop("__metadata__", None)
        return {name: Tensor(_dtype(v["dtype"]), tuple(map(int, v["shape"]))) for name, v in table.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise Refused(f"{_label(path)} is not a safetensors file: {error}") from None


def _dtype(name: object) -> str:
    """The name of an element type as manifests write it; one that weights are not published in keeps its own."""
    return DTYPES.get(str(name), str(name))


def differences(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], of_got: str, of_expected: str) -> str:
    """One sentence about names, types and shapes that differ; empty where none does.

    >>> differences({"a": Tensor("float32", (2,))}, {"a": Tensor("float32", (3,))}, "the files", "the manifest")
    'a is float32 [2] in the files and float32 [3] in the manifest'
    """
    for here, there, where, other in ((expected, got, of_expected, of_got), (got, expected, of_got, of_expected)):
        if missing := sorted(here.keys() - there.keys()):
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            return f"{', '.join(missing[:_SHOWN])}{more} in {where}, but not in {other}"
    for name, tensor in got.items():
        if tensor != expected[name]:
            return f"{name} is {tensor} in {of_got} and {expected[name]} in {of_expected}"
    return ""


# --------------------------------------------------------------------------------------------- against the loaded model


def checkpoint(folder: Path) -> dict[str, Tensor]:
    """The tensors of the checkpoint in a local folder, by the headers of its files; empty where it has none."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found |= header(file, path)
    return found


COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""How the names of rotary tables end, which checkpoints of Llama 2 and its kin hold for each layer and nobody reads."""


def check_model(tensors: Mapping[str, Tensor], *, started_from: Mapping[str, Tensor], tied: bool) -> None:
    """Raises Refused where ``tensors`` are not all weights of the model that the server was started from.

    ``started_from`` are those of its checkpoint; shapes are compared, element types may differ. What a model computes
    itself is no weight. A model whose checkpoint uses other names altogether is not judged. ``tied``: the head is the
    embedding, and must be there under its own name too."""
    if tied and "lm_head.weight" not in tensors:
        raise Refused(
            "lm_head.weight is missing: the model's head is tied to its embedding, and vLLM keeps the old head unless "
            "it is sent under its own name"
        )
    if strange := sorted(n for n, t in tensors.items() if t.dtype not in DTYPES.values()):
        raise Refused(f"{strange[0]} is {tensors[strange[0]].dtype}, accepts {', '.join(DTYPES.values())}")
    if not started_from.keys() & tensors.keys():
        return
    # A tied head that the checkpoint does not store is published for vLLM alone, and not compared.
    beside = {"lm_head.weight"} if tied else set()
    got = {name: Tensor("", t.shape) for name, t in tensors.items() if name not in beside - started_from.keys()}
    expected = {name: Tensor("", t.shape) for name, t in started_from.items() if not name.endswith(COMPUTED)}
    if difference := differences(got, expected, "what was published", "the model's checkpoint"):
        raise Refused(difference)
