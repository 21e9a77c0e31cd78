"""Asynchronous runs for cluster.py: what they gain beside servers whose speed is prescribed, and what they cost."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny
from async_help import configured, parts
from paced import Pace, PacedRun, heavy_tailed_length, run_paced
from recipe_help import ODD
from trew.estimate.simulation import LengthDraw, Work, simulate
from trew.estimate.virtual_servers import ServerSpecs
from trew.rollout import codec
from trew.rollout.asynchronous import AsyncRollouts
from trew.rollout.engine import Capabilities, Finished, Request
from trew.rollout.ledger import Ledger
from trew.rollout.shared import SharedEngine
from trew.runs.journal import Journal
from trew.types import Group, Prompt, Span, Turn, single_turn

PROMPTS, GROUP, SERVERS, SLOTS, TOKENS, TOKEN_S = 8, 2, 2, 7, 60, 0.025
"""Groups per step, completions of each; servers, the completions that each decodes at a time, the longest completion,
and the seconds of a token."""
UPDATES = 6
"""Optimizer steps per step."""
BOUNDS = (0, 1, 4)
WARM_UP = 6
"""Steps that are left out: until the age of groups is what it stays."""
GROUPS_PER_S = 100
TARGET = round(1 / 0.9, 3)


# ------------------------------------------------------------------------------------- runs on servers of known speed


def asynchronous(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Seconds of a step beside the longer of generation and learning alone, and beside what servers without a limit
    would need: where that is longer, no rule that keeps the bound on age could reach the former."""
    folder = scratch / "async"
    model = tiny.save(folder / "model", "smollm")
    (folder / "reward.py").write_text(ODD)
    pace = Pace(SLOTS, TOKEN_S, 0.0, heavy_tailed_length, GROUP)
    runs = {
        bound: run_paced(
            model, folder, f"staleness-{bound}", pace=pace, servers=SERVERS, steps=args.async_steps,
            rollout={"prompts": PROMPTS, "completions": GROUP, "max_tokens": TOKENS},
            learner={"lr": 1e-5, "inner_updates": UPDATES}, cluster={"staleness": bound},
        )
        for bound in BOUNDS
    }  # fmt: skip
    found = {bound: figures(run, bound) for bound, run in runs.items()}
    rows = []
    for bound in BOUNDS[1:]:
        run = found[bound]
        work = Work(
            PROMPTS, GROUP, bound, run["learning"] - runs[bound].paused_s, runs[bound].paused_s, drawn(), steps=400
        )
        same = simulate(ServerSpecs(SERVERS, SLOTS, TOKEN_S), work).seconds
        unlimited = simulate(ServerSpecs(PROMPTS, GROUP * PROMPTS * (bound + 1), TOKEN_S), work).seconds
        alone = max(run["generation"], run["learning"])
        detail = {
            "synchronous, s": found[0]["seconds"], "asynchronous, s": run["seconds"], "simulated, s": same,
            "simulated on unlimited servers, s": unlimited, "generation, s": run["generation"],
            "learning, s": run["learning"], "synchronous over it": found[0]["seconds"] / run["seconds"],
            "learner waits": run["waits"], "servers idle": run["idle"], "ages": run["ages"],
            "sync: slots idle": found[0]["slots idle"], "slots idle": run["slots idle"],
        }  # fmt: skip
        # The longest completions of a step must end within the S + 1 steps after it, however many servers there are.
        note = "" if unlimited <= alone * TARGET else f"; on unlimited servers {unlimited / alone:.2f} x"
        rows += [
            {"name": f"staleness = {bound}, seconds of a step over max(generation, learning)", "unit": "x",
             "target": TARGET, "value": run["seconds"] / alone, "note": note, "detail": detail},
            {"name": f"staleness = {bound}, over max(generation, learning, a step on unlimited servers)", "unit": "x",
             "target": TARGET, "value": run["seconds"] / max(alone, unlimited), "detail": {}},
        ]  # fmt: skip
    return rows


def drawn() -> LengthDraw:
    return lambda rng, n: np.array([heavy_tailed_length(int(seed)) for seed in rng.integers(2**62, size=n)], float)


def figures(run: PacedRun, bound: int) -> dict[str, Any]:
    """What the steps took, without the warm-up, and without the last ones: they ask for nothing new, and servers run
    empty."""
    rows = run.rows[WARM_UP : len(run.rows) - bound]
    seconds = statistics.mean(row["seconds"] for row in rows)
    busy = run.used_s / len(run.rows) / (SERVERS * SLOTS)
    waits = statistics.mean(row.get("waited_s", 0.0) for row in rows)
    ages: dict[str, float] = {}
    for row in rows:
        for name, share in row.items():
            if name.startswith("age/"):
                ages[name[4:]] = ages.get(name[4:], 0.0) + share / len(rows)
    return {
        "seconds": seconds, "generation": busy, "learning": seconds - waits, "waits": waits / seconds,
        "idle": statistics.mean(row.get("idle_s", 0.0) for row in rows) / seconds,
        "slots idle": max(0.0, 1 - busy / seconds), "ages": {age: round(share, 3) for age, share in ages.items()},
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------- what the ledger costs


def ledger(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Groups that are entered, stored and synced, many at a time; and what a process needs for it at 100 a second."""
    through = [seconds_of_groups(scratch / f"ledger-{n}", count=4096, batch=128) for n in range(args.repeats)]
    driver = [driving(scratch / f"driver-{n}", seconds=8.0) for n in range(args.repeats)]
    return [
        {"name": "a group through the ledger and onto the disk, 128 at a time", "unit": "ms", "target": 0.5,
         "value": 1e3 * statistics.median(through), "runs": through,
         "detail": {"groups/s": 1 / statistics.median(through), "completions": 8, "tokens each": 256}},
        {"name": f"rank 0 beside {GROUPS_PER_S} groups/s, share of a core", "unit": "", "target": 0.05,
         "value": statistics.median(share for share, _ in driver), "runs": driver,
         "detail": {"groups/s": statistics.median(rate for _, rate in driver), "completions": 8, "tokens each": 256}},
    ]  # fmt: skip


def a_turn(tokens: int = 256, version: int = 0) -> Turn:
    ids, logprobs = np.arange(tokens), np.full(tokens, -1.0, np.float32)
    spans = (Span(version, 0, tokens),)
    return Turn(np.arange(64), ids, logprobs, None, None, spans, f"The answer is #### {version % 100}", "stop")


def seconds_of_groups(folder: Path, *, count: int, batch: int) -> float:
    """From a finished group to its place on the disk, with the entries of its whole life."""
    folder.mkdir(parents=True)
    journal = Journal(folder)
    book = Ledger(prompts=batch, staleness=1, steps=10**6, journal=journal.write)
    turn = a_turn()
    rollouts = tuple(
        single_turn(turn.context_ids, turn.token_ids, logprobs=turn.logprobs, policy_logprobs=None, entropies=None,
                    version=0, text=turn.text, finish_reason="stop")
        for _ in range(8)
    )  # fmt: skip
    group = Group(Prompt("p", text="What is 1 + 0?"), rollouts)
    begin = time.perf_counter()
    for step in range(1, count // batch + 1):
        numbers = [
            book.issue(uid=f"train/{book.issued}", place=book.issued, step=step, attempt=0).number for _ in range(batch)
        ]
        for number, stored in zip(numbers, journal.put([codec.encode(group) for _ in numbers]), strict=True):
            book.finish(number, versions=[step - 1], stored=stored)
        journal.flush()
        chosen = book.choose(step, most=batch)
        assert chosen == numbers
        book.train(step, version=step, numbers=numbers)
        journal.flush()
        journal.keep(book.forget(step))
    return (time.perf_counter() - begin) / count


class Steady:
    """An engine that finishes so many groups per second, at no cost."""

    capabilities = Capabilities(reproducible=True, entropies=False, untruncated_logprobs=False, in_flight_updates=True)

    def __init__(self) -> None:
        self.version, self._open, self._turns = 0, [], {0: a_turn()}
        self._due = time.monotonic()

    def submit(self, requests: Sequence[Request]) -> None:
        self._open += requests

    def poll(self, timeout_s: float | None = None) -> list[Finished]:
        found: list[Finished] = []
        while self._open and time.monotonic() >= self._due:
            self._due = max(self._due + 1 / GROUPS_PER_S, time.monotonic() - 1)
            made, self._open = self._open[:8], self._open[8:]
            turn = self._turns.get(self.version) or a_turn(version=self.version)
            self._turns = {self.version: turn}
            found += [Finished.of(request.id, turn) for request in made]
        return found

    def cancel(self, ids: Sequence[str]) -> None:
        self._open = [request for request in self._open if request.id not in ids]


def driving(folder: Path, *, seconds: float) -> tuple[float, float]:
    """The share of a core that rank 0 uses beside generation and learning, and groups per second."""
    folder.mkdir(parents=True)
    shared: Any = SharedEngine(Steady())  # type: ignore[type-var]
    config = configured(4, prompts=20, completions=8, steps=10**5)
    source = AsyncRollouts(
        shared.view("beside"), ahead=shared.view("ahead"), keeper=Journal(folder), **parts(config, prompts=10_000)
    )
    source.gather_in_background()
    step, groups = 0, 0
    begin, before = time.monotonic(), time.process_time()
    while time.monotonic() < begin + seconds:
        step += 1
        groups += len(source.next(step).trained_on)
        with shared.alone() as engine:
            engine.version = step
        source.trained(step, step)
    elapsed, used = time.monotonic() - begin, time.process_time() - before
    source.close()
    shared.close()
    return used / elapsed, groups / elapsed


if __name__ == "__main__":  # python benchmarks/cluster_async.py: the ledger's figures alone
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(ledger(argparse.Namespace(repeats=1), Path(place)), indent=1))
