"""Steps with little or nothing to learn from: finite, nothing changed that should not, no prompt mixed into another."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import tiers
import trew
from run_help import configured, rows, save_models
from trew.errors import EngineError
from trew.rollout.torch_engine.decode import Schedule
from trew.rollout.torch_engine.engine import TorchEngine
from trew.utils.console import Silent

REWARDS = """
def constant(completions, **columns):
    return [0.1] * len(completions)

def zero(completions, **columns):
    return [0.0] * len(completions)

def by_prompt(completions, completion_ids, prompts, **columns):
    # Prompts are worlds apart; some completions have no value, of one prompt all but one.
    level = [100.0 * int(str(p)[-40:].count("7")) for p in prompts]
    return [None if ids[0] % 3 == 0 else base + ids[-1] / 260 for base, ids in zip(level, completion_ids)]

def odd(completions, completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))["native"]


def run(folder: Path, model: Path, reward: str, **settings: Any) -> tuple[Path, dict[int, dict[str, Any]]]:
    (folder / "rewards.py").write_text(REWARDS)
    config = configured(folder, model, rewards=[{"name": f"{folder}/rewards.py:{reward}"}], **settings)
    trew.train(config, display=Silent())
    return Path(config.out), rows(config)


def unchanged(out: Path, model: Path) -> bool:
    first, last = load_file(model / "model.safetensors"), load_file(out / "final" / "model.safetensors")
    return all(torch.equal(t, last[name]) for name, t in first.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"reward": "constant"},  # no group has variance; 0.1 is no float, so that means and deviations round
        {"reward": "constant", "objective": {"preset": "reinforce-pp", "beta": 0.0}},  # whitened over the batch
        {"reward": "constant", "objective": {"preset": "gdpo", "beta": 0.0}},
        {"reward": "odd", "objective": {"preset": "grpo", "beta": 0.0, "overlong_filtering": True}},  # all are cut off
        # The policy is the reference. The sampler's log-probs were taken for the policy's, and what they differ by was
        # scaled to deviation 1.
        {"reward": "zero", "objective": {"preset": "grpo", "beta": 0.04, "kl": "k1", "kl_place": "reward"}},
        {"reward": "zero", "objective": {"preset": "rloo", "beta": 0.05}},
        {"reward": "zero", "objective": {"preset": "reinforce-pp", "beta": 0.01}, "lora": {"rank": 2}},
    ],
    ids=lambda s: f"{s['reward']}-{s.get('objective', {}).get('preset', 'grpo')}",
)
def test_a_step_without_signal_is_exactly_nothing(settings, model, tmp_path, monkeypatch):
    monkeypatch.setattr(TorchEngine, "stop_ids", frozenset())  # random weights draw an end token now and then
    settings = dict(settings)
    out, found = run(tmp_path, model, settings.pop("reward"), learner={"weight_decay": 0.1}, **settings)
    for row in found.values():
        assert (row["loss"], row["grad_norm"], row["policy_version"], row["bad_steps"]) == (0.0, 0.0, 0, 0)
        assert (row["advantage_share"], row["skipped_steps"]) == (0.0, 1.0)
        assert all(value is None or math.isfinite(value) for value in row.values() if not isinstance(value, str))
    assert unchanged(out, model)


@pytest.mark.parametrize("place", ["reward", "to-go"])
def test_stale_completions_of_the_reference_have_no_kl(place, model, tmp_path):
    """Both steps sample with the first weights, which the second has left; rounding errors would be times 1e4."""
    objective = {"preset": "rloo", "beta": 1e4, "kl_place": place}
    out, found = run(tmp_path, model, "odd", objective=objective, steps=2,
                     rollout={"prompts": 4, "completions": 4, "stale_steps": 1})  # fmt: skip
    assert [(found[s]["staleness"], found[s]["policy_version"]) for s in (1, 2)] == [(0, 1), (1, 2)]
    table = pq.read_table(out / "rollouts" / "000002.parquet").to_pylist()
    for i, row in enumerate(table):
        group = [other["score"] for j, other in enumerate(table) if other["uid"] == row["uid"] and j != i]
        expected = row["score"] - sum(group) / 3
        assert row["advantages"] == pytest.approx([expected] * len(row["token_ids"]), abs=1e-6)


def test_completions_without_a_value_leave_their_group_and_no_other_prompt_takes_part(model, tmp_path):
    out, found = run(tmp_path, model, "by_prompt", steps=2, rollout={"prompts": 6, "completions": 6})
    table = [r for s in (1, 2) for r in pq.read_table(out / "rollouts" / f"{s:06d}.parquet").to_pylist()]
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in table:
        groups[row["step"], row["uid"]].append(row)
    assert any(row["score"] is None for row in table)
    assert len({round(row["score"], -2) for row in table if row["score"] is not None}) > 1
    for group in groups.values():
        known = torch.tensor([row["score"] for row in group if row["score"] is not None], dtype=torch.float64)
        for row in group:
            if row["score"] is None or len(known) < 2:
                assert not any(row["advantages"])
                continue
            expected = float((row["score"] - known.mean()) / known.std())
            assert row["advantages"] == pytest.approx([expected] * len(row["token_ids"]), rel=1e-3, abs=1e-3)
    assert all(0 < found[s]["unscored_share"] < 1 for s in found)


def test_completions_of_nothing_but_an_end_token_are_learned_from(model, tmp_path, monkeypatch):
    ends = frozenset(range(260))
    monkeypatch.setattr(TorchEngine, "stop_ids", property(lambda self: ends))
    out, found = run(tmp_path, model, "odd", rollout={"prompts": 4, "completions": 8})
    assert set(pq.read_table(out / "rollouts" / "000001.parquet")["completion"].to_pylist()) == {""}
    assert all(row["completion_length"] == 1 and math.isfinite(row["loss"]) for row in found.values())
    assert found[3]["policy_version"] == 3


ROOMS = """
from pathlib import Path

def room(row, seed):
    tried = Path(__file__).with_name(row["prompt"])
    if "shuts" in tried.name and tried.exists():
        raise OSError("the door is shut")
    tried.touch()  # before the run all openings are tried, and must work
    reply = yield "go on"
    return len(reply.text) % 2
"""


OPENINGS = {("shuts", "open"): True, ("open", "shuts"): True, ("shuts", "also shuts"): False}


@pytest.mark.parametrize(("prompts", "updates"), tiers.thinned(OPENINGS, [1, 2], keep=2))
def test_groups_that_failed_in_their_openings_are_not_compared_with_the_sampler(prompts, updates, model, tmp_path):
    (tmp_path / "rooms.py").write_text(ROOMS)
    for name, texts in {"rows": prompts, "held": ["held out"]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = configured(
        tmp_path, model, rewards=[], steps=2, rollout={"prompts": 2, "completions": 2}, eval={"every": 0, "size": 1},
        environment={"name": f"{tmp_path}/rooms.py:room"}, learner={"inner_updates": updates},
        data={"task": "prompts", "args": {}, "train": f"{tmp_path}/rows.jsonl", "eval": f"{tmp_path}/held.jsonl"},
    )  # fmt: skip
    trew.train(config, display=Silent())
    assert [row["canary_gap"] is not None for row in rows(config).values()] == [OPENINGS[prompts]] * 2


def test_a_token_outside_the_vocabulary_ends_the_run(model, tmp_path, monkeypatch):
    real = Schedule.advance

    def advance(self: Schedule) -> Any:
        completions = real(self)
        if completions:
            completions[0].token_ids[-1] = 260
        return completions

    monkeypatch.setattr(Schedule, "advance", advance)
    with pytest.raises(EngineError, match="the completion holds token id 260, but the model knows 0 to 259"):
        run(tmp_path, model, "odd")
