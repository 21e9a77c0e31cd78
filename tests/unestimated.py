"""Runs of tests leave out the estimate of their memory, a third of a short run's processor time.

Nothing reads it but memory.json in the run's folder, and it never raises, so that no other test could notice it. A test
that is about it asks for it: the fixture ``estimated``, or ``server.run(..., estimated=True)``.
"""

from __future__ import annotations

import sys
from typing import Any


def planned(*_: Any, **__: Any) -> dict[str, Any]:
    return {"why": "not estimated in this test"}


def leave_out() -> None:
    """For the rest of this process, if it has imported what builds runs."""
    if build := sys.modules.get("trew.training.build"):
        setattr(build, "planned", planned)  # noqa: B010 (a module's attribute, which a type checker would refuse)
