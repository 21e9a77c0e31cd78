"""``verifiers:ID``: a taskset of verifiers (its v1 API, from 0.4 on) that one agent plays. Arguments go to its config.

verifiers speaks to a model server; here that server is the policy, in the process of the episode. What the agent reads
must only grow: an episode in which an earlier message changes, a branch, fails and is not judged. So does one that asks
for other sampling than the recipe's. The reward is the trace's, at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from ...errors import ConfigError
from ...utils.installing import install_extra
from ..protocol import Call, Environment, Reply, Say, Tool

EXTRA = "verifiers"
HARNESS = "trew_policy"  # the name by which verifiers imports the loop
MOST_TASKS = 1000  # of a taskset without an end
SAMPLING = frozenset({"model", "messages", "tools", "stream", "parallel_tool_calls"})
"""Of a request, what says nothing of how replies are drawn. ``stream`` is checked by its value."""


def adapt(name: str, args: Mapping[str, Any]) -> tuple[Callable[[], Environment], Mapping[str, str]]:
    """Loads the taskset, and sees that one agent can play it here. Raises ConfigError."""
    who = f"environment.name: verifiers:{name}"
    try:
        from verifiers.v1.utils import loaders  # pyrefly: ignore[missing-import]

        from . import verifiers_loop
    except ImportError as error:
        raise ConfigError(f"{who} needs verifiers 0.4 or later ({error}): {install_extra(EXTRA)}") from None
    sys.modules.setdefault(HARNESS, verifiers_loop)
    try:
        # Resolved twice: the first config names the one agent, and the second gives it our own loop.
        [seat, *others] = _seats(loaders.resolve_env_config({"taskset": {"id": name, **args}}))
        if others:
            raise ConfigError(f"{who} is played by several agents ({', '.join([seat, *others])}); one is taken")
        if (harness := loaders.default_harness_id(name)) != "bash":
            raise ConfigError(f"{who} brings a harness of its own, {harness}; only the chat loop of trew is taken")
        player = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
        config = loaders.resolve_env_config({"taskset": {"id": name, **args}, seat: player})
        if set_ := getattr(config, seat).sampling:
            raise ConfigError(f"{who} sets its own sampling ({set_.model_dump(exclude_unset=True)}); the recipe does")
        env = loaders.load_environment(config)
        if env.taskset.task_type().NEEDS_CONTAINER:
            raise ConfigError(f"{who} needs a container, which trew does not start")
        tasks = list(islice(iter(env.taskset), MOST_TASKS if not env.taskset.bounded else None))
    except ConfigError:
        raise
    except Exception as error:  # an unknown package, arguments that its configuration refuses, missing data
        raise ConfigError(f"{who} cannot be loaded: {type(error).__name__}: {error}") from None
    if not tasks:
        raise ConfigError(f"{who} has no tasks")
    return lambda: VerifiersEnvironment(env, tasks), {}


def _seats(config: Any) -> list[str]:
    """The names of the agents."""
    from verifiers.v1.configs.agent import agent_config_fields  # pyrefly: ignore[missing-import]

    return list(agent_config_fields(config))


class VerifiersEnvironment:
    """One episode. verifiers plays it in a thread, and waits there for the policy's replies."""

    def __init__(self, env: Any, tasks: list[Any]) -> None:
        self.env, self.tasks = env, tasks
        # Two directions, two queues: the episode waits for SimpleQueue in its own thread; asyncio's queue is not safe
        # between threads, so the event loop itself puts replies there.
        self._heard: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._said: list[Any] = []  # all that was said, as verifiers shows it
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._seed = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Say:
        self._seed = seed
        self._thread.start()
        return self._next()

    def step(self, reply: Reply) -> Say:
        message = {"role": "assistant", "content": reply.text, **_calls(reply)}
        self._said.append(_plain(message))
        self._loop.call_soon_threadsafe(self._answers.put_nowait, message)
        return self._next()

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the thread is at its end, and has closed the loop
                self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(timeout=5)

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _next(self) -> Say:
        """What the policy reads next, or the end."""
        what, found = self._heard.get()
        if what == "failed":
            raise RuntimeError(found)
        if what == "ended":
            return found
        # In the common form of _plain: the two sides write equal messages differently (parts, absent fields).
        before, messages = len(self._said), [_plain(message) for message in found["messages"]]
        if messages[:before] != self._said:
            raise RuntimeError("a branch: verifiers changed an earlier message, and only linear traces are taken")
        if len(messages) == before:
            raise RuntimeError("verifiers asks for another reply to the same messages; only linear traces are taken")
        self._said = messages
        shown = tuple(found["messages"][before:])
        # Tools may come with the opening alone, by the protocol.
        return Say(shown) if before else Say(shown, tools=tuple(map(_tool, found.get("tools") or ())))

    # ---- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            ended = self._loop.run_until_complete(self._played())
        except asyncio.CancelledError:
            return
        except BaseException:
            self._heard.put(("failed", traceback.format_exc()))
        else:
            self._heard.put(ended)
        finally:
            self._loop.close()

    async def _played(self) -> tuple[str, Any]:
        from aiohttp import web  # pyrefly: ignore[missing-import]
        from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyrefly: ignore[missing-import]

        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._asked)
        server = web.AppRunner(app)
        await server.setup()
        try:
            site = web.TCPSite(server, "127.0.0.1", 0)
            await site.start()
            port = server.addresses[0][1]
            context = ModelContext("policy", EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1"))
            async with self.env.serving():
                # The seed alone chooses the task: rows of data say nothing here.
                task = self.tasks[self._seed % len(self.tasks)]
                episode = await self.env.run_slot(*self.env.slots(task), context)
        finally:
            await server.cleanup()
        return _ended(episode)

    async def _asked(self, request: Any) -> Any:
        """A request of verifiers for a reply."""
        from aiohttp import web  # pyrefly: ignore[missing-import]

        body = await request.json()
        if problem := _refusal(body):
            self._heard.put(("failed", problem))
            return web.json_response({"error": {"message": problem}}, status=400)
        self._heard.put(("asked", body))
        # The request stays open meanwhile: verifiers waits for the policy as for a slow server.
        message = await self._answers.get()
        calls = isinstance(message, dict) and "tool_calls" in message
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # of which verifiers makes metrics
        return web.json_response(
            {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice],
             "usage": usage}
        )  # fmt: skip


def _refusal(body: Mapping[str, Any]) -> str:
    """Why a request cannot be honoured; empty if it can.

    >>> _refusal({"model": "policy", "messages": [], "temperature": 0.0})
    'verifiers asks for temperature = 0.0; replies are drawn as the recipe says'
    """
    if body.get("stream"):
        return "verifiers asks for a stream of tokens; whole replies are given"
    unheard = sorted(key for key in body.keys() - SAMPLING if body[key] is not None)
    if not unheard:
        return ""
    # Asked for something that the recipe decides: honouring it would train on replies of another distribution.
    return f"verifiers asks for {unheard[0]} = {body[unheard[0]]!r}; replies are drawn as the recipe says"


def _ended(episode: Any) -> tuple[str, Any]:
    """The last thing to tell: the reward, or what went wrong."""
    problems = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if problems:
        return "failed", "\n".join(f"{error.type}: {error.message}\n{error.traceback or ''}" for error in problems)
    [trace, *others] = episode.traces
    if others:
        return "failed", f"the episode has {len(others) + 1} traces; one is taken"
    numbers = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return "ended", Say(reward=float(trace.reward), done=True, metrics=numbers)


def _plain(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two forms of one message have in common. Raises RuntimeError where a part is not text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if other := [part.get("type") for part in content if part.get("type") != "text"]:
            raise RuntimeError(f"a message has a part of type {other[0]!r}; only text is taken")
        content = "".join(part["text"] for part in content)
    calls = message.get("tool_calls") or ()
    return message["role"], content, tuple((c["function"]["name"], c["function"]["arguments"]) for c in calls)


def _calls(reply: Reply) -> dict[str, Any]:
    def one(number: int, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
        return {"id": call.id or f"call{number}", "type": "function", "function": function}

    return {"tool_calls": [one(i, call) for i, call in enumerate(reply.calls)]} if reply.calls else {}


def _tool(schema: Mapping[str, Any]) -> Tool:
    """A tool that verifiers runs: it has no function here, so that its calls come with the reply."""
    function = schema["function"]
    return Tool(function["name"], function.get("description", ""), function.get("parameters", {}))
