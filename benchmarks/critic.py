"""What a critic costs: the same run with ``ppo`` and with ``grpo``, in turns, each in a separate process.

    python benchmarks/critic.py                 benchmarks/results/critic.json
    python benchmarks/critic.py --shape tiny --repeats 1 --steps 3 --json FILE       a quick look

One thread, and seconds of the processor rather than of a clock, so that other work on the machine counts little. The
first step, in which kernels are compared, is left out. Memory is the process's peak, from its memory.json.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import trew
from demo import machine
from trew.utils.console import Silent
from work import BATCHES, SHAPES, save_model

RESULTS = Path(__file__).parent / "results" / "critic.json"
REWARD = "def odd(completion_ids, **_):\n    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]\n"
OBJECTIVES: dict[str, dict[str, Any]] = {"grpo": {"preset": "grpo", "beta": 0.0}, "ppo": {"preset": "ppo"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="A")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, metavar=("OBJECTIVE", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one[0], Path(given.one[1]), shape=given.shape, steps=given.steps)))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in OBJECTIVES}
    for _ in range(given.repeats):
        for name in OBJECTIVES:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--one", name, folder, "--shape", given.shape]
                command += ["--steps", str(given.steps)]
                one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, found[name][-1], flush=True)
    table = summary(found) | {
        "shape": given.shape, "batch": BATCHES[given.shape], "date": datetime.date.today().isoformat(),
        "machine": machine(), "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip
    given.json.write_text(json.dumps(table, indent=1) + "\n")


def one(name: str, folder: Path, *, shape: str, steps: int) -> dict[str, Any]:
    """One run: seconds of the processor per step, and the peak of memory."""
    save_model(folder / "model", SHAPES[shape])
    (folder / "reward.py").write_text(REWARD)
    prompts, completions = BATCHES[shape]
    words = SHAPES[shape]["vocab_size"] - 1
    rows = [" ".join(f"w{(31 * i + j) % words}" for j in range(96)) for i in range(prompts * steps + 1)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    seen: list[float] = []
    trew.train(
        {
            "model": str(folder / "model"), "chat_template": "plain", "steps": steps, "threads": 1,
            "out": str(folder / "run"), "data": {"task": "prompts", "train": str(folder / "train.jsonl")},
            "rewards": [{"name": f"{folder}/reward.py:odd"}],
            "rollout": {"prompts": prompts, "completions": completions, "max_tokens": 64},
            "objective": OBJECTIVES[name], "learner": {"lr": 1e-5}, "checkpoint": {"every": 0},
            "eval": {"size": 1, "max_tokens": 1},
            "track": {"samples_every": 0, "regrade_every": 0},
        },
        on_row=lambda row: seen.append(time.process_time()) if "loss" in row else None, display=Silent(),
    )  # fmt: skip
    measured = json.loads((folder / "run" / "memory.json").read_text())["measured"]
    return {"seconds": [b - a for a, b in itertools.pairwise(seen)], "bytes": measured[0]["peak_bytes"]}


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over steps and repeats, and what ppo takes of each as a multiple of grpo."""
    table: dict[str, Any] = {
        name: {
            "seconds_per_step": statistics.median(s for run in runs for s in run["seconds"]),
            "bytes": statistics.median(run["bytes"] for run in runs), "runs": runs,
        }
        for name, runs in found.items()
    }  # fmt: skip
    ppo, grpo = table["ppo"], table["grpo"]
    return table | {"ratio": {key: ppo[key] / grpo[key] for key in ("seconds_per_step", "bytes")}}


if __name__ == "__main__":
    main()
