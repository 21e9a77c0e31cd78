"""Runs that are killed at known instants: ``trew train`` as a process of its own, and what must be equal afterwards.

A watched run says in a small file in which phase it is, and kills its whole process group with SIGKILL where the file
names an instant. Nothing of this is in trew: :func:`watch` wraps its functions, in the child that is to be watched.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
from forks import PATIENCE, Command, Server

SIZE, WRITER = 256, 64
"""Bytes of that file: the main thread's phase, from 64 on the checkpoint writer's, from 128 on the instant to be killed
at, as ``name:count``."""

REWARDS = """
def odd(completions, completion_ids, answer, **columns):
    return [round(sum(i % 2 for i in ids) / len(ids), 1) for ids in completion_ids]

def some(completions, completion_ids, answer, **columns):
    return [float(ids[0] % 2) if int(a) % 3 else 0.0 for ids, a in zip(completion_ids, answer)]

def short(completions, completion_ids, **columns):
    return [1.0 / len(ids) for ids in completion_ids]
"""

BASE: dict[str, Any] = {
    "steps": 6, "seed": 3,
    "data": {"task": "arithmetic", "args": {"ops": ["+"], "smallest": 1, "largest": 4}},
    "rollout": {"prompts": 4, "completions": 3, "max_tokens": 4},
    "learner": {"lr": 1e-2, "minibatch_prompts": 2, "inner_updates": 2, "schedule": "linear"},
    "eval": {"size": 4, "every": 2}, "checkpoint": {"every": 3},
}  # fmt: skip
"""Few prompts, so that every run passes through several epochs; two inner updates of two minibatches each."""

KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"objective": {"preset": "grpo", "beta": 0.01}},
    "dapo": {"objective": {"preset": "dapo"}, "rewards": ["some"], "rollout": {"refills": 3}},
    "entropy": {"objective": {"preset": "dr-grpo", "entropy_target": 4.0, "entropy_step": 0.01}},
    "reference": {"objective": {"preset": "grpo", "beta": 0.05},
                  "learner": {"reference_every": 2, "reference_mix": 0.6}},
    "all": {"objective": {"preset": "gdpo", "beta": 0.05, "entropy_target": 4.0, "entropy_step": 0.01},
            "rewards": ["odd", "short"], "learner": {"reference_every": 2, "reference_mix": 0.6}},
    "lora-8bit": {"objective": {"preset": "grpo", "beta": 0.01}, "lora": {"rank": 4},
                  "learner": {"optimizer": "adamw-8bit"}},
    "sets": {"objective": {"preset": "dapo"}, "rewards": ["some"], "rollout": {"refills": 3},
             "curriculum": {"share": 0.5, "low": 0.3},
             "data": [{"name": "few", "task": "arithmetic", "args": {"ops": ["+"], "smallest": 1, "largest": 4}},
                      {"name": "more", "task": "arithmetic", "args": {"ops": ["-"], "smallest": 1, "largest": 6},
                       "weight": 2.0}]},
    "gdpo": {"objective": {"preset": "gdpo"}, "rewards": ["odd", "short"]},
    "ppo": {"objective": {"preset": "ppo"}, "critic": {"lr": 1e-2, "warmup_steps": 1}},
    "remax": {"objective": {"preset": "remax"}},
    "lora": {"objective": {"preset": "grpo", "beta": 0.01}, "lora": {"rank": 4}},
    "8bit": {"objective": {"preset": "grpo"}, "learner": {"optimizer": "adamw-8bit"}},
    "plain": {"objective": {"preset": "grpo", "beta": 0.01}, "kernels": "plain", "linear": "plain",
              "learner": {"microbatch_tokens": 60}},
    "opd": {"objective": {"preset": "opd", "distill": 0.5},
            "teacher": {"endpoint": "unix:{folder}/teacher.sock", "wait_s": 5},
            "checkpoint": {"every": 1, "background": False}},
    "waits": {"objective": {"preset": "grpo"}, "checkpoint": {"every": 1, "background": False}},
}  # fmt: skip


def recipe(folder: Path, kind: str, **sections: Any) -> Path:
    """Writes a model, rewards and a recipe of ``KINDS`` into ``folder``; returns the recipe."""
    from trew.models.quiet import quiet
    from trew.utils.toml import dump_table

    if not (folder / "model" / "config.json").exists():
        with quiet():
            tiny.model("llama", **tiny.wide("llama")).save_pretrained(folder / "model")
        tiny.tokenizer().save_pretrained(folder / "model")
        (folder / "reward.py").write_text(REWARDS)
    table = {**BASE, "model": str(folder / "model")}
    for name, value in [*KINDS[kind].items(), *sections.items()]:
        table[name] = {**table.get(name, {}), **value} if isinstance(value, dict) else value
    if "teacher" in table:
        table["teacher"] = {**table["teacher"], "endpoint": table["teacher"]["endpoint"].format(folder=folder)}
    table["rewards"] = [{"name": f"{folder}/reward.py:{name}"} for name in table.get("rewards", ["odd"])]
    path = folder / f"{kind}.toml"
    path.write_text(dump_table(table))
    return path


@contextlib.contextmanager
def served(folder: Path, kind: str) -> Iterator[None]:
    """The server of the teacher that runs of this kind in ``folder`` learn from; nothing where they have none."""
    if "teacher" not in KINDS[kind]:
        yield
        return
    from fake_vllm import FakeVllm, serving
    from trew.models.quiet import quiet

    with quiet():
        tiny.model("llama", seed=3, **tiny.wide("llama")).save_pretrained(folder / "teacher")
    tiny.tokenizer().save_pretrained(folder / "teacher")
    with serving(FakeVllm(folder / "teacher"), folder / "teacher.sock"):
        yield


# --------------------------------------------------------------------------------------------------------------------
# In the child


class Instants:
    """Says where the run is, and ends it where it is told to."""

    def __init__(self, control: Path):
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        name, _, count = self._map[2 * WRITER :].rstrip(b"\0").decode().partition(":")
        self._instant, self._left = name, int(count or 0)

    def say(self, phase: str, at: int = 0) -> str:
        before = self._map[at : at + WRITER].rstrip(b"\0").decode()
        self._map[at : at + WRITER] = phase.encode().ljust(WRITER, b"\0")
        return before

    def reached(self, instant: str) -> bool:
        """Whether this is the instant to die at."""
        if instant != self._instant:
            return False
        self._left -= 1
        return not self._left

    def die(self) -> None:
        os.killpg(0, signal.SIGKILL)
        time.sleep(60)

    def pass_by(self, instant: str) -> None:
        if self.reached(instant):
            self.die()

    def wrap(self, owner: Any, name: str, phase: str, *, at: int = 0) -> None:
        """``owner.name`` is ``phase``; its instants are ``phase/before`` and ``phase/after``."""
        real = getattr(owner, name)

        @functools.wraps(real)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            before = self.say(phase, at)
            self.pass_by(f"{phase}/before")
            result = real(*args, **kwargs)
            self.pass_by(f"{phase}/after")
            self.say("ending" if before == "loading" else before, at)
            return result

        setattr(owner, name, wrapper)


PHASES = (
    "collecting", "generation", "reward", "learning", "log-probs", "inner update", "watching", "metrics row",
    "completions", "evaluation", "checkpoint", "tensors", "manifest", "rotation", "export", "summary", "report",
)  # fmt: skip
INSTANTS = (*(f"{phase}/{when}" for phase in PHASES for when in ("before", "after")),
            "reward/within", "inner update/within", "metrics row/torn")  # fmt: skip
OF_A_TEACHER = tuple(f"{phase}/{when}" for phase in ("meeting", "teacher", "answer") for when in ("before", "after"))


def instants_of(kind: str) -> tuple[str, ...]:
    """The instants that runs of a kind come to. ``answer``: that of a teacher's server about one completion."""
    return (*INSTANTS, *(OF_A_TEACHER if "teacher" in KINDS[kind] else ()))


def watch(control: Path) -> None:
    """From here on the process says in ``control`` where it is."""
    import torch

    from trew.learner import Learner
    from trew.rewards.grading import Grading
    from trew.rollout import sync
    from trew.rollout.vllm.teacher import EndpointTeacher
    from trew.runs import RunFolder, checkpoint_files, tensor_files
    from trew.runs import folder as run_module
    from trew.training import loop, policy_program, teaching, watch
    from trew.training import run as run_of_training

    instants = Instants(control)
    instants.say("loading")
    append, optimizer_step, finish = run_module.append_synced, torch.optim.AdamW.step, Grading.finish

    def torn(path: Path, data: bytes) -> None:
        if path.name == "metrics.jsonl" and instants.reached("metrics row/torn"):
            append(path, data[: len(data) // 2])
            instants.die()
        append(path, data)

    def between(self: Any, *given: Any, **named: Any) -> Any:
        result = optimizer_step(self, *given, **named)
        instants.pass_by("inner update/within")  # weights have changed, counters have not
        return result

    def meanwhile(self: Any, *given: Any, **named: Any) -> Any:
        if instants.reached("reward/within"):
            threading.Timer(0.002, instants.die).start()
        return finish(self, *given, **named)

    run_module.append_synced, torch.optim.AdamW.step, Grading.finish = torn, between, meanwhile
    for owner, name, phase in (
        (sync, "generate", "generation"), (policy_program, "generate", "generation"), (Grading, "finish", "reward"),
        (Learner, "logprobs", "log-probs"),
        (Learner, "apply", "inner update"), (policy_program.PolicyProgram, "measure", "evaluation"),
        (RunFolder, "log", "metrics row"),
        (RunFolder, "write_rollouts", "completions"), (RunFolder, "write_eval", "completions"),
        (run_of_training, "export", "export"), (RunFolder, "write_summary", "summary"),
        (run_of_training, "write_report", "report"), (sync.SyncRollouts, "next", "collecting"),
        (loop, "train", "between phases"), (loop, "update", "learning"),
        (watch, "after_scoring", "watching"), (teaching, "meet", "meeting"),
        (EndpointTeacher, "logprobs", "teacher"), (EndpointTeacher, "_read", "answer"),
    ):  # fmt: skip
        instants.wrap(owner, name, phase)
    for owner, name, phase in (
        (checkpoint_files, "save", "checkpoint"), (tensor_files, "write", "tensors"),
        (checkpoint_files, "_complete", "manifest"), (checkpoint_files, "_rotate", "rotation"),
    ):  # fmt: skip
        instants.wrap(owner, name, phase, at=WRITER)


# --------------------------------------------------------------------------------------------------------------------
# In the parent


@dataclass
class Watched:
    """A started run: what it says, and its end."""

    command: Command
    control: Path

    @staticmethod
    def start(server: Server, folder: Path, *args: str | Path, instant: str = "") -> Watched:
        """``trew train ARGS`` in ``folder``, in a process group of its own."""
        control = folder / "control"
        control.write_bytes(b"\0" * 2 * WRITER + instant.encode().ljust(SIZE - 2 * WRITER, b"\0"))
        return Watched(server.start("train", *args, cwd=folder, TREW_WATCH=str(control)), control)

    @property
    def phase(self) -> tuple[str, str]:
        """What the main thread does, and the checkpoint writer; empty: nothing."""
        said = self.control.read_bytes()
        return said[:WRITER].rstrip(b"\0").decode(), said[WRITER : 2 * WRITER].rstrip(b"\0").decode()

    def wait_for(self, ready: Callable[[Watched], bool]) -> bool:
        """Whether it came to that; False where the run ended before."""
        end = time.monotonic() + PATIENCE
        while not self.command.ended() and not ready(self):
            assert time.monotonic() < end, self.command.text()
            time.sleep(0.0005)
        return not self.command.ended()

    def kill(self) -> tuple[str, str]:
        """SIGKILL for the whole group; the phases at that instant."""
        os.killpg(self.command.pid, signal.SIGKILL)
        self.command.wait()
        return self.phase


def run(server: Server, folder: Path, *args: str | Path, instant: str = "") -> tuple[int, str]:
    """A whole run: exit code (of a signal its negative number) and output."""
    watched = Watched.start(server, folder, *args, instant=instant)
    return watched.command.wait(), watched.command.text()


CLOCKS = {"seconds", "tokens_per_second"}


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what a clock said."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS and not k.endswith("/seconds")}
            for line in lines]  # fmt: skip


def differences(a: Path, b: Path) -> list[str]:
    """In what two finished runs differ that must not; bytes of weights and optimizer state, rows, completions."""
    import pyarrow.parquet as pq

    found = []
    places = ("final", f"checkpoints/{newest(a).name}")  # older ones may be waiting for the next rotation
    tensors = {run: sorted(p.relative_to(run) for at in places for p in (run / at).rglob("*.safetensors"))
               for run in (a, b)}  # fmt: skip
    if tensors[a] != tensors[b]:
        found.append(f"files of tensors: {list(map(str, tensors[a]))} and {list(map(str, tensors[b]))}")
    for name in set(tensors[a]).intersection(tensors[b]):
        if (a / name).read_bytes() != (b / name).read_bytes():
            found.append(f"{name}: other bytes")
    if rows(a) != rows(b):
        found.append("metrics.jsonl: other rows")
    for kind in ("rollouts", "evals"):
        names = [sorted(p.name for p in (run / kind).iterdir()) for run in (a, b)]
        if names[0] != names[1]:
            found.append(f"{kind}: {names[0]} and {names[1]}")
        for name in set(names[0]).intersection(names[1]):
            x, y = (pq.read_table(run / kind / name).drop_columns(["reward_seconds", "part_seconds"]) for run in (a, b))
            if not x.equals(y):
                found.append(f"{kind}/{name}: other completions")
    states = [_state(run) for run in (a, b)]
    for key, value in states[0].items():
        if value != states[1].get(key):
            found.append(f"state.json: {key}: {value!r} and {states[1].get(key)!r}")
    return found


def newest(run: Path) -> Path:
    """A run's last checkpoint."""
    return max(p for p in (run / "checkpoints").iterdir() if p.name.isdecimal())


def _state(run: Path) -> dict[str, Any]:
    """What the newest checkpoint remembers, without what a clock said."""
    from trew.training.changes import flatten

    meta = json.loads((newest(run) / "state.json").read_text())["meta"]
    record = meta.pop("record")  # sizes and hashes of files that have clocks' numbers in them
    table = flatten({**meta, "rows": record["rows"]["count"], "files": sorted(record["files"])})
    return {key: value for key, value in table.items() if key.rpartition(".")[2] not in CLOCKS}
