"""Runs of tests leave out what no other test could notice: the estimate of their memory, and waiting for the disk.

The estimate is a third of a short run's processor time. Nothing reads it but memory.json in the run's folder, and it
never raises. A test that is about it asks for it: the fixture ``estimated``, or ``server.run(..., estimated=True)``.
Where an estimate is asked for (``trew plan``, dry runs), the machine's speed is measured in a few milliseconds.
A run waits for the disk thirty times (fsync), for the sake of power cuts: what a killed process has written stays.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def planned(*_: Any, **__: Any) -> dict[str, Any]:
    return {"why": "not estimated in this test"}


def unsynced(_descriptor: int) -> None:
    """Plays os.fsync."""


def leave_out() -> None:
    """For the rest of this process: waiting, and the estimate if it has imported what builds runs."""
    os.fsync = unsynced
    if times := sys.modules.get("trew.estimate.times"):
        times.__dict__.update(_MEASURE=0.0, _BYTES=1 << 20)
    if build := sys.modules.get("trew.training.build"):
        setattr(build, "planned", planned)  # noqa: B010 (a module's attribute, which a type checker would refuse)
