"""Built-in reward ``format``: the reply has the template's tags in order, each once, and nothing around them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..verdict import Verdict

THINK_ANSWER = "<think>…</think>\n<answer>…</answer>"
_PIECE = re.compile(r"(<[^<>\s]+>)|(…|\.\.\.)|(\s+)")


@dataclass(frozen=True, slots=True)
class Template:
    """Tags in order. ``filled[i]`` says whether text belongs before tag i; the last entry is for after the last tag."""

    tags: tuple[str, ...]
    filled: tuple[bool, ...]


@lru_cache(maxsize=64)
def parse_template(template: str) -> Template:
    """Parses a template such as ``<a>…</a> <b>…</b>``: tags, ``…`` (or ``...``) for text, and white space.

    Raises ValueError for anything else, for a repeated tag, and for a template without tags.

    >>> parse_template("<answer>…</answer>")
    Template(tags=('<answer>', '</answer>'), filled=(False, True, False))
    """
    tags: list[str] = []
    filled = [False]
    at = 0
    while at < len(template):
        piece = _PIECE.match(template, at)
        if piece is None:
            raise ValueError(f"{template[at : at + 20]!r} is neither a tag, nor … for text, nor white space")
        if tag := piece.group(1):
            if tag in tags:
                raise ValueError(f"the tag {tag} occurs twice")
            tags.append(tag)
            filled.append(False)
        elif piece.group(2):
            filled[-1] = True
        at = piece.end()
    if not tags:
        raise ValueError("it has no tags")
    return Template(tuple(tags), tuple(filled))


def mismatch(text: str, template: Template) -> str:
    """Says how ``text`` departs from ``template``; empty if it does not. Costs one count and one search per tag.

    >>> t = parse_template(THINK_ANSWER)
    >>> mismatch("<think>a</think><answer>b</answer>", t), mismatch("<think>a</think> so <answer>b</answer>", t)
    ('', 'text before <answer>')
    """
    # First that every tag occurs once: then one search per tag finds it or shows that it is out of order.
    for tag in template.tags:
        if (count := text.count(tag)) != 1:
            return f"{tag} occurs {count} times" if count else f"{tag} is missing"
    at = 0
    # The empty tag stands for the end of the text, so that the text after the last tag is checked too.
    for i, tag in enumerate((*template.tags, "")):
        where = text.find(tag, at) if tag else len(text)
        if where < 0:
            return f"{tag} is out of order"
        blank = not text[at:where].strip()
        if blank == template.filled[i]:  # nothing where text belongs, or text where nothing belongs
            end = f"before {tag}" if tag else "after the last tag"
            return f"{'nothing' if blank else 'text'} {end}"
        at = where + len(tag)
    return ""


def can_begin(prefilled: str, template: Template) -> bool:
    """Returns whether some reply that begins with ``prefilled`` has the template's layout.

    >>> t = parse_template(THINK_ANSWER)
    >>> can_begin("<think>\\n", t), can_begin("<think>so</think>", t), can_begin("<thinking>", t)
    (True, True, False)
    """
    # What may follow after k tags: the rest of the template, with a text where it has one.
    parts = [("x" if filled else "") + tag for filled, tag in zip(template.filled, (*template.tags, ""), strict=True)]
    return any(not mismatch(prefilled + "".join(parts[k:]), template) for k in range(len(parts)))


def grade(completion: str, gold: Any = None, *, template: str = THINK_ANSWER, prefilled: str = "") -> Verdict:
    """Scores 1 if the reply has exactly the template's layout, else 0; ignores ``gold``.

    Every tag must occur exactly once, in order, in the same case, with text where the template has ``…`` and nowhere
    else. White space between the blocks and around the reply is free. ``prefilled`` is the part of the reply that the
    prompt already contains, for example ``"<think>"``.

    >>> grade("<think>2+2</think>\\n<answer>4</answer>").score, grade("4").detail
    (1.0, '<think> is missing')
    >>> grade("2+2</think><answer>4</answer>", prefilled="<think>").score
    1.0
    """
    # The prompt's part is put back, so that one template fits models with and without a prefilled tag.
    why = mismatch(prefilled + completion, parse_template(template))
    return Verdict(0.0 if why else 1.0, "scored", None, why)
