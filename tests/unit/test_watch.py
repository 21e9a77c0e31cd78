"""Rewards in a run on a tiny model: overlap changes nothing, failures are saved, hangs end, checks speak."""

from __future__ import annotations

import dataclasses
import json
import string
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import tiny
import trew
from trew.config import Config, DataConfig, EnvironmentConfig, parse
from trew.errors import RewardError
from trew.objective import TokenBatch, preset
from trew.rollout.chat import Renderer
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.training import watch
from trew.types import Group, Prompt, Sampling
from trew.utils.console import Silent

REWARDS = """
import itertools, os, time
calls = itertools.count()

def shorter(completion_ids, **columns):
    return [sum(i % 2 for i in ids) / 6 for ids in completion_ids]

def raises(completion_ids, **columns):
    return [1 / (sum(ids) - sum(ids)) for ids in completion_ids]

def odd(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]

def unsteady(completions):
    return [float(next(calls)) for _ in completions]

def hangs(completions):
    time.sleep(1000)

def knows_its_call(completions):
    return [float(len(completions))] * len(completions)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "llama")


class Watching(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def configured(folder: Path, model: Path, *rewards: dict, **settings: dict) -> Config:
    (folder / "rewards.py").write_text(REWARDS)
    table = {
        "model": str(model), "steps": 3, "out": str(folder / "run"), "rewards": list(rewards),
        "data": {"task": "arithmetic", "args": {"ops": ["+"], "largest": 20}},
        "rollout": {"prompts": 4, "completions": 4, "max_tokens": 8, "batch": 6},
        "learner": {"lr": 1e-3}, "eval": {"size": 4}, "objective": {"preset": "grpo"},
    }  # fmt: skip
    return parse(table | {k: {**table.get(k, {}), **v} for k, v in settings.items()}, base=folder)


def rows(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "seconds" not in k and "per_second" not in k} for row in lines]


def test_a_run_that_grades_while_it_generates_is_the_same_run(tmp_path: Path, model: Path) -> None:
    rewards = (
        {"name": "arithmetic", "weight": 0.5},
        {"name": "rewards.py:shorter", "calls": "group"},
        {"name": "rewards.py:knows_its_call", "weight": 0.1},
        {"name": "repetition", "args": {"ngram_size": 1}, "gate": False},
    )
    runs = []
    for name, overlap in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        config = configured(tmp_path / name, model, *rewards, rollout={"overlap": overlap})
        trew.train(config, display=Silent())
        runs.append(Path(config.out))
    first, second = (load_file(run / "final" / "model.safetensors") for run in runs)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert rows(runs[0]) == rows(runs[1])
    for path in sorted((runs[0] / "rollouts").glob("*.parquet")):
        a, b = (
            pq.read_table(run / "rollouts" / path.name).drop_columns(["reward_seconds", "part_seconds"]) for run in runs
        )
        assert a.equals(b)
        assert {dict(row)["knows_its_call"] for row in a.column("parts").to_pylist()} == {16.0}
        assert dict(a.column("statuses").to_pylist()[0]).keys() == dict(a.column("parts").to_pylist()[0]).keys()
    row = rows(runs[0])[1]
    assert {"reward/shorter", "reward/repetition", "reward/arithmetic/no_answer", "monitor/order"} <= set(row)


def test_groups_come_as_soon_as_they_are_finished(model: Path) -> None:
    tokenizer = tiny.tokenizer(chat=False)
    engine = TorchEngine(tiny.model(), Renderer(tokenizer), batch=4)
    prompts = [Prompt(f"{i}", text="ab" * (i + 1)) for i in range(5)]
    how = Sampling(max_tokens=12, seed=1)
    plain = generate(engine, prompts, n=3, sampling=how)
    told: list[tuple[int, Group]] = []
    finished: list[tuple[int, int]] = []
    done = [0]

    def progress(count: int) -> None:
        done[0] += count

    def on_group(number: int, group: Group) -> None:
        told.append((number, group))
        finished.append((number, done[0]))

    groups = generate(engine, prompts, n=3, sampling=how, progress=progress, on_group=on_group)
    assert sorted(number for number, _ in told) == list(range(5))
    assert all(group is groups[number] for number, group in told)
    assert finished[0][1] < 15  # the first group came while completions of others were still missing
    for a, b in zip(plain, groups, strict=True):
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            assert x.token_ids.tolist() == y.token_ids.tolist()
            assert x.policy_logprobs.tolist() == y.policy_logprobs.tolist()
            assert (x.text, x.finish_reason) == (y.text, y.finish_reason)


def test_objectives_that_take_rewards_one_by_one_get_them_with_gates(tmp_path: Path, model: Path) -> None:
    """What gdpo was given, against what rollouts say."""
    rewards = {"name": "rewards.py:odd", "gate": True, "weight": 0.5}, {"name": "rewards.py:shorter"}
    config = configured(tmp_path, model, *rewards, objective={"preset": "gdpo"})
    trew.train(dataclasses.replace(config, steps=1), display=Silent())
    rows = pq.read_table(Path(config.out) / "rollouts" / "000001.parquet").to_pylist()
    given = torch.tensor([[p["odd"], p["shorter"] if p["odd"] > 0 else 0.0] for p in (dict(r["parts"]) for r in rows)])
    assert 0 < float(given[:, 0].mean()) < 1  # the gate is open for some and closed for others
    expected = preset("gdpo").prepare(
        TokenBatch.from_padded(
            logprobs=torch.zeros(len(rows), 1), mask=torch.ones(len(rows), 1), rewards=given,
            group_ids=torch.arange(len(rows)) // 4, reward_weights=torch.tensor([0.5, 1.0]),
        )
    )  # fmt: skip
    assert expected.advantages is not None
    trained = [row["advantages"][0] for row in rows]
    assert trained == pytest.approx(expected.advantages.tolist(), abs=1e-5)


def test_a_reward_that_raises_leaves_its_completion_in_the_runs_folder(tmp_path: Path, model: Path) -> None:
    config = configured(tmp_path, model, {"name": "arithmetic"}, {"name": "rewards.py:raises"})
    with pytest.raises(RewardError, match="ZeroDivisionError") as error:
        trew.train(config, display=Silent())
    path = Path(config.out) / "failed_reward.json"
    assert f"saved with its traceback in {path}. Repair the function, or set on_failure" in str(error.value)
    saved = json.loads(path.read_text())
    assert "rewards.py" in saved["traceback"]
    [row] = saved["completions"]
    assert {"uid", "prompt", "completion", "columns"} == set(row)
    trew.train(configured(tmp_path, model, {"name": "arithmetic"}), overwrite=True, display=Silent())
    assert not path.exists()


def test_skip_is_proposed_only_where_it_would_go_on(tmp_path: Path, model: Path) -> None:
    few = tmp_path / "few.py"
    few.write_text("def few(completions): return [1.0]\n")
    config = configured(tmp_path, model, {"name": f"{few}:few", "on_failure": "skip"})
    with pytest.raises(RewardError, match=r"returned 1 values for .*\. Repair the function$"):
        trew.train(config, display=Silent())


def test_a_run_in_which_nothing_can_be_judged_ends(tmp_path: Path, model: Path) -> None:
    display = Watching()
    config = configured(
        tmp_path, model, {"name": "rewards.py:hangs", "timeout_s": 0.05}, rollout={"prompts": 1, "completions": 2},
        eval={"size": 1},
    )  # fmt: skip
    config = dataclasses.replace(config, steps=20)
    with pytest.raises(RewardError, match=r"3 steps in a row in which no completion got a value \(timeout\)"):
        trew.train(config, display=display)
    assert any("did not return within 0.05 s" in text for text in display.warnings)
    assert "did not return within" in (Path(config.out) / "events.log").read_text()
    assert rows(Path(config.out))[1]["reward/hangs/timeout"] == 1.0


def test_an_episode_that_fails_is_told_with_its_cause(tmp_path: Path, model: Path) -> None:
    (tmp_path / "game.py").write_text(
        "def game(row, seed):\n    yield f'hello {seed}'\n    raise RuntimeError('no database')\n"
    )
    display = Watching()
    config = configured(
        tmp_path, model, environment={"name": "game.py:game", "turns": 2}, eval={"size": 1},
        rollout={"max_tokens": 24, "stop": [*string.ascii_letters]}, data={"task": "prompts", "args": {}},
        track={"max_failed": 1.0},
    )  # fmt: skip
    trew.train(dataclasses.replace(config, steps=1), display=display)
    told = [text for text in display.warnings if text.startswith("environment: the episode of prompt 'episode-")]
    assert told[0].endswith("raised and is not judged: RuntimeError: no database")
    failed = rows(Path(config.out))[1]["environment/failed"]
    assert 2 ** (len(told) - 1) <= failed * 16 < 2 ** len(told)  # the first, second, fourth, eighth time
    assert any("episodes failed in their environment" in text for text in display.warnings) or failed < 1


def test_the_end_of_a_run_that_cannot_be_judged_says_what_to_try() -> None:
    assert watch._advice(Config(model="m")) == "try the reward by itself (trew rewards test NAME)"
    own = EnvironmentConfig(name="/my games.py:game", args={"size": 6, "word": "a"}, tools=("calculator",))
    data = DataConfig(task="gsm8k", train="rows.jsonl")
    assert watch._advice(Config(model="m", environment=own, data=data)) == (
        "try the environment by itself (trew env '/my games.py:game' --check --set size=6 'word=\"a\"' --tools "
        "calculator --task gsm8k --data rows.jsonl)"
    )


def test_an_unsteady_reward_is_told(tmp_path: Path, model: Path) -> None:
    for every, told in ((2, True), (0, False)):
        display = Watching()
        config = configured(tmp_path, model, {"name": "rewards.py:unsteady"}, track={"regrade_every": every})
        trew.train(config, overwrite=every == 0, display=display)
        found = [text for text in display.warnings if "judges the same completion differently" in text]
        assert bool(found) == told
