"""``trew serve`` and runs on its servers, through the command line: stand-ins, started as vLLM's build for CPUs."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_cli_servers import recipe

import tiny
from forks import Command, below, gone, wait_for
from recipe_help import training_rows
from serve_help import EMPTY, left_over, python_with_vllm
from trew.rollout.vllm.client import ServerGone, call
from trew.rollout.vllm.endpoint import Endpoint

TOKEN = "correct-horse-9-battery-7-staple"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "smollm")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What serves a stand-in."""
    return python_with_vllm(tmp_path_factory.mktemp("python"))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """What serves nothing, at once."""
    return python_with_vllm(tmp_path, EMPTY)


class Served:
    """A ``trew serve`` that is up, and the recipe of runs on its servers."""

    def __init__(self, command: Command, written: Path, servers: int) -> None:
        self.command = command
        listed = re.search(r"^endpoints = (\[.*\])$", command.says("endpoints = [").text(), re.MULTILINE)
        assert listed is not None
        self.endpoints = re.findall(r'"(.*?)"', listed[1])
        assert len(self.endpoints) == servers
        self.recipe = written.with_name("through.toml")
        self.recipe.write_text(re.sub(r"^endpoints = .*$", listed[0], written.read_text(), flags=re.MULTILINE))

    def stand_ins(self) -> set[int]:
        """The processes of the stand-ins themselves."""
        return {pid for pid in below(self.command.pid) if "serve.py" in Path(f"/proc/{pid}/cmdline").read_text()}

    def kill(self) -> None:
        """Kills the servers, as memory that runs out does."""
        for pid in self.stand_ins():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def serve(server: Any, model: Path, tmp_path: Path) -> Iterator[Any]:
    written = recipe(tmp_path, model)
    started: list[tuple[Command, Path]] = []

    def begin(python: Path, *options: str, servers: int = 1, **env: str) -> Served:
        command = server.start(
            "serve", written, "--port", "0", "--servers", str(servers), "--set", f"cluster.python={python}", *options,
            cwd=tmp_path, **env,
        )  # fmt: skip
        started.append((command, python))
        return Served(command, written, servers)

    yield begin
    for command, python in started:
        if not command.ended():
            command.kill(signal.SIGKILL)
        wait_for(partial(lambda python: not left_over(python), python))


@pytest.mark.nightly
def test_a_run_through_trew_serve_survives_the_death_of_its_server(serve, python, server, tmp_path):
    """kill -9 in the third step: started again, the newest weights, proven, and no step is lost. Wrong and missing
    tokens are refused before; SIGTERM ends the server after."""
    there = serve(python, TREW_SERVER_TOKEN=TOKEN)
    said = server.run("train", there.recipe, cwd=tmp_path, code=2, TREW_SERVER_TOKEN="another-of-enough-length-2")
    assert "needs its token, got another one" in " ".join(said.split())
    said = server.run("train", there.recipe, cwd=tmp_path, code=2, TREW_SERVER_TOKEN="")
    assert "TREW_SERVER_TOKEN is not set" in " ".join(said.split())
    command = server.start(
        "train", there.recipe, "--overwrite", cwd=tmp_path, hold="trew.training.loop:update:3", TREW_SERVER_TOKEN=TOKEN
    ).held()
    there.kill()
    there.command.says("is up again")
    assert "killed by SIGKILL; its log:" in there.command.text()
    assert "it is started again (1 of 3 tries)" in there.command.text()
    assert command.go().wait() == 0, command.text()
    run = tmp_path / "runs" / "through"
    assert [row["step"] for row in training_rows(run)] == [1, 2, 3, 4]
    assert max(row["canary_gap"] for row in training_rows(run)) < 1e-5
    for file in run.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes()
    assert TOKEN not in there.command.text() + command.text()
    stand_ins = there.stand_ins()
    assert stand_ins
    assert there.command.kill(signal.SIGTERM).wait() == 128 + signal.SIGTERM
    assert gone(stand_ins)


def test_a_server_that_keeps_dying_is_given_up_with_its_reason(serve, empty):
    """After as many tries as were asked for, each of which is told; what still runs until then is ended."""
    there = serve(empty, "--restarts", "2", servers=2, TREW_SERVER_TOKEN=TOKEN)
    (empty.parent / "fails").touch()
    there.kill()
    assert there.command.wait() == 1
    said = there.command.text()
    assert "no server is left: server 0 (log: " in said
    assert "RuntimeError: as the test wants it; it was started 2 times again, and is given up" in said
    assert said.count("it is started again (2 of 2 tries)") == 2


def test_a_server_that_does_not_start_ends_it_at_once(server, model, empty, tmp_path):
    (empty.parent / "fails").touch()
    said = server.run(
        "serve", recipe(tmp_path, model), "--port", "0", "--set", f"cluster.python={empty}", cwd=tmp_path, code=1,
        TREW_SERVER_TOKEN=TOKEN,
    )  # fmt: skip
    assert "ended: exit code 1; its log: RuntimeError: as the test wants it" in said


def test_the_token_is_made_once_and_kept_for_this_user_alone(serve, empty, server, tmp_path):
    """And servers end with a trew serve that is killed."""
    there = serve(empty)
    file = tmp_path / "runs" / "serve" / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text().strip()
    assert there.command.text().count(token) == 1
    second = server.run("serve", tmp_path / "servers-1.toml", "--port", "0", cwd=tmp_path, code=2)
    assert "runs/serve is in use by another" in " ".join(second.split())
    stand_ins = there.stand_ins()
    there.command.kill(signal.SIGKILL).wait()
    wait_for(lambda: gone(stand_ins))
    again = serve(empty)
    assert token not in again.command.text()
    again.command.kill(signal.SIGTERM).wait()
    file.chmod(0o640)
    said = server.run(
        "serve", tmp_path / "servers-1.toml", "--port", "0", "--set", f"cluster.python={empty}", cwd=tmp_path, code=2
    )
    assert "others can read or write it (mode 0640)" in " ".join(said.split())


def test_a_public_interface_needs_tls_and_gets_it(serve, empty, server, model, tmp_path, monkeypatch):
    """Every interface: refused without a certificate; with one, clients check it, and refuse one they do not know."""
    every = ".".join("0" * 4)
    written = recipe(tmp_path, model)
    for host in (every, "8.8.8.8", "::"):
        said = server.run("serve", written, "--host", host, cwd=tmp_path, code=2)
        assert "without TLS the token and all texts could be read on the way" in " ".join(said.split())
    cert, key = certificate(tmp_path)
    there = serve(empty, "--host", every, "--tls-cert", str(cert), "--tls-key", str(key), TREW_SERVER_TOKEN=TOKEN)
    (address,) = there.endpoints
    endpoint = Endpoint.parse(address.replace(every, "localhost"), TOKEN)
    assert endpoint.url.startswith("https://localhost:")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(ServerGone, match="CERTIFICATE_VERIFY_FAILED"):
        call(endpoint, "GET", "/health", what="asking", timeout_s=20)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    assert call(endpoint, "GET", "/health", what="asking", timeout_s=20) is None
    plain = Endpoint(endpoint.url.replace("https:", "http:"), None, TOKEN)
    with pytest.raises(ServerGone):
        call(plain, "GET", "/health", what="asking", timeout_s=20)


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert], capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("needs openssl to make a certificate")
    return cert, key


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--servers", "0"], "--servers, --restarts: got 0 and 3"),
        (["--host", "no-such-host.invalid"], "--host: got 'no-such-host.invalid', accepts a name or an address"),
        (["--host", "192.0.2.1"], "cannot use 192.0.2.1 port 8000"),
        (["--port", "70000"], "--port: got 70000, accepts 0 (any free one) to 65535"),
        (["--tls-cert", "cert.pem"], "one is of no use without the other"),
        (["--tls-cert", "cert.pem", "--tls-key", "key.pem"], "cannot be used (" ),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(server, model, tmp_path, options, said):
    assert said in " ".join(server.run("serve", recipe(tmp_path, model), *options, cwd=tmp_path, code=2).split())


def test_a_short_token_is_refused(server, model, empty, tmp_path):
    said = server.run(
        "serve", recipe(tmp_path, model), "--port", "0", "--set", f"cluster.python={empty}", cwd=tmp_path, code=2,
        TREW_SERVER_TOKEN="short",
    )  # fmt: skip
    assert "TREW_SERVER_TOKEN: got a token of 5 characters, accepts at least 16" in " ".join(said.split())
