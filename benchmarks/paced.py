"""Stand-ins for vLLM servers whose speed and lengths are prescribed, and runs of `trew train` beside them.

A server decodes as vLLM does, in iterations: each gives one token to every sequence that has a slot, and takes
``token_s`` + ``sequence_s`` times their number. Sequences wait for a slot in the order in which they came, and join at
the next iteration. While its weights are exchanged it stands still.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src" / "trew" / "rollout" / "vllm" / "plugin"))
import fake_answers
import fake_vllm
from recipe_help import recipe, training_rows

Length = Callable[[int], int]
"""The number of tokens of a completion, as a function of its seed."""


def log_normal_length(seed: int) -> int:
    """Half of the completions have up to 10 tokens, one in fourteen has the limit of 40."""
    return max(1, min(40, round(random.Random(seed).lognormvariate(2.3, 0.9))))


def heavy_tailed_length(seed: int) -> int:
    """Pareto with exponent 1.1: half of the completions have up to 9 tokens, one in fifteen has the limit of 60."""
    return min(60, int(5 * random.Random(seed).paretovariate(1.1)))


@dataclass(frozen=True, slots=True)
class Pace:
    """``slots``: sequences that are decoded at a time; the others wait."""

    slots: int
    token_s: float
    sequence_s: float
    length: Length
    group: int  # requests for fewer completions are evaluations and canaries, which are answered at once


@dataclass(eq=False, slots=True)
class _Sequence:
    prompt: list[int]
    row: Any
    stop: int
    begin: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)


class PacedVllm(fake_vllm.FakeVllm):
    """Writes into ``log`` when each sequence was decoded ("used"), and when the server stood still ("paused")."""

    def __init__(self, folder: Path, pace: Pace, log: Path) -> None:
        super().__init__(folder, token="secret")
        self.pace, self.log = pace, log.open("w")
        self.faults.lengths = pace.length
        self.queue: deque[_Sequence] = deque()
        self.arrived = threading.Semaphore(0)
        threading.Thread(target=self._decode, daemon=True).start()

    def generate(self, body: Any) -> Any:
        sampling = body["sampling_params"]
        if sampling.get("prompt_logprobs") is not None or sampling["n"] < self.pace.group:
            return super().generate(body)
        rows = [fake_answers.Row(sampling["seed"] + i, self._length(sampling, i)) for i in range(sampling["n"])]
        made = [_Sequence(body["token_ids"], row, sampling["stop_token_ids"][0]) for row in rows]
        self.queue.extend(made)
        self.arrived.release()
        for each in made:
            each.done.wait()
        return {"choices": [row.choice(i) for i, row in enumerate(rows)], "prompt_logprobs": None}

    def pause(self, body: Any) -> Any:
        self._since = time.monotonic()
        return super().pause(body)

    def resume(self, body: Any) -> Any:
        self._write("paused", self._since)
        return super().resume(body)

    def _write(self, what: str, begin: float) -> None:
        self.log.write(f"{what} {begin} {time.monotonic()}\n")
        self.log.flush()

    def _decode(self) -> None:
        running: list[_Sequence] = []
        due = 0.0
        while True:
            if not running and not self.queue:
                self.arrived.acquire()
                due = time.monotonic()
                continue
            while self.queue and len(running) < self.pace.slots:
                running.append(self.queue.popleft())
                running[-1].begin = due
            before = time.monotonic()
            while self.paused:
                time.sleep(0.001)
            due += time.monotonic() - before + self.pace.token_s + self.pace.sequence_s * len(running)
            with self.lock:
                self._give(running)
            time.sleep(max(0.0, due - time.monotonic()))
            for each in [each for each in running if each.row.reason]:
                running.remove(each)
                self._write("used", each.begin)
                each.done.set()

    @torch.no_grad()
    def _give(self, running: Sequence[_Sequence]) -> None:
        """A token for each: the stop token at its prescribed length, and before it none of those that stop."""
        contexts = [each.prompt + each.row.tokens for each in running]
        longest = max(map(len, contexts))
        padded = torch.tensor([context + [0] * (longest - len(context)) for context in contexts])
        hidden = self.model.base_model(input_ids=padded).last_hidden_state
        last = hidden[torch.arange(len(contexts)), torch.tensor([len(context) - 1 for context in contexts])]
        for each, probs in zip(running, (last @ self.head.t()).float().softmax(-1), strict=True):
            row, ends = each.row, len(each.row.tokens) + 1 == each.row.most
            others = probs.index_fill(0, torch.tensor([each.stop]), 0.0)
            token = each.stop if ends else int(torch.multinomial(others, 1, generator=row.draws))
            row.add(token, float(probs[token].log()), self.version)
            self.tokens += 1
            if ends:
                row.reason, row.stop = "stop", token


def _serve(model: Path, pace: Pace, socket: Path) -> None:
    torch.set_num_threads(1)
    with fake_vllm.serving(PacedVllm(model, pace, socket.with_suffix(".log")), socket):
        signal.pause()


@contextmanager
def paced_servers(model: Path, pace: Pace, sockets: Sequence[Path]) -> Iterator[None]:
    """A server in a process of its own on each socket; their logs lie beside them."""
    context = multiprocessing.get_context("fork")
    servers = [context.Process(target=_serve, args=(model, pace, socket), daemon=True) for socket in sockets]
    for server in servers:
        server.start()
    try:
        yield
    finally:
        for server in servers:
            server.kill()
            server.join()


@dataclass(frozen=True, slots=True)
class PacedRun:
    """What a run left: its metrics by step, the seconds that servers stood still per step, and the seconds that their
    slots were used."""

    rows: list[dict[str, Any]]
    paused_s: float
    used_s: float
    folder: Path


def run_paced(model: Path, folder: Path, name: str, *, pace: Pace, servers: int, **sections: Any) -> PacedRun:
    """`trew train` with the stand-ins. ``sections`` are those of its recipe."""
    sockets = [folder / f"{name}-{number}.sock" for number in range(servers)]
    cluster = {"rollout": "vllm", "endpoints": [f"unix:{socket}" for socket in sockets], **sections.pop("cluster")}
    path = folder / f"{name}.toml"
    path.write_text(recipe(
        model, objective={"preset": "grpo", "correction": "tis"}, eval={"size": 1, "max_tokens": 1},
        checkpoint={"every": 0}, track={"samples_every": 0, "regrade_every": 0}, cluster=cluster, **sections,
    ))  # fmt: skip
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TREW_SERVER_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    with paced_servers(model, pace, sockets):
        done = subprocess.run(
            [sys.executable, "-m", "trew", "train", path, "--overwrite"], cwd=folder, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"trew train {path} ended with code {done.returncode}:\n{done.stdout[-3000:]}")
    spans: dict[str, float] = {"used": 0.0, "paused": 0.0}
    for line in (line for socket in sockets for line in socket.with_suffix(".log").read_text().splitlines()):
        what, begin, end = line.split()
        spans[what] += float(end) - float(begin)
    run = folder / "runs" / name
    rows = training_rows(run)
    return PacedRun(rows, spans["paused"] / servers / (len(rows) + 1), spans["used"], run)
