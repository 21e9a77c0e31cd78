"""Forms of arithmetic problems: templates such as ``a + b * c`` that can be filled, evaluated and compared.

A form is an expression over the letters a, b, c, d with + - * / and parentheses. It is parsed into a tree and never
evaluated as code. All values are exact integers: a division with a remainder is not a problem of the form.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TypeAlias

OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
LETTERS = "abcd"
MAX_LENGTH = 80  # of a form as text

Node: TypeAlias = "str | tuple[str, Node, Node]"
"""A letter, or (operator, left, right)."""


@dataclass(frozen=True, slots=True)
class Form:
    """A parsed form, with its ``letters`` from left to right."""

    text: str
    tree: Node
    letters: tuple[str, ...]

    def value(self, numbers: dict[str, int]) -> int | None:
        """The exact value; None for a division by 0 or with a remainder.

        >>> parse("a + b * c").value({"a": 1, "b": 2, "c": 3})
        7
        """
        return _value(self.tree, numbers)

    def fill(self, numbers: dict[str, int]) -> str:
        """The problem as text; negative numbers in parentheses.

        >>> parse("a - b").fill({"a": 3, "b": -4})
        '3 - (-4)'
        """
        return re.sub(r"[a-z]", lambda m: f"{n}" if (n := numbers[m[0]]) >= 0 else f"({n})", self.text)

    def canonical(self, numbers: dict[str, int]) -> str:
        """The same text for problems that differ only in the order of summands or factors, or in brackets among them.

        >>> f = parse("a * b"); f.canonical({"a": 7, "b": 8}) == f.canonical({"a": 8, "b": 7})
        True
        >>> f, g = parse("a + b + c"), parse("a + (b + c)")
        >>> f.canonical({"a": 1, "b": 2, "c": 3}) == g.canonical({"a": 3, "b": 1, "c": 2})
        True
        """
        return _canonical(self.tree, numbers)


def parse(text: str) -> Form:
    """Parses a form; a single operator is short for two operands. Raises ValueError with what is wrong.

    >>> parse("*").text
    'a * b'
    """
    if text.strip() in OPERATORS.values():
        text = f"a {text.strip()} b"
    if len(text) > MAX_LENGTH:
        raise ValueError(f"is longer than {MAX_LENGTH} characters")
    try:
        # The syntax tree alone is read: nothing is compiled.
        tree = _tree(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("is not an expression such as 'a + b * c'") from None
    if isinstance(tree, str):
        raise ValueError("has no operator")
    letters = tuple(_letters(tree))
    if letters != tuple(LETTERS[: len(letters)]):
        raise ValueError("must use the letters a, b, c, d once each, in this order and without gaps")
    return Form(text.strip(), tree, letters)


def _tree(node: ast.expr) -> Node:
    if isinstance(node, ast.Name) and re.fullmatch("[a-z]", node.id):
        return node.id
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)], _tree(node.left), _tree(node.right)
    raise ValueError("may contain only the letters a, b, c, d, the operators + - * / and parentheses")


def _letters(node: Node) -> list[str]:
    return [node] if isinstance(node, str) else _letters(node[1]) + _letters(node[2])


def _value(node: Node, numbers: dict[str, int]) -> int | None:
    if isinstance(node, str):
        return numbers[node]
    left, right = _value(node[1], numbers), _value(node[2], numbers)
    if left is None or right is None:
        return None
    return apply(node[0], left, right)


def apply(operator: str, left: int, right: int) -> int | None:
    """Computes one exact operation; None for a division by 0 or with a remainder.

    >>> apply("/", 12, 4), apply("/", 12, 5), apply("/", 1, 0)
    (3, None, None)
    """
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return left // right if right and left % right == 0 else None


def _canonical(node: Node, numbers: dict[str, int]) -> str:
    if isinstance(node, str):
        return str(numbers[node])
    parts = [_canonical(part, numbers) for part in _parts(node)]
    if node[0] in "+*":
        parts.sort()
    return f"({node[0]} {' '.join(parts)})"


def _parts(node: tuple[str, Node, Node]) -> list[Node]:
    """The operands of an operator; of a sum of sums, or a product of products, all summands or factors."""
    operator, *sides = node
    if operator in "-/":
        return sides
    parts: list[Node] = []
    for side in sides:
        parts += _parts(side) if isinstance(side, tuple) and side[0] == operator else [side]
    return parts
