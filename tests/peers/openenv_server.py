"""An OpenEnv server on this machine: a counting game, by the package's own classes. Prints its port, and serves."""

from __future__ import annotations

import socket

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Move(Action):
    said: str


class Seen(Observation):
    text: str = ""


class Counting(Environment):
    """Says a number, begun by the seed; "more" adds one. Three is the end."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self._number = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number = int(seed) % 2 + kwargs.get("add", 0)
        return Seen(text=str(self._number), done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        if action.said == "crash":
            raise ValueError("the game crashed")
        self._number += action.said == "more"
        done = self._number >= 3
        return Seen(text=str(self._number), done=done, reward=1.0 if done else None)

    @property
    def state(self):
        return State(step_count=self._number)


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Counting, Move, Seen, max_concurrent_envs=8)
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
