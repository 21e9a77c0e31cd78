r"""Values with a name each, x = 5, y = 6 or (x, y) = (5, 6): whose value is whose, and which comes first in a point."""

from __future__ import annotations

import re

from .shapes import Answer, AnswerList, Named, Shape

_NAME = re.compile(r"([A-Za-z]|\\[A-Za-z]+)'?(?:_([A-Za-z0-9]+))?")


def named_values(shape: Shape) -> dict[str, Answer]:
    """The values by their names; empty if not every one has a name of its own."""
    if isinstance(shape, AnswerList) and shape.ends == ",":
        named = [item.shape for item in shape.items if isinstance(item.shape, Named)]
        names, values = [one.name for one in named], [one.item for one in named]
        complete = len(named) == len(shape.items)
    elif isinstance(shape, Named) and shape.name.startswith("(") and isinstance(shape.item.shape, AnswerList):
        names, values = shape.name[1:-1].split(","), list(shape.item.shape.items)
        complete = len(names) == len(values) and shape.item.shape.ends in ("()", "[]", ",")
    else:
        return {}
    names = [re.sub("[{}]", "", name) for name in names]
    if not complete or len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
        return {}
    return dict(zip(names, values, strict=True))


def in_usual_order(answer: Answer) -> Answer:
    """The answer with its named values in the order in which a point has them: x before y, x_1 before x_2.

    Of names that have no such order, m and b, the written order is kept.
    """
    shape = answer.shape
    values = named_values(shape)
    order = _usual_order(list(values))
    if isinstance(shape, Named):
        return Answer(AnswerList("()", tuple(values[name] for name in order)), answer.text) if order else answer
    if order and isinstance(shape, AnswerList):
        places = list(values)
        return Answer(AnswerList(shape.ends, tuple(shape.items[places.index(name)] for name in order)), answer.text)
    return answer


def _usual_order(names: list[str]) -> list[str]:
    """Neighbours in the alphabet by letter, a letter with numbers by number; empty for other names."""
    if not names:
        return []
    letters = sorted(names)
    if all(len(name) == 1 for name in letters):
        return letters if ord(letters[-1]) - ord(letters[0]) == len(letters) - 1 else []
    found = [_NAME.fullmatch(name) for name in names]
    indexes = {name: int(one[2]) for name, one in zip(names, found, strict=True) if one and (one[2] or "").isdecimal()}
    one_letter = len({one[1] for one in found if one}) == 1
    return sorted(indexes, key=indexes.__getitem__) if one_letter and len(indexes) == len(names) else []


def as_points(answer: Answer, gold: Answer) -> tuple[str, str]:
    """The texts of both, those with named values as points, whose values stand in the same order on both sides.

    >>> from .answers import read
    >>> as_points(read("y = 6, x = 5"), read("(5, 6)"))
    ('(5, 6)', '(5, 6)')
    """
    values, others = named_values(answer.shape), named_values(gold.shape)
    if values and values.keys() == others.keys():
        return _point(answer, list(others)), _point(gold, list(others))
    asked = [] if isinstance(gold.shape, Named) else _usual_order(list(others))
    return _point(answer, _usual_order(list(values)) or list(values)), _point(gold, asked or list(others))


def _point(answer: Answer, names: list[str]) -> str:
    values = named_values(answer.shape)
    texts = [values[name].text for name in names]
    return f"({', '.join(texts)})" if texts and all(texts) else answer.text
