"""A run's config.toml: what the run was started with, without secrets."""

from __future__ import annotations

import tomllib
from pathlib import Path

from ..config import choices
from ..utils.secrets import redact
from ..utils.toml import dump_table


def read_config(folder: Path) -> str | None:
    """The configuration that a run's folder holds, or None."""
    try:
        return (folder / "config.toml").read_text("utf-8")
    except FileNotFoundError:
        return None


def redact_config(text: str) -> str:
    """A configuration in TOML with the secrets in its values masked.

    Masks values, not the text: a mask in place of a key, a number or one of the words that a setting accepts would
    make a file that is no recipe any more.
    """
    table = tomllib.loads(text)
    masked = redact(table, keep=choices())
    return text if masked == table else dump_table(masked)
