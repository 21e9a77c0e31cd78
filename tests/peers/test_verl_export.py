"""The command of ``trew export verl`` against verl's own configuration: every key exists and every value is taken."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import verl
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.config import omega_conf_to_dataclass

import trew.integrations.verl as integration
from trew.config import load, parse
from trew.errors import ConfigError
from trew.integrations.verl.export import export
from trew.integrations.verl.offered import table

ROOT = Path(__file__).parents[2]
RECIPES = [p for p in sorted((ROOT / "recipes").glob("*.toml")) if "[iterate]" not in p.read_text()]
LOSSES = [name for name, offer in table().items() if not offer.loss and name != "ppo-clip"]


def composed(keys):
    """verl's configuration with these overrides, as its main program makes it."""
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=[f"{key}={value}" for key, value in keys.items()])


def recipe(**objective):
    return parse({"model": "m", "data": {"task": "gsm8k", "train": "rows"}, "objective": objective})


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes(path):
    config = load(path)
    made = export(config)
    there = composed(made.keys)
    actor = omega_conf_to_dataclass(there.actor_rollout_ref.actor)
    assert there.data.train_batch_size == config.rollout.prompts
    assert there.actor_rollout_ref.rollout.n == config.rollout.completions
    assert there.data.max_response_length == config.rollout.max_tokens
    assert there.trainer.total_training_steps == config.steps
    assert actor.optim.lr == config.learner.lr
    assert tuple(actor.optim.betas) == (config.learner.adam_beta1, config.learner.adam_beta2)
    kwargs = OmegaConf.to_container(there.reward.custom_reward_function.reward_kwargs)
    names = [r.name for r in config.rewards]
    assert [r["name"] for r in kwargs["rewards"]] == names or not names
    assert there.trainer.logger[0] == "console"
    for name, objective in integration.from_variable(made.environment.get("TREW_VERL", "{}")).items():
        integration.register(f"{path.stem}-{name}", objective)
        assert f"{path.stem}-{name}" in core_algos.POLICY_LOSS_REGISTRY


@pytest.mark.parametrize("name", LOSSES)
def test_every_preset_that_is_offered(name):
    made = export(recipe(preset=name))
    there = composed(made.keys)
    actor = omega_conf_to_dataclass(there.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == f"trew-{name}"
    assert actor.policy_loss.loss_mode in core_algos.POLICY_LOSS_REGISTRY
    assert there.algorithm.adv_estimator in core_algos.ADV_ESTIMATOR_REGISTRY
    # With these keys our hooks have nothing to refuse.
    core_algos.get_policy_loss_fn(f"trew-{name}")._check(actor.loss_agg_mode, actor)
    if there.algorithm.adv_estimator.startswith("trew-"):
        core_algos.get_adv_estimator_fn(there.algorithm.adv_estimator)._check(omega_conf_to_dataclass(there.algorithm))


def test_the_example_of_the_page_as_it_stands():
    page = (ROOT / "docs" / "verl.md").read_text()
    command = re.search(r"verl\.trainer\.main_ppo(.*?)```", page, flags=re.DOTALL)
    assert command is not None
    there = composed(dict(word.split("=", 1) for word in shlex.split(command[1].replace("\\\n", " "))))
    actor = omega_conf_to_dataclass(there.actor_rollout_ref.actor)
    core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)._check(actor.loss_agg_mode, actor)
    assert there.algorithm.adv_estimator in core_algos.ADV_ESTIMATOR_REGISTRY
    assert get_custom_reward_fn(there) is not None


def test_a_key_that_verl_does_not_have_is_seen():
    keys = export(recipe(preset="grpo")).keys
    with pytest.raises(ConfigCompositionException):
        composed(keys | {"actor_rollout_ref.actor.eps_high": "0.3"})


def test_what_does_not_carry_over_is_listed_and_what_cannot_run_is_refused():
    made = export(recipe(preset="dapo", overlong_cache=8, entropy_bonus=0.01, correction="tis"))
    text = "\n".join(made.lost)
    assert "objective.overlong_cache = 8" in text
    assert "objective.correction = 'tis'" in text
    assert made.keys["actor_rollout_ref.actor.entropy_coeff"] == "0.01"
    assert not made.environment
    with pytest.raises(ConfigError, match="gtpo cannot run in verl"):
        export(recipe(preset="gtpo"))
    wide = export(recipe(preset="dapo", eps_high=0.4))
    assert json.loads(wide.environment["TREW_VERL"]) == {"dapo-of-recipe": {"preset": "dapo", "eps_high": 0.4}}
    lines = "\n".join(export(dataclasses.replace(recipe(), threads=3)).lost)
    assert "threads = 3" in lines
