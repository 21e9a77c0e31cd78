"""Recipes that fit two cores, run as they are: the figures and pictures of recipes/README.md.

    python benchmarks/recipes.py arithmetic custom_reward dapo mixture
    python benchmarks/recipes.py sft dpo                       with rows that this script makes
    python benchmarks/recipes.py quickstart                    the recipe of docs/quickstart.md
    python benchmarks/recipes.py --set threads=1 iterative     with another setting, which the figures name
    python benchmarks/recipes.py --resume dapo                 goes on with a run that was interrupted
    python benchmarks/recipes.py --draw-only arithmetic        from the run folders that are there

Runs each recipe by its command in a process of its own, adds its figures to benchmarks/results/recipes.json (a recipe
that was measured before is replaced), and draws docs/images/recipes/NAME.svg.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import machine
from trew.data.tasks.arithmetic import Arithmetic
from trew.runs.report import RunData, Series, line_chart, load_run, running_mean
from trew.types import Prompt

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
WINDOW = 5
KEYS = ("seed", "model", "objective", "task", "steps", "rounds", "n_eval", "accuracy_before", "accuracy_after",
        "loss_before", "loss_after", "seconds", "tokens_per_second", "peak_memory_bytes", "versions",
        "device")  # fmt: skip
"""What is kept of a run's summary, where it has it."""

# --------------------------------------------------------------------------------------------------------------------
# Recipes whose files are made here


def as_it_is(name: str, folder: Path) -> Path:
    """A recipe of recipes/ that needs no file beside it."""
    return ROOT / "recipes" / f"{name}.toml"


def from_page(name: str, folder: Path) -> Path:
    """Writes the files that docs/quickstart.md shows, and the rows; returns the recipe."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    for file, text in re.findall(r"<!-- file: (\S+) -->\s*```\w+\n(.*?)^```$", page, re.M | re.S):
        (folder / file).write_text(text)
    subprocess.run([sys.executable, "make_rows.py"], check=True, cwd=folder)
    return folder / "recipe.toml"


OPERANDS = 20
"""The largest operand of the problems below, and of those by which a trained model is graded."""


def problems(count: int = 400) -> list[Prompt]:
    """Sums and differences that differ in more than their order, and from each that a trained model is graded by."""
    drawn, _, _ = Arithmetic(ops=("+", "-"), largest=OPERANDS, size=2 * count).generate(eval_size=100, seed=0)
    different = {}
    for prompt in drawn:
        left, op, right = prompt.columns["expression"].split()
        key = (op, *sorted((left, right))) if op == "+" else (op, left, right)
        different.setdefault(key, prompt)
    return list(different.values())[:count]


def demonstrations() -> Iterator[dict[str, Any]]:
    """Conversations: a problem and its result."""
    for prompt in problems():
        answer = {"role": "assistant", "content": prompt.columns["gold"]}
        yield {"messages": [*(prompt.messages or ()), answer]}


def pairs() -> Iterator[dict[str, Any]]:
    """A problem with its result, and with a number near it."""
    draw = random.Random(0)
    for prompt in problems():
        wrong = int(prompt.columns["gold"]) + draw.choice([-1, 1]) * draw.randint(1, 10)
        yield {"prompt": list(prompt.messages or ()), "chosen": prompt.columns["gold"], "rejected": str(wrong)}


def with_rows(file: str, rows: Callable[[], Iterator[dict[str, Any]]]) -> Callable[[str, Path], Path]:
    """A recipe of recipes/ that reads a file of the user's: a copy beside a file with ``rows``."""

    def make(name: str, folder: Path) -> Path:
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows()))
        return Path(shutil.copy(ROOT / "recipes" / f"{name}.toml", folder))

    return make


# --------------------------------------------------------------------------------------------------------------------
# What is measured of each recipe


@dataclass(frozen=True, slots=True)
class Curve:
    """A column of metrics.jsonl in a picture. ``held_out``: the columns of the same on held-out rows, and of the ends
    of its interval if there is one."""

    column: str
    held_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How a recipe is run, and what its picture shows."""

    curves: tuple[Curve, ...]
    command: str = "train"
    recipe: Callable[[str, Path], Path] = as_it_is  # from name and an empty folder: the recipe with its files
    set: tuple[str, ...] = ()  # settings with which a recipe that is made for more is run on two cores
    graded: tuple[str, ...] = ()  # settings of arithmetic.toml that grades the model before and after; none = not
    title: str = ""  # empty = the recipe's file
    y_label: str = "share"
    y_range: tuple[float, float] | None = (0, 1)


ACCURACY = Curve("accuracy", ("eval_accuracy", "eval_low", "eval_high"))
LOSS = Curve("loss", ("eval_loss", "eval_loss_low", "eval_loss_high"))
GRADED = ('data.args.ops=["+","-"]', f"data.args.largest={OPERANDS}")


def pass_rate(data_set: str) -> Curve:
    """The pass rate of one of several data sets."""
    held_out = tuple(f"eval_{part}/{data_set}" for part in ("accuracy", "low", "high"))
    return Curve(f"data/{data_set}/pass_rate", held_out)


RECIPES = {
    "arithmetic": Measurement(curves=(ACCURACY,)),
    "custom_reward": Measurement(curves=(ACCURACY, Curve("reward/brief"), Curve("reward/close"))),
    "dapo": Measurement(curves=(ACCURACY, Curve("zero_signal_share"))),
    "mixture": Measurement(curves=(pass_rate("one-digit"), pass_rate("two-digit"))),
    "ppo": Measurement(curves=(ACCURACY, Curve("value_loss"))),
    "vapo": Measurement(curves=(ACCURACY, Curve("value_loss"))),
    "quickstart": Measurement(
        curves=(Curve("reward"), ACCURACY), recipe=from_page, title="docs/quickstart.md",
    ),
    "sft": Measurement(
        command="sft", curves=(LOSS,), recipe=with_rows("demonstrations.jsonl", demonstrations), set=("eval.every=10",),
        graded=GRADED, y_label="loss, nats per token", y_range=None,
    ),
    "dpo": Measurement(
        command="sft", curves=(LOSS, Curve("preference_accuracy", ("eval_preference_accuracy",))),
        recipe=with_rows("pairs.jsonl", pairs), set=("eval.every=5",), graded=GRADED,
        y_label="loss in nats per pair; share of pairs", y_range=None,
    ),
    "iterative": Measurement(
        command="iterate", curves=(ACCURACY,), y_label="accuracy by the verifier",
        set=("steps=12", "learner.dtype=bfloat16", "iterate.first_prompts=48", "iterate.learner.dtype=bfloat16"),
    ),
    "countdown": Measurement(
        curves=(Curve("reward/format"), ACCURACY),
        set=("model=smollm2-135m-instruct", "rollout.prompts=8", "learner.minibatch_prompts=0", "rollout.max_tokens=96",
             "learner.lr=2e-5", "steps=30", "eval.size=50"),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="+", choices=sorted(RECIPES))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "recipes", help="where the run folders go")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one more setting of the runs")
    parser.add_argument("--draw-only", action="store_true", help="use the run folders that are there")
    parser.add_argument("--resume", action="store_true", help="go on with runs that were interrupted")
    args = parser.parse_args()
    for name in args.recipes:
        settings = (*RECIPES[name].set, *args.set)
        folder = args.runs.absolute() / name
        if not args.draw_only:
            run(name, folder, settings, flag="--resume" if args.resume else "--overwrite")
        row = measured(name, folder, settings)
        print(json.dumps(row, indent=2))
        keep(row)
        draw(name, folder, ROOT / "docs" / "images" / "recipes" / f"{name}.svg")


def run(name: str, folder: Path, settings: tuple[str, ...], *, flag: str) -> None:
    """Runs a recipe; grades the model before and after where the run itself measures no accuracy."""
    wanted = RECIPES[name]
    files = folder.with_name(f"{name}-files")
    files.mkdir(parents=True, exist_ok=True)
    recipe = wanted.recipe(name, files)
    where = ROOT if recipe.is_relative_to(ROOT / "recipes") else recipe.parent
    with_settings = ["--set", *settings] if settings else []
    trew(wanted.command, recipe, "--out", folder, flag, *with_settings, cwd=where)
    for when, model in (("before", load_run(folder).summary["model"]), ("after", folder / "final")):
        if wanted.graded:
            by = ("--recipe", ROOT / "recipes" / "arithmetic.toml", "--set", *wanted.graded)
            trew("eval", model, *by, "--json", files / f"{when}.json", cwd=where)


def trew(*arguments: object, cwd: Path) -> None:
    subprocess.run([sys.executable, "-m", "trew", *map(str, arguments)], check=True, cwd=cwd)


# --------------------------------------------------------------------------------------------------------------------
# Figures and pictures


def stages(folder: Path) -> list[RunData]:
    """The policy's training in each round of ``trew iterate``; of other runs, the run."""
    return [load_run(part) for part in sorted(folder.glob("round-*/policy")) or [folder]]


def column(folder: Path, name: str) -> tuple[list[int], list[float | None]]:
    """Steps and values of a metric; the steps of all stages are counted on."""
    steps: list[int] = []
    values: list[float | None] = []
    done = 0
    for stage in stages(folder):
        x, y = stage.column(name)
        steps += [done + step for step in x]
        values += y
        done += stage.summary["steps"]
    return steps, values


def measured(name: str, folder: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    """The run's figures, the mean of each curve over its first and its last steps, and its first and last held-out
    values."""
    summary = {**stages(folder)[-1].summary, **load_run(folder).summary}
    ends: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for curve in RECIPES[name].curves:
        _, values = column(folder, curve.column)
        first, last = values[:WINDOW], values[-WINDOW:]
        ends[curve.column] = {"first": sum(first) / len(first), "last": sum(last) / len(last), "steps": WINDOW}
        for part in curve.held_out:
            _, found = column(folder, part)
            held[part] = {"before": found[0], "after": found[-1]}
    row = {"recipe": f"{name}.toml", "set": list(settings)}
    row |= {key: summary[key] for key in KEYS if key in summary}
    row |= {"curves": ends, "held_out": held}
    if RECIPES[name].graded:
        row["graded"] = {when: grade(folder, when) for when in ("before", "after")}
    if "rows" in summary:  # of each round: the policy, and the reward model's agreement with the verifier
        row["rows"] = summary["rows"]
    return row | {"date": datetime.date.today().isoformat(), "machine": machine()}


def grade(folder: Path, when: str) -> dict[str, Any]:
    """What ``trew eval`` found of the model before or after training."""
    found = json.loads((folder.with_name(f"{folder.name}-files") / f"{when}.json").read_text())["result"]
    return {key: found[key] for key in ("accuracy", "n")}


def keep(row: dict[str, Any]) -> None:
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = sorted([r for r in rows if r["recipe"] != row["recipe"]] + [row], key=lambda r: r["recipe"])
    RESULTS.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


def draw(name: str, folder: Path, out: Path) -> None:
    """Each curve step by step and as a running mean, and its held-out values as points."""
    wanted, series = RECIPES[name], []
    for colour, curve in enumerate(wanted.curves):
        x, y = column(folder, curve.column)
        series.append(Series("", x, y, style="faint", colour=colour))
        series.append(Series(curve.column, x, running_mean(y, window=WINDOW), colour=colour))
        if curve.held_out:
            (at, mean), *ends = (column(folder, part) for part in curve.held_out)
            low, high = (values for _, values in ends) if ends else (None, None)
            label = "held out, 95 %" if ends else "held out"
            series.append(Series(label, at, mean, low, high, style="points", colour=colour))
    title = wanted.title or f"recipes/{name}.toml"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(line_chart(series, title=title, x_label="step", y_label=wanted.y_label, y_range=wanted.y_range))


if __name__ == "__main__":
    main()
