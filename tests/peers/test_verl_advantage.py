"""Our advantages against every estimator of verl, on ragged answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import verl_help
from peer_compare import GROUPS, LENGTHS, MAX_LENGTH, REWARDS, TOLERANCE, WRONG, apart, noise, ragged_mask
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

import trew
from trew.integrations.verl import registered
from trew.objective.value import ValueLoss

R = torch.tensor(REWARDS, dtype=torch.float64)
GREEDY = torch.tensor([0.4] * 4 + [0.7] * 4, dtype=torch.float64)
SECOND = torch.tensor([0.3, 0.1, 0.9, 0.0, 0.0, 1.0, 0.5, 0.5], dtype=torch.float64)
MASK = ragged_mask()
LONG = torch.ones_like(MASK)
EPS = {"std_eps": 1e-6}


def ours(preset: str, rewards: Tensor = R, *, mask: Tensor = MASK, **settings: Any) -> Tensor:
    """Our advantages (B, T)."""
    given = ("baselines", "ref_logprobs", "old_logprobs", "score_norms")
    fields = {k: settings.pop(k) for k in given if k in settings}
    objective, zeros = trew.preset(preset, **settings), torch.zeros(mask.shape, dtype=torch.float64)
    fields |= {"rollout_logprobs": zeros} if "rollout_logprobs" in objective.needs else {}
    batch = trew.TokenBatch.from_padded(
        logprobs=zeros, mask=mask, rewards=rewards, group_ids=torch.tensor(GROUPS), max_length=MAX_LENGTH, **fields
    )
    return objective.loss(batch).advantages


# estimator, its settings, our preset, our settings, a change that must be seen
PAIRS = [
    ("grpo", {}, "dual-clip", EPS, {"ddof": 0}),
    ("grpo", {}, "grpo", {**EPS, "beta": 0.0}, {"std_eps": 0.01}),
    ("grpo_vectorized", {}, "dual-clip", EPS, {"ddof": 0}),
    ("grpo", {"norm_adv_by_std_in_grpo": False}, "dr-grpo", {}, {"preset": "grpo"}),
    ("grpo", {"norm_adv_by_std_in_grpo": False}, "dppo-tv", {}, {"scale": "std"}),
    ("grpo", {}, "dppo-kl", {"scale": "std"}, {"scale": "none"}),
    ("grpo_vectorized", {"norm_adv_by_std_in_grpo": False}, "dr-grpo", {}, {"preset": "grpo"}),
    ("rloo", {}, "rloo", {"beta": 0.0}, {"preset": "dr-grpo"}),
    ("rloo_vectorized", {}, "rloo", {"beta": 0.0}, {"preset": "dr-grpo"}),
    ("reinforce_plus_plus", {}, "reinforce-pp", {"beta": 0.0}, {"preset": "reinforce-pp-baseline"}),
    ("reinforce_plus_plus_baseline", {}, "reinforce-pp-baseline", {"beta": 0.0}, {"preset": "reinforce-pp"}),
    ("opo", {}, "opo", {}, {"preset": "dr-grpo"}),
    ("grpo_passk", {}, "grpo-passk", EPS, {"ddof": 0}),
    ("grpo_passk", {"config": {"norm_adv_by_std_in_grpo": False}}, "grpo-passk", {"scale": "none"}, {"scale": "std"}),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[2]}")
@pytest.mark.parametrize("mask", [MASK, ragged_mask(holes=True)], ids=["ragged", "tool tokens"])
def test_advantages(pair, mask):
    name, settings, preset, given, wrong = pair
    theirs = verl_help.estimate(name, R, mask, **settings)
    assert apart(ours(preset, mask=mask, **given)[mask], theirs[mask]) <= TOLERANCE
    if "preset" in wrong:
        off = ours(wrong["preset"], mask=mask, beta=0.0)
    else:
        off = ours(preset, mask=mask, **(given | wrong))
    assert apart(off[mask], theirs[mask]) >= WRONG


def test_remax():
    theirs = verl_help.estimate("remax", R, MASK, reward_baselines=GREEDY)
    assert apart(ours("remax", baselines=GREEDY)[MASK], theirs[MASK]) <= TOLERANCE
    assert apart(ours("dr-grpo")[MASK], theirs[MASK]) >= WRONG


@pytest.mark.parametrize(
    ("name", "preset", "settings"),
    [("remax", "remax", {"reward_baselines": GREEDY}), ("reinforce_plus_plus", "reinforce-pp", {})],
)
def test_kl_in_the_reward_of_every_token(name, preset, settings):
    # verl takes beta k1 off each token's reward; with gamma = 1 a token's return has all the later ones.
    data = verl_help.batch()
    beta = 0.2
    theirs = verl_help.estimate(name, R, MASK, per_token=-beta * (data["old"] - data["ref"]), **settings)
    given = {"old_logprobs": data["old"], "ref_logprobs": data["ref"], "kl": "k1", "kl_place": "to-go"}
    if name == "remax":
        given["baselines"] = GREEDY
    assert apart(ours(preset, beta=beta, **given)[MASK], theirs[MASK]) <= TOLERANCE
    assert apart(ours(preset, beta=beta / 2, **given)[MASK], theirs[MASK]) >= WRONG


@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_kl_in_the_reward_of_the_answer(name):
    data = verl_help.batch()
    beta = 0.2
    theirs = verl_help.estimate(name, R, MASK, per_token=-beta * (data["old"] - data["ref"]))
    given = {"old_logprobs": data["old"], "ref_logprobs": data["ref"], "kl": "k1", "kl_place": "reward"}
    given |= EPS if name == "grpo" else {}
    assert apart(ours(name, beta=beta, **given)[MASK], theirs[MASK]) <= TOLERANCE
    assert apart(ours(name, beta=beta / 2, **given)[MASK], theirs[MASK]) >= WRONG


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.6)])
@pytest.mark.parametrize("mask", [MASK, ragged_mask(holes=True)], ids=["ragged", "tool tokens"])
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_gae(gamma, lam, mask, beta):
    """Advantages, and what the critic learns. Values at tool tokens are skipped by both."""
    data, values = verl_help.batch(), noise(11, *MASK.shape)
    fields = {"old_logprobs": data["old"], "ref_logprobs": data["ref"]}

    def mine(**settings: Any) -> trew.LossOutput:
        batch = trew.TokenBatch.from_padded(
            logprobs=torch.zeros(mask.shape, dtype=torch.float64), mask=mask, rewards=R, values=values,
            group_ids=torch.tensor(GROUPS), **fields,
        )  # fmt: skip
        return trew.preset("ppo", **({"gamma": gamma, "lam": lam, "beta": beta} | settings)).loss(batch)

    token_rewards = -beta * (data["old"] - data["ref"]) * mask
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    token_rewards[torch.arange(len(R)), last] += R
    advantages, returns = core_algos.compute_gae_advantage_return(
        token_rewards, values, mask.double(), torch.tensor(gamma), torch.tensor(lam)
    )
    out = mine()
    assert apart(out.advantages[mask], advantages[mask]) <= TOLERANCE
    assert apart(out.batch.returns, returns[mask]) <= TOLERANCE
    wrong = mine(gamma=0.8)
    assert apart(wrong.advantages[mask], advantages[mask]) >= WRONG
    assert apart(wrong.batch.returns, returns[mask]) >= WRONG


@pytest.mark.parametrize("clip", [0.1, 0.5, 1e6])
def test_value_loss(clip):
    values, returns, mask = noise(11, *MASK.shape), noise(12, *MASK.shape), ragged_mask(holes=True)
    predictions = (values + noise(13, *MASK.shape, size=0.4)).requires_grad_()
    theirs, _ = core_algos.compute_value_loss(predictions, returns, values, mask.double(), clip)
    (gradient,) = torch.autograd.grad(theirs, predictions)
    batch = trew.TokenBatch.from_padded(
        logprobs=torch.zeros(mask.shape, dtype=torch.float64), mask=mask, rewards=R, values=values,
        group_ids=torch.tensor(GROUPS),
    )  # fmt: skip
    batch = trew.preset("ppo").prepare(batch).replace(returns=returns[mask])
    ours_, slopes = ValueLoss(clip)(predictions.detach()[mask], batch=batch)
    assert apart(ours_, theirs) <= TOLERANCE
    assert apart(slopes, gradient[mask]) <= TOLERANCE
    off, wrong = ValueLoss(clip / 4)(predictions.detach()[mask], batch=batch)
    assert clip == 1e6 or (apart(off, theirs) >= WRONG and apart(wrong, gradient[mask]) >= WRONG)


def token_baseline(name: str, mask: Tensor, groups: list[int] = GROUPS) -> Tensor:
    energy = {"old_log_probs": LOG_PI, "sum_pi_squared": SUM_PI_SQUARED}
    index = verl_help.INDEX if groups is GROUPS else np.array([f"prompt {g}" for g in groups], dtype=object)
    return verl_help.estimate(name, R, mask, index=index, **energy)


LOG_PI = -noise(11, *MASK.shape).abs() - 0.1
SUM_PI_SQUARED = (2 * LOG_PI).exp() + 0.3 * (1 - LOG_PI.exp()) ** 2  # the sampled token's square, and others'
NORMS = 1 - 2 * LOG_PI.exp() + SUM_PI_SQUARED


@pytest.mark.parametrize(
    ("name", "mask"),
    [("optimal_token_baseline", MASK), ("tir_optimal_token_baseline", MASK),
     ("tir_optimal_token_baseline", ragged_mask(holes=True))],
)  # fmt: skip
def test_optimal_token_baseline(name, mask):
    theirs = token_baseline(name, mask)
    mine = ours("otb", mask=mask, score_norms=NORMS, tail="reward")
    assert apart(mine[mask], theirs[mask]) <= TOLERANCE
    assert apart(ours("otb", mask=mask, score_norms=torch.ones_like(NORMS), tail="reward")[mask], theirs[mask]) >= WRONG
    # Our default differs where one answer is longer than all others of its group, and nowhere else.
    silent = ours("otb", mask=mask, score_norms=NORMS)
    other = (silent - theirs).abs() > 1e-5
    assert bool((silent[other] == 0).all())
    assert bool((theirs == R[:, None])[other].all())
    assert 0 < int(other.sum()) < int(mask.sum())


def test_a_group_of_one_has_its_reward_where_its_tail_has():
    groups = [9, *GROUPS[1:]]
    theirs = token_baseline("optimal_token_baseline", MASK, groups)
    batch = trew.TokenBatch.from_padded(
        logprobs=LOG_PI, mask=MASK, rewards=R, group_ids=torch.tensor(groups), score_norms=NORMS
    )
    mine = trew.preset("otb", tail="reward").loss(batch).advantages
    assert apart(mine[MASK], theirs[MASK]) <= TOLERANCE


def test_gpg():
    # verl scales by B / #(rewards that are not 0), the paper by B / #(sequences of groups with a signal): 1 here.
    theirs = verl_help.estimate("gpg", R, MASK)
    factor = len(R) / int(R.count_nonzero())
    assert apart(ours("gpg")[MASK] * factor, theirs[MASK]) <= TOLERANCE
    assert apart(ours("gpg")[MASK], theirs[MASK]) >= WRONG


def gdpo(mask: Tensor, rewards: tuple[Tensor, ...]) -> Tensor:
    """verl's GDPO reads its rewards from the batch that goes with the advantages."""
    keys = [f"reward {i}" for i in range(len(rewards))]
    config = AlgoConfig(gamma=1.0)
    attention = torch.cat([torch.ones(len(mask), 2, dtype=torch.long), mask.long()], dim=1)
    made = {
        "non_tensor_batch": {k: v.numpy() for k, v in zip(keys, rewards, strict=True)},
        "batch": {"prompts": torch.zeros(len(mask), 2), "attention_mask": attention},
    }
    config = {"gdpo_reward_keys": keys, "gamma": config.gamma}
    return verl_help.estimate("gdpo", rewards[0], mask, config=config, **made)


def test_gdpo():
    # verl's last z-score is over tokens (long answers count more), ours and the paper's over answers. On answers of
    # equal length they differ by Bessel's correction alone: of all n L tokens there, of the n answers here.
    rewards = (R, SECOND)
    theirs = gdpo(LONG, rewards)
    n, length = LONG.shape
    bessel = ((n - 1) / n * (n * length) / (n * length - 1)) ** -0.5
    mine = ours("gdpo", torch.stack(rewards, dim=1), mask=LONG, **EPS)
    assert apart(mine * bessel, theirs) <= TOLERANCE
    assert apart(mine, theirs) >= WRONG
    ragged = ours("gdpo", torch.stack(rewards, dim=1), mask=MASK, **EPS)
    assert apart(ragged[MASK] * bessel, gdpo(MASK, rewards)[MASK]) >= WRONG


def test_groups_without_spread():
    rewards = torch.tensor([0.7] * 4 + [0.1, 0.9, 1.0, 0.3], dtype=torch.float64)
    for name, preset, given in (("grpo", "dual-clip", EPS), ("rloo", "rloo", {"beta": 0.0})):
        theirs = verl_help.estimate(name, rewards, MASK)
        mine = ours(preset, rewards, **given)
        assert apart(mine[MASK], theirs[MASK]) <= TOLERANCE
        assert bool((mine[:4] == 0).all())


def test_group_of_one_is_where_we_differ():
    # verl takes mean 0 and std 1 there, so that the advantage is the reward; a baseline of its own makes it 0 here.
    index = verl_help.INDEX.copy()
    index[0] = "alone"
    theirs = verl_help.estimate("grpo", R, MASK, index=index)
    groups = torch.tensor([9, *GROUPS[1:]])
    batch = trew.TokenBatch.from_padded(
        logprobs=torch.zeros(MASK.shape, dtype=torch.float64), mask=MASK, rewards=R, group_ids=groups
    )
    mine = trew.preset("dual-clip", **EPS).loss(batch).advantages
    assert apart(mine[1:][MASK[1:]], theirs[1:][MASK[1:]]) <= TOLERANCE
    assert bool((mine[0] == 0).all())
    assert apart(theirs[0, :1], R[:1]) <= TOLERANCE


def test_every_estimator_is_covered():
    # gae, which returns two things, and the token baselines have tests of their own.
    others = {"gae", "optimal_token_baseline", "tir_optimal_token_baseline"}
    theirs = set(core_algos.ADV_ESTIMATOR_REGISTRY) - set(registered())
    assert theirs - {p[0] for p in PAIRS} - {"remax", "gpg", "gdpo"} == others
    assert len(LENGTHS) == len(R)
