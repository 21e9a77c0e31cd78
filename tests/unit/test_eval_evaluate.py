"""evaluate() with completions and rewards that do exactly what each case needs."""

import dataclasses
import json
import math

import pytest

from rollouts_help import rollout
from trew.errors import ConfigError, DataError, EngineError
from trew.eval import correct_by, evaluate, wilson
from trew.types import Group, Prompt, Sampling, Score, ScoredGroup

GREEDY = Sampling(max_tokens=8, temperature=0.0)
SAMPLED = Sampling(max_tokens=8)


def completion(text, finish="stop"):
    return rollout(len(text), text=text, finish=finish)


def answering(answers):
    """Answers prompt i with the texts in ``answers[i]``."""

    def generate(prompts, *, n, sampling, progress=None):
        groups = []
        for p in prompts:
            texts = answers[int(p.uid)][:n]
            groups.append(Group(p, tuple(completion(t, "length" if t == "cut" else "stop") for t in texts)))
            if progress:
                progress(len(texts))
        return groups

    return generate


class Rewards:
    names = ("main", "format")

    def score(self, groups, *, step=0):
        value = {"right": 1.0, "wrong": 0.0, "cut": 0.0, "half": 0.5, "unknown": None}
        return [
            ScoredGroup(
                g, tuple(Score(value[c.text], parts={"main": value[c.text], "format": 0.5}) for c in g.rollouts)
            )
            for g in groups
        ]


def run(answers, *, samples=1, sampling=GREEDY, at=1.0, **kw):
    prompts = [Prompt(str(i), text="?") for i in range(len(answers))]
    return evaluate(
        answering(answers), prompts, Rewards(), samples=samples, sampling=sampling, correct=correct_by("main", at=at),
        **kw,
    )  # fmt: skip


def test_one_sample_per_prompt():
    result = run([["right"], ["wrong"], ["cut"], ["right"]])
    assert result.accuracy == wilson(2, 4)
    assert (result.n, result.samples, result.left_out) == (4, 1, 0)
    assert result.pass_at == {1: 0.5}
    assert result.mean_length == (5 + 5 + 3 + 5) / 4
    assert result.truncated_share == 0.25
    assert result.rewards == {"main": 0.5, "format": 0.5}
    assert result.prompt_accuracy == {"0": 1.0, "1": 0.0, "2": 0.0, "3": 1.0}


def test_several_samples_per_prompt():
    result = run([["right", "wrong", "wrong", "wrong"], ["wrong"] * 4, ["right"] * 4], samples=4, sampling=SAMPLED)
    assert result.accuracy.mean == pytest.approx((0.25 + 0 + 1) / 3)
    assert list(result.pass_at) == [1, 2, 4]
    assert result.pass_at[1] == pytest.approx(result.accuracy.mean)
    assert result.pass_at[2] == pytest.approx((0.5 + 0 + 1) / 3)
    assert result.pass_at[4] == pytest.approx(2 / 3)


def test_no_verdict_is_left_out_and_counted_never_wrong():
    result = run([["right", "unknown"], ["unknown", "unknown"], ["right", "right"]], samples=2, sampling=SAMPLED)
    assert result.accuracy.mean == 1.0
    assert (result.n, result.left_out, result.left_out_samples) == (2, 1, 3)
    assert result.rewards["main"] == 1.0
    assert "1" not in result.prompt_accuracy


def test_pass_at_k_says_how_many_prompts_have_enough_verdicts():
    rows = [["right"] * 4, ["right", "wrong", "unknown", "unknown"], ["wrong", "unknown", "unknown", "unknown"]]
    result = run([*rows, ["unknown"] * 4], samples=4, sampling=SAMPLED)
    assert result.n == 3
    assert result.pass_at_n == {1: 3, 2: 2, 4: 1}
    assert result.pass_at[4] == 1.0


def test_completions_that_nothing_judged_make_no_interval_narrower():
    """4 prompts with 2 verdicts each of 16 completions had the interval of 64 verdicts."""
    row = ["right", "wrong", *["unknown"] * 14]
    result = run([row] * 4, samples=16, sampling=SAMPLED)
    assert result.accuracy == wilson(4, 8)
    assert result.pass_at_intervals[1] == wilson(4, 8)
    assert run([["right", "wrong"]] * 4, samples=2, sampling=SAMPLED).accuracy == wilson(4, 8)


def test_what_was_left_out_is_told_with_its_reasons():
    class Failing(Rewards):
        def score(self, groups, *, step=0):
            late = Score(
                None, "timeout", {"main": None, "format": 0.5}, statuses={"main": "timeout", "format": "scored"}
            )
            lost = Score(None, "environment_error", {"main": None}, statuses={"main": "environment_error"})
            of = {"late": late, "lost": lost, "right": Score(1.0, parts={"main": 1.0}, statuses={"main": "scored"})}
            return [ScoredGroup(g, tuple(of[r.turns[-1].text] for r in g.rollouts)) for g in groups]

    def playing(prompts, *, n, sampling, progress=None):
        made = [completion("right"), completion("late"), completion("lost"), completion("lost")]
        error = "raised: Traceback (most recent call last):\n  ...\nKeyError: 'map'\n"
        failed = [dataclasses.replace(one, status="failed", error=error) for one in made[2:]]
        return [Group(p, (*made[:2], *failed)) for p in prompts]

    result = evaluate(
        playing, [Prompt("0", text="?")], Failing(), samples=4, sampling=SAMPLED, correct=correct_by("main")
    )
    assert result.omission == (
        "left out 3 completions without a verdict: 2 x the environment raised (KeyError: 'map'); "
        "1 x reward main: timeout"
    )
    assert run([["right"]]).omission == ""
    assert run([["right"], ["unknown"]]).omission.startswith(
        "left out 1 completion without a verdict, and 1 prompt without any: 1 x "
    )


def test_nothing_judged_is_unknown_not_zero():
    result = run([["unknown"], ["unknown"]])
    assert math.isnan(result.accuracy.mean)
    assert (result.accuracy.low, result.accuracy.high, result.n) == (0, 1, 0)
    assert result.pass_at == {}
    table = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert table["accuracy"] == {"mean": None, "low": 0, "high": 1}
    assert table["rewards"]["main"] is None


def test_correct_at_a_threshold():
    assert run([["half"], ["wrong"]], at=0.5).accuracy.mean == 0.5
    assert run([["half"], ["wrong"]]).accuracy.mean == 0.0


def test_progress_counts_completions():
    seen = []
    run([["right", "wrong"]] * 3, samples=2, sampling=SAMPLED, progress=seen.append)
    assert sum(seen) == 6


def test_unknown_reward_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'accuracy'.*main, format"):
        correct_by("accuracy")(Score(1.0, parts={"main": 1.0, "format": 0.5}))


def test_no_prompts():
    with pytest.raises(DataError, match="no prompts"):
        run([])


def test_greedy_samples_are_refused():
    with pytest.raises(ConfigError, match="temperature 0"):
        run([["right", "right"]], samples=2)


def test_an_engine_that_loses_a_group_or_a_completion_is_an_error():
    def lossy(prompts, **kw):
        return answering([["right"]] * 2)(prompts, **kw)[1:]

    prompts = [Prompt("0", text="?"), Prompt("1", text="?")]
    with pytest.raises(EngineError, match="not those of the 2 prompts"):
        evaluate(lossy, prompts, Rewards(), samples=1, sampling=GREEDY, correct=correct_by("main"))
    with pytest.raises(EngineError, match="has 1 completions, not 2"):
        run([["right"]], samples=2, sampling=SAMPLED)
