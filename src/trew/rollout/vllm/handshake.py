"""Checks that a server fits a run, by its version, routes, settings and model, before the run uses it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from . import environment
from .client import ServerRefused, call
from .endpoint import Endpoint
from .routes import prepare

ROUTES = (
    "/inference/v1/generate", "/health", "/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/weight_info", "/server_info",
)  # fmt: skip
"""The routes that a run uses. vLLM registers control routes in development mode only."""
SLEEP_ROUTES = ("/sleep", "/wake_up", "/is_sleeping")
"""More routes, of servers that take turns with the learner."""
STREAM_ROUTES = ("/get_world_size",)
"""More routes, of servers that get weights as streams."""
SETTINGS = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
"""Required in vLLM's model_config: log-probs of the sampling distribution, and no defaults from the model's files."""
ENGINES = {"auto": "trew_files", "files": "trew_files", "nccl": "trew_stream", "ipc": "trew_memory"}
"""The weight transfer engine of trew-vllm that cluster.sync needs, of servers whose GPUs are not known."""
SECONDS = 120.0
"""Limit of each call: the first request for a server's settings also collects facts about its machine."""
_NO_FOLDER = "accepts the absolute path of a folder on this host"
"""A part of trew-vllm's message about a folder that is not there."""
_NOT_SEEN = {
    "trew_files": "does not see the folder {}, and weights reach it as files; put the run (out) on a file system that "
    "the server's machine shares under the same path, readable for the server's user",
    "trew_memory": "does not see {} of rank 0's host, and with cluster.sync = 'ipc' weights reach it there; it runs on "
    "another host or in a container of its own: set cluster.sync = 'files' or 'nccl'",
}
_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 in its environment and the options --enable-scale-out --logprobs-mode "
    "processed_logprobs --generation-config vllm --scheduling-policy priority --weight-transfer-config "
    '\'{"backend": "BACKEND"}\''
)

_SERVE = "start trew serve again, of this version of trew and with the run's recipe (cluster.sync sets the backend)"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run requires of its servers. ``dtype``: the learner's; ``vocabulary``: rows of the model's embedding;
    ``length``: tokens of the longest prompt with its completion; ``sleeps``: servers take turns with the learner;
    ``backend``: the weight transfer engine of the run's route; ``plays``: completions are episodes; ``started``: the
    run has started the servers itself; ``served``: ``trew serve`` has; ``keeps``: completions run, and wait for a
    place, while weights change."""

    dtype: str
    vocabulary: int
    length: int
    sleeps: bool = False
    backend: str = "trew_files"
    plays: bool = False
    started: bool = False
    served: bool = False
    keeps: bool = False

    @property
    def start(self) -> str:
        """How a server that fits is started: by ``trew serve``, or the command line options and variables of vLLM."""
        return _SERVE if self.served else _START.replace("BACKEND", self.backend)


def check(endpoint: Endpoint, expected: Expected, *, root: Path) -> None:
    """Checks a server. ``root`` is the folder below which versions of the weights will be published, as
    files or as segments of shared memory.

    Raises ConfigError with every problem, each with what the server has and what is needed; ServerGone if it does not
    answer."""
    if found := list(_problems(endpoint, expected, root)):
        raise ConfigError([f"server {endpoint}: {problem}" for problem in found])


def room(endpoint: Endpoint) -> int | None:
    """The tokens that a server has room for, of a prompt with its completion; None if it does not report it."""
    config = _ask(endpoint, "/server_info", config_format="json").get("vllm_config") or {}
    length = (config.get("model_config") or {}).get("max_model_len")
    return length if isinstance(length, int) else None


def _problems(endpoint: Endpoint, expected: Expected, root: Path) -> Iterator[str]:
    version = _ask(endpoint, "/version").get("version")
    if not environment.supported(str(version)):
        yield f"has vLLM {version}, accepts {environment.accepts()}"
    streams = STREAM_ROUTES if expected.backend == "trew_stream" else ()
    needed = (*ROUTES, *(SLEEP_ROUTES if expected.sleeps else ()), *streams)
    missing = [route for route in needed if route not in _ask(endpoint, "/openapi.json").get("paths", {})]
    if missing:
        yield f"has no route {', '.join(missing)}; {expected.start}"
    # What needs a missing route is not asked: the reason is told already.
    if "/server_info" not in missing:
        config = _ask(endpoint, "/server_info", config_format="json").get("vllm_config", {})
        yield from _of_settings(config, expected)
    if "/init_weight_transfer_engine" not in missing and expected.backend != "trew_stream":
        yield from _of_folder(endpoint, root, expected.backend)


def _ask(endpoint: Endpoint, route: str, **params: str) -> Mapping[str, Any]:
    found = call(endpoint, "GET", route, what=f"handshake, {route}", timeout_s=SECONDS, params=params or None)
    return found if isinstance(found, dict) else {}


def _of_settings(config: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    """Yields the settings that do not fit. Settings that a version of vLLM does not report are skipped: the canary
    after every update would show the difference."""
    model = config.get("model_config") or {}
    for key, want in SETTINGS.items():
        if (got := model.get(key)) not in (None, want):
            yield f"has {key} = {got!r}, needs {want!r}; {expected.start}"
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    # All engines of trew-vllm take files as well.
    if backend not in ({*ENGINES.values()} if expected.backend == "trew_files" else {expected.backend}):
        yield f"has the weight transfer backend {backend!r}, needs {expected.backend!r}; {expected.start}"
    policy = (config.get("scheduler_config") or {}).get("policy")
    if expected.keeps and policy not in (None, "priority"):
        yield (
            f"has the scheduling policy {policy!r}, needs 'priority' in an asynchronous run: every update would wait "
            f"for all completions in its queue; {expected.start}"
        )
    yield from _of_model(model, expected)


def _of_model(model: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    """Yields what does not fit of the model that is served: its precision, its room, its vocabulary."""
    dtype = str(model.get("dtype")).removeprefix("torch.")
    # "None": the server does not report it.
    if dtype not in ("None", expected.dtype):
        way = "trew serve with --set learner.dtype=" if expected.served else "it with --dtype "
        yield f"computes in {dtype}, the learner in {expected.dtype}; start {way}{expected.dtype}"
    length = model.get("max_model_len")
    if isinstance(length, int) and length < expected.length:
        what = "episodes" if expected.plays else "prompts and completions"
        yield (f"has max_model_len = {length}, {what} take up to {expected.length} tokens; {_room(expected, length)}")
    vocabulary = _vocabulary(model.get("model"))
    if vocabulary not in (None, expected.vocabulary):
        yield (
            f"serves {model.get('model')} with a vocabulary of {vocabulary}, the run's model has "
            f"{expected.vocabulary}; start it with the run's model"
        )


def _room(expected: Expected, length: int) -> str:
    """What to do where a server has room for ``length`` tokens, which are too few."""
    # A server that the run or trew serve starts gets its length from these keys alone.
    more, lacks = f"start it with --max-model-len {expected.length}", expected.length - length
    if expected.started:
        more = f"raise data.max_prompt_tokens by {lacks}"
    elif expected.served:
        more = f"start trew serve with the run's recipe, or with data.max_prompt_tokens raised by {lacks} in its own"
    if expected.plays:
        return f"{more}, or set environment.episode_tokens to at most {length}"
    return f"{more}, or lower data.max_prompt_tokens, rollout.max_tokens or eval.max_tokens"


def _vocabulary(folder: object) -> int | None:
    """Returns the vocabulary size of a model in a folder on this machine; None if it cannot be read."""
    try:
        table = json.loads((Path(str(folder)) / "config.json").read_text(encoding="utf-8"))
        return int((table.get("text_config") or table)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _of_folder(endpoint: Endpoint, root: Path, backend: str) -> Iterator[str]:
    """Yields a problem if the server reads another format or does not see ``root``. It must find a new folder there,
    with a random name, which another machine's folder of the same path does not have."""
    with tempfile.TemporaryDirectory(prefix=".seen-", dir=root) as folder:
        if says := refusal(endpoint, {"root": folder, "format": environment.FORMAT}):
            yield f"cannot be given weights: {says}" if _NO_FOLDER not in says else _NOT_SEEN[backend].format(root)


def refusal(endpoint: Endpoint, introduction: Mapping[str, object]) -> str:
    """Returns the server's reason not to take weights with this introduction; empty if it takes them."""
    try:
        prepare(endpoint, "handshake", introduction, timeout_s=SECONDS)
    except ServerRefused as error:
        return str(error)
    return ""
