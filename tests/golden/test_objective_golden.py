"""Numbers worked by hand, or from the papers: advantages and rewards. A change here is a change of the mathematics."""

from __future__ import annotations

import math

import pytest
import torch

from oracle.single import advantages, from_rewards

F64 = torch.float64
NEAR = {"abs": 1e-9}


def right(count: int, size: int) -> list[float]:
    return [1.0] * count + [0.0] * (size - count)


# right answers, group size -> (A of a right one, A of a wrong one) by objective and settings
GROUPS = [
    (4, 8, "grpo", {}, 0.9354143467, -0.9354143467),
    (4, 8, "grpo", {"std_eps": 1e-4}, 0.9352393794, -0.9352393794),
    (4, 8, "grpo", {"ddof": 0}, 1.0, -1.0),
    (4, 8, "dr-grpo", {}, 0.5, -0.5),
    (4, 8, "rloo", {}, 0.5714285714, -0.5714285714),
    (4, 8, "maxrl", {}, 1.0, -1.0),
    (1, 8, "grpo", {}, 2.4748737342, -0.3535533906),
    (1, 8, "grpo", {"std_eps": 1e-4}, 2.4741739321, -0.3534534185),
    (1, 8, "grpo", {"ddof": 0}, 2.6457513111, -0.3779644730),
    (1, 8, "dr-grpo", {}, 0.875, -0.125),
    (1, 8, "rloo", {}, 1.0, -0.1428571429),
    (1, 8, "maxrl", {}, 7.0, -1.0),
    (7, 8, "grpo", {}, 0.3535533906, -2.4748737342),
    (7, 8, "grpo", {"ddof": 0}, 0.3779644730, -2.6457513111),
    (7, 8, "dr-grpo", {}, 0.125, -0.875),
    (7, 8, "rloo", {}, 0.1428571429, -1.0),
    (7, 8, "maxrl", {}, 0.1428571429, -1.0),
    (1, 4, "grpo", {}, 1.5, -0.5),
    (1, 4, "grpo", {"std_eps": 1e-4}, 1.4997000600, -0.4999000200),
    (1, 4, "grpo", {"ddof": 0}, 1.7320508076, -0.5773502692),
    (1, 4, "dr-grpo", {}, 0.75, -0.25),
    (1, 4, "rloo", {}, 1.0, -0.3333333333),
    (1, 4, "maxrl", {}, 3.0, -1.0),
    (1, 2, "grpo", {}, 0.7071067812, -0.7071067812),
    (1, 2, "grpo", {"std_eps": 1e-4}, 0.7070067953, -0.7070067953),
    (1, 2, "grpo", {"ddof": 0}, 1.0, -1.0),
    (1, 2, "dr-grpo", {}, 0.5, -0.5),
    (1, 2, "rloo", {}, 1.0, -1.0),
    (1, 2, "maxrl", {}, 1.0, -1.0),
    (4, 8, "pass-at-k", {"k": 4}, 0.1203858531, -0.1203858531),
    (1, 8, "pass-at-k", {"k": 4}, 1.0, -0.1428571429),
    (4, 8, "pass-at-k", {"k": 2}, 0.5222329679, -0.5222329679),
    (4, 8, "pass-at-k", {"k": 1}, 1.0, -1.0),
]


@pytest.mark.parametrize(("count", "size", "name", "settings", "high", "low"), GROUPS)
def test_advantages_of_right_and_wrong_answers(count, size, name, settings, high, low):
    settings = settings | ({"beta": 0.0} if name in ("grpo", "rloo") else {})
    got = advantages(name, right(count, size), settings=settings)
    assert got == pytest.approx([high] * count + [low] * (size - count), **NEAR)


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo", "maxrl", "pass-at-k"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.7])
def test_equal_rewards_are_exactly_no_signal(name, value):
    settings = {"beta": 0.0}
    assert advantages(name, [value] * 8, settings=settings) == [0.0] * 8


@pytest.mark.parametrize(
    ("low", "high", "signal"),
    [(1000.0, 1000.01, True), (1000.0, 1000.0005, False), (1.0, 1.0 + 1e-7, False), (1e-8, 2e-8, True),
     (0.0, 1e-5, True)],
)  # fmt: skip
def test_a_spread_within_a_millionth_of_the_rewards_is_rounding(low, high, signal):
    size = 0.7071067812 if signal else 0.0
    assert advantages("grpo", [high, low], settings={"beta": 0.0}) == pytest.approx([size, -size], abs=1e-9)


@pytest.mark.parametrize(
    ("p", "order", "weight"),
    [(0.125, 1, 1.0), (0.125, 4, 3.310546875), (0.125, 8, 5.2511286736), (0.5, 1, 1.0), (0.5, 4, 1.875),
     (0.5, 8, 1.9921875)],
)  # fmt: skip
def test_expected_gradient_of_maxrl_is_the_truncated_series_of_log_p(p, order, weight):
    """(1 - (1-p)^N) / p, for groups of N + 1: the mean over the group holds the answer itself, and a group without a
    right answer is silent."""
    size, expected = order + 1, 0.0
    for count in range(size + 1):
        chance = math.comb(size, count) * p**count * (1 - p) ** (size - count)
        rewards = right(count, size)
        slopes = [1 / p if r else -1 / (1 - p) for r in rewards]  # d log pi / dp
        found = advantages("maxrl", rewards)
        expected += chance * sum(a * g for a, g in zip(found, slopes, strict=True)) / size
    assert expected == pytest.approx(weight, **NEAR)


def test_bnpo_of_the_paper():
    """Solve rates 1/4, 1/2, 3/4: Beta moments 3/2 and 3/2."""
    rewards = right(1, 4) + right(2, 4) + right(3, 4)
    got = advantages("bnpo-paper", rewards, group_ids=[0] * 4 + [1] * 4 + [2] * 4)
    densities = [1.1026577908] * 4 + [1.2732395447] * 4 + [1.1026577908] * 4
    rates = [0.25] * 4 + [0.5] * 4 + [0.75] * 4
    want = [(r - p) / f for r, p, f in zip(rewards, rates, densities, strict=True)]
    assert got == pytest.approx(want, abs=1e-9)


def test_opo_weighs_the_baseline_by_length():
    assert advantages("opo", [1.0, 0.0], lengths=[100, 300]) == pytest.approx([0.75, -0.25])


def test_process_supervision():
    out = from_rewards(
        "grpo-process", [1.0, 0.0], lengths=[5, 5], settings={"beta": 0.0},
        step_rewards=[[(2, 0.2), (5, 0.8)], [(3, 0.4)]],
    )  # fmt: skip
    first, second = out.advantages.tolist()
    assert first == pytest.approx([0.2182178902] * 2 + [1.0910894512] * 3, **NEAR)
    assert second == pytest.approx([-0.2182178902] * 3 + [0.0] * 2, **NEAR)


# Two episodes of one group, of two turns and of three, of two tokens each: the first turns begin in state a, and state
# b comes back in both. Rewards of the turns: 0, 1 and 0.5, 0, 0; of the episodes: 1 and 0.5.
EPISODES = {
    "lengths": [4, 6], "turns": [[(2, 0.0), (4, 1.0)], [(2, 0.5), (4, 0.0), (6, 0.0)]],
    "states": [["a", "b"], ["a", "b", "b"]],
}  # fmt: skip
HALF = 0.7071067812  # the z-scores of two different numbers are +- sqrt(1/2)
THIRD = 0.5773502692  # those of 1, 0, 0 are 2 / sqrt(3) and -1 / sqrt(3)


def of_turns(name: str, **settings) -> list[list[float]]:
    """The advantage of each turn's first token, having checked that the turn's others have the same."""
    out = from_rewards(name, [1.0, 0.5], settings={"beta": 0.0} | settings, **EPISODES)
    found = [row[: 2 * len(own)] for row, own in zip(out.advantages.tolist(), EPISODES["turns"], strict=True)]
    assert all(row[0::2] == row[1::2] for row in found)
    return [row[0::2] for row in found]


# Half a discount: returns are 0.5, 1 and 0.5, 0, 0. From a both are 0.5; from b they are 1, 0, 0.
TURNS = [
    ("gigpo", {"turn_discount": 0.5}, [HALF, HALF + 2 * THIRD], [-HALF, -HALF - THIRD, -HALF - THIRD]),
    ("gigpo", {"turn_discount": 0.5, "omega": 0.1}, [HALF, HALF + 0.2 * THIRD], [-HALF, *[-HALF - 0.1 * THIRD] * 2]),
    ("gigpo", {"turn_discount": 0.5, "norm": "mean"}, [0.25, 0.25 + 2 / 3], [-0.25, *[-0.25 - 1 / 3] * 2]),
    # Undiscounted, the first turns' returns are the episodes' rewards.
    ("gigpo", {"turn_discount": 1.0, "norm": "mean"}, [0.5, 0.25 + 2 / 3], [-0.5, *[-0.25 - 1 / 3] * 2]),
    # Outcomes are 1 and 0; the first turns earned 0 and 0.5; no other second turn earned something before the end.
    ("mt-grpo", {}, [0.0, HALF], [0.0, -HALF, -HALF]),
    ("mt-grpo", {"outcome_weight": 0.5}, [-HALF / 2, HALF], [HALF / 2, -HALF / 2, -HALF]),
    ("turn-returns", {}, [HALF, HALF], [-HALF, -HALF, 0.0]),
    ("turn-returns", {"turn_discount": 0.5}, [0.0, HALF], [0.0, -HALF, 0.0]),
    ("turn-returns", {"turn_discount": 0.0}, [-HALF, HALF], [HALF, -HALF, 0.0]),
    # The longest completion loses 1, in its last turn, which has no other to be compared with.
    ("turn-returns", {"turn_discount": 0.0, "overlong_cache": 2}, [-HALF, HALF], [HALF, -HALF, 0.0]),
    ("turn-returns", {"overlong_cache": 2}, [HALF, HALF], [-HALF, -HALF, 0.0]),
]


@pytest.mark.parametrize(("name", "settings", "first", "second"), TURNS)
def test_credit_of_turns(name, settings, first, second):
    found = of_turns(name, **settings)
    assert found[0] == pytest.approx(first, **NEAR)
    assert found[1] == pytest.approx(second, **NEAR)


def test_entropy_advantage():
    """alpha = 0.4, kappa = 2, on groups whose z-scores are 0.5 (three of four right) and -0.5 (one of four)."""
    entropies = torch.full((8, 1), 1.0, dtype=F64)
    entropies[0], entropies[1], entropies[5], entropies[6] = 2.0, 0.3, 2.0, 0.3
    out = from_rewards("entropy-advantage", right(3, 4) + right(1, 4), group_ids=[0] * 4 + [1] * 4, entropies=entropies)
    got = out.advantages[:, 0]
    assert [got[i].item() for i in (0, 1, 5, 6)] == pytest.approx([0.75, 0.62, -0.25, -0.38], **NEAR)


# ---------------------------------------------------------------- entropy shares


def shares(entropies: list[list[float]], correct: list[bool], name: str = "gtpo", **settings) -> list[list[float]]:
    lengths = [len(row) for row in entropies]
    padded = torch.full((len(entropies), max(lengths)), torch.nan, dtype=F64)
    for i, row in enumerate(entropies):
        padded[i, : len(row)] = torch.tensor(row, dtype=F64)
    rewards = [1.0 if c else 0.0 for c in correct]
    out = from_rewards(name, rewards, lengths=lengths, entropies=padded, settings=settings)
    return [row[:n].tolist() for row, n in zip(out.advantages, lengths, strict=True)]


SQUARE = [[3.0, 1.0], [1.0, 3.0], [4.0, 1.0], [1.0, 4.0]]


@pytest.mark.parametrize(("ddof", "size"), [(0, 1.0), (1, 0.8660254038)])
def test_gtpo_separately_normalised_cannot_tell_right_from_wrong(ddof, size):
    got = shares(SQUARE, [True, True, False, False], normalize="separate", ddof=ddof)
    for a, b in ((got[0], got[1]), (got[2], got[3])):
        assert a == pytest.approx([size, -size], abs=1e-7)
        assert b == pytest.approx([-size, size], abs=1e-7)


def test_gtpo_jointly_normalised():
    got = shares(SQUARE, [True, True, False, False])
    assert got[0] + got[1] == pytest.approx([0.9767029928, 0.8917722978, 0.8917722978, 0.9767029928], abs=1e-7)
    assert got[2] + got[3] == pytest.approx([-0.8832792212, -0.9851960552, -0.9851960552, -0.8832792212], abs=1e-7)


def test_gtpo_rewards_of_ragged_completions():
    """a = (0.9, 0.1): token rewards that sum to the number of completions alive at the position."""
    want = [0.98, 1.06, 1.0, 1.02, 0.94]
    middle = sum(want) / 5
    spread = math.sqrt(sum((v - middle) ** 2 for v in want) / 4)
    got = shares([[2, 4, 1], [3, 1], [1.0]], [True, True, False], normalize="separate", a1=0.9, a2=0.1)
    assert got[0] + got[1] == pytest.approx([(v - middle) / spread for v in want], abs=1e-6)
    assert got[2] == [0.0]


def test_grpo_s():
    got = shares([[0.6], [0.2], [0.5], [0.25]], [True, True, False, False], name="grpo-s")
    want = [0.9047154386, 0.8260445309, -0.8391563492, -0.8916036204]
    assert [row[0] for row in got] == pytest.approx(want, abs=1e-7)


@pytest.mark.parametrize("name", ["gtpo", "grpo-s"])
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("dynamic_sampling", [True, False])
def test_entropy_shares_are_silent_without_both_outcomes(name, correct, dynamic_sampling):
    got = shares(SQUARE, [correct] * 4, name=name, dynamic_sampling=dynamic_sampling)
    assert got == [[0.0, 0.0]] * 4


@pytest.mark.parametrize(
    ("rewards", "lead"),
    [([0.2, 1.0, 0.75, 0.0], 0.25), ([1.0, 0.0, 0.0, 0.0], 1.0), ([1.0, 1.0, 0.0, 0.0], 0.0), ([0.5] * 4, 0.0),
     ([-1.0, -3.0, -4.0, -5.0], 2.0), ([0.3], 0.0), ([math.nan, 0.1, 0.4, math.nan], 0.3), ([math.nan, 0.4], 0.0)],
)  # fmt: skip
def test_grpo_passk_credits_the_best_with_its_lead(rewards, lead):
    got = advantages("grpo-passk", rewards, settings={"scale": "none"})
    known = [r for r in rewards if not math.isnan(r)]
    best = rewards.index(max(known))
    assert got == pytest.approx([lead if i == best else 0.0 for i in range(len(rewards))], **NEAR)
    spread = torch.tensor(known).std().item() if lead else 1.0
    assert advantages("grpo-passk", rewards) == pytest.approx([a / spread for a in got], rel=1e-6)


# ---------------------------------------------------------------- a critic


def critic(rewards, values, lengths, *, settings=None, **fields):
    """The output of ``ppo`` for completions of these lengths, with these values of a critic (padded)."""
    return from_rewards(
        "ppo", rewards, lengths=lengths, values=torch.tensor(values, dtype=F64), settings=settings or {}, **fields
    )


def test_generalised_advantages_by_hand():
    """gamma = 0.9, lam = 0.5. First: deltas 0.9 x 0.6 - 0.5 = 0.04, 0.9 x 0.8 - 0.6 = 0.12 and 1 - 0.8 = 0.2, and
    A = 0.2, 0.12 + 0.45 x 0.2 = 0.21, 0.04 + 0.45 x 0.21 = 0.1345. Second: 0 - 0.3 = -0.3."""
    out = critic([1.0, 0.0], [[0.5, 0.6, 0.8], [0.3, 9.0, 9.0]], [3, 1], settings={"gamma": 0.9, "lam": 0.5})
    raw = [0.1345, 0.21, 0.2, -0.3]
    returns = [0.6345, 0.81, 1.0, 0.0]
    assert out.batch.returns.tolist() == pytest.approx(returns, **NEAR)
    # critic_lam = 1: the critic's A = 0.2, 0.12 + 0.9 x 0.2 = 0.3, 0.04 + 0.9 x 0.3 = 0.31; the policy's are the same.
    settings = {"gamma": 0.9, "lam": 0.5, "critic_lam": 1.0}
    apart = critic([1.0, 0.0], [[0.5, 0.6, 0.8], [0.3, 9.0, 9.0]], [3, 1], settings=settings)
    assert apart.batch.returns.tolist() == pytest.approx([0.81, 0.9, 1.0, 0.0], **NEAR)
    assert torch.equal(apart.batch.advantages, out.batch.advantages)
    middle = sum(raw) / 4
    spread = math.sqrt(sum((a - middle) ** 2 for a in raw) / 3)
    assert out.batch.advantages.tolist() == pytest.approx([(a - middle) / spread for a in raw], **NEAR)


def test_the_kl_stands_in_the_reward_of_each_token():
    """beta = 0.5, k1 = 0.2 and 0.4; lam = 0: A_t = delta_t = -0.1 + 0.75 - 0.5, and 1 - 0.2 - 0.75."""
    old = torch.tensor([[-1.0, -1.0]], dtype=F64)
    out = critic(
        [1.0], [[0.5, 0.75]], [2], settings={"lam": 0.0, "beta": 0.5}, old_logprobs=old,
        ref_logprobs=old - torch.tensor([[0.2, 0.4]], dtype=F64),
    )  # fmt: skip
    assert out.batch.returns.tolist() == pytest.approx([0.5 + 0.15, 0.75 + 0.05], **NEAR)
    assert out.batch.advantages.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], **NEAR)


def test_vapo_by_hand():
    """length_alpha = 1, gamma = 1. Three tokens: lam = 2/3, deltas 0.1, 0.2 and 0.2, and A = 0.2, 0.2 + 2/3 x 0.2 =
    1/3, 0.1 + 2/3 x 1/3 = 29/90. One token: lam = 0, 0 - 0.3 = -0.3. The critic learns the rewards. 0.1 goes over the
    three tokens of the correct answer alone."""
    values = torch.tensor([[0.5, 0.6, 0.8], [0.3, 9.0, 9.0]], dtype=F64)
    given = {"lengths": [3, 1], "values": values, "settings": {"length_alpha": 1.0}}
    out = from_rewards("vapo", [1.0, 0.0], **given)
    assert out.batch.returns.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0], **NEAR)
    raw = [29 / 90, 1 / 3, 0.2, -0.3]
    middle = sum(raw) / 4
    spread = math.sqrt(sum((a - middle) ** 2 for a in raw) / 3)
    advantages = [(a - middle) / spread for a in raw]
    assert out.batch.advantages.tolist() == pytest.approx(advantages, **NEAR)
    pushed = [a / 4 + (0.1 / 3 if i < 3 else 0.0) for i, a in enumerate(advantages)]
    assert out.packed["coefficients"].tolist() == pytest.approx(pushed, **NEAR)
    # Answers of at most 1 / length_alpha = 20 tokens: lam is 0, and never below.
    short = from_rewards("vapo", [1.0, 0.0], **(given | {"settings": {}})).batch.advantages.tolist()
    deltas = [0.1, 0.2, 0.2, -0.3]
    spread = math.sqrt(sum((a - 0.05) ** 2 for a in deltas) / 3)
    assert short == pytest.approx([(a - 0.05) / spread for a in deltas], **NEAR)


def otb(rewards: list[float], norms: list[list[float]], **settings) -> list[list[float]]:
    lengths = [len(row) for row in norms]
    padded = torch.full((len(norms), max(lengths)), torch.nan, dtype=F64)
    for i, row in enumerate(norms):
        padded[i, : len(row)] = torch.tensor(row, dtype=F64)
    out = from_rewards("otb", rewards, lengths=lengths, score_norms=padded, settings=settings)
    return [row[:n].tolist() for row, n in zip(out.advantages, lengths, strict=True)]


def test_otb_weighs_by_the_energy_so_far():
    """W is 0.1, 0.4 and 0.3, 0.4 (and 0.9 alone): baselines 1/4, then 1/2."""
    norms = [[0.1, 0.3], [0.3, 0.1, 0.5]]
    assert [a for row in otb([1.0, 0.0], norms) for a in row] == pytest.approx([0.75, 0.5, -0.25, -0.5, 0.0], **NEAR)
    got = otb([1.0, 2.0], norms, tail="reward")  # baselines 7/4 and 3/2; nobody else reaches the third token
    assert [a for row in got for a in row] == pytest.approx([-0.75, -0.5, 0.25, 0.5, 2.0], **NEAR)


def test_otb_with_equal_energies_compares_with_the_mean_of_those_still_running():
    got = otb([1.0, 0.0, 0.5], [[0.2], [0.2, 0.2], [0.2, 0.2]])
    assert got == [pytest.approx(row, **NEAR) for row in ([0.5], [-0.5, -0.25], [0.0, 0.25])]


@pytest.mark.parametrize(("tail", "alone"), [("silent", 0.0), ("reward", 0.7)])
def test_otb_without_anything_to_compare(tail, alone):
    """A group of one; equal rewards; a missing reward; tokens of which the policy was certain."""
    assert otb([0.7], [[0.1, 0.2]], tail=tail) == [[alone, alone]]
    assert otb([0.7] * 3, [[0.1], [0.3], [0.6, 0.2]], tail=tail) == [[0.0], [0.0], [0.0, alone]]
    assert otb([math.nan, 0.7], [[0.1, 0.2], [0.3]], tail=tail) == [[0.0, 0.0], [alone]]
    assert otb([1.0, 0.0], [[0.0], [0.0]], tail=tail) == [[0.0], [0.0]]


# ---------------------------------------------------------------- several rewards, overlong


def test_gdpo_tells_apart_what_a_sum_does_not():
    rewards = [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    ids = [0, 0, 1, 1]
    summed = advantages("grpo", rewards, group_ids=ids, settings={"beta": 0.0})
    assert summed == pytest.approx([-0.7071067812, 0.7071067812] * 2, **NEAR)
    got = advantages("gdpo", rewards, group_ids=ids)
    batch = math.sqrt(5 / 3)  # sample deviation of (-1, 1, -2, 2) / sqrt 2
    before = [-0.7071067812, 0.7071067812, -1.4142135624, 1.4142135624]
    assert got == pytest.approx([b / batch for b in before], **NEAR)


@pytest.mark.parametrize("name", ["gdpo", "grpo"])
def test_opposed_rewards_cancel(name):
    assert advantages(name, [[0.0, 1.0], [1.0, 0.0]], settings={"beta": 0.0}) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("max_length", "cache", "length", "penalty"),
    [(20480, 4096, 16384, 0.0), (20480, 4096, 17408, -0.25), (20480, 4096, 18432, -0.5), (20480, 4096, 20480, -1.0),
     (20480, 4096, 20481, -1.0), (20480, 4096, 1, 0.0), (100, 20, 90, -0.5)],
)  # fmt: skip
def test_soft_overlong_punishment(max_length, cache, length, penalty):
    settings = {"baseline": "none", "overlong_cache": cache}
    got = advantages("reinforce", [1.0], lengths=[length], max_length=max_length, settings=settings)
    assert got == [1.0 + penalty]
