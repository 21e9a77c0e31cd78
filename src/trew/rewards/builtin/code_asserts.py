"""Asserts of a data row taken apart, without running anything: calls with literal arguments, and what must hold.

Asserts of the usual shapes are checked in this process: the calls are made in the sandbox, the values come back and are
compared here. Asserts of any other shape (loops, helpers, tolerances) run in a second sandbox of their own.
"""

from __future__ import annotations

import ast
import bisect
import builtins
import cmath
import collections
import copy
import datetime
import decimal
import fractions
import functools
import heapq
import itertools
import json
import math
import operator
import random
import re
import statistics
import string
import sys
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

from . import code_values

# Modules that asserts in the public sets use without importing them: their references happen to.
COMMON = {
    module.__name__: module
    for module in (
        bisect, cmath, collections, copy, datetime, decimal, fractions, functools, heapq, itertools, math, operator,
        random, re, statistics, string, sys,
    )
}  # fmt: skip
_SINGLETONS = (None, True, False)
# What comes back from the sandbox, and what such values can be asked for.
_PLAIN = (
    None, 0, 0.0, 0j, "", b"", bytearray(), [], (), {}, set(), frozenset(), range(0), {}.keys(), {}.values(),
    {}.items(), iter(()), collections.deque(), decimal.Decimal(), fractions.Fraction(), int, type,
)  # fmt: skip
_MUTABLE = (ast.List, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)
_OF_PLAIN = frozenset(name for value in _PLAIN for name in dir(value))


@dataclass(frozen=True, slots=True)
class AssertedCall:
    """One call, as the line that asks for it, and what must hold of the value's text that comes back."""

    call: str
    holds: Callable[[bytes], bool]
    source: str


@dataclass(frozen=True, slots=True)
class Asserts:
    """A row's asserts. ``checks`` where all have a usual shape, else None; ``text`` is the whole as a program."""

    entry: str
    text: str
    checks: tuple[AssertedCall, ...] | None


@lru_cache(maxsize=1024)
def read(asserts: tuple[str, ...], entry: str, setup: str = "") -> Asserts | str:
    """The asserts taken apart, or what is wrong with them in words.

    >>> found = read(("assert f(1) == 2",), "f")
    >>> found.checks[0].call, found.checks[0].holds(b"2"), found.checks[0].holds(b"3")
    ('["call", ["t", 1], ["d"]]', True, False)
    >>> read(("assert f(Pair(1, 2)) == 2",), "f")
    'the asserts use Pair, which nothing defines'
    """
    if not entry.isidentifier():
        return f"entry_point must be the name of a function, got {entry!r:.80}"
    text = "\n".join(asserts)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree, before = ast.parse(text), ast.parse(setup)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"the asserts are no Python: {error}"
    # What cannot be checked from outside is the row's fault, and must not count against a completion.
    if wrong := _problem(tree, {entry, "candidate"}):
        return wrong
    if foreign := sorted(_undefined(before) - {entry}):
        return f"the setup uses {', '.join(foreign)}, which it does not define"
    # Names that nothing binds: common modules are imported below, all others are a fault of the row.
    missing = _undefined(tree) - _defined(before) - {entry, "candidate"}
    foreign = sorted(missing - set(COMMON))
    if foreign:
        return f"the asserts use {', '.join(foreign)}, which nothing defines"
    imports = "".join(f"import {name}\n" for name in sorted(missing))
    return Asserts(entry, imports + text, _checks(tree, entry))


def likely_entry(asserts: Sequence[str]) -> str | None:
    """Guesses the function that asserts are about if nothing names it: the outermost one that nothing defines.

    >>> likely_entry(["assert set(similar((3, 4), (5, 4))) == {4}"])
    'similar'
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse("\n".join(asserts))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    called = [names for node in ast.walk(tree) if isinstance(node, ast.Assert) and (names := _called_names(node))]
    unknown = _undefined(tree) - set(COMMON)
    outermost = [next((name for name in names if name in unknown), "") for names in called]
    # If every name is known, the function has the name of one of Python's: then the first name that is called.
    candidates = [name for name in outermost if name] or [names[0] for names in called]
    return Counter(candidates).most_common(1)[0][0] if candidates else None


def _called_names(one: ast.Assert) -> list[str]:
    """The names that an assert calls, outermost first."""
    # ast.walk goes breadth first: a call comes before those in its arguments.
    calls = [node.func for node in ast.walk(one.test) if isinstance(node, ast.Call)]
    return [function.id for function in calls if isinstance(function, ast.Name)]


def _is_call(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _problem(tree: ast.Module, names: set[str]) -> str:
    """Says why these asserts cannot test a function from outside; empty if they can."""
    nodes = list(ast.walk(tree))
    if not any(isinstance(node, ast.Assert) for node in nodes):
        return "there is no assert"
    if not any(isinstance(node, ast.Name) and node.id in names for node in nodes):
        return f"no assert calls {' or '.join(sorted(names))}"
    if wrong := _idle_assert(nodes) or _about_an_argument(nodes, names):
        return wrong
    functions = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    guarded, results = _guarded(nodes), _results(nodes, names)
    problems = (_call_problem(node, names, functions, guarded) or _use_problem(node, names, results) for node in nodes)
    return next(filter(None, problems), "")


def _idle_assert(nodes: Sequence[ast.AST]) -> str:
    """Names an assert that never fails or never runs, so that any program would pass it; empty if there is none."""
    for node in nodes:
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and node.test.elts:
            return f"{ast.unparse(node):.80}: a tuple is always true; take the brackets around it off"
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    idle = next((node.name for node in nodes if _is_test(node) and node.name not in used), "")
    return f"{idle} has asserts and nothing calls it; call it behind its definition, or name it check" if idle else ""


def _about_an_argument(nodes: Sequence[ast.AST], names: set[str]) -> str:
    """Names an assert that compares a list, set or table that the function was given with a literal; empty if there is
    none. The function has a copy, so that it holds for every program or for none."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_call(node, names)]
    given = {name for call in calls for name in _names(_given(call))} & _made_here(nodes)
    asserts = (node for node in nodes if isinstance(node, ast.Assert) and _compared_with_literal(node.test) in given)
    found = next(asserts, None)
    if found is None:
        return ""
    return f"{ast.unparse(found):.80}: looks for a change in its arguments, which are copies in the sandbox"


def _made_here(nodes: Sequence[ast.AST]) -> set[str]:
    """The variables to which the asserts assign lists, sets or tables that they write out, and nothing else."""
    bound = [
        (isinstance(n.value, _MUTABLE), name) for n in nodes if isinstance(n, ast.Assign) for name in _names(n.targets)
    ]
    return {name for made, name in bound if made} - {name for made, name in bound if not made}


def _names(nodes: Sequence[ast.AST]) -> list[str]:
    return [node.id for node in nodes if isinstance(node, ast.Name)]


def _compared_with_literal(test: ast.expr) -> str:
    """The variable that an assert's test compares, or a part of it, with a literal; empty if it does something else."""
    if not isinstance(test, ast.Compare) or len(test.ops) > 1:
        return ""
    for side, other in itertools.permutations((test.left, test.comparators[0])):
        compared = side.value if isinstance(side, ast.Subscript) else side
        if isinstance(compared, ast.Name) and _is_literal(other):
            return compared.id
    return ""


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _is_test(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Whether it is a function with asserts that runs only where something calls it by name."""
    # check is called with the function; a decorator may call what it is given.
    return (
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not node.decorator_list
        and node.name != "check"
        and any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
    )


def _call_problem(node: ast.AST, names: set[str], functions: set[str], guarded: set[int]) -> str:
    """Says what a call of the function does that cannot pass through a sandbox; empty if nothing."""
    if isinstance(node, ast.Call) and _is_call(node, names) and _is_given_code(node, functions):
        return f"{ast.unparse(node):.80}: only plain values can be given to the function, not code"
    # A bare call matters only for what it changes, unless a try around it waits for what it raises.
    if isinstance(node, ast.Expr) and _is_call(node.value, names) and id(node) not in guarded:
        return f"{ast.unparse(node):.80}: looks for a change in its arguments, which are copies in the sandbox"
    return ""


def _results(nodes: Sequence[ast.AST], names: set[str]) -> set[str]:
    """The variables that hold what a call of the function returned, and nothing else."""
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    found = Counter(
        node.targets[0].id
        for node in nodes
        if isinstance(node, ast.Assign) and _is_call(node.value, names) and isinstance(node.targets[0], ast.Name)
    )
    return {name for name, count in found.items() if count == bound[name]}


def _use_problem(node: ast.AST, names: set[str], results: set[str]) -> str:
    """Says how a node uses what the function returned as no plain value can be used; empty if it does not."""
    if isinstance(node, ast.Attribute) and node.attr not in _OF_PLAIN:
        used = node.value
    elif isinstance(node, ast.Call):  # what was returned is itself called
        used = node.func
    else:
        return ""
    if not _is_call(used, names) and not (isinstance(used, ast.Name) and used.id in results):
        return ""
    return (
        f"{ast.unparse(node):.80}: needs an object or a function to be returned, and only plain values come back from "
        "the sandbox; test a function that returns numbers, text, lists or tables"
    )


def _guarded(nodes: Sequence[ast.AST]) -> set[int]:
    """The identities of everything inside of a try."""
    return {id(inner) for node in nodes if isinstance(node, ast.Try) for inner in ast.walk(node)}


def _is_given_code(call: ast.Call, functions: set[str]) -> bool:
    """Whether an argument is a lambda, or one of these functions and classes of the asserts."""
    return any(
        isinstance(given, ast.Lambda) or (isinstance(given, ast.Name) and given.id in functions)
        for given in _given(call)
    )


def _given(call: ast.Call) -> list[ast.expr]:
    """The arguments of a call, without their names."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _defined(tree: ast.AST) -> set[str]:
    """Every name that the code binds somewhere, whatever its scope."""
    # Scopes are ignored on purpose: a name that is bound anywhere is not reported as undefined.
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found |= _public(node.module or "")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def _public(module: str) -> set[str]:
    """The names that ``from module import *`` binds; none for a module that is not one of these."""
    found = typing if module == "typing" else COMMON.get(module)  # a data row must not choose what is imported here
    if found is None:
        return set()
    return set(getattr(found, "__all__", ())) or {name for name in vars(found) if not name.startswith("_")}


def _undefined(tree: ast.AST) -> set[str]:
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used - _defined(tree) - set(dir(builtins)) - {"candidate", "__name__", "__file__"}


def _checks(tree: ast.Module, entry: str) -> tuple[AssertedCall, ...] | None:
    """Every assert as a check; None if one has another shape, or a statement does something."""
    names = {entry, "candidate"}
    found: list[AssertedCall] = []
    for statement in _body(tree):
        if _is_idle(statement):
            continue
        check = _check(statement.test, names) if isinstance(statement, ast.Assert) else None
        if check is None:
            return None
        found.append(check)
    return tuple(found) or None


def _body(tree: ast.Module) -> list[ast.stmt]:
    """The statements that run, with those of HumanEval's ``check`` in its place and without its METADATA."""
    body: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check":
            body += statement.body
        elif not _is_metadata(statement):
            body.append(statement)
    return body


def _is_metadata(statement: ast.stmt) -> bool:
    """Whether it assigns literals to METADATA: no other name stands in it."""
    if not isinstance(statement, ast.Assign):
        return False
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} <= {"METADATA"}


def _is_idle(statement: ast.stmt) -> bool:
    """Whether there is nothing to check in it: imports (of COMMON modules, added anyway), docstrings, assert True."""
    match statement:
        case ast.Pass() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=value):  # the call of HumanEval's check, whose body is checked in its place
            return isinstance(value, ast.Constant) or _is_call(value, {"check"})
        case ast.Assert(test=ast.Constant(value=value)):
            return bool(value)
    return False


def _check(test: ast.expr, names: set[str]) -> AssertedCall | None:
    """The check of an assert's test: a call, ``not`` a call, or one comparison of a call with a literal."""
    source = ast.unparse(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        call = _call(test.operand, names)
        return AssertedCall(call, lambda line: not code_values.is_true(line), source) if call else None
    if not isinstance(test, ast.Compare):
        call = _call(test, names)
        return AssertedCall(call, code_values.is_true, source) if call else None
    return _compared(test, names, source) if len(test.ops) == 1 else None


def _compared(test: ast.Compare, names: set[str], source: str) -> AssertedCall | None:
    left, right, operator = test.left, test.comparators[0], test.ops[0]
    # 2 == f(1) is f(1) == 2; an order or "in" would change its meaning.
    if _is_call(right, names) and isinstance(operator, _SYMMETRIC):
        left, right = right, left
    call = _call(left, names)
    if call is None:
        return None
    try:
        expected = ast.literal_eval(right)
        code_values.wire(expected)  # raises for a value that the program could never send back
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    holds = _comparison(operator, expected)
    return AssertedCall(call, holds, source) if holds else None


_SYMMETRIC = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)


def _comparison(operator: ast.cmpop, expected: Any) -> Callable[[bytes], bool] | None:
    """What ``value <operator> expected`` asks of the value's text; None for orders, and for identity with anything but
    None, True and False, since the value that comes back is a copy."""
    wanted = isinstance(operator, (ast.Eq, ast.Is, ast.In))
    if isinstance(operator, (ast.Eq, ast.NotEq)):
        return lambda line: code_values.equal(line, expected) == wanted
    if isinstance(operator, (ast.Is, ast.IsNot)) and any(expected is one for one in _SINGLETONS):
        return lambda line: code_values.is_same(line, expected) == wanted
    # Not of sets and tables, which raise a TypeError for a value that cannot be hashed: the assert fails by it.
    if isinstance(operator, (ast.In, ast.NotIn)) and isinstance(expected, (list, tuple)):
        members = list(expected)
        return lambda line: any(code_values.equal(line, one) for one in members) == wanted
    return None


def _call(node: ast.expr, names: set[str]) -> str | None:
    """The line that asks for a call with literal arguments; None for anything else."""
    if not isinstance(node, ast.Call) or not _is_call(node, names):
        return None
    try:
        # literal_eval reads constants and nothing else: nothing of a data row is executed here.
        arguments = tuple(ast.literal_eval(argument) for argument in node.args)
        # f(**table) has None as the name of its keyword.
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        return (
            None if None in keywords else json.dumps(["call", code_values.wire(arguments), code_values.wire(keywords)])
        )
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
