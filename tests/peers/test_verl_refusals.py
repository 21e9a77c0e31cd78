"""What our losses and estimators do not act on in verl's configuration is refused with what to do, never dropped."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import verl_help
import verl_plugin_help as plugin
from peer_compare import LENGTHS, REWARDS, TOLERANCE, WRONG, apart, ragged_mask
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories  # the trainer that main_ppo runs
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig, PolicyLossConfig

import trew
from trew.errors import ConfigError, DataError
from trew.integrations.verl import registered, settings
from trew.integrations.verl.offered import table

ALL = list(range(len(LENGTHS)))
R = torch.tensor(REWARDS, dtype=torch.float64)
LOSSES = [name for name, offer in table().items() if not offer.loss]
ESTIMATORS = [name for name, offer in table().items() if not offer.advantage]


def loss(name, batch, **more):
    policy = {"loss_mode": f"trew-{name}"} | more.pop("policy", {})
    return plugin.through_verl(f"trew-{name}", trew.preset(name), batch, parts=[ALL], policy=policy, **more)


def advantages(name, *, rewards=R, mask=None, index=verl_help.INDEX, **more):
    mask = ragged_mask() if mask is None else mask
    scores = torch.zeros(mask.shape, dtype=torch.float64)
    scores[:, 0] = rewards
    return core_algos.get_adv_estimator_fn(f"trew-{name}")(
        token_level_rewards=scores, response_mask=mask, index=index, config=AlgoConfig(**more)
    )[0]


# ---------------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize(
    "wrong",
    [{"clip_ratio": 0.3}, {"clip_ratio_low": 0.1}, {"clip_ratio_high": 0.4}, {"clip_ratio_c": 10.0}, {"tau_pos": 2.0},
     {"tau_neg": 2.0}, {"policy": {"clip_cov_ratio": 0.1}}, {"policy": {"kl_cov_ratio": 0.1}},
     {"policy": {"ppo_kl_coef": 0.2}}, {"policy": {"dro_beta": 0.2}}, {"policy": {"clip_cov_lb": 0.5}},
     {"policy": {"clip_cov_ub": 2.0}}],
    ids=json.dumps,
)  # fmt: skip
def test_bounds_of_verl_s_own_losses(wrong):
    [key] = (wrong.get("policy") or wrong).keys()
    with pytest.raises(ConfigError, match=rf"{key}=.*only verl's own losses read"):
        loss("dapo", verl_help.batch(), **wrong)


def test_bounds_that_the_preset_has_are_none():
    batch = verl_help.batch()
    assert loss("dapo", batch, clip_ratio_low=0.2, clip_ratio_high=0.28)[0] == loss("dapo", batch)[0]
    loss("two-sided", batch, clip_ratio_c=4.0)
    loss("sapo", batch, tau_pos=1.0, tau_neg=1.05)


def test_the_defaults_are_verl_s():
    actor, policy = ({f.name: f.default for f in dataclasses.fields(kind)} for kind in (ActorConfig, PolicyLossConfig))
    assert {key: default for key, (default, _) in settings.LOSS.items()} == {
        key: policy[key.partition(".")[2]] if "." in key else actor[key] for key in settings.LOSS
    }
    algorithm = {f.name: f.default for f in dataclasses.fields(AlgoConfig)}
    assert {key: algorithm[key] for key in settings.ESTIMATOR} == settings.ESTIMATOR
    assert actor["loss_agg_mode"] == settings.DEFAULT_MODE


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "token-sum", "seq-mean-token-sum-norm"])
def test_another_average(mode):
    with pytest.raises(ConfigError, match=f"loss_agg_mode={mode}, but averages by seq-mean-token-mean"):
        loss("gspo", verl_help.batch(), loss_agg_mode=mode)


@pytest.mark.parametrize("length", [0, 0.5, -3])
def test_a_length_that_is_none(length):
    with pytest.raises(ConfigError, match="accepts a whole number"):
        loss("dr-grpo", verl_help.batch(), loss_scale_factor=length)


@pytest.mark.parametrize("name", ["aipo", "dppo-tv", "dppo-kl", "prime-rl"])
def test_the_sampler_is_the_old_policy_in_bypass_mode_alone(name):
    batch = verl_help.batch()
    loss(name, batch)
    for rules, match in (({}, "bypass_mode=False"), ({"bypass_mode": True, "rollout_is": "token"}, "rollout_is=token"),
                         ({"bypass_mode": True, "rollout_rs": "seq_mean_k3"}, "rollout_rs=")):  # fmt: skip
        given = {"bypass_mode": False} | rules
        with pytest.raises(ConfigError, match=match):
            loss(name, batch, policy={"rollout_correction": given})
    batch["weights"] = torch.ones_like(batch["old"])
    with pytest.raises(ConfigError, match="a correction twice"):
        loss(name, batch)


def test_whose_weights_are_folded_must_be_known():
    batch = verl_help.batch()
    batch["weights"] = torch.full_like(batch["old"], 1.5)
    with pytest.raises(ConfigError, match="of tokens or of sequences"):
        loss("vespo", batch, policy={"rollout_correction": {}})
    token, sequence = (
        loss("vespo", batch, policy={"rollout_correction": {"rollout_is": level}})[1] for level in ("token", "sequence")
    )
    assert apart(token, sequence) >= WRONG


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_of_every_micro_batch_are_the_same_ones(name):
    # verl averages over ranks what they all have, and stops with an error where one of them has less.
    batch, found = verl_help.batch(), []
    config = plugin.config_of(trew.preset(name), policy={"loss_mode": f"trew-{name}"})
    config.global_batch_info.update(loss_scale_factor=12)
    wide = batch["advantages"][:, None] * batch["mask"]
    for mask, given in ((batch["mask"], wide), (batch["mask"], 0 * wide), (torch.zeros_like(batch["mask"]), 0 * wide)):
        _, metrics = core_algos.get_policy_loss_fn(f"trew-{name}")(
            old_log_prob=batch["old"], log_prob=batch["now"], advantages=given, response_mask=mask,
            loss_agg_mode=config.loss_agg_mode, config=config,
        )  # fmt: skip
        found.append(Metric.from_dict(metrics, aggregation=AggregationType.MEAN))
    assert found[0].keys() == found[1].keys() == found[2].keys()
    assert all(np.isfinite(Metric.aggregate_dp([part[key] for part in found])) for key in found[0])


# ----------------------------------------------------------------------------------------------------------- estimator


@pytest.mark.parametrize("wrong", [{"gamma": 0.9}, {"lam": 0.9}, {"use_pf_ppo": True}, {"gdpo_reward_keys": ["a"]}])
def test_settings_of_verl_s_own_estimators(wrong):
    with pytest.raises(ConfigError, match="only verl's own estimators read"):
        advantages("dual-clip", **wrong)


def test_without_the_standard_deviation():
    with pytest.raises(ConfigError, match=r"norm_adv_by_std_in_grpo=False.*trew-dr-grpo"):
        advantages("dual-clip", norm_adv_by_std_in_grpo=False)
    advantages("dr-grpo", norm_adv_by_std_in_grpo=False)


def test_corrections_that_bypass_mode_does_not_make_are_told(caplog):
    advantages("aipo", rollout_correction={"bypass_mode": True, "rollout_rs": "seq_mean_k3"})
    assert "rollout_rs act in bypass mode on verl's own loss" in caplog.text


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in ("rloo", "reinforce-pp")])
def test_rows_that_verl_fills_a_batch_up_with_take_no_part(name):
    expected = advantages(name)
    rows = torch.zeros(3, ragged_mask().shape[1], dtype=torch.bool)
    mask, rewards = torch.cat([ragged_mask(), rows]), torch.cat([R, torch.zeros(3, dtype=torch.float64)])
    filled = [*verl_help.INDEX, *["pad" + "0a" * 16] * 3]
    got = advantages(name, rewards=rewards, mask=mask, index=np.array(filled, dtype=object))
    assert bool((got[len(R) :] == 0).all())
    if bool(expected.any()):  # pass-at-k has nothing to learn from these
        assert apart(got[: len(R)], expected) <= TOLERANCE


def test_other_empty_rows_do():
    # Sequences that verl rejects have lost their mask; their rewards are as good as any.
    mask = ragged_mask() & (torch.arange(len(R)) != 0)[:, None]
    assert apart(advantages("dual-clip", mask=mask)[1:], advantages("dual-clip")[1:]) <= TOLERANCE


def test_nothing_is_asked_for_where_there_is_no_index():
    with pytest.raises(DataError, match="index"):
        advantages("dual-clip", index=None)


def test_the_trainer_s_own_road_and_its_own_configuration():
    # main_ppo hands over its plain configuration, and calls by this function.
    import test_verl_export as export
    from verl import DataProto

    keys = {"algorithm.adv_estimator": "trew-dual-clip", "actor_rollout_ref.actor.use_dynamic_bsz": "True"}
    config = export.composed(keys).algorithm
    mask = ragged_mask()
    scores = torch.zeros(mask.shape, dtype=torch.float64)
    scores[:, 0] = R
    data = DataProto.from_dict({"token_level_rewards": scores, "response_mask": mask.long()}, {"uid": verl_help.INDEX})
    found = compute_advantage_for_multi_trajectories(
        data, batch_keys=[f"{u}_{i}_0" for i, u in enumerate(verl_help.INDEX)], adv_estimator=config.adv_estimator,
        gamma=config.gamma, lam=config.lam, num_repeat=4, norm_adv_by_std_in_grpo=True, config=config,
    )  # fmt: skip
    assert apart(found.batch["advantages"], advantages("dual-clip")) <= TOLERANCE
    assert "trew-dual-clip" in registered()
