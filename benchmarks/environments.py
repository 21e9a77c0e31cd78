"""Whether the built-in environments are learned, and that nothing is where hints are random: several seeds of each.

    python benchmarks/environments.py                       all runs, one after the other; complete ones are kept
    python benchmarks/environments.py --only grid --seeds 0 one of them
    python benchmarks/environments.py --draw-only           takes in the runs that are there, and draws

Each run is a process of its own: ``trew demo --task guess``, the same with random hints (the control), and the recipes
of grid and calculator. A run that was interrupted is resumed. Writes benchmarks/results/environments.json and, from
that, docs/images/environments.svg; ``benchmarks/figures.py`` writes the table of docs/environments.md. Of guess alone,
``benchmarks/demo.py --task guess`` draws the README's picture.

The file has a row for each run: success before and after with 95 % intervals, success in each step's rollouts, date,
machine, versions, and the settings that decide what is learned. A row stays until its environment is run again with
its seed. Runs with different settings are never averaged.
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
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import demo
from trew.cli.demo import RECIPES
from trew.config.recipe import to_table
from trew.runs.report import Series, line_chart, load_run, running_mean
from trew.training.planning import read

ROOT = Path(__file__).parents[1]
RANDOM = "environment.args.hints=random"
COMMANDS = {
    "guess": ["demo", "--task", "guess"],
    "guess, random hints": ["demo", "--task", "guess", "--set", RANDOM],
    "grid": ["train", "recipes/grid.toml"],
    "calculator": ["train", "recipes/calculator.toml"],
}


SETTINGS = (
    "model", "steps", "environment.name", "environment.args", "environment.turns", "rollout.prompts",
    "rollout.completions", "rollout.max_tokens", "rollout.temperature", "objective.preset", "objective.beta",
    "objective.eps_high", "learner.lr", "learner.warmup_steps", "learner.schedule", "learner.minibatch_prompts",
)  # fmt: skip
"""What decides what is learned: rows that differ in one of these are of different recipes."""
RESULTS = ROOT / "benchmarks" / "results" / "environments.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "environments", help="where the run folders go")
    parser.add_argument("--draw-only", action="store_true", help="train nothing")
    args = parser.parse_args()
    found = []
    for name in args.only:
        for seed in args.seeds:
            folder = folder_of(args.runs, name, seed)
            if not args.draw_only:
                play(name, seed, folder)
            if is_complete(folder):
                found.append(row(name, folder))
    rows = merged(json.loads(RESULTS.read_text())["rows"], found)
    RESULTS.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    (ROOT / "docs" / "images" / "environments.svg").write_text(picture(rows))
    print(f"{len(found)} of {len(rows)} rows are new; the table: benchmarks/figures.py")


def row(name: str, folder: Path) -> dict[str, Any]:
    """What is kept of a complete run."""
    written = datetime.datetime.fromtimestamp((folder / "summary.json").stat().st_mtime, datetime.UTC)
    _, success = load_run(folder).column("accuracy")
    return {
        "environment": name, "date": written.date().isoformat(), "machine": demo.machine(), **demo.figures(folder),
        "settings": settings(tomllib.loads((folder / "config.toml").read_text())), "success": list(success),
    }  # fmt: skip


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The :data:`SETTINGS` of a configuration, by name."""
    found = {}
    for key in SETTINGS:
        value: Any = config
        for part in key.split("."):
            value = value[part]
        found[key] = value
    return found


def today(name: str) -> dict[str, Any]:
    """The settings that :data:`COMMANDS` has for an environment now."""
    command, *rest = COMMANDS[name]
    path = ROOT / "src" / "trew" / "cli" / RECIPES["guess"] if command == "demo" else ROOT / rest[0]
    changed = rest[rest.index("--set") + 1 :] if "--set" in rest else []
    return settings(to_table(read(path, changed)))


def merged(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both, in the order of :data:`COMMANDS` and of seeds; a new row takes the place of the old one of its seed."""
    rows = {(row["environment"], row["seed"]): row for row in (*old, *new)}
    names = list(COMMANDS)
    return [rows[key] for key in sorted(rows, key=lambda key: (names.index(key[0]), key[1]))]


def changes(row: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Where the settings of a row differ from others; empty if they do not.

    >>> changes({"settings": {"steps": 20, "learner.lr": 2e-05}}, {"steps": 40, "learner.lr": 2e-05})
    'steps = 20'
    """
    return ", ".join(f"{key} = {value}" for key, value in row["settings"].items() if value != now.get(key))


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


def picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """The success of all rollouts of each step: every seed faint, and the mean of those with equal settings."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in rows:
        groups.setdefault((one["environment"], changes(one, today(one["environment"]))), []).append(one)
    series = []
    for colour, ((name, other), some) in enumerate(groups.items()):
        curves = [one["success"] for one in some]
        x = list(range(1, min(map(len, curves)) + 1))
        series += [Series("", x, curve[: len(x)], style="faint", colour=colour) for curve in curves]
        mean = [statistics.fmean(curve[i] or 0.0 for curve in curves) for i in range(len(x))]
        label = f"{name} (earlier recipe)" if other else name
        series.append(Series(label, x, running_mean(mean, window=3), colour=colour))
    title = "Success of SmolLM2-135M in the built-in environments"
    return line_chart(series, title=title, x_label="step", y_label="success", y_range=(0, 1))


if __name__ == "__main__":
    main()
