"""Our presets inside verl, through its own registries and its own ``ppo_loss``, against trew itself."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import verl_fork
import verl_help
import verl_plugin_help as plugin
from peer_compare import GROUPS, LENGTHS, MAX_LENGTH, REWARDS, TOLERANCE, WRONG, apart, noise, ragged_mask, same_value
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.config.algorithm import FilterGroupsConfig, KLControlConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage

import tiers
import trew
import trew.integrations.verl as integration
from trew.errors import ConfigError, DataError
from trew.integrations.verl.offered import bypasses, table
from trew.utils.installing import install_trew

ROOT = Path(__file__).parents[2]
OFFERED = table()
LOSSES = [name for name, offer in OFFERED.items() if not offer.loss]
ESTIMATORS = [name for name, offer in OFFERED.items() if not offer.advantage]
ALL = list(range(len(LENGTHS)))
SPLITS = {"whole": [ALL], "micro": [[0, 1, 2], [3], [4, 5, 6, 7]], "single": [[i] for i in ALL],
          "other order": [[7, 0], [5, 2, 1], [6, 3, 4]]}  # fmt: skip


def averaged_otherwise(name):
    """The objective with another average."""
    return trew.preset(
        name, aggregate="token-mean" if OFFERED[name].settings[0][1] != "token-mean" else "seq-mean-token-sum"
    )


def test_what_is_offered_is_registered_and_nothing_else():
    names = {f"trew-{name}" for name in LOSSES}
    assert {n for n in core_algos.POLICY_LOSS_REGISTRY if n.startswith("trew-")} == names
    names = {f"trew-{name}" for name in ESTIMATORS}
    assert {n for n in core_algos.ADV_ESTIMATOR_REGISTRY if n.startswith("trew-")} == names
    assert {"grpo", "dapo", "dr-grpo", "gspo", "trw-logistic", "vespo", "rloo"} <= {*LOSSES} & {*ESTIMATORS}


DATA = {"ragged": {}, "tool tokens": {"holes": True}, "far apart": {"size": 1.5}}


@pytest.mark.parametrize(("name", "data"), tiers.thinned(LOSSES, DATA, keep=3))
def test_loss_and_gradient(name, data):
    objective, batch = trew.preset(name), verl_help.batch(**DATA[data])
    loss, expected = plugin.through_trew(objective, batch)
    for parts in SPLITS.values():
        for ranks in (1, 4):
            value, gradient = plugin.through_verl(f"trew-{name}", objective, batch, parts=parts, ranks=ranks)
            assert apart(expected, gradient) <= TOLERANCE
            assert same_value(loss, value)
    assert apart(plugin.through_trew(averaged_otherwise(name), batch)[1], expected) >= WRONG


@pytest.mark.parametrize("name", [n for n in LOSSES if not OFFERED[n].advantage])
def test_advantages_per_token(name):
    objective, batch = trew.preset(name), verl_help.batch()
    batch["advantages"] = noise(9, len(LENGTHS), max(LENGTHS))
    expected = plugin.through_trew(objective, batch)[1]
    gradient = plugin.through_verl(f"trew-{name}", objective, batch, parts=SPLITS["micro"])[1]
    assert apart(expected, gradient) <= TOLERANCE


@pytest.mark.parametrize("name", LOSSES)
def test_global_batch_info_matters(name):
    """The negative control: verl's hook without what verl says about the mini-batch depends on the split."""
    objective, batch = trew.preset(name), verl_help.batch()
    function, config = core_algos.get_policy_loss_fn(f"trew-{name}"), plugin.config_of(objective)
    config.global_batch_info["loss_scale_factor"] = MAX_LENGTH

    def gradient(parts):
        now = batch["now"].detach().requires_grad_()
        wide = batch["advantages"][:, None] * batch["mask"]
        total = sum(
            function(old_log_prob=batch["old"][rows], log_prob=now[rows], advantages=wide[rows], config=config,
                     response_mask=batch["mask"][rows], loss_agg_mode=config.loss_agg_mode)[0]
            for rows in parts
        )  # fmt: skip
        return torch.autograd.grad(total, now)[0]

    whole = gradient([ALL])
    assert apart(gradient(SPLITS["micro"]), whole) >= WRONG
    config.global_batch_info.update(batch_num_tokens=int(batch["mask"].sum()), global_batch_size=len(ALL), dp_size=1)
    assert apart(gradient(SPLITS["micro"]), whole) <= TOLERANCE
    config.global_batch_info.update(dp_size=2)
    assert apart(gradient(SPLITS["micro"]), 2 * whole) <= TOLERANCE
    config.global_batch_info.update(batch_num_tokens=None, global_batch_size=None)
    with pytest.raises(DataError, match="dp_size = 2 without"):
        gradient([ALL])


@pytest.mark.parametrize("name", [name for name in LOSSES if not bypasses(trew.preset(name))])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_of_verl(name, level):
    batch = verl_help.batch()
    sampled = (batch["old"] - noise(11, len(LENGTHS), max(LENGTHS), size=0.3)).clamp(max=-1e-3)  # log-probs
    kappa = batch["old"] - sampled
    batch["weights"] = kappa.exp()
    if level == "sequence":
        batch["weights"] = (kappa * batch["mask"]).sum(1, keepdim=True).exp().expand_as(kappa)
    rule = {"correction": {"token": "tis", "sequence": "tis-sequence"}[level], "correction_high": 1e6}
    objective = trew.preset(name, **rule)
    expected = plugin.through_trew(objective, batch, rollout_logprobs=sampled)[1]
    policy = {"loss_mode": f"trew-{name}", "rollout_correction": {"rollout_is": level}}
    gradient = plugin.through_verl(f"trew-{name}", trew.preset(name), batch, parts=SPLITS["micro"], policy=policy)[1]
    assert apart(expected, gradient) <= TOLERANCE
    del batch["weights"]
    assert apart(plugin.through_verl(f"trew-{name}", trew.preset(name), batch, parts=[ALL])[1], gradient) >= WRONG


def test_kl_that_verl_does_not_have_is_refused():
    batch = verl_help.batch()
    for wrong in (
        {"use_kl_loss": False},
        {"kl_loss_coef": 0.001},
        {"kl_loss_type": "k1"},
        {"loss_agg_mode": "token-mean"},
    ):
        with pytest.raises(ConfigError, match=r"kl_loss_coef=0\.04"):
            plugin.through_verl("trew-grpo", trew.preset("grpo"), batch, parts=[ALL], **wrong)


def test_dr_grpo_needs_its_length():
    with pytest.raises(ConfigError, match="loss_scale_factor"):
        plugin.through_verl(
            "trew-dr-grpo", trew.preset("dr-grpo"), verl_help.batch(), parts=[ALL], loss_scale_factor=None
        )


def test_verl_s_default_average_is_told(caplog):
    batch, objective = verl_help.batch(), trew.preset("gspo")
    gradient = plugin.through_verl("trew-gspo", objective, batch, parts=[ALL], loss_agg_mode="token-mean")[1]
    assert apart(plugin.through_trew(objective, batch)[1], gradient) <= TOLERANCE
    assert "trew-gspo averages by seq-mean-token-mean; loss_agg_mode=token-mean" in caplog.text


def test_metrics_are_numbers_and_an_empty_micro_batch_is_nothing():
    batch = verl_help.batch()
    given = {"old_log_prob": batch["old"], "log_prob": batch["now"], "advantages": batch["mask"] * 1.0}
    function = core_algos.get_policy_loss_fn("trew-dapo")
    loss, _ = function(**given, response_mask=torch.zeros_like(batch["mask"]))
    assert float(loss) == 0
    assert bool((torch.autograd.grad(loss, batch["now"])[0] == 0).all())
    _, metrics = function(**given, response_mask=batch["mask"])
    assert "actor/trew/ratio" in metrics
    assert all(type(value) is float for value in metrics.values())


# ---------------------------------------------------------------------------------------------------------- advantages


def algorithm(objective, **more):
    settings = dict(integration.offer(objective).settings)
    control = KLControlConfig(kl_coef=float(settings.get("algorithm.kl_ctrl.kl_coef", 0.001)))
    made = {"use_kl_in_reward": "algorithm.use_kl_in_reward" in settings, "kl_penalty": "kl", "kl_ctrl": control}
    return AlgoConfig(**(made | {"filter_groups": FilterGroupsConfig(enable=True)} | more))


def estimated(name, objective, data, rewards, *, mask, index=verl_help.INDEX, **more):
    """verl's ``compute_advantage`` under this name, with the KL in the token rewards that verl puts there."""
    config = algorithm(objective, **more)
    scores = torch.zeros(mask.shape, dtype=torch.float64)
    scores[torch.arange(len(mask)), mask.shape[1] - 1 - mask.flip(1).int().argmax(1)] = rewards
    if config.use_kl_in_reward:
        kl = core_algos.kl_penalty(data["old"], data["ref"], config.kl_penalty)
        scores = scores - config.kl_ctrl.kl_coef * kl * mask
    made = DataProto.from_dict({"token_level_rewards": scores, "response_mask": mask.to(torch.int64)}, {"uid": index})
    return compute_advantage(made, adv_estimator=name, config=config).batch["advantages"]


def ours(objective, data, rewards, *, mask, groups=GROUPS):
    batch = trew.TokenBatch.from_padded(
        logprobs=data["old"], old_logprobs=data["old"], ref_logprobs=data["ref"], rollout_logprobs=data["old"],
        mask=mask, rewards=rewards, group_ids=torch.tensor(groups), max_length=MAX_LENGTH,
    )  # fmt: skip
    prepared = objective.prepare(batch)
    return prepared.unpack(prepared.advantages)


R = torch.tensor(REWARDS, dtype=torch.float64)
CASES = {
    "rewards": R,
    "right or wrong": (R > 0.45).double(),
    "a group without signal": torch.where(torch.arange(8) < 4, 0.5, R),
}


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "pass-at-k"])
@pytest.mark.parametrize("holes", [False, True], ids=["ragged", "tool tokens"])
@pytest.mark.parametrize("rewards", CASES.values(), ids=CASES)
def test_advantages(name, holes, rewards):
    objective, data, mask = trew.preset(name), verl_help.batch(), ragged_mask(holes=holes)
    theirs = estimated(f"trew-{name}", objective, data, rewards, mask=mask)
    if name == "grpo-passk" and rewards is CASES["right or wrong"]:
        # No group has one best completion, so that nothing leads: there is nothing to compare but zeros.
        assert not theirs.any()
        assert not ours(objective, data, rewards, mask=mask).any()
        return
    assert apart(ours(objective, data, rewards, mask=mask), theirs) <= TOLERANCE
    assert bool((theirs[~mask] == 0).all())
    # Negative control: other rewards, and turned round as well, where the order makes no difference to what is right.
    assert apart(ours(objective, data, 1 - rewards.flip(0), mask=mask), theirs) >= WRONG


def test_pass_at_k():  # by itself: where one of any k answers is right there is nothing to learn
    objective, data, mask, right = trew.preset("pass-at-k"), verl_help.batch(), ragged_mask(), (R > 0.9).double()
    one = np.zeros(len(R), dtype=object)
    theirs = estimated("trew-pass-at-k", objective, data, right, mask=mask, index=one)
    assert apart(ours(objective, data, right, mask=mask, groups=[0] * 8), theirs) <= TOLERANCE
    assert apart(ours(trew.preset("pass-at-k", k=2), data, right, mask=mask, groups=[0] * 8), theirs) >= WRONG


def test_groups_are_the_uids_wherever_their_rows_stand():
    data, mask, objective = verl_help.batch(), ragged_mask(), trew.preset("grpo")
    order = torch.tensor([5, 0, 7, 2, 1, 4, 3, 6])
    index = np.array([verl_help.INDEX[i] for i in order], dtype=object)
    there = estimated("trew-grpo", objective, data, R[order], mask=mask[order], index=index)
    assert apart(ours(objective, data, R, mask=mask)[order], there) <= TOLERANCE
    wrong = estimated("trew-grpo", objective, data, R[order], mask=mask[order])
    assert apart(ours(objective, data, R, mask=mask)[order], wrong) >= WRONG


@pytest.mark.parametrize("name", ["rloo", "reinforce-pp"])
def test_kl_in_the_reward_that_verl_does_not_have_is_refused(name):
    objective, data, mask = trew.preset(name), verl_help.batch(), ragged_mask()
    for wrong in ({"use_kl_in_reward": False}, {"kl_penalty": "abs"}, {"kl_ctrl": KLControlConfig(kl_coef=0.5)},
                  {"kl_ctrl": KLControlConfig(type="adaptive", kl_coef=objective.beta)}):  # fmt: skip
        with pytest.raises(ConfigError, match="use_kl_in_reward=True"):
            estimated(f"trew-{name}", objective, data, R, mask=mask, **wrong)


def test_without_filter_groups_it_says_so(caplog):
    objective, data, mask = trew.preset("dapo"), verl_help.batch(), ragged_mask()
    estimated("trew-dapo", objective, data, R, mask=mask, filter_groups=None)
    assert "algorithm.filter_groups.enable=True" in caplog.text


def test_without_prompts_there_are_no_advantages():
    with pytest.raises(DataError, match="index"):
        core_algos.get_adv_estimator_fn("trew-grpo")(
            token_level_rewards=torch.zeros(2, 3), response_mask=torch.ones(2, 3)
        )


# -------------------------------------------------------------------------------------------------------- registration


def test_register_an_objective_of_your_own():
    mine = trew.preset("dapo", eps_low=0.1, eps_high=0.05, dynamic_sampling=False)
    assert integration.register("dapo-wide", mine).loss == ""
    integration.register("dapo-wide", mine)  # a second time changes nothing
    batch = verl_help.batch()
    gradient = plugin.through_verl("dapo-wide", mine, batch, parts=SPLITS["micro"])[1]
    assert apart(plugin.through_trew(mine, batch)[1], gradient) <= TOLERANCE
    assert apart(plugin.through_trew(trew.preset("dapo"), batch)[1], gradient) >= WRONG
    for taken in ("dapo-wide", "vanilla", "trew-grpo"):
        with pytest.raises(ConfigError, match="already"):
            integration.register(taken, trew.preset("sapo"))
    with pytest.raises(ConfigError, match="no entropies"):
        integration.register("mine", trew.preset("gtpo"))
    with pytest.raises(ConfigError, match="denominators"):
        integration.register("mine", trew.preset("dapo", overlong_filtering=True))


def test_registering_half_of_an_objective_warns_with_the_reason():
    """Only the returned offer said it, and verl that it knows no such name."""
    with pytest.warns(UserWarning, match=r"^m2: is no policy loss of verl's, so that loss_mode=m2 does not exist: it "
                      "must see the whole step"):  # fmt: skip
        integration.register("m2", trew.preset("m2po"))
    assert "m2" in core_algos.ADV_ESTIMATOR_REGISTRY
    assert "m2" not in core_algos.POLICY_LOSS_REGISTRY
    with pytest.warns(UserWarning, match=r"adv_estimator=each does not exist: .* use adv_estimator=gdpo$"):
        integration.register("each", trew.preset("gdpo", std_eps=1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.register("both", trew.preset("grpo", std_eps=1e-3, beta=0.0))


def with_metadata(folder):
    """A PYTHONPATH with what pip would write beside the package: here trew is only on the path."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    metadata = folder / "trew-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trew\nVersion: 0.1.0\n")
    lines = [f"{name} = {module}" for name, module in declared.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *lines]))
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", ""), str(ROOT / "src")])


def test_verl_finds_the_plugin_by_its_entry_point(tmp_path):
    path = with_metadata(tmp_path)
    env = os.environ | {"PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": ""}
    done = subprocess.run([sys.executable, "-c", PRINTED], capture_output=True, text=True, timeout=120, env=env)
    losses, estimators = json.loads(done.stdout.splitlines()[-1])
    assert {f"trew-{name}" for name in LOSSES} <= set(losses)
    assert {f"trew-{name}" for name in ESTIMATORS} <= set(estimators)
    without = verl_fork.python(PRINTED, PYTHONPATH=path, VERL_USE_EXTERNAL_MODULES="", VERL_USE_EXTERNAL_PLUGINS="none")
    assert not [name for name in json.loads(without.stdout.splitlines()[-1])[0] if name.startswith("trew-")]


PRINTED = """
import json, verl
from verl.trainer.ppo import core_algos
print(json.dumps([sorted(core_algos.POLICY_LOSS_REGISTRY), sorted(core_algos.ADV_ESTIMATOR_REGISTRY)]))
"""


def test_the_variable_names_objectives():
    given = '{"dapo-wide": {"preset": "dapo", "eps_high": 0.4}}'
    done = verl_fork.python(PRINTED, VERL_USE_EXTERNAL_MODULES="trew.integrations.verl", TREW_VERL=given)
    losses, estimators = json.loads(done.stdout.splitlines()[-1])
    assert "dapo-wide" in losses
    assert "dapo-wide" in estimators
    assert "trew-grpo" in losses


def test_a_variable_that_cannot_be_read_is_told():
    given = '{"dapo-wide": {"preset": "dapo", "eps_hi": 0.4}}'
    done = verl_fork.python(PRINTED, VERL_USE_EXTERNAL_MODULES="trew.integrations.verl", TREW_VERL=given)
    assert "trew could not register with verl: ConfigError: objective.eps_hi" in done.stderr


def test_the_configuration_has_no_place_for_settings_of_ours():
    # Else there were a simpler way than a variable: verl's dataclass refuses keys that it does not know.
    from verl.workers.config import PolicyLossConfig

    with pytest.raises(TypeError):
        PolicyLossConfig(eps_high=0.4)
    assert "global_batch_info" in {f.name for f in dataclasses.fields(verl_help.ActorConfig)}


DOCTOR = """
import subprocess, sys
import verl_fork
from trew.cli.main import main
subprocess.run = verl_fork.as_run  # what the doctor starts
sys.argv = ["trew", "doctor", "verl"]
main()
"""


def told_by_the_doctor(**variables):
    done = verl_fork.python(DOCTOR, **({"PYTHONPATH": str(ROOT / "src"), "VERL_USE_EXTERNAL_MODULES": ""} | variables))
    return done.returncode, done.stdout


def test_the_doctor_where_verl_has_not_heard_of_trew(tmp_path):
    (tmp_path / "trew").symlink_to(ROOT / "src" / "trew")  # without what pip may have written beside it
    code, text = told_by_the_doctor(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert f"verl has not heard of trew: {install_trew()}" in text
    assert "token-mean-local not offered" in text


def test_the_doctor_where_the_plugin_fails():
    code, text = told_by_the_doctor(TREW_VERL='{"dapo-wide": {"preset": "dapo", "eps_hi": 0.4}}')
    assert code == 1
    assert "ConfigError: objective.eps_hi" in text


def test_the_doctor_at_a_verl_that_calls_otherwise(monkeypatch):
    from trew.integrations.verl import doctor

    monkeypatch.setattr(doctor, "LOOK", doctor.LOOK.replace("parameters)", 'parameters) + ["rollout_log_probs"]'))
    monkeypatch.setattr(doctor, "TESTED", ("0.8.0",))
    monkeypatch.setattr(doctor.subprocess, "run", verl_fork.as_run)
    told = {what: (sign, says) for sign, what, says, _ in doctor.found()}
    assert told["verl"] == ("note", "0.9.1; trew is tested with 0.8.0")
    assert told["hooks"] == ("bad", "verl calls a loss with rollout_log_probs, unknown to trew")


@pytest.mark.parametrize(("plugins", "mark"), [("auto", "ok"), ("none", "bad")])
def test_the_doctor_looks_at_what_verl_really_has(tmp_path, monkeypatch, plugins, mark):
    from trew.integrations.verl.doctor import found, subprocess

    path = with_metadata(tmp_path)
    if plugins == "auto":  # in the process that the doctor starts
        monkeypatch.setenv("PYTHONPATH", path)
    else:
        monkeypatch.setattr(subprocess, "run", lambda command, **_: verl_fork.python(command[2], PYTHONPATH=path))
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", plugins)
    lines = list(found())
    told = {what: (sign, says) for sign, what, says, _ in lines}
    assert any("VERL_USE_EXTERNAL_PLUGINS=none leaves trew out" in todo for *_, todo in lines) == (mark == "bad")
    assert told["losses"][0] == told["estimators"][0] == mark
    assert f"{len(LOSSES) if mark == 'ok' else 0} of trew's {len(LOSSES)} are" in told["losses"][1]
    assert "no entropies" in told["gtpo"][1]
