"""``trew serve`` with the real vLLM: reached by the token alone, its weights replaced, killed, started again, ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from vllm_models import save

from trew.errors import ConfigError
from trew.rewards.isolation import tree
from trew.rollout.vllm import handshake, remote
from trew.rollout.vllm.endpoint import Endpoint
from vllm_help import House, made

TOKEN = "a-token-of-the-tests-4711"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("served") / "model", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def served(model, tmp_path_factory) -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    """A running command, and the endpoint that it prints."""
    folder = tmp_path_factory.mktemp("serve")
    options = ["learner.dtype=float32", "data.max_prompt_tokens=256", "rollout.max_tokens=256", "rollout.batch=16"]
    python = f"cluster.python={os.environ['TREW_VLLM_PYTHON']}"
    with (folder / "said").open("w") as said:
        command = subprocess.Popen(
            [sys.executable, "-m", "trew", "serve", str(model), "--port", "0", "--set", python, *options],
            cwd=folder, stdout=said, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "TREW_SERVER_TOKEN": TOKEN, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    try:
        until = time.monotonic() + 600
        while not (found := re.search(r'^endpoints = \["(.*)"\]', (folder / "said").read_text(), re.MULTILINE)):
            assert command.poll() is None, (folder / "said").read_text()
            assert time.monotonic() < until
            time.sleep(0.2)
        yield command, Endpoint.parse(found[1], TOKEN)
    finally:
        command.send_signal(signal.SIGTERM)
        command.wait(60)


def test_a_served_vllm_gives_the_learners_log_probs_and_is_started_again(served, model, tmp_path, record):
    """Handshake, weights, canary and completions through the proxy; then kill -9 of vLLM's engine process."""
    command, endpoint = served
    bare = httpx2.get(f"{endpoint.url}/weight_info", trust_env=False)
    assert bare.status_code == 401
    given = {"Authorization": f"Bearer {TOKEN}"}
    assert httpx2.post(f"{endpoint.url}/collective_rpc", headers=given, json={}, trust_env=False).status_code == 404
    with pytest.raises(ConfigError, match="got none: TREW_SERVER_TOKEN is not set"):
        remote.wait_for(Endpoint(endpoint.url), tell=print)
    state = remote.wait_for(endpoint, tell=print)
    assert state is not None
    house = House(model, tmp_path, [endpoint], [])
    with contextlib.closing(house.weights):
        expected = handshake.Expected(dtype="float32", vocabulary=house.facts.vocabulary, length=300)
        handshake.check(endpoint, expected, root=tmp_path)
        engine = house.engine(restart=remote.Returns([endpoint], [state.life]))
        assert engine.servers[0].gap < 1e-5
        house.change()
        house.publish(engine, 1)
        assert engine.servers[0].gap < 1e-5
        before = made(engine)
        (core,) = [p for p in tree.descendants(command.pid) if "EngineCor" in Path(f"/proc/{p}/comm").read_text()]
        os.kill(core, signal.SIGKILL)
        began = time.monotonic()
        assert made(engine) == before, "with the same weights and seeds"
        record("serve_back_s", round(time.monotonic() - began, 1))
        assert engine.servers[0].gap < 1e-5
        assert remote.wait_for(endpoint, tell=print) != state
    left = tree.descendants(command.pid)
    command.send_signal(signal.SIGTERM)
    assert command.wait(60) == 128 + signal.SIGTERM
    until = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)
