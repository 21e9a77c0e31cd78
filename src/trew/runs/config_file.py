"""A run's config.toml: the resolved configuration, without secrets."""

from __future__ import annotations

import tomllib
from pathlib import Path

from ..config import choices
from ..utils.secrets import redact
from ..utils.toml import dump_table


def read_config(folder: Path) -> str | None:
    """Reads the configuration from a run folder; None if there is none."""
    try:
        return (folder / "config.toml").read_text("utf-8")
    except FileNotFoundError:
        return None


def redact_config(text: str) -> str:
    """Masks the secrets in the values of a TOML configuration.

    Works on values, not on the text: a mask in place of a key, of a number or of a word that a setting accepts would
    make the file unusable as a recipe.
    """
    table = tomllib.loads(text)
    masked = redact(table, keep=choices())
    return text if masked == table else dump_table(masked)
