"""The chat loop in which verifiers plays a taskset for us: a harness of its kind, within the process of the episode.

verifiers runs a model in a program, and the program speaks to a server that records the trace. Its contract is that
every call goes through that server; the loop itself may run anywhere. This module imports verifiers, and is imported by
:mod:`.verifiers` alone.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp  # pyrefly: ignore[missing-import]
import verifiers.v1 as vf  # pyrefly: ignore[missing-import]
from verifiers.v1.dialects.chat import message_to_wire  # pyrefly: ignore[missing-import]
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyrefly: ignore[missing-import]
from verifiers.v1.runtimes import ProgramResult  # pyrefly: ignore[missing-import]

__all__ = ["PolicyHarness"]  # by which verifiers finds it


class PolicyHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model, runs the tools that it calls, and ends with a reply that calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(message_to_wire, prompt))
        messages = [{"role": "system", "content": system}] * bool(system) + said
        servers = {"mcpServers": {name: {"url": url, "timeout": 60.0} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as stack:
            schemas, dispatch, connections = await connect_mcp(servers, stack)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))  # the policy takes its time
            )
            # body has the list itself: messages that are appended below are in the next request.
            body = {"model": ctx.model, "messages": messages, **({"tools": schemas} if schemas else {})}
            while (reply := await _answer(session, endpoint, secret, body, trace)) is not None:
                messages.append(reply)
                calls = reply.get("tool_calls") or []
                for call in calls:
                    function = call["function"]
                    result = await _result(function["name"], function["arguments"], dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                if not calls:
                    break
        return ProgramResult(0, "", "")


async def _answer(session: Any, endpoint: str, secret: str, body: dict[str, Any], trace: Any) -> dict[str, Any] | None:
    """The model's reply; None where a rule of the task has ended the episode. Raises RuntimeError where there is none
    for another reason: verifiers would judge what there is, as if the policy had ended it."""
    url, headers = f"{endpoint}/chat/completions", {"Authorization": f"Bearer {secret}"}
    async with session.post(url, json=body, headers=headers) as answer:
        if answer.status == 200:
            return (await answer.json())["choices"][0]["message"]
        if trace.stop_condition is not None:
            return None
        raise RuntimeError(f"verifiers gave no reply (status {answer.status}): {(await answer.text())[:2000]}")


async def _result(name: str, arguments: str, dispatch: Any, connections: Any) -> Any:
    """What a tool returned. What is wrong with a call is told the policy, which wrote it."""
    if name not in dispatch:
        return f"error: there is no tool {name!r}; there are {', '.join(dispatch)}"
    try:
        return await call_mcp(connections, dispatch, name, json.loads(arguments))
    except Exception as error:
        return f"error: {error}"
