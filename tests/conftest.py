"""Shapes written in the mathematics' annotations are checked in every test."""

from __future__ import annotations

from jaxtyping import install_import_hook

install_import_hook(("trew.objective", "trew.learner"), "beartype.beartype")
