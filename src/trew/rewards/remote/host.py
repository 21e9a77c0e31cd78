"""A reward host: grades what runs send it with the rewards of its own recipe, in the pools of its own machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, RewardError, TrewError
from ...utils.installing import install_extra
from ...utils.listening import Receive, Scope, Send, answer
from ..builtin.kinds import KINDS, graded_together
from ..user import packing
from ..user.wire import decode, encode
from .match import described
from .messages import ABOUT, BEAT_S, CALL, GRADE, MOST_BYTES, packed_verdicts

if TYPE_CHECKING:
    from ..reward_set import RewardSet

AT_ONCE = 64
"""Requests that are worked on at a time; each holds its body in memory, and more wait unread."""


class RewardHost:
    """An ASGI application around ``rewards``, whose files have been loaded."""

    def __init__(self, rewards: RewardSet, *, most_bytes: int = MOST_BYTES) -> None:
        self.rewards, self.about, self.most_bytes = rewards, described(rewards.rewards), most_bytes
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="trew-host")
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._work = {GRADE: self._grade, CALL: self._call}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == ABOUT and method == "GET":
            await answer(send, 200, self.about)
        elif path not in self._work or method != "POST":
            await answer(send, 404, f"a reward host has GET {ABOUT}, POST {GRADE} and POST {CALL}, not {method} {path}")
        else:
            # The slot first: no more than AT_ONCE bodies are in memory.
            async with self._slots:
                body = await _body(receive, self.most_bytes)
                if body is None:
                    await answer(send, 413, f"the body is larger than {self.most_bytes} bytes")
                else:
                    await self._answer(path, body, send)

    async def _answer(self, path: str, body: bytes, send: Send) -> None:
        """Works in a thread, and shows that it does: the answer begins before its end is known, so that what goes wrong
        is said in it."""
        working = asyncio.get_running_loop().run_in_executor(self._threads, self._done, path, body)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        # White space in front, which JSON ignores.
        while not (await asyncio.wait((working,), timeout=BEAT_S))[0]:
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
        await send({"type": "http.response.body", "body": await working})

    def _done(self, path: str, body: bytes) -> bytes:
        try:
            return encode({"answer": self._work[path](*decode(body))})
        except TrewError as error:
            return encode({"error": str(error)})
        except Exception as error:  # a request that makes no sense must not end the host
            return encode({"error": f"a request that cannot be worked on: {type(error).__name__}: {error}"})

    def _grade(self, number: int, items: list[Any]) -> list[Any]:
        reward = self.rewards.rewards[number]
        if reward.kind not in KINDS or not all(isinstance(args, Mapping) for _, _, args in items):
            raise RewardError(f"reward {number} is no built-in, or was asked without arguments")
        return packed_verdicts(graded_together(KINDS[reward.kind], items))

    def _call(self, prompts: Any, calls: Any, step: int) -> list[Any]:
        functions = {r.function.index: r.function for r in self.rewards.rewards if r.function is not None}
        host = self.rewards.host
        if host is None:
            raise RewardError("this host has no functions")
        return packing.packed_outcomes(host.call(packing.unpacked_calls(functions, prompts, calls), step=step))


def check_machine(rewards: RewardSet) -> None:
    """Raises an error where this machine cannot grade: programs in completions need a sandbox, puzzles a package."""
    from ..builtin import reasoning
    from ..sandbox.choose import boundary

    kinds = {reward.kind for reward in rewards.rewards}
    if kinds & {"code_stdin", "code_func"}:
        boundary()
    if "reasoning_gym" in kinds and not reasoning.package_is_there():
        raise ConfigError(f"reward 'reasoning_gym': {install_extra(reasoning.EXTRA)}")


async def _body(receive: Receive, most: int) -> bytes | None:
    """A request's body; None if it is too large."""
    pieces, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client closed the connection")
        pieces.append(message.get("body", b""))
        size, more = size + len(pieces[-1]), message.get("more_body", False)
        if size > most:
            return None
    return b"".join(pieces)
