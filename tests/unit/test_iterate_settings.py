"""The settings of rounds: what is refused before anything runs."""

from __future__ import annotations

from trew.config import RewardConfig
from trew.iterate import Iterate
from trew.iterate.settings import round_problems
from trew.rewards.combine import Reward, combined
from trew.rewards.verdict import Verdict


def test_a_verifier_is_not_called_like_the_learned_reward():
    """The rounds' table and page would show the verifier's mean as that of the learned reward."""
    [problem] = round_problems(Iterate(verifier=RewardConfig(name="checks.py:reward_model")))
    assert problem.startswith("iterate.verifier.name: got 'checks.py:reward_model'")
    assert not round_problems(Iterate(verifier=RewardConfig(name="checks.py:right")))
    assert not round_problems(Iterate())


def test_a_verifier_decides_nothing_for_the_policy():
    """As a gate it closed the learned reward, although it has weight 0; another weight was ignored."""
    [gate] = round_problems(Iterate(verifier=RewardConfig(name="gsm8k", gate=True)))
    assert gate.startswith("iterate.verifier.gate: got true")
    [weight] = round_problems(Iterate(verifier=RewardConfig(name="gsm8k", weight=0.5)))
    assert weight.startswith("iterate.verifier.weight: got 0.5")
    closed = [Reward("gsm8k", "gsm8k", 0.0, gate=True), Reward("reward_model", "", 1.0)]
    [score] = combined(closed, [[Verdict(0.0)], [Verdict(0.7)]], lengths=[1])
    assert score.value == 0.0
