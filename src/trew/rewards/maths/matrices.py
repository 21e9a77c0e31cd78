r"""Matrices: as they stand, and worked out where they are added, multiplied or raised to a power."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import algebra, formula
from .algebra import Value
from .brackets import split
from .not_exact import Malformed, NotExact, Undefined
from .shapes import Answer, Matrix, Scalar
from .tokens import Token

MAX_SIDE = 12
"""Rows and columns of a matrix that is computed with."""
MAX_POWER = 10_000

_Rows = list[list[Value]]
_Reader = Callable[[list[Token]], Answer]
_BEGIN, _END = "\\begin{matrix}", "\\end{matrix}"
_TRANSPOSED = ("T", "\\top", "\\text{T}")


def matrix(tokens: list[Token], item: _Reader) -> Matrix | None:
    """The matrix that tokens are or make, cells read by ``item``; None for something else, a matrix in a unit too.

    Raises NotExact for one that cannot be worked out here.
    """
    texts = [t.text for t in tokens]
    if _BEGIN not in texts:
        return None
    if _end(tokens, 0) == len(tokens):
        return _as_it_stands(tokens, item)
    # Words and units behind it, determinants and relations have readers of their own.
    if not set(texts).isdisjoint(("|", "=", ":", "\\pm", "\\mp")) or any(t.kind in ("unit", "text") for t in tokens):
        return None
    return Matrix(tuple(tuple(Answer(Scalar(value)) for value in row) for row in _sum(tokens, item)))


def _end(tokens: list[Token], start: int) -> int:
    """Behind the matrix that begins at ``start``, in brackets or without; ``start`` if none does."""
    opens = tokens[start].text if start < len(tokens) else ""
    closes = {"(": ")", "[": "]", "{": "}"}.get(opens, "")
    at = start + bool(closes)
    if at >= len(tokens) or tokens[at].text != _BEGIN:
        return start
    depth = 0
    for i in range(at, len(tokens)):
        depth += {_BEGIN: 1, _END: -1}.get(tokens[i].text, 0)
        if not depth:
            closed = not closes or (i + 1 < len(tokens) and tokens[i + 1].text == closes)
            return i + 1 + bool(closes) if closed else start
    return start


def _as_it_stands(tokens: list[Token], item: _Reader) -> Matrix:
    inside = tokens[1:-1] if tokens[0].text == _BEGIN else tokens[2:-2]
    rows, _ = split(inside, ("\\\\",))
    if rows and not rows[-1]:  # a line break after the last row
        rows = rows[:-1]
    found = tuple(tuple(item(cell) for cell in split(row, ("&",))[0]) for row in rows)
    if len({len(row) for row in found}) != 1:
        raise NotExact("a matrix with rows of different lengths")
    return Matrix(found)


# -------------------------------------------------------------------------------------------------------- computing


def _sum(tokens: list[Token], item: _Reader) -> _Rows:
    total: _Rows | None = None
    for sign, term in _terms(tokens):
        found = _scaled(_product(term, item), algebra.number(sign))
        if total is None:
            total = found
        elif [len(row) for row in total] == [len(row) for row in found]:
            total = [[algebra.add(a, b) for a, b in zip(*rows, strict=True)] for rows in zip(total, found, strict=True)]
        else:
            raise Undefined("a sum of matrices of different sizes")
    if total is None:
        raise Malformed("empty")
    return total


def _terms(tokens: list[Token]) -> Iterator[tuple[int, list[Token]]]:
    """The terms of a sum with their signs: split at each + and - that is no sign of a factor or an exponent."""
    sign, term, depth = 1, list[Token](), 0
    for token in tokens:
        depth += (token.text in ("(", "[", "{", _BEGIN)) - (token.text in (")", "]", "}", _END))
        if depth or token.text not in ("+", "-") or (term and term[-1].text in ("^", "*", "/")):
            term.append(token)
            continue
        if term:
            yield sign, term
        elif token is not tokens[0]:
            raise Malformed("two signs side by side")
        sign, term = (1 if token.text == "+" else -1), []
    yield sign, term


def _product(tokens: list[Token], item: _Reader) -> _Rows:
    total: _Rows | None = None
    scale = algebra.number(1)
    at = 0
    while at < len(tokens):
        end = _end(tokens, at)
        if end > at:
            factor = _values(_as_it_stands(tokens[at:end], item))
            at, factor = _raised(tokens, end, factor)
            total = factor if total is None else _times(total, factor)
            continue
        end = next((i for i in range(at + 1, len(tokens)) if _end(tokens, i) > i), len(tokens))
        scale = algebra.multiply(scale, _number(tokens[at:end], behind=total is not None, before=end < len(tokens)))
        at = end
    if total is None:
        raise NotExact("a sum of a matrix and a number")
    return _scaled(total, scale)


def _number(tokens: list[Token], *, behind: bool, before: bool) -> Value:
    """The number between matrices; ``behind`` and ``before`` say on which sides of it one stands."""
    if before and tokens[-1].text == "*":
        tokens = tokens[:-1]
    if behind and tokens[:1] and tokens[0].text in ("*", "/"):
        tokens = [Token("number", "1"), *tokens]
    return formula.value(tokens) if tokens else algebra.number(1)


def _raised(tokens: list[Token], at: int, base: _Rows) -> tuple[int, _Rows]:
    """A matrix to the power that follows it at ``at``, if one does, and the place behind it."""
    if at >= len(tokens) or tokens[at].text != "^":
        return at, base
    end = at + 2
    if at + 1 < len(tokens) and tokens[at + 1].text == "{":
        end = next((i + 1 for i in range(at, len(tokens)) if tokens[i].text == "}"), len(tokens) + 1)
    exponent = tokens[at + 1 : end] if end == at + 2 else tokens[at + 2 : end - 1]
    if end > len(tokens) or not exponent:
        raise Malformed("ends in the middle")
    if end < len(tokens) and tokens[end].text in ("^", "!", "'", "_"):
        raise NotExact("an exponent of an exponent")
    if len(exponent) == 1 and exponent[0].text in _TRANSPOSED:
        return end, [list(column) for column in zip(*base, strict=True)]
    power = algebra.rational(formula.value(exponent))
    if power is None or power.denominator != 1 or abs(power) > MAX_POWER or len(base) != len(base[0]):
        raise NotExact("an unusual power of a matrix")
    return end, _power(base if power >= 0 else _inverse(base), abs(int(power)))


def _values(found: Matrix) -> _Rows:
    rows: _Rows = []
    for row in found.rows:
        shapes = [cell.shape for cell in row if isinstance(cell.shape, Scalar) and not cell.shape.unit]
        if len(shapes) < len(row) or len(row) > MAX_SIDE or len(found.rows) > MAX_SIDE:
            raise NotExact("a matrix that is not computed with")
        rows.append([shape.value for shape in shapes])
    return rows


def _scaled(rows: _Rows, factor: Value) -> _Rows:
    return [[algebra.multiply(factor, value) for value in row] for row in rows]


def _times(a: _Rows, b: _Rows) -> _Rows:
    if len(a[0]) != len(b):  # of two vectors a product may be meant that is none of matrices
        raise NotExact("a product of matrices that do not fit")
    columns = list(zip(*b, strict=True))
    return [[_dot(row, column) for column in columns] for row in a]


def _dot(row: list[Value], column: tuple[Value, ...]) -> Value:
    total = algebra.number(0)
    for a, b in zip(row, column, strict=True):
        total = algebra.add(total, algebra.multiply(a, b))
    return total


def _identity(size: int) -> _Rows:
    return [[algebra.number(i == j) for j in range(size)] for i in range(size)]


def _power(base: _Rows, exponent: int) -> _Rows:
    out = _identity(len(base))
    while exponent:
        if exponent & 1:
            out = _times(out, base)
        exponent >>= 1
        if exponent:  # the last square would be made for nothing
            base = _times(base, base)
    return out


def _inverse(rows: _Rows) -> _Rows:
    """By elimination, next to the identity matrix."""
    size = len(rows)
    # Whether such a value is 0 is not known, so that no pivot could be chosen.
    if any(value.opaque for row in rows for value in row):
        raise NotExact("the inverse of a matrix with functions in it")
    wide = [[*row, *one] for row, one in zip(rows, _identity(size), strict=True)]
    for i in range(size):
        pivot = next((k for k in range(i, size) if not algebra.is_zero(wide[k][i])), -1)
        if pivot < 0:
            raise Undefined("a matrix without an inverse")
        wide[i], wide[pivot] = wide[pivot], wide[i]
        wide[i] = [algebra.divide(value, wide[i][i]) for value in wide[i]]
        for k in range(size):
            if k != i:
                factor = wide[k][i]
                wide[k] = [
                    algebra.subtract(a, algebra.multiply(factor, b)) for a, b in zip(wide[k], wide[i], strict=True)
                ]
    return [row[size:] for row in wide]
