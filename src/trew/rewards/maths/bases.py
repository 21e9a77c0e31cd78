"""Numbers in number systems other than the decimal one."""

from __future__ import annotations

import re

from .shapes import Based
from .tokens import Token

_BASE = re.compile(r"[_{( ]*(?:in )?(?:base)?[-{}( ]*([a-z]+|[0-9]{1,2})[)} ]*")
_DIGITS = re.compile(r"[0-9A-Z]*[0-9][0-9A-Z]*|[A-Z]{2,}")
_NUMBERS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASES = {word: base for base, word in enumerate(_NUMBERS.split(), 2)} | {
    "binary": 2, "ternary": 3, "octal": 8, "decimal": 10, "hexadecimal": 16, "hex": 16
}  # fmt: skip


def based(tokens: list[Token]) -> Based | None:
    r"""Digits with a number system: 52_8, 52_{(8)}, 52_{\text{eight}}, 52\text{ base nine}; None for another formula.

    >>> from .tokens import tokenize
    >>> based(tokenize("1101_{(2)}")), based(tokenize("52_{8}!"))
    (Based(digits='1101', base=2), None)
    """
    texts = [t.text for t in tokens]
    # The base begins at the subscript or at a word with "base"; at 0 there would be no digits before it.
    cut = next((i for i, text in enumerate(texts) if text == "_" or "base" in text), 0)
    if not cut:
        return None
    digits, base = _digits(texts[:cut]), _base(texts[cut:])
    # Every digit must exist in the base: 82_8 is no number.
    if not _DIGITS.fullmatch(digits) or not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Based(digits.lstrip("0") or "0", base)


def _digits(texts: list[str]) -> str:
    if texts[-1] == "in":  # 52 in base 9
        texts = texts[:-1]
    if (texts[:1], texts[-1:]) == (["("], [")"]):
        texts = texts[1:-1]
    return "".join(texts)


def _base(texts: list[str]) -> int:
    """The base that a subscript or words name; 0 for anything else."""
    match = _BASE.fullmatch("".join(texts).lower().replace("\\text", ""))
    name = match[1] if match else ""
    return int(name) if name.isdigit() else _BASES.get(name, 0)
