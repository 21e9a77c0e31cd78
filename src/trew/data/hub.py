"""Data sets from the Hugging Face hub, through the optional ``datasets`` package.

A hub set is named ``owner/name``, ``owner/name:config`` or ``owner/name:config:split`` (``owner/name::split`` for the
only or default config). ``trust_remote_code`` is never passed: data sets that consist of code are refused.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..errors import DataError, nearest
from ..utils.installing import install_extra
from .rows import Row, Split

# owner/name, then :config and :split, where the config may be left empty.
_ID = re.compile(r"(?P<path>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<config>[\w.-]*))?(:(?P<split>[\w.-]+))?")


@dataclass(frozen=True, slots=True)
class HubId:
    """A parsed hub source; ``config`` and ``split`` are empty where not given."""

    path: str
    config: str = ""
    split: str = ""

    def __str__(self) -> str:
        return ":".join([self.path, self.config, self.split]).rstrip(":")


def parse_id(source: str) -> HubId | None:
    """Parses a hub source; None for text of another form.

    >>> parse_id("openai/gsm8k:main:test")
    HubId(path='openai/gsm8k', config='main', split='test')
    >>> parse_id("train.jsonl") is None
    True
    """
    match = _ID.fullmatch(source)
    return HubId(match["path"], match["config"] or "", match["split"] or "") if match else None


def split_names(hub: HubId) -> list[str]:
    """The names of the set's splits."""
    datasets = _package(hub)
    return list(_ask(hub, lambda: datasets.get_dataset_split_names(hub.path, hub.config or None)))


def read_split(hub: HubId, split: str) -> Split:
    """Reads one split. Raises a one-line DataError (package missing, no network, no such set or split)."""
    datasets = _package(hub)
    names = split_names(hub)
    if split not in names:
        raise DataError(f"{hub.path}: has no split {split!r}{nearest(split, names)}; it has {', '.join(names)}")
    # The rows too: images and sounds are decoded, by packages that may be missing, as each is looked at.
    table = _ask(
        hub, lambda: [dict(row) for row in datasets.load_dataset(hub.path, hub.config or None, split=split)]
    )  # fmt: skip
    rows = [Row(f"{hub.path} {split} row {number}", row) for number, row in enumerate(table, start=1)]
    return Split(f"{hub.path}:{hub.config}:{split}", split, rows)


def _package(hub: HubId) -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            f"{hub.path}: no such file, and reading it from the hub needs the datasets package: "
            f"{install_extra('data')}, or download the files and give their path"
        ) from None


def _ask(hub: HubId, call: Any) -> Any:
    """Runs a hub call; turns whatever it raises (dozens of classes from four packages) into one line."""
    try:
        return call()
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise DataError(
            f"{hub}: cannot be read from the hub: {reason}; check the name and the network "
            "(HF_TOKEN for gated sets), or download the files and give their path"
        ) from None
