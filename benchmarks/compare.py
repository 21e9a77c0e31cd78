"""The example of docs/compare.md: three settings, ten seeds, a tiny model, compared by trew compare.

    python benchmarks/compare.py [--seeds 10] [--out runs/compare-example] [--json benchmarks/results/compare.json]

The model is that of the tests: two layers with random weights. Its reward is the share of odd token ids in a
completion, and a completion counts as correct if all its six tokens are odd. Runs that are there already are kept, so
that more seeds can be added. Prints the tables, and writes the result, and the page beside the runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

import trew
from trew.runs.compare import Choices, compare_runs, describe, to_json, write_page

TESTS = Path(__file__).parents[1] / "tests"
SETTINGS: dict[str, list[str]] = {
    "grpo": [],
    "dr-grpo": ["objective.preset=dr-grpo"],
    "grpo-fast": ["learner.lr=5e-3"],
}


def main() -> None:
    args = arguments()
    prepare(args.out)
    folders = [train(args.out, name, seed) for name in SETTINGS for seed in range(1, args.seeds + 1)]
    result = compare_runs(folders, Choices())
    print(describe(result))
    write_page(result, args.out / "compare.html")
    if args.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "trew": trew.__version__}
        about = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "versions": machine}
        args.json.write_text(json.dumps({**about, "result": to_json(result)}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/compare-example"))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def prepare(out: Path) -> None:
    """Writes model, reward and recipe."""
    sys.path.insert(0, str(TESTS))
    import tiny
    from recipe_help import ODD, recipe

    out.mkdir(parents=True, exist_ok=True)
    if not (out / "lm").exists():
        tiny.save(out / "lm")
    (out / "reward.py").write_text(ODD)
    text = recipe(
        out / "lm", reward=str(out / "reward.py:odd"), steps=12, chat_template="plain",
        rollout={"prompts": 8, "completions": 8}, learner={"lr": 3e-3}, objective={"preset": "grpo"},
        eval={"size": 60, "every": 3, "temperature": 1.0, "correct_at": 1.0}, checkpoint={"every": 0},
        track={"samples_every": 0, "regrade_every": 0},
    )  # fmt: skip
    (out / "odd.toml").write_text(text)


def train(out: Path, name: str, seed: int) -> Path:
    """Trains one run, unless it is finished."""
    folder = out / f"{name}-{seed}"
    if not (folder / "summary.json").exists():
        command = [sys.executable, "-m", "trew", "train", str(out / "odd.toml"), "--out", str(folder), "--overwrite"]
        subprocess.run([*command, "--set", f"seed={seed}", *SETTINGS[name]], check=True, stdout=subprocess.DEVNULL)
    return folder


if __name__ == "__main__":
    main()
