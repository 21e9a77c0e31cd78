"""Made-up inputs for every loader of configuration, data and models, for as long as is given: what a loader neither
accepts nor refuses with one of our errors, or does not end with, is a failure.

    python benchmarks/fuzz.py --seconds 600 --json benchmarks/results/fuzz.json
    python benchmarks/fuzz.py --seconds 60 --target "data: rows" --seed 7

The inputs are those of tests/fuzzing.py, of which the tests try a few. A failure is made smaller before it is shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis  # noqa: E402
from hypothesis import HealthCheck  # noqa: E402

import fuzzing  # noqa: E402
from demo import machine  # noqa: E402

ROUND = 300  # inputs per seed; the time is looked at between rounds


@dataclass
class Tally:
    """What was seen of one loader."""

    executions: int = 0
    accepted: int = 0
    errors: set[str] = field(default_factory=set)  # messages, without numbers and quoted values
    failures: dict[str, str] = field(default_factory=dict)  # kind and place -> the smallest input
    slowest: float = 0.0
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "errors": len(self.errors)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of all loaders together")
    parser.add_argument("--target", default="", help="loaders with this in their name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file; adds to those of the same day")
    args = parser.parse_args()
    targets = [t for t in fuzzing.TARGETS if args.target in t.name]
    if not targets:
        parser.error(f"--target: got {args.target!r}, accepts part of {', '.join(t.name for t in fuzzing.TARGETS)}")
    tallies = {t.name: Tally() for t in targets}
    end, number = time.monotonic() + args.seconds, args.seed
    while time.monotonic() < end:
        # The loader that had the least time so far: quick and slow ones get the same share of it.
        target = min(targets, key=lambda t: tallies[t.name].seconds)
        fuzz(target, tallies[target.name], seed=number)
        number += 1
    print(table(tallies))
    if args.json:
        rows = {name: tally.row() for name, tally in tallies.items()}
        head = {"date": datetime.date.today().isoformat(), "machine": machine(), "engine": hypothesis.__version__}
        found = {**head, "seconds": args.seconds, "seeds": [args.seed, number - 1], "loaders": rows}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(tally.failures for tally in tallies.values()))


def fuzz(target: fuzzing.Target, tally: Tally, *, seed: int) -> None:
    """One round of inputs; failures go into the tally."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=ROUND, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(target.inputs)
    def go(made: Any) -> None:
        tally.executions += 1
        start = time.monotonic()
        said = fuzzing.attempt(target, made)
        tally.slowest = max(tally.slowest, time.monotonic() - start)
        if said is None:
            tally.accepted += 1
        else:
            tally.errors.update(re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "_", line)[:80] for line in said.splitlines())

    start = time.monotonic()
    try:
        go()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        for one in error.exceptions if isinstance(error, BaseExceptionGroup) else (error,):
            record(one, tally, seed=seed)
    tally.seconds += time.monotonic() - start


def record(error: BaseException, tally: Tally, *, seed: int) -> None:
    """A failure under its kind and the last line of ours that it came through."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.is_relative_to(ROOT / "src"):
            place = f"{file.relative_to(ROOT)}:{trace.tb_lineno}"
        trace = trace.tb_next
    notes = "\n".join(getattr(error, "__notes__", []))
    tally.failures.setdefault(f"{type(error).__name__} at {place}", f"seed {seed}: {error}"[:300] + f"\n{notes}"[:2000])


def table(tallies: dict[str, Tally]) -> str:
    """The figures, a row per loader, and every failure."""
    head = f"{'loader':<24}{'inputs':>9}{'accepted':>10}{'kinds of error':>16}{'slowest, s':>12}{'failures':>10}"
    lines = [head]
    for name, t in tallies.items():
        lines.append(
            f"{name:<24}{t.executions:>9}{t.accepted:>10}{len(t.errors):>16}{t.slowest:>12.2f}{len(t.failures):>10}"
        )
    total = [sum(getattr(t, key) for t in tallies.values()) for key in ("executions", "accepted")]
    kinds = len(set().union(*(t.errors for t in tallies.values())))
    failed = sum(len(t.failures) for t in tallies.values())
    lines.append(f"{'all':<24}{total[0]:>9}{total[1]:>10}{kinds:>16}{'':>12}{failed:>10}")
    for name, t in tallies.items():
        lines += [f"\n{name}: {what}\n{made}" for what, made in t.failures.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
