"""Options that every preset takes: each one changes what it says, is read back, or is refused with the reason."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import trew
from trew.errors import ConfigError
from trew.objective import options
from trew.objective.options import AGGREGATES, CORRECTIONS, Options

EACH = {
    "beta": 0.1,
    "kl": "k2",
    "kl_place": "reward",
    "distill": 0.5,
    "aggregate": "seq-mean-token-sum",
    "correction": "tis",
    "dynamic_sampling": True,
    "overlong_filtering": True,
    "overlong_cache": 8,
    "entropy_bonus": 0.01,
    "entropy_target": 0.3,
    "entropy_step": 0.01,
    "nll": 0.1,
}


@pytest.mark.parametrize("name", EACH)
def test_what_is_set_is_read_back_and_nothing_else_changes(name):
    plain, changed = trew.preset("lite-ppo"), trew.preset("lite-ppo", **{name: EACH[name]})
    before, after = (dataclasses.asdict(Options.of(o)) for o in (plain, changed))
    bounds = {"correction_low", "correction_high"} if name == "correction" else set()
    assert after[name] == EACH[name] != before[name]
    assert {k for k in after if after[k] != before[k]} == {name, *bounds}


def test_every_option_is_tried():
    assert {f.name for f in dataclasses.fields(Options)} == {*EACH, "correction_low", "correction_high", "opsm_delta"}


@pytest.mark.parametrize("preset", trew.presets())
def test_a_preset_told_its_own_options_stays_what_it_is(preset):
    objective = trew.preset(preset)
    own = {k: v for k, v in dataclasses.asdict(Options.of(objective)).items() if v is not None and v != "own"}
    assert trew.preset(preset, **own) == objective


@pytest.mark.parametrize("name", AGGREGATES)
def test_aggregates_by_name(name):
    objective = trew.preset("grpo", aggregate=name)
    assert type(objective.aggregate) is AGGREGATES[name]
    assert Options.of(objective).aggregate == name


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_by_name_and_bounds(name):
    objective = trew.preset("grpo", correction=name)
    assert objective.correction == (CORRECTIONS[name],)
    assert Options.of(objective).correction == name
    if name != "opsm":
        bounded = trew.preset("grpo", correction=name, correction_low=0.25, correction_high=7.0)
        assert (bounded.correction[0].low, bounded.correction[0].high) == (0.25, 7.0)
        again = trew.preset("grpo", correction=f"{name}+opsm", opsm_delta=0.1)
        assert again.correction[1].delta == 0.1
        assert again.correction[0] == CORRECTIONS[name]


def test_another_correction_does_not_inherit_bounds():
    objective = trew.preset("deepseek-v3.2", opsm_delta=0.25)
    assert objective.correction[0].delta == 0.25
    assert trew.preset("deepseek-v3.2", correction="none").correction == ()


def test_a_corrected_kl_divides_by_the_policy_that_sampled():
    """With a correction, old_logprobs of stale rollouts are of the current weights: r = pi / pi_old would be 1."""
    assert trew.preset("aipo", beta=0.1, kl="k3-corrected").reference.behaviour == "rollout"
    own = trew.preset("grpo", beta=0.1, kl="k3-corrected")
    assert own.reference.behaviour == "old"
    for name in ("tis", "tis-sequence", "mis", "mis-token", "icepop", "geo-mask", "tis+opsm"):
        for corrected in (trew.preset("grpo", beta=0.1, kl="k3-corrected", correction=name),
                          options.apply(own, correction=name)):  # fmt: skip
            assert corrected.reference.behaviour == "rollout", name
            assert "rollout_logprobs" in corrected.needs
            assert options.apply(corrected, correction="none") == own
    assert trew.preset("grpo", beta=0.1, kl="k3-corrected", correction="opsm").reference.behaviour == "old"
    assert trew.preset("grpo", beta=0.1, correction="tis").reference.behaviour == "old"


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_a_corrected_kl_has_the_gradient_of_the_kl_whatever_sampled(correction):
    """Spec: pi (.5, .3, .2), reference (.4, .4, .2), sampler (.6, .2, .2): ten tokens as often as they are sampled."""
    pi, ref, mu = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.6, 0.2, 0.2]))
    tokens = torch.tensor([0] * 6 + [1] * 2 + [2] * 2)

    def gradient(loss):
        logits = pi.log().clone().requires_grad_()
        return torch.autograd.grad(loss(logits.log_softmax(-1)), logits)[0]

    def trained(logprobs):
        # As a run's batch of stale rollouts: with a correction, old are the current weights.
        old = pi if correction == "tis" else mu
        batch = trew.TokenBatch.from_padded(
            logprobs=logprobs[tokens][:, None], mask=torch.ones(10, 1, dtype=torch.bool),
            group_ids=torch.zeros(10, dtype=torch.long), rewards=torch.ones(10, dtype=torch.float64),
            old_logprobs=old.log()[tokens][:, None], rollout_logprobs=mu.log()[tokens][:, None],
            ref_logprobs=ref.log()[tokens][:, None],
        )  # fmt: skip
        return trew.preset("grpo", beta=1.0, kl="k3-corrected", correction=correction).loss(batch).loss

    exact = gradient(lambda logprobs: (logprobs.exp() * (logprobs - ref.log())).sum())
    torch.testing.assert_close(gradient(trained), exact, rtol=0, atol=1e-12)


REFUSED = [
    ("grpo", {"correction": "tiss"}, "correction: got 'tiss', accepts 'none', 'tis'"),
    ("grpo", {"correction": "tis+icepop"}, "correction: got 'tis.icepop', accepts one of tis, icepop"),
    ("grpo", {"correction": "opsm+opsm"}, "accepts each name once"),
    ("grpo", {"correction_high": 3.0}, "correction_high: got 3.0, but correction = 'none' has no such bound"),
    ("grpo", {"correction": "tis", "opsm_delta": 0.1}, "opsm_delta: got 0.1"),
    ("grpo", {"correction": "tis", "correction_low": 3.0}, "accepts 0 <= low < high"),
    ("aipo", {"correction": "tis"}, "aipo's ratio is measured against the sampler already"),
    ("grpo", {"aggregate": "own"}, "aggregate: got 'own', accepts 'seq-mean-token-mean'"),
    ("grpo", {"kl": "k4"}, "kl: got 'k4', accepts 'k1', 'k2', 'k3' or 'k3-corrected'"),
    ("grpo", {"kl_place": "head"}, "kl_place: got 'head', accepts 'loss', 'reward' or 'to-go'"),
    ("grpo", {"kl": "k3-corrected", "kl_place": "reward"}, "kl: got 'k3-corrected'"),
    ("gtpo", {"beta": 0.1, "kl_place": "reward"}, "kl_place: got 'reward', but gtpo's advantages do not read it"),
    ("gdpo", {"beta": 0.1, "kl_place": "reward"}, "kl_place: got 'reward', but gdpo's .* own deviation.*or 'to-go'"),
    ("ppo-clip", {"beta": 0.1, "kl_place": "to-go"}, "kl_place: got 'to-go'.* accepts 'loss' here"),
    ("pass-at-k", {"overlong_cache": 8}, "overlong_cache: pass-at-k's advantages do not read the reward's value"),
    ("grpo", {"distill": -1.0}, "distill: got -1.0, accepts 0 or more"),
    ("grpo", {"nll": -0.1}, "nll: got -0.1, accepts 0 or more"),
    ("ppo-clip", {"distill": 0.5}, "distill: got 0.5, but ppo-clip takes its advantages as they are given"),
    ("opd", {"overlong_cache": 8}, "overlong_cache: opd's advantages do not read the reward's value"),
    ("grpo", {"overlong_cache": -1}, "overlong_cache: got -1"),
    ("grpo", {"overlong_cache": 1.5}, "overlong_cache: got 1.5 .float., accepts a whole number"),
    ("grpo", {"entropy_bonus": -0.1}, "entropy_bonus: got -0.1, accepts 0 or more"),
    ("grpo", {"beta": True}, "beta: got True"),
    ("rloo", {"ddof": 0}, "rloo has no such setting"),
    ("gtpo", {"normalize": "both"}, "normalize: got 'both', accepts 'joint' or 'separate'"),
    ("reinforce", {"baseline": "critic"}, "baseline: got 'critic', accepts 'none', 'group', 'batch' or 'leave-one"),
    ("topr", {"level": "word"}, "level: got 'word', accepts 'token' or 'sequence'"),
    ("dual-clip", {"cap": 1.1}, "cap: got 1.1, accepts a number above 1 . eps_high = 1.2"),
    ("two-sided", {"delta": 1.1}, "delta: got 1.1, accepts a number above 1 . eps_high = 1.2"),
    ("vespo", {"k_pos": 0.5}, "k_pos: got 0.5, accepts 1 or more"),
    ("vespo", {"k_neg": float("inf")}, "k_neg: got inf, accepts 1 or more"),
    ("sapo", {"tau_pos": float("inf")}, "tau_pos: got inf, accepts 0 or more"),
    ("cppo", {"pruning": 1.0}, "pruning: got 1.0, accepts 0 or more and less than 1"),
    ("cispo", {"floor": 6.0}, "floor: got 6.0, accepts 0 to 1"),
    ("clip-cov", {"cov_low": 5.0}, "cov_low: got 5.0, accepts a number below cov_high = 5"),
    ("token-mean-local", {"microbatch": 0}, "microbatch: got 0"),
    ("pass-at-k", {"k": 0}, "k: got 0"),
    # By the name that the preset has for it, not by that of the component's field.
    ("gtpo", {"a1": -1.0}, "objective.a1: got -1.0"), ("gtpo", {"a2": float("inf")}, "objective.a2: got inf"),
    ("grpo-s", {"b1": -1.0}, "objective.b1: got -1.0"), ("grpo-s", {"b2": -1.0}, "objective.b2: got -1.0"),
    ("prime-rl", {"penalty": -1.0}, "objective.penalty: got -1.0"), ("dro", {"tau": -1.0}, "objective.tau: got -1.0"),
    ("prime-rl-ipo", {"penalty": -1.0}, "objective.penalty: got -1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED)
def test_what_cannot_be_is_refused(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        trew.preset(name, **settings)


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as error:
        trew.preset("dapo", eps_hgh=0.3, eps_low="0.2", beta="no")
    assert len(error.value.problems) == 3
    assert "did you mean 'eps_high'" in str(error.value)


@pytest.mark.parametrize(("name", "meant"), [("GRPO", "grpo"), ("dr_grpo", "dr-grpo"), ("Clip_Cov", "clip-cov")])
def test_a_name_in_another_spelling_is_recognised_and_refused(name, meant):
    with pytest.raises(ConfigError, match=f"^objective.preset: got '{name}' .did you mean '{meant}'.., accepts reinfo"):
        trew.preset(name)


def test_whole_numbers_are_numbers():
    assert trew.preset("grpo", beta=1, eps_low=1).weight.eps_low == 1.0
    assert isinstance(trew.preset("grpo", beta=1).beta, float)


def test_objectives_are_values():
    assert trew.preset("gtpo") == trew.preset("gtpo")
    assert hash(trew.preset("gtpo")) == hash(trew.preset("gtpo"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        trew.preset("gtpo").name = "other"


def test_options_act_on_the_gradient():
    """Each option moves the coefficients of a batch on which it can act."""
    g = torch.Generator().manual_seed(0)
    rows, width = 12, 6

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, width, generator=g, dtype=torch.float64)

    logprobs = -torch.rand(rows, width, generator=g, dtype=torch.float64) - 5
    mask = torch.arange(width)[None] < torch.randint(2, width + 1, (rows, 1), generator=g)
    old = logprobs + noise(0.2)
    # Sequences that the sampler sees as the trainer does, and ones that it does not: products above 2 and 3, below 1.
    log_kappa = torch.tensor([0.0, 0.3, -0.3, 0.8, 1e-4, 0.2, -0.9, 0.45, 0, 0, 0, 0], dtype=torch.float64)[:, None]
    rollout = old - log_kappa - noise(0.5) * (log_kappa.abs() > 0.1)
    batch = trew.TokenBatch.from_padded(
        logprobs=logprobs, mask=mask, old_logprobs=old, rollout_logprobs=rollout, ref_logprobs=logprobs + noise(0.2),
        entropies=torch.rand(rows, width, generator=g, dtype=torch.float64), group_ids=torch.arange(rows) // 4,
        rewards=torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1]), truncated=torch.arange(rows) < 2,
        teacher_logprobs=old - 0.3, score_norms=0.1 - logprobs, max_length=width,
    )  # fmt: skip
    base = {"aggregate": "token-mean", "beta": 0.1}

    def coefficients(**settings) -> torch.Tensor:
        return trew.preset("lite-ppo", **(base | settings)).loss(batch).coefficients

    plain = coefficients()
    tried = [
        {"beta": 0.2}, {"kl": "k1"}, {"kl": "k2"}, {"kl": "k3-corrected"}, {"kl_place": "reward"},
        {"kl_place": "to-go"}, {"distill": 0.5}, {"dynamic_sampling": True}, {"overlong_filtering": True},
        {"overlong_cache": 5}, {"nll": 0.1},
        *({"aggregate": name} for name in AGGREGATES if name != "token-mean"),
        *({"correction": name} for name in CORRECTIONS if name != "opsm"), {"correction": "opsm", "opsm_delta": 0.01},
    ]  # fmt: skip
    seen = [plain]
    for settings in tried:
        now = coefficients(**settings)
        assert all((now - other).abs().max() > 1e-6 for other in seen), settings
        seen.append(now)


def test_a_setting_called_name_is_refused_like_any_other_that_there_is_not():
    with pytest.raises(ConfigError, match=r"^objective\.name: grpo has no such setting"):
        trew.preset("grpo", **{"name": "dapo"})
    with pytest.raises(ConfigError, match=r"^objective\.preset: got \['grpo'\]"):
        inspect.unwrap(trew.preset)(["grpo"])
