"""Run folders as `trew view` finds them, and a browser's part of the conversation with its server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from rollouts_help import rollout
from trew.runs import RunFolder
from trew.runs.rollouts import Sampler
from trew.types import Group, Prompt, Rollout, Score, ScoredGroup, Span, Turn
from trew.view.app import application
from trew.view.guard import Access
from trew.view.library import Library
from trew.view.store import Store

TOKEN, PORT = "right-token", 8411
CONFIG = """\
model = "none"
steps = {steps}
seed = {seed}
out = "runs/x"
[data]
task = "arithmetic"
[objective]
preset = "grpo"
[learner]
lr = {lr}
[rollout]
max_tokens = 6
"""


def client(*folders: Path, **access: Any) -> TestClient:
    """A browser that has the token."""
    app = application(Library(folders), Access(TOKEN, PORT, **access), Store())
    return TestClient(app, base_url=f"http://127.0.0.1:{PORT}", headers={"Authorization": f"Bearer {TOKEN}"})


def get(page: TestClient, path: str, code: int = 200, **query: Any) -> Any:
    """The JSON at an address below /api. Refuses numbers that JSON does not have."""
    found = page.get(f"/api/{path}", params=query or None)
    assert found.status_code == code, found.text[:500]

    def refuse(name: str) -> None:
        raise AssertionError(f"{path} holds {name}")

    return json.loads(found.content.decode("utf-8"), parse_constant=refuse)


def group(
    uid: str, *texts: str, scores: tuple[float | None, ...] = (), prompt: str | None = None, **columns: Any
) -> ScoredGroup:
    """A group of answers, each as long in tokens as in characters, with their scores and two rewards."""
    asked = Prompt(uid, text=f"question {uid}" if prompt is None else prompt, columns=columns or {"answer": "4"})
    given = scores or tuple(float(i % 2) for i in range(len(texts)))
    made = tuple(rollout(_ids(text), text=text, logprobs=-1.0, policy_logprobs=-1.5, entropies=0.5) for text in texts)
    return ScoredGroup(Group(asked, made), tuple(score(value) for value in given))


def score(value: float | None) -> Score:
    if value is None:
        return Score(None, "timeout", parts={"right": None, "form": 0.25}, statuses={"right": "timeout"})
    return Score(value, parts={"right": value, "form": 0.5}, statuses={"right": "scored"}, extracted=str(value))


def _ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "replace") or b" ", np.uint8).astype(np.int64)


def episode(uid: str) -> ScoredGroup:
    """Two turns of a conversation: the policy calls a tool, which answers, and says something."""
    asked = ({"role": "user", "content": "go"},)
    heard = ({"role": "tool", "content": "warm <b>"},)
    call = ({"name": "look", "arguments": {"where": "up"}},)
    zeros = np.zeros(2, np.float32)

    def turn(context: list[int], ids: list[int], text: str, messages: Any, calls: Any, reward: float | None) -> Turn:
        return Turn(np.array(context), np.array(ids), zeros - 1, zeros - 1, zeros, (Span(3, 0, 2),), text, "stop",
                    "state", messages, calls, reward, {"steps": 1.0})  # fmt: skip

    turns = (turn([7, 8, 9], [65, 66], "AB", asked, call, 0.25), turn([32, 33, 34], [67, 68], "CD", heard, (), None))
    made = Rollout(turns, "finished", "", "done")
    return ScoredGroup(Group(Prompt(uid, messages=asked, columns={"episode": 1}), (made,)), (score(0.5),))


def write_step(run: RunFolder, step: int, *groups: ScoredGroup, **row: Any) -> None:
    """Completions and the metrics of a step, in the order in which a run writes them."""
    advantages = [[0.5 - i for i in range(len(g.group.rollouts))] for g in groups]
    run.write_rollouts(
        step, groups, advantages=advantages, trained_on=groups[:1], sampler=Sampler("embedded", "float32")
    )
    run.log({"step": step, "reward": step / 10, "accuracy": 0.5, **row})


def write_eval(run: RunFolder, step: int, *groups: ScoredGroup) -> None:
    run.write_eval(step, groups)
    run.log({"step": step, "eval_accuracy": 0.25, "eval_low": 0.1, "eval_high": 0.4, "eval_n": len(groups)})


def make_run(folder: Path, *, steps: int = 3, seed: int = 0, lr: float = 1e-3, finished: bool = True) -> Path:
    """A run of two groups per step; the answers to "a" get better, those to "b" worse."""
    with RunFolder.open(folder) as run:
        run.write_config(CONFIG.format(steps=steps, seed=seed, lr=lr))
        write_eval(run, 0, group("held", "no", scores=(0.0,)))
        for step in range(1, steps + 1):
            up, down = (step - 1) / max(steps - 1, 1), 1 - (step - 1) / max(steps - 1, 1)
            a = group("a", f"wrong {step}", "long answer", scores=(up, up))
            write_step(run, step, a, group("b", "x", "y", "z", scores=(down, 0.0, None)))
        write_eval(run, steps, group("held", "yes", scores=(1.0,)))
        if finished:
            before = {"mean": 0.25, "low": 0.1, "high": 0.4}
            run.write_summary({"steps": steps, "peak_memory_bytes": 2**30, "accuracy_before": before})
    return folder
