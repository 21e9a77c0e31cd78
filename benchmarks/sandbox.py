"""What the sandbox costs per program, next to bare Python, and whether it leaks.

    python benchmarks/sandbox.py                 medians, written to benchmarks/results/sandbox.json
    python benchmarks/sandbox.py --soak 10000    that many gradings, with what is left behind counted before and after

No interpreter is kept warm inside a sandbox: every program gets a fresh one. What is kept is the small process outside
that starts them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo import machine
from trew.rewards import KINDS, grade
from trew.rewards.isolation import tree
from trew.rewards.sandbox import Job, boundary, close_pools, describe, pool
from trew.rewards.sandbox.host.boxes import designs

ROOT = Path(__file__).parents[1]
REPLY = "```python\ndef f(x):\n    return x + 1\n```"
ASSERTS = {"entry_point": "f", "asserts": ["assert f(1) == 2", "assert f(2) == 3"]}
CLOSE = {"entry_point": "f", "asserts": ["assert abs(f(1) - 2) < 1e-6", "assert f(2) == 3"]}
TESTS = {"tests": [{"input": "1\n", "output": "2\n"}]}
PROGRAM = "```python\nprint(int(input()) + 1)\n```"
HOSTILE = (
    "```python\nimport os\nos.fork()\nos.fork()\ndef f(x): return x\n```",
    "```python\nimport os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(999)\ndef f(x): return x + 1\n```",
    "```python\nimport sys; sys.exit(0)\n```",
    "```python\ndef f(x): return 'x' * 10**7\n```",
    "```python\nimport os\nheld = [os.open('/dev/null', 0) for _ in range(100)]\ndef f(x): return x + 1\n```",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="grade N completions and look for leaks")
    args = parser.parse_args()
    head = {"date": datetime.date.today().isoformat(), "machine": machine(), "boundary": describe()[1]}
    if args.soak:
        found = head | soak(args.soak)
        print(json.dumps(found, indent=2))
    else:
        found = head | cost(args.repeats)
        print(table(found))
    result_file = ROOT / "benchmarks" / "results" / "sandbox.json"
    result = json.loads(result_file.read_text()) if result_file.exists() else {}
    result["soak" if args.soak else "cost"] = found
    result_file.write_text(json.dumps(result, indent=2) + "\n")
    close_pools()


def cost(repeats: int) -> dict[str, Any]:
    """Medians of wall time in ms, the candidates taking turns so that the machine's load is shared by all."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    bare = [python, "-I", "-S", "-B", "-c", "pass"]
    candidates: dict[str, Callable[[], Any]] = {
        "bare Python": lambda: subprocess.run(bare, stdin=subprocess.DEVNULL, check=True),
        "code_stdin, one test": lambda: grade("code_stdin", PROGRAM, None, **TESTS),
        "code_func, compared outside": lambda: grade("code_func", REPLY, None, **ASSERTS),
        "code_func, asserts in a second sandbox": lambda: grade("code_func", REPLY, None, **CLOSE),
    }
    job = Job("script", (b"pass", b""))
    for design in [boundary().design, *designs()]:
        name = f"empty program, {design.kind}"
        if name not in candidates and pool(design).run(job).ended == "exit":
            candidates[name] = lambda design=design: pool(design).run(job)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    processor = {}
    for name, run in candidates.items():
        before = used()
        for _ in range(repeats):
            run()
        processor[name] = 1e3 * (used() - before) / repeats
    together = KINDS["code_func"].grade_many
    assert together is not None
    start = time.perf_counter()
    verdicts = together([(REPLY, None, ASSERTS)] * 64)
    seconds = time.perf_counter() - start
    assert all(verdict.score == 1 for verdict in verdicts)
    return {
        "repeats": repeats,
        "milliseconds": {
            name: {
                "median": statistics.median(values),
                "p10": statistics.quantiles(values, n=10)[0],
                "p90": statistics.quantiles(values, n=10)[-1],
                "cpu": processor[name],
            }
            for name, values in times.items()
        },
        "group_of_64_seconds": seconds,
        "load_average_after": os.getloadavg(),
    }  # fmt: skip


def used() -> float:
    """Seconds of CPU of this process, of what it waited for, and of its helpers with all that they waited for."""
    ticks = 0
    for pid in tree.children(os.getpid()):
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


def table(cost: dict[str, Any]) -> str:
    lines = ["| what | median ms | p10 | p90 | ms of CPU* |", "|---|---|---|---|---|"]
    for name, row in cost["milliseconds"].items():
        lines.append(f"| {name} | {row['median']:.1f} | {row['p10']:.1f} | {row['p90']:.1f} | {row['cpu']:.1f} |")
    lines.append(f"\n64 completions together: {cost['group_of_64_seconds']:.2f} s; {cost['boundary']}")
    lines.append("* of processes that end by themselves: a function's are killed when its last answer is in")
    return "\n".join(lines)


def soak(count: int) -> dict[str, Any]:
    """``count`` gradings in groups of 64, a third of them hostile, and what is there before and after."""
    together = KINDS["code_func"].grade_many
    assert together is not None
    group = [(HOSTILE[i // 3 % len(HOSTILE)] if i % 3 == 2 else REPLY, None, ASSERTS) for i in range(64)]
    expected = [v.score for v in together(group)]
    before = remains()
    start = time.perf_counter()
    scores: Counter[str] = Counter()
    done = wrong = 0
    while done < count:
        verdicts = together(group[: count - done])
        done += len(verdicts)
        scores.update(f"{v.status} {v.score}" for v in verdicts)
        wrong += sum(v.score != score for v, score in zip(verdicts, expected, strict=False))
        if done % 1024 < 64:
            print(f"{done} of {count}: {dict(scores)} {remains()}", flush=True)
    return {
        "gradings": done,
        "seconds": time.perf_counter() - start,
        "verdicts": dict(scores),
        "verdicts_that_changed": wrong,
        "before": before,
        "after": remains(),
    }


def remains() -> dict[str, int]:
    """Processes, descriptors, temporary files, and memory of this process and its helpers."""
    mine = tree.descendants(os.getpid())
    own = [os.getpid(), *mine]
    return {
        "processes": len(mine),
        "zombies": sum(_state(pid) == "Z" for pid in mine),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in own),
        "temporary_files": sum(name.startswith("trew-canary") for name in os.listdir(tempfile.gettempdir())),
        "resident_megabytes": sum(_resident(pid) for pid in own) >> 20,
    }


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
