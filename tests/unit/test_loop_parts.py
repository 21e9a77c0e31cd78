"""What an update does beside the policy's steps: a critic's, checks, what tables and errors are told."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import tiny
import trew
from rollouts_help import rollout
from test_loop_update import LENGTHS, Recorder, Run, run, scored, updated
from trew.config import parse
from trew.errors import NumericsError
from trew.eval import evaluate
from trew.learner import Accumulated
from trew.rewards import RewardSet
from trew.runs.rollouts import write_rollouts
from trew.training import guards, loop, record
from trew.training.batch import keep_schedule
from trew.types import Group, Prompt, Rollout, Sampling, Score, ScoredGroup, StepOutput
from trew.utils.console import Silent


def test_learning_is_announced_before_the_policy_is_asked_anything():
    j = Run()
    run(j)
    assert j.asked_before == []
    assert j.policy.asked


class Critic:
    """Stands in for a critic whose values are the tokens' positions in the step."""

    def __init__(self, policy: Recorder) -> None:
        self.policy, self.steps = policy, []

    def values(self, samples: list[Any]) -> torch.Tensor:
        return torch.arange(sum(len(s.token_ids) for s in samples), dtype=torch.float32)

    def step(self, samples: list[Any], batch: trew.TokenBatch) -> StepOutput:
        self.steps.append((samples, batch, self.policy.version))
        return StepOutput(0.0, {}, 0.0, 1)


@pytest.mark.parametrize(("warmup", "learned"), [(0, 2), (1, 0)])
def test_a_critic_learns_each_minibatch_first_and_alone_while_it_warms_up(warmup, learned):
    j = Run(trew.preset("ppo"), minibatch_prompts=2)
    j.config = dataclasses.replace(j.config, critic=dataclasses.replace(j.config.critic, warmup_steps=warmup))
    j.critic = Critic(j.policy)
    attempt = updated(j, scored([[1.0, 0.0]] * 4))
    assert (len(attempt.critic_updates), len(attempt.updates)) == (2, learned)
    assert [before for *_, before in j.critic.steps] == ([0, 1] if learned else [0, 0])
    # Two groups of the four each, with the values of their own tokens.
    assert [len(samples) for samples, *_ in j.critic.steps] == [4, 4]
    lengths = [sum(map(sum, LENGTHS[:2])), sum(map(sum, LENGTHS[2:]))]
    first, second = (batch.values.tolist() for _, batch, _ in j.critic.steps)
    assert first == list(range(lengths[0]))
    assert second == list(range(lengths[0], sum(lengths)))


def test_the_tables_get_the_effects_of_every_minibatch_and_the_references_log_probs(monkeypatch):
    added: list[list[int]] = []
    monkeypatch.setattr(loop.TokenEffects, "add", lambda self, done, positions: added.append(list(positions)))
    attempt = updated(Run(minibatch_prompts=2), scored([[1.0, 0.0]] * 4))
    assert added == [[0, 1, 2, 3], [4, 5, 6, 7]]
    found = np.concatenate(attempt.effects.columns()["ref_logprobs"])
    assert (found == -7.0).all()


@pytest.mark.parametrize("checked", ["check_given", "check_advantages"])
def test_numbers_are_checked_before_the_policy_moves(monkeypatch, checked):
    def refuses(batch: trew.TokenBatch) -> None:
        assert (batch.advantages is None) == (checked == "check_given")
        raise NumericsError("refused")

    monkeypatch.setattr(loop, checked, refuses)
    j = Run()
    with pytest.raises(NumericsError, match="refused"):
        updated(j, scored([[1.0, 0.0]] * 4))
    assert j.policy.version == 0
    assert (j.policy.asked == []) == (checked == "check_given")


def test_an_error_in_a_minibatch_names_the_samples_of_the_step():
    j = Run(minibatch_prompts=2)

    def fails(samples: list[Any], batch: trew.TokenBatch) -> Accumulated:
        if len(j.policy.batches) == 1:
            raise NumericsError("not finite", names="1 (group 2)", quantity="logprobs", samples=(1,), values={1: [0.0]})
        return Recorder.accumulate(j.policy, samples, batch)

    j.policy.accumulate = fails
    with pytest.raises(NumericsError) as error:
        updated(j, scored([[1.0, 0.0]] * 4))
    assert tuple(error.value.samples) == (5,)


def test_a_number_of_an_environment_is_not_taken_for_a_share_of_endings():
    """One called "failed" said that environments fail, and one called "turns" hid how many episodes ran out of them."""
    turn = rollout(2).turns[0]
    said = {"turns": 7.0, "failed": 1.0, "moves": 2.0, "tool_calls": 1.0}
    played = [Rollout((dataclasses.replace(turn, metrics=said),), ending=ending) for ending in ("done", "turns")]
    row = record.episode_row(played)
    assert row["environment/turns"] == 0.5
    assert "environment/failed" not in row
    own = {"environment/own/turns": 7.0, "environment/own/failed": 1.0, "environment/moves": 2.0, "tool_calls": 1.0}
    assert row.items() >= own.items()


def test_groups_whose_rewards_differ_by_rounding_alone_have_no_signal():
    """0.1 + 0.2 is not 0.3 in float64; in the objective the two are equal, and their advantages are 0."""
    equal, other = scored([[0.1 + 0.2, 0.3], [0.3, 0.4], [0.0, 0.0], [0.0, 0.0]])[:2]
    assert [record.is_without_signal(group) for group in (equal, other)] == [True, False]


def test_a_row_of_data_that_a_step_has_twice_is_two_groups_of_the_table(tmp_path):
    """As where an epoch of demonstrations ends within a step: both rows had the number and the effects of the last."""
    first, other = scored([[1.0, 1.0]] * 4)[:2]
    step = [first, other, first]
    values = [np.full(len(r.token_ids), i, np.float32) for i, r in enumerate(r for g in step for r in g.group.rollouts)]
    write_rollouts(tmp_path / "t.parquet", step, step=1, trained_on=step, effects={"weights": values})
    table = pq.read_table(tmp_path / "t.parquet", columns=["trained_group", "weights"]).to_pydict()
    assert table["trained_group"] == [0, 0, 1, 1, 2, 2]
    assert [row[0] for row in table["weights"]] == [0, 1, 2, 3, 4, 5]


def test_episodes_that_are_out_of_turns_were_not_cut_off_at_the_limit_of_tokens():
    """The warning about cut completions advised a larger rollout.max_tokens to runs whose episodes use all turns."""
    turn, cut = rollout(2).turns[0], rollout(2, finish="length").turns[0]
    played = [Rollout((turn,), "truncated", ending="turns"), Rollout((turn, cut), "truncated", ending="length"),
              Rollout((turn,), "truncated", ending="tokens"), Rollout((turn,), "finished", ending="done")]  # fmt: skip
    group = ScoredGroup(Group(Prompt("a", text="?"), tuple(played)), (Score(0.0),) * 4)
    config = parse({"model": "m", "environment": {"name": "guess"}})
    plan = SimpleNamespace(config=config, correct=lambda score: False, rewards=RewardSet(()))
    assert record.rollout_row(plan, [group])["truncated_share"] == 0.25
    found = evaluate(
        lambda prompts, **_: [group.group], [group.group.prompt], SimpleNamespace(names=(), score=lambda _: [group]),
        samples=4, sampling=Sampling(max_tokens=2), correct=lambda score: False,
    )  # fmt: skip
    assert found.truncated_share == 0.25


def test_a_checkpoint_that_was_saved_again_is_one_from_before_the_bad_steps(tmp_path):
    """Its name has a counter, and the message said that no checkpoint is from before."""
    (tmp_path / "000002.1").mkdir()
    (tmp_path / ".tmp-000001-7").mkdir()
    program = SimpleNamespace(
        state=SimpleNamespace(step=4, bad_steps=2), folder=SimpleNamespace(checkpoints=tmp_path),
        config=SimpleNamespace(learner=SimpleNamespace(bad_steps=2)),
    )  # fmt: skip
    with pytest.raises(NumericsError, match=r"The checkpoint of step 2 is from before\."):
        guards.end_if_broken(program, NumericsError("x"), "x")


def test_a_schedule_ends_with_the_run_where_dynamic_sampling_drops_groups(tmp_path):
    """Their optimizer steps were missing in it: a rate that is to fall to 0 ended at nearly half."""
    (tmp_path / "r.py").write_text(
        "import zlib\ndef f(completions, **_):\n    return [float(zlib.crc32(c.encode()) % 2) for c in completions]\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(20)))
    recipe = {
        "model": str(tiny.save(tmp_path / "model")), "steps": 4, "out": str(tmp_path / "run"),
        "data": {"train": str(tmp_path / "rows.jsonl")}, "rewards": [{"name": f"{tmp_path}/r.py:f"}],
        "rollout": {"prompts": 4, "completions": 2, "max_tokens": 4, "refills": 0}, "objective": {"preset": "dapo"},
        "learner": {"lr": 1e-3, "schedule": "linear", "minibatch_prompts": 1}, "eval": {"size": 4},
    }  # fmt: skip
    trew.train(recipe, display=Silent())
    rows = [row for row in trew.load_run(tmp_path / "run").rows if "reward" in row]
    assert any(row["zero_signal_share"] for row in rows[:-1])
    # Of 16 optimizer steps, those of the last step are the 13th to the 16th.
    assert 0 < rows[-1]["lr"] <= 1e-3 * (1 - 12 / 16)


def test_a_critic_s_schedule_counts_the_steps_in_which_it_learns_alone():
    config = parse({"model": "m", "steps": 9, "objective": {"preset": "ppo"}, "critic": {"warmup_steps": 2}})
    policy, critic = SimpleNamespace(steps=0), SimpleNamespace(steps=0)
    for step, expected in ((1, (0, 0)), (3, (0, 2)), (5, (2, 4))):
        keep_schedule(config, policy, critic, step)
        assert (policy.steps, critic.steps) == expected
