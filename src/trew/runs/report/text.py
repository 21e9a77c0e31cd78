"""Makes untrusted text (completions, prompts, file names) safe to display."""

from __future__ import annotations

import math
import unicodedata

_KEPT = frozenset("\n\t")


def visible(text: str) -> str:
    """Makes control characters visible.

    Terminal escapes and other controls become control pictures; direction overrides, invisible marks and lone
    surrogates become their code points. Line ends become plain newlines, tabs stay.

    >>> visible("a\\x1b[31mb\\u202ec\\r\\nd")
    'a␛[31mb⟨U+202E⟩c\\nd'
    """
    return "".join(map(_shown, text.replace("\r\n", "\n")))


def _shown(ch: str) -> str:
    if ch in _KEPT or " " <= ch <= "~":
        return ch
    code = ord(ch)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    # Cc controls, Cf invisible formatting (bidi, zero width, tags), Cs surrogates, Co private use, Zl/Zp line breaks.
    # Not U+200D: it joins emoji and the letters of many scripts, and hides nothing.
    if unicodedata.category(ch) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and ch != "\u200d":
        return f"⟨U+{code:04X}⟩"
    return ch


def shorten(text: str, limit: int = 2000) -> str:
    """Shortens to ``limit`` characters and says how many are missing."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"


def ends_of(name: str, limit: int) -> str:
    """Cuts a name to ``limit`` characters in its middle: names of one study or recipe often differ at their end alone.

    >>> ends_of("runs/weights-2026/grpo/seed-1", 17)
    'runs/wei…o/seed-1'
    """
    kept = limit - 1
    return name if len(name) <= limit else f"{name[: kept - kept // 2]}…{name[len(name) - kept // 2 :]}"


def number(x: object, digits: int = 3) -> str:
    """Formats a number for a table: ``digits`` significant digits, whole numbers in full, a dash for None and nan.

    >>> number(0.12345), number(12345.6), number(999.6), number(3), number(None), number(1e-6)
    ('0.123', '12346', '1000', '3', '–', '1e-06')
    """
    if x is None or (isinstance(x, float) and math.isnan(x)):
        return "–"
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return str(x)
    if isinstance(x, int) or math.isinf(x):
        return str(x)
    # Of what it rounds to: 999.6 is 1000, for which .3g writes 1e+03.
    whole = abs(x) >= 10**digits or abs(float(f"{x:.{digits}g}")) >= 10**digits
    return f"{x:.0f}" if whole else f"{x:.{digits}g}"
