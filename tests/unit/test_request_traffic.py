"""Requests to a server that accepts everything and answers nothing: none is forgotten, and nothing is printed. And to
one that closes connections that were idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trew.rollout.vllm import traffic
from trew.rollout.vllm.client import REUSED_S, ServerHung
from trew.rollout.vllm.endpoint import Endpoint
from trew.rollout.vllm.traffic import Traffic

LIMIT_S = 60.0
"""For what takes a fraction of a second unless it never comes."""


class Silent:
    """Accepts connections on a Unix socket. ``accepted`` has them, ``came`` says that there is one."""

    def __init__(self, path: Path) -> None:
        self.accepted: list[socket.socket] = []
        self.came = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._socket.accept()[0]
                self.accepted.append(connection)
                # Until the body of a request; empty where the other end closes first.
                while (part := connection.recv(65536)) and not part.endswith(b"{}"):
                    pass
                self.came.set()

    def close(self) -> None:
        for one in (self._socket, *self.accepted):
            with contextlib.suppress(OSError):  # the other end has closed it
                one.shutdown(socket.SHUT_RDWR)  # ends what waits in the thread, which closing alone does not
            one.close()
        self._thread.join(LIMIT_S)


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[Silent, Endpoint]]:
    path = tmp_path / "s.sock"
    with contextlib.closing(Silent(path)) as server:
        yield server, Endpoint("http://localhost", path)


def test_requests_sent_while_others_are_given_up_are_answered_and_so_are_those(silent, monkeypatch):
    _, endpoint = silent
    carried = Traffic(hang_s=0.3)
    give_up = traffic._Line._give_up

    def and_another_comes(line: Any) -> None:
        monkeypatch.undo()
        give_up(line)
        line.late = asyncio.ensure_future(carried._carry("late", endpoint, {}, "/any"))

    monkeypatch.setattr(traffic._Line, "_give_up", and_another_comes)
    carried.send("early", endpoint, {})
    found = dict(carried.answers.get(timeout=LIMIT_S) for _ in range(2))
    carried.stop()
    assert found.keys() == {"early", "late"}
    assert all(isinstance(error, ServerHung) for error in found.values()), found


def test_a_request_given_up_while_its_answer_arrives_prints_no_traceback(silent, caplog):
    server, endpoint = silent
    carried = Traffic(hang_s=LIMIT_S)
    carried.send("one", endpoint, {})
    assert server.came.wait(LIMIT_S)
    loop, done = carried._loop, threading.Event()
    assert loop is not None

    def both() -> None:
        # The next pass of the loop cancels the request, and sees that its socket can be read.
        server.accepted[0].sendall(b"HTTP/1.1 200 OK\r\n")
        carried.drop("one")
        loop.call_later(0.05, done.set)

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        loop.call_soon_threadsafe(loop.call_later, 0.1, both)  # once the request waits for its answer
        assert done.wait(LIMIT_S)
        carried.stop()
    assert caplog.records == []


def test_other_errors_in_callbacks_are_still_printed(caplog):
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(traffic.report_unless_late)
    with contextlib.closing(loop), caplog.at_level(logging.ERROR, logger="asyncio"):
        loop.call_soon(int, "no number")
        loop.call_soon(loop.stop)
        loop.run_forever()
    assert "no number" in caplog.text


def answer_once(listening: socket.socket) -> None:
    """Answers the first completions of each connection, and closes it at the second ones: as a server whose limit of
    idle connections ends at the moment at which a request comes."""
    with contextlib.suppress(OSError):
        while True:
            connection = listening.accept()[0]
            # On another thread: the next connection may come while this one is idle.
            threading.Thread(target=_one, args=(connection,), daemon=True).start()


def _one(connection: socket.socket) -> None:
    asked, received = 0, b""
    with contextlib.closing(connection), contextlib.suppress(OSError):
        while part := connection.recv(65536):
            received += part
            if received.endswith(b"{}") or (received.startswith(b"GET") and received.endswith(b"\r\n\r\n")):
                asked += received.startswith(b"POST")
                if asked > 1:
                    return
                received = b""
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def test_a_connection_that_was_idle_is_not_used_again(tmp_path):
    """A request over it would fail as if the server had died, and a run would restart a healthy server."""
    assert REUSED_S < 5  # VLLM_HTTP_TIMEOUT_KEEP_ALIVE and uvicorn's default
    endpoint = Endpoint("http://localhost", tmp_path / "s.sock")
    carried = Traffic(hang_s=LIMIT_S)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(endpoint.socket))
        listening.listen()
        threading.Thread(target=answer_once, args=(listening,), daemon=True).start()
        carried.send("first", endpoint, {})
        assert carried.answers.get(timeout=LIMIT_S) == ("first", {})
        # Behind the last look at its counters.
        time.sleep(traffic.LOOK_S + REUSED_S + 0.2)
        carried.send("after a step of the learner", endpoint, {})
        assert carried.answers.get(timeout=LIMIT_S) == ("after a step of the learner", {})
        carried.stop()
