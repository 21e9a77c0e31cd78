"""No module needs another to have been imported before it: what is imported at the top of modules makes no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def imported(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is loaded."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If):
            yield from imported(node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else node.body + node.orelse)
        elif isinstance(node, (ast.Try, ast.ClassDef)):
            yield from imported(node.body)


def packages_of(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def needs(module: str, path: Path, known: frozenset[str]) -> set[str]:
    """The modules that ``module`` loads, with the packages they are in, but for those that it is in itself."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for node in imported(ast.parse(path.read_text("utf-8")).body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            above = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*above, *filter(None, [node.module])])
            names = [whole, *(f"{whole}.{alias.name}" for alias in node.names)]
        found.update(*({name} | packages_of(name) for name in names if name in known))
    return found - packages_of(module) - {module}


def test_any_module_can_be_the_first_that_is_imported():
    paths = {}
    for path in (SOURCE / "trew").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {module: needs(module, path, frozenset(paths)) for module, path in paths.items()}
    assert "trew.types" in graph["trew.diagnostics.monitors"], "imports are not seen"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("modules import each other: " + " <- ".join(error.args[1])) from None
