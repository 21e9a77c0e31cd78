"""Every preset against the textbook: autograd and central differences through what the papers write."""

from __future__ import annotations

import inspect
import random

import pytest
import torch

import trew
from oracle.steps import F64, fresh, step_for
from oracle.textbook import GRADIENT_ONLY, PRESETS, settings, step_loss
from trew import TokenBatch
from trew.objective.presets import PRESETS as LIBRARY

# Overrides that make the interesting branch likely on a dozen short completions.
LIVELY = {
    "gspo": {"eps_low": 0.05, "eps_high": 0.05},
    "gspo-token": {"eps_low": 0.05, "eps_high": 0.05},
    "luspo": {"eps_low": 0.05, "eps_high": 0.05},
    "dual-clip": {"cap": 1.3},
    "two-sided": {"delta": 1.3},
    "cispo": {"cap": 1.2, "floor": 0.9},
    "scalerl": {"cap": 1.2},
    "aipo": {"cap": 1.2},
    "aspo": {"cap": 1.2},
    "dppo-tv": {"delta": 0.03, "cap": 1.4, "scale": "std", "ddof": 0, "std_eps": 0.01},
    "dppo-kl": {"delta": 0.005, "cap": 1.4},
    "prime-rl": {"delta": 0.03, "penalty": 0.1},
    "prime-rl-ipo": {"delta": 0.03, "penalty": 0.1},
    "rollout-is": {"eps_low": 0.1, "eps_high": 0.3},
    "m2po": {"tau": 0.01, "tokens": "all"},
    "dro": {"tau": 0.5},
    "grpo-passk": {"scale": "none"},
    "otb": {"tail": "reward"},
    "topr": {"level": "sequence"},
    "deepseek-v3.2": {"delta": 0.02, "beta": 0.1},
    "kl-cov": {"share": 0.2},
    "clip-cov": {"share": 1.0, "cov_low": 0.0, "cov_high": 1.0},
    "pass-at-k": {"k": 2},
    "grpo": {"beta": 0.3, "ddof": 0, "std_eps": 1e-4},
    "cppo": {"pruning": 0.25},
    "token-mean-local": {"microbatch": 3},
    "trw-logistic": {"normalized": True, "directional": True, "cap": 1.3},
    "trw-triangular": {"symmetric": True, "w0": 0.2, "w_out": 0.1},
    "trw-entropy": {"rarity": "entropy", "h_max": 4.0, "lam": 0.9},
    "gtpo": {"normalize": "separate", "ddof": 0},
    "grpo-s": {"normalize": "separate"},
    "reinforce": {"baseline": "leave-one-out", "beta": 0.1},
    "reinforce-pp": {"beta": 0.1},
    "remax": {"beta": 0.1},
    "high-entropy-tokens": {"share": 0.5},
    "entropy-advantage": {"alpha": 0.2, "kappa": 1.5},
    "gmpo": {"eps_low": 0.1, "eps_high": 0.2},
    "ce-gppo": {"beta1": 0.3, "beta2": 0.6, "eps_low": 0.1, "eps_high": 0.28, "cap": 1.4},
    "sapo": {"tau_pos": 1.1, "tau_neg": 2.3},
    "vespo": {"k_pos": 1.1, "lam_neg": 2.3},
    "kimi": {"tau": 0.5},
    "ppo": {"gamma": 0.9, "lam": 0.6, "beta": 0.1},
    "vapo": {"gamma": 0.9, "critic_lam": 0.5, "length_alpha": 0.5, "beta": 0.1, "nll": 0.4},
    "gigpo": {"norm": "mean", "omega": 0.5, "turn_discount": 0.8, "beta": 0.1},
    "mt-grpo": {"outcome_weight": 0.4, "ddof": 0},
    "turn-returns": {"turn_discount": 0.7, "std_eps": 1e-4},
    "opd": {"distill": 0.3, "eps_low": 0.1, "eps_high": 0.1},
    "dpo": {"dpo_beta": 0.9},
}
NOT_IN_THE_TEXTBOOK = {"seed"}
SHAPES = {
    "plain": {},
    "far": {"off_policy": 0.8, "mismatch": 0.3},
    "empty": {"empty": 2, "layout": "holes"},
    "nan": {"nan": 2, "layout": "right"},
    "lone": {"size": 2, "groups": 5, "unmixed": 2},
}


DRAWS = {"clip-cov": {"share": 0.0}}  # which tokens it draws is tested in tests/golden; all or none can be written down


def check(name: str, data: dict, *, value: bool | None = None, **overrides) -> None:
    """Gradient, coefficients and advantages agree; the loss too where the paper defines the surrogate's value."""
    textbook_data, library_data = fresh(data), fresh(data)
    want = step_loss(name, textbook_data, **overrides)
    gradient = torch.zeros_like(data["logprobs"])
    if want.loss.requires_grad:
        (gradient,) = torch.autograd.grad(want.loss, textbook_data["logprobs"])
    out = trew.preset(name, **overrides).loss(TokenBatch.from_padded(**library_data))
    (got,) = torch.autograd.grad(out.loss, library_data["logprobs"])
    close = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(got, gradient, **close)
    torch.testing.assert_close(out.coefficients, -gradient, **close)
    for (row, column), a in want.advantages.items():
        assert out.advantages[row, column].item() == pytest.approx(a, rel=1e-9, abs=1e-12), (row, column)
    if value if value is not None else name not in GRADIENT_ONLY and not want.token_form:
        assert out.loss.item() == pytest.approx(want.loss.item(), rel=1e-9, abs=1e-12)


def test_the_textbook_has_every_preset():
    assert set(PRESETS) == set(trew.presets())


@pytest.mark.parametrize("name", PRESETS)
def test_settings_have_the_papers_values(name):
    """What a default is hardly shows on small steps (a cap of 5, a delta of 4): compared as a value too."""
    known = settings(name, {})
    for parameter in inspect.signature(LIBRARY[name]).parameters.values():
        if parameter.name in NOT_IN_THE_TEXTBOOK:
            continue
        assert known[parameter.name] == parameter.default, parameter.name
    assert trew.preset(name).beta == known["beta"]
    assert trew.preset(name).dynamic_sampling == known["dynamic_sampling"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PRESETS)
def test_defaults(name, shape):
    for seed in range(2):
        check(name, step_for(name, seed, **SHAPES[shape]), **DRAWS.get(name, {}))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LIVELY)
def test_other_settings(name, shape):
    for seed in range(10, 12):
        check(name, step_for(name, seed, **SHAPES[shape]), **LIVELY[name])


@pytest.mark.parametrize("baseline", ["none", "group", "batch", "leave-one-out"])
def test_baselines_of_reinforce(baseline):
    for shape in SHAPES.values():
        check("reinforce", step_for("reinforce", 1, **shape), baseline=baseline)


def test_a_lam_by_length_in_ppo():
    for shape in SHAPES.values():
        check("ppo", step_for("ppo", 1, **shape), gamma=0.9, critic_lam=0.5, length_alpha=0.5, beta=0.1)


# What a setting may be: a range, or a choice. By preset where the name means something else there.
RANGES = {
    "eps_low": (0.02, 0.6), "eps_high": (0.02, 0.6), "std_eps": (0.0, 0.1), "ddof": [0, 1], "cap": (1.7, 3.0),
    "floor": (0.0, 0.9), "delta": (0.005, 0.1), "two-sided delta": (1.7, 3.0), "microbatch": [1, 2, 5, 100],
    "a1": (0.5, 2.0), "a2": (0.05, 0.5), "b1": (0.5, 2.0), "b2": (0.05, 0.5), "normalize": ["joint", "separate"],
    "w0": (0.0, 1.0), "w2": (0.0, 1.0), "w_out": (0.0, 1.0), "symmetric": [True, False], "alpha": (0.1, 3.0),
    "gamma": (0.0, 2.0), "eta": (0.0, 0.3), "normalized": [True, False], "directional": [True, False],
    "lam": (0.1, 2.0), "a_max": (0.3, 2.0), "rarity": ["entropy"], "h_max": (4.0, 6.0),
    "tau_pos": (0.3, 3.0), "tau_neg": (0.3, 3.0), "k_pos": (1.0, 4.0), "k_neg": (1.0, 4.0), "lam_pos": (0.5, 4.0),
    "lam_neg": (0.5, 4.0), "anchor": ["old", "rollout"], "penalty": (0.01, 1.5), "level": ["token", "sequence"],
    "pruning": (0.0, 0.9), "share": (0.05, 0.9), "clip-cov share": [0.0, 1.0], "cov_low": (-1.0, 0.2),
    "cov_high": (0.3, 2.0), "kappa": (1.1, 4.0), "k": [1, 2, 3, 5], "tau": (0.0, 1.0), "seed": [0, 1],
    "baseline": ["none", "group", "batch", "leave-one-out"], "beta1": (0.0, 1.5), "beta2": (0.0, 1.5),
    "ppo gamma": (0.0, 1.0), "ppo lam": (0.0, 1.0), "vapo gamma": (0.0, 1.0), "critic_lam": (0.0, 1.0),
    "length_alpha": (0.05, 2.0), "ppo length_alpha": [0.0],
    "omega": (0.0, 2.0), "turn_discount": (0.0, 1.0), "outcome_weight": (0.0, 2.0), "norm": ["mean-std"],
    "scale": ["std"], "tail": ["silent", "reward"], "tokens": ["growing", "all"], "m2po tau": (1e-3, 0.1),
    "dpo_beta": (0.05, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_any_settings(name):
    draw = random.Random(name)
    for seed in range(40, 44):
        chosen = {}
        for parameter in inspect.signature(LIBRARY[name]).parameters:
            allowed = RANGES.get(f"{name} {parameter}", RANGES[parameter])
            chosen[parameter] = draw.uniform(*allowed) if isinstance(allowed, tuple) else draw.choice(allowed)
        check(name, step_for(name, seed, off_policy=0.5, nan=1, empty=1), **chosen)


@pytest.mark.parametrize("name", PRESETS)
def test_central_differences(name):
    """No autograd on either side: the textbook surrogate moved by h, what it detaches held where it was."""
    h = 1e-5
    overrides = LIVELY.get(name, {})
    data = step_for(name, 5, groups=3, size=4, width=3, unmixed=0)
    library = fresh(data)
    out = trew.preset(name, **overrides).loss(TokenBatch.from_padded(**library))
    here = data["logprobs"].detach()
    for row, column in data["mask"].nonzero().tolist():
        ends = []
        for move in (h, -h):
            moved = here.clone()
            moved[row, column] += move
            ends.append(step_loss(name, data | {"logprobs": moved, "fixed_logprobs": here}, **overrides).loss)
        slope = ((ends[0] - ends[1]) / (2 * h)).item()
        assert -out.coefficients[row, column].item() == pytest.approx(slope, rel=1e-6, abs=1e-9), (row, column)
    assert out.coefficients.abs().max() > 1e-4
    assert out.coefficients.dtype == F64
