"""The program in a completion: its last fenced Python block."""

from __future__ import annotations

LANGUAGES = ("python", "py", "python3")


def extract(text: str) -> str | None:
    """What the last complete ```` ```python ```` block of ``text`` holds; None without one.

    A block begins behind ```` ```python ```` (or ``py``, ``python3``) at the end of a line and ends at a line of at
    least as many backticks and nothing else. Blocks of other languages do not count, nor does one that is not closed.
    The indentation of the fence is taken off its lines.

    >>> extract("First\\n```python\\nprint(1)\\n```\\nno:\\n```python\\nprint(2)\\n```\\nprints\\n```\\n2\\n```")
    'print(2)\\n'
    >>> extract("```python\\nprint(1)"), extract("```\\nprint(1)\\n```")
    (None, None)
    """
    found: str | None = None
    fence, indent, wanted = "", 0, False
    lines: list[str] = []
    for line in text.split("\n"):
        bare = line.strip()
        if fence:
            if bare.startswith(fence) and not bare.strip("`"):
                if wanted:
                    found = "".join(lines)
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
        fence = "`" * (len(run) - len(run.lstrip("`")))
        wanted = info.split(" ")[0].split("{")[0].lower() in LANGUAGES
        indent = at if not line[:at].strip() else 0
        lines = []
    return found
