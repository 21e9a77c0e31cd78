"""The command of ``trew export verl`` against verl's own configuration: every key exists and every value is taken."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import verl
import verl_help
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from peer_compare import LENGTHS, TOLERANCE, apart, noise
from test_verl_data import scored, tokenizer
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.config import omega_conf_to_dataclass

import tiers
import trew
import trew.integrations.verl as integration
from trew.cli.main import main
from trew.config import load, parse
from trew.data.files import read_rows
from trew.errors import ConfigError
from trew.integrations.verl.export import export
from trew.integrations.verl.offered import table

ROOT = Path(__file__).parents[2]
REFUSED = {
    "[environment]": "environment: is not exported", "[[data]]": "data: got 2 data sets",
    "[critic]": "(ppo|vapo) cannot run",
    "custom_objective.py": "a command has no place for code of your own",
    "[teacher]": "opd cannot run in verl", "[sft]": "data.task: demonstrations are not exported",
}  # fmt: skip
"""What of recipes verl's command has no place for, and the message."""
KEPT = [p for p in sorted((ROOT / "recipes").glob("*.toml")) if "[iterate]" not in p.read_text()]
RECIPES = [p for p in KEPT if not any(table in p.read_text() for table in REFUSED)]
LOSSES = [name for name, offer in table().items() if not offer.loss and name not in ("ppo", "ppo-clip", "opd")]


def composed(keys):
    """verl's configuration with these overrides, as its main program makes it."""
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=[f"{key}={value}" for key, value in keys.items()])


def test_paths_arrive_as_they_are_written():
    files = "lr=1,2/{a} b.parquet", "1"
    there = composed(export(dataclasses.replace(recipe(), model="of, mine"), files=files).keys)
    assert (there.data.train_files, there.data.val_files, there.actor_rollout_ref.model.path) == (*files, "of, mine")


def recipe(**objective):
    return parse({"model": "m", "data": {"task": "gsm8k", "train": "rows"}, "objective": objective})


@pytest.mark.parametrize("path", sorted({*KEPT} - {*RECIPES}), ids=lambda p: p.stem)
def test_recipes_that_verl_has_no_place_for_are_refused(path):
    said = next(message for table, message in REFUSED.items() if table in path.read_text())
    with pytest.raises(ConfigError, match=said):
        export(load(path))


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
    assert there.trainer.test_freq == (config.eval.every or config.steps)  # after the last step in any case
    assert there.trainer.default_local_dir == (config.out or f"runs/{path.stem}")
    assert not any(line.startswith(("data.", "rewards")) for line in made.lost)
    assert "/" in there.actor_rollout_ref.model.path
    for name, objective in integration.from_variable(made.environment.get("TREW_VERL", "{}")).items():
        integration.register(f"{path.stem}-{name}", objective)
        assert f"{path.stem}-{name}" in core_algos.POLICY_LOSS_REGISTRY


@pytest.mark.parametrize("name", tiers.one_in(3, LOSSES))
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
    adaptive = {"entropy_bonus": 0.01, "entropy_target": 0.3}
    config = recipe(preset="dapo", overlong_filtering=True, correction="geo-mask+opsm", opsm_delta=0.1, **adaptive)
    made = export(dataclasses.replace(config, learner=dataclasses.replace(config.learner, schedule="linear")))
    text = "\n".join(made.lost)
    for line in ("overlong_filtering = True", "entropy_bonus = 0.01", "entropy_target = 0.3", "opsm_delta = 0.1",
                 "correction = 'geo-mask+opsm'"):  # fmt: skip
        assert f"objective.{line}" in text
    assert "learner.schedule = 'linear'" in text
    assert not any("rollout_correction" in key or "entropy" in key for key in made.keys)
    assert not made.environment
    with pytest.raises(ConfigError, match="gtpo cannot run in verl"):
        export(recipe(preset="gtpo"))
    same = export(recipe(preset="dapo", eps_high=0.28))
    assert not same.environment  # these are the preset's own numbers
    assert same.keys["algorithm.adv_estimator"] == "trew-dapo"
    wide = export(recipe(preset="dapo", eps_high=0.4))
    assert json.loads(wide.environment["TREW_VERL"]) == {"dapo-of-recipe": {"preset": "dapo", "eps_high": 0.4}}
    lines = "\n".join(export(dataclasses.replace(recipe(), threads=3)).lost)
    assert "threads = 3" in lines


# ----------------------------------------------------------------------- what is somebody else's work in verl: its keys


@pytest.mark.parametrize(
    "given",
    [{"correction": "tis", "correction_high": 1.2}, {"correction": "tis-sequence"}, {"correction": "mis"},
     {"correction": "mis-token"}, {"correction": "icepop", "correction_low": 0.7, "correction_high": 1.3},
     {"correction": "mis", "correction_low": 0.5}],
    ids=json.dumps,
)  # fmt: skip
def test_corrections_are_the_same_there(given):
    made = export(recipe(preset="dual-clip", **given))
    assert not [line for line in made.lost if "correction" in line]
    there = composed(made.keys)
    rules = dict(there.algorithm.rollout_correction)
    actor = omega_conf_to_dataclass(there.actor_rollout_ref.actor)
    assert actor.policy_loss.rollout_correction["rollout_is"] == rules["rollout_is"]  # the loss is told as well
    data = verl_help.batch()
    named = {key: rules[key] for key in ("rollout_is", "rollout_is_threshold")}
    weights, _, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=data["old"], rollout_log_prob=data["mu"], response_mask=data["mask"].double(), **named
    )
    objective = trew.preset("dual-clip", **given)
    batch = trew.TokenBatch.from_padded(
        logprobs=data["now"], mask=data["mask"], old_logprobs=data["old"], rollout_logprobs=data["mu"],
        advantages=data["advantages"], group_ids=torch.arange(len(LENGTHS)),
    )  # fmt: skip
    ours = objective.correction[0](batch)
    assert apart(ours, weights.batch["rollout_is_weights"][data["mask"]]) <= TOLERANCE


def test_the_soft_overlong_punishment_is_the_same_there():
    made = export(recipe(preset="dapo", overlong_cache=8))
    assert "overlong" not in "\n".join(made.lost)
    there = composed(made.keys | {"data.max_response_length": "16", "+reward.reward_kwargs.max_resp_len": "16"})
    assert there.algorithm.filter_groups.metric == "gsm8k"  # whether an answer is right, not how long it is
    words = tokenizer()
    manager = get_reward_manager_cls(there.reward.reward_manager.name)(there, words, get_custom_reward_fn(there))
    for length in (1, 8, 9, 12, 16):
        ids = torch.tensor([words.encode("9 " * length)])
        data = DataProto.from_dict(
            {"responses": ids, "attention_mask": torch.ones_like(ids)},
            {"data_source": np.array(["mine"], dtype=object), "extra_info": np.array([{"index": 0}], dtype=object),
             "reward_model": np.array([{"style": "rule", "ground_truth": "4"}], dtype=object)},
        )  # fmt: skip
        found = asyncio.run(scored(manager, data))
        [expected] = trew.objective.shaping.soft_overlong(torch.tensor([length]), max_length=16, cache=8)
        assert float(found["reward_score"]) == pytest.approx(float(expected))


@pytest.mark.parametrize(("minibatch", "updates"), [(0, 1), (8, 2)])
def test_the_learning_rate(minibatch, updates):
    # verl moves the rate once per step; its first step of a warmup has rate 0.
    from verl.utils.torch_functional import get_cosine_schedule_with_warmup

    from trew.learner.optimizer import learning_rate

    steps, table = 6, {"lr": 0.5, "schedule": "cosine", "warmup_steps": 0, "minibatch_prompts": minibatch}
    config = parse({"model": "m", "steps": steps, "data": {"task": "gsm8k", "train": "rows"}, "learner": table,
                    "rollout": {"prompts": 16}})  # fmt: skip
    made = export(config)
    optim = omega_conf_to_dataclass(composed(made.keys).actor_rollout_ref.actor).optim
    assert optim.lr_scheduler_type == "cosine"
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=optim.lr)
    scheduler = get_cosine_schedule_with_warmup(plain, 0, steps, optim.min_lr_ratio, optim.num_cycles)
    for step in range(steps):
        ours = learning_rate(step * updates, config=config.learner, steps=steps * updates)
        assert scheduler.get_last_lr()[0] == pytest.approx(ours)
        plain.step()
        scheduler.step()
    assert ("once per step" in "\n".join(made.lost)) == (updates > 1)
    warm = dataclasses.replace(config, learner=dataclasses.replace(config.learner, warmup_steps=6))
    made = export(warm)
    assert made.keys["actor_rollout_ref.actor.optim.lr_warmup_steps"] == str(6 // updates)
    assert "rate 0" in "\n".join(made.lost)


def test_rewards_that_verl_cannot_compute_are_refused():
    for reward, match in (({"name": "repetition"}, "needs the answer's tokens"), ({"model": "m"}, "is a reward model")):
        config = parse({"model": "m", "data": {"task": "gsm8k", "train": "rows"}, "rewards": [reward]})
        with pytest.raises(ConfigError, match=match):
            export(config)


def test_rewards_by_the_names_that_our_scores_have():
    config = load(ROOT / "recipes" / "custom_reward.toml", ["objective.preset=gdpo", "eval.size=20"])
    there = composed(export(config).keys)
    given = {"data_source": "mine", "ground_truth": "15", "extra_info": {"answer": "15", "expression": "6 + 9"}}
    found = get_custom_reward_fn(there)(**given, solution_str="15")
    assert set(there.algorithm.gdpo_reward_keys) == set(found) - {"score", "judged"} == {"arithmetic", "brief", "close"}


def test_estimators_of_verl_s_old_trainer():
    rewards = [{"name": "gsm8k", "weight": 2.0}, {"name": "format", "args": {"pattern": "x"}}]
    config = parse({"model": "m", "data": {"task": "gsm8k", "train": "rows"}, "rewards": rewards,
                    "objective": {"preset": "gdpo"}})  # fmt: skip
    there = composed(export(config).keys)
    assert there.trainer.use_v1 is False
    assert list(there.algorithm.gdpo_reward_keys) == ["gsm8k", "format"]
    parts = {"gsm8k": noise(1, 8).numpy(), "format": noise(2, 8).numpy()}
    batch = {"prompts": torch.zeros(8, 2), "attention_mask": torch.ones(8, 2 + 3, dtype=torch.long)}
    given = {"token_level_rewards": torch.zeros(8, 3), "response_mask": torch.ones(8, 3), "index": verl_help.INDEX,
             "config": there.algorithm, "batch": batch}  # fmt: skip
    found, _ = core_algos.get_adv_estimator_fn("gdpo")(**given, non_tensor_batch=parts)
    swapped, _ = core_algos.get_adv_estimator_fn("gdpo")(
        **given, non_tensor_batch={"gsm8k": parts["format"], "format": parts["gsm8k"]}
    )
    assert apart(found, swapped) > 0.01  # weights and names go together


# ---------------------------------------------------------------------------------------------------------- the script


@pytest.mark.parametrize(
    "name", tiers.some(["arithmetic", "countdown", "dapo", "custom_reward"], ["dapo", "custom_reward"])
)
def test_the_script_runs_as_it_stands(tmp_path, monkeypatch, name):
    # Everything but verl's main program, in whose place a shim writes down what it was called with.
    shims = tmp_path / "bin"
    shims.mkdir()
    for word, line in (("trew", f'exec {sys.executable} -m trew "$@"'), ("python3", 'printf "%s\\n" "$@" > called')):
        (shims / word).write_text(f"#!/bin/sh\n{line}\n")
        (shims / word).chmod(0o755)
    env = os.environ | {"PATH": f"{shims}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert not done.returncode, done.stdout + done.stderr
        return done.stdout

    path = ROOT / "recipes" / f"{name}.toml"
    changes = ["eval.size=20", *(["data.args.size=50"] if name == "countdown" else [])]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["export", "verl", str(path), "--set", *changes, "--out", "run.sh"])
    assert not left.value.code
    run("sh", "run.sh")
    words = (tmp_path / "called").read_text().splitlines()
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    there = composed(dict(word.split("=", 1) for word in words[2:]))
    config = load(path, changes)
    assert (there.data.train_files, there.data.val_files) == (f"{name}-train.parquet", f"{name}-test.parquet")
    train = [row.values for row in read_rows(tmp_path / there.data.train_files)]
    assert len(read_rows(tmp_path / there.data.val_files)) == 20
    dataset = trew.data.load_task(config.data, eval_size=20, seed=config.seed)
    assert len(train) == len(dataset.train) > 0
    score = get_custom_reward_fn(there)
    for row, prompt in list(zip(train, dataset.train, strict=True))[:5]:
        assert row["prompt"][0]["content"] == prompt.messages[0]["content"]
        if "gold" in prompt.columns:
            extra = row["extra_info"] | {"num_turns": 1}
            given = {"data_source": row["data_source"], "ground_truth": row["reward_model"]["ground_truth"]}
            right, wrong = (score(**given, solution_str=text, extra_info=extra)["score"]
                            for text in (str(prompt.columns["gold"]), "no number"))  # fmt: skip
            assert right > wrong
    run("sh", "run.sh")  # what is converted already stays
