"""Simulated runs on many servers: how far the simulation agrees with real runs, and what it says about large ones.

    python benchmarks/cluster_sim.py validate    runs beside stand-in servers of prescribed speed and lengths, and their
                                                 simulation with the same numbers (two minutes, on a quiet machine)
    python benchmarks/cluster_sim.py scale       64 to 1,000 servers at constant work per server, faults, bounds
    python benchmarks/cluster_sim.py limits      10,000 servers: what reaches rank 0, the ledger and the file system
    python benchmarks/cluster_sim.py published   published figures of others beside a simulation that is calibrated on
                                                 one of them; shown, never fitted to

Nothing is fitted in ``validate``: decoding is prescribed, the learner's seconds are those that the run with bound 1
spent outside of waiting. Prints a table and keeps all in results/cluster_sim.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import cluster_limits
import tiny
from paced import Length, Pace, PacedRun, heavy_tailed_length, log_normal_length, run_paced
from trew import __version__
from trew.config import load
from trew.estimate.simulation import Simulation, Work, best_split, drop_the_slow, log_normal, simulate
from trew.estimate.virtual_servers import ServerSpecs
from trew.rollout.sync import sampling
from trew.rollout.vllm.engine import seed_of

RESULTS = Path(__file__).parent / "results" / "cluster_sim.json"
LIMIT = 0.10
"""By how much a simulated step may differ from a real one."""


def main() -> None:
    parts: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
        "validate": validate, "scale": scale, "limits": limits, "published": published,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts, nargs="*", default=list(parts))
    parser.add_argument("--only", default="", help="of validate: the settings whose names contain this")
    args = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in args.part:
        print(f"\n{name}", flush=True)
        rows = parts[name](args)
        for row in rows:
            print("  " + "  ".join(f"{key}: {shown(value)}" for key, value in row.items()), flush=True)
        new = {row["what"] for row in rows}
        rows = [row for row in kept.get(name, {}).get("rows", []) if args.only and row["what"] not in new] + rows
        kept[name] = {
            "measured": datetime.now(UTC).date().isoformat(), "trew": __version__, "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores", "rows": rows,
        }  # fmt: skip
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


# --------------------------------------------------------------------------------- real runs beside simulated ones

PROMPTS, GROUP, SERVERS, SLOTS = 8, 4, 2, 8
TOKEN_S, SEQUENCE_S = 0.03, 0.0015
"""Of an iteration of a stand-in, as in :class:`.ServerSpecs`."""
STEPS, WARM_UP, BOUNDS = 16, 3, (0, 1, 4)
REWARD = """
import time
def slow(completions, completion_ids, **columns):
    time.sleep({seconds})
    return [float(sum(i % 2 for i in ids)) for ids in completion_ids]
"""
"""A reward that is called once per step; its time stands for learning."""
SETTINGS: dict[str, tuple[Length, int, float]] = {
    "log-normal, little learning": (log_normal_length, 40, 0.3),
    "log-normal, as much learning as generating": (log_normal_length, 40, 1.2),
    "log-normal, learning takes longer": (log_normal_length, 40, 2.0),
    "heavy tail, little learning": (heavy_tailed_length, 60, 0.3),
    "heavy tail, as much learning as generating": (heavy_tailed_length, 60, 1.2),
}
"""Lengths, the longest of them, and the learner's seconds."""


def validate(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [row for name in SETTINGS if args.only in name for row in compared(name)]


def compared(name: str) -> list[dict[str, Any]]:
    """A run of each bound beside its simulation with the same lengths, ticket by ticket."""
    of, most, learning = SETTINGS[name]
    pace = Pace(SLOTS, TOKEN_S, SEQUENCE_S, of, GROUP)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = tiny.save(folder / "model", "smollm")
        (folder / "reward.py").write_text(REWARD.format(seconds=learning))
        runs = {
            bound: run_paced(
                model, folder, f"staleness-{bound}", pace=pace, servers=SERVERS, steps=STEPS,
                rollout={"prompts": PROMPTS, "completions": GROUP, "max_tokens": most}, learner={"lr": 1e-5},
                rewards=[{"name": "reward.py:slow"}], cluster={"staleness": bound},
            )
            for bound in BOUNDS
        }  # fmt: skip
        lengths = ticket_lengths(runs[1].folder, of)
        for run in runs.values():
            assert generated(run.folder) == sum(int(each.sum()) for each in lengths), "lengths were not as prescribed"
    # Prompts, seeds and so lengths are the same for every bound. The learner's time is taken from one run for all.
    sync = statistics.median(run.paused_s for run in runs.values())
    own = statistics.median(row["seconds"] - row["waited_s"] for row in runs[1].rows[WARM_UP:]) - sync
    return [beside(name, bound, run, lengths, update_s=own, sync_s=sync) for bound, run in runs.items()]


def beside(
    name: str, bound: int, run: PacedRun, lengths: Sequence[np.ndarray], *, update_s: float, sync_s: float
) -> dict[str, Any]:
    # The last steps ask for nothing new, so that servers run empty: they are no steady state.
    steps = STEPS - bound
    rows = run.rows[WARM_UP:steps]
    ages = {int(name[4:]): statistics.mean(row[name] for row in rows) for name in rows[0] if name.startswith("age/")}
    replay = iter(lengths)
    work = Work(PROMPTS, GROUP, bound, update_s, sync_s, lambda rng, n: next(replay), steps=steps, warm_up=WARM_UP)
    simulation = Simulation(ServerSpecs(SERVERS, SLOTS, TOKEN_S, SEQUENCE_S), work, steps=STEPS)
    while simulation.step <= steps:
        simulation.advance()
    made, seconds = simulation.forecast(), statistics.mean(row["seconds"] for row in rows)
    off = made.seconds / seconds - 1
    return {
        "what": name, "staleness": bound, "real s per step": seconds, "simulated": made.seconds, "off": off,
        "within 10 %": "yes" if abs(off) <= LIMIT else "NO", "learner's s": update_s, "servers paused, s": sync_s,
        "learner idle, real": statistics.mean(row["waited_s"] for row in rows) / seconds if bound else None,
        "learner idle, simulated": made.learner_idle, "ages, real": ages, "ages, simulated": made.ages,
    }  # fmt: skip


def generated(run: Path) -> int:
    """Tokens of all completions of a run."""
    found = pyarrow.parquet.read_table(run / "rollouts", columns=["token_ids"])["token_ids"]
    return sum(len(each) for each in found)


def ticket_lengths(run: Path, of: Length) -> list[np.ndarray]:
    """The lengths of every ticket's completions, by the seeds that its ledger implies."""
    config = load(run / "config.toml")
    found = []
    for entry in map(json.loads, (run / "ledger.jsonl").read_text().splitlines()):
        if "issued" in entry:
            first = seed_of(sampling(config, entry["step"], entry["attempt"]).seed, entry["uid"])
            found.append(np.array([of(first + i) for i in range(GROUP)], float))
    return found


# ------------------------------------------------------------------------------------------------------ large runs

H20 = {"slots": 256, "token_s": 0.0042, "sequence_s": 2.25e-4}
"""A server of two H20 with a 7 B model, calibrated on verl's two synchronous generation times (357 s and 178 s)."""
LONG = log_normal(4236, 0.95, 28_000)


def row(name: str, servers: ServerSpecs, work: Work, **more: Any) -> dict[str, Any]:
    begin = time.perf_counter()
    found = simulate(servers, work, **more)
    return {
        "what": name, "s per step": found.seconds, "learner idle": found.learner_idle,
        "servers idle": found.servers_idle,
        "slots used": found.slots_used, "ages": found.ages, "kept by length": found.kept, "asked again": found.losses,
        "ledger lines per s": found.entries / found.seconds, "simulated in s": time.perf_counter() - begin,
    }  # fmt: skip


def scale(args: argparse.Namespace) -> list[dict[str, Any]]:
    work = Work(512, 16, 1, 106.0, 5.0, LONG, steps=16)
    servers = ServerSpecs(64, **H20)
    found = [row(f"64 servers, staleness {s}", servers, dataclasses.replace(work, staleness=s)) for s in (0, 1, 2, 4)]
    found.append(
        row("64, staleness 2, slow groups dropped", servers, dataclasses.replace(work, staleness=2), take=drop_the_slow)
    )
    found.append(row("64, a tenth half as fast", dataclasses.replace(servers, slow_share=0.1), work))
    found.append(row("64, each fails every 10 h", dataclasses.replace(servers, mtbf_s=36_000.0, restart_s=180.0), work))
    for count in (250, 1000):
        large = dataclasses.replace(work, prompts=8 * count, steps=6, warm_up=2)
        found.append(row(f"{count} servers, staleness 1", dataclasses.replace(servers, count=count), large))
        failing = dataclasses.replace(servers, count=count, mtbf_s=36_000.0, restart_s=180.0)
        found.append(row(f"{count}, each fails every 10 h", failing, large))
    learner, best = best_split(128, work, servers, update_gpu_s=106.0 * 64, gpus_per_server=2)
    found.append({"what": "best of 128 GPUs for the learner", "GPUs": learner, "s per step": best.seconds,
                  "learner idle": best.learner_idle, "servers idle": best.servers_idle})  # fmt: skip
    return found


def limits(args: argparse.Namespace) -> list[dict[str, Any]]:
    """At 10,000 servers: what the simulated run asks of rank 0, times what that was measured to cost."""
    work = Work(80_000, 4, 1, 106.0, 5.0, LONG, steps=4, warm_up=2)
    found = row("10,000 servers, 80,000 prompts of 4", ServerSpecs(10_000, **H20), work)
    tokens = int(LONG(np.random.default_rng(0), 100_000).mean())
    run = cluster_limits.Traits(10_000, found["s per step"], work.prompts, work.completions, tokens)
    return [found | {"groups per s": run.groups, "tokens of a completion": tokens}, *cluster_limits.rows(run)]


# ------------------------------------------------------------------------------------------- beside published ones


def published(args: argparse.Namespace) -> list[dict[str, Any]]:
    """verl's rows for Qwen2.5-Math-7B, 28k tokens: 64 cards generate (32 servers of 2), 64 learn."""
    found = []
    for staleness, seconds in ((0, 231.34), (1, 150.63)):
        work = Work(512, 16, staleness, 106.0, 5.0, LONG, steps=16)
        made = simulate(ServerSpecs(64, **H20), work)
        found.append({
            "what": f"64 + 64 H20, bound {staleness}" + (" (published at 0.5)" if staleness else ""),
            "published s per step": seconds, "simulated": made.seconds, "off": made.seconds / seconds - 1,
        })  # fmt: skip
    others = {
        "verl, 128 H20, async over sync": "2.35 to 2.67", "AReaL": "2.77", "NeMo-RL, one step off": "1.28 to 1.57",
        "verl, 30 B": "1.7",
    }  # fmt: skip
    sync, late = (simulate(ServerSpecs(64, **H20), Work(512, 16, s, 106.0, 5.0, LONG, steps=16)) for s in (0, 1))
    found += [{"what": name, "published speed-up": speed} for name, speed in others.items()]
    return [*found, {"what": "simulated here, bound 1 over 0", "speed-up": sync.seconds / late.seconds}]


if __name__ == "__main__":
    main()
