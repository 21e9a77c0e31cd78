"""``trew rewards serve`` and runs whose rewards it computes, through the command line."""

from __future__ import annotations

import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tiny
from forks import Command, gone, wait_for
from recipe_help import recipe, training_rows

TOKEN = "correct-horse-9-battery-7-staple"
REWARD = """
def odd(completions, completion_ids, **columns):
    return [sum(i % 2 for i in ids) / len(ids) + len(text) / 7 for ids, text in zip(completion_ids, completions)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def written(model: Path, tmp_path: Path) -> Path:
    """A recipe with a function and a built-in that has workers."""
    (tmp_path / "reward.py").write_text(REWARD)
    path = tmp_path / "r.toml"
    path.write_text(recipe(model, rewards=[{"name": "reward.py:odd"}, {"name": "math", "weight": 0.5}], steps=3))
    return path


@pytest.fixture
def serve(server: Any, written: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[Command] = []

    def begin(name: str, hold: str = "", token: str = TOKEN, recipe: Path = written) -> tuple[Command, str]:
        out = tmp_path / name
        command = server.start(
            "rewards", "serve", "--recipe", recipe, "--port", "0", "--out", out, cwd=tmp_path, hold=hold,
            **({"TREW_REWARDS_TOKEN": token} if token else {}),
        )  # fmt: skip
        started.append(command)
        (address,) = re.findall(r'^reward_hosts = \["(.*)"\]$', command.says("reward_hosts = [").text(), re.MULTILINE)
        return command, address

    yield begin
    for command in started:
        if not command.ended():
            command.kill(signal.SIGKILL)


def judged(run: Path) -> list[Any]:
    """Every completion of a run with all that was said about it, but for the time that took."""
    rows = [row for path in sorted((run / "rollouts").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in rows]


def test_a_host_that_is_killed_in_a_step_costs_nothing(serve, server, written, tmp_path):
    """kill -9 of one of two hosts while it works: scores, weights and metrics are those of a run without hosts."""
    server.run("train", written, "--out", tmp_path / "here", cwd=tmp_path)
    held, first = serve("first", hold="trew.rewards.remote.host:RewardHost._done:3")
    _, second = serve("second")
    family = held.family()
    hosts = f'cluster.reward_hosts=["{first}", "{second}"]'
    command = server.start(
        "train", written, "--out", tmp_path / "there", "--set", hosts, cwd=tmp_path, TREW_REWARDS_TOKEN=TOKEN
    )
    held.held().kill(signal.SIGKILL).wait()
    assert command.wait() == 0, command.text()
    assert f"reward host {first}: " in " ".join(command.text().split())
    assert "its work is done by 1 other hosts" in " ".join(command.text().split())
    assert judged(tmp_path / "there") == judged(tmp_path / "here")
    assert [row["loss"] for row in training_rows(tmp_path / "there")] == [
        row["loss"] for row in training_rows(tmp_path / "here")
    ]
    weights = [(tmp_path / run / "final" / "model.safetensors").read_bytes() for run in ("here", "there")]
    assert weights[0] == weights[1]
    wait_for(lambda: gone(family))
    for file in (tmp_path / "there").rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes()


def test_a_host_with_other_files_is_refused_before_anything_is_trained(serve, server, written, tmp_path):
    """By a dry run as well; so is a wrong token. The token that a host makes is kept for this user alone."""
    command, address = serve("first", token="")
    file = tmp_path / "first" / "token"
    token = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert command.text().count(token) == 1
    assert "runs the code in" in " ".join(command.text().split())
    hosts = ("--set", f'cluster.reward_hosts=["{address}"]')
    said = server.run("train", written, *hosts, cwd=tmp_path, code=2, TREW_REWARDS_TOKEN="some-other-token-4711")
    assert "needs its token, got another one; set TREW_REWARDS_TOKEN" in " ".join(said.split())
    server.run("train", written, "--dry-run", *hosts, cwd=tmp_path, TREW_REWARDS_TOKEN=token)
    (tmp_path / "reward.py").write_text(REWARD + "# edited\n")
    said = server.run("train", written, "--dry-run", *hosts, cwd=tmp_path, code=2, TREW_REWARDS_TOKEN=token)
    assert "SHA-256: reward.py " in said
    assert command.kill(signal.SIGTERM).wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        ('["10.0.0.1:8100"]', "cluster.reward_hosts[0]: got '10.0.0.1:8100', accepts addresses like"),
        ('["unix:/run/a.sock"]', "cluster.reward_hosts[0]: got 'unix:/run/a.sock', accepts addresses like"),
        ('["http://h:1", "http://h:1/"]', "cluster.reward_hosts[1]: got 'http://h:1/' twice; name each once"),
    ],
)
def test_addresses_that_are_none_are_refused(server, written, tmp_path, addresses, said):
    found = server.run("train", written, "--set", f"cluster.reward_hosts={addresses}", cwd=tmp_path, code=2)
    assert said in " ".join(found.split())


def test_bad_input_is_one_message(server, written, tmp_path):
    for options, said in (
        (["--recipe", "none.toml"], "none.toml: no such recipe"),
        (["--recipe", written, "--host", "8.8.8.8"], "which is a public address; without TLS"),
    ):
        found = server.run("rewards", "serve", *options, cwd=tmp_path, code=2)
        assert said in " ".join(found.split())
