"""Numbers in another number system than ours."""

from __future__ import annotations

import re

from .shapes import Based
from .tokens import Token

_BASE = re.compile(r"[_{( ]*(?:in )?(?:base)?[-{}( ]*([a-z]+|[0-9]{1,2})[)} ]*")
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
    cut = next((i for i, text in enumerate(texts) if text == "_" or "base" in text), 0)
    if not cut:
        return None
    before = texts[:cut] if texts[cut - 1] != "in" else texts[: cut - 1]
    if (before[:1], before[-1:]) == (["("], [")"]):
        before = before[1:-1]
    said = _BASE.fullmatch("".join(texts[cut:]).lower().replace("\\text", ""))
    named = said[1] if said else ""
    base = int(named) if named.isdigit() else _BASES.get(named, 0)
    digits = "".join(before)
    if not re.fullmatch(r"[0-9A-Z]*[0-9][0-9A-Z]*|[A-Z]{2,}", digits) or not 2 <= base <= 36:
        return None
    return Based(digits.lstrip("0") or "0", base) if all(int(digit, 36) < base for digit in digits) else None
