"""Measures the cost of several processes, as ratios next to their targets.

    python benchmarks/cluster.py [--parts one,ranks,publish,faults,async,ledger] [--servers stand-in,vllm] [--json FILE]

    one      `[cluster] learner = 1` next to a recipe without that table: seconds of a step, and bits of weights
    ranks    two gloo ranks of one thread next to one process of two, plain kernels: seconds of a step, peak memory;
             and two processes that know nothing of each other, each with half of the work: what no sharding beats
    memory   the same peak memory with a model of 0.5 billion parameters and few tokens, and what a rank takes before
             it has a model
    publish  weights published as files and loaded by a server, next to save_file and load_file of the same bytes, and
             how long the server stands still; the canary, which both then compute, is listed apart
    faults   seconds until a dead server is noticed, and beyond cluster.request_timeout_s until a hung one is
    async    asynchronous runs on stand-ins whose lengths have a heavy tail: seconds of a step beside the longer of
             generation and learning alone, next to the synchronous run; idle shares, ages of groups
    ledger   groups through the ledger and onto the disk, and what rank 0 needs for 100 of them per second

The model has the shape of SmolLM2-135M and random weights. ``one`` and ``ranks`` are runs of `trew train`, the two
sides in turn; the first step of each, a warm-up, is left out. Servers are the tests' stand-in (``stand-in``), and
vLLM's build for CPUs (``vllm``) where its environment is there (make .venv-vllm/.installed).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

import cluster_async
import cluster_servers
import trew
from demo import machine
from trew.config import dumps
from trew.rewards.isolation.tree import descendants
from work import BATCHES, SHAPES, Load, Work, save_model, wait_until_quiet
from work_trew import config_of

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "cluster.json"
PARTS = ("one", "ranks", "memory", "publish", "faults", "async", "ledger")
MIB = 2**20
WHAT = "ratios and seconds next to their targets, which are upper limits"
REWARD = """
def odd(completions, completion_ids, **columns):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]
"""
"""A reward that gives every group a signal, whatever the model says."""


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that runs and servers end too
    rows = {(row["part"], row["name"]): row for row in kept(args.json)}
    with tempfile.TemporaryDirectory(prefix="trew-cluster-") as scratch:
        for part in args.parts:
            for row in MEASURED[part](args, Path(scratch)):
                rows[part, row["name"]] = {"part": part, **row, "measured": measured()}
                print(shown(rows[part, row["name"]]), flush=True)
            if args.json:
                ordered = sorted(rows.values(), key=lambda row: PARTS.index(row["part"]))
                args.json.write_text(json.dumps({"what": WHAT, "rows": ordered}, indent=1) + "\n")
    missed = [row["name"] for row in rows.values() if row["value"] > row["target"]]
    print(f"missed: {'; '.join(missed)}" if missed else "all targets are met")


def arguments() -> argparse.Namespace:
    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in known]:
                raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}, accepts {', '.join(known)}")
            return text.split(",")

        return read

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=names(PARTS), default=list(PARTS))
    parser.add_argument("--servers", type=names(cluster_servers.KINDS), help="all that are there by default")
    parser.add_argument("--model", choices=BATCHES, default="B", help="a shape of work.py")
    parser.add_argument("--repeats", type=int, default=3, help="how often each side runs, in turn")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each run, after a warm-up")
    parser.add_argument("--async-steps", type=int, default=26, help="of each asynchronous run, its warm-up included")
    parser.add_argument("--patience", type=float, default=0, help="seconds to wait, before each run, for quiet")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows of parts that run again replace those in it")
    args = parser.parse_args()
    args.servers = args.servers or cluster_servers.there()
    if "vllm" in args.servers and "vllm" not in cluster_servers.there():
        parser.error(
            "--servers vllm: its environment .venv-vllm is not there; make it with: make .venv-vllm/.installed"
        )
    return args


def kept(path: Path | None) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path and path.exists() else []


def measured() -> dict[str, Any]:
    """When, where and with what a row was measured: rows that stay may come from another machine."""
    versions = {"trew": trew.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "date": datetime.date.today().isoformat(), "machine": machine(),
        "versions": versions | cluster_servers.versions(), "threads": torch.get_num_threads(),
    }  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    verdict = "met" if row["value"] <= row["target"] else "MISSED"
    value, target = (f"{row[key]:.3g} {row['unit']}".strip() for key in ("value", "target"))
    detail = ", ".join(f"{k} {f'{v:.3g}' if isinstance(v, float) else v}" for k, v in row["detail"].items())
    return f"{row['name']:<58}{value:>10}  at most {target:<8}{verdict:<8}{detail}"


def progress(text: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------- runs of trew train


@dataclass(frozen=True)
class Measured:
    """A run: seconds of its measured steps, peak memory of its largest rank in bytes (``steps``: from the second step
    on, without loading), its final weights, and how many cores others kept busy."""

    seconds: list[float]
    peak: int
    steps: int
    weights: dict[str, torch.Tensor]
    losses: list[float]
    foreign_cpu: float


def one(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """The table that changes nothing."""
    recipe = recipe_of(args, scratch / "one", kernels="auto", threads=0)
    table = recipe_of(args, scratch / "one", kernels="auto", threads=0, learner=1)
    none, one = in_turn({"no table": [recipe], "learner = 1": [table]}, args)
    bits = max(different_bits(a.weights, b.weights) for a, b in itertools.product(none[:1], [*none, *one]))
    return [
        ratio("learner = 1, step time over that without [cluster]", 1.03, none, one),
        {"name": "learner = 1, bits of weights that differ", "value": bits, "target": 0, "unit": "",
         "detail": {"tensors": len(one[0].weights), "steps": 1 + args.steps}},
    ]  # fmt: skip


def ranks(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Two ranks of a thread, one process of two."""
    alone = recipe_of(args, scratch / "ranks", kernels="plain", threads=2)
    both = recipe_of(args, scratch / "ranks", kernels="plain", threads=1, learner=2)
    halves = [recipe_of(args, scratch / "ranks", kernels="plain", threads=1, half=half) for half in "ab"]
    sides = {"1 process, 2 threads": [alone], "2 ranks, 1 thread": [both], "2 processes apart": halves}
    single, pair, apart = in_turn(sides, args)
    time_row = ratio("2 ranks x 1 thread, step time over 1 process x 2 threads", 1.5, single, pair)
    unconnected = ratio("", 0, single, apart)
    time_row["detail"] |= {"two processes apart over one": unconnected["value"]}
    return [time_row, peaks("2 ranks, peak memory of a rank over that of one process", single, pair)]


def memory(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """What sharding saves where weights and moments are most of the memory."""
    large = argparse.Namespace(**{**vars(args), "model": "D", "repeats": 1})
    alone = recipe_of(large, scratch / "memory", kernels="plain", threads=2)
    both = recipe_of(large, scratch / "memory", kernels="plain", threads=1, learner=2)
    single, pair = in_turn({"1 process": [alone], "2 ranks": [both]}, large)
    row = peaks("2 ranks, the same with 0.5 B parameters", single, pair)
    row["detail"]["before a model, MiB"] = round(floor() / MIB)
    return [row]


def floor() -> int:
    """The memory of a process that has imported what a rank needs, in bytes."""
    code = (
        "import transformers.models.llama.modeling_llama, torch.distributed.fsdp, trew.training.start;"
        "from trew.utils.memory import used_bytes; print(used_bytes())"
    )
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def peaks(name: str, single: list[Measured], pair: list[Measured]) -> dict[str, Any]:
    """Of medians over runs."""
    one, rank, one_later, rank_later = (
        statistics.median(getattr(run, key) for run in side) for key in ("peak", "steps") for side in (single, pair)
    )
    return {
        "name": name, "value": rank / one, "target": 0.65, "unit": "x",
        "detail": {"one process, MiB": round(one / MIB), "rank, MiB": round(rank / MIB),
                   "ratio after the first step": rank_later / one_later},
    }  # fmt: skip


def in_turn(sides: dict[str, list[Path]], args: argparse.Namespace) -> list[list[Measured]]:
    """The runs of each side. The recipes of a side run at once; their runs stand for each other, so the first does for
    all."""
    found: list[list[Measured]] = [[] for _ in sides]
    for number in range(args.repeats):
        for side, (name, recipes) in enumerate(sides.items()):
            wait_until_quiet(args.patience)
            with ThreadPoolExecutor(len(recipes)) as pool:
                found[side].append(next(iter(list(pool.map(measure, recipes)))))
            seconds = statistics.median(found[side][-1].seconds)
            progress(f"{name}, run {number + 1} of {args.repeats}: {seconds:.2f} s a step")
    return found


def ratio(name: str, target: float, base: list[Measured], other: list[Measured]) -> dict[str, Any]:
    """Of medians over all steps; the lowest and the highest ratio of two runs made one after the other."""
    a, b = ([s for run in side for s in run.seconds] for side in (base, other))
    single = [statistics.median(y.seconds) / statistics.median(x.seconds) for x, y in zip(base, other, strict=True)]
    return {
        "name": name, "value": statistics.median(b) / statistics.median(a), "target": target, "unit": "x",
        "range": [min(single), max(single)],
        "detail": {"seconds before": statistics.median(a), "seconds": statistics.median(b),
                   "foreign CPU": statistics.median(run.foreign_cpu for run in (*base, *other))},
        "runs": [[run.seconds for run in side] for side in (base, other)],
    }  # fmt: skip


def recipe_of(
    args: argparse.Namespace, folder: Path, *, kernels: str, threads: int, learner: int = 0, half: str = ""
) -> Path:
    """Writes a recipe, beside its model, which is made where it is not there. ``learner``: its number of ranks; 0
    leaves the table [cluster] out. ``half``: the name of a run with half of the prompts."""
    recipe = folder / f"learner-{learner}{half}.toml"
    shape, (prompts, group) = SHAPES[args.model], BATCHES[args.model]
    prompts = prompts // 2 if half else prompts
    model = folder / "model"
    if not model.exists():
        save_model(model, shape)
        (folder / "reward.py").write_text(REWARD)
    sets = (
        f"kernels={kernels}", f"linear={kernels}", f"threads={threads}", f"steps={1 + args.steps}",
        f"out={out_of(recipe)}", "checkpoint.every=0", "checkpoint.best=false", "track.samples_every=0",
        "eval.max_tokens=1",
    )  # fmt: skip
    work = Work(shape=shape, prompts=prompts, group=group, steps=args.steps, overrides=sets)
    text = re.sub(r"(?ms)^\[cluster\]\n.*?(?=^\[|\Z)", "", dumps(config_of(work, model)))
    text += f"\n[cluster]\nlearner = {learner}\n" if learner else ""
    recipe.write_text(text.replace('name = "repetition"', f'name = "{folder}/reward.py:odd"'))
    return recipe


def measure(recipe: Path) -> Measured:
    """Runs a recipe and watches its processes."""
    load, process = Load(), train(recipe)
    metrics = out_of(recipe) / "metrics.jsonl"
    peaks: dict[int, int] = {}
    after: dict[int, int] = {}
    try:
        while process.poll() is None:
            if not after and any("seconds" in row for row in rows_of(metrics)):
                after = {pid: start_anew(pid) for pid in ranks_of(process.pid)}
            for pid in ranks_of(process.pid):
                peaks[pid] = max(peaks.get(pid, 0), high_water(pid))
                if pid in after:
                    after[pid] = max(after[pid], high_water(pid))
            time.sleep(0.05)
    finally:
        process.terminate()  # of a measurement that is broken off; the command ends its ranks
        process.wait()
    if process.returncode:
        sys.exit(f"trew train {recipe} ended with code {process.returncode}:\n" + log_of(recipe).read_text()[-3000:])
    steps = [row for row in rows_of(metrics) if "seconds" in row][1:]
    weights = {k: v for file in (out_of(recipe) / "final").glob("*.safetensors") for k, v in load_file(file).items()}
    found = Measured(
        [row["seconds"] for row in steps], max(peaks.values()), max(after.values(), default=0),
        {name: tensor.clone() for name, tensor in weights.items()}, [row["loss"] for row in steps], load.foreign(),
    )  # fmt: skip
    shutil.rmtree(out_of(recipe))
    return found


def train(recipe: Path) -> subprocess.Popen[bytes]:
    with log_of(recipe).open("wb") as log:
        command = [sys.executable, "-m", "trew", "train", str(recipe)]
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})


def log_of(recipe: Path) -> Path:
    return recipe.with_suffix(".log")


def out_of(recipe: Path) -> Path:
    return recipe.with_name(f"run-{recipe.stem}")


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    """The rows that are there so far."""
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def ranks_of(root: int) -> list[int]:
    """The processes that train: the command itself, or the ranks that it started."""
    return [pid for pid in descendants(root) if b"\0RANK=" in b"\0" + environment(pid)] or [root]


def environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended
        return b""


def high_water(pid: int) -> int:
    """The most memory that a process has held, in bytes; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def start_anew(pid: int) -> int:
    """Lets a process's high-water mark begin at what it holds now."""
    with contextlib.suppress(OSError):  # it has ended
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return 0


def different_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    """The number of bits in which two sets of tensors differ."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    sides = ([t[name].contiguous().view(torch.uint8).numpy() for name in sorted(a)] for t in (a, b))
    return sum(int(np.bitwise_count(x ^ y).sum()) for x, y in zip(*sides, strict=True))


# -------------------------------------------------------------------------------------------------------------- servers


def publish(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Weights on their way to a server."""
    rows = []
    for kind in args.servers:
        work = Work(shape=SHAPES[args.model], prompts=1, group=2, steps=0)
        with cluster_servers.beside(kind, work, scratch / f"publish-{kind}") as house:
            trips = []
            for number in range(1 + args.repeats):  # the first is a warm-up
                wait_until_quiet(args.patience)
                trips.append(house.trip())
                progress(f"{kind}, published {number + 1} of {1 + args.repeats}: {trips[-1].moved:.2f} s")
        of = {key: statistics.median(getattr(t, key) for t in trips[1:]) for key in cluster_servers.Trip.KEYS}
        detail = {f"{name}, s": of[name] for name in cluster_servers.Trip.KEYS} | {"MiB": round(house.bytes / MIB)}
        runs = [{name: getattr(t, name) for name in cluster_servers.Trip.KEYS} for t in trips[1:]]
        rows += [
            {"name": f"publish and load ({kind}) over save_file and load_file", "target": 2.5, "unit": "x",
             "value": statistics.median(t.moved / t.plain for t in trips[1:]), "detail": detail, "runs": runs},
            {"name": f"share of it that the server stands still ({kind})", "target": 0.5, "unit": "", "detail": {},
             "value": statistics.median(t.paused / t.moved for t in trips[1:])},
        ]  # fmt: skip
    return rows


def faults(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Servers that die or hang while they generate."""
    rows = []
    for kind in args.servers:
        # The stand-in has no cache: with a smaller model it still makes tokens at a server's pace.
        shape = SHAPES["A" if kind == "stand-in" and args.model == "B" else args.model]
        work = Work(shape=shape, prompts=8, group=4, completion_tokens=400, steps=0)
        with cluster_servers.beside(kind, work, scratch / f"faults-{kind}") as house:
            found: dict[str, list[float]] = {"hung": [], "dead": []}
            for name in found:
                for number in range(args.repeats):
                    found[name].append(house.noticed(number, dead=name == "dead"))
                    progress(f"{kind}, {name}, {number + 1} of {args.repeats}: {found[name][-1]:.2f} s")
        limit = cluster_servers.HANG_S
        for name, told in (("dead", "a dead server is noticed"), ("hung", "a hung one, beyond request_timeout_s")):
            rows.append({"name": f"{told} ({kind})", "value": max(found[name]), "target": 2.0, "unit": "s",
                         "detail": {"median, s": statistics.median(found[name])}
                         | ({"request_timeout_s": limit} if name == "hung" else {}), "runs": found[name]})  # fmt: skip
    return rows


MEASURED = {
    "one": one, "ranks": ranks, "memory": memory, "publish": publish, "faults": faults,
    "async": cluster_async.asynchronous, "ledger": cluster_async.ledger,
}  # fmt: skip


if __name__ == "__main__":
    main()
