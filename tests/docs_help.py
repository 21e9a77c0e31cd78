"""The commands that pages show, fenced, indented or in the text, with what a page says about them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

STARTS = (
    "trew",
    "bin/trew",
    ".venv/bin/trew",
    "make",
    "pip",
    "uv",
    "python",
    ".venv/bin/python",
    "torchrun",
    "sbatch",
    "ray",
)
NOT_RUN = re.compile(r"<!-- not run: ((?:(?!-->).)+) -->\s*\Z", re.S)
FILE = re.compile(r"<!-- file: (\S+) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """Consecutive commands of a page. ``why_not`` is the page's reason for not running them; empty if they are run."""

    page: Path
    lines: tuple[str, ...]
    why_not: str

    @property
    def commands(self) -> list[list[str]]:
        return [shlex.split(line) for line in self.lines]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that hold commands: fenced as sh or as nothing, or indented by four spaces (with the lines
    that go on further to the right, and across blank lines)."""
    text = page.read_text()
    found = []
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
    for match in fenced.finditer(text):
        if match[1] in ("", "sh", "bash", "console"):
            found.append((match.start(), match[2]))
    plain = fenced.sub(lambda m: re.sub(r"[^\n]", "x", m[0]), text)  # of the same length
    found += [(m.start(), m[0]) for m in re.finditer(r"^ {4}(?:.*\n(?: {4}|\n(?= {4})(?: {4})?))*.*\n", plain, re.M)]
    made = []
    for start, body in sorted(found):
        lines = [without_comment(line) for line in first_turns(re.sub(r"\\\n\s*", " ", body)).splitlines()]
        lines = [line for line in lines if line.split()[:1] and line.split()[0] in STARTS]
        if lines:
            why = NOT_RUN.search(text[:start])
            made.append(Block(page, tuple(lines), why[1] if why else ""))
    return made


def first_turns(text: str) -> str:
    """Shell commands with the variables of their loops, ``for NAME in A B; do``, at their first values.

    >>> first_turns("for seed in 1 2; do\\n  trew train r.toml --set seed=$seed\\ndone").splitlines()[1]
    '  trew train r.toml --set seed=1'
    """
    for name, value in re.findall(r"^\s*for (\w+) in (\S+?)[ ;]", text, re.M):
        text = re.sub(rf"\$(?:{name}\b|{{{name}}})", value, text)
    return text


def without_comment(line: str) -> str:
    """A line without the explanation behind the command, and without where its output goes."""
    return re.sub(r"\s{2,}#.*|\s+# .*|(?<=\S)\s{3,}\S.*|(?:\s+[<>]+ \S+)+$", "", line.strip())


def inline(page: Path) -> list[str]:
    """The commands of trew's in the text, between backticks; not their mere names, like ``trew data show``."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = [without_comment(" ".join(line.split())) for line in re.findall(r"`(trew [a-z][^`]+)`", text)]
    return [line for line in found if not re.fullmatch(r"trew [a-z-]+(?: [a-z-]+)?", line)]


def is_synopsis(line: str) -> bool:
    """Whether placeholders stand for some of its words, so that it is no command yet: RUN, [--json], a|b, ..."""
    return bool(re.search(r"(?:^|\s)\[|\.\.\.|…|\||(?:^|[\s=/:])<?[A-Z][A-Z_]*>?(?=$|[\s:/])", line))


def files(page: Path) -> dict[str, str]:
    """The files that a page shows whole: a fenced block after ``<!-- file: NAME -->``."""
    text = page.read_text()
    shown = {}
    for match in re.finditer(r"^```\w*\n(.*?)^```$", text, re.M | re.S):
        if name := FILE.search(text[: match.start()]):
            shown[name[1]] = match[1]
    return shown
