"""vLLM servers as processes of a run: started with every option explicit, watched, and ended with the run.

A server listens on a Unix socket in a folder that only this user may enter: vLLM's control routes ask for no key. Its
output is in ``servers/<n>.log`` of the run folder. Each runs under a guardian process, which kills all of its processes
when the run ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config.cluster import option_name
from ...errors import ConfigError, EngineError
from ...rewards.isolation.program import GuardedProgram, how_it_ended
from ...utils.secrets import can_be_secret
from .client import ServerGone, ServerRefused, call
from .endpoint import Endpoint

MODEL_NAME = "policy"
START_S = 1800.0
"""Seconds that servers may take to load their model and answer."""
GRACE_S = 5.0
"""Seconds that a server may take to end by itself, before its processes are killed."""
_LOOK_S = 0.2
_SOCKET_BYTES = 100  # of a socket's path: the kernel's limit is 107
_SHOWN_LINES = 3
_ON_CPUS = ["--enforce-eager", "--no-enable-chunked-prefill"]
"""A prompt that is read in parts, with a seed, ends vLLM's build for CPUs: it would turn a generator back, which torch
cannot do there."""
_OF_LAUNCHERS = re.compile(
    r"(?:RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|"
    r"GROUP_WORLD_SIZE|ROLE_NAME|TORCHELASTIC_.*|VLLM_PORT|PYTHONPATH|PYTHONHOME|PYTHONSTARTUP|VIRTUAL_ENV)"
)
"""Variables that say which process of the run this is; a server would take itself for that one."""
_ERROR = re.compile(
    r"^(?!WARNING |INFO |DEBUG ).*(?:\b\w*(?:Error|Exception|Killed)\b\s*:|\berror: |\bterminate called)"
)
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:(?:ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^]]*\] )?(?:\(\w+ pid=\d+\) )?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What all servers of a run are started with. ``sequences`` are decoded at once at most; ``gpus`` are those of each
    server, 0 for vLLM's build for CPUs, where each uses ``threads`` and keeps ``cache_gib`` for keys and values;
    ``share`` is that of a GPU's memory which a server may take, 0 for vLLM's default; with ``sleeps`` it can give it
    back. ``backend`` is the engine of trew-vllm that takes weights. ``more`` are further options of vLLM, which
    :mod:`trew.config.cluster` has accepted."""

    python: Path
    model: Path
    tokenizer: str = ""
    dtype: str
    seed: int
    max_length: int
    sequences: int
    gpus: int = 0
    threads: int = 1
    cache_gib: int = 1
    share: float = 0.0
    sleeps: bool = False
    backend: str = "trew_files"
    more: Mapping[str, Any] = field(default_factory=dict)


def command(options: ServerOptions, path: Path) -> list[str]:
    """The command line of a server that listens on the socket ``path``."""
    return [
        # -I: what lies in the working directory, or in PYTHONPATH, must not stand in for vLLM's modules.
        str(options.python), "-I", "-u", "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(options.model), "--served-model-name", MODEL_NAME,
        *(["--tokenizer", options.tokenizer] if options.tokenizer else []),
        "--uds", str(path), "--enable-scale-out", "--disable-uvicorn-access-log",
        "--dtype", options.dtype, "--seed", str(options.seed), "--max-model-len", str(options.max_length),
        "--logprobs-mode", "processed_logprobs",  # of the distribution that was drawn from
        "--generation-config", "vllm",  # the model's own file would change defaults of the sampling settings
        "--scheduling-policy", "priority",  # the canary's requests go before completions that wait
        "--weight-transfer-config", json.dumps({"backend": options.backend}),
        *(["--tensor-parallel-size", str(options.gpus)] if options.gpus else _ON_CPUS),
        # The build for CPUs does not know sleep mode, but has its routes, which then do nothing.
        *(["--enable-sleep-mode"] if options.gpus and options.sleeps else []),
        *_arguments(_changeable(options) | {option_name(k): v for k, v in options.more.items()}),
    ]  # fmt: skip


def _changeable(options: ServerOptions) -> dict[str, Any]:
    """What a recipe may set otherwise."""
    share = {"gpu-memory-utilization": options.share} if options.gpus and options.share else {}
    return {"max-num-seqs": options.sequences, **share}


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as arguments.

    >>> _arguments({"a": 1, "b": True, "c": False, "d": ["x", "y"], "e": {"f": 1}})
    ['--a', '1', '--b', '--no-c', '--d', 'x', 'y', '--e', '{"f": 1}']
    """
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            found += [f"--{name}", *map(str, value)]
        else:
            found += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def variables(options: ServerOptions, *, token: str, devices: str) -> dict[str, str]:
    """The environment of a server: ours, without our secrets and what launchers told us, and with vLLM's own settings.
    ``devices`` are the GPUs that it sees, as in CUDA_VISIBLE_DEVICES."""
    kept = {k: v for k, v in os.environ.items() if not _OF_LAUNCHERS.fullmatch(k) and not can_be_secret(k, v)}
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that update weights
        "VLLM_API_KEY": token,
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    if plugins := kept.get("VLLM_PLUGINS"):  # a list of those that are loaded; without it all are
        settings["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*plugins.split(","), "trew_files"]))
    if options.gpus:
        settings["CUDA_VISIBLE_DEVICES"] = devices
    else:
        # nobind: by default every server binds its threads to the same first cores.
        # Ours come first: what the user has set for vLLM stays.
        kept = {"VLLM_CPU_KVCACHE_SPACE": str(options.cache_gib), "VLLM_CPU_OMP_THREADS_BIND": "nobind", **kept}
        settings["OMP_NUM_THREADS"] = settings["MKL_NUM_THREADS"] = str(options.threads)
    return {**kept, **settings}


class ServerProcess:
    """One server, number ``index`` of a run. ``endpoint`` is where it listens. It may be started again when it has
    ended."""

    def __init__(self, options: ServerOptions, index: int, *, sockets: Path, logs: Path, devices: str = "") -> None:
        self.options, self.index, self.devices = options, index, devices
        self.log = logs / f"{index}.log"
        path = sockets / f"{index}.sock"
        self.endpoint = Endpoint("http://localhost", path, secrets.token_hex(16))
        self._program: GuardedProgram | None = None
        self._began = 0  # where the log of the last start begins
        self.name = f"server {index}"  # in messages

    def __str__(self) -> str:
        return f"{self.name} (log: {self.log})"

    def start(self) -> None:
        """Starts the process, and returns before it is ready."""
        if sys.platform != "linux":
            raise ConfigError(
                "cluster.servers: servers are started on Linux only, where they are sure to end with the run; start "
                "them yourself and set cluster.endpoints"
            )
        assert self._program is None or self._program.poll() is not None
        path = self.endpoint.socket
        assert path is not None
        path.unlink(missing_ok=True)  # of a start before: nobody listens there
        line = command(self.options, path)
        with self.log.open("ab") as log:
            log.write(f"==== trew starts: {' '.join(line)}\n".encode())
            # Why this start ended is not looked for in what earlier ones wrote.
            self._began = log.tell()
            self._program = GuardedProgram(
                line, output=log, folder=self.log.parent, grace_s=GRACE_S,
                environment=variables(self.options, token=self.endpoint.token, devices=self.devices),
            )  # fmt: skip

    def died(self) -> bool:
        """Whether it was started and has ended."""
        return self._program is not None and self._program.poll() is not None

    def ready(self) -> bool:
        """Whether it answers. Raises EngineError, with its own last words, where it has ended."""
        if self.died():
            raise EngineError(f"{self} ended: {self.cause()}")
        try:
            call(self.endpoint, "GET", "/health", what="is it ready", timeout_s=5.0)
        except (ServerGone, ServerRefused):
            return False
        return True

    def cause(self) -> str:
        """Why it ended, as far as its exit status and the log of its last start say."""
        code = None if self._program is None else self._program.poll()
        how = "it has not ended" if code is None else how_it_ended(code)
        lines = _last_words(self.log, self._began)
        return f"{how}; its log: {' | '.join(lines)}" if lines else f"{how}, and it wrote nothing"

    def ask_to_end(self) -> None:
        """Lets it clean up and end by itself; :meth:`stop` is to follow."""
        if self._program is not None:
            self._program.ask_to_end()

    def stop(self) -> None:
        """Ends it with all its processes: asks first, so that it cleans up, and kills what is left after GRACE_S."""
        if self._program is not None:
            self._program.end()


class Servers:
    """The servers of a run. A context manager: all of them have ended when it is left."""

    def __init__(self, options: ServerOptions, *, count: int, folder: Path, devices: Sequence[str] = ()) -> None:
        """``folder`` is for logs and sockets and is made; ``devices`` are the GPUs of each server."""
        folder = folder.absolute()  # a server's own working directory is another
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        # A server may be restarted by another thread than the one that ends the run: none may start after that.
        self._lock, self._closed = threading.Lock(), False
        self._sockets = _place_for_sockets(folder)
        # A folder that was made for sockets alone goes with the servers.
        self._remove = weakref.finalize(self, shutil.rmtree, self._sockets, True) if self._sockets != folder else None
        self.servers = tuple(
            ServerProcess(options, i, sockets=self._sockets, logs=folder, devices=devices[i] if devices else "")
            for i in range(count)
        )

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where the servers listen, by number."""
        return tuple(server.endpoint for server in self.servers)

    @property
    def backend(self) -> str:
        """How they receive weights."""
        return self.servers[0].options.backend

    def start(self, *, seconds: float = START_S) -> None:
        """Starts all servers and waits until they answer. Raises EngineError, with all of them ended, where one does
        not."""
        try:
            for server in self.servers:
                server.start()
            _wait(self.servers, seconds)
        except BaseException:
            self.close()
            raise

    def restart(self, index: int, *, seconds: float = START_S) -> Endpoint:
        """Ends what is left of a server and starts it again, with the weights that its model's files have; returns
        where it listens."""
        server = self.servers[index]
        with self._lock:
            if self._closed:
                raise EngineError(f"{server} is not started again: the run has ended")
            server.stop()
            server.start()
        # Outside the lock: close() must be able to end a server that never answers.
        try:
            _wait([server], seconds)
        except BaseException:
            with self._lock:
                server.stop()
            raise
        return server.endpoint

    def stop(self, index: int) -> None:
        """Ends a server, which may be started again."""
        with self._lock:
            self.servers[index].stop()

    def cause(self, index: int) -> str:
        """Why a server ended, for a message; empty where it has not."""
        server = self.servers[index]
        return f"{server} ended: {server.cause()}" if server.died() else ""

    def close(self) -> None:
        """Ends all servers; none can be started again."""
        with self._lock:
            self._closed = True
            for server in self.servers:  # all at once: each may take GRACE_S
                server.ask_to_end()
            for server in self.servers:
                server.stop()
        if self._remove is not None:
            self._remove()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wait(servers: Sequence[ServerProcess], seconds: float) -> None:
    until, waiting = time.monotonic() + seconds, list(servers)
    while waiting := [server for server in waiting if not server.ready()]:
        if time.monotonic() > until:
            raise EngineError(f"{waiting[0]} did not answer within {seconds:g} s: {waiting[0].cause()}")
        time.sleep(_LOOK_S)


def _place_for_sockets(folder: Path) -> Path:
    """``folder`` if sockets can be there (its path may be too long, its file system may have none), else a new one."""
    trial = folder / "trial.sock"
    if len(os.fsencode(trial)) <= _SOCKET_BYTES:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            trial.unlink(missing_ok=True)
            probe.bind(str(trial))
            trial.unlink()
            return folder
    return Path(tempfile.mkdtemp(prefix="trew-servers-"))  # with mode 0700


def _last_words(log: Path, began: int) -> list[str]:
    """The lines of a log that say what went wrong: the first error, which is the cause of those after it, and the
    last; the last lines where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(began)
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [_PREFIX.sub("", line).strip()[:500] for line in text.splitlines()]
    errors = list(dict.fromkeys(line for line in lines if _ERROR.search(line)))
    # A single error is first and last in one: the slice leaves it once.
    return [errors[0], *errors[-1:]][: len(errors)] if errors else [line for line in lines if line][-_SHOWN_LINES:]
