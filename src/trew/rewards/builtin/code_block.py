"""Extracts the program from a completion: its last fenced Python block."""

from __future__ import annotations

import re
import textwrap

LANGUAGES = ("python", "py", "python3")
_ITEM = re.compile(r"[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]+")
"""What stands before the fence of a block that is an item of a list, whose lines are indented to its text."""


def extract(text: str) -> str | None:
    """Returns the content of the last complete ```` ```python ```` block of ``text``; None without one.

    A block begins after a line that ends in ```` ```python ```` (or ``py``, ``python3``), and ends at a line of at
    least as many backticks and nothing else. Blocks of other languages and unclosed blocks do not count. The fence's
    indentation is removed from the block's lines, and in an item of a list what all of them are indented by.

    >>> extract("First\\n```python\\nprint(1)\\n```\\nno:\\n```python\\nprint(2)\\n```\\nprints\\n```\\n2\\n```")
    'print(2)\\n'
    >>> extract("```python\\nprint(1)"), extract("```\\nprint(1)\\n```")
    (None, None)
    """
    found: str | None = None
    fence, indent, wanted, item = "", 0, False, False
    lines: list[str] = []
    # A line scanner rather than a regular expression: linear in the text, whatever a model writes.
    for line in text.split("\n"):
        bare = line.strip()
        if fence:
            if bare.startswith(fence) and not bare.strip("`"):
                if wanted:
                    found = textwrap.dedent("".join(lines)) if item else "".join(lines)
                fence = ""
            elif wanted:
                margin = len(line) - len(line.lstrip(" \t"))
                lines.append(line[min(margin, indent) :] + "\n")
            continue
        at = line.find("```")
        if at < 0:
            continue
        run = line[at:]
        info = run.lstrip("`").strip()
        if "`" in info:  # a whole inline block, as in ```x```
            continue
        indented, item = not line[:at].strip(), _ITEM.fullmatch(line[:at]) is not None
        # Words on both sides: a sentence about backticks, which opens nothing.
        if " " in info and not (indented or item):
            continue
        fence = "`" * (len(run) - len(run.lstrip("`")))
        # Other languages open a fence too: otherwise their closing line would be read as an opening one.
        wanted = info.split(" ")[0].split("{")[0].lower() in LANGUAGES
        indent = at if indented else 0  # text before the fence is no indentation
        lines = []
    return found
