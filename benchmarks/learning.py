"""Accuracy over seconds beside a peer: the demo's task, trained by trew and by TRL's GRPOTrainer with the same seeds.

    python benchmarks/learning.py --peer trl [--seeds 0 1 2 3 4] [--hours 1] [--only trew] [--draw-only]

Every run is a process of its own, one after another: for each seed one of each side, in turn first. A finished run is
kept in --runs, and in the results, from which it is taken where --runs lacks it: the same command goes on where it
stopped, on another machine too, and adds seeds. Writes benchmarks/results/learning.json and what docs/performance.md
takes from it.

TRL's environment: make .venv-trl/.installed
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
from demo import machine
from learning_results import summary
from learning_sides import Budget
from step import python_of

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
SIDES = ("trew", "trl")
KEEPS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""glibc then keeps the memory of freed tensors, which trew has it do by itself; TRL becomes faster with it."""


def main() -> None:
    args = arguments()
    args.runs.mkdir(parents=True, exist_ok=True)
    planned = restore(args)
    if not args.draw_only:
        conduct(args)
    args.seeds = sorted({*planned, *args.seeds})
    rows = finished(args)
    if not rows:
        sys.exit(f"no run of {args.runs} is finished; nothing is written")
    args.json.write_text(json.dumps(result(args, rows), indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))
    if args.json == figures.RESULTS / "learning.json":
        figures.main([])


def arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    parser.add_argument("--peer", choices=["trl"], default="trl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", choices=SIDES, help="run this side alone; the other's runs are kept")
    parser.add_argument("--hours", type=float, help="start no run after this time")
    parser.add_argument("--draw-only", action="store_true", help="run nothing; use the runs that are finished")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning", help="where finished runs are kept")
    parser.add_argument("--json", type=Path, default=figures.RESULTS / "learning.json", metavar="FILE")
    budget = parser.add_argument_group("the budget of each run; the demo's is 28 steps of 12 x 16, in minibatches of 3")
    for name, default in {"steps": 4, "prompts": 4, "completions": 12, "minibatch-prompts": 1}.items():
        budget.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    budget.add_argument("--eval-every", type=int, default=2, help="steps between evaluations; default 2")
    budget.add_argument("--eval-size", type=int, default=200, help="held-out problems; default 200")
    budget.add_argument("--threads", type=int, default=1, help="of each side; default 1")
    budget.add_argument("--peer-rows", type=int, default=0, help="sequences in one micro-batch of the peer")
    budget.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe, for both sides")
    args = parser.parse_args()
    if problem := problem_of(args):
        parser.error(problem)
    return args


def problem_of(args: argparse.Namespace) -> str:
    """What is wrong with the arguments, in one line; empty if nothing is."""
    if args.minibatch_prompts < 1 or args.prompts % args.minibatch_prompts:
        return f"--minibatch-prompts: got {args.minibatch_prompts}, accepts a divisor of --prompts, {args.prompts}"
    if args.peer_rows < 0 or (args.peer_rows and budget(args, 0).update_rows % args.peer_rows):
        return (f"--peer-rows: got {args.peer_rows}, accepts a divisor of the completions of an optimizer step, "
                f"{budget(args, 0).update_rows}")  # fmt: skip
    if not args.draw_only and args.only != "trew" and python_of("trl") is None:
        return "TRL's environment .venv-trl is not there; make it with: make .venv-trl/.installed"
    for side in SIDES:
        for seed in args.seeds:
            if (found := kept(args, side, seed)) and Budget.of(found["budget"]) != budget(args, seed):
                return f"--runs: {file_of(args, side, seed)} has another budget; name another folder"
    return ""


def budget(args: argparse.Namespace, seed: int) -> Budget:
    names = {field.name for field in dataclasses.fields(Budget)} - {"seed", "overrides"}
    return Budget(seed=seed, overrides=tuple(args.set), **{name: getattr(args, name) for name in names})


# ------------------------------------------------------------------------------------------------------------- the runs


def file_of(args: argparse.Namespace, side: str, seed: int) -> Path:
    return args.runs / f"{side}-{seed}.json"


def kept(args: argparse.Namespace, side: str, seed: int) -> dict[str, Any]:
    """A finished run; empty if there is none."""
    path = file_of(args, side, seed)
    return json.loads(path.read_text()) if path.exists() else {}


def restore(args: argparse.Namespace) -> list[int]:
    """Takes the runs of the results file that --runs lacks, if their budget is that of ``args``.

    Returns the seeds that the file was planned for; none if its budget is another, and it will be written anew.
    """
    found = json.loads(args.json.read_text()) if args.json.exists() else {"seeds": [], "rows": []}
    if any(Budget.of({**found["budget"], "seed": row["seed"]}) != budget(args, row["seed"]) for row in found["rows"]):
        return []
    for row in found["rows"]:
        out = file_of(args, row["side"], row["seed"])
        run = {name: value for name, value in row.items() if name not in ("side", "seed")}
        run |= {"budget": {**found["budget"], "seed": row["seed"]}, "versions": found["versions"]}
        if not out.exists():
            out.write_text(json.dumps({"date": found["date"], **run}))
    return found["seeds"]


def order(seed: int) -> tuple[str, ...]:
    """The sides of a pair: each is the first of every other one, so that a load that grows or falls hits both alike."""
    return SIDES if seed % 2 == 0 else SIDES[::-1]


def conduct(args: argparse.Namespace, run: Callable[..., None] | None = None) -> None:
    """Runs what is not finished, until the time is over."""
    end = time.monotonic() + 3600 * args.hours if args.hours is not None else float("inf")
    for seed in args.seeds:
        for side in order(seed):
            if kept(args, side, seed) or args.only not in (None, side):
                continue
            if time.monotonic() > end:
                print(f"--hours {args.hours}: over before seed {seed} of {side}; the same command goes on with it")
                return
            (run or process)(args, side, seed)
            print(f"{side} {seed}: {json.dumps(kept(args, side, seed)['evaluations'][-1])}", flush=True)


def process(args: argparse.Namespace, side: str, seed: int) -> None:
    """One run of one side, as a process of its own; its file is there once it is complete."""
    out, spec = file_of(args, side, seed), args.runs / f"{side}-{seed}.budget"
    budget(args, seed).write(spec)
    with tempfile.TemporaryDirectory(prefix="trew-learning-") as scratch:
        made = Path(scratch) / "made.json"
        python = sys.executable if side == "trew" else python_of(side)
        path = os.pathsep.join([str(ROOT / "src"), str(HERE)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(args.threads)}
        if side != "trew":
            environment |= KEEPS_FREED_MEMORY
        start([python, HERE / f"learning_{side}.py", spec, made, Path(scratch) / "run"], environment)
        shutil.move(made, out)
    spec.unlink()


def start(command: list[Any], environment: dict[str, str]) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{Path(command[1]).name} failed:\n" + "\n".join(done.stderr.splitlines()[-25:]))


# ---------------------------------------------------------------------------------------------------------- the results


def finished(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All finished runs, pair by pair; stops where the two sides of a pair did not have the same work."""
    rows = []
    for seed in args.seeds:
        pair = {side: found for side in SIDES if (found := kept(args, side, seed))}
        if len(pair) == len(SIDES):
            check_same(pair, seed)
        rows += [{"side": side, "seed": seed, **found} for side, found in pair.items()]
    return rows


def check_same(pair: dict[str, dict[str, Any]], seed: int) -> None:
    """Exits if the sides of a pair differ in budget, in the prompts of a step, or in the problems held out."""
    ours, theirs = pair["trew"], pair["trl"]
    if ours["budget"] != theirs["budget"]:
        sys.exit(f"seed {seed}: not the same work: the budgets differ")
    for key in ("prompts", "rollouts"):
        a, b = ([step[key] for step in side["steps"]] for side in (ours, theirs))
        if a != b:
            sys.exit(f"seed {seed}: not the same work: {key} per step are {a} in trew, {b} in the peer")
    before = [side["evaluations"][0]["accuracy"]["mean"] for side in (ours, theirs)]
    if abs(before[0] - before[1]) > 1 / 100:
        sys.exit(f"seed {seed}: not the same evaluation: before training {before[0]} in trew, {before[1]} in the peer")


def result(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    versions = {name: version for row in rows for name, version in row["versions"].items()}
    given = {name: value for name, value in rows[0]["budget"].items() if name != "seed"}
    today = datetime.date.today().isoformat()
    rows = [{"date": today, **{k: v for k, v in row.items() if k not in ("budget", "versions")}} for row in rows]
    return {
        "date": max(row["date"] for row in rows), "machine": machine(), "versions": versions, "peer": args.peer,
        "seeds": args.seeds, "budget": given, "peer_environment": KEEPS_FREED_MEMORY, "rows": rows,
        "summary": summary(rows),
    }  # fmt: skip


if __name__ == "__main__":
    main()
