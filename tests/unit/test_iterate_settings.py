"""The settings of rounds: what is refused before anything runs."""

from __future__ import annotations

from trew.config import RewardConfig
from trew.iterate import Iterate
from trew.iterate.settings import round_problems


def test_a_verifier_is_not_called_like_the_learned_reward():
    """The rounds' table and page would show the verifier's mean as that of the learned reward."""
    [problem] = round_problems(Iterate(verifier=RewardConfig(name="checks.py:reward_model")))
    assert problem.startswith("iterate.verifier.name: got 'checks.py:reward_model'")
    assert not round_problems(Iterate(verifier=RewardConfig(name="checks.py:right")))
    assert not round_problems(Iterate())
