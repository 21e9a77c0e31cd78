"""Checks the shapes and types in the annotations of the mathematics and the learner, in every test of this process.

jaxtyping's import hook decorates what these packages define. Its own decorator binds the arguments of each call to a
signature anew and checks them twice, which takes most of the time of a test on a few numbers. The one here has beartype
check the arguments and what is returned, once: all that is annotated, as before, with one set of sizes for each call.
Each function is checked in its first calls in every test (``CALLS``), at night in all: properties call the same ones
with hundreds of drawn batches, and spent half of their time on shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype

import tiers

CALLS = 3
"""The calls of a function, or of a dataclass's ``__init__``, that are checked in a test or in a command."""
PACKAGES = ("trew.objective", "trew.learner")
_SHAPED = ("Float[", "Int[", "Bool[", "Num[", "Shaped[", "UInt[")
_jaxtyped = jaxtyping.jaxtyped
_always = tiers.tier() == "nightly"
_test = 0


def begin() -> None:
    """Another test begins: the first calls in it are checked."""
    global _test
    _test += 1


def install() -> None:
    jaxtyping.jaxtyped = _decorator
    jaxtyping.install_import_hook(PACKAGES, "beartype.beartype")


def _decorator(target: Any = None, *, typechecker: Any = None) -> Any:
    """In the place of ``jaxtyping.jaxtyped``; what is neither a function nor a dataclass is left to that."""
    if target is None:
        return functools.partial(_decorator, typechecker=typechecker)
    if inspect.isfunction(target):
        return _checked(target)
    if isinstance(target, classmethod | staticmethod):
        return type(target)(_checked(target.__func__))
    if dataclasses.is_dataclass(target) and "__init__" in vars(target):
        target.__init__ = _checked(target.__init__)  # type: ignore[misc]
        return target
    return _jaxtyped(target, typechecker=typechecker)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    texts = dict(function.__annotations__)
    checked = beartype(function)
    function.__annotations__ = checked.__annotations__ = texts  # beartype has put in the types that they name
    shaped = any(shape in str(text) for text in texts.values() for shape in _SHAPED)
    test, left = -1, CALLS

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal test, left
        if test != _test:
            test, left = _test, CALLS
        if left == 0 and not _always:
            return function(*args, **kwargs)
        left -= 1
        if not shaped:
            return checked(*args, **kwargs)
        with _jaxtyped("context"):  # a name stands for the same size in all of this call
            return checked(*args, **kwargs)

    return call
