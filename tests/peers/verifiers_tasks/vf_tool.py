"""A plain taskset for verifiers with a tool server; and hooks that break what trew can honour, by the task's name."""

from __future__ import annotations

from typing import Literal

import verifiers.v1 as vf


class Adding(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class Config(vf.TasksetConfig):
    breaks: Literal["", "history", "reward"] = ""
    sum: int = 5
    turns: int = 0


class Data(vf.TaskData):
    sum: int
    breaks: str
    turns: int


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adding(vf.ToolsetConfig())]

    @vf.intercept
    async def rewrites(self, request: vf.Request) -> vf.Request:
        if self.data.breaks == "history" and len(request.messages) > 1:
            first = request.messages[0].model_copy(update={"content": "Another question."})
            return request.model_copy(update={"messages": [first, *request.messages[1:]]})
        return request

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        replies = sum(message.role == "assistant" for message in trace.branches[-1].messages) if trace.branches else 0
        return 0 < self.data.turns <= replies

    @vf.reward
    async def right(self, trace) -> float:
        if self.data.breaks == "reward":
            raise ValueError("no judge")
        return float(trace.branches[-1].messages[-1].content == str(self.data.sum))


class Tasks(vf.Taskset[Task, Config]):
    def load(self):
        c = self.config
        yield Task(Data(prompt="Add 2 and 3.", sum=c.sum, breaks=c.breaks, turns=c.turns), c.task)


__all__ = ["Tasks"]

if __name__ == "__main__":
    Adding.run()
