"""Buffers that C writes into name their element type: torch's default is the caller's to set."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trew

FOLDER = Path(trew.__file__).parent / "backends" / "cpu"
MAKES = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_every_buffer_names_its_type(file):
    for call in ast.walk(ast.parse(file.read_text())):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in MAKES):
            continue
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch":
            assert any(given.arg == "dtype" for given in call.keywords), f"{file.name}:{call.lineno}"
