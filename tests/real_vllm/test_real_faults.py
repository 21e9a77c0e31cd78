"""The real vLLM, killed, stopped and started wrongly: noticed in time, named, replaced, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_models import save

from trew.errors import EngineError
from trew.rewards.isolation import tree
from trew.rollout.engine import Finished, Lost, Request
from trew.rollout.vllm.client import ServerGone, call
from trew.rollout.vllm.server import Servers
from trew.types import Prompt, Sampling
from vllm_help import House

LONG = Sampling(max_tokens=400, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("untied") / "model", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def servers(start, model) -> Servers:
    """A server of its own, of an untied model: the tests here break it."""
    return start(model)


@pytest.fixture
def house(servers, model, tmp_path) -> Iterator[House]:
    made = House(model, tmp_path, list(servers.endpoints), [])
    with contextlib.closing(made.weights):
        yield made


def processes(servers: Servers) -> dict[str, list[int]]:
    """The processes of the server, by name."""
    found: dict[str, list[int]] = {}
    for pid in tree.descendants(servers.servers[0]._program.pid):
        with contextlib.suppress(OSError):
            found.setdefault(Path(f"/proc/{pid}/comm").read_text().strip(), []).append(pid)
    return found


def gone(pids: list[int]) -> bool:
    """Whether no process of these numbers is left, 15 seconds from now at the latest."""
    until = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def engine_core(servers: Servers) -> int:
    ((pid,),) = [pids for name, pids in processes(servers).items() if "EngineCor" in name]
    return pid


MANY = 300
"""Requests: a small random model ends its completions early, and some must be unfinished when something happens."""


def submit(engine) -> None:
    """Asks for many completions, and returns while the server works on them."""
    engine.submit([Request(f"r{i}", Prompt(uid=f"p{i}", text="count: 1 2 3"), 0, LONG) for i in range(MANY)])
    time.sleep(0.5)


def outcome(engine, seconds: float) -> list[Finished | Lost] | EngineError:
    """What becomes of these: all reports, or the error that generation ends with."""
    reports, until = [], time.monotonic() + seconds
    try:
        while len(reports) < MANY and time.monotonic() < until:
            reports += engine.poll(timeout_s=1.0)
    except EngineError as error:
        return error
    return reports


def test_a_server_whose_engine_is_killed_is_gone_and_can_be_started_again(servers, house, record):
    engine = house.engine()
    submit(engine)
    pids = [pid for found in processes(servers).values() for pid in found]
    began = time.monotonic()
    os.kill(engine_core(servers), signal.SIGKILL)
    error = outcome(engine, 60)
    assert isinstance(error, EngineError), error
    record("engine_killed_noticed_s", round(time.monotonic() - began, 1))
    assert gone(pids)  # the engine's workers, which have lost their parent, too
    assert "EngineDeadError" in servers.cause(0)
    began = time.monotonic()
    servers.restart(0, seconds=600)
    record("restart_s", round(time.monotonic() - began, 1))
    house.change(seed=2)
    house.publish(engine, house.policy.version)
    submit(engine)
    reports = outcome(engine, 300)
    assert isinstance(reports, list), reports
    assert [type(report) for report in reports] == [Finished] * MANY
    record("canary_mean_nats_untied", float(f"{engine.servers[0].gap:.2g}"))


def test_a_server_that_stands_still_is_given_up(servers, house, record):
    engine = house.engine(request_timeout_s=4.0)
    submit(engine)
    stopped = engine_core(servers)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    try:
        health = call(servers.endpoints[0], "GET", "/health", what="health", timeout_s=5)
        error = outcome(engine, 60)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert health is None  # it claims to be well
    assert isinstance(error, EngineError), error
    assert "no " in str(error)
    record("engine_stopped_noticed_s", round(time.monotonic() - began, 1))


def test_a_stopped_server_is_ended_all_the_same(start, model, tmp_path):
    servers = start(model)
    pids = [pid for found in processes(servers).values() for pid in found]
    os.kill(engine_core(servers), signal.SIGSTOP)
    servers.close()
    assert gone(pids)
    with pytest.raises(ServerGone):
        call(servers.endpoints[0], "GET", "/health", what="health", timeout_s=5)


def test_an_option_that_vllm_does_not_have_is_named(start, model):
    with pytest.raises(EngineError, match=r"exit code 2; its log: .*unrecognized arguments: --no-such-option"):
        start(model, more={"no-such-option": 3})


def test_a_model_that_vllm_cannot_run_is_named_by_its_own_error(start, tmp_path):
    config = save(tmp_path / "model") / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "no-such-function"'))
    with pytest.raises(EngineError, match=r"its log: .*no-such-function"):
        start(tmp_path / "model")


RUN = """
import sys, time
from pathlib import Path
from trew.rollout.vllm.server import ServerOptions, Servers
python, model = Path(sys.argv[1]), Path(sys.argv[2])
options = ServerOptions(python=python, model=model, dtype="float32", seed=0, max_length=256, sequences=8)
servers = Servers(options, count=1, folder=Path(sys.argv[3]))
servers.start(seconds=600)
print("up", flush=True)
time.sleep(1000)
"""


def shared_memory() -> set[Path]:
    """What lies there, without the weights of other runs: the run below publishes none."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith(("trew-", ".trew-"))}


def test_nothing_is_left_when_the_run_is_killed(servers, model, tmp_path, record):
    shm = shared_memory()
    command = [sys.executable, "-c", RUN, str(servers.servers[0].options.python), str(model), str(tmp_path / "servers")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert run.stdout.readline() == b"up\n"
    pids = tree.descendants(run.pid)
    assert len(pids) >= 3  # the guardian, the API server and its engine
    run.kill()
    began = time.monotonic()
    run.wait()
    run.stdout.close()
    assert gone(pids)
    record("run_killed_servers_gone_s", round(time.monotonic() - began, 1))
    assert shared_memory() <= shm
