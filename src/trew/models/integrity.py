"""Checks that a model's files fit together and can be trained, by their headers and by every number in them.

transformers loads a damaged model without an error: it ignores unknown tensors, fills missing ones with random numbers,
and converts integers to floats. The result trains, but it is a different model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEPTH = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_ACCEPTED = {"F64": ("<u8", 11, 64), "F32": ("<u4", 8, 32), "F16": ("<u2", 5, 16), "BF16": ("<u2", 8, 16)}
"""Accepted types of weights by safetensors name: (numpy type of their bits, bits of the exponent, bits in all)."""
_CHUNK = 1 << 20  # bytes checked at once: few enough to stay in the processor's cache
_AGAIN = "fetch the model again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file; it occupies the bytes from ``start`` up to ``stop``."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def tensors_of(file: Path) -> list[StoredTensor]:
    """Returns the tensors named in the header of a safetensors file; raises ValueError and the like if it is broken."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    first = 8 + length  # offsets in the header count from its end
    return [
        StoredTensor(file, name, one["dtype"], tuple(one["shape"]), *(first + at for at in one["data_offsets"]))
        for name, one in header.items()
        if name != "__metadata__"
    ]


# --------------------------------------------------------------------------------------------------------------------
# Against the configuration


def depth_problems(stored: Iterable[StoredTensor], config: Mapping[str, Any], name: str) -> list[str]:
    """Finds a configuration with more layers than there are tensors. This comes before :func:`mismatches`, which needs
    the model built, if without weights: a million layers would take minutes."""
    asked, count = _layers(config), sum(1 for _ in stored)
    # A layer has at least one tensor, so that fewer tensors than layers are never the whole model.
    if asked <= count:
        return []
    return [f"model: {name}: config.json asks for {asked} layers, the weight files hold {count} tensors; {_AGAIN}"]


def mismatches(
    info: Mapping[str, Any],
    stored: Iterable[StoredTensor],
    config: Mapping[str, Any],
    name: str,
    *,
    parts: Iterable[str],
) -> tuple[list[str], list[str]]:
    """Finds mismatches between a model's files and its configuration: problems, and notes on what is merely left out.

    ``info`` is transformers' loading report, ``parts`` are the names of the model's own modules. An unread tensor
    inside one of these belongs to a different model; a part outside of them (a value head) is only left out.
    """
    own = set(parts)
    unread = sorted(info.get("unexpected_keys") or ())
    inside = [key for key in unread if key.partition(".")[0] in own]
    outside = [key for key in unread if key not in inside]
    depth = _depth_told(stored, config)
    found = [
        _told(name, keys, what, depth)
        for keys, what in (
            (keys_of(info, "missing_keys"), "lack {} of the weights that config.json asks for"),
            (keys_of(info, "mismatched_keys"), "have the wrong shape for {} of the weights that config.json asks for"),
            (inside, "hold {} tensors that a model of this config.json does not read"),
        )
        if keys
    ]
    notes = []
    if outside:
        notes = [
            f"model {name}: {len(outside)} tensors of its files are no part of the model, among them {outside[0]}; "
            "they are not read, and will not be in what is written"
        ]
    return found, notes


def keys_of(info: Mapping[str, Any], kind: str) -> list[str]:
    """Returns tensor names from transformers' report, which lists tensors of the wrong shape as (name, shapes ...)."""
    return sorted(key[0] if isinstance(key, tuple) else str(key) for key in info.get(kind) or ())


def _told(name: str, keys: Sequence[str], what: str, depth: str) -> str:
    return (
        f"model: {name}: its files {what.format(len(keys))}, among them {keys[0]}{depth}; the two are not of one "
        f"model: {_AGAIN}, or correct config.json"
    )


def _layers(config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    table = inner if isinstance(inner, Mapping) else config
    counts = [table.get(key) for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")]
    return max((n for n in counts if isinstance(n, int)), default=0)


def _depth_told(stored: Iterable[StoredTensor], config: Mapping[str, Any]) -> str:
    """Says how the numbers of layers differ; empty if they agree."""
    numbers = [int(match[1]) for tensor in stored if (match := _DEPTH.search(tensor.name))]
    held, asked = max(numbers, default=-1) + 1, _layers(config)
    return f" (config.json has {asked} layers, the files have {held})" if held and asked and held != asked else ""


# --------------------------------------------------------------------------------------------------------------------
# The numbers themselves


def type_problems(stored: Iterable[StoredTensor], name: str) -> list[str]:
    """Finds weights of integer types, or of float types that are not supported."""
    odd = [tensor for tensor in stored if tensor.dtype not in _ACCEPTED]
    if not odd:
        return []
    return [
        f"model: {name}: {len(odd)} of its weights are stored as {odd[0].dtype}, among them {odd[0].name}; accepts "
        f"{', '.join(_ACCEPTED)}: use the model as it was before it was quantised or converted"
    ]


def number_problems(stored: Iterable[StoredTensor], name: str) -> list[str]:
    """Finds weights that are not finite. Training may never notice them, in the embedding of a token that no text uses,
    and would write them with the rest."""
    broken = [(tensor, at) for tensor in stored if (at := _first_not_finite(tensor)) is not None]
    if not broken:
        return []
    tensor, at = broken[0]
    row = f", row {at // math.prod(tensor.shape[1:])}" if tensor.shape else ""
    return [
        f"model: {name}: {len(broken)} of its weights hold inf or nan, among them {tensor.name}{row} of {tensor.file}; "
        f"accepts finite numbers: {_AGAIN}, or use another copy"
    ]


def _first_not_finite(tensor: StoredTensor) -> int | None:
    """Returns the position of the first inf or nan of a tensor, or None: numbers whose exponent bits are all set.

    Works on the bits, since numpy has no bfloat16: shifted left by one, which drops the sign, exactly these numbers are
    at least as large as an exponent of ones with no mantissa.
    """
    import numpy as np

    kind, exponent, bits = _ACCEPTED[tensor.dtype]
    least = (2**exponent - 1) << (bits - exponent)
    size, seen = bits // 8, 0
    buffer = bytearray(_CHUNK)
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.start)
        while left := tensor.stop - tensor.start - seen:
            read = stream.readinto(memoryview(buffer)[: min(left, _CHUNK)]) // size * size  # a read may return less
            if not read:
                break  # the file shrank meanwhile: loading it will fail with an error
            numbers = np.frombuffer(buffer, kind, count=read // size)
            # In place: the next read overwrites the buffer.
            np.left_shift(numbers, 1, out=numbers)
            if int(numbers.max()) >= least:
                return seen // size + int((numbers >= least).argmax())
            seen += read
            # Only whole numbers were checked: the next read starts with the first byte that was not.
            stream.seek(tensor.start + seen)
    return None
