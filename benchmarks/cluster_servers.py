"""Servers for cluster.py: a policy, a server next to it, and the transfers between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file

from trew.errors import EngineError
from trew.rewards.isolation.tree import descendants
from trew.rollout.endings import facts_of
from trew.rollout.engine import Request
from trew.rollout.vllm import environment, update
from trew.rollout.vllm.client import ServerGone, ServerRefused, call
from trew.rollout.vllm.endpoint import Endpoint
from trew.rollout.vllm.engine import VllmEngine
from trew.rollout.vllm.plugin.trew_vllm import published
from trew.rollout.vllm.server import ServerOptions, Servers
from trew.types import Sampling
from trew.weights import publisher
from trew.weights.files import PublishedFiles, version_size
from work import Clock, Work, save_model
from work_trew import make

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
KINDS = ("stand-in", "vllm")
HANG_S = 5.0
"""The time limit of hung servers here. The default is 120 s; what is measured, beyond it, does not depend on it."""
ON_THE_WAY_S = (1.1, 1.6, 2.1)
"""Seconds that a server generates before something happens to it: its counters are read once a second, and faults are
to come at any time in between."""
START_S = 900.0


def there() -> list[str]:
    """The kinds of servers that this machine has."""
    return list(KINDS if (PYTHON.parents[1] / ".installed").exists() else KINDS[:1])


def versions() -> dict[str, str]:
    if there() == list(KINDS):
        return {
            name: version for name, version in environment.probe(PYTHON).versions.items() if "vllm" in name and version
        }
    return {}


@dataclass(frozen=True)
class Trip:
    """Seconds of one publication: until the files are written and hashed (``written``), while the server stands still
    (``paused``), and of the canary, which the policy and then the server compute (``canary``). The server verifies the
    files while the policy computes its canary; ``verified`` is what that takes by itself. ``plain``: save_file and
    load_file of the same bytes, copied into tensors that are there."""

    KEYS: ClassVar = ("written", "verified", "paused", "canary", "plain")
    written: float
    verified: float
    paused: float
    canary: float
    plain: float

    @property
    def moved(self) -> float:
        """What has to do with the bytes."""
        return self.written + self.verified + self.paused


class House:
    """A policy and one server, which ``start`` starts again after it has died."""

    def __init__(self, work: Work, model: Path, endpoint: Endpoint, start: Callable[[], int]) -> None:
        """``start`` (re)starts the server and returns the process that generates."""
        self.program, self.work, self.endpoint, self._start = make(work, model), work, endpoint, start
        self.policy, self.facts = self.program.policy, facts_of(self.program.model)
        size = version_size(self.program.model.config, work.dtype)
        self.weights = PublishedFiles(
            model.parent, dtype=work.dtype, size=size, vocabulary=self.facts.vocabulary, positions=self.facts.positions
        )
        self._server = start()
        self._kept: dict[str, torch.Tensor] = {}
        self._engine: VllmEngine | None = None
        self.bytes = 0

    def engine(self) -> VllmEngine:
        return VllmEngine(
            [self.endpoint],
            self.program.plan.renderer,
            facts=self.facts,
            request_timeout_s=HANG_S,
            sync_timeout_s=START_S,
        )

    def publish(self, engine: VllmEngine) -> None:
        self.policy.version += 1
        self.weights.publish(self.policy, engine)

    def trip(self) -> Trip:
        """Publishes the weights once, and saves and loads the same bytes in the same place. The first is another one:
        the server is not in use yet, and verifies them while it stands still."""
        calls: list[tuple[str, float, float]] = []

        def timed(endpoint: Endpoint, method: str, path: str, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(endpoint, method, path, **options)
            finally:
                calls.append((path, begin, time.perf_counter()))

        engine = self._engine = self._engine or self.engine()
        clock, own = Clock("cpu"), publisher.canary_of
        update.call = timed  # type: ignore[assignment]
        clock.wrap(publisher, "canary_of", "canary")
        try:
            begin = time.perf_counter()
            self.publish(engine)
            end = time.perf_counter()
        finally:
            update.call, publisher.canary_of = call, own
        canary = clock.take()["canary"]
        pausing = next(start for path, start, _ in calls if path == "/pause")
        resumed = next(stop for path, _, stop in calls if path == "/resume")
        return Trip(
            pausing - begin - canary, self._verified(), resumed - pausing, canary + end - resumed, self._plain()
        )

    def _verified(self) -> float:
        assert self.weights.newest is not None
        route = self.weights.newest.route
        begin = time.perf_counter()
        published.read(route.root, route.folder, route.manifest_digest)
        return time.perf_counter() - begin

    def _plain(self) -> float:
        assert self.weights.newest is not None
        folder = self.weights.newest.route.root / self.weights.newest.route.folder
        tensors = {
            name: t.clone() for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()
        }
        self.bytes = sum(t.nbytes for t in tensors.values())
        self._kept = self._kept or {name: torch.empty_like(t).fill_(0) for name, t in tensors.items()}
        path = folder.parent / ".plain.safetensors"
        begin = time.perf_counter()
        save_file(tensors, path)
        for name, tensor in load_file(path).items():
            self._kept[name].copy_(tensor)
        seconds = time.perf_counter() - begin
        path.unlink()
        return seconds

    def noticed(self, number: int, *, dead: bool) -> float:
        """Seconds from fault ``number`` until the engine reports it; of a server that hangs, those beyond the time
        limit."""
        engine = self.engine()
        self.publish(engine)
        sampling = Sampling(max_tokens=self.work.completion_tokens, seed=1)
        prompts = self.program.plan.train[: self.work.prompts]
        engine.submit([
            Request(f"{prompt.uid}/{i}", prompt, i, sampling) for prompt in prompts for i in range(self.work.group)
        ])  # fmt: skip
        time.sleep(ON_THE_WAY_S[number % len(ON_THE_WAY_S)])
        assert not engine.poll(timeout_s=0), "the server has answered before anything happened to it"
        os.kill(self._server, signal.SIGKILL if dead else signal.SIGSTOP)
        begin = time.perf_counter()
        try:
            engine.poll(timeout_s=HANG_S + 60)
            sys.exit("the server's fault was not noticed")
        except EngineError:
            seconds = time.perf_counter() - begin
        if dead:
            self._server = self._start()
            return seconds
        os.kill(self._server, signal.SIGCONT)
        return seconds - HANG_S


@contextlib.contextmanager
def beside(kind: str, work: Work, folder: Path) -> Iterator[House]:
    """A house with a server of this kind; the model is made in ``folder``."""
    model = folder / "model"
    save_model(model, work.shape)
    with (real if kind == "vllm" else stand_in)(work, model) as (endpoint, start):
        house = House(work, model, endpoint, start)
        try:
            yield house
        finally:
            house.weights.close()
            shutil.rmtree(folder)


Server = Iterator[tuple[Endpoint, Callable[[], int]]]


@contextlib.contextmanager
def stand_in(work: Work, model: Path) -> Server:
    """The tests' stand-in, in a separate process."""
    socket = model.parent / "server.sock"
    endpoint, processes = Endpoint("http://localhost", socket), []

    def start() -> int:
        socket.unlink(missing_ok=True)
        processes.append(serve(model, socket))
        wait_until_ready(endpoint, processes[-1])
        return processes[-1].pid

    try:
        yield endpoint, start
    finally:
        for process in processes:
            process.kill()
            process.wait()


def serve(model: Path, socket: Path) -> subprocess.Popen[bytes]:
    paths = (ROOT / "src", ROOT / "src" / "trew" / "rollout" / "vllm" / "plugin")
    with log_of(socket).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, ROOT / "tests" / "fake_vllm.py", model, socket], stderr=log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip


def log_of(socket: Path) -> Path:
    return socket.with_suffix(".log")


@contextlib.contextmanager
def real(work: Work, model: Path) -> Server:
    """vLLM itself."""
    options = ServerOptions(
        python=PYTHON, model=model, dtype=work.dtype, seed=0, max_length=work.prompt_tokens + work.completion_tokens,
        sequences=max(1, work.sequences), threads=torch.get_num_threads(),
    )  # fmt: skip
    with Servers(options, count=1, folder=model.parent / "servers") as servers:

        def start() -> int:
            servers.restart(0, seconds=START_S)
            return next(pid for pid in descendants(os.getpid()) if "EngineCor" in name_of(pid))

        yield servers.endpoints[0], start


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:  # it has ended
        return ""


def wait_until_ready(endpoint: Endpoint, process: subprocess.Popen[bytes]) -> None:
    """Waits for a stand-in. Ends the program, with the server's last words, where it has ended."""
    while process.poll() is None:
        try:
            call(endpoint, "GET", "/health", what="is it ready", timeout_s=5.0)
            return
        except (ServerGone, ServerRefused):
            time.sleep(0.05)
    assert endpoint.socket is not None
    sys.exit(
        f"the stand-in server ended with code {process.returncode}:\n{log_of(endpoint.socket).read_text()[-3000:]}"
    )
