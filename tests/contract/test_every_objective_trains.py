"""Every preset and every option trains in a real run, the same however the step is cut, or is refused with a reason."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiers
import tiny
import trew
from trew.config import Config, parse
from trew.errors import ConfigError
from trew.models.sharded import whole
from trew.runs import checkpoint_files
from trew.training import loop
from trew.utils.console import Silent

REWARDS = """
def odd(completion_ids, **_):
    return [float(sum(i % 2 for i in ids) > len(ids) / 2) for ids in completion_ids]

def short(completion_ids, **_):
    return [1 - len(ids) / 6 if ids[0] % 3 else None for ids in completion_ids]
"""
STOPS = string.ascii_letters + string.digits  # so that a random model's completions differ in length
REFUSED = {
    "ppo-clip": "whose advantages come from outside",
    "grpo-process": "which needs a reward for every step of a completion",
    "gigpo": "which gives credit to the turns of an episode",
    "mt-grpo": "which gives credit to the turns of an episode",
    "turn-returns": "which gives credit to the turns of an episode",
    "sft": "which learns from demonstrations",
    "rft": "which learns from demonstrations",
    "dpo": "which learns from preference pairs",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "kl in the reward": {"preset": "grpo", "beta": 0.1, "kl": "k1", "kl_place": "reward"},
    "kl to go": {"preset": "remax", "beta": 0.1},
    "corrected kl": {"preset": "dapo", "beta": 0.1, "kl": "k3-corrected", "aggregate": "prompt-mean-token-mean"},
    "tis and opsm": {"preset": "grpo", "correction": "tis+opsm", "opsm_delta": 0.01, "beta": 0.0},
    "icepop": {"preset": "gspo", "correction": "icepop"},
    "bonus": {"preset": "dr-grpo", "entropy_bonus": 0.05},
    "adaptive bonus": {"preset": "dapo", "entropy_target": 10.0, "entropy_step": 0.02},
    "adaptive bonus that falls": {
        "preset": "grpo",
        "entropy_bonus": 0.03,
        "entropy_target": 1e-6,
        "entropy_step": 0.01,
    },
    "bonus across sequences": {"preset": "kl-cov", "entropy_bonus": 0.05, "share": 0.1},
    "bonus and rarity by entropy": {"preset": "trw-entropy", "rarity": "entropy", "entropy_bonus": 0.05},
    "likelihood of right answers": {"preset": "grpo", "nll": 0.5},
    "overlong": {"preset": "grpo", "overlong_cache": 2, "overlong_filtering": True},
    "many tokens drawn": {"preset": "clip-cov", "share": 0.2, "cov_low": -1.0},
}


@pytest.fixture(scope="module")
def configured(tmp_path_factory) -> Callable[..., Config]:
    folder = tmp_path_factory.mktemp("runs")
    model = tiny.save(folder / "model")
    (folder / "reward.py").write_text(REWARDS)

    def make(name: str, objective: dict[str, Any], **sections: Any) -> Config:
        k = {"k": 2} if objective["preset"] == "pass-at-k" else {}
        table: dict[str, Any] = {
            "model": str(model), "steps": 2, "seed": 1, "out": str(folder / name),
            "data": {"task": "arithmetic", "args": {"ops": ["+"], "smallest": 1, "largest": 4}},
            "rewards": [{"name": f"{folder}/reward.py:{r}", "weight": w} for r, w in (("odd", 0.6), ("short", 0.4))],
            "rollout": {"prompts": 4, "completions": 3, "max_tokens": 6, "stop": list(STOPS)},
            "objective": {**k, **objective},
            "learner": {"lr": 1e-2, "adam_eps": 1e-2, "minibatch_prompts": 2, "inner_updates": 2},
            "eval": {"size": 2},
            "checkpoint": {"every": 0},
        }  # fmt: skip
        for section, values in sections.items():
            table[section] = {**table[section], **values} if isinstance(values, dict) else values
        options = {key: value for key, value in table["objective"].items() if key != "preset"}
        if trew.preset(table["objective"]["preset"], **options).dynamic_sampling:
            table["rollout"] = {"refills": 2, **table["rollout"]}
        if objective["preset"] == "opd":
            table["teacher"] = {"model": str(tiny.save(folder / "teacher", seed=4))}
        return parse(table)

    return make


def train(config: Config, **how: Any) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Weights and rows of a run."""
    trew.train(config, display=Silent(), **how)
    run = Path(config.out)
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return load_file(run / "final" / "model.safetensors"), [r for r in rows if "loss" in r]


def slug(text: str) -> str:
    return text.replace(" ", "-")


def check(configured, name: str, objective: dict[str, Any]) -> list[dict]:
    """Two steps of four optimizer steps each: something is learned, and the first is the same in parts of any size.

    The second is not compared: its completions are drawn from weights that differ by rounding.
    """
    config = configured(slug(name), objective, checkpoint={"every": 1})
    weights, rows = train(config)
    parts = {"microbatch_tokens": 150, "share_prompts": False}
    in_parts, (row, *_) = train(configured(slug(name) + "-parts", objective, steps=1, learner=parts))
    _, saved, _ = checkpoint_files.load(Path(config.out) / "checkpoints" / "000001")
    for key, weight in in_parts.items():
        torch.testing.assert_close(whole(saved[f"model.{key}"]), weight, rtol=0, atol=1e-5, msg=key)
    for metric in ("ratio", "clip_share", "ratio_q01", "ratio_q99", "ess", "weight", "loss", "policy_version"):
        assert rows[0][metric] == pytest.approx(row[metric], rel=1e-3, abs=1e-3), metric
    assert len(rows) == 2
    assert not any("not_finite" in r for r in rows)
    assert rows[-1]["policy_version"] >= 4
    start = tiny.model().state_dict()
    assert any((weight - start[key]).abs().max() > 1e-4 for key, weight in weights.items())
    return rows


PRESETS_ALWAYS = (
    "dapo", "ppo", "remax", "kl-cov", *REFUSED,
)  # fmt: skip
"""One of each way that a preset meets the loop; the others train in the nightly tests."""
OPTIONS_ALWAYS = ("kl in the reward", "tis and opsm")


@pytest.mark.parametrize("name", tiers.some(trew.presets(), PRESETS_ALWAYS))
def test_every_preset_trains_the_same_however_it_is_cut_or_is_refused(configured, name):
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"objective.preset: got '{name}', {REFUSED[name]}.*choose another"):
            train(configured(name, {"preset": name}, rewards=[]))  # the task's own: no function, no reward model
        return
    rows = check(configured, name, {"preset": name})
    assert ("kl_teacher" in rows[0]) == (name == "opd")
    assert ("baseline" in rows[0]) == (name == "remax")
    assert {"kl_old", "kl_rollout", "ratio_q50", "silent_share"} <= rows[0].keys()


@pytest.mark.parametrize("name", tiers.some(OPTIONS, OPTIONS_ALWAYS))
def test_every_option_trains_the_same_however_the_step_is_cut(configured, name):
    rows = check(configured, name, OPTIONS[name])
    correction = "correction" in OPTIONS[name]
    assert ("correction" in rows[0]) == ("correction_zero_share" in rows[0]) == correction
    assert ("entropy_coefficient" in rows[0]) == ("bonus" in name)
    assert ("nll_correct" in rows[0]) == ("likelihood" in name)


def test_an_adaptive_coefficient_moves_with_every_optimizer_step(configured):
    _, rows = train(configured("rises", OPTIONS["adaptive bonus"]))  # four steps each: 0, .02, .04, .06; .08, ...
    assert [r["entropy_coefficient"] for r in rows] == pytest.approx([0.03, 0.11])
    _, rows = train(configured("falls", OPTIONS["adaptive bonus that falls"]))  # .03, .02, .01, 0; 0, ...
    assert [r["entropy_coefficient"] for r in rows] == pytest.approx([0.015, 0.0])


@pytest.mark.parametrize("preset", tiers.some(["remax", "reinforce", "reinforce-pp"], ["reinforce-pp"]))
def test_one_completion_per_prompt_is_enough_without_a_group_baseline(configured, preset):
    weights, rows = train(configured(f"{preset}-one", {"preset": preset}, rollout={"prompts": 6, "completions": 1},
                                     learner={"minibatch_prompts": 3}))  # fmt: skip
    start = tiny.model().state_dict()
    assert any((weight - start[key]).abs().max() > 1e-4 for key, weight in weights.items())
    assert rows[0]["groups_sampled"] == 6


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what clocks say."""
    return {k: v for k, v in row.items() if "second" not in k}


class Killed(Exception):
    pass


RESUMED = {
    "ppo": {"preset": "ppo"},
    "vapo": {"preset": "vapo"},
    "remax": {"preset": "remax", "beta": 0.05},
    "kl-cov": {"preset": "kl-cov", "share": 0.1},
    "gdpo": {"preset": "gdpo"},
    "adaptive": {"preset": "grpo", "entropy_target": 10.0, "entropy_bonus": 0.1, "beta": 0.0},
}


@pytest.mark.parametrize("name", tiers.some(RESUMED, ("adaptive",)))
def test_a_killed_and_resumed_run_equals_one_that_was_not_to_the_last_bit(configured, monkeypatch, name):
    settings = {"steps": 4, "checkpoint": {"every": 1}}
    whole, rows = train(configured(f"{name}-whole", RESUMED[name], **settings))
    config, real, calls = configured(f"{name}-cut", RESUMED[name], **settings), loop.update, [0]

    def dies(*args, **kwargs):
        calls[0] += 1
        if calls[0] == 3:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "update", dies)
    with pytest.raises(Killed):
        train(config)
    monkeypatch.undo()
    resumed, again = train(config, resume=True)
    assert all(torch.equal(weight, resumed[key]) for key, weight in whole.items())
    for a, b in zip(rows, again, strict=True):
        assert timeless(a) == timeless(b)
