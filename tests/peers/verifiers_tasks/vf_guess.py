"""A game for verifiers with an environment of its own, which answers one agent's turns."""

from __future__ import annotations

import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.metric
    async def tries(self, trace) -> float:
        return float(sum(message.role == "assistant" for message in trace.branches[-1].messages))


class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guess(vf.Env[Config]):
    async def run(self, task, agents):
        hit = 0.0
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            for _ in range(2):
                if int(said.last_reply) == task.data.number:
                    hit = 1.0
                    break
                said = await talk.turn("higher" if int(said.last_reply) < task.data.number else "lower")
        talk.trace.record_reward("hit", hit, 1.0)


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for number in range(1, 10):
            yield Task(Data(prompt="Guess.", system_prompt="Say a digit.", number=number), self.config.task)


__all__ = ["Guess", "Tasks"]
