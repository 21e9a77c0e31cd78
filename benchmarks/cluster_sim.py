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
import json
import multiprocessing
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src" / "trew" / "rollout" / "vllm" / "plugin"))
import fake_vllm
import tiny
from recipe_help import recipe, training_rows
from trew import __version__
from trew.estimate.simulation import Servers, Work, best_split, drop_the_slow, log_normal, simulate
from trew.rollout import codec
from trew.types import Group, Prompt, single_turn

RESULTS = Path(__file__).parent / "results" / "cluster_sim.json"
LIMIT = 0.10
"""By how much a simulated step may differ from a real one."""


def main() -> None:
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "validate": validate, "scale": scale, "limits": limits, "published": published,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts, nargs="*", default=list(parts))
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in parser.parse_args().part:
        print(f"\n{name}")
        rows = parts[name]()
        for row in rows:
            print("  " + "  ".join(f"{key}: {shown(value)}" for key, value in row.items()))
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

PROMPTS, GROUP, COUNT, SLOTS, TOKENS = 8, 4, 2, 8, 40
TOKEN_S, SEQUENCE_S, REWARD_S = 0.03, 0.0015, 1.2
"""Of decoding, as in :class:`.Servers`; and of a reward that is called once per step, which stands for learning."""
STEPS, WARM_UP, BOUNDS = 16, 4, (0, 1, 3)
REWARD = f"""
import time
def slow(completions, completion_ids, **columns):
    time.sleep({REWARD_S})
    return [float(sum(i % 2 for i in ids)) for ids in completion_ids]
"""


def length(seed: int) -> int:
    """Heavy-tailed: half of the completions have up to 10 tokens, some reach the limit."""
    return max(1, min(TOKENS, round(random.Random(seed).lognormvariate(2.3, 0.9))))


def prescribed(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.array([length(int(seed)) for seed in rng.integers(2**62, size=n)], float)


class Paced(fake_vllm.FakeVllm):
    """A stand-in that decodes up to ``SLOTS`` sequences in lock-step at the prescribed speed.

    Tokens are computed beside that: they are ready before their time has passed.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, token="secret")
        self.faults.lengths = length
        self.free, self.count = threading.Semaphore(SLOTS), 0

    def generate(self, body: Any) -> Any:
        sampling = body["sampling_params"]
        if sampling.get("prompt_logprobs") is not None or sampling["n"] < GROUP:
            return super().generate(body)
        paced = [threading.Thread(target=self.decode, args=(self._length(sampling, i),)) for i in range(sampling["n"])]
        for thread in paced:
            thread.start()
        answer = super().generate(body)
        for thread in paced:
            thread.join()
        return answer

    @torch.no_grad()
    def _token(self, prompt: list[int], rows: list[Any], sampling: dict[str, Any]) -> None:
        """Ends every row by a stop token at its prescribed length, and nowhere else."""
        if sampling["n"] < GROUP:  # canaries, evaluations
            super()._token(prompt, rows, sampling)
            return
        stop = sampling["stop_token_ids"]
        logits = self._logits([prompt + row.tokens for row in rows])[:, -1]
        for row, z in zip(rows, logits, strict=True):
            probs = z.softmax(-1)
            last = len(row.tokens) + 1 == row.most
            token = stop[0] if last else int(torch.multinomial(without(probs, stop), 1, generator=row.draws))
            row.add(token, float(probs[token].log()), self.version)
            self.tokens += 1
            if last:
                row.reason, row.stop = "stop", token

    def decode(self, tokens: int) -> None:
        """Takes a slot for as long as a sequence needs."""
        with self.free:
            with self.lock:
                self.count += 1
            due = time.monotonic()
            for _ in range(tokens):
                while self.paused:
                    time.sleep(0.002)
                    due = time.monotonic()
                due += TOKEN_S + SEQUENCE_S * self.count
                time.sleep(max(0.0, due - time.monotonic()))
            with self.lock:
                self.count -= 1


def without(probs: torch.Tensor, ids: list[int]) -> torch.Tensor:
    probs = probs.clone()
    probs[ids] = 0
    return probs


def serve(model: Path, socket: Path) -> None:
    torch.set_num_threads(1)
    with fake_vllm.serving(Paced(model), socket):
        signal.pause()


def validate() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = tiny.save(folder / "model", "smollm")
        real = {bound: run_of(model, folder, bound) for bound in BOUNDS}
    update = real[1]["seconds"] - real[1]["waited"]
    found = []
    for bound, run in real.items():
        work = Work(PROMPTS, GROUP, bound, update, 0.0, prescribed, steps=400)
        made = simulate(Servers(COUNT, SLOTS, TOKEN_S, SEQUENCE_S), work)
        off = made.seconds / run["seconds"] - 1
        found.append({
            "staleness": bound, "real s per step": run["seconds"], "simulated": made.seconds, "off": off,
            "within 10 %": "yes" if abs(off) <= LIMIT else "NO", "learner's s": update,
            "learner idle, real": run["waited"] / run["seconds"] if bound else None,
            "learner idle, simulated": made.learner_idle,
            "ages, real": run["ages"], "ages, simulated": made.ages,
        })  # fmt: skip
    return found


def run_of(model: Path, folder: Path, bound: int) -> dict[str, Any]:
    sockets = [folder / f"{bound}-{number}.sock" for number in range(COUNT)]
    servers = [multiprocessing.get_context("fork").Process(target=serve, args=(model, s), daemon=True) for s in sockets]
    for server in servers:
        server.start()
    (folder / "reward.py").write_text(REWARD)
    path = folder / f"staleness-{bound}.toml"
    path.write_text(recipe(
        model, steps=STEPS, rollout={"prompts": PROMPTS, "completions": GROUP, "max_tokens": TOKENS},
        objective={"preset": "grpo", "correction": "tis"}, eval={"size": 1, "max_tokens": 1}, checkpoint={"every": 0},
        learner={"lr": 1e-5}, track={"samples_every": 0, "regrade_every": 0}, rewards=[{"name": "reward.py:slow"}],
        cluster={"rollout": "vllm", "endpoints": [f"unix:{s}" for s in sockets], "staleness": bound},
    ))  # fmt: skip
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TREW_SERVER_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trew", "train", path], cwd=folder, env=env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    finally:
        for server in servers:
            server.kill()
            server.join()
    if done.returncode:
        sys.exit(f"trew train {path} ended with code {done.returncode}:\n{done.stdout[-3000:]}")
    every = training_rows(folder / "runs" / path.stem)
    # The last steps ask for nothing new, so that servers run empty: they are no steady state.
    rows = every[WARM_UP : len(every) - bound]
    ages = {name[4:]: statistics.mean(row[name] for row in rows) for name in rows[0] if name.startswith("age/")}
    return {
        "seconds": statistics.mean(row["seconds"] for row in rows), "ages": ages,
        "waited": statistics.mean(row.get("waited_s", 0.0) for row in rows),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ large runs

H20 = {"slots": 256, "token_s": 0.0042, "sequence_s": 2.25e-4}
"""A server of two H20 with a 7 B model, calibrated on verl's two synchronous generation times (357 s and 178 s)."""
LONG = log_normal(4236, 0.95, 28_000)


def row(name: str, servers: Servers, work: Work, **more: Any) -> dict[str, Any]:
    begin = time.perf_counter()
    found = simulate(servers, work, **more)
    return {
        "what": name, "s per step": found.seconds, "learner idle": found.learner_idle,
        "servers idle": found.servers_idle,
        "slots used": found.slots_used, "ages": found.ages, "kept by length": found.kept, "asked again": found.losses,
        "ledger lines per s": found.entries / found.seconds, "simulated in s": time.perf_counter() - begin,
    }  # fmt: skip


def scale() -> list[dict[str, Any]]:
    work = Work(512, 16, 1, 106.0, 5.0, LONG, steps=16)
    servers = Servers(64, **H20)
    found = [row(f"64 servers, staleness {s}", servers, replaced(work, staleness=s)) for s in (0, 1, 2, 4)]
    found.append(row("64, staleness 2, slow groups dropped", servers, replaced(work, staleness=2), take=drop_the_slow))
    found.append(row("64, a tenth half as fast", replaced(servers, slow_share=0.1), work))
    found.append(row("64, each fails every 10 h", replaced(servers, mtbf_s=36_000.0, restart_s=180.0), work))
    for count in (250, 1000):
        large = replaced(work, prompts=8 * count, steps=6, warm_up=2)
        found.append(row(f"{count} servers, staleness 1", replaced(servers, count=count), large))
        failing = replaced(servers, count=count, mtbf_s=36_000.0, restart_s=180.0)
        found.append(row(f"{count}, each fails every 10 h", failing, large))
    learner, best = best_split(128, work, servers, update_gpu_s=106.0 * 64, gpus_per_server=2)
    found.append({"what": "best of 128 GPUs for the learner", "GPUs": learner, "s per step": best.seconds,
                  "learner idle": best.learner_idle, "servers idle": best.servers_idle})  # fmt: skip
    return found


def replaced(value: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(value, **changes)


def limits() -> list[dict[str, Any]]:
    """At 10,000 servers: groups, lines and bytes per second on rank 0."""
    work = Work(80_000, 4, 1, 106.0, 5.0, LONG, steps=3, warm_up=1)
    found = row("10,000 servers, 80,000 prompts of 4", Servers(10_000, **H20), work)
    groups = work.prompts / found["s per step"]
    tokens = int(LONG(np.random.default_rng(0), 100_000).mean())
    ids, logprobs = np.arange(tokens), np.full(tokens, -1.0, np.float32)
    one = single_turn(np.arange(200), ids, logprobs=logprobs, policy_logprobs=None, entropies=None, version=0,
                      text="x" * 4 * tokens, finish_reason="stop")  # fmt: skip
    size = len(codec.encode(Group(Prompt("p", text="x" * 800), (one,) * work.completions)))
    # A token comes as its id and its log-prob in JSON text: about 6 and 40 characters.
    return [found | {
        "groups per s": groups, "completions per s": groups * work.completions,
        "answers into rank 0, MB per s": groups * work.completions * tokens * 46 / 1e6,
        "pending files, MB per s": groups * size / 1e6, "fsyncs per s at 128 groups each": groups / 128,
    }]  # fmt: skip


# ------------------------------------------------------------------------------------------- beside published ones


def published() -> list[dict[str, Any]]:
    """verl's rows for Qwen2.5-Math-7B, 28k tokens: 64 cards generate (32 servers of 2), 64 learn."""
    found = []
    for staleness, seconds in ((0, 231.34), (1, 150.63)):
        work = Work(512, 16, staleness, 106.0, 5.0, LONG, steps=16)
        made = simulate(Servers(64, **H20), work)
        found.append({
            "what": f"64 + 64 H20, bound {staleness}" + (" (published at 0.5)" if staleness else ""),
            "published s per step": seconds, "simulated": made.seconds, "off": made.seconds / seconds - 1,
        })  # fmt: skip
    others = {
        "verl, 128 H20, async over sync": "2.35 to 2.67", "AReaL": "2.77", "NeMo-RL, one step off": "1.28 to 1.57",
        "verl, 30 B": "1.7",
    }  # fmt: skip
    sync, late = (simulate(Servers(64, **H20), Work(512, 16, s, 106.0, 5.0, LONG, steps=16)) for s in (0, 1))
    found += [{"what": name, "published speed-up": speed} for name, speed in others.items()]
    return [*found, {"what": "simulated here, bound 1 over 0", "speed-up": sync.seconds / late.seconds}]


if __name__ == "__main__":
    main()
