"""What rank 0 needs for 10,000 servers: measured costs of one group, token or request, times how many there are.

The numbers of groups, tokens and steps are those of a simulated run. Costs are CPU seconds of this process on one core;
sizes of answers are those of vLLM's format with log-probs. What needs hardware that is not here (weights through a
network card, a file system) is arithmetic with an assumption that the row names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src" / "trew" / "rollout" / "vllm" / "plugin"))
import fake_answers
from trew.config import parse
from trew.rewards import RewardSet
from trew.rollout import codec
from trew.rollout.endings import Endings
from trew.rollout.engine import Request
from trew.rollout.ledger import Ledger
from trew.rollout.vllm.answers import Asked, read
from trew.rollout.vllm.endpoint import Endpoint
from trew.rollout.vllm.engine import VllmEngine
from trew.rollout.vllm.traffic import Traffic
from trew.runs.journal import Journal
from trew.types import Group, Prompt, Rollout, Sampling

PARAMETERS, NETWORK, SHARE = 7.6e9, 50e9, 0.1
"""Of a model in bfloat16; bytes per second of rank 0's network card (400 Gbit/s); the share of a step that servers may
stand still for new weights."""
METRICS_BYTES = 40_000
"""Of a page of counters of a vLLM server, roughly."""


@dataclass(frozen=True, slots=True)
class Traits:
    """A run's counts. ``tokens``: of a completion, in the mean."""

    servers: int
    step_s: float
    prompts: int
    completions: int
    tokens: int

    @property
    def groups(self) -> float:
        """Per second."""
        return self.prompts / self.step_s


def rows(run: Traits) -> list[dict[str, Any]]:
    """By what rank 0 does: how often, at which cost, and how many of its cores that would take."""
    answer, answer_bytes = of_answer(run)
    stored, stored_bytes = of_storing(run)
    asked, looked = of_requests()
    completions = run.groups * run.completions
    counted = [
        ("read answers (JSON)", completions * run.tokens, "token", answer),
        ("look at servers' counters, once a second", run.servers, "server", looked),
        ("choose the server of a group", run.groups, "group", of_dispatch(run)),
        ("send a request and receive its answer", run.groups, "group", asked),
        ("encode and store groups", run.groups, "group", stored),
        ("grade (gsm8k) and combine scores", completions, "completion", of_grading(run)),
        ("ledger entries", run.groups, "group", of_ledger(run)),
        ("choose the groups of a step, 50 looks a second", 50.0, "look", of_choice(run)),
        ("start a thread per server for an update", run.servers / run.step_s, "server", of_threads()),
    ]
    found: list[dict[str, Any]] = [
        {"what": what, "per second": rate, "of": unit, "us each": 1e6 * cost, "cores": rate * cost}
        for what, rate, unit, cost in counted
    ]
    weights = 2 * PARAMETERS
    return [
        *found,
        {"what": "bytes into rank 0, MB/s", "value": completions * run.tokens * answer_bytes / 1e6},
        {"what": "bytes onto the file system (pending groups), MB/s", "value": run.groups * stored_bytes / 1e6},
        {"what": "ledger lines per second", "value": 2 * run.groups},
        {"what": "fsyncs per second, at most", "value": 3 / 0.1},
        {"what": f"weights streamed by rank 0 at {NETWORK / 1e9:g} GB/s, s per step",
         "value": run.servers * weights / NETWORK},
        {"what": f"servers that this feeds in {SHARE:.0%} of a step", "value": SHARE * run.step_s * NETWORK / weights},
        {"what": f"reads of weights as files in {SHARE:.0%} of a step, GB/s",
         "value": run.servers * weights / (SHARE * run.step_s) / 1e9},
    ]  # fmt: skip


def cpu(do: Callable[[], Any], *, repeats: int = 5) -> float:
    """CPU seconds of one call: the least of several."""
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        do()
        taken.append(time.process_time() - begin)
    return min(taken)


def answered(run: Traits) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = []
    for i in range(run.completions):
        row = fake_answers.Row(i, run.tokens)
        for token, logprob in zip(
            rng.integers(150_000, size=run.tokens), -rng.exponential(size=run.tokens), strict=True
        ):
            row.add(int(token), float(logprob), "v1")
        row.tokens[-1], row.reason, row.stop = 1, "stop", 1
        found.append(row.choice(i))
    return {"choices": found}


def asked_of(run: Traits) -> Asked:
    endings = Endings(ids=frozenset({1}), strings=())
    sampling = Sampling(max_tokens=2 * run.tokens)
    return Asked(np.arange(200), run.completions, sampling, endings, 151_936, {"v1": 1})


def text_of(ids: Any) -> str:
    return "a word " * (len(ids) // 2) + "\n#### 42"


def of_answer(run: Traits) -> tuple[float, float]:
    data, asked = json.dumps(answered(run)).encode(), asked_of(run)
    tokens = run.completions * run.tokens
    return cpu(lambda: read(json.loads(data), asked, decode=text_of)) / tokens, len(data) / tokens


def group_of(run: Traits) -> Group:
    turns = read(answered(run), asked_of(run), decode=text_of)
    prompt = Prompt("p", text="x" * 800, columns={"answer": "#### 42"})
    return Group(prompt, tuple(Rollout((turn,)) for turn in turns))


def of_storing(run: Traits) -> tuple[float, float]:
    group, many = group_of(run), 16
    with tempfile.TemporaryDirectory() as place:
        journal = Journal(Path(place))
        seconds = cpu(lambda: journal.put([codec.encode(group) for _ in range(many)])) / many
    return seconds, len(codec.encode(group))


def of_grading(run: Traits) -> float:
    rewards = RewardSet.from_config(parse({"model": "m", "rewards": [{"name": "gsm8k"}]}).rewards)
    group, many = group_of(run), 50
    return cpu(lambda: rewards.score([group] * many)) / many / run.completions


def of_ledger(run: Traits) -> float:
    many = 2000
    book = Ledger(prompts=many, staleness=1, steps=10**6, journal=[].append)
    begin = time.process_time()
    for step in range(1, 4):
        numbers = [book.issue(uid=f"t/{i}", place=i, step=step, attempt=0).number for i in range(many)]
        for number in numbers:
            book.finish(number, versions=[step - 1])
        book.train(step, version=step, numbers=book.choose(step, most=many) or [])
        book.forget(step)
    return (time.process_time() - begin) / (3 * many)


def of_choice(run: Traits) -> float:
    """A look by a step that waits for a straggler."""
    book = Ledger(prompts=run.prompts, staleness=1, steps=10)
    for i in range(2 * run.prompts):
        book.issue(uid="", place=i, step=1, attempt=0)
    for i in range(1, 2 * run.prompts):
        book.finish(i, versions=[0])
    book.train(1, version=1, numbers=range(1, run.prompts + 1))
    for i in range(2 * run.prompts, 3 * run.prompts):
        book.issue(uid="", place=i, step=3, attempt=0)
        book.finish(i, versions=[1])
    assert book.choose(2, most=run.prompts) is None
    return cpu(lambda: [book.choose(2, most=run.prompts) for _ in range(100)]) / 100


def of_dispatch(run: Traits) -> float:
    renderer: Any = SimpleNamespace(
        encode=lambda prompt: [1, 2], stop_ids=frozenset({1}), stop=(), split_stop=lambda stop: (frozenset(), ())
    )
    facts: Any = SimpleNamespace(vocabulary=10, ends=frozenset(), check=lambda *given: None)
    engine = VllmEngine([Endpoint(f"http://h:{i}") for i in range(run.servers)], renderer, facts=facts)
    for server in engine.servers:
        server.version = 0
    engine._traffic = SimpleNamespace(send=lambda *given: None)  # type: ignore[assignment]
    many, made = 50, iter(range(10**9))

    def submit() -> None:
        for i in [next(made) for _ in range(many)]:
            engine.submit([Request(f"{i}/0", Prompt(f"p{i}", text="x"), 0, Sampling(max_tokens=9))])

    return cpu(submit, repeats=3) / many


def of_requests() -> tuple[float, float]:
    """Of a request with a small answer, and of a page of counters."""
    with tempfile.TemporaryDirectory() as place:
        socket = Path(place) / "s.sock"
        server = multiprocessing.get_context("fork").Process(target=reply, args=(socket,), daemon=True)
        server.start()
        while not socket.exists():
            time.sleep(0.01)
        traffic, endpoint, many = Traffic(hang_s=1e6), Endpoint("http://localhost", socket), 200
        try:

            def ask() -> None:
                for i in range(many):
                    traffic.send(i, endpoint, {"token_ids": list(range(200))})
                for _ in range(many):
                    key, found = traffic.answers.get()
                    assert not isinstance(found, Exception), found
                    traffic.taken(key)

            asked = cpu(ask, repeats=3) / many
            line, loop = traffic._lines[endpoint], traffic._loop
            assert loop is not None

            async def look() -> None:
                for _ in range(many):
                    assert await line._tokens(5.0) == 14.0

            looked = cpu(lambda: asyncio.run_coroutine_threadsafe(look(), loop).result(), repeats=3) / many
        finally:
            traffic.stop()
            server.kill()
            server.join()
    return asked, looked


def reply(socket: Path) -> None:
    """A server that answers every request at once."""
    page = b"# HELP something about vLLM, which has many counters\n" * (METRICS_BYTES // 53)
    page += b'vllm:prompt_tokens_total{engine="0"} 7.0\nvllm:generation_tokens_total{engine="0"} 7.0\n'

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            head = await reader.readuntil(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if length:
                await reader.readexactly(int(length[0].split(b":")[1]))
            body = page if head.startswith(b"GET") else b'{"choices": []}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
            writer.write(body)
            await writer.drain()

    async def until_gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handle(reader, writer)

    async def serve() -> None:
        server = await asyncio.start_unix_server(until_gone, path=socket)
        await server.serve_forever()

    asyncio.run(serve())


def of_threads() -> float:
    def start() -> None:
        end = threading.Event()
        threads = [threading.Thread(target=end.wait) for _ in range(500)]
        for thread in threads:
            thread.start()
        end.set()
        for thread in threads:
            thread.join()

    return cpu(start, repeats=3) / 500
