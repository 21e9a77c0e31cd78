"""Simulated runs against what can be worked out by hand, and the bias that their rule avoids."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trew.estimate.simulation import Work, best_split, drop_the_slow, log_normal, simulate
from trew.estimate.virtual_servers import ServerSpecs


def fixed(tokens: float):
    return lambda rng, n: np.full(n, tokens)


WORK = Work(prompts=8, completions=4, staleness=0, update_s=3.0, sync_s=0.5, lengths=fixed(100), steps=12, warm_up=4)
SERVERS = ServerSpecs(count=2, slots=16, token_s=0.02, sequence_s=0.001)  # 100 tokens of 16 sequences: 3.6 s


def test_a_synchronous_step_is_the_sum_of_its_parts():
    found = simulate(SERVERS, WORK)
    assert found.seconds == pytest.approx(3.6 + 3.0 + 0.5)
    assert found.learner_idle == pytest.approx(3.6 / 7.1)
    assert found.servers_idle == pytest.approx(3.5 / 7.1)
    assert (found.ages, found.losses, found.kept[0]) == ({0: 1.0}, 0, 1.0)


def test_an_asynchronous_step_is_the_longer_of_both():
    """Groups of equal length: generation and learning overlap entirely, and only publishing stops both."""
    found = simulate(SERVERS, dataclasses.replace(WORK, staleness=1))
    assert found.seconds == pytest.approx(3.6 + 0.5, rel=0.02)
    slow = dataclasses.replace(WORK, staleness=1, update_s=9.0)
    assert simulate(SERVERS, slow).seconds == pytest.approx(9.5)
    assert simulate(SERVERS, slow).learner_idle == pytest.approx(0, abs=1e-9)


def test_completions_wait_for_slots():
    found = simulate(dataclasses.replace(SERVERS, slots=8, sequence_s=0.0), WORK)
    assert found.seconds == pytest.approx(2 * 2.0 + 3.5), "16 sequences on 8 slots, twice 100 tokens of 0.02 s"


LONG = dataclasses.replace(
    WORK, prompts=32, completions=2, staleness=1, update_s=1.0, sync_s=0.0, lengths=log_normal(60, 1.2, 2000), steps=40
)
MANY = dataclasses.replace(SERVERS, count=4, slots=32)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_bound_holds_and_no_length_is_left_out(staleness):
    found = simulate(MANY, dataclasses.replace(LONG, staleness=staleness))
    assert max(found.ages) <= staleness
    assert sum(found.ages.values()) == pytest.approx(1)
    assert found.kept == (1, 1, 1, 1)


def test_dropping_what_is_slow_keeps_short_answers():
    kept = simulate(MANY, LONG, take=drop_the_slow).kept
    assert kept[0] == 1
    assert kept[3] < 0.95


def test_servers_that_fail_cost_time_and_lose_nothing():
    calm = simulate(MANY, LONG)
    found = simulate(dataclasses.replace(MANY, mtbf_s=60.0, restart_s=5.0), LONG)
    assert found.losses > 0
    assert found.seconds > calm.seconds
    assert (max(found.ages) <= 1, found.kept) == (True, (1, 1, 1, 1))
    slower = simulate(dataclasses.replace(MANY, slow_share=0.25), LONG)
    assert slower.seconds > calm.seconds


def test_equal_seeds_give_equal_figures():
    failing = dataclasses.replace(MANY, mtbf_s=60.0, restart_s=5.0)
    assert simulate(failing, LONG, seed=3) == simulate(failing, LONG, seed=3)
    assert simulate(failing, LONG, seed=3) != simulate(failing, LONG, seed=4)


def test_the_best_split_gives_neither_side_all():
    learner, best = best_split(16, WORK, SERVERS, update_gpu_s=12.0, shares=[0.125, 0.5, 0.875])
    assert learner == 8
    assert best == simulate(dataclasses.replace(SERVERS, count=8), dataclasses.replace(WORK, update_s=1.5))
