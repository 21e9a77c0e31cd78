"""What every preset promises, on every preset; and where a promise does not apply, why.

promise                                            does not apply to
the gradient does not depend on the split          BATCH_COUPLED (they refuse parts)
the order of completions does not matter           ORDERED
nothing outside the mask is read                   -
shifting all rewards changes nothing               NOT_SHIFT_INVARIANT
scaling all rewards changes nothing                those in SCALES, whose advantage scales along
at r = 1 it is REINFORCE with its advantage        NOT_REINFORCE
without an advantage it is silent                  RESIDUAL
equal rewards are exactly no signal                NO_GROUP_BASELINE
a NaN reward: as if the completion were not there  ORDERED, UNJUDGED
finite, deterministic, explained                   -
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import trew
from oracle.steps import F64, PER_ROW, fresh, make_step, rows_of, step_for
from oracle.textbook import step_loss
from trew import TokenBatch
from trew.errors import DataError
from trew.objective.presets import PRESETS

NAMES = trew.presets()

BATCH_COUPLED = {
    "kl-cov": "ranks the covariance of A and log pi over all tokens of the step",
    "clip-cov": "draws from the tokens of the step by their covariance",
    "m2po": "bounds a mean over the tokens of the step",
    "dpo": "compares completions of a group by the policy's log-probs",
}
CHOOSING = {
    "kl-cov": {"share": 0.3},
    "clip-cov": {"share": 0.3},
    "m2po": {"tau": 0.01},
    "dpo": {"dpo_beta": 0.5},
}  # settings that choose tokens
ORDERED = {"token-mean-local": "its blocks are consecutive completions"}
NOT_SHIFT_INVARIANT = {
    "ppo": "its baseline is the critic's value, which the caller gives",
    "vapo": "its baseline is the critic's value, which the caller gives",
    "ppo-clip": "takes advantages, not rewards",
    "reinforce": "has no baseline unless one is chosen",
    "remax": "its baseline is the reward of the greedy answer, which the caller gives",
    "bnpo-paper": "solve rates are probabilities: rewards are 0 and 1",
    "maxrl": "divides by the mean reward",
    "gigpo": "discounts rewards over turns, and episodes differ in length",
    "online-rft": "a completion is correct if its reward is above 0",
    "rft": "a completion is correct if its reward is above 0",
    "turn-returns": "adds up rewards over turns, and episodes differ in length",
}
SCALES = {
    "reinforce": "no scale", "remax": "no scale", "rloo": "no scale", "dr-grpo": "no scale", "dppo-tv": "no scale",
    "dppo-kl": "no scale", "prime-rl": "no scale", "topr": "no scale", "gpg": "no scale", "opo": "no scale",
    "kimi": "no scale", "prime-rl-ipo": "no scale", "dro": "no scale",
    "otb": "no scale",
}  # fmt: skip
NOT_SCALE_INVARIANT = {
    "ppo": "its baseline is the critic's value, which the caller gives",
    "vapo": "its baseline is the critic's value, which the caller gives",
    "ppo-clip": "takes advantages, not rewards",
    "bnpo-paper": "solve rates are probabilities: rewards are 0 and 1",
}
NOT_REINFORCE = {
    "trw-logistic": "w(1, A) = sigma(gamma A) / 2 + eta",
    "trw-entropy": "rare tokens of good answers weigh more at any ratio",
    "high-entropy-tokens": "keeps the tokens with much entropy only",
    "clip-cov": "silences tokens at any ratio",
    "vapo": "the likelihood of correct answers is learned beside it",
    "dpo": "weighs completions by how wrongly the policy ranks them",
}
RESIDUAL = {
    "vapo": "the likelihood of correct answers is learned whatever their advantage",
    "prime-rl": "the penalty on the log-ratio pulls back every token",
    "prime-rl-ipo": "the penalty on the log-ratio pulls back every token",
    "kimi": "the squared log-ratio pulls back every completion",
    "dro": "the squared log-ratio pulls back every token",
    "kl-cov": "the distance to the old policy pulls back the chosen tokens",
}
NO_GROUP_BASELINE = {
    "ppo": "its baseline is the critic's value",
    "vapo": "its baseline is the critic's value",
    "ppo-clip": "takes advantages, not rewards",
    "reinforce": "has no baseline unless one is chosen",
    "remax": "its baseline is the reward of the greedy answer",
    "reinforce-pp": "whitens over the batch, its baseline is no group's",
    "grpo-process": "its signal is the rewards of steps",
    "gigpo": "its signal is the rewards of turns, too",
    "mt-grpo": "its signal is the rewards of turns",
    "sft": "every completion counts 1",
    "rft": "every completion counts 1",
    "online-rft": "has no baseline: correct completions count 1",
    "turn-returns": "its signal is the rewards of turns",
    "opd": "its signal is a teacher's",
}
UNJUDGED = {"ppo-clip": "takes advantages, not rewards", "opd": "learns from a teacher, with a reward or without"}
RECENTRED = {
    "reinforce-pp-baseline": "whitening moves the mean of the batch to 0, and with it a group that was there",
}
OF_THE_PART = ("ess", "ratio_q01", "ratio_q50", "ratio_q99")  # metrics that do not add up
NEAR = {"rtol": 1e-9, "atol": 1e-12}


@st.composite
def steps(draw: st.DrawFn, **fixed) -> dict:
    """Arguments of ``step_for``: any mix of lone completions, empty masks, missing rewards, layouts."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    choices = {
        "seed": draw(st.integers(0, 2**31)),
        "groups": groups,
        "size": size,
        "width": draw(st.integers(1, 6)),
        "layout": draw(st.sampled_from(["left", "right", "holes"])),
        "nan": draw(st.integers(0, 2)),
        "empty": draw(st.integers(0, 2)),
        "unmixed": draw(st.integers(0, 1)),
        "off_policy": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "rewards": draw(st.sampled_from([(0.0, 1.0), (0.0, 0.5, 1.0)])),
        "anywhere": True,
    }
    return choices | fixed


def objective_for(name: str, **overrides) -> trew.Objective:
    return trew.preset(name, **(({"k": 2} if name == "pass-at-k" else {}) | overrides))


def run(name: str, data: dict, **overrides) -> tuple[trew.LossOutput, torch.Tensor]:
    """The loss of these fields as a whole step, and its gradient."""
    data = fresh(data)
    out = objective_for(name, **overrides).loss(TokenBatch.from_padded(**data))
    (gradient,) = torch.autograd.grad(out.loss, data["logprobs"])
    return out, gradient


def each(count: int, names=NAMES):
    """For every preset, on ``count`` drawn steps."""

    def wrap(test):
        return pytest.mark.parametrize("name", names)(settings(max_examples=count, deadline=None)(test))

    return wrap


def without(*tables: dict) -> list[str]:
    return [name for name in NAMES if not any(name in table for table in tables)]


# ---------------------------------------------------------------- split, order, padding


@each(12, without(BATCH_COUPLED))
@given(choice=steps(), cut=st.randoms(use_true_random=False))
def test_the_gradient_does_not_depend_on_the_split(name, choice, cut):
    data = step_for(name, **choice)
    objective = objective_for(name, beta=0.1)
    whole = objective.loss(TokenBatch.from_padded(**data))
    (want,) = torch.autograd.grad(whole.loss, data["logprobs"])
    assert torch.isfinite(want).all()

    prepared = objective.prepare(TokenBatch.from_padded(**data))
    rows = list(range(len(data["mask"])))
    cut.shuffle(rows)
    total, counts = torch.zeros((), dtype=F64), {}
    while rows:
        k = cut.randint(1, len(rows))
        out = objective.loss(prepared.select(torch.tensor(rows[:k])))
        rows = rows[k:]
        total = total + out.loss
        for metric, (value, count) in out.metrics.items():
            old = counts.get(metric, (0.0, 0.0))
            counts[metric] = (old[0] + value, old[1] + count)
    (got,) = torch.autograd.grad(total, data["logprobs"])
    torch.testing.assert_close(got, want, **NEAR)
    assert total.item() == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-9)
    for metric, pair in counts.items():
        if metric not in OF_THE_PART:
            assert pair == pytest.approx(whole.metrics[metric], rel=1e-6, abs=1e-9), metric


@pytest.mark.parametrize("name", BATCH_COUPLED)
def test_objectives_whose_scope_is_the_batch_refuse_parts(name):
    data = step_for(name, 0)
    objective = objective_for(name, **CHOOSING[name])
    assert objective.scope == ("group" if name == "dpo" else "batch")
    prepared = objective.prepare(TokenBatch.from_padded(**data))
    whole = objective.loss(TokenBatch.from_padded(**data))
    assert torch.equal(objective.loss(prepared).coefficients, whole.coefficients)
    with pytest.raises(DataError):
        objective.loss(prepared.select(torch.arange(4)))


@pytest.mark.parametrize("name", without(BATCH_COUPLED))
def test_the_scope_of_the_others_is_tokens_or_completions(name):
    assert objective_for(name).scope in ("token", "sequence")


@each(6, without(ORDERED))
@given(choice=steps(), shuffle=st.randoms(use_true_random=False))
def test_the_order_of_completions_and_the_names_of_groups_do_not_matter(name, choice, shuffle):
    data = step_for(name, **choice)
    if name == "kl-cov":  # no two covariances alike (those of two tokens are): the pick would be arbitrary
        assume(int(data["mask"][~data["rewards"].isnan()].sum()) > 2)
        g = torch.Generator().manual_seed(choice["seed"])
        data["advantages"] = torch.randn(data["mask"].shape, generator=g, dtype=F64)
    rows = list(range(len(data["mask"])))
    shuffle.shuffle(rows)
    names = torch.tensor(shuffle.sample(range(100), 10))
    other = rows_of(data, rows)
    other["group_ids"] = names[other["group_ids"]]
    overrides = CHOOSING.get(name, {})
    (a, _), (b, _) = run(name, data, **overrides), run(name, other, **overrides)
    torch.testing.assert_close(b.coefficients, a.coefficients[rows], **NEAR)
    torch.testing.assert_close(b.advantages, a.advantages[rows], **NEAR)


@each(6)
@given(choice=steps(), poison=st.sampled_from([math.nan, math.inf, -1e30]), left=st.integers(0, 2))
def test_what_stands_outside_the_mask_is_never_read(name, choice, poison, left):
    """Values there, more columns on either side: the same bits come out, and no gradient goes in."""
    data = step_for(name, **choice)
    wide = dict(data)
    for field in PER_ROW:
        value = data.get(field)
        if field != "rewards" and isinstance(value, torch.Tensor) and value.shape == data["mask"].shape:
            filler = False if field == "mask" else poison
            value = value.detach() if field == "mask" else torch.where(data["mask"], value.detach(), filler)
            wide[field] = torch.nn.functional.pad(value, (left, 1), value=filler)
    for field in ("step_rewards", "turns"):
        wide[field] = [[(end + left, value) for end, value in own] for own in data[field]]
    (a, plain), (b, padded) = run(name, data), run(name, wide)
    inner = slice(left, left + data["mask"].shape[1])
    assert torch.equal(b.coefficients[:, inner], a.coefficients)
    assert torch.equal(padded[:, inner], plain)
    assert torch.equal(a.loss, b.loss)
    for grid in (a.coefficients, a.weights, a.ratios, a.advantages, plain):
        assert (grid[~data["mask"]] == 0).all()
    assert (padded[~wide["mask"]] == 0).all()


@each(6)
@given(choice=steps())
def test_the_gradient_is_the_coefficient_and_nothing_else_carries_one(name, choice):
    data = step_for(name, **choice)
    out, gradient = run(name, data)
    assert torch.equal(gradient, -out.coefficients)
    for value in (out.coefficients, out.advantages, out.weights, out.ratios):
        assert not value.requires_grad
    again, _ = run(name, data)
    assert torch.equal(again.coefficients, out.coefficients)
    assert torch.equal(again.loss, out.loss)


@each(6, without(BATCH_COUPLED))
@given(choice=steps(), shuffle=st.randoms(use_true_random=False))
def test_a_part_can_be_a_step_of_its_own(name, choice, shuffle):
    """``renormalised_for``: the advantages of the whole step, the token weights of the part."""
    data = step_for(name, **choice)
    objective = objective_for(name)
    prepared = objective.prepare(TokenBatch.from_padded(**data))
    rows = sorted(shuffle.sample(range(len(data["mask"])), shuffle.randint(1, len(data["mask"]))))
    part = objective.renormalised_for(prepared.select(torch.tensor(rows)))
    got = objective.loss(part)
    one_by_one = torch.zeros((), dtype=F64)
    for i in range(len(rows)):
        one_by_one = one_by_one + objective.loss(part.select(torch.tensor([i]))).loss
    assert got.loss.item() == pytest.approx(one_by_one.item(), rel=1e-9, abs=1e-12)
    if len(rows) == len(data["mask"]):
        torch.testing.assert_close(got.loss, objective.loss(prepared).loss)


# ---------------------------------------------------------------- rewards


def with_rewards(data: dict, change) -> dict:
    """The same answers under other rewards; what is correct stays so."""
    total = data["rewards"] if data["rewards"].dim() == 1 else data["rewards"].nansum(1)
    out = data | {"rewards": change(data["rewards"]), "correct": total > 0}
    for field in ("step_rewards", "turns"):
        out[field] = [[(end, float(change(torch.tensor(v, dtype=F64)))) for end, v in own] for own in data[field]]
    return out


@each(6, without(NOT_SHIFT_INVARIANT))
@given(choice=steps(), shift=st.sampled_from([-3.0, 0.25, 10.0]))
def test_shifting_all_rewards_changes_nothing(name, choice, shift):
    data = step_for(name, **choice)
    base, moved = with_rewards(data, lambda R: R), with_rewards(data, lambda R: R + shift)
    (a, _), (b, _) = run(name, base, beta=0.0), run(name, moved, beta=0.0)
    torch.testing.assert_close(b.coefficients, a.coefficients, rtol=1e-7, atol=1e-9)


@each(6, without(NOT_SCALE_INVARIANT))
@given(choice=steps(), scale=st.sampled_from([0.1, 7.0, 1000.0]))
def test_scaling_all_rewards_changes_nothing_or_scales_along(name, choice, scale):
    data = step_for(name, **choice)
    base, moved = with_rewards(data, lambda R: R), with_rewards(data, lambda R: R * scale)
    if name == "remax":
        moved["baselines"] = data["baselines"] * scale
    (a, _), (b, _) = run(name, base, beta=0.0), run(name, moved, beta=0.0)
    factor = scale if name in SCALES else 1.0
    torch.testing.assert_close(b.advantages, a.advantages * factor, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("value", "dtype"), [(0.7, torch.float32), (1e-9, torch.float32), (-1.1, torch.float32), (0.7, F64)]
)
@pytest.mark.parametrize("name", without(NO_GROUP_BASELINE))
def test_equal_rewards_are_exactly_no_signal(name, value, dtype):
    """31 times 0.7 in float32: the mean is not 0.7, and a standard deviation would blow that up."""
    sizes = [31, 1, 5]
    rows, width = sum(sizes), 2
    choices = {"groups": rows, "size": 1, "width": width, "unmixed": 0, "off_policy": 0.0}
    data = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in make_step(3, **choices).items()}  # fmt: skip
    data["group_ids"] = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    data["old_logprobs"] = data["logprobs"].detach()
    data["rollout_logprobs"] = data["logprobs"].detach()
    shape = (rows, 2) if name == "gdpo" else (rows,)
    if name == "bnpo-paper":  # takes rewards of 0 to 1
        value = abs(value) / 4
    for given_values in ([value] * 3, [value, 2 * value, 3 * value]):
        if name in ("reinforce-pp-baseline", "lite-ppo", "scalerl", "gdpo") or len(set(given_values)) == 1:
            data["rewards"] = torch.full(shape, value, dtype=dtype)
        else:
            data["rewards"] = torch.tensor(given_values, dtype=dtype).repeat_interleave(torch.tensor(sizes))
        out, gradient = run(name, data, beta=0.0)
        assert torch.equal(out.advantages, torch.zeros_like(out.advantages))
        assert torch.equal(gradient, torch.zeros_like(gradient))
        assert out.loss.item() == 0


@pytest.mark.parametrize("name", without(NO_GROUP_BASELINE, RECENTRED))
def test_a_group_without_signal_is_silent_beside_others(name):
    for seed in range(3):
        data = step_for(name, seed, groups=4, unmixed=2)
        if name == "cppo":
            data["rewards"][-2 * 4 :] = 0.7
        quiet = data["group_ids"] >= 2
        out, _ = run(name, data, beta=0.0)
        assert (out.advantages[quiet] == 0).all()
        assert (out.advantages[~quiet] != 0).any()
        if name not in RESIDUAL:
            assert (out.coefficients[quiet] == 0).all()


@each(6, without(UNJUDGED))
@given(choice=steps(nan=0), shuffle=st.randoms(use_true_random=False))
def test_a_missing_reward_is_as_if_the_completion_were_not_there(name, choice, shuffle):
    data = step_for(name, **choice)
    rows = len(data["mask"])
    gone = shuffle.sample(range(rows), shuffle.randint(0, rows - 1))
    rest = [i for i in range(rows) if i not in gone]
    holed = data | {"rewards": data["rewards"].clone()}
    holed["rewards"][gone] = math.nan
    overrides = {"share": 1.0} if name == "kl-cov" else {}  # among equal covariances the pick would be arbitrary
    (a, _), (b, _) = run(name, holed, **overrides), run(name, rows_of(data, rest), **overrides)
    torch.testing.assert_close(a.coefficients[rest], b.coefficients, **NEAR)
    assert (a.coefficients[gone] == 0).all()
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
@pytest.mark.parametrize("name", without({"ppo-clip": 0}))
def test_infinite_rewards_are_refused(name, bad):
    data = step_for(name, 0)
    data["rewards"][0] = bad
    with pytest.raises(DataError, match=r"rewards.*inf"):
        objective_for(name).loss(TokenBatch.from_padded(**data))


@pytest.mark.parametrize("name", NAMES)
def test_empty_masks_and_rewards_that_are_all_missing(name):
    data = step_for(name, 0)
    nothing = data | {"mask": torch.zeros_like(data["mask"])}
    for case in (nothing,) if name in UNJUDGED else (nothing, data | {"rewards": data["rewards"] * math.nan}):
        out, gradient = run(name, case, beta=0.1)
        assert out.loss.item() == 0
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_completions(name):
    out, gradient = run(name, rows_of(step_for(name, 0), []), beta=0.1)
    assert out.loss.item() == 0
    assert gradient.shape == (0, 5)


@pytest.mark.parametrize("name", NAMES)
def test_a_completion_without_loss_tokens_leaves_the_sequence_count(name):
    """With its advantages given, a step is the same with and without it."""
    data = step_for(name, 3)
    g = torch.Generator().manual_seed(1)
    data["advantages"] = torch.randn(data["mask"].shape, generator=g, dtype=F64)
    data.pop("rewards", None)
    data["correct"] = torch.arange(len(data["mask"])) % 2 == 0
    data["mask"][-2:] = False
    overrides = {"dynamic_sampling": False} | ({"pruning": 0.0} if name == "cppo" else {})  # its G is of the group
    rest = list(range(len(data["mask"]) - 2))
    (a, _), (b, _) = run(name, data, **overrides), run(name, rows_of(data, rest), **overrides)
    torch.testing.assert_close(a.coefficients[rest], b.coefficients, **NEAR)


# ---------------------------------------------------------------- weights


@each(6, without(NOT_REINFORCE))
@given(choice=steps(off_policy=0.0))
def test_on_policy_it_is_reinforce_with_its_advantage(name, choice):
    data = step_for(name, **choice)
    data["old_logprobs"] = data["rollout_logprobs"] = data["logprobs"].detach()
    out, _ = run(name, data, beta=0.0)
    want = torch.zeros_like(out.coefficients)
    settings = {"k": 2} if name == "pass-at-k" else {"share": 0.0} if name == "clip-cov" else {}
    shares = step_loss(name, data, beta=0.0, **settings).shares
    for row, share in shares.items():
        want[row] = share * out.advantages[row] * data["mask"][row]
    torch.testing.assert_close(out.coefficients, want, **NEAR)
    assert (out.ratios[data["mask"]] == 1).all()


RATIOS = [1e-6, 1e-3, 0.5, 0.8, 1.0, 1.2, 1.28, 2.0, 1e3, 1e6]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", NAMES)
def test_everything_is_finite_at_extreme_ratios(name, dtype):
    """Single tokens and completions whose tokens all drifted; certain tokens (probability 1); A = 0 among them."""
    ratio = torch.tensor(RATIOS, dtype=dtype).repeat(4)
    advantage = torch.tensor([1.0, -1.0, 0.0, 1e3], dtype=dtype).repeat_interleave(len(RATIOS))
    for width in (1, 40):
        for top in (math.log(1e-8), 0.0):
            log = torch.log(ratio)[:, None].expand(-1, width)
            logprobs = torch.where(log > 0, top, top + log)
            behaviour = logprobs - log
            data = {
                "logprobs": logprobs.clone().requires_grad_(), "mask": torch.ones_like(logprobs, dtype=torch.bool),
                "group_ids": torch.arange(len(ratio)) // 4, "advantages": advantage, "old_logprobs": behaviour,
                "rollout_logprobs": behaviour, "ref_logprobs": behaviour, "entropies": torch.full_like(logprobs, 0.5),
                "score_norms": torch.full_like(logprobs, 0.5),
                "correct": torch.arange(len(ratio)) % 2 == 0, "max_length": width,
            }  # fmt: skip
            out, gradient = run(name, data, dynamic_sampling=False)
            for value in (out.coefficients, out.weights, out.ratios, out.loss, gradient):
                assert torch.isfinite(value).all()
                assert value.dtype == dtype
            if name not in RESIDUAL and trew.preset(name).beta == 0:
                assert (out.coefficients[advantage == 0] == 0).all()


# ---------------------------------------------------------------- fields and words


@pytest.mark.parametrize(
    "overrides", [{"beta": 0.0}, {"beta": 0.1}, {"correction": "opsm", "overlong_filtering": True}]
)
@pytest.mark.parametrize("name", NAMES)
def test_needs_are_all_that_is_needed_and_really_needed(name, overrides):
    objective = objective_for(name, **overrides)
    full = step_for(name, 4)
    always = {"logprobs", "mask", "group_ids", "max_length"} | {"advantages" if name == "ppo-clip" else "rewards"}
    least = {k: v for k, v in full.items() if k in always | set(objective.needs)}
    want = objective.loss(TokenBatch.from_padded(**least)).coefficients
    assert torch.isfinite(want).all()
    for field in set(objective.needs) - always:
        with pytest.raises(DataError, match=field):
            objective.loss(TokenBatch.from_padded(**{k: v for k, v in least.items() if k != field}))


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_explains_itself(name):
    objective = trew.preset(name)
    lines = objective.equation().splitlines()
    assert objective.name == name
    assert lines[0].startswith("C_t = ")
    axes = [line.split()[0] for line in lines[1:]]
    assert {"advantage", "ratio", "weight", "aggregate"} <= set(axes)
    words = PRESETS[name].__doc__ or ""
    assert "arXiv" in words or any(source in words for source in ("Williams 1992", "README", "TRL", "prime-rl"))


def test_the_tables_name_presets():
    for table in (BATCH_COUPLED, ORDERED, NOT_SHIFT_INVARIANT, NOT_SCALE_INVARIANT, NOT_REINFORCE, RESIDUAL,
                  NO_GROUP_BASELINE, RECENTRED):  # fmt: skip
        assert set(table) <= set(NAMES)
        assert all(table.values())
