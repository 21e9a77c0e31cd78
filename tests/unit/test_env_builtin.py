"""The built-in environments: scripted policies earn what the rules say."""

from __future__ import annotations

import re

import pytest

from trew.env import Reply, Say
from trew.env.builtin.calculator import calculator
from trew.env.builtin.grid import grid
from trew.env.builtin.guess import guess


def play(episode, policy):
    """All rewards of an episode, in order of its replies, and what it returned."""
    said, rewards = Say.of(next(episode)), []
    for turn in range(20):
        try:
            said = Say.of(episode.send(Reply(policy(said.messages[-1]["content"]), turn=turn)))
        except StopIteration as end:
            return [*rewards, end.value["reward"]], end.value
        rewards.append(said.reward or 0.0)
    raise AssertionError("the episode does not end")


def halving():
    low, high, last = 1, 9, None

    def policy(said):
        nonlocal low, high, last
        if said == "higher":
            low = last + 1
        elif said == "lower":
            high = last - 1
        last = (low + high) // 2
        return str(last)

    return policy


def walk(said):
    x, y, goal_x, goal_y = map(int, re.findall(r"\d", said))
    return "right" if x < goal_x else "left" if x > goal_x else "up" if y < goal_y else "down"


def asks(said):
    numbers = re.findall(r"\d+", said)
    return "calc: {1} * {2} + {0}".format(*numbers) if len(numbers) == 3 else said


@pytest.mark.parametrize("seed", range(30))
def test_a_policy_that_heeds_what_it_is_told_wins(seed):
    assert play(guess({}, seed), halving())[0][-1] >= 1.0
    assert play(grid({}, seed), walk)[0][-1] == 1.0
    assert play(calculator({}, seed), asks)[0][-1] == 1.0


def test_blind_guesses_hit_four_times_in_nine():
    def blind():
        numbers = iter("1379")
        return lambda said: next(numbers)

    hits = sum(play(guess({}, seed), blind())[0][-1] >= 1.0 for seed in range(900))
    assert 0.38 < hits / 900 < 0.51


def test_a_guess_earns_where_it_was_still_possible():
    number = next(seed for seed in range(100) if guess_number(seed) == 9)
    rewards, end = play(guess({}, number), iter_of("5", "3", "7", "8"))
    assert rewards == [0.1, 0.0, 0.1, 0.1]
    assert end["guesses"] == 4


def guess_number(seed):
    """What ``guess`` hides under a seed: found by guessing all."""
    for number in range(1, 10):
        if play(guess({}, seed), iter_of(*[str(number)] * 4))[1]["guesses"] == 1:
            return number
    raise AssertionError


def iter_of(*replies):
    left = iter(replies)
    return lambda said: next(left)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("calc: 2 * 3 + 1", "7"),
        ("calc: 1 / 4", "0.25"),
        ("calc: 1 / 0", "error: divides by zero"),
        ("calc: 2 **", "error: '**' is not an operator here"),
        ("calc: __import__('os')", "error: '_' is not one of 0-9 + - * / ( )"),
        ("calc:" + "9" * 3000, "error: longer than 2000 characters"),
        (f"calc: {' * '.join(['9' * 30] * 12)} / 1234567", "error: the value is too large"),
    ],
)
def test_the_calculator_answers_and_never_fails(reply, said):
    episode = calculator({}, 0)
    next(episode)
    assert Say.of(episode.send(Reply(reply))).messages[-1]["content"] == said


def test_a_wrong_answer_and_only_questions_earn_nothing():
    assert play(calculator({}, 0), lambda said: "7")[0] == [0.0]
    assert play(calculator({}, 0), lambda said: "calc: 1")[0] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("environment", [guess, grid, calculator])
def test_equal_seeds_give_equal_episodes(environment):
    def told(seed):
        return [Say.of(next(environment({}, seed))).messages for _ in range(2)]

    first, second = told(3)
    assert first == second
    assert environment is guess or told(4)[0] != first


def test_random_hints_say_nothing_about_the_number():
    """The control: who heeds random hints hits no more often than blind guesses do."""
    hits = sum(play(guess({}, seed, hints="random"), halving())[0][-1] >= 1.0 for seed in range(900))
    assert hits / 900 < 0.5


def test_a_late_hit_is_worth_no_more_than_an_early_one():
    number = guess_number(0)
    early = sum(play(guess({}, 0), iter_of(str(number)))[0])
    others = [each for each in range(1, 10) if each != number]
    late = max(sum(play(guess({}, 0), iter_of(str(each), str(number)))[0]) for each in others)
    assert late <= early
