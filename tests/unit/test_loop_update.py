"""What the loop hands to the learner: minibatches with their own denominators, one frozen old policy, fresh seeds."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import trew
from engine_help import ScriptedEngine
from rollouts_help import rollout
from trew.config import parse
from trew.eval import correct_by
from trew.learner import Accumulated
from trew.rollout import StepRollouts
from trew.rollout.sync import SyncRollouts, sampling
from trew.runs.rollouts import Sampler
from trew.training import loop
from trew.training.attempt import Attempt
from trew.training.batch import to_batch
from trew.training.record import advantages_of, update_row
from trew.types import Group, Prompt, Rollout, Score, ScoredGroup, Span, StepOutput
from trew.weights import InPlace

LENGTHS = [[1, 2], [3, 4], [5, 6], [7, 8]]  # four groups of two


class Recorder:
    """Stands in for the learner and keeps what it was given; log-probs change with every update, as weights would."""

    def __init__(self) -> None:
        self.version = 0
        self.reference_version: int | None = None
        self.batches: list[trew.TokenBatch] = []
        self.samples: list[list[Any]] = []
        self.asked: list[str] = []

    def verify(self, samples: list[Any]) -> None:
        pass

    def logprobs(self, samples: list[Any], *, reference: bool = False) -> torch.Tensor:
        self.asked.append("reference" if reference else "policy")
        count = sum(len(s.token_ids) for s in samples)
        return torch.full((count,), -7.0 if reference else -1.0 - self.version)

    def untempered(self, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append("untempered")
        count = sum(len(s.token_ids) for s in samples)
        return torch.full((count,), -1.0 - self.version), torch.full((count,), 2.0)

    def score_norms(self, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append("score norms")
        count = sum(len(s.token_ids) for s in samples)
        return torch.full((count,), -1.0 - self.version), torch.full((count,), 0.25)

    def accumulate(self, samples: list[Any], batch: trew.TokenBatch) -> Accumulated:
        self.batches.append(batch)
        self.samples.append(samples)
        return Accumulated(samples, batch, active=[])

    def apply(self, done: Accumulated) -> StepOutput:
        self.version += 1
        return StepOutput(0.0, {}, 0.0, self.version)


def completion(length: int, prompt: int = 0) -> Rollout:
    return rollout(length, logprobs=-1.0, policy_logprobs=-1.0, entropies=1.0, prompt_ids=[prompt])


def scored(rewards: list[list[float]]) -> list[ScoredGroup]:
    out = []
    for g, (lengths, values) in enumerate(zip(LENGTHS, rewards, strict=True)):
        group = Group(Prompt(uid=str(g), text="q"), tuple(completion(n, g) for n in lengths))
        out.append(ScoredGroup(group, tuple(Score(v, parts={"r": v}) for v in values)))
    return out


class Run:
    """What ``update`` reads of a TrainingRun."""

    def __init__(self, objective: trew.Objective | None = None, **learner: Any) -> None:
        self.config = parse({"model": "m", "rollout": {"prompts": 4, "completions": 2}, "learner": learner})
        self.objective = objective or trew.preset("grpo", beta=0.1)
        self.rewards: Any = SimpleNamespace(rewards=[SimpleNamespace(name="r", weight=1.0)])
        self.policy = Recorder()
        self.critic: Any = None
        self.asked_before: list[str] | None = None  # of the policy, when learning began

    @property
    def plan(self) -> Any:
        return SimpleNamespace(
            sampler=Sampler(self.config.cluster.rollout, self.config.learner.dtype),
            config=self.config,
            objective=self.objective,
            rewards=self.rewards,
            right=correct_by("r"),
        )

    def learning(self) -> None:
        self.asked_before = list(self.policy.asked)


def updated(j: Run, groups: list[ScoredGroup], baselines: dict[str, float] | None = None) -> Attempt:
    attempt = Attempt(1, j.policy.version, rollouts=StepRollouts(tuple(groups), tuple(groups), baselines))
    loop.update(j, attempt)  # type: ignore[arg-type]
    return attempt


def run(j: Run) -> Recorder:
    updated(j, scored([[1.0, 0.0]] * 4))
    return j.policy


class Calls:
    """Stands in for a TrainingRun of three steps without a group to train on, and notes what is asked of it."""

    def __init__(self) -> None:
        self.config = parse({"model": "m", "learner": {"reference_every": 2}})
        self.said: list[str] = []
        self.engine: Any = SimpleNamespace(version=0)
        self.policy: Any = SimpleNamespace(version=5, update_reference=lambda: self.said.append("reference"))
        self.weights: Any = SimpleNamespace(publish=lambda policy, engine: self.said.append("publish"))
        self.rollouts: Any = SimpleNamespace(next=self.next, trained=lambda *a: self.said.append(f"trained {a}"))

    def next(self, step: int) -> StepRollouts:
        self.said.append(f"next {step}")
        return StepRollouts((), ())

    def steps(self) -> Any:
        return iter((1, 2, 3))

    @contextlib.contextmanager
    def attempt(self, step: int) -> Any:
        self.said.append("begin")
        yield Attempt(step, 0)
        self.said.append("end")

    def record(self, attempt: Attempt) -> None:
        self.said.append(f"record {attempt.step}")

    def finish(self) -> dict[str, Any]:
        return {"steps": 2}


def test_the_loop_tells_each_part_what_it_needs_to_know_in_order():
    """Also where a step trained on nothing: engine and source must learn the version all the same. The reference that
    moves after step 2 does so behind what is measured and saved there."""
    calls = Calls()
    assert loop.train(calls) == {"steps": 2}  # type: ignore[arg-type]
    assert calls.said == [
        "begin", "next 1", "end", "publish", "trained (1, 5)", "record 1",
        "begin", "next 2", "end", "publish", "trained (2, 5)", "record 2",
        "begin", "next 3", "reference", "end", "publish", "trained (3, 5)", "record 3",
    ]  # fmt: skip


def test_each_optimizer_step_divides_by_its_own_sequences_and_tokens():
    batches = run(Run(minibatch_prompts=2)).batches
    assert [b.denominators.sequences for b in batches] == [4, 4]
    assert [b.denominators.tokens for b in batches] == [1 + 2 + 3 + 4, 5 + 6 + 7 + 8]


def test_the_old_policy_is_frozen_over_all_updates_and_the_reference_is_another():
    learner = run(Run(minibatch_prompts=2, inner_updates=2))
    assert len(learner.batches) == 4
    for batch in learner.batches:
        assert set(batch.old_logprobs.tolist()) == {-1.0}
        assert set(batch.ref_logprobs.tolist()) == {-7.0}


def test_one_update_on_policy_needs_no_old_logprobs():
    assert [b.old_logprobs for b in run(Run()).batches] == [None]


def test_samples_and_batch_are_of_the_same_groups_in_the_same_order():
    learner = run(Run(minibatch_prompts=2))
    for start, samples, batch in zip((0, 2), learner.samples, learner.batches, strict=True):
        assert [s.group for s in samples] == [start, start, start + 1, start + 1] == batch.group_ids.tolist()
        assert [len(s.token_ids) for s in samples] == batch.lengths.tolist()
        assert batch.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_the_engine_is_told_the_version_of_the_weights():
    j = Run(minibatch_prompts=2, inner_updates=2)
    run(j)
    engine: Any = SimpleNamespace(version=-1)
    InPlace().publish(j.policy, engine)  # type: ignore[arg-type]
    assert engine.version == 4


def test_every_step_refill_and_seed_draws_anew_and_the_same_again():
    seeds = {
        (seed, step, attempt): sampling(parse({"model": "m", "seed": seed}), step, attempt).seed
        for seed in (0, 1)
        for step in (1, 2, 11)
        for attempt in (0, 1)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert sampling(parse({"model": "m"}), 2, 1).seed == seeds[0, 2, 1]


@pytest.mark.parametrize(
    ("values", "share"), [([[1.0, 0.0]] * 4, 1.0), ([[1.0, 1.0]] * 4, 0.0), ([[1.0, 0.0], *[[0.0, 0.0]] * 3], 0.25)]
)
def test_a_step_that_teaches_nothing_is_counted(values, share):
    assert update_row(updated(Run(), scored(values)), 1)["advantage_share"] == share


def test_a_step_without_a_group_to_train_on_has_no_advantages():
    assert update_row(Attempt(1, 0, rollouts=StepRollouts((), ())), 0) == {"advantage_share": 0.0}


# ---- what the objective is given before it prepares


def test_the_samplers_own_log_probs_serve_as_old_ones_where_they_are_the_same_numbers(monkeypatch):
    objective = trew.preset("dr-grpo")
    off = 5e-5

    def logprobs(self, samples):
        self.asked.append(str(len(samples)))
        return torch.full((sum(len(s.token_ids) for s in samples),), -1.0 + off)

    monkeypatch.setattr(Recorder, "logprobs", logprobs)
    same = run(Run(objective, minibatch_prompts=2))
    assert same.asked == ["4"]  # two completions of the first and the last group
    assert {v for b in same.batches for v in b.old_logprobs.tolist()} == {-1.0}
    off = 5e-4
    assert run(Run(objective, minibatch_prompts=2)).asked == ["4", "8"]
    off = 0.0
    for change in ("bfloat16", "plain", "version", "cut", "servers"):
        j = Run(objective, minibatch_prompts=2, **({"dtype": "bfloat16"} if change == "bfloat16" else {}))
        if change == "plain":
            j.config = dataclasses.replace(j.config, kernels="plain")
        if change == "servers":  # in another process: a few rollouts that agree do not prove the others
            cluster = dataclasses.replace(j.config.cluster, rollout="vllm")
            j.config = dataclasses.replace(j.config, cluster=cluster)
        if change == "cut":
            j.config = dataclasses.replace(j.config, rollout=dataclasses.replace(j.config.rollout, top_k=3))
        if change == "version":
            j.policy.version = 1
        expected = {"version": [], "cut": ["8"]}  # nothing to compare; the old policy of older weights is the sampler
        assert run(j).asked == expected.get(change, ["4", "8"]), change


@pytest.mark.parametrize(("temperature", "asked"), [(1.0, ["untempered"]), (0.5, ["untempered", "policy"])])
def test_entropies_that_the_engine_does_not_give_are_the_policys(temperature, asked):
    """From one pass with the old log-probs where both are at temperature 1."""
    j = Run(trew.preset("entropy-advantage"), minibatch_prompts=2)
    sampled = dataclasses.replace(j.config.rollout, temperature=temperature)
    cluster = dataclasses.replace(j.config.cluster, rollout="vllm")
    j.config = dataclasses.replace(j.config, rollout=sampled, cluster=cluster)
    groups = scored([[1.0, 0.0]] * 4)
    silent = [
        dataclasses.replace(g, group=Group(g.group.prompt, tuple(map(without_entropies, g.group.rollouts))))
        for g in groups
    ]
    updated(j, silent)
    assert [name for name in j.policy.asked if name != "reference"] == ["policy", *asked]  # first the canary
    for batch in j.policy.batches:
        assert set(batch.entropies.tolist()) == {2.0}
        assert set(batch.old_logprobs.tolist()) == {-1.0}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_score_norms_are_the_policys_before_the_first_update(temperature):
    """At the training temperature, so that the same pass gives the old log-probs; once for all updates of the step."""
    j = Run(trew.preset("otb"), minibatch_prompts=2)
    sampled = dataclasses.replace(j.config.rollout, temperature=temperature)
    j.config = dataclasses.replace(j.config, rollout=sampled)
    updated(j, scored([[1.0, 0.0]] * 4))
    assert j.policy.asked == ["policy", "score norms"]  # first the canary
    assert len(j.policy.batches) == 2
    for batch in j.policy.batches:
        assert set(batch.score_norms.tolist()) == {0.25}
        assert set(batch.old_logprobs.tolist()) == {-1.0}


def without_entropies(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, turns=tuple(dataclasses.replace(t, entropies=None) for t in rollout.turns))


def test_rollouts_of_older_weights_have_a_ratio_other_than_1_also_in_a_single_step():
    j = Run(trew.preset("dr-grpo"))
    j.policy.version = 3
    attempt = updated(j, scored([[1.0, 0.0]] * 4))
    assert {v for b in j.policy.batches for v in b.old_logprobs.tolist()} == {-1.0}  # the sampler's
    assert attempt.canary is not None
    assert (attempt.canary.gap, attempt.canary.cut) == (None, False)
    row = update_row(attempt, j.policy.version)
    assert (row["staleness"], row["fresh_share"], row["canary_gap"]) == (3, 0.0, None)


def test_where_the_objective_corrects_for_the_sampler_old_log_probs_are_the_policys_own():
    j = Run(trew.preset("grpo", beta=0.0, correction="tis"))
    j.policy.version = 1
    run(j)
    assert {v for b in j.policy.batches for v in b.old_logprobs.tolist()} == {-2.0}


def test_a_single_token_of_older_weights_makes_a_step_off_policy():
    groups = scored([[1.0, 0.0]] * 4)
    turns = [r.turns[0] for g in groups for r in g.group.rollouts]
    fresh = [dataclasses.replace(turn, versions=(Span(1, 0, len(turn.token_ids)),)) for turn in turns]
    # The first of the group that the canary would look at: its log-probs are another policy's.
    count, other = len(turns[2].token_ids), np.full_like(turns[2].logprobs, -3.0)
    fresh[2] = dataclasses.replace(turns[2], logprobs=other, versions=(Span(0, 0, 1), Span(1, 1, count)))
    left = iter(fresh)
    groups = [
        ScoredGroup(Group(g.group.prompt, tuple(Rollout((next(left),)) for _ in g.group.rollouts)), g.scores)
        for g in groups
    ]
    j = Run(trew.preset("dr-grpo"))
    j.policy.version = 1
    j.policy.logprobs = lambda samples, **_: torch.full((sum(len(s.token_ids) for s in samples),), -1.0)
    attempt = updated(j, groups)
    assert all(b.old_logprobs is not None for b in j.policy.batches)
    assert attempt.canary is not None
    assert attempt.canary.gap == 0.0  # the other rollouts are compared
    assert 0.9 < update_row(attempt, 2)["fresh_share"] < 1


def test_only_what_is_read_is_computed_and_the_stand_in_for_the_policys_log_probs_is_never_read():
    plain = trew.preset("dr-grpo")
    assert run(Run(plain)).asked == ["policy"]  # a few completions, to compare with the sampler's
    assert run(Run(plain, minibatch_prompts=2)).asked == ["policy"]
    assert run(Run()).asked == ["policy", "reference"]
    for learner in (run(Run()), run(Run(plain, minibatch_prompts=2, inner_updates=2))):
        for batch in learner.batches:
            assert batch.logprobs.isnan().all()
            assert batch.advantages.isfinite().all()
            assert batch.token_weights.isfinite().all()


@pytest.mark.parametrize("moving", [{}, {"minibatch_prompts": 2}], ids=["one optimizer step", "two"])
def test_a_kl_on_the_reward_is_that_of_the_policy_that_sampled(moving):
    """Old log-probs are -1, the reference's -7, so a completion of T tokens has 6 T of it."""
    learner = run(Run(trew.preset("reinforce", beta=0.25), **moving))
    # The canary's, then those that are compared with the reference's: the sampler's would differ by rounding.
    assert learner.asked == ["policy", "reference", "policy"]
    advantages = torch.cat([b.advantages for b in learner.batches]).tolist()
    expected = [a for g in LENGTHS for n, r in zip(g, (1, 0), strict=True) for a in [r - 0.25 * 6 * n] * n]
    assert advantages == pytest.approx(expected)
    to_go = run(Run(trew.preset("reinforce", beta=0.25, kl_place="to-go"), **moving)).batches[-1]
    assert to_go.advantages[-3:].tolist() == pytest.approx([-0.25 * 6 * k for k in (3, 2, 1)])
    # With one optimizer step the ratio is exactly 1: the policy's own log-probs, not two that differ by rounding.
    assert all((b.old_logprobs is None) == (not moving) for b in learner.batches)


@pytest.mark.parametrize(("correction", "has"), [("none", {3: -7.0, 4: -1.0}), ("tis", {3: -6.0, 4: -6.0})])
def test_tokens_of_the_weights_that_the_reference_has_are_compared_by_its_own_log_probs(correction, has):
    """Of version 5, the reference has 3, completions are of 3 and 4; by the sampler, all log-probs are -1."""
    objective = trew.preset("reinforce", beta=0.25, kl="k1", kl_place="reward", correction=correction)
    j = Run(objective)
    j.policy.version, j.policy.reference_version = 5, 3
    groups, versions = [], []
    for group in scored([[1.0, 0.0]] * 4):
        turns = [r.turns[0] for r in group.group.rollouts]
        turns = [dataclasses.replace(t, versions=(Span(3, 0, 1), Span(4, 1, len(t.token_ids)))[: len(t.token_ids)])
                 for t in turns]  # fmt: skip
        versions += [v for t in turns for v in [3] + [4] * (len(t.token_ids) - 1)]
        groups.append(ScoredGroup(Group(group.group.prompt, tuple(Rollout((t,)) for t in turns)), group.scores))
    updated(j, groups)
    assert j.policy.batches[0].old_logprobs.tolist() == [has[version] for version in versions]


def test_shares_belong_to_the_minibatch_and_advantages_to_the_whole_step():
    objective = trew.preset("token-mean-local", microbatch=3)
    whole, parts = run(Run(objective)), run(Run(objective, minibatch_prompts=2))
    assert [float(b.token_weights.sum()) for b in parts.batches] == pytest.approx([1.0, 1.0])
    assert torch.equal(torch.cat([b.advantages for b in parts.batches]), whole.batches[0].advantages)
    # Blocks of three completions within each minibatch of four: the fourth is a block of its own.
    assert parts.batches[1].token_weights.tolist() == pytest.approx([1 / (2 * 18)] * 18 + [1 / (2 * 8)] * 8)
    whitened = run(Run(trew.preset("reinforce-pp", beta=0.0), minibatch_prompts=2)).batches
    all_of_it = torch.cat([b.advantages for b in whitened])
    assert float(all_of_it.mean()) == pytest.approx(0, abs=1e-6)
    assert abs(float(whitened[0].advantages.mean())) > 1e-3  # not whitened once more


# ---- rewards one by one, and the greedy answer


def two_rewards() -> list[ScoredGroup]:
    groups = scored([[1.0, 0.0]] * 4)
    for i, group in enumerate(groups):
        first = Score(1.5, parts={"r": 1.0, "s": 5.0 + i})
        second = Score(None, parts={"r": 0.0, "s": None}) if i == 0 else Score(0.0, parts={"r": 0.0, "s": None})
        groups[i] = ScoredGroup(group.group, (first, second))
    return groups


def test_an_objective_that_normalises_each_reward_gets_them_one_by_one():
    j = Run(trew.preset("gdpo"))
    j.rewards = SimpleNamespace(
        rewards=[SimpleNamespace(name="r", weight=2.0), SimpleNamespace(name="s", weight=0.5)],
        each=lambda score: tuple(None if score.value is None else score.parts[name] for name in "rs"),
    )
    _, batch = to_batch(j.plan, StepRollouts(tuple(two_rewards()), ()))
    assert batch.reward_weights.tolist() == [2.0, 0.5]
    assert batch.rewards[0].tolist() == [1.0, 5.0]
    assert batch.rewards[1].isnan().tolist() == [True, True]  # it has no value: nothing of it is known
    assert batch.rewards[3].isnan().tolist() == [False, True]  # the second reward does not apply
    j.objective = trew.preset("grpo")
    _, batch = to_batch(j.plan, StepRollouts(tuple(two_rewards()), ()))
    assert batch.reward_weights is None
    assert batch.rewards.shape == (8,)


def test_the_baseline_is_the_greedy_answers_reward_or_the_prompt_takes_no_part():
    """Prompt 0's greedy answer has a reward; 1's has none; 2's lacks a reward that others of the group have."""
    answers = [Score(0.25, parts={"r": 0.25, "s": 1.0}), Score(None, parts={}), Score(0.5, parts={"r": 0.5, "s": None}),
               Score(0.75, parts={"r": 0.75, "s": 1.0})]  # fmt: skip
    groups = two_rewards()
    j = Run(trew.preset("remax"), minibatch_prompts=2)
    weighted = [SimpleNamespace(name="r", weight=1.0), SimpleNamespace(name="s", weight=0.1)]
    j.rewards = SimpleNamespace(
        rewards=weighted,
        score=lambda given, step: [ScoredGroup(g, (a,)) for g, a in zip(given, answers, strict=True)],
    )
    engine = ScriptedEngine()
    source: Any = SyncRollouts(
        engine, config=j.config, objective=j.objective, prompts=[g.group.prompt for g in groups], rewards=j.rewards,
        correct=correct_by("r"),
    )  # type: ignore[arg-type]  # fmt: skip
    found = source._baselines(groups, source.prompts, 3)
    how = [(request.sample, request.sampling) for request in engine.submitted]
    assert [(n, s.temperature, s.top_p, s.max_tokens) for n, s in how] == [(0, 0.0, 1.0, 256)] * 4
    assert found["0"] == 0.25
    assert found["3"] == 0.75
    assert np.isnan([found["1"], found["2"]]).all()
    weighted[1].weight = 0.0  # measured, not trained on
    assert source._baselines(groups, source.prompts, 3)["2"] == 0.5

    attempt = updated(j, groups, found)
    row, advantages = update_row(attempt, 2), advantages_of(attempt)
    assert (row["baseline"], row["baseline/none"]) == (0.5, 0.5)
    first, second = j.policy.batches
    assert first.advantages.tolist() == [1.25, 0, 0, *[0.0] * 7]  # the second of prompt 0 has no reward itself
    assert first.lengths.tolist() == [1, 0, 0, 0]
    assert second.lengths.tolist() == [0, 0, 7, 8]
    assert second.advantages[-8:].tolist() == [-0.75] * 8
    assert (first.denominators.tokens, second.denominators.tokens) == (1, 15)
    assert [a.any() for a in advantages[1]] == [False, False]
