"""From scored episodes to the turns that an objective reads: ends, rewards, states."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import trew
from trew.config import parse
from trew.errors import DataError
from trew.rollout import StepRollouts
from trew.training import compatibility
from trew.training.batch import to_batch
from trew.types import Group, Prompt, Rollout, Score, ScoredGroup, Span, Turn


def turn(context: int, answer: int, state: str | None) -> Turn:
    values = np.full(answer, -1.0, np.float32)
    spans = (Span(0, 0, answer),) if answer else ()
    return Turn(np.arange(context), np.arange(answer), values, values, -values, spans, "", "stop", state)


def episode(*turns: tuple[int, int, str | None], status: str = "finished") -> Rollout:
    return Rollout(tuple(turn(*each) for each in turns), status)  # type: ignore[arg-type]


LONG = episode((3, 2, "start"), (4, 1, "left"), (1, 2, "left"))  # ends after 2, 7 and 10 of 10 tokens
SHORT = episode((3, 1, "start"), (2, 3, "left"), status="truncated")  # after 1 and 6 of 6
FAILED = episode((3, 2, "start"))


def batch_of(name: str, rollouts: tuple[Rollout, ...], scores: tuple[Score, ...]) -> trew.TokenBatch:
    config = parse({"model": "m", "objective": {"preset": name}})
    plan = SimpleNamespace(config=config, objective=trew.preset(name), right=lambda score: bool(score.value))
    groups = ScoredGroup(Group(Prompt("p", text="q"), rollouts), scores)
    _, batch = to_batch(plan, StepRollouts((groups,), (groups,)))  # type: ignore[arg-type]
    return batch


SCORES = (Score(1.1, steps=((2, 0.1), (10, 1.0))), Score(0.5), Score(None, "timeout"))


def test_turns_of_a_run():
    batch = batch_of("gigpo", (LONG, SHORT, FAILED), SCORES)
    turns = batch.turns
    assert turns is not None
    assert turns.ends.tolist() == [2, 7, 10, 1, 6, 2]
    assert turns.sequence_ids.tolist() == [0, 0, 0, 1, 1, 2]
    # Without rewards of its own turns, an episode's reward was earned by the last.
    assert turns.rewards.tolist() == [0.1, 0.0, 1.0, 0.0, 0.5, 0.0]
    assert turns.states is not None
    assert turns.states.tolist() == [0, 1, 1, 0, 1, 0]
    assert batch.mask.tolist() == [1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["gigpo", "mt-grpo", "turn-returns"])
def test_every_token_sampled_has_the_advantage_of_its_turn(name):
    batch = batch_of(name, (LONG, SHORT, FAILED), SCORES)
    batch = batch.replace(logprobs=torch.full_like(batch.mask, -1.0, dtype=torch.float32), ref_logprobs=None)
    prepared = trew.preset(name, beta=0.0).prepare(batch)
    assert prepared.advantages is not None
    rows = [row.tolist() for row in prepared.advantages.split([10, 6, 2])]
    assert rows[2] == [0.0, 0.0]  # not judged: no part in anything
    for row, mask, ends in zip(rows, batch.mask.split([10, 6, 2]), [[2, 7, 10], [1, 6]], strict=False):
        bounds = [0, *ends]
        for k, end in enumerate(ends):
            assert len({row[t] for t in range(bounds[k], end) if mask[t]}) == 1
        assert [row[t] for t in range(len(row)) if not mask[t]] == [0.0] * int((~mask).sum())
    half = 0.5**0.5
    if name == "turn-returns":  # returns 1.1, 1, 1 and 0.5, 0.5
        assert [rows[0][0], rows[0][6], rows[0][9]] == pytest.approx([half, half, 0.0])
        assert [rows[1][0], rows[1][5]] == pytest.approx([-half, -half])


def test_step_rewards_of_turns_reach_process_supervision():
    """The steps of an episode end where its turns do; observations lie between."""
    batch = batch_of("grpo-process", (LONG, SHORT), (SCORES[0], Score(0.5, steps=((1, 0.5),))))
    batch = batch.replace(logprobs=torch.full_like(batch.mask, -1.0, dtype=torch.float32))
    prepared = trew.preset("grpo-process", beta=0.0).prepare(batch.replace(ref_logprobs=None))
    assert prepared.advantages is not None
    long, short = prepared.advantages.split([10, 6])
    mean, std = 1.6 / 3, torch.tensor([0.1, 1.0, 0.5]).std().item()
    z = [(value - mean) / std for value in (0.1, 1.0, 0.5)]
    assert long[[0, 1]].tolist() == pytest.approx([z[0] + z[1]] * 2, rel=1e-5)
    assert long[[6, 8, 9]].tolist() == pytest.approx([z[1]] * 3, rel=1e-5)
    assert short.tolist() == pytest.approx([z[2], 0, 0, 0, 0, 0], rel=1e-5)


def test_objectives_that_read_no_turns_get_none():
    assert batch_of("grpo", (LONG, SHORT, FAILED), SCORES).turns is None


def test_states_are_all_known_or_none():
    batch = batch_of("gigpo", (LONG, episode((3, 1, None))), (SCORES[0], Score(0.5)))
    assert batch.turns is not None
    assert batch.states is None
    with pytest.raises(DataError, match="states: got None; gigpo needs it for its advantage"):
        trew.preset("gigpo", beta=0.0).prepare(batch)


@pytest.mark.parametrize(
    ("given", "reason"),
    [(set(), "without an [environment] a completion is one turn"),
     ({"turns"}, "the rollouts that are replayed name no states")],
)  # fmt: skip
def test_a_run_without_turns_or_states_is_refused(given, reason):
    config = parse({"model": "m", "objective": {"preset": "gigpo"}})
    known = compatibility.GIVEN | given
    (problem,) = compatibility.problems(trew.preset("gigpo"), config, given=known)
    assert problem.startswith("objective.preset: got 'gigpo', which")
    assert reason in problem
    assert compatibility.problems(trew.preset("gigpo"), config, given=known | {"turns", "states"}) == []
