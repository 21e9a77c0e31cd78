"""Several data sets in one run: shares are exact, and every set is gone through epoch by epoch."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from trew.config import parse
from trew.data import PromptStream, prompt_order
from trew.data.mixture import LONGEST_PERIOD, Schedule
from trew.types import Prompt

WEIGHTS = st.lists(st.floats(0.01, 10).map(lambda w: round(w, 2)), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(1, 300), st.integers(0, 2000))
def test_shares_deviate_by_less_than_one_prompt_from_the_beginning_and_less_than_two_anywhere(weights, size, start):
    schedule, total = Schedule(weights), sum(Fraction(repr(w)) for w in weights)
    shares = [Fraction(repr(w)) / total for w in weights]
    assert schedule.shares == shares
    bound = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0
    chosen = [schedule.place(n)[0] for n in range(start + size)]
    for k, share in enumerate(shares):
        assert abs(chosen.count(k) - len(chosen) * share) <= bound < 1
        assert abs(chosen[start:].count(k) - size * share) <= 2 * bound < 2
        if len(weights) == 2:
            assert abs(chosen[start:].count(k) - size * share) <= 1


@given(WEIGHTS, st.integers(0, 5000))
def test_a_place_is_a_function_of_its_number_alone(weights, n):
    whole = Schedule(weights)
    before = [whole.place(i)[0] for i in range(n)]
    chosen, nth = Schedule(weights).place(n)
    assert (chosen, nth) == whole.place(n)
    assert nth == before.count(chosen)


def test_a_schedule_that_repeats_is_not_kept_longer_than_it_must_be():
    schedule = Schedule([0.1, 0.3])
    first, _ = schedule.place(0)
    assert schedule.place(10**12) == (first, 10**12 // 4 * [1, 3][first])
    assert len(schedule._chosen) <= 4
    endless = Schedule([0.1234567, 1])
    assert endless._period > LONGEST_PERIOD
    assert [endless.place(n)[0] for n in range(50)].count(0) in (5, 6)


def configured(sets, *, seed=0):
    return parse({"model": "m", "seed": seed, "data": sets})


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 7), st.sampled_from([1.0, 0.5, 2.5])), min_size=1, max_size=4),
       st.integers(0, 5))  # fmt: skip
def test_no_prompt_comes_twice_before_all_of_its_set_have(sets, seed):
    tables = [{"name": f"s{i}", "weight": w, "train": "x"} for i, (_, w) in enumerate(sets)]
    prompts = [Prompt(f"s{i}/{n}", text="?") for i, (size, _) in enumerate(sets) for n in range(size)]
    order = prompt_order(configured(tables, seed=seed), prompts)
    drawn = [prompts[index].uid for index in order.take(0, 120)]
    for i, (size, _) in enumerate(sets):
        own = [uid for uid in drawn if uid.startswith(f"s{i}/")]
        for first in range(0, len(own) - size + 1, size):
            assert len(set(own[first : first + size])) == size
    assert order.take(50, 30) == order.take(0, 80)[50:]


@given(st.integers(1, 50), st.integers(0, 2**31 - 1), st.booleans())
def test_one_set_is_drawn_as_it_always_was(size, seed, shuffle):
    config = parse({"model": "m", "seed": seed, "data": {"train": "x", "shuffle": shuffle}})
    order = prompt_order(config, [Prompt(str(i), text="?") for i in range(size)])
    assert order.take(3, 80) == PromptStream(size, seed=seed, shuffle=shuffle).take(3, 80)


def test_another_set_does_not_change_the_order_of_one():
    tables = [{"name": name, "train": "x"} for name in "abc"]
    prompts = [Prompt(f"{name}/{n}", text="?") for name in "abc" for n in range(9)]
    both = prompt_order(configured(tables), prompts)
    fewer = prompt_order(configured(tables[:2]), prompts[:18])
    assert [both.nth(1, n) for n in range(30)] == [fewer.nth(1, n) for n in range(30)]
    assert [both.nth(0, n) % 9 for n in range(9)] != [both.nth(1, n) % 9 for n in range(9)]
