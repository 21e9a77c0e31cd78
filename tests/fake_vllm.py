"""A stand-in for a vLLM server: its routes and error bodies, as 0.32 has them, around a model of transformers.

``python tests/fake_vllm.py MODEL SOCKET`` serves one by itself, :func:`run` with vLLM's own options; :func:`serving`
runs one in this process, with ``faults`` that a test sets while it runs. Sleep is stricter than vLLM's, which crashes
or runs out of memory later: a call in the wrong order is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from safetensors import safe_open
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer
from trew_vllm import memory, published, stream
from trew_vllm.ahead import Ahead

from fake_answers import Row, cut
from fake_places import Places
from trew.rollout.vllm.endpoint import Endpoint

CPU = torch.device("cpu")
CLOSE = object()
"""An answer that is none: the connection is closed, as by a process that was killed."""


@dataclass
class Faults:
    """What goes wrong; each is off by default."""

    dies_after: int = -1  # tokens of one request, after which the server is as if it had been killed
    hangs: bool = False  # no more tokens of completions, although it answers all questions
    status: int = 0  # of every answer to generate
    away: int = 0  # the status of every answer, as of a proxy in front of a server that is being started
    bad_answers: int = 0  # this many answers are changed by ``spoil``
    spoil: Any = None  # a function of an answer's JSON, which it changes
    stale: tuple[str, ...] = ()  # parts of names of tensors that an update leaves as they are
    lies: str = ""  # what it calls its weights, whatever it was told
    failing: dict[str, int] = field(default_factory=dict)  # calls to a route that get status 500 from here on
    slow: float = 0.0  # seconds per token
    sleepless: bool = False  # says that it is awake when it was told to sleep
    lengths: Any = None  # a function of the seed: after how many tokens a completion ends, if it has not before
    in_update: Any = None  # a function of how many tensors of an update were loaded, called after each


class FakeVllm:
    """A server's state and routes. ``calls`` has all requests, as (method and path, JSON)."""

    def __init__(self, folder: Path, *, token: str = "", backend: str = "trew_files") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.head = self.model.get_output_embeddings().weight.detach().clone()  # a copy, as in vLLM's CPU build
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.token, self.faults, self.folder, self.backend = token, Faults(), folder, backend
        self.settings = {
            "model": str(folder), "dtype": "torch.float32", "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm", "max_model_len": self.model.config.max_position_embeddings,
        }  # fmt: skip
        self.name = "policy"  # of its model, in /v1
        self.version, self.root, self.started, self.received = "default", None, False, False
        self.ahead = Ahead()
        self.paused, self.tokens, self.dead = False, 0, False
        self.renewed = False  # whether weights came since it slept
        self.converted: dict[str, torch.Tensor] = {}  # of an update: what transformers renames or fuses
        self.asleep: set[str] = set()  # what memory was given up for
        self.calls: list[tuple[str, Any]] = []
        self.begun = 0  # requests whose generation has begun: faults that are set now leave them alone
        self.lock, self.threads, self.places = threading.Lock(), ThreadPoolExecutor(64), Places()
        routes: dict[tuple[str, str], Any] = {
            ("GET", "/health"): self.health, ("GET", "/version"): lambda r: {"version": "0.32.0"},
            ("GET", "/openapi.json"): lambda r: {"paths": {path: {} for _, path in routes}},
            ("GET", "/server_info"): self.info,
            ("GET", "/v1/models"): self.models, ("GET", "/metrics"): self.metrics,
            ("POST", "/v1/completions"): self.completions, ("POST", "/detokenize"): self.detokenize,
            ("POST", "/inference/v1/generate"): self.places.of(self.generate), ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume, ("GET", "/is_paused"): lambda r: {"is_paused": self.paused},
            ("POST", "/sleep"): self.sleep, ("POST", "/wake_up"): self.wake_up,
            ("GET", "/is_sleeping"): lambda r: {"is_sleeping": bool(self.asleep) and not self.faults.sleepless},
            ("POST", "/init_weight_transfer_engine"): self.init, ("POST", "/start_weight_update"): self.start,
            ("POST", "/update_weights"): self.update, ("POST", "/finish_weight_update"): self.finish,
            ("GET", "/get_world_size"): lambda r: {"world_size": 1},
            ("GET", "/weight_info"): lambda r: {"weight_version": self.faults.lies or self.version},
        }  # fmt: skip
        self.app = Starlette(routes=[self._route(m, path, do) for (m, path), do in routes.items()])

    def _route(self, method: str, path: str, do: Any) -> Route:
        async def handle(request: Request) -> Response:
            body = json.loads(await request.body() or b"null")
            if path in ("/sleep", "/wake_up"):  # as vLLM's, they take nothing from the body
                body = {key: request.query_params.getlist(key) for key in request.query_params}
            self.calls.append((f"{method} {path}", body))
            if self.dead:
                return Broken()
            if self.faults.away:
                return PlainTextResponse("no server", self.faults.away)
            guarded = path.startswith(("/v1", "/inference"))  # and no other: as --api-key does
            if self.token and guarded and request.headers.get("authorization") != f"Bearer {self.token}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            if self.faults.failing.get(path, 0):
                self.faults.failing[path] -= 1
                return error(500, "RuntimeError: as the test wants it")
            try:
                found = await asyncio.get_running_loop().run_in_executor(self.threads, do, body)
            except Refusal as refusal:
                return error(refusal.status, str(refusal))
            if found is CLOSE:
                return Broken()
            return found if isinstance(found, Response) else JSONResponse(found)

        return Route(path, handle, methods=[method])

    # ---- questions

    def health(self, body: Any) -> Any:
        return Response()

    def info(self, body: Any) -> Any:
        return {"vllm_config": {"model_config": self.settings, "weight_transfer_config": {"backend": self.backend}}}

    def models(self, body: Any) -> Any:
        card = {"id": self.name, "root": str(self.folder), "parent": None}
        return {"data": [card | {"max_model_len": self.settings["max_model_len"]}]}

    def detokenize(self, body: Any) -> Any:
        self._check_name(body)
        return {"prompt": self.tokenizer.decode(body["tokens"])}

    def _check_name(self, body: Any) -> None:
        if body["model"] != self.name:
            raise Refusal(404, f"The model `{body['model']}` does not exist.", "NotFoundError")

    def metrics(self, body: Any) -> Any:
        labels = '{engine="0",model_name="policy"}'
        return PlainTextResponse(
            "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.\n"
            f"vllm:prompt_tokens_total{labels} 7.0\n"
            "# HELP vllm:generation_tokens_total Number of generation tokens processed.\n"
            f"vllm:generation_tokens_total{labels} {float(self.tokens)}\n"
        )

    # ---- sleep

    def sleep(self, body: Any) -> Any:
        """Level 2 keeps nothing: what is left of the weights is noise."""
        if body.get("level") != ["2"]:
            raise Refusal(400, f"this stand-in sleeps at level 2 only, got {body}")
        if not self.asleep:
            with self.lock, torch.no_grad():
                for p in [*self.model.parameters(), self.head]:
                    p.fill_(0.5)
        self.asleep, self.paused, self.renewed = {"weights", "kv_cache"}, True, False
        return Response()

    def wake_up(self, body: Any) -> Any:
        for tag in body.get("tags", ["weights", "kv_cache"]):
            if tag == "kv_cache" and tag in self.asleep and not self.renewed:
                raise Refusal(500, "the KV cache would take the memory that loading weights needs")
            self.asleep.discard(tag)
        self.paused = self.paused and bool(self.asleep)  # the scheduler goes on once everything is there
        return Response()

    def _require_awake(self, *tags: str) -> None:
        if missing := self.asleep.intersection(tags):
            raise Refusal(500, f"CUDA error: an illegal memory access was encountered ({', '.join(missing)} asleep)")

    # ---- weights

    def pause(self, body: Any) -> Any:
        self.paused = True
        with self.lock:  # a token that is being made is made
            return {"status": "paused"}

    def resume(self, body: Any) -> Any:
        self._require_awake("weights", "kv_cache")
        self.paused = False
        return {"status": "resumed"}

    def init(self, body: Any) -> Any:
        info = body["init_info"]
        try:
            published.check_format(info["format"])
            if "gpu" in info:
                self._require("trew_memory")
                memory.check_gpu(info["gpu"], CPU)
            elif "torch" in info:
                self._require("trew_stream")
                stream.check_sender(info["torch"], info["backend"], torch.device("cpu"))
            elif not (root := Path(info["root"])).is_dir():
                raise published.Refused(f"root: got {root}, accepts the absolute path of a folder on this host")
            else:
                self.root = root
                if info.get("folder"):
                    self.ahead.begin(root, info["folder"], info["manifest_digest"])
        except published.Refused as refused:
            raise Refusal(500, f"Refused: {refused}") from None
        return {"message": "Weight transfer initialized"}

    def start(self, body: Any) -> Any:
        self._require_awake("weights")
        if self.started:
            raise Refusal(500, "start_weight_update called while a weight update is already active.")
        self.started, self.received, self.converted = True, False, {}
        return {"message": "Weight update started"}

    def update(self, body: Any) -> Any:
        """As trew-vllm's engines do it: what goes wrong once a tensor was loaded has changed a part of the model."""
        info = body["update_info"]
        own = dict(self.model.named_parameters())
        if not self.started:
            raise Refusal(500, "RuntimeError: start_weight_update must be called first")
        try:
            with contextlib.closing(self._opened(info)) as opened:
                for number, (key, value) in enumerate(opened.tensors()):
                    with torch.no_grad(), self.lock:
                        self._load(key, value, own)
                    if self.faults.in_update is not None and self.faults.in_update(number) is CLOSE:
                        self.dead = True
                        return CLOSE
        except published.Refused as refused:
            self.started = False
            raise Refusal(500, f"Refused: {refused}") from None
        self.received = True
        return {"message": "Weights updated"}

    def _opened(self, info: Any) -> Any:
        if "offer" in info:
            self._require("trew_stream")
            offer = stream.read(info["offer"], CPU)
            self._check_model(offer.tensors)
            return stream.Receiver(offer, rank=1, device=CPU)
        if "memory" in info:
            self._require("trew_memory")
            shared = memory.read(info["memory"], CPU)
            self._check_model(shared.tensors)
            return memory.Mapped(shared, root=self.root, device=CPU)
        if self.root is None:
            raise Refusal(500, "RuntimeError: init_weight_transfer_engine must be called first")
        version = self.ahead.take(self.root, info["folder"], info["manifest_digest"])
        self._check_model(version.tensors)
        return _Files(version)

    def _check_model(self, tensors: Any) -> None:
        tied = self.model.config.tie_word_embeddings
        published.check_model(tensors, started_from=published.checkpoint(self.folder), tied=tied)

    def _require(self, backend: str) -> None:
        if self.backend != backend:
            raise Refusal(500, "ValueError: Invalid init_info for FilesEngine")

    def _load(self, key: str, value: torch.Tensor, own: dict[str, Any]) -> None:
        if any(part in key for part in self.faults.stale):
            return
        if key == "lm_head.weight":
            self.head.copy_(value)
        if key in own:
            own[key].copy_(value)
        elif key != "lm_head.weight":
            self.converted[key] = value.clone()

    def _convert(self) -> None:
        """Loads tensors that transformers holds under other names than files."""
        loaded, info = type(self.model).from_pretrained(
            None, config=self.model.config, state_dict=self.converted, output_loading_info=True
        )
        own = dict(self.model.named_parameters())
        for name, value in loaded.state_dict().items():
            if name not in info["missing_keys"]:
                self._load(name, value, own)
        self.converted = {}

    def finish(self, body: Any) -> Any:
        if not self.received:
            raise Refusal(500, "RuntimeError: nothing was received")
        if self.converted:
            with torch.no_grad(), self.lock:
                self._convert()
        self.started = self.received = False
        self.version = body["weight_version"]
        self.renewed = True
        return {"message": "Weight update finished"}

    # ---- completions

    def generate(self, body: Any) -> Any:
        self._require_awake("weights", "kv_cache")
        if self.faults.status:
            return error(self.faults.status, "EngineCore encountered an issue.", kind="EngineDeadError")
        self.begun += 1
        sampling, prompt = body["sampling_params"], body["token_ids"]
        if sampling["temperature"] == 0 and sampling["n"] > 1:
            raise Refusal(400, f"n must be 1 when using greedy sampling, got {sampling['n']}.", "BadRequestError")
        if not 0.0 <= sampling["temperature"] <= 2.0:
            raise Refusal(400, f"temperature must be in [0, 2], got {sampling['temperature']}.", "BadRequestError")
        rows = [Row(sampling["seed"] + i, self._length(sampling, i)) for i in range(sampling["n"])]
        scored = self._scored(prompt) if sampling.get("prompt_logprobs") is not None else None
        while running := [row for row in rows if not row.reason]:
            if self._gone(running):
                return CLOSE
            while self.paused or (self.faults.hangs and scored is None):
                if self.dead:
                    return CLOSE
                time.sleep(0.005)
            time.sleep(self.faults.slow)
            with self.lock:
                if not self.paused:  # pause() may have come since, and an update after it
                    self._token(prompt, running, sampling)
        answer = {"choices": [row.choice(i) for i, row in enumerate(rows)], "prompt_logprobs": scored}
        if self.faults.bad_answers and scored is None:
            self.faults.bad_answers -= 1
            self.faults.spoil(answer)
        return answer

    def completions(self, body: Any) -> Any:
        """Of one prompt of token ids: its log-probs, and no more of what is generated than how much it is."""
        self._check_name(body)
        ids, most = body["prompt"], self.settings["max_model_len"]
        if len(ids) + body["max_tokens"] > most:
            raise Refusal(400, f"This model's maximum context length is {most} tokens.", "BadRequestError")
        if max(ids) >= len(self.head):
            raise Refusal(400, f"Token id {max(ids)} is out of vocabulary", "BadRequestError")
        while self.paused or self.faults.hangs:
            if self.dead:
                return CLOSE
            time.sleep(0.005)
        self.tokens += len(ids)
        choice = {
            "index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None,
            "token_ids": None, "prompt_token_ids": None,
            "prompt_logprobs": self._scored(ids, likeliest=body["prompt_logprobs"]),
        }  # fmt: skip
        answer = {"object": "text_completion", "model": self.name, "choices": [choice]}
        if self.faults.bad_answers:
            self.faults.bad_answers -= 1
            if self.faults.spoil(answer) is CLOSE:
                return CLOSE
        return answer

    def _length(self, sampling: dict[str, Any], i: int) -> int:
        wanted = self.faults.lengths(sampling["seed"] + i) if self.faults.lengths else sampling["max_tokens"]
        return min(wanted, sampling["max_tokens"])

    def _gone(self, running: list[Row]) -> bool:
        if 0 <= self.faults.dies_after <= max(len(row.tokens) for row in running):
            self.dead = True
        return self.dead

    @torch.no_grad()
    def _logits(self, ids: list[list[int]]) -> torch.Tensor:
        hidden = self.model.base_model(input_ids=torch.tensor(ids)).last_hidden_state
        return (hidden @ self.head.t()).float()

    def _scored(self, prompt: list[int], likeliest: int = 0) -> list[Any]:
        with self.lock:
            logits = self._logits([prompt])[0]
        logits_asked = self.settings["logprobs_mode"].endswith("logits")
        values = logits if logits_asked else logits.log_softmax(-1)
        rows = []
        for i, token in enumerate(prompt[1:]):
            ids = [token, *values[i].topk(likeliest).indices.tolist()]
            rows.append({str(t): {"logprob": max(float(values[i, t]), -9999.0), "rank": 1} for t in ids})
        return [None, *rows]

    def _token(self, prompt: list[int], rows: list[Row], sampling: dict[str, Any]) -> None:
        """Gives every row a token of the sampling distribution."""
        logits = self._logits([prompt + row.tokens for row in rows])[:, -1]
        for row, z in zip(rows, logits, strict=True):
            probs = (z / (max(sampling["temperature"], 0.01) if sampling["temperature"] else 1e-4)).softmax(-1)
            token = int(torch.multinomial(cut(probs, sampling), 1, generator=row.draws))
            if len(row.tokens) + 1 == row.most < sampling["max_tokens"]:  # ends where ``lengths`` says
                token = sampling["stop_token_ids"][0]
            row.add(token, float(cut(probs, sampling)[token].log()), self.version)
            self.tokens += 1
            text = self.tokenizer.decode(row.tokens, skip_special_tokens=True)
            found = [s for s in sampling.get("stop", ()) if s in text]
            if token in sampling.get("stop_token_ids", ()):
                row.reason, row.stop = "stop", token
            elif found:
                row.reason, row.stop = "stop", found[0]
            elif len(row.tokens) == row.most:
                row.reason = "length"


class _Files:
    """The tensors of a version in files."""

    def __init__(self, version: published.Version) -> None:
        self.version = version

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.version.files:
            with safe_open(self.version.folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - no mapping
                    yield key, file.get_tensor(key)

    def close(self) -> None:
        """Nothing is open."""


class Refusal(Exception):
    def __init__(self, status: int, text: str, kind: str = "InternalServerError") -> None:
        super().__init__(text)
        self.status, self.kind = status, kind


def error(status: int, text: str, *, kind: str = "InternalServerError") -> JSONResponse:
    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": status}}, status)


# --------------------------------------------------------------------------------------------------------------------
# Serving


class Broken(Response):
    """A response that breaks off, as where the process is killed: uvicorn then closes the connection."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        raise ConnectionAbortedError


@contextlib.contextmanager
def serving(fake: FakeVllm, socket: Path | None = None) -> Iterator[Endpoint]:
    """Serves on a Unix socket, or on a free port of 127.0.0.1; ends with the block."""
    where: dict[str, Any] = {"uds": str(socket)} if socket else {"host": "127.0.0.1", "port": 0}
    config = uvicorn.Config(fake.app, log_level="critical", timeout_graceful_shutdown=1, **where)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < end
        time.sleep(0.005)
    try:
        if socket:
            yield Endpoint("http://localhost", socket, fake.token)
        else:
            port = server.servers[0].sockets[0].getsockname()[1]
            yield Endpoint(f"http://127.0.0.1:{port}", None, fake.token)
    finally:
        fake.dead, fake.paused, fake.faults.hangs = True, False, False
        server.should_exit = True
        thread.join()
        fake.threads.shutdown()


def run(arguments: list[str]) -> None:
    """Serves as vLLM's command does, as far as ``--model``, ``--uds``, ``--max-model-len`` and the engine for weights
    go; prints every call."""
    given = dict(itertools.pairwise(arguments))
    backend = json.loads(given["--weight-transfer-config"])["backend"]
    fake = FakeVllm(Path(given["--model"]), token=os.environ.get("VLLM_API_KEY", ""), backend=backend)
    fake.settings["max_model_len"] = int(given["--max-model-len"])
    fake.calls = Printed()
    with serving(fake, Path(given["--uds"])):
        threading.Event().wait()


class Printed(list[tuple[str, Any]]):
    """A list that prints what is appended to it, and keeps nothing."""

    def append(self, item: tuple[str, Any]) -> None:
        print(f"called {item[0]} {json.dumps(item[1])}", flush=True)


if __name__ == "__main__":
    with serving(FakeVllm(Path(sys.argv[1])), Path(sys.argv[2])):
        threading.Event().wait()
