"""Makes a healthy run and five sick ones with a tiny model, and draws the pictures of docs/metrics.md.

    python benchmarks/sick_runs.py              trains what is missing in --out (minutes), writes results and pictures
    python benchmarks/sick_runs.py --draw       draws the pictures again from the results that are there

The model has random weights and writes bytes; what it is rewarded for is in ``REWARDS``. The runs are short and small
so that everyone can repeat them; how the curves look, not their numbers, is what larger runs have in common with them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import machine
from trew.runs.report import Series, line_chart
from trew.runs.report.svg import side_by_side

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sick_runs.json"
IMAGES = ROOT / "docs" / "images" / "metrics"
STEPS = 40
REWARDS = '''
def odd(completions, completion_ids, **columns):
    """The share of tokens with an odd number: every completion can be a little better."""
    return [sum(i % 2 for i in ids) / max(len(ids), 1) for ids in completion_ids]

def phrase(completions, **columns):
    """A phrase that this model never writes."""
    return [float("the answer is" in text) for text in completions]

def many(completions, completion_ids, **columns):
    """The number of odd tokens, not their share: the longer, the better."""
    return [sum(i % 2 for i in ids) / 48 for ids in completion_ids]

def varied(completions, completion_ids, **columns):
    """What was meant by odd: different odd tokens."""
    return [len({i for i in ids if i % 2}) / 12 for ids in completion_ids]
'''


@dataclass(frozen=True, slots=True)
class Case:
    """A run, and what its picture shows: metrics with their titles and fixed ranges."""

    title: str
    settings: Mapping[str, Any]
    panels: Sequence[tuple[str, str, tuple[float, float] | None]]
    beside: str = "healthy"  # the run that is drawn behind it; empty where nothing compares


REWARD, ENTROPY = ("reward", "reward", (0.0, 1.0)), ("entropy", "entropy, nats", None)
CASES: dict[str, Case] = {
    "healthy": Case("A healthy run", {}, (REWARD, ENTROPY, ("kl", "KL to the reference, nats", None)), beside=""),
    "collapse": Case(
        "Learning rate 30 times too high: entropy collapses", {"learner.lr": 0.1},
        (REWARD, ENTROPY, ("kl", "KL to the reference, nats", None)),
    ),
    "equal": Case(
        "A reward that no completion gets: all groups are equal", {"rewards": ["phrase"]},
        (REWARD, ("zero_signal_share", "groups without signal", (0.0, 1.0)), ("grad_norm", "gradient norm", None)),
    ),
    "length": Case(
        "A reward that grows with the length: completions run into the limit",
        {"rewards": ["many"], "rollout.max_tokens": 48, "rollout.stop": list("aeiou0123456789 .,"), "learner.lr": 1e-2},
        (REWARD, ("completion_length", "tokens per completion", None), ("truncated_share", "cut off", (0.0, 1.0))),
        beside="",  # its limit is another
    ),
    "ratio": Case(
        "Eight passes over old completions at a high rate: ratios blow up",
        {"learner.lr": 2e-2, "learner.inner_updates": 8, "rollout.stale_steps": 3, "objective.beta": 0.0},
        (("ratio_q99", "99 % of ratios below (log10)", None), ("ess", "effective sample size", (0.0, 1.0)),
         ("clip_share", "clipped tokens", (0.0, 1.0))),
    ),
    "hacking": Case(
        "A reward that is easier to get than what was meant: one odd token, repeated",
        {"rewards": ["odd", "varied"], "learner.lr": 1e-2, "objective.beta": 0.0},
        (("reward/odd", "what is rewarded", (0.0, 1.0)), ("reward/varied", "what was meant", (0.0, 1.0)), ENTROPY),
    ),
}  # fmt: skip
_LOG = frozenset({"ratio_q99"})
_WIDTH, _HEIGHT = 300, 210


def main() -> None:
    args = arguments()
    if not args.draw:
        prepare(args.out)
        runs = {name: train(args.out, name) for name in CASES}
        versions = {name: importlib.metadata.version(name) for name in ("trew", "torch", "transformers")}
        about = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions}
        RESULTS.write_text(json.dumps({**about, "runs": runs}, separators=(",", ":")) + "\n")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for path, svg in files().items():
        path.write_text(svg, encoding="utf-8")
        print(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sick"), help="the folder for the runs")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    return parser.parse_args()


def files() -> dict[Path, str]:
    """Every picture with what should be in it."""
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    return {IMAGES / f"{name}.svg": picture(name, runs) for name in CASES}


# ----------------------------------------------------------------------------------------------------------- the runs


def prepare(out: Path) -> None:
    """Writes the model and the rewards."""
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny

    out.mkdir(parents=True, exist_ok=True)
    if not (out / "lm").exists():
        tiny.model("llama", initializer_range=0.1).save_pretrained(out / "lm")
        tiny.tokenizer(chat=False).save_pretrained(out / "lm")
    (out / "rewards.py").write_text(REWARDS)


def recipe(out: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {
        "model": str(out / "lm"), "chat_template": "plain", "steps": STEPS, "seed": 1,
        "data": {"task": "arithmetic", "args": {"ops": ["+"], "largest": 50}},
        "rollout": {"prompts": 8, "completions": 8, "max_tokens": 12},
        "objective": {"preset": "grpo", "beta": 0.01}, "learner": {"lr": 3e-3},
        "eval": {"size": 8, "every": 0}, "checkpoint": {"every": 0},
        "track": {"samples_every": 0, "regrade_every": 0},
    }  # fmt: skip
    names = settings.get("rewards", ["odd"])
    # Only the first counts; the others are watched.
    table["rewards"] = [{"name": f"{out}/rewards.py:{name}", "weight": float(i == 0)} for i, name in enumerate(names)]
    for key, value in settings.items():
        if key != "rewards":
            section, _, field = key.partition(".")
            table[section][field] = value
    return table


def train(out: Path, name: str) -> dict[str, list[float | None]]:
    """Trains a run, unless it is finished; the metrics of its picture by name."""
    from trew.utils.toml import dump_table

    folder, path = out / name, out / f"{name}.toml"
    path.write_text(dump_table(recipe(out, CASES[name].settings)))
    if not (folder / "summary.json").exists():
        command = [sys.executable, "-m", "trew", "train", str(path), "--out", str(folder), "--overwrite"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "eval_accuracy" not in row]
    wanted = {metric for case in CASES.values() for metric, _, _ in case.panels}
    return {metric: [_short(row.get(metric)) for row in rows] for metric in sorted(wanted)}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


# ------------------------------------------------------------------------------------------------------- the pictures


def picture(name: str, runs: Mapping[str, Mapping[str, Sequence[float | None]]]) -> str:
    """A run's metrics side by side, with the healthy run behind them."""
    drawn = {"this run": (name, 0 if name == "healthy" else 1, "")}
    if CASES[name].beside:
        drawn = {"healthy run": (CASES[name].beside, 7, "6 3"), **drawn}
    charts = []
    for metric, title, fixed in CASES[name].panels:
        series = [
            Series("", list(range(1, STEPS + 1)), _scaled(metric, runs[run][metric]), colour=colour, dash=dash)
            for run, colour, dash in drawn.values()
            if any(value is not None for value in runs[run][metric])
        ]
        charts.append(line_chart(
            series, title=title, y_range=fixed, width=_WIDTH, height=_HEIGHT, standalone=False,
        ))  # fmt: skip
    legend = [Series(label, [], [], colour=colour, dash=dash) for label, (_, colour, dash) in drawn.items()]
    return side_by_side(
        charts, width=_WIDTH, height=_HEIGHT, title=CASES[name].title, legend=legend if len(drawn) > 1 else []
    )


def _scaled(metric: str, values: Sequence[float | None]) -> list[float | None]:
    return [math.log10(v) if v is not None and metric in _LOG else v for v in values]


if __name__ == "__main__":
    main()
