"""The ledger of asynchronous rollouts: a group is trained on once or accounted for, never beyond the bound."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trew.errors import CheckpointError
from trew.rollout.ledger import Ledger, Stored


class Run:
    """Drives a ledger as a run does: tickets take some ticks to finish, a step as many as it wants.

    ``length`` gives the ticks of a ticket; weights change while it runs, as with in_flight = "keep".
    """

    def __init__(self, *, prompts=3, staleness=1, steps=8, length=lambda number: 1, lines=()):
        self.lines = list(lines)
        self.ledger = Ledger(prompts=prompts, staleness=staleness, steps=steps, journal=self.lines.append)
        self.length = length
        self.running: dict[int, int] = {}  # ticks left
        self.since: dict[int, int] = {}  # version
        self.trained: dict[int, list[int]] = {}
        self.version = 0

    def ask(self):
        while self.ledger.room > 0:
            number = self.ledger.dormant
            if number is not None:
                self.ledger.again(number, why=self.ledger.accounts[number].why)
            else:
                place = self.ledger.issued
                step = self.ledger.next_step
                number = self.ledger.issue(uid=f"p/{place}", place=place, step=step, attempt=0).number
            self.running[number], self.since[number] = self.length(number), self.version

    def tick(self):
        for number in list(self.running):
            self.running[number] -= 1
            if self.running[number] <= 0:
                del self.running[number]
                versions = range(self.since[number], self.version + 1)
                self.ledger.finish(number, versions=versions, stored=Stored(f"{number:06d}", 0, 1, "x"))

    def step(self):
        """Trains one step; returns how many ticks it waited."""
        step, waited = self.ledger.published + 1, 0
        self.ask()
        while (chosen := self.ledger.choose(step, most=self.ledger.prompts)) is None:
            assert self.running, "it waits for nothing"
            self.tick()
            waited += 1
        assert all(step - 1 - self.ledger.accounts[n].oldest <= self.ledger.staleness for n in chosen)
        self.version = step
        self.ledger.train(step, version=step, numbers=chosen)
        self.trained[step] = chosen
        self.ask()
        return waited


def lengths(seed, most=12):
    """Heavy-tailed, a function of the ticket."""
    return lambda number: min(most, int(random.Random(seed * 1000 + number).paretovariate(0.7)))


def everything(ledger):
    """All that a ledger knows, but for how it got there."""
    return {k: v for k, v in vars(ledger).items() if k != "journal"}


@given(seed=st.integers(0, 10**6), staleness=st.integers(0, 4), prompts=st.integers(1, 4), ticks=st.integers(0, 3))
def test_every_group_is_trained_on_once_within_the_bound(seed, staleness, prompts, ticks):
    run = Run(prompts=prompts, staleness=staleness, steps=7, length=lengths(seed))
    for _ in range(7):
        run.step()
        for _ in range(ticks):
            run.tick()
    used = Counter(n for numbers in run.trained.values() for n in numbers)
    assert used == Counter(range(7 * prompts))  # all of them, once, although some are long


@given(
    seed=st.integers(0, 10**6), staleness=st.integers(0, 3), kills=st.lists(st.integers(0, 5), min_size=1, max_size=4)
)
def test_a_killed_run_trains_on_nothing_twice_and_loses_nothing(seed, staleness, kills):
    rng = random.Random(seed)
    run = Run(prompts=2, staleness=staleness, steps=9, length=lengths(seed))
    checkpoint = (0, 0)  # step, lines
    history: dict[int, list[int]] = {}
    for steps in [*kills, 100]:
        for _ in range(min(steps, 9 - run.ledger.published)):
            run.step()
            history = {s: n for s, n in (history | run.trained).items() if s <= run.ledger.published}
            for _ in range(rng.randrange(3)):
                run.tick()
            if rng.random() < 0.4:
                checkpoint = (run.ledger.published, run.ledger.lines)
        # Killed: only the lines are left, and what they say is finished.
        again = Run(prompts=2, staleness=staleness, steps=9, length=run.length, lines=run.lines)
        again.ledger.read(run.lines)
        assert everything(again.ledger) == everything(run.ledger)
        again.version = checkpoint[0]
        again.ledger.begin(step=checkpoint[0], version=checkpoint[0], mark=checkpoint[1])
        if run.ledger.published < 9:
            run = again
    used = Counter(n for numbers in history.values() for n in numbers)
    assert used == Counter(dict.fromkeys(range(18), 1))


def test_without_staleness_a_step_is_that_of_a_synchronous_run():
    run = Run(prompts=3, staleness=0, steps=3, length=lengths(1))
    for step in (1, 2, 3):
        run.step()
        assert run.trained[step] == [3 * step - 3, 3 * step - 2, 3 * step - 1]
        assert {run.ledger.accounts[n].ticket.step for n in run.trained[step]} == {step}


def test_what_is_asked_for_is_read_off_the_entries():
    run = Run(prompts=4, staleness=2, steps=10)
    run.ask()
    assert (run.ledger.issued, run.ledger.room) == (12, 0)
    run.tick()
    run.step()
    assert (run.ledger.issued, run.ledger.room) == (16, 0)
    for _ in range(9):
        run.step()
    assert run.ledger.issued == 40  # nothing beyond the last step


def test_a_step_waits_for_a_straggler_at_its_deadline_and_not_before():
    run = Run(prompts=2, staleness=1, steps=6, length=lambda number: 7 if number == 0 else 1)
    run.ask()
    run.tick()
    assert run.step() == 0  # without number 0
    assert run.trained[1] == [1, 2]
    run.tick()
    assert run.ledger.choose(2, most=2) is None  # two others are finished, and 0 must not become older
    assert run.step() == 5
    assert run.trained[2] == [0, 3]


def test_it_counts_what_it_passed_over():
    run = Run(prompts=2, staleness=1, steps=6, length=lambda number: 7 if number in (0, 1) else 1)
    run.ask()
    run.tick()
    chosen = run.ledger.choose(1, most=2)
    assert chosen == [2, 3]
    assert run.ledger.passed_over(chosen) == 2


def test_it_never_takes_so_much_that_a_later_step_would_be_left_with_too_much():
    """Three tickets of one deadline and one group per step: the last of them must not wait for two later ones."""
    ledger = Ledger(prompts=1, staleness=2, steps=9)
    for place in range(3):
        ledger.issue(uid=f"{place}", place=place, step=place + 1, attempt=0)
    ledger.finish(2, versions=[0])
    assert ledger.choose(1, most=1) == [2]
    ledger.train(1, version=1, numbers=[2])
    ledger.issue(uid="3", place=3, step=4, attempt=0)
    ledger.finish(3, versions=[1])  # its deadline is step 4, those of 0 and 1 are step 3
    assert ledger.choose(2, most=1) is None
    ledger.finish(1, versions=[0, 1])
    assert ledger.choose(2, most=1) == [1]


def test_nothing_is_trained_on_twice_or_beyond_the_bound():
    run = Run(prompts=2, staleness=0, steps=9)
    run.step()
    lines = list(run.lines)
    with pytest.raises(ValueError, match="ticket 0: cannot be trained on, it is trained"):
        run.ledger.train(2, version=2, numbers=[0])
    old = Ledger(prompts=1, staleness=0, steps=9)
    old.issue(uid="a", place=0, step=1, attempt=0)
    old.finish(0, versions=[0])
    with pytest.raises(ValueError, match="ticket 0: its oldest token is 1 versions old, accepted 0"):
        old.train(2, version=2, numbers=[0])
    assert run.lines == lines  # a refused entry is none


def test_what_was_trained_on_after_a_checkpoint_can_be_used_again_from_its_file():
    run = Run(prompts=2, staleness=2, steps=9)
    run.step()
    mark = run.ledger.lines
    run.step()
    used = run.trained[2]
    assert run.ledger.forget(covered=1) >= {f"{n:06d}" for n in used}
    run.ledger.begin(step=1, version=1, mark=mark)
    assert [run.ledger.accounts[n].state for n in used] == ["finished", "finished"]
    assert run.ledger.choose(2, most=2) == used


def test_tokens_of_weights_that_were_left_behind_count_the_way_over_the_checkpoint():
    ledger = Ledger(prompts=1, staleness=3, steps=20)
    for number in range(4):
        ledger.issue(uid=f"{number}", place=number, step=number + 1, attempt=0)
    mark = ledger.lines
    for step in (1, 2):
        ledger.finish(step - 1, versions=[0])
        ledger.train(step, version=step, numbers=[step - 1])
    ledger.finish(2, versions=[2])  # two steps beyond the start
    ledger.begin(step=0, version=0, mark=mark)
    assert ledger.accounts[2].oldest == -2
    assert ledger.deadline(2) == 2  # at step 2 it is two steps there, and one back
    ledger.train(1, version=1, numbers=[0])
    ledger.begin(step=0, version=0, mark=mark)  # once more, from the same checkpoint
    assert ledger.accounts[2].oldest == -2
    ledger.train(1, version=1, numbers=[0])
    ledger.train(2, version=2, numbers=[1])  # the number 2 again: of other weights
    assert ledger.accounts[2].state == "dormant"  # too old for step 3
    assert ledger.accounts[2].why == "its oldest token is 4 versions old"


def test_after_a_checkpoint_far_back_only_what_the_bound_allows_is_asked_for():
    run = Run(prompts=2, staleness=1, steps=20)
    for _ in range(8):
        run.step()
    run.ledger.begin(step=0, version=0, mark=0)
    run.running = {}
    run.version = 0
    run.ask()
    open_ = [t.number for t in run.ledger.unfinished()] + [a.ticket.number for a in run.ledger.finished()]
    assert sorted(open_) == [0, 1, 2, 3]
    run.step()
    assert run.trained[1] == [0, 1]


def test_a_dropped_group_makes_room_where_it_is_replaced():
    run = Run(prompts=2, staleness=0, steps=9)
    run.ask()
    run.tick()
    run.ledger.drop(0, why="no signal", replaced=True)
    assert run.ledger.room == 1
    extra = run.ledger.issue(uid="x", place=2, step=1, attempt=1)
    assert (run.ledger.room, run.ledger.next_step) == (0, 2)
    run.ledger.drop(1, why="no signal", replaced=False)
    assert run.ledger.room == 0
    run.ledger.begin(step=0, version=0, mark=0)  # an interrupt: both are back
    assert [run.ledger.accounts[n].state for n in (0, 1, extra.number)] == ["finished", "finished", "dormant"]
    assert run.ledger.room == 0


def test_weights_that_a_step_left_as_they_are_do_not_age():
    ledger = Ledger(prompts=1, staleness=0, steps=9)
    ledger.train(1, version=0, numbers=[])  # numbers that were not finite: no update
    ledger.issue(uid="a", place=0, step=2, attempt=0)
    ledger.finish(0, versions=[0])
    assert ledger.accounts[0].oldest == 1
    ledger.again(0, why="x")
    with pytest.raises(ValueError, match="tokens of version 5, which was not published in this run"):
        ledger.finish(0, versions=[5])


def test_versions_of_weights_left_behind_are_below_those_of_now():
    ledger = Ledger(prompts=1, staleness=9, steps=9)
    ledger.begin(step=0, version=10, mark=0)
    for step in (1, 2):
        ledger.train(step, version=10 + 2 * step, numbers=[])
    assert [ledger.version_at(s) for s in (-3, 0, 1, 2)] == [-3, 10, 12, 14]


@pytest.mark.parametrize(
    "line", ['{"trained": 1, "version": 1, "tickets": [0]}', "{", '{"issued": 5}', "[]", "{}", '{"a": 1}', "1"]
)
def test_lines_that_do_not_follow_are_refused(line):
    with pytest.raises(CheckpointError, match="ledger: line 1 does not follow"):
        Ledger(prompts=1, staleness=1, steps=1).read([line])


def test_what_ended_long_ago_is_forgotten():
    run = Run(prompts=2, staleness=1, steps=200)
    for step in range(1, 101):
        run.tick()
        run.step()
        files = run.ledger.forget(step - 2)
        assert len(files) < 12
    assert len(run.ledger.accounts) < 12
    fresh = Ledger(prompts=2, staleness=1, steps=200)
    fresh.read(run.lines)
    assert fresh.forget(98) == files
    assert {n: dataclasses.astuple(a) for n, a in fresh.accounts.items()} == {
        n: dataclasses.astuple(a) for n, a in run.ledger.accounts.items()
    }
