"""Kills servers, ranks and rank 0 of asynchronous runs at random instants, and reads whether anything was lost.

    python benchmarks/cluster_crash.py --kills 50          benchmarks/results/cluster_crash.json
    python benchmarks/cluster_crash.py --kills 20 --seed 3 --add    20 more, counted with those of before

Each run is ``trew train`` on two gloo ranks (forked from one process that has imported everything) with two stand-ins
for vLLM servers, which are processes of their own and generate the whole time. SIGKILL goes to one of them at a random
instant: a dead server comes back at its address after a while, as a cluster manager would have it; after the death of a
rank, or of rank 0, all ranks are started again with --resume. Once a run has come to its end, its files say:

    trained twice   tickets that more than one step was trained on, by the ledger and by the completions in rollouts/
    lost            tickets that were asked for, and neither trained on nor dropped with a reason
    bound           the oldest token of every group is at most ``staleness`` published versions old, by the versions
                    that its completions were written with
    longest pause   the longest time in which ranks that all run added nothing to the ledger; one longer than a minute
                    ends the benchmark with the stacks of all threads, as a wait without a limit would
    tracebacks      launches in which a rank that was not killed printed a traceback
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src" / "trew" / "rollout" / "vllm" / "plugin"))
import fake_vllm
import tiny
from demo import machine
from forks import Command, Server
from ranks_help import free_port, variables
from recipe_help import ODD, recipe
from trew import __version__
from trew.distributed.pulse import FOLDER

RESULTS = Path(__file__).parent / "results" / "cluster_crash.json"
PROMPTS, SERVERS, RANKS = 4, 2, 2
VICTIMS = {"server": 0.5, "rank 1": 0.2, "rank 0": 0.3}
SLOW_S = 0.05
"""Seconds per token, so that most kills meet groups on their way."""
LATEST_S = 2.5
"""The longest time from one kill to the next."""
STALL_S = 60.0
"""Seconds without a line in the ledger after which a run counts as one that hangs: three times the longest limit that
its recipe has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30, help="of each run; it is killed until it gets there")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--add", action="store_true", help="to what the file has already")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and ranks end too
    rows: list[dict[str, Any]] = []
    before = json.loads(args.json.read_text())["runs"] if args.add and args.json.exists() else []
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="trew-crash-") as scratch:
        model = tiny.save(Path(scratch) / "model", "smollm")
        left = args.kills
        with Server() as forks:
            while left > 0:
                folder = Path(scratch) / f"{len(rows)}"
                folder.mkdir()
                rows.append(one_run(forks, model, folder, args, draw, left))
                left -= sum(rows[-1]["kills"].values())
                save(args.json, before + rows)
                print(json.dumps(rows[-1]), flush=True)
    said = summary(before + rows)
    print(json.dumps(said, indent=1))
    sys.exit(1 if any(said[key] for key in ("trained twice", "lost", "beyond the bound", "tracebacks")) else 0)


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    head = {
        "date": datetime.date.today().isoformat(), "machine": machine(),
        "versions": {"trew": __version__, "python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
    }  # fmt: skip
    path.write_text(json.dumps(head | {"all": summary(rows), "runs": rows}, indent=1) + "\n")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kills: Counter[str] = Counter()
    for row in rows:
        kills.update(row["kills"])
    keys = ("launches", "trained", "trained twice", "lost", "beyond the bound", "made again", "used after a kill",
            "tracebacks")  # fmt: skip
    return {"kills": dict(kills), **{key: sum(row[key] for row in rows) for key in keys},
            "longest pause": max((row["longest pause"] for row in rows), default=0.0),
            "seconds": round(sum(row["seconds"] for row in rows), 1)}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- a run


def serve(model: Path, socket: Path) -> None:
    torch.set_num_threads(1)
    os.environ["VLLM_API_KEY"] = "secret"
    fake = fake_vllm.FakeVllm(model, token="secret")
    fake.faults.slow = SLOW_S
    with fake_vllm.serving(fake, socket):
        signal.pause()


@dataclass
class House:
    """The servers of a run, which come back after they were killed."""

    model: Path
    folder: Path
    servers: list[Any] = field(default_factory=list)
    due: dict[int, float] = field(default_factory=dict)  # when a dead one comes back

    def start(self, number: int) -> Any:
        socket = self.folder / f"{number}.sock"
        socket.unlink(missing_ok=True)
        process = multiprocessing.get_context("fork").Process(target=serve, args=(self.model, socket), daemon=True)
        process.start()
        return process

    def kill(self, number: int, back: float) -> None:
        self.servers[number].kill()
        self.servers[number].join()
        self.due[number] = time.monotonic() + back

    def look(self, now: float = float("inf")) -> None:
        """Starts the servers whose time has come."""
        for number in [n for n, at in self.due.items() if at <= now]:
            del self.due[number]
            self.servers[number] = self.start(number)


@contextlib.contextmanager
def house(model: Path, folder: Path) -> Iterator[House]:
    made = House(model, folder)
    made.servers = [made.start(number) for number in range(SERVERS)]
    try:
        yield made
    finally:
        for process in made.servers:
            process.kill()
            process.join()


def written(model: Path, folder: Path, args: argparse.Namespace) -> Path:
    (folder / "reward.py").write_text(ODD)
    path = folder / "run.toml"
    path.write_text(recipe(
        model, steps=args.steps, rollout={"prompts": PROMPTS}, objective={"preset": "grpo", "correction": "tis"},
        data={"args": {"ops": ["+"], "largest": 500, "size": 4000}}, eval={"size": 2}, learner={"lr": 1e-4},
        checkpoint={"every": 3}, kernels="plain", linear="plain", track={"samples_every": 0},
        cluster={"rollout": "vllm", "endpoints": [f"unix:{folder}/{i}.sock" for i in range(SERVERS)], "learner": RANKS,
                 "staleness": args.staleness, "request_timeout_s": 20.0},
    ))  # fmt: skip
    return path


def ranks(forks: Server, path: Path, launch: int) -> list[Command]:
    port, shared = free_port(), path.parent / f"launch-{launch}"
    shared.mkdir()
    return [
        # With a folder for signs of life a rank prints its stacks on SIGABRT.
        forks.start("train", path, "--resume", cwd=path.parent, TREW_SERVER_TOKEN="secret",
                    **{FOLDER: str(shared)}, **variables(rank, RANKS, port))
        for rank in range(RANKS)
    ]  # fmt: skip


def one_run(
    forks: Server, model: Path, folder: Path, args: argparse.Namespace, draw: random.Random, most: int
) -> dict[str, Any]:
    """A run that is killed again and again, ``most`` times at most, until it comes to its end."""
    path, start, kills, pauses, tracebacks = written(model, folder, args), time.monotonic(), Counter[str](), [0.0], 0
    with house(model, folder) as servers:
        while not (folder / "runs" / "run" / "summary.json").exists():
            servers.look()
            started = ranks(forks, path, len(pauses))
            pauses.append(disturb(started, servers, draw, kills, most, folder / "runs" / "run"))
            texts = [rank.text() for rank in started if rank.code != -signal.SIGKILL]
            if found := [text for text in texts if "Traceback" in text or "exception was never retrieved" in text]:
                tracebacks += 1
                print("\n".join(found), file=sys.stderr)
    return {"kills": dict(kills), "launches": len(pauses) - 1, "steps": args.steps, "staleness": args.staleness,
            "seconds": round(time.monotonic() - start, 1), "longest pause": round(max(pauses), 1),
            "tracebacks": tracebacks, **judged(folder / "runs" / "run", args)}  # fmt: skip


def disturb(
    started: list[Command], servers: House, draw: random.Random, kills: Counter[str], most: int, run: Path
) -> float:
    """One launch of the ranks, up to its end, or the death of one of them; returns the longest pause of the ledger."""
    lines, due, paused = size_of(run), None, Pause()
    while not any(rank.ended() for rank in started):
        time.sleep(0.002)
        servers.look(time.monotonic())
        if due is None:
            if size_of(run) > lines:  # it trains
                due = time.monotonic() + draw.uniform(0, LATEST_S)
            continue
        paused.look(size_of(run), started)
        if time.monotonic() >= due and kills.total() < most:
            [victim] = draw.choices(list(VICTIMS), list(VICTIMS.values()))
            kills[victim] += 1
            if victim == "server":
                servers.kill(draw.randrange(SERVERS), draw.uniform(0, 1))
                due = time.monotonic() + draw.uniform(0, LATEST_S)
            else:
                started[int(victim[-1])].kill(signal.SIGKILL)
                break
    dying = time.monotonic()
    while not all(rank.ended() for rank in started):  # the others notice, and end
        time.sleep(0.01)
        if time.monotonic() - dying > STALL_S:
            stalled(started, f"after a kill a rank did not end within {STALL_S:g} s")
    codes = [rank.wait() for rank in started]
    text = started[0].text()
    if any(codes) and -signal.SIGKILL not in codes and "no server is left" not in text:
        sys.exit(f"a run ended with codes {codes}:\n{text[-4000:]}\n{started[1].text()[-2000:]}")
    return max(paused.longest, time.monotonic() - dying)


class Pause:
    """How long a ledger did not grow."""

    def __init__(self) -> None:
        self.longest, self._size, self._since = 0.0, 0, time.monotonic()

    def look(self, size: int, started: list[Command]) -> None:
        """Ends the benchmark with the stacks of all ranks where nothing has happened for too long."""
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        paused = time.monotonic() - self._since
        self.longest = max(self.longest, paused)
        if paused > STALL_S:
            stalled(started, f"no line in the ledger for {STALL_S:g} s")


def stalled(started: list[Command], why: str) -> None:
    """Ends the benchmark with the stacks of all ranks that still run."""
    for rank in started:
        if not rank.ended():
            rank.kill(signal.SIGABRT)
        rank.wait()
    sys.exit(f"{why}:\n" + "\n".join(rank.text() for rank in started))


def size_of(run: Path) -> int:
    try:
        return (run / "ledger.jsonl").stat().st_size
    except OSError:
        return 0


# -------------------------------------------------------------------------------------------------- what its files say


def judged(run: Path, args: argparse.Namespace) -> dict[str, Any]:
    entries = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    used: list[tuple[int, int]] = []  # line and ticket, of what was trained on and not undone
    gone: list[tuple[int, int]] = []
    reused: set[int] = set()
    finished: set[int] = set()
    for line, entry in enumerate(entries):
        if "begun" in entry:
            used = [(at, ticket) for at, ticket in used if at < entry["mark"]]
            gone = [(at, ticket) for at, ticket in gone if at < entry["mark"]]
            reused |= finished - {ticket for _, ticket in used}
        finished |= {entry["finished"]} if "finished" in entry else set()
        finished -= {entry["again"]} if "again" in entry else set()
        reused -= {entry["again"]} if "again" in entry else set()
        used += [(line, ticket) for ticket in entry.get("tickets", ())]
        gone += [(line, entry["dropped"])] if "dropped" in entry else []
    trained = Counter(ticket for _, ticket in used)
    issued = {entry["issued"] for entry in entries if "issued" in entry}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "age_max" in row]
    assert steps == list(range(1, args.steps + 1)), f"{run}: steps {steps}"
    uids: Counter[str] = Counter()
    beyond = sum(row["age_max"] > args.staleness for row in rows if "age_max" in row)
    for path in (run / "rollouts").glob("*.parquet"):
        table = pq.read_table(path, columns=["uid", "sample", "policy_version"]).to_pylist()
        uids.update(row["uid"] for row in table if row["sample"] == 0)
        # One update per step: the version of the weights is the step that published them.
        beyond += sum(int(path.stem) - 1 - row["policy_version"] > args.staleness for row in table)
    return {
        "trained": len(trained),
        "trained twice": sum(count > 1 for count in trained.values()) + sum(count > 1 for count in uids.values()),
        "lost": len(issued - set(trained) - {ticket for _, ticket in gone}) + args.steps * PROMPTS - len(uids),
        "beyond the bound": beyond,
        "made again": sum("again" in entry for entry in entries),
        "used after a kill": len(reused & set(trained)),
    }


if __name__ == "__main__":
    main()
