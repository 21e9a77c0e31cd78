"""Small wrong changes to a module's source: one at a time, each with a name that outlives edits elsewhere in the file.

What is text is left alone: docstrings, annotations, ``equation``, what an error says (not when it is raised).
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

TEXT_METHODS = {"equation", "_shown"}
OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
NAMES = {"minimum": "maximum", "maximum": "minimum", "all": "any", "any": "all", "min": "max", "max": "min",
         "ceil": "floor", "nansum": "sum", "exp": "expm1", "expm1": "exp", "zeros": "ones", "ones_like": "zeros_like",
         "zeros_like": "ones_like"}  # fmt: skip
DROPPED = {"clamp", "detach", "abs", "sign", "nan_to_num", "sqrt", "log", "exp", "sum", "mean", "contiguous"}
"""Methods whose call is replaced by what they are called on."""


@dataclass(frozen=True)
class Mutant:
    module: str
    where: str  # qualified name of the innermost function or class; "" at the module's level
    rule: str
    change: str  # the statement's piece before -> after
    number: int  # of those that are alike in all of this
    first: int  # lines of the statement
    last: int
    in_function: bool  # in a function's body: its code can be exchanged without importing anything again
    path: tuple[tuple[str, int | None], ...]  # to the piece, from the module
    which: int  # of the changes to that piece

    @property
    def key(self) -> str:
        return f"{self.module}::{self.where}::{self.rule}::{self.change}" + (f"::{self.number}" if self.number else "")

    def drawn(self, seed: int) -> float:
        """A number in [0, 1) that depends on the key alone: a sample stays the same while other code changes."""
        return int(hashlib.sha256(f"{seed}:{self.key}".encode()).hexdigest()[:12], 16) / 16**12


def mutants(source: str, module: str) -> list[Mutant]:
    """All mutants of one module, in the order of the text."""
    seen: dict[str, int] = {}
    found = []
    for spot in _spots(ast.parse(source)):
        for which, (rule, before, apply) in enumerate(_changes(spot.node)):
            change = f"{_short(before)} -> {_short(apply(copy.deepcopy(spot.node)))}"
            plain = Mutant(
                module, spot.where, rule, change, 0, spot.first, spot.last, spot.in_function, spot.path, which
            )
            number = seen[plain.key] = seen.get(plain.key, -1) + 1
            found.append(dataclasses.replace(plain, number=number))
    return found


def mutated(source: str, mutant: Mutant) -> str:
    """The module's source with the mutant's change."""
    tree = ast.parse(source)
    node = _at(tree, mutant.path)
    *_, apply = list(_changes(node))[mutant.which]
    _put(tree, mutant.path, apply(node))
    return ast.unparse(ast.fix_missing_locations(tree))


@dataclass(frozen=True)
class _Spot:
    node: ast.AST
    path: tuple[tuple[str, int | None], ...]
    where: str
    first: int
    last: int
    in_function: bool


def _spots(tree: ast.Module) -> Iterator[_Spot]:
    def walk(
        node: ast.AST, path: tuple, names: tuple[str, ...], span: tuple[int, int], inside: bool
    ) -> Iterator[_Spot]:
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            compound = isinstance(node, (ast.If, ast.For, ast.While, ast.With))
            span = (node.lineno, node.lineno if compound else node.end_lineno or node.lineno)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = (*names, *(("<locals>",) if inside else ()), node.name)
            span = (node.lineno, node.end_lineno or node.lineno)
        elif isinstance(node, ast.expr) and hasattr(node, "lineno"):
            span = (min(span[0], node.lineno), max(span[1], node.end_lineno or node.lineno))
        yield _Spot(node, path, ".".join(names), *span, inside)
        for field, value in ast.iter_fields(node):
            body = inside or (isinstance(node, ast.FunctionDef) and field == "body")
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not _is_text(node, field, child):
                    yield from walk(child, (*path, (field, index)), names, span, body)

    yield from walk(tree, (), (), (1, 1), False)


def _is_text(parent: ast.AST, field: str, child: ast.AST) -> bool:
    if field in ("annotation", "returns", "decorator_list", "bases"):
        return True
    if isinstance(child, (ast.Import, ast.ImportFrom, ast.Raise, ast.JoinedStr, ast.Assert)):
        return True
    if isinstance(child, ast.FunctionDef) and child.name in TEXT_METHODS:
        return True
    if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):  # a docstring, or "..."
        return True
    if isinstance(parent, ast.Call) and _name(parent.func).endswith(("Error", "TypeVar")):
        return True
    if isinstance(parent, ast.Subscript) and field == "slice" and _name(parent.value) in ("Literal", "Mapping", "dict"):
        return True
    targets = child.targets if isinstance(child, ast.Assign) else []
    return any(isinstance(t, ast.Name) and t.id in ("__all__", "Coupling") for t in targets)


Changes = Iterator[tuple[str, ast.AST, Callable[[ast.AST], ast.AST]]]
"""(rule, what is shown as before, how a copy of the node is changed)."""


def _changes(node: ast.AST) -> Changes:
    yield from _operator_changes(node)
    yield from _statement_changes(node)
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield "sign", node, lambda n: n.operand
    elif isinstance(node, ast.Constant):
        if (new := _other_constant(node.value)) is not None:
            yield "constant", node, lambda n: ast.Constant(new)
    elif isinstance(node, ast.Call):
        yield from _call_changes(node)
    elif isinstance(node, ast.IfExp):
        yield "branches", node, lambda n: _set(n, body=n.orelse, orelse=n.body)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield "filter", node.ifs[0], lambda n: _set(n, ifs=n.ifs[1:])


def _operator_changes(node: ast.AST) -> Changes:
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        for other in OPERATORS.get(type(node.op), ()):
            yield "operator", node, lambda n, o=other: _set(n, op=o())
    if isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            yield "operand", node, lambda n, i=index: _without(n, "values", i)
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops[:2]):
            for other in OPERATORS.get(type(operator), ()):
                yield "comparison", node, lambda n, i=at, o=other: _set(n, ops=[*n.ops[:i], o(), *n.ops[i + 1 :]])


def _statement_changes(node: ast.AST) -> Changes:
    if isinstance(node, ast.If):
        guard = all(isinstance(s, ast.Raise) for s in node.body)
        test = ast.Constant(False) if guard else None
        yield ("guard" if guard else "condition"), node.test, lambda n: _set(n, test=test or _not(n.test))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement", node, lambda n: ast.Pass()


def _call_changes(node: ast.Call) -> Changes:
    name = _name(node.func)
    if name == "where" and len(node.args) == 3:
        yield "branches", node, lambda n: _set(n, args=[n.args[0], n.args[2], n.args[1]])
    if name in NAMES:
        yield "name", node, lambda n: _set(n, func=_renamed(n.func, NAMES[name]))
    if name in DROPPED and isinstance(node.func, ast.Attribute) and _name(node.func.value) != "torch":
        yield "call", node, lambda n: n.func.value
    for index, keyword in enumerate(node.keywords):
        if keyword.arg in ("dtype", "device", "generator", "field"):
            continue  # a device cannot be told apart on a machine that has one
        yield "argument", node, lambda n, i=index: _without(n, "keywords", i)
        if name == "clamp":
            other = {"min": "max", "max": "min"}[keyword.arg or "min"]
            yield "side", node, lambda n, i=index, o=other: _set(n, keywords=_named(n.keywords, i, o))
    if name == "clamp" and len(node.args) == 2:
        yield "side", node, lambda n: _set(n, args=[], keywords=[ast.keyword("min", n.args[0])])
        yield "side", node, lambda n: _set(n, args=[], keywords=[ast.keyword("max", n.args[1])])
    if len(node.args) > 1 and name not in ("where", "clamp", "isinstance", "getattr", "range"):
        yield "argument", node, lambda n: _set(n, args=n.args[:-1])


def _other_constant(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 if value else 1.0
    return f"{value}?" if isinstance(value, str) and value else None


def _set(node, **fields):
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _without(node, field: str, index: int):
    kept = [x for i, x in enumerate(getattr(node, field)) if i != index]
    return kept[0] if isinstance(node, ast.BoolOp) and len(kept) == 1 else _set(node, **{field: kept})


def _named(keywords: list[ast.keyword], index: int, name: str) -> list[ast.keyword]:
    return [ast.keyword(name, k.value) if i == index else k for i, k in enumerate(keywords)]


def _renamed(func, name: str):
    return _set(func, **{"attr" if isinstance(func, ast.Attribute) else "id": name})


def _not(test: ast.expr) -> ast.expr:
    return (
        test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else ast.UnaryOp(ast.Not(), test)
    )


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _at(tree: ast.AST, path) -> ast.AST:
    for field, index in path:
        tree = getattr(tree, field) if index is None else getattr(tree, field)[index]
    return tree


def _put(tree: ast.AST, path, new: ast.AST) -> None:
    parent, (field, index) = _at(tree, path[:-1]), path[-1]
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new


def _short(node: ast.AST) -> str:
    test = getattr(node, "test", None)
    text = f"if {ast.unparse(test)}" if isinstance(node, ast.If) and test else ast.unparse(node)
    text = " ".join(text.split())
    return text if len(text) <= 110 else f"{text[:60]} ... {text[-45:]}"
