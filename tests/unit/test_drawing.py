"""Prompts drawn by their pass rates: those of middling difficulty come up, none starves, nothing is left to chance."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from async_help import Memory, asynchronous, configured, seen, synchronous, train
from engine_help import ScriptedEngine
from rollouts_help import answers
from trew.config import parse
from trew.eval import correct_by
from trew.rollout.drawing import Curriculum, InOrder, drawing
from trew.types import Prompt, Score, ScoredGroup

CORRECT = correct_by("r")
SETTINGS = {"share": 0.5, "low": 0.2, "high": 0.8, "floor": 0.05, "decay": 0.5}


def made(prompts: list[Prompt], *, data: Any = None, seed: int = 0, **curriculum: Any) -> Curriculum:
    table = {"model": "m", "seed": seed, "data": data or {"train": "x"}, "curriculum": {**SETTINGS, **curriculum}}
    found = drawing(parse(table), prompts, CORRECT)
    assert isinstance(found, Curriculum)
    return found


def numbered(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", text="?") for i in range(count)]


def scored(prompt: Prompt, right: int, of: int = 8) -> ScoredGroup:
    scores = tuple(Score(float(i < right), parts={"r": float(i < right)}) for i in range(of))
    return ScoredGroup(answers(prompt, *["x"] * of), scores)


class Planted:
    """A policy for which a prompt's chance of a right answer is known: 0, 1/2 or 1."""

    def __init__(self, count: int, *, seed: int = 0) -> None:
        self.prompts = numbered(count)
        self.chances = {p.uid: (0.0, 0.5, 1.0)[i % 3] for i, p in enumerate(self.prompts)}
        self.random = np.random.default_rng(seed)

    def steps(self, source: Any, steps: int, *, first: int = 0, size: int = 8) -> list[str]:
        drawn = []
        for step in range(first, first + steps):
            found: list[Prompt] = []
            for place in range(step * size, (step + 1) * size):
                found.append(source.draw(place, taken=[p.uid for p in found]).prompt)
            source.learned([scored(p, int(self.random.binomial(8, self.chances[p.uid]))) for p in found])
            drawn += [p.uid for p in found]
        return drawn


def share_of_middling(policy: Planted, drawn: list[str]) -> float:
    return sum(policy.chances[uid] == 0.5 for uid in drawn) / len(drawn)


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_it_concentrates_on_prompts_of_middling_difficulty(share):
    """A third of the prompts is of middling difficulty; without a curriculum so is a third of what is drawn."""
    policy = Planted(900)
    drawn = policy.steps(made(policy.prompts, share=share), 60)
    plain = policy.steps(InOrder(made(policy.prompts).order, policy.prompts), 60)
    assert share_of_middling(policy, plain) < 0.4
    expected = (1 - share) / 3 + share
    assert share_of_middling(policy, drawn[100:]) > expected - 0.12
    assert share_of_middling(policy, drawn[100:]) > 1.5 * share_of_middling(policy, plain)


def test_prompts_inside_the_target_come_up_in_turn():
    """None of them is drawn over and over while others wait."""
    policy = Planted(300)
    drawn = policy.steps(made(policy.prompts, floor=0.0), 100)
    counts = Counter(uid for uid in drawn[400:] if policy.chances[uid] == 0.5)
    assert max(counts.values()) - min(counts.values()) <= 3


def test_no_prompt_starves_even_with_a_floor_of_zero():
    policy = Planted(60)
    drawn = policy.steps(made(policy.prompts, floor=0.0), 40)
    # Half of the draws are turns: an epoch takes at most twice as many draws as there are prompts.
    for epochs in (1, 2):
        counts = Counter(drawn[: 122 * epochs])
        assert all(counts[uid] >= epochs for uid in policy.chances)


def test_the_floor_brings_prompts_outside_of_the_target_back_so_much_later():
    prompts = numbered(40)
    source = made(prompts, floor=0.25, share=0.9)
    drawn: list[tuple[str, bool]] = []
    for place in range(2000):
        found = source.draw(place, taken=())
        source.learned([scored(found.prompt, 4 if int(found.prompt.uid[1:]) % 2 else 0)])
        drawn.append((found.prompt.uid, found.turn < 0))
    by_rate = Counter(int(uid[1:]) % 2 for uid, rate in drawn[500:] if rate)
    assert 3.0 < by_rate[1] / by_rate[0] < 5.5  # four times as often


def test_turns_are_epochs_and_rates_take_the_other_places():
    prompts = numbered(20)
    source = made(prompts, share=0.5)
    turns = []
    for place in range(80):
        found = source.draw(place, taken=())
        source.learned([scored(found.prompt, 4)])
        if found.turn >= 0:
            turns.append(found.prompt.uid)
            assert found.turn == len(turns) - 1
    assert 40 <= len(turns) <= 42
    assert len(set(turns[:20])) == len(set(turns[20:40])) == 20


def test_unseen_prompts_stand_in_while_nothing_is_inside_the_target():
    prompts = numbered(30)
    source = made(prompts, share=0.9, floor=1.0)
    found = []
    for place in range(30):
        found.append(source.draw(place, taken=()).prompt)
        source.learned([scored(found[-1], 0)])
    assert len({p.uid for p in found}) == 30


def test_a_prompt_that_is_being_answered_is_not_drawn_by_its_rate():
    prompts = numbered(6)
    source = made(prompts, share=0.9)
    first = [source.draw(place, taken=()).prompt for place in range(2)]
    source.learned([scored(p, 4) for p in first])
    places = iter(range(2, 40))
    for _ in range(6):
        found = source.draw(next(places), taken=[f"{first[0].uid}~3"])
        assert found.turn >= 0 or found.prompt is not first[0]


def test_decay_weighs_earlier_groups():
    prompt = numbered(1)
    for decay, rate in ((0.0, 1.0), (0.5, 8 / 12), (1.0, 0.5)):
        source = made(prompt, decay=decay)
        source.draw(0, taken=())
        source.learned([scored(prompt[0], 0)])
        source.learned([scored(prompt[0], 8)])
        [(passed, judged, _)] = source.state()["rates"].values()
        assert passed / judged == pytest.approx(rate)


def test_what_no_reward_could_judge_is_neither_passed_nor_failed():
    [prompt] = numbered(1)
    source = made([prompt])
    source.learned([ScoredGroup(answers(prompt, "a", "b"), (Score(None, parts={"r": None}),) * 2)])
    assert source.state()["rates"] == {}
    source.learned(
        [ScoredGroup(answers(prompt, "a", "b"), (Score(1.0, parts={"r": 1.0}), Score(None, parts={"r": None})))]
    )
    assert source.state()["rates"] == {"p0": (1.0, 1.0, -1)}


@pytest.mark.parametrize("data", [None, [{"name": "a", "train": "x"}, {"name": "b", "train": "x", "weight": 3}]])
def test_its_state_goes_through_json_and_gives_the_same_draws(data):
    policy = Planted(90)
    if data:
        policy.prompts = [Prompt(f"{'ab'[i % 2]}/{i}", text="?") for i in range(90)]
        policy.prompts.sort(key=lambda p: p.uid)
        policy.chances = {p.uid: (0.0, 0.5, 1.0)[i % 3] for i, p in enumerate(policy.prompts)}
    one = made(policy.prompts, data=data)
    policy.steps(one, 9)
    other = made(policy.prompts, data=data)
    other.load_state(json.loads(json.dumps(one.state())))
    state = policy.random.bit_generator.state
    expected = policy.steps(one, 9, first=9)
    policy.random.bit_generator.state = state
    assert policy.steps(other, 9, first=9) == expected
    if data:  # the mixture is what it was
        assert sum(uid.startswith("b/") for uid in expected) == 54


# ---- with rollouts


def half(request: Any) -> str:
    """Right answers: always, half of the time or never, by the prompt."""
    kind = int(request.prompt.uid.partition("~")[0][1:]) % 3
    return f"#### {1 if kind == 2 or (kind == 1 and request.sample % 2) else 0}"


@pytest.mark.parametrize("preset", ["grpo", "dapo"])
def test_synchronous_and_asynchronous_runs_draw_the_same(preset):
    config = configured(0, curriculum={"share": 0.5})
    engines = [ScriptedEngine(text_of=half) for _ in range(2)]
    one = synchronous(config, engines[0], preset=preset)
    other = asynchronous(config, engines[1], preset=preset)
    pairs = zip(train(one, engines[0], range(1, 7)), train(other, engines[1], range(1, 7)), strict=True)
    for a, b in pairs:
        assert seen(a.sampled) == seen(b.sampled)
    assert any(f < 0 for f in turns(other))


def turns(source: Any) -> list[int]:
    return [json.loads(line).get("turn", -1) for line in source._keeper.written if line.startswith('{"issued"')]


@pytest.mark.parametrize("preset", ["grpo", "dapo"])
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("kill", [2, 4, 6])
def test_after_a_kill_tickets_keep_their_prompts_and_turns_go_on(staleness, kill, preset):
    """Killed after step ``kill``, with the checkpoint of the step before: what was asked for since is in the ledger."""
    config, keeper = configured(staleness, steps=8, curriculum={"share": 0.5}), Memory()
    engine = ScriptedEngine(batch=5, text_of=half)
    source = asynchronous(config, engine, keeper, preset=preset)
    train(source, engine, range(1, kill))
    state = json.loads(json.dumps(source.state()))
    train(source, engine, [kill])
    left = Memory()
    left.written, left.groups, left.count = list(keeper.written), dict(keeper.groups), keeper.count
    fresh = ScriptedEngine(batch=5, text_of=half)
    fresh.version = kill - 1
    again = asynchronous(config, fresh, left, preset=preset)
    again.load_state(state)
    train(again, fresh, range(kill, 9))
    issued = [json.loads(line) for line in left.written if line.startswith('{"issued"')]
    own = [entry["turn"] for entry in issued if "turn" in entry]
    assert own == list(range(len(own))), "a turn was taken twice or left out"
    order = again.drawing.order
    assert [e["uid"].partition("~")[0] for e in issued if "turn" in e] == [f"p{i}" for i in order.take(0, len(own))]
    assert len(own) < len(issued)


def test_rates_are_those_of_the_steps_that_were_trained():
    """In flight or thrown away by a crash, groups leave no trace in them."""
    config, keeper = configured(2, steps=8, curriculum={"share": 0.5}), Memory()
    engine = ScriptedEngine(batch=5, text_of=half)
    source = asynchronous(config, engine, keeper)
    found = train(source, engine, range(1, 5), passes=30)
    learned = Counter(g.group.prompt.uid.partition("~")[0] for step in found for g in step.sampled)
    rates = source.state()["rates"]
    assert {uid for uid, (_, judged, _) in rates.items() if judged} == set(learned)
    assert source.ledger.issued > sum(learned.values())


def test_a_ledger_of_a_run_without_curriculum_is_what_it_was():
    config, keeper = configured(1), Memory()
    engine = ScriptedEngine(batch=5)
    source = asynchronous(config, engine, keeper)
    train(source, engine, [1])
    assert set(source.state()) == {"position", "ledger"}
    assert all("turn" not in line for line in keeper.written)
