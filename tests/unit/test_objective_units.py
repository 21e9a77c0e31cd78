"""Settings in another unit than the one meant: refused with the conversion, or noted; and how an objective is shown."""

from __future__ import annotations

import re

import pytest
import torch

import trew
from trew import TokenBatch
from trew.cli.describe import describe, text
from trew.errors import ConfigError
from trew.objective import presets

F64 = torch.float64
CAPPED = ("cispo", "scalerl", "aipo", "aspo", "trw-logistic", "dppo-tv", "dppo-kl")


@pytest.mark.parametrize("name", CAPPED)
def test_a_cap_that_counts_from_one_is_refused_with_the_conversion(name):
    """Taken as it stands, 0.2 made every push five times too small."""
    wanted = r"^objective.cap: got 0.2, accepts 1 or more, .* where 0.2 counts from 1, as in verl, pass 1.2$"
    with pytest.raises(ConfigError, match=wanted):
        trew.preset(name, cap=0.2)
    trew.preset(name, cap=1.2)
    trew.preset(name, cap=1)


def test_a_floor_above_one_is_refused():
    with pytest.raises(ConfigError, match=r"^objective.floor: got 1.2, accepts 0 to 1"):
        trew.preset("cispo", floor=1.2)


@pytest.mark.parametrize(
    ("name", "setting"),
    [("kl-cov", "share"), ("clip-cov", "share"), ("high-entropy-tokens", "share"), ("cppo", "pruning")],
)
def test_percentages_are_refused_with_the_conversion(name, setting):
    with pytest.raises(ConfigError, match=rf"^objective.{setting}: got 20.0, .* if 20 % is meant, pass 0.2$"):
        trew.preset(name, **{setting: 20})
    with pytest.raises(ConfigError, match=rf"^objective.{setting}: got 200.0, accepts a number from 0 to 1$"):
        trew.preset(name, **{setting: 200})


@pytest.mark.parametrize("name", ["gspo", "gspo-token", "luspo"])
def test_a_clip_range_for_tokens_is_noted_where_the_ratio_is_a_sequence_s(name):
    assert trew.preset(name).notes == ()
    assert trew.preset(name, eps_high=0.099).notes == ()
    (note,) = trew.preset(name, eps_low=0.1, eps_high=0.2).notes
    assert note.startswith("eps_low = 0.1 and eps_high = 0.2: a clip that never acts")
    assert trew.preset(name, eps_high=0.28).equation().splitlines()[-1].startswith("  note       eps_high = 0.28: ")
    assert "Note        eps_high = 0.28: a clip that never acts" in text(describe(name, eps_high=0.28))
    assert "Note " not in text(describe(name))


@pytest.mark.parametrize("name", sorted(set(presets()) - {"gspo", "gspo-token", "luspo"}))
def test_nothing_is_noted_elsewhere(name):
    assert trew.preset(name).notes == ()


def on_policy(right: int, name: str, **settings) -> torch.Tensor:
    """The coefficients of eight one-token answers, so many of them right, of a policy that has not moved."""
    rewards = (torch.arange(8) < right).to(F64)
    batch = TokenBatch.from_padded(
        logprobs=torch.full((8, 1), -1.0, dtype=F64), mask=torch.ones(8, 1), rewards=rewards,
        group_ids=torch.zeros(8, dtype=torch.int64),
    )  # fmt: skip
    return trew.preset(name, **settings).loss(batch).coefficients[:, 0]


@pytest.mark.parametrize("right", range(1, 8))
@pytest.mark.parametrize("directional", [True, False])
def test_trw_logistic_is_grpo_on_policy_only_without_gamma(right, directional):
    grpo = on_policy(right, "grpo", beta=0.0)
    shape = {"normalized": True, "directional": directional}
    assert torch.equal(on_policy(right, "trw-logistic", gamma=0.0, **shape), grpo)
    other = on_policy(right, "trw-logistic", **shape)
    cosine = torch.nn.functional.cosine_similarity(other, grpo, dim=0).item()
    assert cosine < 0.99
    if right == 4:
        assert cosine == pytest.approx(0.92, abs=5e-3)


def test_scalerl_divides_by_the_deviation_of_centred_rewards_of_the_groups_left():
    """Groups (1, 0), (5, 4) and one without signal: centred rewards are ±0.5, whose deviation over four is 0.577."""
    batch = TokenBatch.from_padded(
        logprobs=torch.full((6, 1), -1.0, dtype=F64), mask=torch.ones(6, 1), group_ids=torch.arange(6) // 2,
        rewards=torch.tensor([1.0, 0.0, 5.0, 4.0, 9.0, 9.0], dtype=F64),
    )  # fmt: skip
    got = trew.preset("scalerl").prepare(batch).advantages
    assert got is not None
    a = 0.5 / (1 / 3) ** 0.5
    assert got.tolist() == pytest.approx([a, -a, a, -a, 0, 0])


@pytest.mark.parametrize("name", presets())
def test_an_objective_is_shown_by_its_equation(name):
    objective = trew.preset(name)
    assert repr(objective) == f"Objective {name!r}\n{objective.equation()}"
    latex = objective._repr_latex_()
    assert latex.startswith("$$\\begin{aligned}\n& C_{t} =")
    assert latex.endswith("\\end{aligned}$$")
    assert latex.count("{") == latex.count("}")
    assert latex.count("\n") == len(objective.equation().splitlines()) + 1
    # Outside \\text and \\operatorname there is no run of letters but commands.
    bare = re.sub(r"\\(text|operatorname)\{[^{}]*\}", "", latex)
    assert not re.findall(r"(?<![\\a-zA-Z])[A-Za-z]{3,}", bare.replace("{aligned}", ""))
