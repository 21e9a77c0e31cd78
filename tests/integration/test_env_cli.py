"""``trew env``: environments are listed, played by hand and checked before anything is trained."""

from __future__ import annotations

import io
import re

import pytest

import tiers
import tiny
from trew.cli import main as cli

GOOD = """
import random

def count(row, seed, *, most=3):
    at = random.Random(seed).randint(1, 9)
    for _ in range(most):
        reply = yield f"What comes after {at}?"
        at += 1
    return float(reply.text == str(at))
"""

BAD = """
import os, time
from trew.env import Say

def fickle(row, seed):
    reply = yield f"the clock says {time.perf_counter_ns()}"
    return 1.0

def fragile(row, seed):
    reply = yield f"number {seed}"
    return 1.0 / len(reply.text)

def leaves(row, seed):
    reply = yield f"number {seed}"
    os._exit(3)

def small(row, seed):
    number = seed.to_bytes(4, "big")[-1]
    reply = yield f"number {number}"
    return float(reply.text == str(number))
"""

ROWS = """
def asks(row, seed):
    reply = yield row["prompt"]
    return float(reply.text == row["answer"])

def numbered(row, seed):
    reply = yield f"{row['prompt']} of {seed}"
    return float(reply.text == str(row["episode"]))
"""

TOOLS = '''
def double(x: int) -> int:
    """Doubles a number.

    Args:
        x: the number
    """
    return 2 * x

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one
        b: the other
    """
    if a < 0:
        raise ValueError("a is below 0")
    return a + b

def silent(row, seed):
    yield f"number {seed}"

class Words:
    def reset(self, **row):
        self.found = False

    def guess(self, word: str) -> str:
        """Guesses.

        Args:
            word: the word
        """
        self.found = word == "apple"
        return f"not {word}"

    def get_reward(self):
        return float(self.found)
'''


def trew(*args):
    with pytest.raises(SystemExit) as end:
        cli.main(["env", *map(str, args)])
    return end.value.code


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.py").write_text(GOOD + BAD + TOOLS)
    return tmp_path / "own.py"


def test_the_built_in_environments_are_listed(capsys):
    assert trew() == 0
    assert {"guess", "grid", "calculator"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}


def test_a_name_alone_describes_it(capsys):
    assert trew("guess") == 0
    assert "largest = 9, turns = 4, inside = 0.1" in capsys.readouterr().out


@pytest.mark.parametrize("name", tiers.some(["guess", "grid", "calculator"], ["guess"]))
def test_the_built_in_environments_pass_their_own_check(name, capsys):
    assert trew(name, "--check", "--episodes", 12) == 0, capsys.readouterr().out


def test_an_environment_that_does_not_take_a_run_s_seeds_is_found(file, capsys):
    assert trew(f"{file}:small", "--check", "--episodes", 8) == 1
    said = capsys.readouterr().out
    assert "ok      no episode crashes" in said
    assert "FAILED  large seeds do not crash it: 16 of 16" in said


def test_an_environment_is_played_by_hand(file, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n0\n"))
    assert trew(f"{file}:count", "--play", "--seed", 1) == 0
    assert "The episode is over after 3 replies; its reward is 0." in capsys.readouterr().out


def test_an_empty_line_leaves(file, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert trew(f"{file}:count", "--play") == 0
    assert "You left after 0 replies" in capsys.readouterr().out


def test_what_is_not_judged_is_not_shown_as_a_reward_of_0(file, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert trew(f"{file}:silent", "--play") == 0
    assert "over after 1 reply; it has no reward, so a run would not judge it." in capsys.readouterr().out


def test_tools_are_called_by_hand(file, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('double: 4\ndouble: x\nadd: {"a": 1, "b": 2}\nadd: 3\nbye\n'))
    tools = ["--tools", f"{file}:double", "--tools", f"{file}:add"]
    assert trew(f"{file}:silent", "--play", *tools) == 0
    out = capsys.readouterr().out
    assert 'add: {"a": ..., "b": ...}' in out  # how they are called
    said = [line.removeprefix("you> tool: ") for line in out.splitlines() if line.startswith("you> tool: ")]
    assert said[0::2] == ["8", "3"]
    assert "'x' must be an integer" in said[1]
    assert "the call cannot be read: add: " in said[3]


def test_a_class_of_trl_is_played_by_hand_and_judged_when_the_turns_are_used_up(file, capsys, monkeypatch):
    for replies, turns, said in (
        ("guess: apple\ndone\n", 20, "over after 2 replies; its reward is 1."),
        ("guess: pear\nguess: apple\n", 2, "The budget of 2 replies is used up; its reward is 1."),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(replies))
        assert trew(f"trl:{file}:Words", "--play", "--turns", turns) == 0
        assert said in capsys.readouterr().out


def test_a_check_calls_tools(file, capsys):
    trew(f"{file}:silent", "--check", "--episodes", 40, "--tools", f"{file}:add")
    out = capsys.readouterr().out
    [(calls, errors)] = re.findall(r"(\d+) tool calls, (\d+) errors such as .error: add: ", out)
    assert int(calls) > int(errors) > 0


def test_nothing_more_is_checked_where_every_episode_crashes(file, capsys):
    assert trew(f"{file}:leaves", "--check", "--episodes", 2) == 1
    assert "equal seeds" not in capsys.readouterr().out  # which nothing at all would fulfil


def test_an_environment_gets_the_rows_that_a_run_gives_it(tmp_path, capsys):
    """With the prompt among them: without it, one that reads it was said to crash."""
    path, data = tmp_path / "rows.py", tmp_path / "rows.jsonl"
    path.write_text(ROWS)
    data.write_text('{"prompt": "What is 3 + 4?", "answer": "7"}\n{"prompt": "Say yes.", "answer": "yes"}\n')
    assert trew(f"{path}:asks", "--check", "--episodes", 4, "--data", data) == 0, capsys.readouterr().out
    assert trew(f"{path}:numbered", "--check", "--episodes", 4) == 0, capsys.readouterr().out


def test_an_environment_that_does_not_repeat_is_found(file, capsys):
    assert trew(f"{file}:fickle", "--check", "--episodes", 4) == 1
    out = capsys.readouterr().out
    assert "FAILED  equal seeds give equal episodes: 4 of 4 differ" in out
    assert "seed 0: the opening is 'the clock says" in out


def test_an_environment_that_a_reply_crashes_is_found(file, capsys):
    assert trew(f"{file}:fragile", "--check", "--episodes", 40) == 1
    out = capsys.readouterr().out
    assert "FAILED  no episode crashes" in out
    assert "ZeroDivisionError" in out


def test_an_environment_that_exits_is_found(file, capsys):
    assert trew(f"{file}:leaves", "--check", "--episodes", 2) == 1
    assert "its process exited with code 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gess",), "did you mean 'guess'"),
        (("guess", "--check", "--play"), "got both, accepts one of them"),
        (("guess", "--check", "--episodes", 0), "--episodes: got 0"),
        (("trl:none.py:A",), "environment.name: trl:none.py:A: "),
        (("guess", "--set", "size=3"), "unexpected keyword argument 'size'"),
        (("guess", "--set", "largest"), "expected key=value"),
        (("guess", "--set", "largest=x"), "environment.args.largest: got 'x', accepts a whole number of at least 1"),
        (("guess", "--set", "turns=true"), "environment.args.turns: got True"),
        (("guess", "--set", "inside=-1"), "environment.args.inside: got -1, accepts a number of at least 0"),
        (("guess", "--set", "hints=tru"), "environment.args.hints: got 'tru', accepts 'true', 'random'"),
    ],
)
def test_bad_input_is_refused_with_one_message(args, message, capsys):
    assert trew(*args) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_an_opening_that_raises_is_one_message_of_one_line(tmp_path, capsys):
    tiny.save(tmp_path / "lm")
    (tmp_path / "own.py").write_text("def e(row, seed):\n    raise ValueError('no board')\n    yield 'hi'\n")
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'model = "{tmp_path / "lm"}"\n[environment]\nname = "{tmp_path / "own.py"}:e"\nworkers = 1\n')
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(recipe), "--dry-run", "--set", "objective.beta=0"])
    [said] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert end.value.code == 2
    assert f"' failed: raised ({tmp_path / 'own.py'}:2): ValueError: no board; trew env " in said


def test_the_number_of_episodes_to_train_on_does_not_matter_to_an_evaluation_on_data(tmp_path, capsys):
    recipe = tmp_path / "r.toml"
    recipe.write_text('model = "m"\n[environment]\nname = "guess"\nepisodes = 5\n')
    with pytest.raises(SystemExit):
        cli.main(["eval", str(tmp_path / "none"), "--recipe", str(recipe), "--data", str(tmp_path / "x.jsonl")])
    said = capsys.readouterr()
    assert "x.jsonl" in said.out + said.err
    assert "environment.episodes" not in said.out + said.err
