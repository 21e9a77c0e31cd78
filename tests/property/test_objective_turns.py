"""What credit for turns must be for all episodes: GRPO where there is nothing to tell turns apart, and fair within."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trew
from oracle.steps import fresh, step_for
from trew import TokenBatch

CREDIT = ("gigpo", "mt-grpo", "turn-returns")
LIKE_GRPO = {"beta": 0.0, "aggregate": "seq-mean-token-mean"}


@st.composite
def steps(draw: st.DrawFn) -> dict:
    groups, size = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    data = step_for(
        "gigpo", draw(st.integers(0, 2**31)), groups=groups, size=size, width=draw(st.integers(1, 6)), unmixed=0,
        nan=draw(st.integers(0, 2)), empty=draw(st.integers(0, 1)), layout=draw(st.sampled_from(["left", "holes"])),
        rewards=(0.0, 0.5, 1.0), anywhere=True,
    )  # fmt: skip
    # A step as a run makes it: what an episode's turns earned adds up to its reward.
    total = [sum(reward for _, reward in own) for own in data["turns"]]
    data["rewards"] = torch.where(data["rewards"].isnan(), torch.nan, torch.tensor(total, dtype=torch.float64))
    return data


def coefficients(name: str, data: dict, **overrides) -> torch.Tensor:
    return trew.preset(name, **(LIKE_GRPO | overrides)).loss(TokenBatch.from_padded(**fresh(data))).coefficients


def outcome_only(data: dict) -> dict:
    rewards = data["rewards"].nan_to_num(0.0).tolist()
    turns = [
        [(end, reward if end == own[-1][0] else 0.0) for end, _ in own]
        for own, reward in zip(data["turns"], rewards, strict=True)
    ]
    return data | {"turns": turns}


def one_turn(data: dict) -> dict:
    rewards, width = data["rewards"].nan_to_num(0.0).tolist(), data["mask"].shape[1]
    return data | {"turns": [[(width, reward)] for reward in rewards], "states": [["start"]] * len(rewards)}


@settings(max_examples=25, deadline=None)
@given(data=steps())
def test_gigpo_without_repeated_states_or_without_their_weight_is_grpo(data):
    wanted = coefficients("grpo", data)
    apart = data | {"states": [[f"{i} {k}" for k in range(len(own))] for i, own in enumerate(data["turns"])]}
    assert torch.equal(coefficients("gigpo", apart), wanted)
    assert torch.equal(coefficients("gigpo", data, omega=0.0), wanted)
    assert torch.equal(coefficients("gigpo", apart, norm="mean"), coefficients("dr-grpo", data))


@settings(max_examples=25, deadline=None)
@given(data=steps(), omega=st.floats(0.0, 2.0))
def test_episodes_of_one_turn(data, omega):
    alone = one_turn(data)
    wanted = coefficients("grpo", data, eps_low=0.9, eps_high=1e6)
    for name in ("mt-grpo", "turn-returns"):
        assert torch.equal(coefficients(name, alone, eps_low=0.9, eps_high=1e6), wanted)
    # All begin in the opening: each is compared with the same others twice.
    twice = coefficients("gigpo", alone, omega=omega, eps_low=0.9, eps_high=1e6)
    torch.testing.assert_close(twice, (1 + omega) * wanted, rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(data=steps())
def test_mt_grpo_with_outcomes_alone_is_grpo(data):
    torch.testing.assert_close(coefficients("mt-grpo", outcome_only(data)), coefficients("grpo", data))


@settings(max_examples=25, deadline=None)
@given(data=steps(), turns=st.integers(1, 4))
def test_returns_of_equally_long_episodes_with_outcomes_alone_are_grpo_whatever_the_discount(data, turns):
    width = data["mask"].shape[1]
    ends = sorted({max(1, width * (k + 1) // turns) for k in range(turns)})
    long = outcome_only(data | {"turns": [[(end, 0.0) for end in ends] for _ in data["turns"]], "states": None})
    for discount in (1.0, 0.5):
        got = coefficients("turn-returns", long, turn_discount=discount)
        torch.testing.assert_close(got, coefficients("grpo", data), rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(data=steps(), shuffle=st.randoms(use_true_random=False))
def test_states_of_other_groups_and_their_names_do_not_matter(data, shuffle: random.Random):
    groups = data["group_ids"].tolist()
    names = {key: name for name, key in enumerate({(g, s) for g, own in zip(groups, data["states"], strict=True)
                                                   for s in own})}  # fmt: skip
    renamed = [[names[g, s] for s in own] for g, own in zip(groups, data["states"], strict=True)]
    offset = shuffle.randint(-5, 5)
    other = data | {"states": [[name + offset for name in own] for own in renamed]}
    assert torch.equal(coefficients("gigpo", other), coefficients("gigpo", data))


@settings(max_examples=25, deadline=None)
@given(data=steps())
def test_what_is_compared_adds_up_to_nothing(data):
    """With one token in every turn, the micro advantages of a group's turns from one state, and each turn number's
    returns, cancel."""
    rows = len(data["turns"])
    data = {k: v for k, v in data.items() if k not in ("entropies", "ref_logprobs", "rollout_logprobs")}
    long = max(len(own) for own in data["turns"])
    mask = torch.tensor([[k < len(own) for k in range(long)] for own in data["turns"]])
    zeros = torch.zeros(rows, long, dtype=torch.float64)
    turns = [[(k + 1, reward) for k, (_, reward) in enumerate(own)] for own in data["turns"]]
    batch = TokenBatch.from_padded(
        logprobs=zeros, mask=mask, group_ids=data["group_ids"], rewards=data["rewards"], turns=turns,
        states=data["states"],
    )  # fmt: skip
    known = ~data["rewards"].isnan()
    micro = (
        trew.preset("gigpo", beta=0.0).loss(batch).advantages
        - trew.preset("gigpo", beta=0.0, omega=0.0).loss(batch).advantages
    )
    returns = trew.preset("turn-returns").loss(batch).advantages
    sums: dict[tuple, float] = {}
    for i in known.nonzero().squeeze(1).tolist():
        for k, state in enumerate(data["states"][i]):
            for key, value in ((("state", state), micro[i, k]), (("turn", k), returns[i, k])):
                place = (int(data["group_ids"][i]), *key)
                sums[place] = sums.get(place, 0.0) + value.item()
    assert all(abs(value) < 1e-9 for value in sums.values())
