"""A run that is cut off anywhere and resumed is the run that was never cut off: weights, rows, completions, to the bit.

The cuts are made inside the process, so that every single write of a run can be one: an exception that nothing catches
stands for kill -9 (what is on disk then is what a killed process leaves), a pending signal for Ctrl-C.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import tiny
import trew
from trew import loop
from trew.config import Config, parse
from trew.display import Silent
from trew.interrupt import Interrupted
from trew.learner import checkpoint
from trew.track import Run

REWARD = """
def odd(completions, completion_ids, answer, **columns):
    return [round(sum(i % 2 for i in ids) / len(ids), 1) for ids in completion_ids]

def some(completions, completion_ids, answer, **columns):
    return [float(ids[0] % 2) if int(a) % 3 else 0.0 for ids, a in zip(completion_ids, answer)]
"""

# Few prompts (every run passes through several epochs), inner updates, a reference model; and refills.
SETTINGS = {
    "grpo": {"objective": {"preset": "grpo", "beta": 0.01}, "reward": "odd"},
    "dapo": {"objective": {"preset": "dapo", "beta": 0.0}, "reward": "some"},
}


class Killed(BaseException):
    """kill -9: nothing may catch it and tidy up."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def settings(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "reward.py").write_text(REWARD)

    def make(kind: str, out: str, **sections: dict) -> Config:
        table = {
            "model": str(model), "steps": 4, "seed": 3, "out": str(folder / out),
            "data": {"task": "arithmetic", "args": {"ops": ["+"], "smallest": 1, "largest": 4}},
            "rewards": [{"name": f"{folder}/reward.py:{SETTINGS[kind]['reward']}"}],
            "rollout": {"prompts": 4, "completions": 3, "max_tokens": 4, "refills": 3},
            "objective": SETTINGS[kind]["objective"],
            "learner": {"lr": 1e-2, "minibatch_prompts": 2, "inner_updates": 2, "schedule": "linear"},
            "eval": {"size": 4, "every": 2},
            "checkpoint": {"every": 3},
        }  # fmt: skip
        for name, section in sections.items():
            table[name] = {**table[name], **section}
        return parse(table)

    return make


@pytest.fixture(scope="module", params=SETTINGS)
def whole(request, settings):
    config = settings(request.param, f"{request.param}-whole")
    trew.train(config, display=Silent())
    return request.param, Path(config.out)


def rows(run: Path) -> list[dict]:
    clocks = {"seconds", "tokens_per_second"}
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in clocks and not k.endswith("/seconds")} for line in lines
    ]


def same(a: Path, b: Path) -> None:
    first, second = (load_file(run / "final" / "model.safetensors") for run in (a, b))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert rows(a) == rows(b)
    for kind in ("rollouts", "evals"):
        names = [sorted(p.name for p in (run / kind).iterdir()) for run in (a, b)]
        assert names[0] == names[1]
        for name in names[0]:
            x, y = (pq.read_table(run / kind / name).drop_columns(["reward_seconds"]) for run in (a, b))
            assert x.equals(y), (kind, name)
    before, after = (json.loads((run / "summary.json").read_text()) for run in (a, b))
    for key in ("steps", "n_eval", "accuracy_before", "accuracy_after"):
        assert before[key] == after[key], key


def cut(monkeypatch, owner: object, name: str, at: int, how: str, *, after: bool) -> None:
    """The ``at``-th call of ``owner.name`` is the last: before it acts, or right after."""
    real, calls = getattr(owner, name), [0]

    def last(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at:
            result = real(*args, **kwargs) if after else None
            if how == "kill":
                raise Killed(f"{name}, call {at}")
            signal.raise_signal(signal.SIGTERM if how == "term" else signal.SIGINT)
            return result if after else real(*args, **kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, last)


def run_to_the_end(config: Config, *, limit: int = 3) -> None:
    for _ in range(limit):
        try:
            trew.train(config, resume=True, display=Silent())
            return
        except (Killed, Interrupted):
            continue
    raise AssertionError("the run never finished")


CUTS = [
    (loop, "measure", 1, "int", False), (loop, "measure", 1, "kill", True), (loop, "measure", 2, "term", False),
    (loop, "measure", 2, "kill", False), (loop, "measure", 3, "int", False), (Run, "write_eval", 2, "kill", False),
    (Run, "log", 2, "kill", False), (Run, "log", 3, "kill", True), (Run, "log", 4, "kill", True),
    (Run, "log", 6, "kill", True), (Run, "write_rollouts", 2, "kill", False), (Run, "write_rollouts", 4, "kill", True),
    (loop, "collect", 2, "int", False), (loop, "update", 3, "kill", True), (loop, "update", 4, "term", False),
    (loop, "save", 1, "kill", True), (loop, "save", 2, "kill", False), (checkpoint, "_sync", 1, "kill", False),
    (checkpoint, "_rotate", 1, "kill", False), (Run, "write_summary", 1, "kill", False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "at", "how", "after"), CUTS, ids=[f"{n}-{at}-{how}-{after}" for _, n, at, how, after in CUTS]
)
def test_cut_off_and_resumed_equals_never_cut_off(whole, settings, monkeypatch, owner, name, at, how, after):
    kind, reference = whole
    config = settings(kind, f"{kind}-cut")
    shutil.rmtree(config.out, ignore_errors=True)
    cut(monkeypatch, owner, name, at, how, after=after)
    with pytest.raises((Killed, Interrupted)):
        trew.train(config, display=Silent())
    monkeypatch.undo()
    run_to_the_end(config)
    same(reference, Path(config.out))


def test_an_evaluation_that_was_made_up_for_is_counted_once_however_often_the_run_dies(whole, settings, monkeypatch):
    """Interrupted in the evaluation after step 2, killed after it was made up for: its row must not be there twice."""
    kind, reference = whole
    config = settings(kind, f"{kind}-twice")
    shutil.rmtree(config.out, ignore_errors=True)
    cut(monkeypatch, loop, "measure", 2, "int", after=False)
    with pytest.raises(Interrupted):
        trew.train(config, display=Silent())
    monkeypatch.undo()
    cut(monkeypatch, loop, "update", 1, "kill", after=True)
    with pytest.raises(Killed):
        trew.train(config, resume=True, display=Silent())
    monkeypatch.undo()
    run_to_the_end(config)
    same(reference, Path(config.out))
