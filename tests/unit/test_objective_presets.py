"""What each preset is made of: its settings' defaults, where a setting goes, and what it is beside them."""

from __future__ import annotations

import functools
import inspect
import math

import pytest

import trew
from trew.errors import ConfigError
from trew.objective.adjust import EntropyAdvantage, WhitenTokens
from trew.objective.advantage import BaselineAdvantage, PassAtK, PerReward, z_score
from trew.objective.aggregate import LocalTokenMean
from trew.objective.band import BandMask, LinearBandMask, ProbabilityBand, RatioBand, ratio_band
from trew.objective.capped import Capped, Flipped, capped_weight, flipped_weight
from trew.objective.correction import (
    GeometricMask,
    MaskedImportance,
    OffPolicySequenceMask,
    TruncatedImportance,
    off_policy_sequences,
    truncated_importance,
)
from trew.objective.covariance import ClipCov, CovariancePenalty
from trew.objective.credit import EpisodeAndState, TurnAndOutcome, TurnReturns, mt_grpo_advantages
from trew.objective.distillation import Distillation
from trew.objective.divergence import KL, SequenceSquare, kl_derivative, kl_value
from trew.objective.entropy_bonus import EntropyBonus
from trew.objective.entropy_shares import EntropySequenceShares, EntropyTokenShares
from trew.objective.filter import HighEntropyTokens, LargestAdvantages, high_entropy
from trew.objective.gae import GAE, generalised_advantages
from trew.objective.moments import SecondMomentMask, within_second_moment
from trew.objective.options import CORRECTIONS, Options
from trew.objective.presets import settings
from trew.objective.probability import ProbabilityMask
from trew.objective.process import StepRewards, process_advantages
from trew.objective.ratio import ClippedGeometricRatio, GeometricRatio, ProductRatio, TokenRatio, log_ratio
from trew.objective.scale import BatchStd, GroupStd
from trew.objective.segments import group_std, group_z_score, standardize
from trew.objective.shaping import SoftOverlong
from trew.objective.smooth import GammaKernel, Sech2, gamma_kernel, sech2_weight
from trew.objective.token_baseline import TokenBaseline, token_baseline_advantages
from trew.objective.trw import Logistic, RareTokenBoost, Triangular, logistic_weight, triangular_weight
from trew.objective.weight import Clip, DualClip, LogClip, MeanRatioClip, clip_weight, dual_clip_weight

CLIP = {"eps_low": 0.2, "eps_high": 0.2}
HIGHER = {"eps_low": 0.2, "eps_high": 0.28}
Z = {"ddof": 1, "std_eps": 0.0}
TENT = HIGHER | {"w0": 0.5, "w2": 0.5, "w_out": 0.0}

# settings; then aggregate, coefficient and kind of the KL, and where these differ: filters and corrections
PRESETS = {
    "reinforce": ({"baseline": "none"}, "seq-mean-token-sum", 0.0, "k1 reward"),
    "remax": ({}, "token-mean", 0.0, "k1 to-go"),
    "rloo": (CLIP, "seq-mean-token-sum", 0.03, "k1 reward"),
    "reinforce-pp": (CLIP, "token-mean", 0.01, "k1 to-go"),
    "reinforce-pp-baseline": (CLIP, "token-mean", 0.001, "k2 loss"),
    "ppo": (CLIP | {"gamma": 1.0, "lam": 0.95, "critic_lam": None, "length_alpha": 0.0}, "token-mean", 0.0,
            "k1 reward"),
    "vapo": (HIGHER | {"gamma": 1.0, "critic_lam": 1.0, "length_alpha": 0.05}, "token-mean", 0.0, "k1 reward"),
    "ppo-clip": (CLIP, "token-mean", 0.0, "k3 loss"),
    "dual-clip": (CLIP | {"cap": 3.0} | Z, "token-mean", 0.0, "k3 loss"),
    "grpo": (CLIP | Z, "seq-mean-token-mean", 0.04, "k3 loss"),
    "grpo-process": (CLIP | Z, "seq-mean-token-mean", 0.04, "k3 loss"),
    "gigpo": (CLIP | {"omega": 1.0, "turn_discount": 0.95, "norm": "mean-std"} | Z, "token-mean", 0.01, "k3 loss"),
    "mt-grpo": (CLIP | {"outcome_weight": 1.0} | Z, "token-mean", 0.0, "k3 loss"),
    "turn-returns": (CLIP | {"turn_discount": 1.0} | Z, "token-mean", 0.0, "k3 loss"),
    "bnpo-paper": (CLIP, "token-mean", 0.0, "k3 loss"),
    "token-mean-local": (CLIP | Z | {"microbatch": 8}, "own", 0.0, "k3 loss"),
    "dapo": (HIGHER | Z, "token-mean", 0.0, "k3 loss", "mixed"),
    "dr-grpo": (CLIP, "constant", 0.0, "k3 loss"),
    "gtpo": (HIGHER | {"a1": 1.0, "a2": 0.1, "normalize": "joint", "ddof": 1}, "token-mean", 0.0, "k3 loss", "mixed"),
    "grpo-s": (HIGHER | {"b1": 1.0, "b2": 0.1, "normalize": "joint", "ddof": 1}, "seq-mean-token-mean", 0.0, "k3 loss",
               "mixed"),
    "trw-triangular": (TENT | {"symmetric": False} | Z, "seq-mean-token-mean", 0.0, "k3 loss"),
    "trw-logistic": ({"alpha": 2.0, "gamma": 1.0, "eta": 0.05, "normalized": False, "directional": False,
                      "cap": math.inf} | Z, "seq-mean-token-mean", 0.0, "k3 loss"),
    "trw-entropy": (TENT | {"lam": 0.5, "a_max": 1.0, "rarity": "probability", "h_max": 1.0} | Z,
                    "seq-mean-token-mean", 0.0, "k3 loss"),
    "two-sided": (CLIP | {"delta": 4.0} | Z, "token-mean", 0.001, "k3 loss", "mixed"),
    "gspo": ({"eps_low": 3e-4, "eps_high": 4e-4} | Z, "seq-mean-token-mean", 0.0, "k3 loss"),
    "gspo-token": ({"eps_low": 3e-4, "eps_high": 4e-4} | Z, "seq-mean-token-mean", 0.0, "k3 loss"),
    "luspo": ({"eps_low": 2e-3, "eps_high": 2.5e-3} | Z, "seq-mean-token-sum", 0.0, "k3 loss"),
    "gmpo": ({"eps_low": 0.4, "eps_high": 0.4} | Z, "seq-mean-token-mean", 0.0, "k3 loss"),
    "cispo": ({"cap": 5.0, "floor": 0.0} | Z, "token-mean", 0.0, "k3 loss"),
    "scalerl": ({"cap": 5.0} | Z, "prompt-mean-token-mean", 0.0, "k3 loss", "uneven"),
    "aipo": ({"cap": 5.0} | Z, "token-mean", 0.0, "k3 loss"),
    "sapo": ({"tau_pos": 1.0, "tau_neg": 1.05} | Z, "seq-mean-token-mean", 0.0, "k3 loss"),
    "vespo": ({"k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0, "anchor": "old"} | Z, "token-mean", 0.0,
              "k3 loss"),
    "dppo-tv": ({"delta": 0.15, "cap": math.inf, "scale": "none"} | Z, "token-mean", 0.0, "k3 loss"),
    "dppo-kl": ({"delta": 0.05, "cap": math.inf, "scale": "none"} | Z, "token-mean", 0.0, "k3 loss"),
    "prime-rl": ({"delta": 0.2, "penalty": 1e-3}, "token-mean", 0.0, "k3 loss", "uneven"),
    "prime-rl-ipo": ({"delta": 0.1, "penalty": 1e-3}, "token-mean", 0.0, "k3 loss", "uneven"),
    "rollout-is": (CLIP | Z, "token-mean", 0.0, "k3 loss"),
    "m2po": ({"tau": 0.04, "tokens": "growing", "anchor": "old"} | Z, "token-mean", 0.0, "k3 loss"),
    "topr": ({"level": "token"}, "token-mean", 0.0, "k3 loss"),
    "aspo": (CLIP | {"cap": 3.0} | Z, "token-mean", 0.0, "k3 loss", "mixed"),
    "ce-gppo": (CLIP | {"beta1": 0.75, "beta2": 1.0, "cap": 3.0} | Z, "token-mean", 0.0, "k3 loss"),
    "gpg": ({}, "seq-mean-token-mean", 0.0, "k3 loss", "uneven"),
    "opo": ({}, "token-mean", 0.0, "k3 loss"),
    "otb": (CLIP | {"tail": "silent"}, "token-mean", 0.0, "k3 loss"),
    "lite-ppo": (CLIP | Z, "token-mean", 0.0, "k3 loss"),
    "cppo": (CLIP | {"pruning": 0.5} | Z, "seq-mean-token-mean", 0.04, "k3 loss"),
    "kl-cov": ({"share": 2e-3, "penalty": 1.0} | Z, "token-mean", 0.0, "k3 loss"),
    "clip-cov": ({"eps_low": 1.0, "eps_high": 1.0, "share": 2e-4, "cov_low": 1.0, "cov_high": 5.0, "seed": 0} | Z,
                 "token-mean", 0.0, "k3 loss"),
    "high-entropy-tokens": (HIGHER | {"share": 0.2} | Z, "token-mean", 0.0, "k3 loss", "mixed"),
    "entropy-advantage": (CLIP | {"alpha": 0.4, "kappa": 2.0} | Z, "token-mean", 0.0, "k3 loss"),
    "maxrl": (CLIP, "token-mean", 0.0, "k3 loss"),
    "pass-at-k": (CLIP | {"k": 4}, "token-mean", 0.0, "k3 loss"),
    "grpo-passk": ({"eps_high": 0.2, "scale": "std"} | Z, "token-mean", 0.0, "k3 loss"),
    "gdpo": (CLIP | Z, "token-mean", 0.0, "k3 loss"),
    "kimi": ({"tau": 0.1}, "seq-mean-token-sum", 0.0, "k3 loss"),
    "dro": ({"tau": 0.05}, "token-mean", 0.0, "k3 loss"),
    "deepseek-v3.2": (CLIP | {"delta": 0.5} | Z, "seq-mean-token-mean", 0.001, "k3-corrected loss"),
    "opd": (CLIP, "token-mean", 0.0, "k3 loss"),
    "sft": ({}, "token-mean", 0.0, "k3 loss"),
    "rft": ({}, "seq-mean-token-mean", 0.0, "k3 loss"),
    "online-rft": ({}, "seq-mean-token-mean", 0.0, "k3 loss"),
    "dpo": ({"dpo_beta": 0.1}, "own", 0.0, "k3 loss"),
}  # fmt: skip

# Where a setting ends up: by name, and where a preset has another place for it.
PLACES = {"ddof": "advantage.scale.ddof", "std_eps": "advantage.scale.std_eps", "microbatch": "aggregate.microbatch",
          "pruning": "prune.0.pruning", "tail": "advantage.tail", "tau": "divergence.1.tau",
          "alpha": "adjust.0.alpha", "kappa": "adjust.0.kappa",
          "k": "advantage.k", "a1": "advantage.outcome", "b1": "advantage.outcome", "a2": "advantage.shared",
          "b2": "advantage.shared", "normalize": "advantage.normalize", "omega": "advantage.omega",
          "norm": "advantage.norm", "turn_discount": "advantage.turn_discount", "anchor": "ratio.anchor",
          "outcome_weight": "advantage.outcome_weight"}  # fmt: skip
OWN_ADVANTAGE = {"ddof": "advantage.ddof", "std_eps": "advantage.std_eps"}
ELSEWHERE = {
    "gigpo": OWN_ADVANTAGE, "mt-grpo": OWN_ADVANTAGE, "turn-returns": OWN_ADVANTAGE,
    "grpo-process": OWN_ADVANTAGE, "gdpo": OWN_ADVANTAGE, "gtpo": OWN_ADVANTAGE, "grpo-s": OWN_ADVANTAGE,
    "ppo": {name: f"advantage.{name}" for name in ("gamma", "lam", "critic_lam", "length_alpha")},
    "vapo": {name: f"advantage.{name}" for name in ("gamma", "critic_lam", "length_alpha")},
    "trw-logistic": {"alpha": "weight.alpha"}, "two-sided": {"delta": "weight.cap"},
    "trw-entropy": {name: f"weight.base.{name}" for name in TENT},
    "deepseek-v3.2": {"delta": "correction.0.delta"}, "high-entropy-tokens": {"share": "select.0.share"},
    "prime-rl-ipo": {"delta": "weight.band.delta"}, "m2po": {"tau": "weight.tau"}, "dro": {"tau": "divergence.1.beta"},
    "rollout-is": {"eps_low": "weight.band.eps_low", "eps_high": "weight.band.eps_high"},
    "dpo": {"dpo_beta": "weight.beta"},
    "kl-cov": {"share": "divergence.1.share", "penalty": "divergence.1.penalty"},
}  # fmt: skip
OTHER_CHOICE = {
    "mean-std": "mean",
    "joint": "separate",
    "probability": "entropy",
    "old": "rollout",
    "growing": "all",
    "silent": "reward",
}
UNSCALED = ("dppo-tv", "dppo-kl")  # whose other options of the deviation need scale = "std"
ELSEWHERE_TESTED = ("baseline", "level", "penalty", "scale")
EACH = [(name, key) for name, (own, *_) in PRESETS.items() for key in own if key not in ELSEWHERE_TESTED]


def found(objective: trew.Objective, name: str, key: str):
    path = ELSEWHERE.get(name, {}).get(key) or PLACES.get(key) or f"weight.{key}"
    return functools.reduce(lambda o, part: o[int(part)] if part.isdigit() else getattr(o, part), path.split("."),
                            objective)  # fmt: skip


def test_the_table_is_complete():
    assert tuple(PRESETS) == trew.presets()


@pytest.mark.parametrize("name", PRESETS)
def test_settings_and_common_options(name):
    own, aggregate, beta, kl, *rest = PRESETS[name]
    objective = trew.preset(name)
    assert objective.name == name
    assert settings(name) == own
    options = Options.of(objective)
    correction = "opsm" if name == "deepseek-v3.2" else "none"
    assert (options.aggregate, options.beta, f"{options.kl} {options.kl_place}") == (aggregate, beta, kl)
    assert (options.correction, options.dynamic_sampling) == (correction, rest == ["mixed"])
    assert [type(k).__name__ for k in objective.keep] == [
        {"mixed": "MixedGroups", "uneven": "UnevenGroups"}[r] for r in rest
    ]
    assert (options.overlong_filtering, options.overlong_cache, options.entropy_bonus) == (False, 0, 0.0)
    assert (options.entropy_target, options.entropy_step) == (0.0, 0.005)
    assert options.distill == float(name == "opd")
    assert options.nll == (0.1 if name == "vapo" else 0.0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_choice_says_what_it_must_see_together(name):
    assert {component.scope for _, component in trew.preset(name).components()} <= {
        "token",
        "sequence",
        "group",
        "batch",
    }


@pytest.mark.parametrize(("name", "key"), EACH)
def test_a_setting_arrives_where_it_belongs(name, key):
    default = PRESETS[name][0][key]
    given = {"rarity": "entropy"} if key == "h_max" else {}  # which nothing else reads
    given |= {"scale": "std"} if name in UNSCALED else {}
    assert found(trew.preset(name, **given), name, key) == default
    if isinstance(default, str):
        other = OTHER_CHOICE[default]
    elif default is None:
        other = 0.5
    elif key == "turn_discount" or (name in ("ppo", "vapo") and key in ("gamma", "lam", "critic_lam")):  # 1 at most
        other = default / 2
    elif isinstance(default, bool) or key == "ddof":
        other = type(default)(not default)
    elif isinstance(default, int):
        other = default + 1
    else:
        other = 1.25 * default if 0 < default < math.inf else 2.5 if default else 0.25
    changed = trew.preset(name, **given, **{key: other})
    assert found(changed, name, key) == other
    for rest in PRESETS[name][0].keys() - {key, *given, *ELSEWHERE_TESTED}:
        assert found(changed, name, rest) == PRESETS[name][0][rest]


def test_ppo_has_every_option_of_its_advantages():
    plain = trew.preset("ppo")
    assert plain == trew.preset("ppo", length_alpha=0.0)
    assert plain.advantage == GAE(1.0, 0.95)
    of_vapo = trew.preset("ppo", critic_lam=1.0, length_alpha=0.05, eps_high=0.28, nll=0.1)
    assert of_vapo.replace(name="vapo") == trew.preset("vapo")
    # Where each sequence has a lam by its length, nothing reads this one.
    with pytest.raises(ConfigError, match=r"^objective.lam: got 0.9 with length_alpha = 0.05, which takes its place"):
        trew.preset("ppo", lam=0.9, length_alpha=0.05)
    for wrong, said in (
        ({"critic_lam": 1.5}, r"critic_lam: got 1.5, accepts a number from 0 to 1"),
        ({"critic_lam": "1"}, r"critic_lam: got '1' \(str\), accepts a number$"),
        ({"length_alpha": -1.0}, "length_alpha: got -1.0, accepts 0 or more"),
    ):
        with pytest.raises(ConfigError, match=f"^objective.{said}"):
            trew.preset("ppo", **wrong)
    with pytest.raises(
        ConfigError, match=r"^objective.length_alpha: got 0, accepts .* ppo has one lam for all lengths"
    ):
        trew.preset("vapo", length_alpha=0)


def test_settings_with_two_places_or_another_scale():
    gmpo = trew.preset("gmpo", eps_low=0.3, eps_high=0.5)
    assert (gmpo.ratio.eps_low, gmpo.ratio.eps_high) == (0.3, 0.5) == (gmpo.weight.eps_low, gmpo.weight.eps_high)
    pull = trew.preset("prime-rl", penalty=0.25).divergence[1]  # 2 penalty times log(r)^2 / 2
    assert (pull.beta, pull.estimator, pull.place, pull.anchor) == (0.5, "k2", "loss", "rollout")
    pull = trew.preset("prime-rl-ipo", penalty=0.25).divergence[1]
    assert (pull.beta, pull.estimator, pull.place, pull.anchor) == (0.5, "k2", "loss", "rollout")
    for name in ("grpo-passk", *UNSCALED):
        scales = {scale: type(trew.preset(name, scale=scale).advantage.scale).__name__ for scale in ("std", "none")}
        assert scales == {"std": "GroupStd", "none": "NoScaling"}
        with pytest.raises(ConfigError, match=r"^objective.scale: got 'none' with ddof = 0"):
            trew.preset(name, scale="none", ddof=0)
    assert trew.preset("kl-cov", penalty=0.25).divergence[1].penalty == 0.25
    kinds = [type(trew.preset("topr", level=level).ratio).__name__ for level in ("token", "sequence")]
    assert kinds == ["TokenRatio", "ProductRatio"]
    baselines = {
        b: trew.preset("reinforce", baseline=b).advantage.baseline for b in ("none", "group", "batch", "leave-one-out")
    }
    assert [type(b).__name__ for b in baselines.values()] == ["NoBaseline", "GroupMean", "BatchMean", "LeaveOneOut"]
    assert trew.preset("deepseek-v3.2").reference.behaviour == "rollout"


@pytest.mark.parametrize("name", ["ppo-clip", "dual-clip", "grpo", "rloo", "gspo", "vespo", "topr"])
def test_ratios_are_measured_against_the_old_policy(name):
    assert trew.preset(name).ratio.anchor == "old"


@pytest.mark.parametrize(
    "name", ["aipo", "dppo-tv", "dppo-kl", "prime-rl", "prime-rl-ipo", "rollout-is", "deepseek-v3.2"]
)
def test_ratios_are_measured_against_the_sampler(name):
    assert trew.preset(name).ratio.anchor == "rollout"


# A component by itself has the numbers of the preset it was written for.
BY_ITSELF = [
    ("grpo", "weight", Clip()), ("grpo", "advantage", z_score()), ("dual-clip", "weight", DualClip()),
    ("aspo", "weight", Flipped()), ("cispo", "weight", Capped()), ("sapo", "weight", Sech2()),
    ("vespo", "weight", GammaKernel()), ("trw-triangular", "weight", Triangular()),
    ("trw-logistic", "weight", Logistic()), ("trw-entropy", "weight", RareTokenBoost(Triangular())),
    ("dppo-tv", "weight", ProbabilityMask()), ("clip-cov", "weight", ClipCov()), ("gmpo", "weight", LogClip()),
    ("gmpo", "ratio", ClippedGeometricRatio()), ("gspo", "ratio", GeometricRatio()), ("vespo", "ratio", ProductRatio()),
    ("grpo", "ratio", TokenRatio()),
    ("kl-cov", "divergence", (KL(), CovariancePenalty())), ("kimi", "divergence", (KL(), SequenceSquare())),
    ("entropy-advantage", "adjust", (EntropyAdvantage(),)), ("reinforce-pp", "adjust", (WhitenTokens(),)),
    ("cppo", "prune", (LargestAdvantages(),)), ("high-entropy-tokens", "select", (HighEntropyTokens(),)),
    ("pass-at-k", "advantage", PassAtK()), ("gtpo", "advantage", EntropyTokenShares()),
    ("grpo-s", "advantage", EntropySequenceShares()), ("gdpo", "advantage", PerReward()),
    ("gigpo", "advantage", EpisodeAndState()), ("mt-grpo", "advantage", TurnAndOutcome()),
    ("turn-returns", "advantage", TurnReturns()), ("opd", "adjust", (Distillation(),)),
    ("grpo-process", "advantage", StepRewards()), ("token-mean-local", "aggregate", LocalTokenMean()),
    ("ppo", "advantage", GAE()),
    ("dr-grpo", "advantage", BaselineAdvantage()), ("lite-ppo", "advantage", BaselineAdvantage(scale=BatchStd())),
    ("rollout-is", "weight", LinearBandMask()), ("prime-rl-ipo", "weight", BandMask(ProbabilityBand())),
    ("m2po", "weight", SecondMomentMask()), ("otb", "advantage", TokenBaseline()),
    ("deepseek-v3.2", "correction", (OffPolicySequenceMask(),)), ("dapo", "entropy_bonus", EntropyBonus()),
]  # fmt: skip
# A function and its component have the same defaults.
ALIKE = [
    (clip_weight, Clip()), (dual_clip_weight, DualClip()), (triangular_weight, Triangular()),
    (flipped_weight, Flipped()), (logistic_weight, Logistic()), (capped_weight, Capped()),
    (sech2_weight, Sech2()), (gamma_kernel, GammaKernel()),
    (token_baseline_advantages, TokenBaseline()), (ratio_band, RatioBand()), (within_second_moment, SecondMomentMask()),
    (off_policy_sequences, OffPolicySequenceMask()), (truncated_importance, TruncatedImportance()),
    (high_entropy, HighEntropyTokens()), (process_advantages, StepRewards()), (mt_grpo_advantages, TurnAndOutcome()),
    (generalised_advantages, GAE()),
    (group_z_score, GroupStd()), (z_score, GroupStd()),
    (group_std, GroupStd()), (standardize, GroupStd()), (kl_value, KL()), (kl_derivative, KL()),
    (log_ratio, TokenRatio()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "axis", "component"), BY_ITSELF)
def test_a_component_by_itself_is_the_preset_s(name, axis, component):
    assert getattr(trew.preset(name), axis) == component


@pytest.mark.parametrize(("function", "component"), ALIKE, ids=lambda x: getattr(x, "__name__", ""))
def test_a_function_has_the_defaults_of_its_component(function, component):
    given = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.default is not p.empty}
    assert given == {name: getattr(component, name) for name in given}


def test_numbers_that_no_preset_has():
    assert {
        "tis": TruncatedImportance(0.0, 2.0, "token"), "tis-sequence": TruncatedImportance(0.0, 2.0, "sequence"),
        "mis": MaskedImportance(0.0, 3.0, "sequence"), "mis-token": MaskedImportance(0.0, 3.0, "token"),
        "icepop": MaskedImportance(0.5, 5.0, "token"), "geo-mask": GeometricMask(0.999, 1.002),
        "opsm": OffPolicySequenceMask(0.5),
    } == CORRECTIONS  # fmt: skip
    assert KL() == KL(0.0, "k3", "loss", "ref", "old")
    assert (SoftOverlong().cache, MeanRatioClip()) == (4096, MeanRatioClip(0.2, 0.2))
    assert Options() == Options(
        beta=0.0, kl="k3", kl_place="loss", aggregate="", correction="none", correction_low=None, correction_high=None,
        opsm_delta=None, dynamic_sampling=False, overlong_filtering=False, overlong_cache=0, entropy_bonus=0.0,
        entropy_target=0.0, entropy_step=0.005,
    )  # fmt: skip
