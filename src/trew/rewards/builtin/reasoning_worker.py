"""What the grading processes of ``reasoning`` run (``isolation.tasks``): imports nothing of trew.

``formula``: two formulas are compared by their values at points of the complex plane, in 50 digits. Their text is read
with Python's own parser and walked by hand: nothing is executed. ``package``: reasoning-gym's grader for the task, of
which only the full score counts; only tasks whose grader executes nothing get here.
"""

from __future__ import annotations

import ast
import functools
from typing import Any

POINTS = (0, 1, -1, 2, 3, -2, 5)  # steps away from a start that no formula has reason to be special at
DIGITS = 50
CLOSE = 25  # digits in which two values must agree
MAX_NODES = 2000
FUNCTIONS = (
    "sin",
    "cos",
    "tan",
    "sec",
    "csc",
    "cot",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "exp",
    "log",
    "sqrt",
)
NAMES = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}


def prepare() -> None:
    import mpmath

    mpmath.mp.dps = DIGITS
    import reasoning_gym  # noqa: F401


def run(payload: dict[str, Any]) -> dict[str, Any]:
    """{"right": whether the answer is right} and, where something failed on the way, why."""
    if payload["how"] == "package":
        return {"right": package_says(payload)}
    expanded = payload["task"] == "polynomial_multiplication"
    try:
        answer, gold = read(payload["answer"]), read(payload["gold"])
    except NoFormula as error:
        return {"right": False, "error": str(error)}
    if expanded and not is_expanded(answer):
        return {"right": False, "error": "not multiplied out"}
    return {"right": equal(answer, gold, up_to_constant=not expanded)}


# ------------------------------------------------------------------------------------------------------------ package


def package_says(payload: dict[str, Any]) -> bool:
    """Whether the package's grader gives the answer its full score; what it raises at is wrong."""
    entry = {"question": "", "answer": payload["gold"], "metadata": untagged(payload["metadata"])}
    # The configuration's text is the key, as a table cannot be one. Sorted: its order makes no other task.
    score = dataset(payload["task"], repr(sorted(payload["config"].items())), payload["config"]).score_answer(
        payload["answer"], entry
    )
    return float(score) >= 1 - 1e-9


_made: dict[tuple[str, str], Any] = {}


def dataset(task: str, key: str, config: dict[str, Any]) -> Any:
    import reasoning_gym

    if (task, key) not in _made:
        # Only its grader is used, so that it does not matter which problems it would make.
        _made[task, key] = reasoning_gym.create_dataset(task, **{**config, "seed": 0, "size": 4})
    return _made[task, key]


def untagged(value: Any) -> Any:
    """The value behind the JSON that the data task wrote: tuples, sets, and keys that are no strings.

    >>> untagged({"__dict__": [[1, {"__tuple__": [2, 3]}]]})
    {1: (2, 3)}
    """
    if isinstance(value, list):
        return [untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__dict__" in value:
        return {untagged(key): untagged(item) for key, item in value["__dict__"]}
    if "__tuple__" in value:
        return tuple(untagged(item) for item in value["__tuple__"])
    if "__set__" in value:
        return {untagged(item) for item in value["__set__"]}
    return {key: untagged(item) for key, item in value.items()}


# ----------------------------------------------------------------------------------------------------------- formulas


class NoFormula(ValueError):
    """The text is no formula that can be compared."""


def read(text: str) -> ast.expr:
    """A formula's tree: numbers, variables of one letter, + - * / ** and the functions above.

    >>> ast.unparse(read("2*x^3 - sin(x)/2 + C"))
    '2 * x ** 3 - sin(x) / 2 + C'
    """
    try:
        # To Python x^2 is an exclusive or.
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoFormula("no formula") from None
    nodes = list(ast.walk(tree))
    if len(nodes) > MAX_NODES:
        raise NoFormula("too long a formula")
    for node in nodes:
        if why := _out_of_place(node):
            raise NoFormula(why)
    return tree


KNOWN = frozenset({*FUNCTIONS, "Abs"})
PARTS = (ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.Call, ast.operator, ast.unaryop, ast.Load)


def _out_of_place(node: ast.AST) -> str:
    """Says why a node of Python's tree has no place in a formula; empty if it has one."""
    if isinstance(node, ast.Constant) and type(node.value) not in (int, float):  # by type: True is an int
        return "holds something that is no number"
    if isinstance(node, ast.Name) and len(node.id) > 1:
        name = NAMES.get(node.id, node.id)
        return "" if name in KNOWN or name == "pi" else f"{node.id[:40]} is no function that is known here"
    if isinstance(node, ast.Call):
        return "" if _is_known_call(node) else "holds a call that is no function of one value"
    return "" if isinstance(node, PARTS) else f"{type(node).__name__} has no place in a formula"


def _is_known_call(node: ast.Call) -> bool:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    return len(node.args) == 1 and not node.keywords and NAMES.get(name, name) in KNOWN


def is_expanded(tree: ast.expr) -> bool:
    """Whether no product or power has a sum in it.

    >>> is_expanded(read("x**2 + 2*x*y/3 - 1")), is_expanded(read("x*(x + 1)")), is_expanded(read("(x - 1)**2"))
    (True, False, False)
    """
    products = [
        n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Mult, ast.Div, ast.Pow))
    ]
    sums = (ast.Add, ast.Sub)
    return not any(
        isinstance(inner, ast.BinOp) and isinstance(inner.op, sums) for node in products for inner in ast.walk(node)
    )


def equal(answer: ast.expr, gold: ast.expr, *, up_to_constant: bool) -> bool:
    """Whether two formulas have the same values near a point of the complex plane; for integrals, up to a constant."""
    import mpmath

    names = {n.id for tree in (answer, gold) for n in ast.walk(tree) if isinstance(n, ast.Name)}
    letters = sorted(name for name in names if len(name) == 1)
    differences, size = [], mpmath.mpf(1)
    for step in POINTS:
        at = _point(letters, step)
        if up_to_constant:  # the constant of integration has one value at all points
            at |= {name: mpmath.mpc(0.3775406687981454) for name in ("C", "K", "c") if name in at}
        both = _values(answer, gold, at)
        if both is None:
            return False
        size = max(size, abs(both[0]), abs(both[1]))
        differences.append(both[0] - both[1])
    base = differences[0] if up_to_constant else mpmath.mpf(0)
    # Relative to the largest value: digits cancel in a difference of large ones.
    return all(abs(d - base) <= size * mpmath.mpf(10) ** -CLOSE for d in differences)


def _values(answer: ast.expr, gold: ast.expr, at: dict[str, Any]) -> tuple[Any, Any] | None:
    """Both values at one point; None if one does not exist or is not finite."""
    import mpmath

    try:
        left, right = value(answer, at), value(gold, at)
    except (ArithmeticError, ValueError, TypeError):
        return None
    return (left, right) if mpmath.isfinite(left) and mpmath.isfinite(right) else None


def _point(letters: list[str], step: int) -> dict[str, Any]:
    """A value for each letter, ``step`` steps away from the start. Off the real axis, where logarithms and roots of
    negative numbers have values too; close to the start, so that no branch cut lies between two points."""
    import mpmath

    return {
        letter: mpmath.mpc(0.7310585786300049 + 0.1 * i, 0.4621171572600098 - 0.07 * i)
        + step * mpmath.mpc(0.0131 + 0.003 * i, 0.0087 - 0.002 * i)
        for i, letter in enumerate(letters)
    }


def _operated(operator: ast.operator, left: Any, right: Any) -> Any:
    import mpmath

    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.Div):
        return left / right
    if isinstance(operator, ast.Pow):
        return mpmath.power(left, right)
    raise ValueError("unknown operator")


def value(tree: ast.expr, at: dict[str, Any]) -> Any:
    """The tree's value in mpmath's numbers. ``Abs`` is dropped in a logarithm only, where it changes a constant."""
    import mpmath

    go = functools.partial(value, at=at)
    if isinstance(tree, ast.Constant):
        number: Any = tree.value  # as it is written: 0.1 is one tenth
        return mpmath.mpf(repr(number))
    if isinstance(tree, ast.Name):
        return _named(tree.id, at)
    if isinstance(tree, ast.UnaryOp):
        inner = go(tree.operand)
        return -inner if isinstance(tree.op, ast.USub) else inner
    if isinstance(tree, ast.BinOp):
        return _operated(tree.op, go(tree.left), go(tree.right))
    if isinstance(tree, ast.Call) and _is_known_call(tree) and isinstance(tree.func, ast.Name):
        name = NAMES.get(tree.func.id, tree.func.id)
        argument = _without_abs(tree.args[0]) if name == "log" else tree.args[0]
        if name in FUNCTIONS:
            return getattr(mpmath, name)(go(argument))
    raise ValueError("unknown function")


def _named(name: str, at: dict[str, Any]) -> Any:
    """The value of a name: a constant, unless E is one of the formula's letters, or the letter's value."""
    import mpmath

    if name == "pi":
        return mpmath.pi()
    return mpmath.e() if name == "E" and "E" not in at else at[name]


def _without_abs(argument: ast.expr) -> ast.expr:
    """x of Abs(x): log|x| and log(x) differ by a constant where x has one sign, and integrals are equal up to one."""
    if isinstance(argument, ast.Call) and isinstance(argument.func, ast.Name) and argument.func.id == "Abs":
        return argument.args[0] if argument.args else argument
    return argument
