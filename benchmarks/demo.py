"""The demo over several seeds: what the README's table and picture show.

    python benchmarks/demo.py --seeds 0 1 2 [--task guess]

Runs ``trew demo`` once per seed as a separate process, then writes benchmarks/results/demo.json (figures, machine,
versions, date) and docs/images/demo.svg (training accuracy per step, held-out accuracy with 95 % interval); for another
task than arithmetic, demo-TASK.json and demo-TASK.svg.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trew.runs.report import Series, line_chart, load_run, running_mean

ROOT = Path(__file__).parents[1]
TITLES = {
    "arithmetic": "trew demo: GRPO teaches SmolLM2-135M arithmetic",
    "guess": "trew demo --task guess: GRPO teaches SmolLM2-135M",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", default="arithmetic", help="of trew demo")
    parser.add_argument("--runs", type=Path, help="where the run folders go; runs/demo-seeds, or runs/TASK-seeds")
    parser.add_argument("--draw-only", action="store_true", help="use the run folders that are there")
    args = parser.parse_args()
    name = "demo" if args.task == "arithmetic" else f"demo-{args.task}"
    runs = args.runs or ROOT / "runs" / f"{name}-seeds"
    rows = []
    for seed in args.seeds:
        folder = runs / str(seed)
        if not args.draw_only:
            runs.mkdir(parents=True, exist_ok=True)
            start = time.monotonic()
            command = [sys.executable, "-m", "trew", "demo", "--task", args.task, "--seed", str(seed)]
            subprocess.run([*command, "--out", str(folder), "--overwrite"], check=True)
            (folder / "wall.json").write_text(json.dumps({"wall_seconds": time.monotonic() - start}))
        rows.append(figures(folder))
        print(json.dumps(rows[-1]))
    draw([runs / str(seed) for seed in args.seeds], TITLES[args.task], ROOT / "docs" / "images" / f"{name}.svg")
    result = {"date": datetime.date.today().isoformat(), "machine": machine(), "rows": rows}
    (ROOT / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(table(rows))


def figures(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    keys = ("seed", "model", "objective", "task", "steps", "n_eval", "accuracy_before", "accuracy_after", "seconds",
            "tokens_per_second", "peak_memory_bytes", "versions", "device")  # fmt: skip
    wall = json.loads((folder / "wall.json").read_text())
    return {key: summary[key] for key in keys} | wall


def table(rows: list[dict[str, Any]]) -> str:
    """The README's table."""

    def interval(a: dict[str, float]) -> str:
        return f"{a['mean']:.2f} ({a['low']:.2f} to {a['high']:.2f})"

    lines = ["| seed | before (95 %) | after (95 %) | whole command | peak memory |", "|---|---|---|---|---|"]
    for r in rows:
        minutes = f"{r['wall_seconds'] / 60:.1f} min"
        lines.append(
            f"| {r['seed']} | {interval(r['accuracy_before'])} | {interval(r['accuracy_after'])} | {minutes} | "
            f"{r['peak_memory_bytes'] / 2**30:.1f} GiB |"
        )
    return "\n".join(lines)


def draw(folders: list[Path], title: str, out: Path) -> None:
    series = []
    for number, folder in enumerate(folders):
        run = load_run(folder)
        x, y = run.column("accuracy")
        series.append(Series("", x, y, style="faint", colour=number))
        series.append(Series(f"seed {folder.name}", x, running_mean(y, window=5), colour=number))
        (at, mean), (_, low), (_, high) = (run.column(f"eval_{name}") for name in ("accuracy", "low", "high"))
        label = "" if number else "held out, 95 %"
        series.append(Series(label, at, mean, low, high, style="points", colour=number))
    picture = line_chart(
        series, title=title, x_label="step", y_label="accuracy", y_range=(0, 1),
    )  # fmt: skip
    out.parent.mkdir(exist_ok=True)
    out.write_text(picture)


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((x.partition(":")[2].strip() for x in info.read_text().splitlines() if "model name" in x), cpu)
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform(), "load_average": os.getloadavg()}


if __name__ == "__main__":
    main()
