"""Reads how every prompt of a run was scored each time it was sampled: the scores alone, from all tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import safe_files
from .read import load_samples, sample_steps

MOST_STEPS = 1000
"""Tables that are read at most; of longer runs, as many steps at equal distances."""


@dataclass(frozen=True, slots=True)
class Change:
    """A prompt's mean score at its first and its last visit."""

    uid: str
    first: int  # the steps
    last: int
    before: float
    after: float
    times: int

    @property
    def gain(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Visits:
    """The scores of a run by step, NaN without a verdict, and the (step, mean score) of each visit by prompt."""

    scores: Mapping[int, np.ndarray] = field(default_factory=dict)
    means: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    total: int = 0  # steps with a table, also those that were not read

    def changes(self) -> list[Change]:
        """Of all prompts with at least two visits, from the largest loss to the largest gain."""
        seen = {uid: visits for uid, visits in self.means.items() if len(visits) > 1}
        found = [Change(uid, v[0][0], v[-1][0], v[0][1], v[-1][1], len(v)) for uid, v in seen.items()]
        return sorted(found, key=lambda change: (change.gain, change.uid))


def load_visits(folder: Path, *, most: int = MOST_STEPS) -> Visits:
    """The visits of a run, those of groups that were dropped included; leaves out tables that cannot be read or are not
    those that a run writes."""
    steps = sample_steps(folder, "rollouts")
    chosen = steps
    if len(steps) > most:
        # First and last step included.
        chosen = [steps[round(i)] for i in np.linspace(0, len(steps) - 1, most)]
    scores: dict[int, np.ndarray] = {}
    means: dict[str, list[tuple[int, float]]] = {}
    for step in chosen:
        if (found := _scores(folder, step)) is None:
            continue
        uids, scores[step] = found
        judged = ~np.isnan(scores[step])
        names, of = np.unique(uids[judged], return_inverse=True)
        # Divided first: a sum of extreme scores could overflow.
        parts = scores[step][judged] / np.bincount(of, minlength=len(names))[of]
        for name, mean in zip(names, np.bincount(of, weights=parts, minlength=len(names)), strict=True):
            means.setdefault(str(name), []).append((step, float(mean)))
    return Visits(scores, means, len(steps))


def completions_of(folder: Path, *, step: int, uid: str) -> list[dict[str, Any]]:
    """The completions of one prompt in one step."""
    return load_samples(folder, kind="rollouts", step=step, most=1 << 14, uid=uid)


def _scores(folder: Path, step: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The uid and the score of every completion of a step; infinite scores count as none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with (
            safe_files.open_file(folder, f"rollouts/{step:06d}.parquet", most=safe_files.TABLE_BYTES) as opened,
            pq.ParquetFile(opened) as file,
        ):
            there = {name: file.schema_arrow.field(name).type for name in file.schema_arrow.names}
            if there.get("uid") != pa.string() or there.get("score") != pa.float64():
                return None
            table = file.read(columns=["uid", "score"])
    except (OSError, pa.ArrowException, ValueError):
        return None
    scores = table["score"].to_numpy()
    # An array of objects: numpy's own texts would all be as wide as the longest.
    uids = np.array([uid or "" for uid in table["uid"].to_pylist()], dtype=object)
    return uids, np.where(np.isfinite(scores), scores, np.nan)
