"""What trew refuses: a taskset that two agents play."""

from __future__ import annotations

import verifiers.v1 as vf


class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class Config(vf.EnvConfig):
    white: vf.AgentConfig = vf.AgentConfig()
    black: vf.AgentConfig = vf.AgentConfig()


class Duel(vf.Env[Config]):
    async def run(self, task, agents):
        raise NotImplementedError


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt="Play."), self.config.task)


__all__ = ["Duel", "Tasks"]
