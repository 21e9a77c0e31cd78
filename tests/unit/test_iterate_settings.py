"""The settings of rounds: what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiers
import tiny
from trew.config import RewardConfig
from trew.errors import ConfigError
from trew.iterate import Iterate, load_recipe
from trew.iterate.rounds import check
from trew.iterate.settings import round_problems
from trew.rewards.combine import Reward, combined
from trew.rewards.verdict import Verdict
from trew.utils.toml import dump_table


def test_a_verifier_is_not_called_like_the_learned_reward():
    """The rounds' table and page would show the verifier's mean as that of the learned reward."""
    [problem] = round_problems(Iterate(verifier=RewardConfig(name="checks.py:reward_model")))
    assert problem.startswith("iterate.verifier.name: got 'checks.py:reward_model'")
    assert not round_problems(Iterate(verifier=RewardConfig(name="checks.py:right")))
    assert not round_problems(Iterate())


def test_a_verifier_decides_nothing_for_the_policy():
    """As a gate it closed the learned reward, although it has weight 0; another weight was ignored."""
    [gate] = round_problems(Iterate(verifier=RewardConfig(name="gsm8k", gate=True)))
    assert gate.startswith("iterate.verifier.gate: got true")
    [weight] = round_problems(Iterate(verifier=RewardConfig(name="gsm8k", weight=0.5)))
    assert weight.startswith("iterate.verifier.weight: got 0.5")
    closed = [Reward("gsm8k", "gsm8k", 0.0, gate=True), Reward("reward_model", "", 1.0)]
    [score] = combined(closed, [[Verdict(0.0)], [Verdict(0.7)]], lengths=[1])
    assert score.value == 0.0


def recipe_of(place: Path, **sections: Any) -> Path:
    table = {"model": str(place / "model"), "data": {"task": "arithmetic"}, "eval": {"size": 2}, "iterate": {}}
    path = place / "rounds.toml"
    path.write_text(dump_table({**table, **sections}))
    return path


OF_CORRECTNESS = ["online-rft", "pass-at-k", "gtpo", "grpo-s", "topr", "opd", "vapo"]


@pytest.mark.parametrize("preset", tiers.some(OF_CORRECTNESS, ["pass-at-k", "vapo"]))
def test_the_policy_of_rounds_learns_from_the_learned_reward(tmp_path, preset):
    """These train on which completions are correct: on the verifier's verdict, with the learned reward unread."""
    tiny.save(tmp_path / "model")
    teacher = {"model": str(tmp_path / "model")} if preset == "opd" else {}
    recipe = load_recipe(recipe_of(tmp_path, objective={"preset": preset}, teacher=teacher), out=tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        check(recipe)
    [problem] = refused.value.problems
    assert problem.startswith("objective.nll: got 0.1" if preset == "vapo" else f"objective.preset: got '{preset}'")
    others = {"objective": {"preset": "vapo", "nll": 0.0}} if preset == "vapo" else {"objective": {"preset": "dr-grpo"}}
    assert check(load_recipe(recipe_of(tmp_path, **others), out=tmp_path / "run"))[1] == "arithmetic"


def test_rounds_need_a_policy_that_samples(tmp_path):
    """Demonstrations ended in an IndexError, a replay in a refusal once the first reward model was trained."""
    with pytest.raises(ConfigError, match=r"data\.task: got 'demonstrations'"):
        load_recipe(recipe_of(tmp_path, data={"task": "demonstrations"}, objective={"preset": "sft"}))
    with pytest.raises(ConfigError, match=r"rollout\.replay"):
        load_recipe(recipe_of(tmp_path, rollout={"replay": "runs/earlier"}))


@pytest.mark.parametrize("base", ["nf4", "bfloat16"])
def test_a_base_that_would_round_what_a_round_has_learned_is_refused(base, tmp_path):
    """Each round loads the model that the last one has left: in 4 bits, it began where the first had begun."""
    learner = {"dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=rf"lora\.base: got '{base}', accepts 'float32' here"):
        load_recipe(recipe_of(tmp_path, lora={"rank": 2, "base": base}, learner=learner))
    assert load_recipe(recipe_of(tmp_path, lora={"rank": 2}, learner=learner)).policy.lora.rank == 2


def test_a_reward_for_every_step_is_refused_before_the_first_round(tmp_path):
    """The first round ended when it sampled pairs: the verifier alone gives none."""
    tiny.save(tmp_path / "model")
    (tmp_path / "steps.py").write_text("def steps(completions, **columns):\n    return [[1.0] for _ in completions]\n")
    recipe = recipe_of(
        tmp_path, objective={"preset": "grpo-process"}, rewards=[{"name": "steps.py:steps"}],
        iterate={"verifier": {"name": "arithmetic"}},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"'grpo-process', which learns from a reward for every step"):
        check(load_recipe(recipe, out=tmp_path / "run"))
