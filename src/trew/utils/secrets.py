"""Keeps secrets out of everything that is written: by value, so that it does not matter which way one came in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

MASK = "[redacted]"
_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_SHORTEST = 6  # TOKENIZERS_PARALLELISM=false must not turn every "false" into a mask
_HARMLESS = frozenset({"default", "disabled", "enabled", "offline", "online", "always", "cuda:0"})


def secrets() -> tuple[str, ...]:
    """Values of the environment variables whose name says secret, longest first, also as JSON and TOML would escape
    them. Values below 6 characters are words like ``true``, not secrets.
    """
    found = set()
    for name, value in os.environ.items():
        value = value.strip()
        if any(part in name.upper() for part in _NAMES) and len(value) >= _SHORTEST and value.lower() not in _HARMLESS:
            found |= {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return tuple(sorted(found, key=len, reverse=True))  # the longest first: one secret may be the start of another


def redact(value: Any, hidden: tuple[str, ...] | None = None) -> Any:
    """``value`` (text, or lists and mappings of it) with every secret replaced by ``[redacted]``, keys included."""
    hidden = secrets() if hidden is None else hidden
    if not hidden:
        return value
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, Mapping):
        return {redact(k, hidden): redact(v, hidden) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(v, hidden) for v in value]
    return value
