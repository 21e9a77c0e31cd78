"""Seconds of every click in `trew view` over a run of 100,000 completions; the aim is less than one second each.

    python benchmarks/view.py [--steps 500] [--repeat 7] [--out FOLDER] [--json benchmarks/results/view.json]

Makes the run with the writer that runs use (200 completions per step, 200 tokens each on average, an evaluation of 200
prompts every 50 steps), unless it is there already; 5 minutes, 400 MB. Then starts a server in this process, over HTTP
as a browser would, and asks each route. "first" is the first request of that kind of a new server, before anything
is in memory; median and max are over --repeat requests of a server that read the run already, each with other
arguments, so that no answer is repeated. "cpu" is the median of processor seconds, which say more on a busy machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pyarrow
import starlette

import trew
from trew.view.serving import serving
from view_run import make

AIM_S = 1.0
CLICKS: dict[str, Callable[[int, int], str]] = {
    "list of runs": lambda i, n: "runs",
    "curves": lambda i, n: f"runs/RUN/metrics?since={i - 1}",
    "new points": lambda i, n: f"runs/RUN/metrics?since={n - 1 - i}",
    "summary": lambda i, n: "runs/RUN/summary",
    "configuration": lambda i, n: "config?run=RUN",
    "histograms of all steps": lambda i, n: "runs/RUN/steps",
    "groups of a step": lambda i, n: f"runs/RUN/groups?step={n // 2 + i}&sort=disagreement",
    "completions, first page": lambda i, n: f"runs/RUN/rollouts?offset={50 * i}",
    "completions by score": lambda i, n: f"runs/RUN/rollouts?sort=-score&offset={50 * i}",
    "completions by length": lambda i, n: f"runs/RUN/rollouts?sort=-length&offset={50 * i}",
    "completions by filters": lambda i, n: f"runs/RUN/rollouts?min_score=0.{i}&part=format&min_part=1&sort=length",
    "completions with a rare text": lambda i, n: f"runs/RUN/rollouts?text=%23%23%23%23%2017{i}",
    "completions with a common text": lambda i, n: f"runs/RUN/rollouts?text=the%20{'abcdefghij'[i]}",
    "prompts by gain": lambda i, n: f"runs/RUN/prompts?sort=gain&offset={50 * i}",
    "prompts by disagreement": lambda i, n: f"runs/RUN/prompts?sort=disagreement&offset={50 * i}",
    "prompts with a text": lambda i, n: f"runs/RUN/prompts?text=there%20are%20{10 + i}",
    "one prompt through time": lambda i, n: f"runs/RUN/prompts/eval-{i}",
    "one completion with its tokens": lambda i, n: f"runs/RUN/completion?step={n // 3 + i}&group=3&sample=2",
}


def main() -> None:
    args = arguments()
    if not (args.out / "summary.json").exists():
        print(f"making {args.out}", flush=True)
        make(args.out, steps=args.steps)
    found = {"first": measure(args.out, 1), "later": measure(args.out, args.repeat)}
    rows = {
        name: {
            "first": found["first"][name][0][0],
            "median": statistics.median(wall for wall, _ in found["later"][name]),
            "max": max(wall for wall, _ in found["later"][name]),
            "cpu": statistics.median(cpu for _, cpu in found["later"][name]),
        }
        for name in CLICKS
    }
    print(f"{'':34}{'first':>8}{'median':>8}{'max':>8}{'cpu':>8}  seconds")
    for name, row in rows.items():
        print(f"{name:34}" + "".join(f"{row[key]:8.3f}" for key in ("first", "median", "max", "cpu")))
    slow = [name for name, row in rows.items() if max(row["first"], row["max"]) >= AIM_S]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    said = f"slower than the aim: {', '.join(slow)}" if slow else "all below the aim"
    print(f"peak memory {peak / 2**20:,.0f} MiB; {said}")
    if args.json:
        about = {
            "date": datetime.date.today().isoformat(), "machine": platform.machine(), "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "versions": {"python": platform.python_version(), "trew": trew.__version__, "pyarrow": pyarrow.__version__,
                         "starlette": starlette.__version__},
        }  # fmt: skip
        made = {"completions": completions(args.out), "steps": args.steps, "bytes": size(args.out)}
        result = {**about, "run": made, "aim_s": AIM_S, "seconds": rows, "peak_memory_bytes": peak, "slow": slow}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("runs/view-benchmark"))
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(run: Path, repeat: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each click. For ``repeat`` = 1, each on a new server: the first thing that anybody asks."""
    if repeat == 1:
        return {name: measured(run, {name: click}, 1)[name] for name, click in CLICKS.items()}
    return measured(run, CLICKS, repeat)


def measured(
    run: Path, clicks: dict[str, Callable[[int, int], str]], repeat: int
) -> dict[str, list[tuple[float, float]]]:
    with serving([run], port=0) as served:
        page = httpx2.Client(
            base_url=f"http://127.0.0.1:{served.port}/api/", trust_env=False, timeout=600,
            headers={"Authorization": f"Bearer {served.token}"},
        )  # fmt: skip
        about = page.get("runs").json()["runs"][0]
        if repeat > 1:
            page.get(f"runs/{about['id']}/steps")
        return {name: [ask(page, click(i, about["step"]).replace("RUN", about["id"])) for i in range(repeat)]
                for name, click in clicks.items()}  # fmt: skip


def ask(page: httpx2.Client, path: str) -> tuple[float, float]:
    """Seconds of a request by the clock, and of this process, which is server and client, on all cores."""
    start, spent = time.perf_counter(), time.process_time()
    found = page.get(path)
    seconds = time.perf_counter() - start, time.process_time() - spent
    assert found.status_code == 200, f"{path}: {found.text[:200]}"
    return seconds


def completions(run: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for kind in ("rollouts", "evals") for path in (run / kind).iterdir())


def size(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
