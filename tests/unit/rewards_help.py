"""Groups and reward files for the tests of rewards."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

from rollouts_help import rollout
from trew.config import RewardConfig
from trew.rewards import RewardSet
from trew.rewards.user.process import Process
from trew.types import Group, Prompt, Rollout, ScoredGroup


def completion(text: str, *, tokens: int | None = None) -> Rollout:
    return rollout(len(text) if tokens is None else tokens, text=text)


def group(*texts: str, uid: str = "q1", chat: bool = False, **columns: object) -> Group:
    if chat:
        prompt = Prompt(uid, messages=({"role": "user", "content": "question"},), columns=columns)
    else:
        prompt = Prompt(uid, text="question", columns=columns)
    return Group(prompt, tuple(map(completion, texts)))


def write(folder: Path, source: str, name: str = "my_rewards.py") -> str:
    """Writes a reward file and returns its path, to which ``:function`` is added."""
    path = folder / name
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return str(path)


def functions_of(tmp_path: Path, source: str, *names: str, **settings: object) -> RewardSet:
    """The rewards of functions in a file with this source: ``f``, or those that are named."""
    path = write(tmp_path, source)
    configs = [RewardConfig(name=f"{path}:{name}", **settings) for name in names or ("f",)]  # type: ignore[arg-type]
    return RewardSet.from_config(configs)


def verdicts_of(scored: list[ScoredGroup]) -> list[tuple[float | None, str]]:
    """Value and status of every completion."""
    return [(score.value, score.status) for one in scored for score in one.scores]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Waits until a process has ended; False if it is still alive after ``seconds``."""
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def pid_of(rewards: RewardSet) -> int:
    """The guardian of the process that the functions run in."""
    runner = rewards.host
    assert isinstance(runner, Process)
    return runner._pool._idle[0].process.pid
