"""Signals to real processes at chosen places: what is saved, how they exit, what is left, what a resume gives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

import forks
import tiny
from forks import Command, Server, gone, wait_for
from recipe_help import recipe, training_rows
from terminals import Terminal
from trew.runs import checkpoint_files

SHORT = {
    "rollout": {"prompts": 2, "max_tokens": 4}, "eval": {"size": 2, "every": 3},
    "checkpoint": {"every": 10, "background": False}, "track": {"regrade_every": 0},
}  # fmt: skip

# Where the file "hang" lies, the function waits for as long as it is there.
REWARD = """
import os, time
def odd(completions, completion_ids, **columns):
    if os.path.exists("hang"):
        open("hanging", "w").close()
    while os.path.exists("hang"):
        time.sleep(0.005)
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]
"""
GENERATE = "trew.rollout.torch_engine.engine:TorchEngine.submit"  # call 1 is the evaluation before training
LEARN = "trew.learner.step:Learner.accumulate"


@pytest.fixture(scope="module")
def place(tmp_path_factory, server) -> Path:
    """A folder with a recipe, and a run of it that nobody disturbed."""
    folder = tmp_path_factory.mktemp("signals")
    tiny.save(folder / "model", "llama")
    (folder / "reward.py").write_text(REWARD)
    (folder / "r.toml").write_text(recipe(folder / "model", **SHORT))
    server.run("train", "r.toml", "--out", "whole", cwd=folder)
    return folder


@pytest.fixture
def out(place, request):
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    yield name
    for left in ("hang", "hanging"):
        (place / left).unlink(missing_ok=True)
    shutil.rmtree(place / name, ignore_errors=True)


def steps(run: Path) -> list[int]:
    return [row["step"] for row in training_rows(run)]


def saved(run: Path) -> int:
    """The newest checkpoint's step; all of it verified."""
    loaded, messages = checkpoint_files.load_latest(run / "checkpoints")
    assert messages == []
    assert loaded is not None
    return loaded[0]


def resumed_equals_whole(server: Server, place: Path, out: str) -> None:
    server.run("train", "r.toml", "--out", out, "--resume", cwd=place)
    weights = [(place / run / "final" / "model.safetensors").read_bytes() for run in ("whole", out)]
    assert weights[0] == weights[1]
    assert steps(place / out) == [1, 2, 3, 4]


def stopped(command: Command, signum: int) -> str:
    """Its words, after it ended as asked: 128 + the signal's number, one line, nothing of it left."""
    family = command.family()
    assert command.wait() == 128 + signum, command.text()
    wait_for(lambda: gone(family), lambda: str(family))
    assert "Traceback" not in command.text()
    assert command.text().count("trew: interrupted") == 1
    return command.text()


# ------------------------------------------------------------------------------------------------- a run, asked once


@pytest.mark.parametrize(
    ("hold", "name", "settings"),
    [
        (f"{GENERATE}:3", "SIGTERM", ()),
        (f"{LEARN}:2", "SIGINT", ()),
        pytest.param(f"{LEARN}:2", "SIGHUP", (), marks=pytest.mark.nightly),
        pytest.param(f"{LEARN}:2", "SIGUSR1", (), marks=pytest.mark.nightly),
        (f"{LEARN}:2", "SIGUSR2", ("stop.signals=['SIGUSR2']",)),
    ],
)
def test_the_step_is_finished_and_saved(server, place, out, hold, name, settings):
    signum = signal.Signals[name]
    command = server.start("train", "r.toml", "--out", out, "--set", "steps=4", *settings, cwd=place, hold=hold).held()
    command.kill(signum).says("stopping after this step").go()
    assert "saved step 2 of 4; continue with --resume" in stopped(command, signum)
    assert saved(place / out) == 2
    assert steps(place / out) == [1, 2]


def test_a_step_that_takes_too_long_is_left_out(server, place, out):
    """In generation, and nobody lets it go on."""
    args = ("train", "r.toml", "--out", out, "--set", "stop.grace_s=0.05")
    command = server.start(*args, cwd=place, hold=f"{GENERATE}:4").held()
    assert "saved step 2 of 4" in stopped(command.kill(signal.SIGTERM), signal.SIGTERM)
    assert saved(place / out) == 2
    resumed_equals_whole(server, place, out)


@pytest.mark.parametrize("calls", ["step", "group"])
def test_a_reward_that_hangs_is_not_waited_for(server, place, out, calls):
    """In the main thread, or beside it while other groups are generated."""
    rewards = f"rewards=[{{name='reward.py:odd', calls='{calls}', timeout_s=600}}]"
    args = ("train", "r.toml", "--out", out, "--set", "stop.grace_s=0.05", rewards)
    command = server.start(*args, cwd=place, hold=f"{LEARN}:1")
    command.held()
    (place / "hang").touch()
    command.go()
    wait_for((place / "hanging").exists, command.text)
    stopped(command.kill(signal.SIGTERM), signal.SIGTERM)
    assert saved(place / out) == 1


def test_an_update_is_never_left_half_done(server, place, out):
    """The grace is over in the middle of it: it is finished all the same, since weights may have moved."""
    args = ("train", "r.toml", "--out", out, "--set", "stop.grace_s=0.01")
    command = server.start(*args, cwd=place, hold=f"{LEARN}:2").held().kill(signal.SIGTERM)
    command.says("stopping after this step")
    threading.Event().wait(0.1)  # longer than the grace; a handler that gave up would have done so
    assert not command.ended()
    stopped(command.go(), signal.SIGTERM)
    assert saved(place / out) == 2


def test_an_evaluation_is_left_at_once(server, place, out):
    command = server.start(
        "train", "r.toml", "--out", out, cwd=place, hold="trew.training.policy_program:evaluate:2"
    ).held()
    assert "during an evaluation" in stopped(command.kill(signal.SIGTERM), signal.SIGTERM)
    assert saved(place / out) == 3
    resumed_equals_whole(server, place, out)


def test_loading_is_left_at_once_and_the_folder_is_free(server, place, out):
    command = server.start("train", "r.toml", "--out", out, cwd=place, hold="trew.training.planning:load:1").held()
    stopped(command.kill(signal.SIGTERM), signal.SIGTERM)
    server.run("train", "r.toml", "--out", out, "--set", "steps=1", "eval.size=1", cwd=place)


def test_a_signal_while_saving_saves_once(server, place, out):
    args = ("train", "r.toml", "--out", out, "--set", "checkpoint.every=2", "checkpoint.best=false")
    command = server.start(*args, cwd=place, hold="trew.runs.checkpoint_files:_sync:1").held()
    stopped(command.kill(signal.SIGTERM).says("stopping").go(), signal.SIGTERM)
    assert saved(place / out) == 2
    assert [p.name for p in (place / out / "checkpoints").iterdir()] == ["000002"]


def test_a_signal_to_every_process_leaves_the_reward_at_work(server, place, out):
    """Cluster managers send the signal to all processes of a job."""
    command = server.start("train", "r.toml", "--out", out, cwd=place, hold=f"{LEARN}:1").held()
    (place / "hang").touch()
    command.go()
    wait_for((place / "hanging").exists, command.text)
    family = command.family()
    assert len(family) > 1
    for signum in (signal.SIGUSR1, signal.SIGTERM):
        for pid in family - {command.pid}:
            os.kill(pid, signum)
    command.kill(signal.SIGTERM).says("stopping")
    (place / "hang").unlink()
    stopped(command, signal.SIGTERM)
    assert steps(place / out) == [1, 2]
    lines = [(place / run / "metrics.jsonl").read_text().splitlines() for run in ("whole", out)]
    rewards = [[json.loads(line).get("reward") for line in part] for part in lines]
    assert rewards[0][: len(rewards[1])] == rewards[1]


def test_what_was_started_with_nohup_stays_deaf_to_a_closed_terminal(server, place, out):
    command = server.start("train", "r.toml", "--out", out, cwd=place, hold=f"{LEARN}:2", NOHUP="1").held()
    assert command.kill(signal.SIGHUP).go().wait() == 0


# ------------------------------------------------------------------------------------------------ a run, asked twice


def test_the_second_ends_it_at_once(server, place, out):
    args = ("train", "r.toml", "--out", out, "--set", "checkpoint.every=1")
    command = server.start(*args, cwd=place, hold=f"{LEARN}:3").held()
    family = command.family()
    command.kill(signal.SIGTERM).says("once more stops now")
    wait_for(lambda: command.kill(signal.SIGTERM).ended(), command.text)
    assert command.wait() == 143
    wait_for(lambda: gone(family), lambda: str(family))
    assert saved(place / out) == 2
    resumed_equals_whole(server, place, out)


def test_two_at_once_are_one(server, place, out):
    """timeout(1) signals its child, and then its child's whole group. (Two of one kind may arrive as one.)"""
    command = server.start("train", "r.toml", "--out", out, cwd=place, hold=f"{LEARN}:2").held()
    command.kill(signal.SIGTERM).kill(signal.SIGINT).says("stopping").go()
    assert command.wait() in (143, 130)
    assert saved(place / out) == 2


# -------------------------------------------------------------------------------------------------- other commands

PAIRS = [{"prompt": f"question {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(8)]
COMMANDS = {
    "eval": (["eval", "model", "--recipe", "r.toml", "--size", "2"], "trew.eval:evaluate:1"),
    "rewards test": (["rewards", "test", "reward.py:odd", "--task", "arithmetic"], ""),
    "data golds": (["data", "prepare", "countdown", "--eval-size", "3", "--set", "size=4"],
                   "trew.utils.console:Bar.advance:1"),
    "train-reward": (["train-reward", "--model", "model", "--pairs", "pairs.jsonl", "--out", "OUT"],
                     "trew.reward_training.program:measure:1"),
    "train-reward, a step": (["train-reward", "--model", "model", "--pairs", "pairs.jsonl", "--out", "OUT",
                              "--set", "learner.batch=2"],
                             "trew.reward_training.program:RewardProgram.step:2"),
    "iterate": (["iterate", "rounds.toml", "--set", "out=OUT"], f"{GENERATE}:1"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_long_command_ends_cleanly(server, place, out, name):
    args, hold = COMMANDS[name]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    rounds = {"rounds": 1, "prompts": 2, "verifier": {"name": "gsm8k"}}
    (place / "rounds.toml").write_text(recipe(place / "model", **SHORT, rewards=[], iterate=rounds))
    if not hold:
        (place / "hang").touch()
    command = server.start(*[a.replace("OUT", out) for a in args], cwd=place, hold=hold)
    if hold:
        command.held()
    else:
        wait_for((place / "hanging").exists, command.text)
    command.kill(signal.SIGTERM)
    if name.endswith("a step"):
        command.says("stopping after this step; once more stops now").go()  # and not "or in 20 s without it"
    stopped(command, signal.SIGTERM)
    if name.endswith("a step"):
        assert "continue with --resume" in command.text()
    shutil.rmtree(place / "data", ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------- terminals


def cursor_is_shown(text: str) -> bool:
    return text.rfind("\x1b[?25h") >= text.rfind("\x1b[?25l") >= 0


@pytest.mark.parametrize("times", [1, 2])
def test_the_cursor_is_back(server, place, out, times):
    with Terminal() as terminal:
        args = ("train", "r.toml", "--out", out)
        command = server.start(*args, cwd=place, hold=f"{LEARN}:1", terminal=terminal.path, TERM="xterm").held()
        assert not cursor_is_shown(terminal.text)
        command.kill(signal.SIGINT)
        wait_for(lambda: "once more" in terminal.text)
        if times == 1:
            command.go()
        else:
            wait_for(lambda: command.kill(signal.SIGINT).ended())
        assert command.wait() == 130
        wait_for(lambda: cursor_is_shown(terminal.text), lambda: repr(terminal.text[-300:]))


def test_a_closed_terminal_saves_the_run(server, place, out):
    """SIGHUP comes, and nothing can be printed any more."""
    with Terminal() as terminal:
        args = ("train", "r.toml", "--out", out)
        command = server.start(*args, cwd=place, hold=f"{LEARN}:2", terminal=terminal.path, TERM="xterm").held()
        os.kill(command.pid, signal.SIGSTOP)
        terminal.close()
        os.kill(command.pid, signal.SIGCONT)
        command.go()
        assert command.wait() == 129
    assert saved(place / out) >= 2  # the kernel may take a while to say that the terminal is gone


def test_output_that_nobody_reads_any_more_does_not_stop_a_run(server, place, out):
    with Terminal() as terminal:
        args = ("train", "r.toml", "--out", out)
        command = server.start(*args, cwd=place, hold=f"{LEARN}:2", terminal=terminal.path, NOHUP="1").held()
        terminal.close()
        assert command.go().wait() == 0
    assert steps(place / out) == [1, 2, 3, 4]


def test_the_forks_are_real_processes():
    assert forks.gone({2**22 + 1})
    assert not forks.gone({os.getpid()})
