"""Draws the rooms of trew: one row per layer of ``.importlinter``; in each room what it is for, and its protocols.

``python docs/generate.py`` writes the picture; a test compares it with the code.
"""

from __future__ import annotations

import ast
import configparser
import re
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH, GAP, LEFT, LINE, TITLE = 880, 8, 20, 16, 24
TEXT, PROTOCOL = "#57606a", "#0550ae"
OPTIONAL = {"backends": "Optional fast implementations; nothing imports them, and everything works without them."}
"""What may be missing is described here, so that the picture is the same without it."""


def layers() -> list[list[str]]:
    """The rooms of each layer, the lowest layer first."""
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter", encoding="utf-8")
    rows = contract["importlinter:contract:layers"]["layers"].split("\n")
    return [[room.strip() for room in row.split("|")] for row in reversed(rows) if row.strip()]


def purpose(place: Path) -> str:
    """The first paragraph of a room's or a file's docstring, as Markdown."""
    text = (place / "__init__.py" if place.is_dir() else place).read_text(encoding="utf-8")
    summary = " ".join((ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].split())
    return re.sub(r":\w+:`[.~]*([^`]+)`", r"`\1`", summary.replace("``", "`"))


def protocols(place: Path) -> list[str]:
    """The public protocols that a room defines; components of an objective, which share a base, are not among them."""
    found = []
    for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            if [ast.unparse(base) for base in node.bases] == ["Protocol"]:
                found.append(node.name)
    return found


def described(room: str, width: float) -> list[tuple[str, str]]:
    """Lines of a room's box, each with its colour."""
    if room in OPTIONAL:
        said, names = OPTIONAL[room], []
    else:
        place = ROOT / "src" / "trew" / room
        place = place if place.is_dir() else place.with_suffix(".py")
        said, names = re.split(r"\.(?: |$)", purpose(place).replace("`", ""))[0], protocols(place)
    most = int(width / 7)
    lines = [(line, TEXT) for line in textwrap.wrap(said, most)]
    return lines + [(line, PROTOCOL) for line in textwrap.wrap(" · ".join(names), most)]


def picture() -> str:
    """The house as an SVG, the command line on top and what imports nothing at the bottom."""
    parts, y = [], 16
    for rooms in reversed(layers()):
        width = (WIDTH - 2 * LEFT - GAP * (len(rooms) - 1)) / len(rooms)
        lines = {room: described(room, width) for room in rooms}
        height = TITLE + 8 + LINE * max(map(len, lines.values()))
        for i, room in enumerate(rooms):
            x = round(LEFT + i * (width + GAP))
            dashed = ' stroke-dasharray="5 4"' if room in OPTIONAL else ""
            parts.append(
                f'<rect x="{x}" y="{y}" width="{width:.0f}" height="{height}" rx="6" fill="#f6f8fa" '
                f'stroke="{TEXT}"{dashed}/>'
            )
            parts.append(f'<text x="{x + 10}" y="{y + 19}" font-size="14" font-weight="600">{room}</text>')
            for k, (line, colour) in enumerate(lines[room], 1):
                at = y + TITLE + LINE * k - 4
                parts.append(f'<text x="{x + 10}" y="{at}" font-size="12" fill="{colour}">{escape(line)}</text>')
        y += height + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" width="{WIDTH}" height="{y + 8}" '
        'font-family="system-ui, sans-serif" fill="#1f2328" role="img" '
        'aria-label="The rooms of trew by layer, with their protocols">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"
