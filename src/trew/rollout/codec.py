"""Rollouts and requests as bytes, for other ranks and for checkpoints: JSON with the arrays behind it. Nothing is
pickled, so that reading them runs no code."""

from __future__ import annotations

import dataclasses
import json
import math
from operator import attrgetter
from typing import Any

import numpy as np

from ..types import Group, Prompt, Rollout, Sampling, Score, ScoredGroup, Span, Turn
from .engine import Earlier, Finished, Lost, Request
from .source import StepRollouts

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Earlier, Finished, Group, Lost, Prompt, Request, Rollout, Sampling, Score, ScoredGroup, Span, StepRollouts,
        Turn,
    )
}  # fmt: skip
_DTYPES = {np.dtype(name): name for name in ("bool", "int64", "float32", "float64")}
_PLAIN = frozenset({type(None), str, int, float, bool})
_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(kind)) for kind in _KINDS.values()}
_VALUES = {kind: attrgetter(*names) for kind, names in _FIELDS.items()}  # of all fields at once, which is faster
_JSON = json.JSONEncoder(check_circular=False)  # a tree has no circles
_TAG = "\0"  # no key of a dict begins with it


def encode(value: Any) -> bytes:
    """Encodes dataclasses of rollouts and requests, arrays, and what JSON can represent. Raises TypeError for others.

    >>> decode(encode({"a": [1, (2.5, None)], "b": Span(1, 0, 4)}))
    {'a': [1, (2.5, None)], 'b': Span(version=1, start=0, end=4)}
    """
    arrays: list[np.ndarray] = []
    head = _JSON.encode(_tree(value, arrays)).encode()
    # Length of the JSON in 8 bytes, the JSON, then the arrays in the order in which the JSON names them.
    return b"".join([len(head).to_bytes(8, "big"), head, *(array.tobytes() for array in arrays)])


def decode(data: bytes) -> Any:
    """Restores what :func:`encode` was given."""
    end = 8 + int.from_bytes(data[:8], "big")
    return _Reader(data, end).value(json.loads(data[8:end]))


def _tree(value: Any, arrays: list[np.ndarray]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if (names := _FIELDS.get(kind)) is not None:
        tree: dict[str, Any] = {_TAG: kind.__name__}
        for name, each in zip(names, _VALUES[kind](value), strict=True):
            tree[name] = each if type(each) in _PLAIN else _tree(each, arrays)
        return tree
    if kind is np.ndarray:
        return _array(value, arrays)
    if isinstance(value, tuple):
        return {_TAG: "tuple", "of": [_tree(each, arrays) for each in value]}
    if isinstance(value, list):
        return [_tree(each, arrays) for each in value]
    # What is not exactly plain: subclasses, numpy's float64 among them.
    if isinstance(value, str | int | float):
        return value.item() if isinstance(value, np.generic) else value
    if hasattr(value, "items"):  # a mapping
        return {key: _tree(each, arrays) for key, each in value.items()}
    raise TypeError(f"{kind.__name__} cannot be encoded")


def _array(value: np.ndarray, arrays: list[np.ndarray]) -> dict[str, Any]:
    name = _DTYPES.get(value.dtype)
    if name is None:
        raise TypeError(f"arrays of {value.dtype} cannot be encoded")
    arrays.append(value)  # tobytes gives the elements in order, however they lie in memory
    return {_TAG: "array", "dtype": name, "shape": [*value.shape]}


class _Reader:
    """Reads a tree in the order in which it was written, as arrays follow each other without an index."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        kind = tree.pop(_TAG, None)
        if kind is None:
            return {key: self.value(each) for key, each in tree.items()}
        if kind == "array":
            return self.array(tree["dtype"], tree["shape"])
        if kind == "tuple":
            return tuple(self.value(each) for each in tree["of"])
        return _KINDS[kind](**{key: self.value(each) for key, each in tree.items()})

    def array(self, dtype: str, shape: list[int]) -> np.ndarray:
        # The name comes from the message: only the types that encode() writes are read.
        if dtype not in _DTYPES.values():
            raise TypeError(f"arrays of {dtype} cannot be encoded")
        count = math.prod(shape)
        found = np.frombuffer(self.data, dtype, count, self.at).reshape(shape)
        self.at += found.nbytes
        return found.copy()  # writable, and independent of the message
