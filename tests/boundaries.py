"""Boundaries that tests of the sandbox run behind: the one that this machine would choose, or all that it has."""

from __future__ import annotations

import os

import pytest

from trew.rewards.sandbox.choose import self_test
from trew.rewards.sandbox.host.boxes import Design, designs

KINDS = ("bubblewrap", "landlock")


def asked() -> list[str]:
    """Cases for a fixture: the boundary that a run would choose, or each kind with TREW_BOUNDARIES=all."""
    return list(KINDS) if os.environ.get("TREW_BOUNDARIES") == "all" else ["chosen"]


def usable(kind: str) -> list[Design]:
    """The best design of that kind that works here; the test is skipped, with the reasons, where there is none."""
    tried = []
    for design in designs():
        if kind in ("chosen", design.kind):
            why = self_test(design)
            if not why:
                return [design]
            tried.append(f"{design.kind}: {why}")
    pytest.skip("; ".join(tried) or f"{kind}: neither this machine nor this user has it")
