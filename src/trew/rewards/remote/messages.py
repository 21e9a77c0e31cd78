"""What a run and a reward host say to each other: payloads only, as JSON (:mod:`trew.rewards.user.wire`).

    GET  /rewards        what must agree (:mod:`.match`)
    POST /rewards/grade  [number of a built-in reward, [(completion, gold, arguments), ...]] -> [verdict, ...]
    POST /rewards/call   [prompts, calls of functions, step] -> [outcome, ...]

While a host works it sends a space every BEAT_S seconds, so that the run can tell work from silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..verdict import Verdict

ABOUT, GRADE, CALL = "/rewards", "/rewards/grade", "/rewards/call"
BEAT_S = 5.0
SILENT_S = 30.0
"""Seconds of silence after which a host is lost."""
MOST_BYTES = 256 << 20
"""Of a request or an answer."""


def packed_verdicts(verdicts: Sequence[Verdict]) -> list[Any]:
    """Verdicts as the wire can hold them."""
    return [dataclasses.astuple(verdict) for verdict in verdicts]


def unpacked_verdicts(found: Any, count: int) -> list[Verdict]:
    """What :func:`packed_verdicts` made. Raises ValueError, TypeError if it is not so many verdicts."""
    verdicts = [Verdict(*row) for row in found]
    if len(verdicts) != count:
        raise ValueError(f"{len(verdicts)} verdicts for {count} completions")
    return verdicts
