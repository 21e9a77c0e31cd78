"""Whether the built-in environments are learned, and that nothing is where hints are random: several seeds of each.

    python benchmarks/environments.py                       all runs, one after the other; complete ones are kept
    python benchmarks/environments.py --only grid --seeds 0 one of them
    python benchmarks/environments.py --draw-only           what the runs that are there show

Each run is a process of its own: ``trew demo --task guess``, the same with random hints (the control), and the recipes
of grid and calculator. A run that was interrupted is resumed. Writes benchmarks/results/environments.json (success
before and after with 95 % intervals, machine, versions, date), docs/images/environments.svg, and the table of
docs/environments.md. Of guess alone, ``benchmarks/demo.py --task guess`` draws the README's picture.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import demo
from trew.runs.report import Series, line_chart, load_run, running_mean

ROOT = Path(__file__).parents[1]
RANDOM = "environment.args.hints=random"
COMMANDS = {
    "guess": ["demo", "--task", "guess"],
    "guess, random hints": ["demo", "--task", "guess", "--set", RANDOM],
    "grid": ["train", "recipes/grid.toml"],
    "calculator": ["train", "recipes/calculator.toml"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "environments", help="where the run folders go")
    parser.add_argument("--draw-only", action="store_true", help="train nothing")
    args = parser.parse_args()
    for name in () if args.draw_only else args.only:
        for seed in args.seeds:
            play(name, seed, folder_of(args.runs, name, seed))
    found = {
        name: [folder for seed in args.seeds if is_complete(folder := folder_of(args.runs, name, seed))]
        for name in COMMANDS
    }
    rows = [{"environment": name, **demo.figures(folder)} for name, folders in found.items() for folder in folders]
    draw(found, ROOT / "docs" / "images" / "environments.svg")
    result = {"date": datetime.date.today().isoformat(), "machine": demo.machine(), "rows": rows}
    path = ROOT / "benchmarks" / "results" / "environments.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(table(rows))


def folder_of(runs: Path, name: str, seed: int) -> Path:
    return runs / name.replace(", ", "-").replace(" ", "-") / str(seed)


def is_complete(folder: Path) -> bool:
    return (folder / "summary.json").exists() and (folder / "wall.json").exists()


def play(name: str, seed: int, folder: Path) -> None:
    """Trains one run, or what is left of it."""
    if is_complete(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    command, *rest = COMMANDS[name]
    # One option of each kind: --set takes all that follows it.
    given = ["--seed", str(seed), *rest] if command == "demo" else [*rest, "--set", f"seed={seed}"]
    how = "--resume" if any((folder / "checkpoints").glob("*")) else "--overwrite"
    start = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    whole = [sys.executable, "-m", "trew", command, "--out", str(folder), how, *given]
    subprocess.run(whole, check=True, cwd=ROOT, env=environment)
    # Of a resumed run, only the last part.
    wall = {"wall_seconds": time.monotonic() - start, "load_average": os.getloadavg()[2], "resumed": how == "--resume"}
    (folder / "wall.json").write_text(json.dumps(wall))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/environments.md."""
    lines = ["| environment | seed | steps | before (95 %) | after (95 %) |", "|---|---|---|---|---|"]
    for r in rows:
        before, after = (f"{a['mean']:.2f} ({a['low']:.2f} to {a['high']:.2f})" for a in
                         (r["accuracy_before"], r["accuracy_after"]))  # fmt: skip
        lines.append(f"| {r['environment']} | {r['seed']} | {r['steps']} | {before} | {after} |")
    return "\n".join(lines)


def draw(found: dict[str, list[Path]], out: Path) -> None:
    """The success of all rollouts of each step: every seed faint, and their mean."""
    series = []
    for colour, (name, folders) in enumerate(found.items()):
        curves = [load_run(folder).column("accuracy") for folder in folders]
        for x, y in curves:
            series.append(Series("", x, y, style="faint", colour=colour))
        if curves:
            x = min((x for x, _ in curves), key=len)
            mean = [statistics.fmean(y[i] or 0.0 for _, y in curves) for i in range(len(x))]
            series.append(Series(name, x, running_mean(mean, window=3), colour=colour))
    title = "Success of SmolLM2-135M in the built-in environments"
    out.write_text(line_chart(series, title=title, x_label="step", y_label="success", y_range=(0, 1)))


if __name__ == "__main__":
    main()
