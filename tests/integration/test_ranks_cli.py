"""``trew train`` on several ranks: the run of one process, and what happens when ranks die, hang or are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiers
from forks import Command, Server, wait_for
from ranks_help import free_port, variables
from recipe_help import run_folder
from trew.distributed.launch import OUTCOME
from trew.distributed.pulse import FOLDER, Watch

REWARD = """
import time

def vowels(completions, completion_ids, **columns):
    return [round(sum(i % 2 for i in ids) / len(ids), 1) for ids in completion_ids]

def slow(completions, completion_ids, **columns):
    time.sleep(0.5)
    return vowels(completions, completion_ids)
"""
RECIPE = """
model = "lm"
chat_template = "plain"
steps = 4
seed = 1
kernels = "plain"
linear = "plain"
[data]
task = "arithmetic"
[[rewards]]
name = "reward.py:vowels"
[rollout]
prompts = 4
completions = 4
max_tokens = 8
[objective]
preset = "grpo"
[learner]
lr = 1e-3
inner_updates = 2
microbatch_tokens = 64
[eval]
size = 3
every = 2
[checkpoint]
every = 2
background = true
[track]
samples_every = 0
regrade_every = 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return run_folder(tmp_path_factory.mktemp("ranks"), RECIPE, reward=REWARD)


def start(
    server: Server, folder: Path, size: int, *args: str, hold: dict[int, str] | None = None, **options: Any
) -> list[Command]:
    """The ranks of a run, as torchrun would start them."""
    port, asked = free_port(), f"cluster.learner={size}"
    return [
        server.start(
            "train", "r.toml", *args, "--set", asked, cwd=folder, hold=(hold or {}).get(rank, ""),
            **(variables(rank, size, port) if size > 1 else {}), **options,
        )
        for rank in range(size)
    ]  # fmt: skip


def run(server: Server, folder: Path, size: int, *args: str, codes: tuple[int, ...] = (), **options: Any) -> str:
    """Runs all ranks to their end; what rank 0 printed."""
    commands = start(server, folder, size, *args, **options)
    found = tuple(command.wait() for command in commands)
    texts = [command.text() for command in commands]
    assert found == (codes or (0,) * size), "\n".join(texts)
    assert not any("Traceback" in text for text in texts), "\n".join(texts)
    return texts[0]


def rows(folder: Path, out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


def final(folder: Path, out: str) -> dict[str, torch.Tensor]:
    return load_file(folder / out / "final" / "model.safetensors")


TIMES = ("seconds", "tokens_per_second")


def same_run(folder: Path, one: str, other: str, *, exact: bool = False) -> None:
    tolerance = 0.0 if exact else 1e-5
    for a, b in zip(rows(folder, one), rows(folder, other), strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if not isinstance(value, float) or key.endswith(TIMES) or (key == "changed_share" and not exact):
                continue
            assert b[key] == pytest.approx(value, rel=tolerance, abs=tolerance), (a["step"], key)
    before, after = final(folder, one), final(folder, other)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=tolerance, msg=name)


@pytest.fixture(scope="module")
def alone(server, folder) -> str:
    server.run("train", "r.toml", "--out", "alone", cwd=folder)
    return "alone"


@pytest.fixture(scope="module")
def pair(server, folder) -> str:
    run(server, folder, 2, "--out", "pair", estimated=True)
    return "pair"


def test_a_run_of_two_ranks_is_the_run_of_one_process(server, folder, alone, pair):
    same_run(folder, alone, pair)
    config = json.loads((folder / pair / "final" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    names = {path.name for path in (folder / pair / "checkpoints" / "000004").iterdir()}
    assert {"model.part-1-of-2.safetensors", "optimizer.part-2-of-2.safetensors"} <= names
    memory = json.loads((folder / pair / "memory.json").read_text())
    assert [one["who"] for one in memory["planned"]["processes"]] == ["rank 0", "rank 1"]
    for number, one in enumerate(memory["measured"]):
        assert one["who"] == f"rank {number}"
        assert one["memory"].keys() >= {"loading", "generating", "training", "between"}


MIXED = (
    'data=[{name="a", task="arithmetic", args={ops=["+"]}}, {name="b", task="arithmetic", args={ops=["-"]}, weight=2}]',
    "curriculum.share=0.5", "curriculum.low=0.0", "curriculum.high=1.0",
)  # fmt: skip


SETTINGS = {"replicas": ("cluster.shard=none",), "adapters": ("lora.rank=2",), "sets": MIXED}


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.nightly
def test_replicas_adapters_and_mixtures_are_too(server, folder, case):
    settings = SETTINGS[case]
    one = () if settings[0].startswith("cluster") else settings
    name = settings[0].partition("=")[0]
    server.run("train", "r.toml", "--out", f"{name}-1", "--set", "steps=2", *one, cwd=folder)
    run(server, folder, 2, "--out", f"{name}-2", "--set", "steps=2", *settings)
    same_run(folder, f"{name}-1", f"{name}-2")
    exported(server, folder, f"{name}-2", step=2)


def exported(server: Server, folder: Path, out: str, *, step: int, last: bool = True) -> Path:
    """The model of a checkpoint, exported by one process; the last one is the run's final model to the bit."""
    target = folder / f"exported-{out}-{step}"
    server.run("export", "model", out, "--out", target.name, "--step", str(step), cwd=folder)
    if last:
        for path in sorted((folder / out / "final").rglob("*.safetensors")):
            found, wanted = load_file(target / path.relative_to(folder / out / "final")), load_file(path)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted), path.name
    return target


def test_one_process_exports_what_ranks_saved(server, folder, pair):
    newest = exported(server, folder, pair, step=4)
    earlier = exported(server, folder, pair, step=2, last=False)
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((newest / name).read_text()) == json.loads((folder / pair / "final" / name).read_text())
    a, b = (load_file(path / "model.safetensors") for path in (newest, earlier))
    assert not all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("pair", "--out", "lm"), "--out: lm already exists"),
        (("lm", "--out", "new"), "RUN: got lm, accepts the folder of a run"),
        (("pair", "--out", "new", "--step", "3"), "has no checkpoint of step 3; there are: 2, 4"),
        (("pair", "--out", "new", "--set", "lora.rank=2"), "trained on other weights"),
    ],
)
def test_what_cannot_be_exported_is_refused(server, folder, pair, args, says):
    command = server.start("export", "model", *args, cwd=folder)
    assert command.wait() == 2, command.text()
    assert says in command.text()
    assert "Traceback" not in command.text()
    assert not (folder / "new").exists()


def test_ranks_that_are_dealt_no_prompt_do_not_hold_up_the_others(server, folder):
    few = ("--set", "steps=1", "eval.size=1", "rollout.prompts=2", "checkpoint.every=0")
    server.run("train", "r.toml", "--out", "few-1", *few, cwd=folder)
    run(server, folder, 3, "--out", "few-3", *few)
    same_run(folder, "few-1", "few-3")


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 1), (1, 2)])
@pytest.mark.nightly
def test_a_run_goes_on_with_another_number_of_ranks(server, folder, alone, before, after):
    out = f"from-{before}-to-{after}"
    run(server, folder, before, "--out", out, "--set", "steps=2")
    said = run(server, folder, after, "--out", out, "--resume", "--set", "steps=4")
    assert "continuing after step 2" in said
    assert f"cluster.learner: the run was started with {before}, now it is {after}" in said
    last, want = rows(folder, out)[-1], rows(folder, alone)[-1]
    assert last["step"] == want["step"] == 4
    for name, tensor in final(folder, alone).items():
        torch.testing.assert_close(final(folder, out)[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_a_rank_that_is_killed_is_told_and_the_run_goes_on_to_the_bit(server, folder, pair):
    out = "killed"
    ranks = start(server, folder, 2, "--out", out, hold={1: "trew.training.loop:update:3"})
    ranks[1].held().kill(signal.SIGKILL)
    assert ranks[0].wait() == 1
    assert "the connection to another rank broke" in ranks[0].text()
    assert "Traceback" not in ranks[0].text()
    run(server, folder, 2, "--out", out, "--resume")
    same_run(folder, pair, out, exact=True)


def goes_on(server: Server, folder: Path, pair: str, out: str) -> None:
    """In the nightly tests: the checkpoint is the one that the test above resumes from, whoever died after it."""
    if tiers.tier() == "nightly":
        run(server, folder, 2, "--out", out, "--resume")
        same_run(folder, pair, out, exact=True)


def test_ranks_that_died_before_their_run_began_do_what_they_were_asked_to(server, folder, tmp_path):
    """Started again, they went on with the run that was to be overwritten, or that nobody had asked to resume."""

    def again(place: str, *args: str) -> str:
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / OUTCOME).unlink(missing_ok=True)
        shared = {FOLDER: str(tmp_path / place), "TORCHELASTIC_RESTART_COUNT": "1"}
        return run(server, folder, 2, *few, *args, **shared)

    few = ("--out", "early", "--set", "steps=1", "eval.size=1", "rollout.prompts=2")
    server.run("train", "r.toml", *few, "learner.lr=1e-5", cwd=folder)
    assert "early already holds a finished run" in again("refused")
    assert "continuing" not in again("begun", "learner.lr=1e-3", "--overwrite")
    assert "lr = 0.001" in (folder / "early" / "config.toml").read_text()
    assert "early is already complete: 1 of 1 steps" in again("begun", "--overwrite")  # its rank died at the very end


def test_a_driver_that_is_killed_leaves_no_rank_behind(server, folder, pair):
    ranks = start(server, folder, 2, "--out", "driver", hold={0: "trew.training.loop:update:3"})
    ranks[0].held().kill(signal.SIGKILL)
    assert ranks[1].wait() == 1
    assert "the connection to another rank broke" in ranks[1].text()
    goes_on(server, folder, pair, "driver")


def test_a_checkpoint_that_cannot_be_written_ends_all_ranks_at_once(server, folder):
    """The others waited five minutes for the folder that was to hold their parts."""
    ranks = start(server, folder, 2, "--out", "unsaved", hold={0: "trew.training.loop:update:2"})
    ranks[0].held()
    (folder / "unsaved" / "checkpoints").rmdir()
    (folder / "unsaved" / "checkpoints").write_text("")
    ranks[0].go()
    begun = time.monotonic()
    assert ranks[0].wait() == 1
    ranks[1].wait()
    assert time.monotonic() - begun < 100
    assert "the checkpoint of step 2 could not be written: File exists" in ranks[0].text()


def test_ranks_that_hang_print_where_and_are_ended(server, folder, pair, tmp_path):
    """A rank that stands still, beside one that waits for it, as the process that starts ranks sees them."""
    told: list[str] = []
    shared = {FOLDER: str(tmp_path)}
    ranks = start(server, folder, 2, "--out", "hanging", hold={1: "trew.training.loop:update:3"}, **shared)
    ranks[1].held()
    pulses = [tmp_path / "pulse-0", tmp_path / "pulse-1"]
    wait_for(lambda: all(path.exists() and time.time() - path.stat().st_mtime > 1 for path in pulses), ranks[0].text)
    with Watch(tmp_path, 1.0, told.append):
        assert [rank.wait() for rank in ranks] == [-signal.SIGABRT, -signal.SIGABRT], told
    assert told[0].startswith("no progress for 1 s (cluster.hang_s) on rank 0, 1; each prints where it is")
    assert "most recent call first" in ranks[1].text()
    assert "in held" in ranks[1].text()
    goes_on(server, folder, pair, "hanging")


def test_ranks_that_are_stopped_save_and_go_on_to_the_bit(server, folder, pair):
    ranks = start(server, folder, 2, "--out", "stopped", hold={0: "trew.training.loop:update:2"})
    ranks[0].held()
    for rank in ranks:
        rank.kill(signal.SIGTERM)  # as torchrun's agent and batch systems do
    ranks[0].go()
    assert [rank.wait() for rank in ranks] == [143, 0], ranks[0].text()
    assert "continue with --resume" in ranks[0].text()
    run(server, folder, 2, "--out", "stopped", "--resume")
    same_run(folder, pair, "stopped", exact=True)


LATE = [(3, "saved step 1 of 4"), (4, "during an evaluation")]


@pytest.mark.parametrize(("round", "said"), tiers.some(LATE, ["3"], name=lambda case: str(case[0])))
def test_ranks_that_are_stopped_while_one_still_generates_save_too(server, folder, pair, round, said):
    out = f"late-{round}"
    late = {1: f"trew.distributed.orders:_generated:{round}"}
    ranks = start(server, folder, 2, "--out", out, "--set", "stop.grace_s=0.5", hold=late)
    ranks[1].held()
    time.sleep(0.5)  # rank 0 has generated its share, and waits for the other one's
    for rank in ranks:
        rank.kill(signal.SIGTERM)
    time.sleep(1.5)  # past the grace
    ranks[1].go()
    assert [rank.wait() for rank in ranks] == [143, 0], ranks[0].text()
    assert said in ranks[0].text()
    run(server, folder, 2, "--out", out, "--resume")
    same_run(folder, pair, out, exact=True)


PROGRAM = """
import sys, trew
from trew.config import load
if __name__ == "__main__":
    print("summary", trew.train(load("r.toml", sys.argv[1:])).get("steps"))
"""


@pytest.mark.nightly
def test_a_program_that_calls_train_is_run_on_all_ranks(folder):
    (folder / "program.py").write_text(PROGRAM)
    port, given = free_port(), ("out=program", "cluster.learner=2", "steps=1")
    ranks = [
        subprocess.Popen([sys.executable, "program.py", *given], cwd=folder, text=True, stdout=subprocess.PIPE,
                         env={**os.environ, "OMP_NUM_THREADS": "1", **variables(rank, 2, port)})
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "summary 1" in said[0]
    assert "summary None" in said[1]


def test_other_ranks_than_asked_for_are_refused(server, folder):
    port = free_port()
    ranks = [
        server.start("train", "r.toml", "--out", "no", "--set", "cluster.learner=3", cwd=folder,
                     **variables(rank, 2, port))
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.wait() for rank in ranks] == [2, 0], ranks[0].text()
    assert "cluster.learner: got 3, but 2 ranks were started; set cluster.learner = 2" in ranks[0].text()
    assert not (folder / "no").exists()


def test_a_bad_recipe_ends_all_ranks_at_once(server, folder):
    said = run(server, folder, 2, "--out", "bad", "--set", "rollout.prompts=0", codes=(2, 0))
    assert "rollout.prompts: got 0" in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("learner.optimizer=adamw-8bit", "accepts 'adamw' or 'adamw-offload' while weights are sharded"),
        ("lora.base=nf4", "accepts 'float32' or 'bfloat16' while weights are sharded"),
        ("learner.compile=true", "accepts false while weights are sharded"),
        ("cluster.shard=fsdp cluster.learner=1", "only its default while cluster.learner = 1"),
        ("cluster.shard=none cluster.offload=all", "where every rank has all weights"),
        ("cluster.shard=none cluster.offload=optimizer", "where every rank has all weights"),
        ("cluster.learner=-1", "cluster.learner: got -1, accepts a whole number of at least 1, or 0 for"),
        ("cluster.restarts=-1", "cluster.restarts: got -1, accepts 0 or more"),
        ("cluster.hang_s=0.0", "cluster.hang_s: got 0.0, accepts a number of seconds above 0"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(server, folder, setting, said):
    settings = ["cluster.learner=2", "lora.rank=2", *setting.split()]
    text = server.run("train", "r.toml", "--dry-run", "--set", *settings, cwd=folder, code=2)
    assert said in text


class Started:
    """``trew train`` that starts its ranks itself, by torchrun's agent; use as a context."""

    def __init__(self, folder: Path, out: str, *settings: str) -> None:
        self.folder, self.out, self.log = folder, out, folder / f"{out}.log"
        self._command = [sys.executable, "-m", "trew", "train", "r.toml", "--out", out, "--set", "cluster.learner=2",
                         "rewards=[{name='reward.py:slow'}]", *settings]  # fmt: skip

    def __enter__(self) -> Started:
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self._command, cwd=self.folder, env=env, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its ranks end with it

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def done(self) -> int:
        """Steps in the metrics."""
        path = self.folder / self.out / "metrics.jsonl"
        return sum("loss" in line for line in path.read_text().splitlines()) if path.exists() else 0

    def rank(self, number: int) -> int:
        """The rank's process; 0 where there is none."""
        found = (p for p in Path("/proc").iterdir() if p.name.isdecimal())
        return max((int(p.name) for p in found if _is_rank(p, self.process.pid, number)), default=0)

    def hit(self, number: int, signum: int, *, after: int, other_than: int = 0) -> int:
        """Sends a signal to a rank once so many steps are done."""

        def there() -> bool:
            return self.done() >= after and self.rank(number) not in (0, other_than)

        patience(lambda: there() or self.process.poll() is not None, self.text)
        assert self.process.poll() is None, self.text()
        pid = self.rank(number)
        assert pid > 0
        os.kill(pid, signum)
        return pid


@pytest.mark.nightly
def test_ranks_that_die_or_hang_are_started_again_until_the_run_is_done(folder, pair):
    """One rank is killed, later one is stopped (it hangs); the run ends as if nothing had happened, to the bit."""
    with Started(folder, "started", "cluster.hang_s=4", "steps=8", "checkpoint.every=1") as run:
        first = run.hit(1, signal.SIGKILL, after=1)
        run.hit(1, signal.SIGSTOP, after=2, other_than=first)
        assert run.process.wait(300) == 0, run.text()
    assert "no progress for 4 s (cluster.hang_s) on rank" in run.text()
    assert [row["step"] for row in rows(folder, "started") if "loss" in row] == list(range(1, 9))
    for a, b in zip(rows(folder, pair)[:4], rows(folder, "started")[:4], strict=True):
        assert (a["step"], a.get("loss"), a.get("grad_norm")) == (b["step"], b.get("loss"), b.get("grad_norm"))


@pytest.mark.nightly
def test_a_closed_terminal_lets_ranks_save_however_often_it_is_told(folder):
    with Started(folder, "closed", "steps=50", "checkpoint.every=0") as run:
        patience(lambda: run.done() >= 1, run.text)
        for _ in range(3):
            run.process.send_signal(signal.SIGHUP)
            time.sleep(0.4)
        assert run.process.wait(120) == 128 + signal.SIGHUP, run.text()
    assert "saved step" in run.text()


@pytest.mark.nightly
def test_a_rank_that_dies_too_often_is_named(folder):
    with Started(folder, "often", "steps=50", "cluster.restarts=0") as run:
        run.hit(1, signal.SIGKILL, after=1)
        assert run.process.wait(120) == 1, run.text()
    assert "rank 1 on " in run.text()
    assert "killed by SIGKILL (out of memory, or by hand)" in run.text()
    assert "what ranks printed is in often/ranks" in " ".join(run.text().split())
    assert "continue with --resume" in run.text()


def patience(condition: Any, what: Any) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def _is_rank(process: Path, parent: int, rank: int) -> bool:
    try:
        mine = int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent
        return mine and f"\0RANK={rank}\0" in "\0" + (process / "environ").read_text()
    except OSError:
        return False
