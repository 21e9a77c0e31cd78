"""The proxy of ``trew serve``: what passes, what does not, and what a run makes of a server that died behind it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forks import wait_for
from serve_help import TOKEN, Behind, proxied
from trew.errors import ConfigError
from trew.rollout.vllm import handshake, remote
from trew.rollout.vllm.client import ServerGone, ServerRefused, call
from trew.rollout.vllm.endpoint import Endpoint
from trew.rollout.vllm.keeper import Keeper
from trew.rollout.vllm.proxy import ROUTES
from vllm_help import House, as_at_first, house, made

GIVEN = {"Authorization": f"Bearer {TOKEN}"}
DENIED = ["/collective_rpc", "/sleep", "/v1/completions", "/", "/health/", "//health", "/docs", "/trew"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, Behind]]:
    """Two stand-ins behind a proxy, by which their house reaches them."""
    with house(tmp_path_factory.mktemp("house"), servers=2) as found:
        keeper = Behind(found.endpoints)
        with proxied(keeper) as found.endpoints:
            yield found, keeper


@pytest.fixture
def served(pair: tuple[House, Behind]) -> Iterator[tuple[House, Behind]]:
    with as_at_first(pair[0]):
        yield pair


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    """Any client: not one of trew's."""
    with httpx2.Client(verify=False, trust_env=False, timeout=60) as made:
        yield made


@pytest.mark.parametrize("token", ["", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN, f"bearer {TOKEN}"])
def test_nothing_is_answered_without_the_token(served, client, token):
    """Before the path is looked at, so that nobody learns which there are."""
    there, keeper = served
    given = {"Authorization": token} if token else {}
    for path in (*ROUTES, *DENIED, remote.STATE, remote.RENEW):
        for method in ("GET", "POST"):
            found = client.request(method, there.endpoints[0].url + path, headers=given, content=b"{}")
            assert found.status_code == 401
            assert found.json()["error"]["message"] == "the token is missing or wrong"
    assert there.fakes[0].calls == []
    assert keeper.renewed == []


def test_two_tokens_are_none(served, client):
    there, _ = served
    given = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer another-token-of-some-length")]
    assert client.get(f"{there.endpoints[0].url}/health", headers=given).status_code == 401


@pytest.mark.parametrize("path", DENIED)
def test_other_routes_do_not_reach_the_server(served, client, path):
    there, _ = served
    for method in ("GET", "POST", "DELETE"):
        found = client.request(method, there.endpoints[0].url + path, headers=GIVEN)
        assert found.status_code == 404
        assert f"trew serve passes on no {path}" in found.json()["error"]["message"]
    assert there.fakes[0].calls == []


def test_a_route_is_passed_on_with_its_own_method_only(served):
    there, _ = served
    for path, method in ROUTES.items():
        with pytest.raises(ServerRefused, match=f"{path} takes {method}") as error:
            call(there.endpoints[0], "POST" if method == "GET" else "GET", path, what="trying", timeout_s=10)
        assert error.value.status == 405
    assert there.fakes[0].calls == []


def test_exactly_the_routes_that_runs_use_pass():
    """A route that is asked for and does not pass would break runs; one that passes for nothing is a way in."""
    source = Path(handshake.__file__).parent
    texts = "".join(
        (source / f"{name}.py").read_text() for name in ("update", "traffic", "handshake", "server", "stream", "routes")
    )
    assert all(f'"{route}"' in texts or f"{{self.endpoint.url}}{route}" in texts for route in ROUTES)
    assert {*handshake.ROUTES, *handshake.STREAM_ROUTES} | {"/version", "/openapi.json", "/metrics"} == set(ROUTES)


def test_a_run_through_the_proxy_is_the_run_without(served):
    """Weights, canary and completions; both servers have work, and each the requests that are meant for it."""
    there, keeper = served
    through = made(there.engine())
    assert all(fake.tokens for fake in there.fakes)
    handshake.check(
        there.endpoints[0], handshake.Expected(dtype="float32", vocabulary=there.facts.vocabulary, length=64),
        root=there.run,
    )  # fmt: skip
    behind, there.endpoints = there.endpoints, list(keeper.servers.endpoints)
    try:
        assert made(there.engine()) == through
    finally:
        there.endpoints = behind


def test_a_server_that_died_behind_the_proxy_is_gone_and_its_work_is_done_by_another(served):
    there, _ = served
    engine = there.engine()
    expected = made(engine)
    there.fakes[0].faults.dies_after = 3
    assert made(engine) == expected
    assert engine.servers[0].version is None
    assert "1 of 2 are left" in there.told[-1]


def test_a_server_that_is_not_there_is_gone_and_the_proxy_says_why(tmp_path):
    keeper = Behind([Endpoint("http://localhost", tmp_path / "nobody.sock", "x")])
    with proxied(keeper) as (endpoint,):
        for method, path in (("GET", "/health"), ("POST", "/inference/v1/generate"), ("POST", "/pause")):
            with pytest.raises(ServerGone, match="server 0 ended: killed by the test"):
                call(endpoint, method, path, what="asking", timeout_s=10, body={})


def test_a_server_that_was_started_again_is_not_asked_for_completions_before_it_has_weights(served):
    """It would answer with those of the model's files."""
    there, keeper = served
    engine = there.engine()
    keeper.kept[0].fresh, keeper.kept[0].lives = True, 2
    before = there.fakes[0].tokens
    made(engine)
    assert there.fakes[0].tokens == before
    assert any("was started again, and has got no weights since" in line for line in there.told)
    there.publish(engine, 0)
    assert not keeper.kept[0].fresh


def test_a_server_that_no_run_has_used_says_so(served):
    there, keeper = served
    keeper.kept[0].fresh, keeper.kept[0].lives = True, 1
    with pytest.raises(ServerGone, match="server 0 has got no weights from a run yet"):
        call(there.endpoints[0], "POST", "/inference/v1/generate", what="asking", timeout_s=10, body={})


def test_a_run_waits_for_a_server_that_trew_serve_starts_again(served):
    """And has it started again where it is up and does not get on, once."""
    there, keeper = served
    endpoint = there.endpoints[0]
    assert remote.state_of(endpoint) == remote.State("first", "up", "")
    returns = remote.Returns(there.endpoints, ["first", None])
    waiting = threading.Thread(target=returns, args=(0,))
    waiting.start()
    wait_for(lambda: keeper.renewed)
    keeper.kept[0].state = "starting"
    keeper.kept[0].life, keeper.kept[0].state = "second", "up"
    waiting.join(30)
    assert not waiting.is_alive()
    assert set(keeper.renewed) == {(0, "first")}
    keeper.kept[0].state, keeper.kept[0].why = "starting", "it is being started"
    with pytest.raises(ServerGone, match="was not up within 0 s: it is being started"):
        remote.wait_for(endpoint, tell=there.told.append, seconds=0)
    keeper.kept[0].state, keeper.kept[0].why = "lost", "it is given up"
    with pytest.raises(ServerGone, match="given up"):
        remote.wait_for(endpoint, tell=there.told.append)
    with pytest.raises(Exception, match="it is given up"):
        returns(0)
    with pytest.raises(Exception, match="no trew serve starts it again; do so yourself"):
        returns(1)
    keeper.kept[0].state, keeper.kept[0].why, keeper.kept[0].life = "up", "", "first"


def test_a_wrong_token_is_a_problem_of_the_settings(served):
    there, _ = served
    for token, said in (("", "got none: TREW_SERVER_TOKEN is not set"), ("another-one", "got another one")):
        with pytest.raises(ConfigError, match=f"needs its token, {said}"):
            remote.wait_for(dataclasses.replace(there.endpoints[0], token=token), tell=there.told.append)


def test_a_server_without_trew_serve_has_no_state(served):
    _, keeper = served
    assert remote.wait_for(keeper.servers.endpoints[0], tell=print) is None


class Full:
    """A server that died, and that a full disk keeps from being started again."""

    def __init__(self) -> None:
        self.index, self.servers = 0, (self,)

    def start(self, *, seconds: float) -> None:
        """It was up once."""

    def died(self) -> bool:
        return True

    def cause(self, number: int) -> str:
        return f"server {number} ended: killed by SIGKILL"

    def restart(self, number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "0.log")

    def close(self) -> None:
        """It has ended."""


def test_a_server_that_the_system_does_not_let_start_is_given_up_with_the_reason():
    """Not left as one that is being started, for which runs would wait half an hour."""
    told: list[str] = []
    keeper = Keeper(Full(), tries=2, tell=told.append)
    with contextlib.closing(keeper):
        keeper.start()
        wait_for(lambda: told and "is given up" in told[-1], lambda: told)
    assert "server 0 cannot be started: [Errno 28] No space left on device" in keeper.lost()
    assert "it was started 2 times again, and is given up" in told[-1]


# ----------------------------------------------------------------------------------------------- bodies, piece by piece


class Raw:
    """Listens on a Unix socket for one request, whose bytes it reads while ``reads``; answers with what it is given."""

    def __init__(self, path: Path, *pieces: bytes, reads: bool = True) -> None:
        self.path, self.pieces, self.reads = path, pieces, reads
        self.got, self.sent, self.over = 0, 0, threading.Event()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.settimeout(60)
            try:
                if self.pieces:
                    self.got += len(connection.recv(1 << 16))
                    for piece in self.pieces:
                        connection.sendall(piece)
                        self.sent += len(piece)
                while self.reads and not self.pieces and (piece := connection.recv(1 << 16)):
                    self.got += len(piece)
                self.over.wait(0 if self.pieces else 60 * (not self.reads))
            except OSError:
                pass
        self.over.set()


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[Any]:
    """Makes a proxy in front of a :class:`Raw`; gives both."""
    opened = []

    def begin(*pieces: bytes, reads: bool = True, **options: Any) -> tuple[Raw, Endpoint]:
        server = Raw(tmp_path / "raw.sock", *pieces, reads=reads)
        context = proxied(Behind([Endpoint("http://localhost", server.path, "x")]), **options)
        (endpoint,) = context.__enter__()
        opened.append((server, context))
        return server, endpoint

    yield begin
    for server, context in opened:
        server.over.set()
        context.__exit__(None, None, None)
        server.listener.close()


def still(count: Callable[[], int]) -> int:
    """A count once it stands still."""
    before = -1
    for _ in range(60):
        if before == count() > 0:
            break
        before = count()
        time.sleep(0.5)
    return count()


def test_an_answer_is_not_collected_in_memory(raw, client):
    """A client that reads nothing holds the server up, after what the sockets' buffers take."""
    piece = bytes(1 << 20)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(piece) * 256}\r\n\r\n".encode()
    server, endpoint = raw(head, *[piece] * 256)
    with client.stream("POST", f"{endpoint.url}/inference/v1/generate", headers=GIVEN) as found:
        assert 0 < still(lambda: server.sent) < 64 << 20
        assert sum(map(len, found.iter_raw())) == 256 << 20


def test_a_body_is_not_collected_in_memory(raw, client):
    """A server that reads nothing holds the client up."""
    server, endpoint = raw(reads=False)
    sent = [0]

    def pieces() -> Iterator[bytes]:
        for _ in range(60):
            yield bytes(1 << 20)
            sent[0] += 1 << 20

    def send() -> None:
        with contextlib.suppress(httpx2.HTTPError):
            client.post(
                f"{endpoint.url}/inference/v1/generate", content=pieces(), headers=GIVEN,
                timeout=60,
            )  # fmt: skip

    uploading = threading.Thread(target=send)
    uploading.start()
    assert 0 < still(lambda: sent[0]) < 32 << 20
    server.over.set()
    uploading.join(60)


def test_a_body_that_is_too_large_is_refused(raw):
    _, endpoint = raw(most_bytes=1000)
    with pytest.raises(ServerRefused, match="the body is larger than 1000 bytes") as error:
        call(endpoint, "POST", "/update_weights", what="trying", timeout_s=20, body="x" * 2000)
    assert error.value.status == 413


def test_a_client_that_goes_away_ends_the_work(raw, client):
    """As where a run is killed, or gives up a request: the server must see its connection closed."""
    server, endpoint = raw()
    with pytest.raises(httpx2.ReadTimeout):
        client.post(
            f"{endpoint.url}/inference/v1/generate",
            content=b"{}",
            headers=GIVEN,
            timeout=1,
        )
    assert server.got
    assert server.over.wait(30)


def test_an_answer_that_breaks_off_is_no_answer(raw):
    """Its length is known to be wrong; it must not end as if it were whole."""
    _, endpoint = raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
    with pytest.raises(ServerGone):
        call(endpoint, "POST", "/inference/v1/generate", what="trying", timeout_s=20, body={})
