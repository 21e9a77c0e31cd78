"""Rules of a run's health: on made-up histories, at and just below each limit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trew.config import parse
from trew.diagnostics import health
from trew.diagnostics.health import ADVICE, COMPARES_PARTS, READ, RULES, Facts, Health, HealthConfig, findings
from trew.errors import ConfigError
from trew.objective import TokenBatch, preset, presets
from trew.objective.divergence import kl_value

Row = dict[str, Any]


def healthy(steps: int = 60) -> Iterator[Row]:
    """A run that learns: entropy and length fall, groups become alike, the ratio stays in its trust region."""
    for step in range(1, steps + 1):
        done = step / steps
        yield {
            "step": step, "entropy": 0.6 - 0.5 * done, "accuracy": 0.2 + 0.6 * done, "kl": 0.02 * done, "kl_old": 0.01,
            "ratio_q99": 1.3, "ratio_q01": 0.7, "advantage_share": 0.7 - 0.5 * done, "canary_gap": 1e-6,
            "zero_signal_share": 0.3 + 0.4 * done, "truncated_share": 0.3 - 0.2 * done, "staleness": 0,
            "completion_length": 20 - 14 * done,
            "changed_share": 0.999, "lr": 1e-5, "grad_norm": 3.0, "groups_trained": 8,
        }  # fmt: skip


def changed(first: int, **values: Any) -> list[Row]:
    """A healthy run that shows ``values`` from step ``first`` on."""
    return [row | (values if row["step"] >= first else {}) for row in healthy()]


ONSET: list[tuple[str, dict[str, Any], int, int, str]] = [
    # rule, what a healthy run shows from step 30 on, the step of the warning, of a rule that looks at ten, words
    ("entropy", {"entropy": 0.0}, 30, 38, "entropy fell from 0.554 to"),
    ("kl", {"kl": 1.0}, 30, 32, "the KL is 1 nats per token"),
    ("kl_old", {"kl_old": 0.2}, 30, 32, "the policy is 0.2 nats per token from where it began"),
    ("ratio", {"ratio_q99": 5.0}, 30, 32, "ratio above 5"),
    ("ratio", {"ratio_q01": 0.2}, 30, 32, "ratio below 0.2"),
    ("no_signal", {"advantage_share": 0.0}, 30, 34, "5 steps in a row in which no completion had an advantage"),
    ("zero_signal", {"zero_signal_share": 1.0}, 30, 38, "in 9"),
    ("short", {"groups_trained": 1}, 30, 35, "learn from 3.8 groups on average, not from rollout.prompts = 8"),
    ("truncated", {"truncated_share": 1.0}, 30, 33, "are cut off at the limit of rollout.max_tokens = 256"),
    ("length", {"completion_length": 90.0, "accuracy": 0.1}, 30, 35, "accuracy from 0.26 to 0.25"),
    ("stale", {"staleness": 1}, 30, 30, "1 updates old"),
    ("unchanged", {"changed_share": 0.1}, 30, 32, "leave 90.0% of the weights as they are at a learning rate of 1e-05"),
    ("clipped", {"grad_norm": 100.0}, 30, 32, "the gradient norm is 100, cut down to learner.max_grad_norm = 1"),
    ("mismatch", {"canary_gap": 5e-4}, 30, 32, "differ by 0.0005 nats"),
    ("corrected", {"corrected_share": 0.25}, 30, 32, "25% of tokens are beyond the limits of the correction"),
    ("waiting", {"waited_s": 6.0, "seconds": 10.0}, 30, 34, "the learner waits for completions 60% of the time"),
    ("idle", {"idle_s": 7.0, "seconds": 10.0}, 30, 34, "servers have nothing to do 70% of the time"),
]  # fmt: skip
TABLE = {"rollout": {"prompts": 8, "completions": 8, "max_tokens": 256}, "learner": {"max_grad_norm": 1.0}}


@pytest.mark.parametrize(
    ("rule", "values", "first", "step", "says"), ONSET, ids=[f"{r}-{next(iter(v))}" for r, v, *_ in ONSET]
)
def test_each_rule_speaks_once_when_it_begins_to_hold_and_says_what_to_do(rule, values, first, step, says):
    found = [f for f in findings(changed(first, **values), TABLE) if f.rule == rule]
    assert [f.step for f in found] == [step], found
    assert says in found[0].text
    assert ADVICE[rule][1:] in found[0].text
    assert rule in Health(Facts.of(TABLE)).facts.health.__dataclass_fields__ or rule in {"stale", "short"}


def test_the_distance_of_older_rollouts_is_not_said_to_be_that_of_one_step():
    for key in ({"rollout": {"stale_steps": 1}}, {"cluster": {"staleness": 1}}, {"rollout": {"replay": "runs/a"}}):
        (found,) = findings(changed(30, kl_old=0.2), key)
        assert "the policy is 0.2 nats per token from the one that its ratio is measured against" in found.text
        assert "from where it began" not in found.text


def test_a_healthy_run_is_left_alone():
    assert findings(healthy(), TABLE) == []
    assert findings(healthy(8), TABLE) == []


@pytest.mark.parametrize(
    "values",
    [
        {"entropy": 0.0, "accuracy": 0.95},  # it knows the answers
        {"completion_length": 3.0, "accuracy": 0.9},  # shorter and better
        {"completion_length": 60.0, "accuracy": 0.9},
        {"kl": 0.99}, {"kl_old": 0.19}, {"ratio_q99": 4.9}, {"ratio_q01": 0.21}, {"advantage_share": 0.01},
        {"zero_signal_share": 0.89}, {"truncated_share": 0.49}, {"changed_share": 0.11}, {"grad_norm": 99.0},
        {"canary_gap": 4.9e-4}, {"groups_trained": 5},
        {"entropy": None, "kl": float("nan"), "grad_norm": None, "changed_share": None},
    ],
)  # fmt: skip
def test_just_below_a_limit_nothing_is_said(values):
    assert findings(changed(30, **values), TABLE) == []


def test_one_row_is_not_enough_where_it_may_be_chance():
    rows = [
        row | ({"kl": 9.0, "ratio_q99": 50.0, "grad_norm": 1e4} if row["step"] % 3 == 0 else {}) for row in healthy()
    ]
    assert findings(rows, TABLE) == []


def test_it_is_said_again_after_the_cooldown_and_not_before():
    rows = [{**row, "truncated_share": 0.9} for row in healthy(125)]
    assert [f.step for f in findings(rows, TABLE)] == [10, 60, 110]
    flapping = [{**row, "staleness": row["step"] % 2} for row in healthy(60)]
    assert [f.step for f in findings(flapping, TABLE)] == [1, 51]
    assert [f.step for f in findings(flapping, {"health": {"cooldown": 20}})] == [1, 21, 41]


@pytest.mark.parametrize("evaluation", [{"eval_accuracy": 0.5}, {"eval_loss": 1.5}])
def test_evaluations_are_no_steps(evaluation):
    """A report reads all rows, a run that trains those of its steps alone: both must say the same."""
    steps = changed(12, truncated_share=0.9)
    rows = [row for step in steps for row in (step, {"step": step["step"], **evaluation})]
    assert findings(rows, TABLE) == findings(steps, TABLE) != []


def test_rollouts_that_were_to_be_older_are_no_surprise():
    rows = changed(1, staleness=1)
    assert {f.rule for f in findings(rows, TABLE)} == {"stale"}
    # A replay's are those of another run, whose updates count, too; no engine could have got them.
    for key in ({"rollout": {"stale_steps": 1}}, {"cluster": {"staleness": 1}}, {"rollout": {"replay": "runs/a"}}):
        assert findings(rows, {**TABLE, **key}) == []


@pytest.mark.parametrize(
    "objective",
    [{"preset": "gdpo"}, {"preset": "grpo-process"}, {"preset": "gigpo"}, {"preset": "grpo", "overlong_cache": 8}],
)
def test_equal_sums_are_no_lack_of_a_signal_where_something_else_is_compared(objective):
    rows = changed(1, zero_signal_share=1.0)
    plain = {"preset": "grpo", "overlong_cache": 0}
    assert {f.rule for f in findings(rows, {**TABLE, "objective": plain})} == {"zero_signal"}
    assert findings(rows, {**TABLE, "objective": objective}) == []


def test_a_replay_has_the_groups_that_it_was_given():
    rows = changed(1, groups_trained=1)
    assert {f.rule for f in findings(rows, TABLE)} == {"short"}
    assert findings(rows, {"rollout": {"prompts": 8, "replay": "runs/a"}}) == []


def test_groups_of_one_never_have_a_signal_of_their_own():
    rows = changed(1, zero_signal_share=1.0)
    assert [f.rule for f in findings(rows, {"rollout": {"completions": 1}})] == []
    assert [f.rule for f in findings(rows, TABLE)][:1] == ["zero_signal"]


@pytest.mark.parametrize("name", presets())
def test_equal_rewards_are_no_warning_where_groups_of_them_teach(name):
    objective, rewards = preset(name), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    given = {
        "rewards": rewards, "baselines": torch.full((6,), 0.5), "values": torch.zeros(6, 1),
        "teacher_logprobs": torch.full((6, 1), -2.0), "entropies": torch.ones(6, 1), "score_norms": torch.ones(6, 1),
        "rollout_logprobs": torch.full((6, 1), -1.0), "ref_logprobs": torch.full((6, 1), -1.0), "max_length": 1,
        "step_rewards": [[(1, reward)] for reward in rewards.tolist()], "states": [["s"]] * 6,
        "turns": [[(1, reward)] for reward in rewards.tolist()],
    }  # fmt: skip
    if name in ("ppo-clip", "sft", "rft", "dpo"):
        return  # advantages of one's own; rows of data, of which there are no groups
    batch = objective.prepare(
        TokenBatch.from_padded(
            logprobs=torch.full((6, 1), -1.0),
            mask=torch.ones(6, 1),
            group_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
            **given,
        )
    )
    # Group 1 is all right, group 2 all wrong: reinforce and online-rft learn from the former alone.
    right, wrong = ((batch.advantages[at] != 0).all() for at in (slice(2, 4), slice(4, 6)))
    for accuracy, teaches in ((0.95, right), (0.0, wrong)):
        rows = changed(1, zero_signal_share=1.0, accuracy=accuracy)
        found = {f.rule for f in findings(rows, TABLE | {"objective": {"preset": name}})} - {"length"}
        # Of parts, of which some may differ, the sums say nothing; the rule no_signal does.
        assert found == (set() if teaches or name in COMPARES_PARTS else {"zero_signal"})


@pytest.mark.parametrize("name", presets())
def test_the_likelihood_of_right_completions_teaches_where_groups_of_them_are_kept(name):
    """With nll, a step of right completions alone has a gradient and no advantage."""
    kept = not preset(name).keep
    table = {"objective": {"preset": name, "nll": 0.1}}
    assert Facts.of(table).right_teaches == (kept or name == "online-rft")
    assert not Facts.of({"objective": table["objective"] | {"preset": "grpo", "dynamic_sampling": True}}).right_teaches
    rows = changed(1, advantage_share=0.0, accuracy=1.0)
    found = {f.rule for f in findings(rows, TABLE | table)}
    assert ("no_signal" in found) == (not kept)
    assert "no_signal" in {f.rule for f in findings(changed(1, advantage_share=0.0, accuracy=0.0), TABLE | table)}


def test_equal_rewards_are_no_warning_beside_a_teacher():
    rows = changed(1, zero_signal_share=1.0)
    for objective in ({"preset": "grpo", "distill": 0.5}, {"preset": "grpo", "args": {"distill": 0.5}}):
        assert findings(rows, TABLE | {"objective": objective}) == []
    for baseline, said in (("none", set()), ("batch", set()), ("group", {"zero_signal"})):
        table = TABLE | {"objective": {"preset": "reinforce", "baseline": baseline}}
        assert {f.rule for f in findings(rows, table)} == said
    for damaged in (3, {"preset": ["grpo"]}, {"preset": "grpo", "args": 3, "distill": "x"}):
        assert {f.rule for f in findings(rows, TABLE | {"objective": damaged})} == {"zero_signal"}


@pytest.mark.parametrize("key", [k for k in HealthConfig.__dataclass_fields__ if k not in ("window", "cooldown")])
def test_every_limit_is_a_setting_and_0_is_off(key):
    values = {k: v for rule, shown, *_ in ONSET if rule == key for k, v in shown.items()}
    assert key in {f.rule for f in findings(changed(20, **values), TABLE)}
    assert key not in {f.rule for f in findings(changed(20, **values), TABLE | {"health": {key: 0}})}


def test_sampler_and_learner_may_differ_more_in_16_bits():
    rows, half = changed(30, canary_gap=0.049), TABLE | {"learner": {"dtype": "bfloat16"}}
    assert [f.rule for f in findings(rows, TABLE)] == ["mismatch"]
    assert findings(rows, half) == []
    assert [f.rule for f in findings(changed(30, canary_gap=0.05), half)] == ["mismatch"]


def test_a_smaller_window_speaks_earlier():
    rows = changed(30, truncated_share=1.0)
    assert [f.step for f in findings(rows, TABLE | {"health": {"window": 2}})] == [30]


def test_evaluations_are_no_steps_and_settings_may_be_broken():
    rows = [r for row in changed(30, staleness=1) for r in (row, {"step": row["step"], "eval_accuracy": 0.5})]
    assert [f.step for f in findings(rows, {"health": {"window": "x", "kl": -3}, "rollout": 7})] == [30]


@pytest.mark.parametrize("rule", ["entropy", "length", "no_signal", "truncated", "kl"])
@pytest.mark.parametrize("cut", [3, 12, 33, 41])
def test_a_resumed_run_says_the_same(rule, cut):
    values = next(shown for name, shown, *_ in ONSET if name == rule)
    rows = changed(30, **values)
    facts = Facts.of(TABLE)
    first = Health(facts)
    for row in rows[:cut]:
        first.observe(row)
    resumed = Health(facts)
    resumed.load_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    again = [f for row in rows[cut:] for f in resumed.observe(row)]
    whole = findings(rows, TABLE)
    assert [f for f in whole if f.step > cut] == again
    assert resumed.found == whole


def test_settings_are_those_of_a_recipe_and_wrong_ones_are_refused():
    with pytest.raises(ConfigError) as error:
        parse({"model": "m", "health": {"window": 1, "kl": -1.0, "cooldown": 0}})
    assert [p.partition(":")[0] for p in error.value.problems] == ["health.window", "health.cooldown", "health.kl"]


def test_every_rule_has_advice_and_reads_what_is_kept():
    assert RULES.keys() == ADVICE.keys()
    read = set(READ)
    source = Path(health.__file__).read_text()
    assert set(re.findall(r'h\.(?:mean|at_first|newest)\("([a-z0-9_]+)"', source)) == read


@pytest.mark.parametrize(
    "huge", [1e308, -1e308, float("inf"), float("nan"), 10**400, -(10**400)], ids=lambda v: str(v)[:6]
)
def test_a_metric_or_a_setting_of_any_size_is_no_error(huge):
    for name in READ:
        found = findings(changed(1, **{name: huge}), TABLE)
        assert not any("nan" in f.text for f in found), found
    tables = [{"rollout": {"max_tokens": huge}}, {"learner": {"max_grad_norm": huge}}, {"health": {"kl": huge}}]
    for table in tables:
        assert isinstance(findings(healthy(), table), list)


@pytest.mark.parametrize("task", ["demonstrations", "pairs"])
def test_rows_of_data_that_are_cut_as_asked_are_no_completions_that_reached_the_limit(task):
    """The warning said to raise rollout.max_tokens, which a recipe of trew sft must not set."""
    rows = [{"step": step, "truncated_share": 1.0} for step in range(1, 20)]
    sampled = {"rollout": {"max_tokens": 256}}
    for data in ({"task": task}, [{"task": task, "name": "a"}, {"task": task, "name": "b"}]):
        assert findings(rows, {**sampled, "data": data}) == []
    assert [f.rule for f in findings(rows, {**sampled, "data": {"task": "gsm8k"}})] == ["truncated"]


@pytest.mark.parametrize("task", ["demonstrations", "pairs"])
def test_the_mean_of_k3_over_rows_of_data_is_no_distance_from_the_reference(task):
    """Of demonstrations it is large once they are learned; of pairs a few rejected tokens that became rare decide, and
    the advice was a KL term, which DPO refuses."""
    learned = kl_value(torch.full((100,), -0.4), ref_logprobs=torch.full((100,), -3.4))
    rows = [{"step": step, "kl": float(learned.mean())} for step in range(1, 20)]
    assert findings(rows, {"data": {"task": task}}) == []
    assert [f.rule for f in findings(rows, {"data": {"task": "gsm8k"}})] == ["kl"]
