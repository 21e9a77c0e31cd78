"""Asynchronous rollouts: the synchronous ones where the bound is 0, within the bound else, and none lost with a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from typing import Any

import pytest

import env_help
import tiny
from async_help import Memory, asynchronous, configured, seen, synchronous, train
from engine_help import ScriptedEngine
from trew.config import RewardConfig
from trew.env.hosts import Hosts
from trew.env.load import Spec
from trew.errors import CheckpointError, EngineError
from trew.rewards import RewardSet
from trew.rollout import Renderer
from trew.rollout.bridge import Bridges
from trew.rollout.episodes import Episodes, Limits
from trew.types import Prompt


class Brief(ScriptedEngine):
    """No answer is cut off."""

    def _length(self, request: Any) -> int:
        return min(super()._length(request), request.sampling.max_tokens - 1)


def few_right(request: Any) -> str:
    """Answers of which one group in two has a signal."""
    return f"#### {request.sample % 2 if sum(request.prompt.uid.encode()) % 2 else 0}"


@pytest.mark.parametrize("preset", ["grpo", "dapo", "remax"])
@pytest.mark.parametrize("prompts", [40, 4])  # with 4, some are drawn twice in a step
def test_without_staleness_they_are_the_synchronous_ones(preset, prompts):
    config = configured(0)
    engines = [ScriptedEngine(text_of=few_right) for _ in range(2)]
    one = synchronous(config, engines[0], preset=preset, prompts=prompts)
    other = asynchronous(config, engines[1], preset=preset, prompts=prompts)
    pairs = zip(train(one, engines[0], range(1, 7)), train(other, engines[1], range(1, 7)), strict=True)
    for a, b in pairs:
        assert seen(a.trained_on) == seen(b.trained_on)
        assert seen(a.sampled) == seen(b.sampled)
        assert a.baselines == b.baselines


@pytest.mark.parametrize("passes", [0, 3, 60])
@pytest.mark.parametrize("staleness", [1, 3])
def test_the_bound_holds_for_the_oldest_token_and_every_prompt_is_used_once(staleness, passes):
    config, engine = configured(staleness), ScriptedEngine(batch=5)
    source = asynchronous(config, engine)
    found = train(source, engine, range(1, 7), passes=passes)
    oldest = [[r.oldest_version for g in step.trained_on for r in g.group.rollouts] for step in found]
    ages = [step - 1 - v for step, versions in enumerate(oldest, 1) for v in versions if v is not None]
    assert 0 < max(ages) <= staleness
    if passes == 60:
        assert max(ages) == staleness
    else:
        assert any(len(r.versions) > 1 for step in found for g in step.trained_on for r in g.group.rollouts)
    used = Counter(g.group.prompt.uid for step in found for g in step.trained_on)
    assert len(used) == sum(used.values()) == 18
    assert not engine._open, "nothing is asked for beyond the last step"


def test_it_says_how_old_its_groups_are_and_what_it_waited_for():
    config, engine = configured(1), ScriptedEngine(batch=5)
    facts = [step.facts for step in train(asynchronous(config, engine), engine, range(1, 7), passes=20)]
    assert [f["age_max"] for f in facts] == [0, 1, 1, 1, 1, 1]
    for row in facts:
        assert row["age/0"] + row["age/1"] == pytest.approx(1)
        assert row["age_mean"] == pytest.approx(row["age/1"])
        assert row["waited_s"] >= 0
        assert row["passed_over"] >= 0


def test_the_greedy_baseline_plays_the_episode_of_its_group():
    """Also where a step has two groups of one prompt, which were asked for in different steps."""
    config = configured(3, prompts=2, completions=1, steps=12)
    config = dataclasses.replace(config, environment=dataclasses.replace(config.environment, name="telltale"))
    with contextlib.ExitStack() as ending:
        ahead, beside = telltale(ending), telltale(ending)
        source = asynchronous(config, ahead, preset="remax", prompts=2)
        source.engine, source.rewards = beside, RewardSet.from_config([RewardConfig(name="environment")])
        found = train(source, ahead, range(1, 13))
    uids = [group.group.prompt.uid for step in found for group in step.trained_on]
    assert len(uids) == 24
    assert any("~ticket" in uid for uid in uids)
    for step in found:
        for group in step.trained_on:
            assert {score.value for score in group.scores} == {step.baselines[group.group.prompt.uid]}


def telltale(ending: contextlib.ExitStack) -> Episodes:
    """Plays episodes whose rewards say which they are."""
    hosts, renderer = Hosts(Spec(f"{env_help.__file__}:telltale")), Renderer(tiny.tokenizer())
    ending.callback(hosts.close)
    limits, bridges = Limits(turns=2, tokens=512, observation=64), Bridges(renderer, most=64)
    return Episodes(Brief(batch=100), hosts, bridges, limits=limits, ends=renderer.stop_ids)


class Long(ScriptedEngine):
    """Right answers are much longer than wrong ones."""

    def _length(self, request: Any) -> int:
        return 12 if self._right(request) else 1

    def _right(self, request: Any) -> bool:
        return self._key(request) % 4 == 0


def test_long_answers_are_not_left_out():
    """Lengths go with rewards here: what drops or replaces slow groups would see fewer right answers."""
    engine = Long(batch=3)
    engine.text_of = lambda request: f"#### {int(engine._right(request))}"
    config = configured(2, completions=1, steps=12)
    found = train(asynchronous(config, engine), engine, range(1, 13))
    values = [s.value for step in found for g in step.trained_on for s in g.scores]
    every = [float(engine._right(request)) for request in engine.submitted]
    assert sorted(values) == sorted(every)
    # The first groups that finish, which a source without deadlines would take, have fewer.
    racing, first = Long(batch=100), []
    racing.submit(engine.submitted)
    while len(first) < len(every) // 2:
        first += [engine._right(next(r for r in engine.submitted if r.id == each.id)) for each in racing.poll()]
    assert sum(first) / len(first) < 0.8 * sum(every) / len(every)


def killed(keeper: Memory) -> Memory:
    """What is left of it on the disk."""
    left = Memory()
    left.written, left.groups, left.count = list(keeper.written), dict(keeper.groups), keeper.count
    return left


def test_finished_groups_survive_the_process_and_are_used():
    config, keeper, engine = configured(1), Memory(), ScriptedEngine(batch=100)
    source = asynchronous(config, engine, keeper)
    train(source, engine, [1, 2])
    state = source.state()
    source._gather(None)  # while step 3 would be learned
    while engine._open:
        source._gather(None)
    waiting = {a.ticket.uid: a.ticket.number for a in source.ledger.finished()}
    assert len(waiting) == 6
    left = killed(keeper)
    fresh = ScriptedEngine(batch=100)
    fresh.version = 2
    again = asynchronous(config, fresh, left)
    again.load_state(json.loads(json.dumps(state)))
    found = again.next(3)
    assert not fresh.submitted
    assert {g.group.prompt.uid for g in found.trained_on} <= set(waiting)
    assert seen(found.trained_on) == seen(source.next(3).trained_on)
    assert found.trained_on[0].group.prompt.columns  # rewards read them


@pytest.mark.parametrize("preset", ["grpo", "dapo"])
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("kill", [1, 3, 5])
def test_after_a_kill_every_step_trains_on_what_no_other_has(staleness, kill, preset):
    """Killed after step ``kill`` was trained, with the checkpoint of the step before."""
    config, keeper = configured(staleness, steps=7), Memory()
    engine = ScriptedEngine(batch=5, text_of=few_right)
    source = asynchronous(config, engine, keeper, preset=preset)
    kept = train(source, engine, range(1, kill))
    state = source.state()
    train(source, engine, [kill])
    left = killed(keeper)
    fresh = ScriptedEngine(batch=5, text_of=few_right)
    fresh.version = kill - 1
    source = asynchronous(config, fresh, left, preset=preset)
    if kill > 1:  # else there was no checkpoint yet
        source.load_state(state)
    kept += train(source, fresh, range(kill, 8))
    used = Counter(g.group.prompt.uid for step in kept for g in step.trained_on)
    assert set(used.values()) == {1}
    assert len(used) == 21
    dropped = {g.group.prompt.uid for step in kept for g in step.sampled} - set(used)
    assert bool(dropped) == (preset == "dapo")
    if preset == "grpo":
        assert set(used) == {f"p{i}" for i in source.drawing.order.take(0, 21)}
    if staleness == 0:
        one = ScriptedEngine(batch=5, text_of=few_right)
        for a, b in zip(kept, train(synchronous(config, one, preset=preset), one, range(1, 8)), strict=True):
            assert seen(a.trained_on) == seen(b.trained_on)


def test_what_was_trained_on_before_synchronous_steps_is_not_trained_on_again():
    """Their checkpoints know no ledger."""

    def engine(version: int) -> ScriptedEngine:
        made = ScriptedEngine(batch=100)
        made.version = version
        return made

    config, keeper, first = configured(1, steps=9), Memory(), engine(0)
    source = asynchronous(config, first, keeper)
    kept = train(source, first, [1, 2, 3])
    second = engine(3)
    between = synchronous(config, second)
    between.load_state(source.state())
    kept += train(between, second, [4, 5])
    third = engine(5)
    again = asynchronous(config, third, left := killed(keeper))
    again.load_state(between.state())
    later = train(again, third, [6, 7])
    used = Counter(g.group.prompt.uid for step in kept + later for g in step.trained_on)
    assert set(used.values()) == {1}
    # Killed before the next checkpoint: what steps 6 and 7 trained on comes back.
    fourth = engine(5)
    repeated = asynchronous(config, fourth, killed(left))
    repeated.load_state(between.state())
    found = train(repeated, fourth, [6, 7])
    assert {g.group.prompt.uid for s in found for g in s.trained_on} == {
        g.group.prompt.uid for s in later for g in s.trained_on
    }


def test_a_damaged_file_is_noticed_and_its_groups_are_made_again():
    config, keeper, engine = configured(1), Memory(), ScriptedEngine(batch=100)
    source = asynchronous(config, engine, keeper)
    train(source, engine, [1])
    state = source.state()
    while engine._open:
        source._gather(None)
    left = killed(keeper)
    left.groups = {name: data[:-1] + b"?" for name, data in left.groups.items()}
    fresh = ScriptedEngine()
    fresh.version = 1
    again = asynchronous(config, fresh, left)
    again.load_state(state)
    found = again.next(2)
    assert fresh.submitted
    for group in found.trained_on:  # by the same draws
        [one] = [g for g in source._ready.values() if g.prompt.uid == group.group.prompt.uid]
        assert [r.token_ids.tolist() for r in group.group.rollouts] == [r.token_ids.tolist() for r in one.rollouts]
    again.state()
    assert any('"again"' in line and "is damaged" in line for line in left.written)


def test_tokens_of_weights_left_behind_do_not_pass_for_those_of_now():
    """After a kill the same version numbers are given to other weights."""
    config, keeper, engine = configured(3, steps=9), Memory(), ScriptedEngine(batch=4)
    source = asynchronous(config, engine, keeper)
    train(source, engine, [1])
    state = source.state()
    train(source, engine, [2])
    while engine._open:
        source._gather(None)
    assert any(2 in account.versions for account in source.ledger.finished())
    fresh = ScriptedEngine(batch=4)
    fresh.version = 1
    again = asynchronous(config, fresh, killed(keeper))
    again.load_state(state)
    again._begin(2)
    rollouts = [rollout for group in again._ready.values() for rollout in group.rollouts]
    versions = {span.version for rollout in rollouts for span in rollout.versions}
    assert versions
    assert max(versions) <= 1
    assert min(versions) == 0  # of version 2: one step back from where it went on, as it was one ahead
    for step, found in enumerate(train(again, fresh, range(2, 10)), 2):
        for group in found.trained_on:
            assert all(step - 1 - r.oldest_version <= 3 for r in group.group.rollouts)


def test_tokens_of_weights_left_behind_are_never_of_those_of_now_where_a_step_made_no_update():
    """The weights as far back are the same ones then."""
    config, keeper, engine = configured(3, steps=9), Memory(), ScriptedEngine(batch=4)
    source = asynchronous(config, engine, keeper)
    train(source, engine, [1])
    source.next(2)
    source.trained(2, 1)  # numbers that were not finite
    state = source.state()
    source.next(3)
    engine.version = 2
    source.trained(3, 2)
    while engine._open:
        source._gather(None)
    left = [account.ticket.number for account in source.ledger.finished() if account.versions == (2,)]
    assert left
    fresh = ScriptedEngine(batch=4)
    fresh.version = 1
    again = asynchronous(config, fresh, killed(keeper))
    again.load_state(state)
    again._begin(3)
    rollouts = [rollout for number in left if number in again._ready for rollout in again._ready[number].rollouts]
    assert rollouts
    assert {span.version for rollout in rollouts for span in rollout.versions} == {0}


def test_a_group_of_which_a_completion_is_lost_is_asked_for_again_as_a_whole():
    lost: Counter[str] = Counter()

    def loses(request: Any) -> bool:
        lost[request.id] += request.sample == 1
        return lost[request.id] == 1

    config, keeper, engine = configured(1), Memory(), ScriptedEngine(loses=loses)
    found = train(asynchronous(config, engine, keeper), engine, range(1, 7))
    assert sum(len(step.trained_on) for step in found) == 18
    asked = Counter(request.id for request in engine.submitted)
    assert set(asked.values()) == {2}
    assert sum("its server died" in line for line in keeper.written) == 18


def test_a_group_that_is_lost_again_and_again_ends_the_run():
    engine = ScriptedEngine(loses=lambda request: request.prompt.uid == "p3")
    with pytest.raises(EngineError, match=r"the engine lost completions of prompt 'p3' 5 times: its server died"):
        train(asynchronous(configured(1, steps=40), engine), engine, range(1, 40))


def test_an_error_of_the_engine_ends_the_run_and_goes_on_doing_so():
    config, engine = configured(1), ScriptedEngine()
    source = asynchronous(config, engine)
    engine.failure = EngineError("no server is left")
    for _ in range(2):
        with pytest.raises(EngineError, match="no server is left"):
            source.next(1)


def test_groups_of_new_weights_may_be_there_before_the_step_is_over():
    """Servers have the weights of a step, and go on with them, before the source is told of it."""
    config, keeper, engine = configured(2), Memory(), ScriptedEngine(batch=100)
    source, found = asynchronous(config, engine, keeper), []
    for step in range(1, 7):
        found.append(source.next(step))
        engine.version = step
        while engine._open:
            source._gather(None)
        assert source._error is None
        source.trained(step, step)
    assert len({g.group.prompt.uid for step in found for g in step.trained_on}) == 18
    entries = [json.loads(line) for line in keeper.written]
    assert any(max(entry["versions"]) > 0 for entry in entries if "finished" in entry)


def test_a_step_without_an_update_drops_its_groups():
    config, keeper, engine = configured(1), Memory(), ScriptedEngine()
    source = asynchronous(config, engine, keeper)
    source.next(1)
    source.trained(1, 0)  # numbers that were not finite
    dropped = [json.loads(line) for line in keeper.written if "dropped" in line]
    assert [entry["why"] for entry in dropped] == ["step 1 made no update of the policy"] * 3
    found = source.next(2)
    assert len(found.trained_on) == 3


def test_an_interrupted_step_is_undone_and_its_checkpoint_says_so():
    config, keeper, engine = configured(0), Memory(), ScriptedEngine(text_of=few_right)
    source = asynchronous(config, engine, keeper, preset="dapo")
    train(source, engine, [1])
    before = source.state()
    taken = seen(source.next(2).trained_on)  # drops groups, and is interrupted while it learns
    source.load_state(before)
    after = source.state()
    assert after["ledger"] == before["ledger"] < len(keeper.written)
    fresh = ScriptedEngine(text_of=few_right)
    fresh.version = 1
    again = asynchronous(config, fresh, killed(keeper), preset="dapo")
    again.load_state(after)
    assert seen(again.next(2).trained_on) == taken
    assert not fresh.submitted


def test_prompts_that_are_gone_from_the_data_are_replaced():
    config, keeper, engine = configured(1), Memory(), ScriptedEngine(batch=100)
    source = asynchronous(config, engine, keeper)
    train(source, engine, [1])
    state = source.state()
    fresh = ScriptedEngine(batch=100)
    fresh.version = 1
    again = asynchronous(config, fresh, killed(keeper))
    again.drawing.prompts = [Prompt(f"q{i}", text="?", columns={"answer": "#### 1"}) for i in range(40)]
    again.load_state(state)
    found = again.next(2)
    assert all(g.group.prompt.uid.startswith("q") for g in found.trained_on)
    assert len(found.trained_on) == 3


def test_a_ledger_that_is_shorter_than_its_checkpoint_says_is_refused():
    source = asynchronous(configured(1))
    with pytest.raises(CheckpointError, match=r"ledger.jsonl: has 0 lines, but had 7 when the checkpoint was saved"):
        source.load_state({"position": 3, "ledger": 7})


def test_files_are_kept_until_a_checkpoint_covers_them():
    config, keeper, engine, covered = configured(1, steps=30), Memory(), ScriptedEngine(batch=100), [-1]
    source = asynchronous(config, engine, keeper, covered=lambda: covered[0])
    sizes = []
    for step in range(1, 20):
        train(source, engine, [step])
        if step % 4 == 0:
            covered[0] = step
        sizes.append(len(keeper.groups))
    assert max(sizes) < 8


@pytest.mark.parametrize("now", [2, 6])
def test_a_run_that_goes_on_with_another_number_of_prompts_has_them_in_every_step(now):
    keeper, engine = Memory(), ScriptedEngine()
    before = asynchronous(configured(1, prompts=4, steps=12), engine, keeper)
    train(before, engine, range(1, 6))
    state = before.state()
    before.close()
    version, engine = engine.version, ScriptedEngine()
    engine.version = version
    after = asynchronous(configured(1, prompts=now, steps=12), engine, keeper)
    after.load_state(state)
    found = train(after, engine, range(6, 13))
    assert [len(step.trained_on) for step in found] == [now] * 7
    asked = sum("again" in line for line in keeper.written)
    assert asked <= 8, "groups are asked for again since they were too many"
