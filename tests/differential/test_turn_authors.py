"""GiGPO and MT-GRPO beside their authors' programs, derived again: one row per turn and numpy, where trew has streams.

GiGPO: langfengQ/verl-agent, gigpo/core_gigpo.py. MT-GRPO: SiliangZeng/Multi-Turn-RL-Agent, mt_grpo_env_trainer.py.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import trew
from oracle.steps import F64, make_step
from trew import TokenBatch


def episodes(seed: int, *, turns: int | None = None, **choices) -> dict:
    """A step whose rewards are the sums over turns; ``turns``: as many in each episode."""
    data = make_step(seed, groups=3, size=6, width=6, unmixed=0, **choices)
    if turns is not None:
        g = np.random.default_rng(seed)
        data["mask"] = torch.ones_like(data["mask"])
        ends = [6 * (k + 1) // turns for k in range(turns)]
        data["turns"] = [[(end, float(g.integers(0, 4)) / 2) for end in ends] for _ in data["mask"]]
        data["states"] = [["start", *(str(g.integers(0, 3)) for _ in ends[1:])] for _ in data["mask"]]
    data["rewards"] = torch.tensor([sum(r for _, r in own) for own in data["turns"]], dtype=F64)
    return data


def advantages(name: str, data: dict, **settings) -> list[list[float]]:
    """One per turn that has loss tokens, NaN for the others."""
    out = trew.preset(name, beta=0.0, **settings).loss(TokenBatch.from_padded(**data))
    rows = []
    for row, own, mask in zip(out.advantages.tolist(), data["turns"], data["mask"].tolist(), strict=True):
        bounds = [0, *(end for end, _ in own)]
        found = [{row[t] for t in range(a, b) if mask[t]} for a, b in itertools.pairwise(bounds)]
        assert all(len(values) <= 1 for values in found)
        rows.append([values.pop() if values else math.nan for values in found])
    return rows


def compare(found: list[list[float]], wanted: list[list[float]]) -> None:
    pairs = [(a, b) for row, other in zip(found, wanted, strict=True) for a, b in zip(row, other, strict=True)]
    known = [(a, b) for a, b in pairs if not math.isnan(a)]
    assert len(known) > 20
    assert [a for a, _ in known] == pytest.approx([b for _, b in known], rel=1e-9, abs=1e-9)


def normed(values: np.ndarray, groups: list, *, eps: float, with_std: bool) -> np.ndarray:
    """As ``episode_norm_reward`` and ``step_norm_reward``: sample deviation, 1 for a group of one row."""
    out = np.zeros(len(values))
    for i, group in enumerate(groups):
        members = values[[j for j, other in enumerate(groups) if other == group]]
        std = members.std(ddof=1) if len(members) > 1 else 1.0
        out[i] = (values[i] - members.mean()) / (std + eps if with_std else 1.0)
    return out


def gigpo_of_the_authors(data: dict, *, omega: float, gamma: float, with_std: bool, across_turns: bool) -> list:
    groups = data["group_ids"].tolist()
    row_of = [i for i, own in enumerate(data["turns"]) for _ in own]
    returns = []
    for own in data["turns"]:
        running, backwards = 0.0, []
        for _, reward in reversed(own):
            running = reward + gamma * running
            backwards.append(running)
        returns += backwards[::-1]
    total = np.array([sum(reward for _, reward in own) for own in data["turns"]])
    if across_turns:  # compute_mean_std_cross_steps, their default: one entry for each turn of an episode
        macro = normed(total[row_of], [groups[i] for i in row_of], eps=1e-6, with_std=with_std)
    else:
        macro = normed(total, groups, eps=1e-6, with_std=with_std)[row_of]
    anchors = [(groups[i], state) for i, own in enumerate(data["states"]) for state in own]
    micro = normed(np.array(returns), anchors, eps=1e-6, with_std=with_std)
    joint = iter((macro + omega * micro).tolist())
    return [[next(joint) for _ in own] for own in data["turns"]]


@pytest.mark.parametrize("with_std", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_gigpo(seed, with_std):
    settings = {"omega": 0.7, "turn_discount": 0.9, **({"std_eps": 1e-6} if with_std else {"norm": "mean"})}
    for data in (episodes(seed), episodes(seed, turns=3)):
        wanted = gigpo_of_the_authors(data, omega=0.7, gamma=0.9, with_std=with_std, across_turns=False)
        compare(advantages("gigpo", data, **settings), wanted)


def test_gigpo_s_default_counts_episodes_by_their_turns():
    """The one difference, as the preset's deviations say: none for equally long episodes that are not divided."""
    how = {"omega": 0.7, "gamma": 0.9, "with_std": False, "across_turns": True}
    equal, ragged = episodes(5, turns=3), episodes(5)
    settings = {"omega": 0.7, "turn_discount": 0.9, "norm": "mean"}
    compare(advantages("gigpo", equal, **settings), gigpo_of_the_authors(equal, **how))
    with pytest.raises(AssertionError):
        compare(advantages("gigpo", ragged, **settings), gigpo_of_the_authors(ragged, **how))


def mt_grpo_of_the_authors(data: dict, estimator: str, *, discount: float = 1.0) -> list:
    """``_assign_advantages`` for episodes of two turns, in groups that TRL normalises with 1e-4."""
    groups = data["group_ids"].tolist()
    turn = np.array([own[0][1] for own in data["turns"]])
    outcome = np.array([own[1][1] for own in data["turns"]])

    def z(rewards: np.ndarray) -> np.ndarray:
        return normed(rewards, groups, eps=1e-4, with_std=True)

    before = z(outcome) + z(turn) if estimator == "aae" else z(turn + discount * outcome)
    return [[float(a), float(b)] for a, b in zip(before, z(outcome), strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_mt_grpo(seed):
    data = episodes(seed, turns=2)
    compare(advantages("mt-grpo", data, std_eps=1e-4), mt_grpo_of_the_authors(data, "aae"))
    for discount in (1.0, 0.6):
        wanted = mt_grpo_of_the_authors(data, "cae", discount=discount)
        compare(advantages("turn-returns", data, std_eps=1e-4, turn_discount=discount), wanted)
