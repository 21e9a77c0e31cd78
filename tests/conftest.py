"""Shapes written in the mathematics' annotations are checked in every test."""

from __future__ import annotations

import os

from jaxtyping import install_import_hook

os.environ.pop("HF_HUB_OFFLINE", None)  # tests of what is said offline set it themselves

install_import_hook(("trew.objective", "trew.learner"), "beartype.beartype")
