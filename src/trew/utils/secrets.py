"""Keeps secrets out of everything that is written: by value, so that it does not matter which way one came in.

A value counts as a secret where both its variable's name and the value itself look like one. Masking an ordinary
word would rewrite metrics, settings and completions that merely contain it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ConfigError

MASK = "[redacted]"

_KEYS = frozenset({"KEY", "KEYS", "APIKEY", "TOKEN", "TOKENS", "CREDENTIAL", "CREDENTIALS", "AUTH"})
"""Words in names of machine-generated values: long, and unlike any word."""
_PASSWORDS = frozenset({"SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE"})
"""Words in names of values that people may have chosen: almost anything."""
_SHORTEST, _SHORTEST_PASSWORD = 8, 6

_PREFIXES = (
    "sk-", "hf_", "ghp_", "gho_", "ghs_", "ghu_", "github_pat_", "glpat-", "xoxb-", "xoxp-", "AKIA", "ASIA", "AIza",
    "ya29.", "eyJ", "nvapi-", "pypi-", "npm_", "r8_", "dop_v1_", "-----BEGIN",
)  # fmt: skip
"""How the keys of well-known services begin."""

_WORD = r"(?:(?:[A-Z]?[a-z]{1,15}|[A-Z]{2,15})(?:[A-Z][a-z]{1,15}){0,2}\d{0,3}|\d{1,6}[A-Za-z]{0,2})"
_WORDS = re.compile(rf"[~./]*{_WORD}(?:[ _\-./:,@=+]+{_WORD})*[/]?")
"""Words and short numbers, as in names, paths and lists of them: of too little entropy to be a key."""


def can_be_secret(name: str, value: str) -> bool:
    """Whether an environment variable's name, word by word, and its value both look like a secret's.

    >>> can_be_secret("OPENAI_API_KEY", "sk-3f9a0c"), can_be_secret("WANDB_API_KEY", "9c1f0e77ab3d42")
    (True, True)
    >>> can_be_secret("METRIC_KEY", "accuracy"), can_be_secret("MAX_TOKENS", "100000")
    (False, False)
    >>> can_be_secret("DB_PASSWORD", "hunter2"), can_be_secret("DB_PASSWORD", "rollout")
    (True, False)
    """
    # Whole words: MONKEY and TOKENIZER are no key and no token.
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if words & _PASSWORDS:
        # A single word is as likely to be an ordinary one, and masking it would rewrite every text that has it.
        return len(value) >= _SHORTEST_PASSWORD and not re.fullmatch(r"[A-Za-z]{1,15}|\d{1,7}", value)
    if not words & _KEYS or len(value) < _SHORTEST:
        return False
    return value.startswith(_PREFIXES) or not (_is_number(value) or _WORDS.fullmatch(value))


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def token(variable: str) -> str:
    """The token of an environment variable, without the line break that a file of it may end with; empty if there is
    none. Raises ConfigError, which does not show it, where a request could not carry it."""
    found = os.environ.get(variable, "").strip()
    if not found.isascii() or not found.isprintable() or " " in found:
        raise ConfigError(
            f"{variable}: got a token of {len(found)} characters, accepts printable ASCII characters without spaces; "
            "copy it again as the server shows it, without quotes"
        )
    return found


def secrets() -> tuple[str, ...]:
    """The secrets among the environment variables' values, longest first, also as JSON and TOML would escape them."""
    found = set()
    for name, value in os.environ.items():
        value = value.strip()
        if can_be_secret(name, value):
            # A text that is written as JSON or TOML has the value in its escaped form.
            found |= {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return tuple(sorted(found, key=len, reverse=True))  # the longest first: one secret may be the start of another


def redact(value: Any, hidden: tuple[str, ...] | None = None, *, keep: Collection[str] = ()) -> Any:
    """``value`` with every secret in its texts replaced by ``[redacted]``. Keys, numbers, and texts that are one of
    ``keep`` (the words that a setting accepts) stay as they are: readers know them by name."""
    hidden = secrets() if hidden is None else hidden
    if not hidden:
        return value
    if isinstance(value, str):
        # A secret that equals a word which a setting accepts would otherwise make the recipe unusable.
        if value in keep:
            return value
        for secret in hidden:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, Mapping):
        return {k: redact(v, hidden, keep=keep) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(v, hidden, keep=keep) for v in value]
    return value


def redact_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """``table`` with the secrets in its keys masked: for keys that come from data, such as prompts' uids. Keys that
    would become equal are numbered, so that no entry is lost."""
    hidden, out = secrets(), {}
    for key, value in table.items():
        masked = name = redact(key, hidden)
        while name in out:
            name = f"{masked}~{len(out)}"
        out[name] = value
    return out
