"""What a choice says and does in company: anchors, own choices, given denominators, missing rewards, edges."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch

import trew
from trew import TokenBatch
from trew.errors import ConfigError, DataError
from trew.objective.batch import Denominators
from trew.objective.correction import truncated_importance
from trew.objective.covariance import CovariancePenalty
from trew.objective.divergence import KL, Divergence, SequenceSquare
from trew.objective.filter import LargestAdvantages, largest_in_group
from trew.objective.metrics import token_metrics
from trew.objective.options import Options, apply
from trew.objective.preference import trpa_loss
from trew.objective.ratio import GeometricRatio, ProductRatio, TokenRatio
from trew.objective.shaping import Shape
from trew.objective.trw import Logistic, RareTokenBoost
from trew.objective.weight import MeanRatioClip

F64 = torch.float64


def f(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def make(rows: int = 4, width: int = 2, **fields) -> TokenBatch:
    data = {"logprobs": torch.full((rows, width), -1.0, dtype=F64), "mask": torch.ones(rows, width),
            "group_ids": torch.zeros(rows, dtype=torch.int64), "rewards": torch.eye(rows, dtype=F64)[0]}  # fmt: skip
    return TokenBatch.from_padded(**(data | fields))


@pytest.mark.parametrize(
    ("kind", "expected"), [(TokenRatio, [1, 2]), (GeometricRatio, [1.5, 1.5]), (ProductRatio, [3, 3])]
)
def test_a_ratio_is_measured_against_its_anchor(kind, expected):
    batch = make(1, old_logprobs=f(-1, -2)[None], rollout_logprobs=f(-2, -3)[None])
    assert kind("rollout")(batch).log().tolist() == pytest.approx(expected)
    assert kind()(batch).log().tolist() == pytest.approx([x - y for x, y in zip(expected, {
        TokenRatio: (1, 1), GeometricRatio: (1, 1), ProductRatio: (2, 2)}[kind], strict=True)])  # fmt: skip
    assert kind("rollout").needs == ("rollout_logprobs",)
    assert kind().needs == ()


def test_the_off_policy_mask_stands_beside_a_kernel_that_takes_corrections_in():
    # Mismatch corrections become a part of VESPO's ratio; a mask of whole completions cuts them off, exactly.
    fields = {"advantages": f(1, -1), "old_logprobs": torch.full((2, 2), -0.5, dtype=F64), "rewards": None}
    masked = trew.preset("vespo", correction="opsm", opsm_delta=0.25).loss(make(2, **fields))
    plain = trew.preset("vespo").loss(make(2, **fields))
    assert masked.coefficients[1].tolist() == [0, 0]
    assert masked.coefficients[0].tolist() == plain.coefficients[0].tolist()
    assert plain.coefficients[1].abs().min() > 1e-3
    assert masked.ratios.tolist() == plain.ratios.tolist()


def test_what_is_pruned_has_no_advantage():
    out = trew.preset("cppo", beta=0.0, pruning=0.75).loss(make())
    assert out.advantages[0].tolist() == pytest.approx([1.5, 1.5])
    assert out.advantages[1:].abs().max() == 0


@pytest.mark.parametrize(("size", "pruning", "kept"), [(10, 0.7, 3), (10, 0.9, 1), (70, 0.7, 21), (5, 0.5, 3)])
def test_as_many_are_kept_as_the_share_says(size, pruning, kept):
    # 1 - 0.7 is a little more than 0.3, and 10 times that no reason for a fourth.
    values = torch.arange(size, dtype=F64)
    stays = LargestAdvantages(pruning)(values, batch=make(size))
    assert int(stays.sum()) == kept
    assert bool(stays[-kept:].all())
    assert int(largest_in_group(values, group_ids=torch.zeros(size, dtype=torch.int64), keep=1 - pruning).sum()) == kept


def test_given_denominators_are_kept():
    given = Denominators(sequences=5, tokens=16, groups=2)
    for name, times in (("dapo", 8 / 16), ("gspo", 4 / 5)):
        alone, part = (trew.preset(name).loss(make(denominators=d)) for d in (None, given))
        assert torch.allclose(part.coefficients, times * alone.coefficients)
        assert part.batch.denominators == given


def test_a_part_as_a_step_of_its_own_has_its_own_denominators():
    objective = trew.preset("dapo")
    prepared = objective.prepare(make(denominators=Denominators(sequences=5, tokens=16)))
    part = objective.renormalised_for(prepared.select(torch.tensor([0])))
    assert part.denominators == Denominators(sequences=1, tokens=2, groups=1, correct_tokens=2)
    assert part.token_weights.tolist() == [0.5, 0.5]


def test_the_reference_is_the_kl_to_it_and_no_other():
    grpo = trew.preset("grpo")
    assert grpo.replace(divergence=(CovariancePenalty(),)).reference == KL()
    assert grpo.replace(divergence=(KL(0.5, anchor="rollout"),)).beta == 0
    assert grpo.replace(divergence=(KL(0.5, anchor="rollout"), KL(0.25))).beta == 0.25
    assert [axis for axis, _ in grpo.components()] == ["advantage", "ratio", "weight", "aggregate", "divergence"]


@dataclass(frozen=True)
class Brevity(Shape):
    """A shape that is none of ours, and reads the entropies for no good reason."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("entropies",)

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        return -0.1 * batch.lengths.to(F64)

    def equation(self) -> str:
        return "R <- R - |y| / 10"


def test_a_shape_of_ones_own():
    objective = trew.preset("dr-grpo", aggregate="token-mean").replace(shape=(Brevity(),))
    assert Options.of(objective).overlong_cache == 0
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    given = make(mask=mask, entropies=torch.ones(4, 2))
    assert objective.loss(given).advantages[:, 0].tolist() == pytest.approx([0.725, -0.175, -0.275, -0.275])
    with pytest.raises(DataError, match=r"^entropies: got None; dr-grpo needs it for its shape: R <- R - "):
        objective.loss(make())
    # Given advantages are final: what would lead to them is not run, and needs nothing.
    assert objective.loss(make(rewards=None, advantages=f(1, 2, 3, 4))).advantages[:, 0].tolist() == [1, 2, 3, 4]


def test_a_reward_that_does_not_apply_leaves_the_others_of_its_completion():
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0], [0.0, nan], [nan, 1.0], [nan, nan]], dtype=F64)
    out = trew.preset("gdpo").loss(make(rewards=rewards))
    one = math.sqrt(0.5)  # of two that differ
    total = f(one - one, -one, one)
    assert out.advantages[:3, 0].tolist() == pytest.approx(((total - total.mean()) / total.std()).tolist())
    assert out.advantages[3].tolist() == [0, 0]


def test_a_group_in_which_no_reward_differs_has_no_advantage_beside_others():
    # The z-score over the batch centres again: by 0, but for rounding, which is no advantage.
    for seed in range(5):
        rewards = torch.rand(24, 2, dtype=F64, generator=torch.Generator().manual_seed(seed))
        rewards[18:] = 0.7
        out = trew.preset("gdpo").loss(make(24, rewards=rewards, group_ids=torch.arange(24) // 6))
        assert out.advantages[:18].abs().min() > 0
        assert out.advantages[18:].abs().max() == 0


def test_sides_by_the_sign_of_small_advantages():
    batch = make(1, 4, rewards=None, advantages=f(0.5, 0.5, -0.5, -0.5)[None])
    out = token_metrics(batch, ratio=f(2, 0.5, 2, 0.5), weight=f(0, 0, 0, 0), correction=None)
    sides = ("clip_high_positive", "clip_low_positive", "clip_high_negative", "clip_low_negative")
    assert [out[name] for name in sides] == [(1.0, 4.0)] * 4


def test_metrics_of_entropies_that_are_trained():
    entropies = torch.ones(4, 2, dtype=F64, requires_grad=True)
    out = trew.preset("dapo", entropy_bonus=0.1).loss(make(logprobs=-entropies, entropies=entropies))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a number taken from a graph
        assert out.metrics["entropy"] == (8.0, 8.0)


def test_trpa_s_trust_region_by_default_and_in_full():
    fields = {"ref_logprobs": torch.full((2, 1), -1.0), "old_logprobs": torch.full((2, 1), -1.5)}
    batch, levels = make(2, 1, **fields), torch.tensor([1, 2])
    k3 = math.exp(-0.5) - 0.5
    for settings, weight in (({}, 0.001), ({"anchor": 1.0}, 1.0), ({"anchor": 0.0}, 0.0)):
        assert trpa_loss(batch, levels=levels, **settings).item() == pytest.approx(math.log(2) + weight * k3, abs=1e-9)


def test_a_boost_sees_as_much_as_its_base():
    assert RareTokenBoost(MeanRatioClip()).scope == "sequence"
    assert trew.preset("trw-entropy").weight.scope == "token"
    coupled = trew.preset("trw-entropy").replace(weight=RareTokenBoost(trew.preset("clip-cov").weight))
    assert coupled.scope == "batch"
    with pytest.raises(DataError, match=r"must see the whole step at once"):
        coupled.loss(coupled.prepare(make()).select(torch.tensor([0])))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [("two-sided", {"delta": 1.25, "eps_high": 0.25}, r"delta: got 1.25, accepts a number above 1 \+ eps_high = 1.25"),
     ("pass-at-k", {"k": True}, r"k: got True \(bool\), accepts a whole number like the default 4$"),
     ("dapo", {"eps_low": "0.2"}, r"eps_low: got '0.2' \(str\), accepts a number like the default 0.2$"),
     ("dapo", {"dynamic_sampling": 1}, r"dynamic_sampling: got 1 \(int\), accepts True or False$"),
     ("trw-logistic", {"gamma": math.nan}, r"gamma: got nan \(float\), accepts a number like the default 1.0$"),
     ("trw-logistic", {"gamma": math.inf}, "gamma: got inf, accepts a finite number$"),
     ("ppo-clip", {"overlong_cache": 8}, "overlong_cache: ppo-clip's advantages do not read the reward's value"),
     ("ppo-clip", {"beta": 0.1, "kl_place": "reward"}, "kl_place: got 'reward', but ppo-clip's .* accepts 'loss' here"),
     ("dpo", {"aggregate": "seq-mean-token-mean"}, "aggregate: dpo compares log-ratios of whole completions"),
     ("dapo", {"kl": 3}, r"kl: got 3 \(int\), accepts a text$")],
)  # fmt: skip
def test_settings_of_another_type(name, settings, message):
    with pytest.raises(ConfigError, match=f"^objective.{message}"):
        trew.preset(name, **settings)


@pytest.mark.parametrize("name", ["grpo-process", "opd"])
def test_groups_without_anything_to_judge_them_by_are_refused(name):
    given = {"step_rewards": [[(1, 1.0)]] * 4} if name == "grpo-process" else {"teacher_logprobs": -torch.ones(4, 2)}
    batch = make(rewards=None, ref_logprobs=-torch.ones(4, 2), **given)
    with pytest.raises(DataError, match=r"^rewards: got None; which groups have a signal"):
        trew.preset(name, dynamic_sampling=True).loss(batch)


def test_one_token_with_an_advantage_is_a_signal():
    advantages = f(0, 0, 0, 1)[:, None].expand(4, 2).clone()
    advantages[3, 1] = 0
    groups = torch.tensor([0, 0, 1, 1])
    out = trew.preset("gpg").loss(make(rewards=None, advantages=advantages, group_ids=groups))
    assert out.coefficients.flatten().tolist() == [0, 0, 0, 0, 0, 0, 0.25, 0]  # of the second group's four tokens


def test_equal_advantages_are_whitened_to_nothing():
    # Rounding leaves a mean that is not the value itself.
    rewards = torch.full((31,), 0.7, dtype=F64)
    for name in ("reinforce-pp", "gdpo"):
        out = trew.preset(name, beta=0.0).loss(make(31, rewards=rewards, group_ids=torch.arange(31)))
        assert out.advantages.abs().max() == 0


def test_given_advantages_are_not_adjusted():
    given = make(rewards=None, advantages=f(1, 2, 3, 4))
    assert trew.preset("entropy-advantage").loss(given).advantages[:, 0].tolist() == [1, 2, 3, 4]


@dataclass(frozen=True)
class Pull(Divergence):
    """A divergence of one's own, active as it stands."""

    def value(self, batch: TokenBatch) -> torch.Tensor:
        return 0.5 * batch.policy**2

    def derivative(self, batch: TokenBatch) -> torch.Tensor:
        return batch.policy

    def equation(self) -> str:
        return "+ share_t log(pi)^2 / 2"


def test_a_divergence_of_ones_own():
    out = trew.preset("dapo", dynamic_sampling=False).replace(divergence=(Pull(),)).loss(make(rewards=torch.zeros(4)))
    assert out.coefficients.tolist() == [[0.125, 0.125]] * 4
    assert out.loss.item() == 0.5


def test_another_correction_has_its_own_bounds():
    bounded = trew.preset("dapo", correction="tis", correction_low=0.25, correction_high=7.0)
    assert apply(bounded, correction="icepop").correction == trew.preset("dapo", correction="icepop").correction
    assert apply(bounded, beta=0.5).correction == bounded.correction
    masked = trew.preset("dapo", correction="opsm", opsm_delta=0.125)
    assert apply(masked, correction="tis+opsm").correction[1].delta == 0.5


def test_options_are_read_off_an_objective():
    both = Options.of(trew.preset("dapo", correction="opsm+tis", opsm_delta=0.25))
    assert (both.correction, both.correction_high, both.opsm_delta) == ("tis+opsm", 2.0, 0.25)
    corrected = trew.preset("reinforce", beta=0.1, kl="k3-corrected", kl_place="loss")
    assert corrected.reference.behaviour == "old"


def test_options_are_taken_back():
    cut = apply(trew.preset("cppo"), overlong_filtering=True)
    assert [type(p).__name__ for p in cut.prune] == ["LargestAdvantages", "UncutCompletions"]
    assert apply(cut, overlong_filtering=False) == trew.preset("cppo")
    punished = trew.preset("dapo", overlong_cache=4)
    assert apply(punished, overlong_cache=8) == trew.preset("dapo", overlong_cache=8)
    assert apply(punished, overlong_cache=0) == trew.preset("dapo")


def test_what_presets_need():
    assert trew.preset("ppo-clip").needs == ("advantages",)
    assert trew.preset("aipo").needs == ("rewards", "rollout_logprobs")
    assert trew.preset("high-entropy-tokens").needs == ("rewards", "entropies")


def test_a_sequence_s_ratio_leaves_out_what_carries_no_loss():
    batch = make(1, 3, old_logprobs=f(-2, -3, -5)[None]).replace(mask=torch.tensor([True, False, True]))
    assert ProductRatio()(batch).log().tolist() == pytest.approx([5, 5, 5])
    assert GeometricRatio()(batch).log().tolist() == pytest.approx([2.5, 2.5, 2.5])


def test_a_cap_bounds_what_a_floor_of_the_weight_lets_grow():
    ratio, a = f(1, 4, 16), f(-1, -1, -1)
    plain, capped = (Logistic(cap=cap)(ratio, advantages=a, batch=make(1, 3)) for cap in (math.inf, 2.0))
    assert torch.allclose(capped, plain / f(1, 2, 8))


def test_one_reward_in_a_column():
    one, column = (make(rewards=r) for r in (f(1, 0, 0, 0), f(1, 0, 0, 0)[:, None]))
    assert column.rewards.shape == (4, 1)
    assert torch.equal(*(trew.preset("dapo").loss(b).coefficients for b in (one, column)))


def test_small_rewards_have_a_mean_to_divide_by():
    assert trew.preset("maxrl").loss(make(2, rewards=f(1e-8, 0))).advantages[:, 0].tolist() == pytest.approx([1, -1])


def test_the_effective_sample_size_has_the_correction_in_it():
    batch = make(1, 2, rewards=None, advantages=f(1, 1)[None])
    out = token_metrics(batch, ratio=f(2, 1), weight=f(1, 1), correction=f(0.5, 1))
    assert out["ess"] == (1.0, 1.0)


@pytest.mark.parametrize("correction", ["tis", "mis", "opsm", "tis+opsm"])
@pytest.mark.parametrize("name", ["vespo", "dual-clip"])
def test_the_effective_sample_size_is_that_of_what_is_pushed(name, correction):
    g = torch.Generator().manual_seed(0)
    old = -1 - torch.rand(4, 2, generator=g, dtype=F64)
    batch = make(logprobs=old + 0.1, old_logprobs=old, rollout_logprobs=old + 0.3 * torch.randn(4, 2, generator=g))
    out = trew.preset(name, correction=correction, **({"opsm_delta": 0.2} if "opsm" in correction else {})).loss(batch)
    pushed = out.coefficients / out.advantages / out.batch.unpack(out.batch.token_weights)
    share = float(pushed.sum() ** 2 / (pushed.numel() * (pushed**2).sum()))
    assert out.metrics["ess"] == (pytest.approx(share), 1.0)


def test_bounds_reach_what_they_bound():
    kappa = truncated_importance(f(-3, 0), rollout_logprobs=f(0, 0), low=0.5)
    assert kappa.tolist() == [0.5, 1]
    with pytest.raises(ConfigError, match=r"^objective.tau_neg: got inf, accepts 0 or more"):
        trew.preset("sapo", tau_neg=math.inf)
    clip, low = MeanRatioClip(eps_low=0.5), f(0.7, 0.7)
    assert clip(low, advantages=f(-1, -1), batch=make(1)).tolist() == [1, 1]
    assert MeanRatioClip()(low, advantages=f(-1, -1), batch=make(1)).tolist() == [0, 0]


def test_a_residual_leaves_out_what_carries_no_loss():
    batch = make(1, 2, old_logprobs=f(-2, -2)[None]).replace(mask=torch.tensor([True, False]))
    assert SequenceSquare(0.5).derivative(batch).tolist() == [0.5, 0.5]


def test_two_corrections_are_multiplied():
    fields = {"advantages": f(1, -1), "rewards": None, "rollout_logprobs": torch.full((2, 2), -0.25, dtype=F64)}
    out = trew.preset("dr-grpo", aggregate="token-mean", correction="tis+opsm").loss(make(2, **fields))
    assert out.metrics["correction"] == (pytest.approx(2 * math.exp(-0.75)), 4.0)
