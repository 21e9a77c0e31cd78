"""Recipes that fit two cores, run as they are: the figures and pictures of recipes/README.md.

    python benchmarks/recipes.py arithmetic custom_reward dapo countdown
    python benchmarks/recipes.py quickstart                    the recipe of docs/quickstart.md
    python benchmarks/recipes.py --resume dapo                 goes on with a run that was interrupted
    python benchmarks/recipes.py --draw-only arithmetic        from the run folders that are there

Runs ``trew train recipes/NAME.toml`` in a process of its own, adds its figures to benchmarks/results/recipes.json (a
recipe that was measured before is replaced), and draws docs/images/recipes/NAME.svg.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from demo import machine
from trew.runs.report import Series, line_chart, load_run, running_mean

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
SMALLER = {
    "countdown": (
        "model=smollm2-135m-instruct",
        "rollout.prompts=8",
        "learner.minibatch_prompts=0",
        "rollout.max_tokens=96",
        "learner.lr=2e-5",
        "steps=30",
        "eval.size=50",
    ),
}
"""Settings with which a recipe that is made for a GPU is run on two cores; the others are run as they are."""
CURVES = {
    "arithmetic": ("accuracy",),
    "custom_reward": ("accuracy", "reward/brief", "reward/close"),
    "dapo": ("accuracy", "zero_signal_share"),
    "ppo": ("accuracy", "value_loss"),
    "countdown": ("reward/format", "accuracy"),
    "quickstart": ("reward", "accuracy"),
}
"""The columns of metrics.jsonl that a recipe's picture shows."""
WINDOW = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="+", choices=sorted(CURVES))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "recipes", help="where the run folders go")
    parser.add_argument("--draw-only", action="store_true", help="use the run folders that are there")
    parser.add_argument("--resume", action="store_true", help="go on with runs that were interrupted")
    args = parser.parse_args()
    for name in args.recipes:
        folder = args.runs / name
        if not args.draw_only:
            train(name, folder, flag="--resume" if args.resume else "--overwrite")
        row = measured(name, folder)
        print(json.dumps(row, indent=2))
        keep(row)
        draw(name, folder, ROOT / "docs" / "images" / "recipes" / f"{name}.svg")


def train(name: str, folder: Path, *, flag: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = ROOT / "recipes" / f"{name}.toml"
    if name == "quickstart":
        recipe = from_page(folder.parent / "quickstart-files")
    command = [sys.executable, "-m", "trew", "train", str(recipe), "--out", str(folder), flag]
    if name in SMALLER:
        command += ["--set", *SMALLER[name]]
    subprocess.run(command, check=True, cwd=ROOT if name != "quickstart" else recipe.parent)


def from_page(folder: Path) -> Path:
    """Writes the files that docs/quickstart.md shows, and the rows; returns the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    page = (ROOT / "docs" / "quickstart.md").read_text()
    for name, text in re.findall(r"<!-- file: (\S+) -->\s*```\w+\n(.*?)^```$", page, re.M | re.S):
        (folder / name).write_text(text)
    subprocess.run([sys.executable, "make_rows.py"], check=True, cwd=folder)
    return folder / "recipe.toml"


def measured(name: str, folder: Path) -> dict[str, Any]:
    """The run's figures, and the mean of each curve over its first and its last steps."""
    run = load_run(folder)
    ends = {}
    for column in CURVES[name]:
        _, values = run.column(column)
        first, last = values[:WINDOW], values[-WINDOW:]
        ends[column] = {"first": sum(first) / len(first), "last": sum(last) / len(last), "steps": WINDOW}
    about = {"recipe": f"{name}.toml", "set": list(SMALLER.get(name, ()))}
    when = {"date": datetime.date.today().isoformat(), "machine": machine()}
    keys = ("seed", "model", "objective", "task", "steps", "n_eval", "accuracy_before", "accuracy_after", "seconds",
            "tokens_per_second", "peak_memory_bytes", "versions", "device")  # fmt: skip
    return about | {key: run.summary[key] for key in keys} | {"curves": ends} | when


def keep(row: dict[str, Any]) -> None:
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = sorted([r for r in rows if r["recipe"] != row["recipe"]] + [row], key=lambda r: r["recipe"])
    RESULTS.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


def draw(name: str, folder: Path, out: Path) -> None:
    run = load_run(folder)
    series = []
    for colour, column in enumerate(CURVES[name]):
        x, y = run.column(column)
        series.append(Series("", x, y, style="faint", colour=colour))
        series.append(Series(column, x, running_mean(y, window=WINDOW), colour=colour))
        if column == "accuracy":
            (at, mean), (_, low), (_, high) = (run.column(f"eval_{part}") for part in ("accuracy", "low", "high"))
            series.append(Series("held out, 95 %", at, mean, low, high, style="points", colour=colour))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        line_chart(
            series,
            title="docs/quickstart.md" if name == "quickstart" else f"recipes/{name}.toml",
            x_label="step",
            y_label="share",
            y_range=(0, 1),
        )
    )


if __name__ == "__main__":
    main()
