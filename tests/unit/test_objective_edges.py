"""What stands exactly on an edge, and which settings are refused."""

from __future__ import annotations

import pytest
import torch

from trew.objective.adjust import EntropyAdvantage
from trew.objective.advantage import PassAtK, PerReward
from trew.objective.aggregate import LocalTokenMean
from trew.objective.capped import Capped, Flipped, flipped_weight
from trew.objective.component import not_negative, one_of, positive, share_of
from trew.objective.correction import GeometricMask, MaskedImportance, OffPolicySequenceMask, TruncatedImportance
from trew.objective.covariance import ClipCov, CovariancePenalty
from trew.objective.divergence import KL, SequenceSquare
from trew.objective.entropy_bonus import EntropyBonus
from trew.objective.entropy_shares import EntropySequenceShares, EntropyTokenShares
from trew.objective.filter import HighEntropyTokens, LargestAdvantages
from trew.objective.probability import ProbabilityMask
from trew.objective.process import StepRewards
from trew.objective.ratio import ClippedGeometricRatio, TokenRatio
from trew.objective.scale import BatchStd, GroupStd
from trew.objective.shaping import SoftOverlong
from trew.objective.smooth import GammaKernel, Sech2, gamma_kernel, sech2_weight
from trew.objective.trw import Logistic, RareTokenBoost, Triangular, triangular_weight
from trew.objective.weight import Clip, DualClip, LogClip, MeanRatioClip, clip_weight, dual_clip_weight

INF, NAN = float("inf"), float("nan")


def at(function, ratio, a, **settings):
    ratio, a = torch.tensor(ratio, dtype=torch.float64), torch.tensor(a, dtype=torch.float64)
    return function(ratio, advantages=a.expand_as(ratio).clone(), **settings).tolist()


def test_a_ratio_on_the_edge_of_the_clip_is_inside():
    quarter = {"eps_low": 0.25, "eps_high": 0.5}
    assert at(clip_weight, [1.5, 0.75], 1.0, **quarter) == [1, 1]
    assert at(clip_weight, [1.5, 0.75], -1.0, **quarter) == [1, 1]
    assert at(clip_weight, [1.500001, 0.7], 1.0, **quarter) == [0, 1]
    assert at(clip_weight, [1.6, 0.749999], -1.0, **quarter) == [1, 0]
    assert at(clip_weight, [1.19, 1.21, 0.81, 0.79], [1.0, 1.0, -1.0, -1.0]) == [1, 0, 1, 0]


def test_a_token_without_advantage_is_never_clipped():
    assert at(clip_weight, [0.1, 1.0, 9.0], 0.0) == [1, 1, 1]
    assert at(dual_clip_weight, [0.1, 1.0, 9.0], 0.0) == [1, 1, 1]
    assert at(triangular_weight, [0.1, 1.0, 9.0], 0.0) == [1, 1, 1]
    assert at(flipped_weight, [0.1, 0.5, 9.0], 0.0) == [1, 1, 1]


def test_the_second_cap_stands_beside_the_first_clip():
    wide = {"eps_low": 0.5, "eps_high": 0.75, "cap": 4.0}
    assert at(dual_clip_weight, [1.75, 1.76], 1.0, **wide) == [1, 0]
    assert at(dual_clip_weight, [0.5, 0.49, 4.0, 4.1], -1.0, **wide) == [1, 0, 1, 0]
    assert at(dual_clip_weight, [0.81, 0.79, 2.9, 3.1], -0.5) == [1, 0, 1, 0]
    assert at(dual_clip_weight, [1.19, 1.21], 0.5) == [1, 0]


def test_edges_of_the_tent():
    sides = {"eps_low": 0.25, "eps_high": 0.5, "w0": 0.25, "w2": 0.5, "w_out": 0.125}
    assert at(triangular_weight, [0.5, 1.0, 1.25, 1.5, 1.51], 1.0, **sides) == [1, 1, 0.75, 0.5, 0.125]
    assert at(triangular_weight, [0.74, 0.75, 0.875, 1.0, 2.0], -1.0, **sides) == [0.125, 0.25, 0.625, 1, 1]
    both = at(triangular_weight, [0.75, 1.0, 1.5], 1.0, symmetric=True, **sides)
    assert both == [0.25, 1, 0.5]


def test_flipped_ratios_on_the_edge():
    band = {"eps_low": 0.25, "eps_high": 0.5, "cap": 2.0}
    g = [w * r for w, r in zip(at(flipped_weight, [0.25, 1.5, 1.6], 1.0, **band), (0.25, 1.5, 1.6), strict=True)]
    assert g == pytest.approx([2.0, 1 / 1.5, 0.0])
    g = [w * r for w, r in zip(at(flipped_weight, [0.7, 0.75, 3.0], -1.0, **band), (0.7, 0.75, 3.0), strict=True)]
    assert g == pytest.approx([0.0, 0.75, 2.0])


def test_smooth_weights_of_a_token_without_advantage():
    assert at(sech2_weight, [2.0], 0.0, tau_pos=1.0, tau_neg=2.0) == at(sech2_weight, [2.0], -1.0, tau_neg=2.0)
    assert at(gamma_kernel, [2.0], 0.0) == at(gamma_kernel, [2.0], 1.0) != at(gamma_kernel, [2.0], -1.0)


CLIPS = [(kind, {name: value}, name) for kind in (Clip, DualClip, MeanRatioClip, LogClip, Triangular, Flipped,
                                                  ClippedGeometricRatio)
         for name in ("eps_low", "eps_high") for value in (0.0, -0.1, NAN)]  # fmt: skip
DEVIATIONS = [(kind, {"ddof": value}, "ddof") for kind in (GroupStd, BatchStd, PerReward, StepRewards,
                                                           EntropyTokenShares, EntropySequenceShares)
              for value in (-1, 2)]  # fmt: skip
UNITS = [(kind, {"std_eps": value}, "std_eps") for kind in (GroupStd, BatchStd, PerReward, StepRewards)
         for value in (-1e-9, INF, NAN)]  # fmt: skip
OTHERS = [
    (Clip, {"eps_low": 0.2, "eps_high": -1.0}, "eps_high"),
    (DualClip, {"eps_high": 0.5, "cap": 1.5}, "cap"),
    (Capped, {"cap": 0.0}, "cap"), (Capped, {"floor": -0.1}, "floor"), (Capped, {"cap": 1.0, "floor": 1.1}, "floor"),
    (Flipped, {"cap": 0.0}, "cap"), (Triangular, {"w0": 1.1}, "w0"), (Triangular, {"w2": -0.1}, "w2"),
    (Triangular, {"w_out": 1.1}, "w_out"), (Logistic, {"alpha": -1.0}, "alpha"), (Logistic, {"eta": -1.0}, "eta"),
    (Logistic, {"cap": 0.0}, "cap"), (Sech2, {"tau_pos": 0.0}, "tau_pos"), (Sech2, {"tau_neg": 0.0}, "tau_neg"),
    (GammaKernel, {"k_pos": 0.9}, "k_pos"), (GammaKernel, {"k_neg": 0.9}, "k_neg"),
    (GammaKernel, {"lam_pos": -1.0}, "lam_pos"), (GammaKernel, {"lam_neg": -1.0}, "lam_neg"),
    (ProbabilityMask, {"delta": 0.0}, "delta"), (ProbabilityMask, {"cap": 0.0}, "cap"),
    (ClipCov, {"eps_low": 0.0}, "eps_low"), (ClipCov, {"eps_high": 0.0}, "eps_high"),
    (ClipCov, {"share": 1.1}, "share"), (ClipCov, {"cov_low": 5.0}, "cov_low"),
    (CovariancePenalty, {"penalty": -1.0}, "penalty"),
    (CovariancePenalty, {"share": -0.1}, "share"), (KL, {"beta": -0.1}, "beta"), (KL, {"beta": INF}, "beta"),
    (KL, {"estimator": "k4"}, "kl"), (KL, {"place": "here"}, "kl_place"), (KL, {"anchor": "new"}, "anchor"),
    (KL, {"behaviour": "ref"}, "behaviour"), (SequenceSquare, {"tau": -0.1}, "tau"),
    (EntropyAdvantage, {"alpha": -0.1}, "alpha"), (EntropyAdvantage, {"kappa": 0.0}, "kappa"), (PassAtK, {"k": 0}, "k"),
    (LocalTokenMean, {"microbatch": 0}, "microbatch"), (SoftOverlong, {"cache": 0}, "overlong_cache"),
    (LargestAdvantages, {"pruning": 1.0}, "pruning"), (LargestAdvantages, {"pruning": -0.1}, "pruning"),
    (HighEntropyTokens, {"share": 1.1}, "share"), (TokenRatio, {"anchor": "ref"}, "anchor"),
    (OffPolicySequenceMask, {"delta": 0.0}, "delta"), (TruncatedImportance, {"level": "group"}, "level"),
    (TruncatedImportance, {"low": -0.1}, "correction_low"), (TruncatedImportance, {"low": 2.0}, "correction_low"),
    (MaskedImportance, {"low": 3.0}, "correction_low"), (GeometricMask, {"high": 0.999}, "correction_low"),
    (EntropyBonus, {"coefficient": -0.1}, "entropy_bonus"), (EntropyBonus, {"target": -0.1}, "entropy_target"),
    (EntropyBonus, {"step": -0.1}, "entropy_step"), (EntropyTokenShares, {"outcome": -1.0}, "outcome"),
    (EntropyTokenShares, {"shared": -1.0}, "shared"), (EntropySequenceShares, {"normalize": "none"}, "normalize"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "name"), [*CLIPS, *DEVIATIONS, *UNITS, *OTHERS])
def test_refused_by_name(kind, settings, name):
    with pytest.raises(ValueError, match=f"^{name}[,:].* got "):
        kind(**settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"lam": -0.1}, "lam"), ({"a_max": 0.0}, "a_max"), ({"h_max": 0.0}, "h_max"), ({"rarity": "both"}, "rarity"),
     ({"h_max": 2.0}, "h_max")],
)  # fmt: skip
def test_refused_by_name_beside_a_base(settings, name):
    with pytest.raises(ValueError, match=f"^{name}: got "):
        RareTokenBoost(Triangular(), **settings)


def test_the_last_value_that_is_accepted():
    RareTokenBoost(Triangular(), h_max=1.0)
    RareTokenBoost(Triangular(), rarity="entropy", h_max=2.0)
    DualClip(eps_high=0.5, cap=1.51)
    Capped(cap=1.0, floor=1.0)
    Capped(cap=1.0, floor=0.0)
    Triangular(w0=0.0, w2=1.0, w_out=1.0)
    Logistic(alpha=0.0, eta=0.0)
    GammaKernel(k_pos=1.0, k_neg=1.0, lam_pos=0.0, lam_neg=0.0)
    ClipCov(share=0.0, cov_low=4.999)
    CovariancePenalty(penalty=0.0, share=1.0)
    EntropyAdvantage(alpha=0.0)
    SequenceSquare(tau=0.0)
    RareTokenBoost(Triangular(), lam=0.0)
    LargestAdvantages(pruning=0.0)
    for kind in (PassAtK, LocalTokenMean, SoftOverlong):
        kind(1)


def test_checks_of_settings():
    with pytest.raises(ValueError, match=r"^b: got 0.0, accepts a number above 0"):
        positive(a=1e-9, b=0.0)
    with pytest.raises(ValueError, match=r"^b: got inf, accepts 0 or more"):
        not_negative(a=0.0, b=INF)
    with pytest.raises(ValueError, match=r"^b: got 1.5, accepts a number from 0 to 1"):
        share_of(a=0.0, b=1.5)
    share_of(a=1.0)
    with pytest.raises(ValueError, match=r"^b: got 'z', accepts 'x', 'y' or 'w'"):
        one_of(("x", "y", "w"), a="x", b="z")
