"""The tensors of a checkpoint as safetensors files: one file of each kind, or a part from every rank.

    model.safetensors                       whole tensors
    model.part-2-of-4.safetensors           rank 1's rows of every sharded tensor; in part 1 the whole ones too

The first part of a tensor's name is its kind: ``model.embed.weight`` is embed.weight in model.safetensors. A part's
header (``trew_rows``) says which rows of which tensors it has.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..models.sharded import is_replica, is_sharded, local, row_range

ROWS = "trew_rows"
"""Metadata key: JSON of {name: [first row, number of rows of the whole tensor]}."""

_PART = re.compile(r"(?P<kind>\w+)(?:\.part-(?P<part>\d+)-of-(?P<parts>\d+))?\.safetensors")


class FileError(Exception):
    """A tensor file is damaged, or parts do not make whole tensors; the message says how."""


def write(folder: Path, tensors: Mapping[str, Tensor], *, part: int = 1, parts: int = 1) -> None:
    """Writes the tensors, or part number ``part`` of ``parts`` of them: this rank's rows of the sharded ones."""
    files: dict[str, tuple[dict[str, Tensor], dict[str, tuple[int, int]]]] = {}
    for name, tensor in tensors.items():
        kind, _, key = name.partition(".")
        members, rows = files.setdefault(kind, ({}, {}))
        if is_sharded(tensor):
            start, stop = row_range(tensor)
            if start == stop or is_replica(tensor):
                continue  # a weight of fewer rows than ranks, or rows that another rank writes
            rows[key] = start, tensor.shape[0]
        # Whole tensors are in the first part only.
        elif part > 1:
            continue
        # safetensors stores contiguous memory of the CPU.
        members[key] = local(tensor).detach().cpu().contiguous()
    for kind, (members, rows) in files.items():
        # transformers reads "format" when it loads the file as a model.
        metadata = {"format": "pt"} | ({ROWS: json.dumps(rows)} if parts > 1 else {})
        path = folder / file_name(kind, part=part, parts=parts)
        aside = path.with_suffix(".writing")
        save_file(members, aside, metadata=metadata)
        if parts > 1:  # rank 0 syncs what it has written itself; this rank may be on another machine
            with aside.open("rb") as file:
                os.fsync(file.fileno())
        aside.rename(path)  # under its name a file is complete: others wait for it


def file_name(kind: str, *, part: int = 1, parts: int = 1) -> str:
    """
    >>> file_name("model"), file_name("model", part=2, parts=4)
    ('model.safetensors', 'model.part-2-of-4.safetensors')
    """
    return f"{kind}.safetensors" if parts == 1 else f"{kind}.part-{part}-of-{parts}.safetensors"


@dataclass(slots=True)
class TensorOnDisk:
    """A tensor in one file or several, read on demand. Implements :class:`..learner.sharded.Rows`."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: list[tuple[int, int, Path, str]] = field(default_factory=list)  # first row, end, file, name in it

    def rows(self, start: int, stop: int) -> Tensor:
        parts = []
        for first, end, path, key in self.pieces:
            # The wanted rows of this piece, numbered as in the whole tensor.
            low, high = max(start, first), min(stop, end)
            if low < high:
                with safe_open(path, framework="pt") as file:
                    entry = file.get_slice(key)
                    # A slice reads only these rows from the disk; a scalar has none.
                    parts.append(entry[low - first : high - first] if self.shape else file.get_tensor(key))
        if not parts:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def read(folder: Path, names: Iterable[str]) -> tuple[dict[str, TensorOnDisk], dict[str, int]]:
    """The tensors in these files by full name, not read yet, and the number of entries of each file. Raises FileError
    where a file is damaged or rows are missing."""
    found: dict[str, TensorOnDisk] = {}
    counts: dict[str, int] = {}
    for name in sorted(names):
        match = _PART.fullmatch(name)
        if match is None:
            raise FileError(f"{name} is no name of a file with tensors")
        try:
            counts[name] = _read_header(folder / name, match["kind"], found)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise FileError(f"{name} is not a safetensors file: {error}") from None
    for name, tensor in found.items():
        _check_whole(name, tensor)
    return found, counts


def _read_header(path: Path, kind: str, found: dict[str, TensorOnDisk]) -> int:
    """Adds the entries of one file to ``found``; returns their number."""
    with safe_open(path, framework="pt") as file:
        rows: dict[str, Any] = json.loads((file.metadata() or {}).get(ROWS, "{}"))
        keys = list(file.keys())
        for key in keys:
            entry = file.get_slice(key)
            shape, name = list(entry.get_shape()), f"{kind}.{key}"
            # Without an entry in the header, the file has the whole tensor.
            first, total = (int(n) for n in rows.get(key, (0, shape[0] if shape else 1)))
            whole = torch.Size([total, *shape[1:]] if shape else [])
            known = found.setdefault(name, TensorOnDisk(whole, _DTYPES[entry.get_dtype()]))
            if (known.shape, known.dtype) != (whole, _DTYPES[entry.get_dtype()]):
                raise FileError(f"{path.name} has {name} as {tuple(whole)}, another part as {tuple(known.shape)}")
            known.pieces.append((first, first + (shape[0] if shape else 1), path, key))
    return len(keys)


def _check_whole(name: str, tensor: TensorOnDisk) -> None:
    """Raises FileError unless the pieces are all rows of a tensor, each once."""
    # By first row: pieces must follow one another without a gap or an overlap.
    tensor.pieces.sort(key=lambda piece: piece[0])
    end = 0
    for first, stop, path, _ in tensor.pieces:
        if first != end:
            raise FileError(f"{name}: rows {min(first, end)} to {max(first, end)} are missing or twice ({path.name})")
        end = stop
    if end != (tensor.shape[0] if tensor.shape else 1):
        raise FileError(f"{name}: has {end} of its {tensor.shape[0]} rows; a part is missing")


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
