"""What pages list, compared with the code that decides it: statuses, columns, files of a run's folder."""

from __future__ import annotations

import inspect
import json
import re
import typing
from pathlib import Path

import pytest
import torch

from trew.diagnostics import monitors
from trew.integrations.trl.refusals import of_objective
from trew.objective import TokenBatch, preset, presets
from trew.objective.imitation import DEMONSTRATED
from trew.objective.options import CORRECTIONS
from trew.reward_training import program as reward_program
from trew.rewards.combine import FAILED
from trew.runs.layout import LOCK, RUN
from trew.runs.rollouts import schema
from trew.training import frozen, summary
from trew.types import Ending, ScoreStatus

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def named(text: str) -> set[str]:
    """What stands between backticks in a text."""
    return set(re.findall(r"`([^`\n]+)`", text))


def test_pages_name_every_status_of_a_score():
    statuses = set(typing.get_args(ScoreStatus))
    [table] = re.findall(r"^\| status \|.*?\n\n", page("rewards.md"), re.M | re.S)
    assert statuses - named(table) == set()
    [column] = re.findall(r"`status` \(.*?\), `parts`", page("runs.md"), re.S)
    assert statuses - named(column) == set()


def test_pages_name_every_status_that_counts_as_failed():
    [failed] = re.findall(r"^\| `max_failed` .*$", page("configuration.md"), re.M)
    assert set(FAILED) - named(failed) == set()
    [unknown] = re.findall(r"\*could not\* judge a completion \((.*?)\)", page("rewards.md"), re.S)
    assert set(FAILED) == named(unknown)


def test_every_column_of_a_table_of_rollouts_is_named():
    section = page("runs.md").partition("## rollouts and evals")[2].partition("### What the update did")[0]
    assert set(schema().names) - named(section) == set()
    assert {ending for ending in typing.get_args(Ending) if ending} - named(section) == set()


def test_every_file_of_a_run_is_listed():
    [files] = re.findall(r"^    config\.toml .*?\n\n", page("runs.md"), re.M | re.S)
    listed = {name.partition("/")[0] for name in re.findall(r"[\w.]+/?[\w.]*", files)}
    own = {"config.toml", "summary.json", "report.html", RUN.rows, *RUN.files, *RUN.folders, *RUN.foreign, LOCK}
    assert own - listed == set()


def test_every_figure_of_a_summary_is_named():
    section = page("runs.md").partition("## summary.json")[2].partition("\n## ")[0]
    code = "".join(inspect.getsource(part) for part in (summary.summarize, summary._measured))
    assert set(re.findall(r'"(\w+)": ', code)) - {"trew", "python", "torch", "transformers"} - named(section) == set()


def test_how_much_monitors_need_before_they_warn():
    """With any less, an effect of the order is not judged, however large it is."""
    [said] = re.findall(r"no warnings before (\d+) completions \((.*?)\)", page("rewards.md"), re.S)
    least = {name: int(count) for names, count in re.findall(r"([^:;]+): (\d+)", said[1]) for name in named(names)}
    assert int(said[0]) == monitors.LEAST
    assert least.keys() == {"order", "length_gap", "rows", "exits"}
    for name in ("order", "rows"):
        for count, warned in ((least[name] - 1.0, False), (float(least[name]), True)):
            figures = {name: (count, count), f"{name}_variance": (1.0, count), f"{name}_deviation": (1.0, count)}
            assert bool(monitors._order_effect(figures, name, "half")) == warned
    for name in ("length_gap", "exits"):
        assert monitors._mean({name: (1.0, 1.0)}, name, least=least[name]) == 0.0
        assert least[name] == monitors.LEAST // 4


def test_pages_name_what_ends_an_episode_and_nothing_else():
    [cause] = re.findall(r"^\| turns.* are used up.*$", page("environments.md"), re.M)
    assert named(cause.rpartition("counts it as")[2]) == set(typing.get_args(Ending)) - {"", "done", "length", "failed"}
    assert "time" not in cause


def test_pages_agree_on_checkpoints_of_runs_that_save_none_by_themselves():
    """Every kind of training saves when it is asked to stop: :meth:`trew.training.program.Program.steps`."""
    rows = [re.findall(r"^\| `(?:checkpoint\.)?every` .*steps between .*checkpoints.*$", page(name), re.M)
            for name in ("configuration.md", "reward-models.md")]  # fmt: skip
    assert [row.endswith("and one at the end; 0: only on an interrupt |") for [row] in rows] == [True, True]


def test_every_metric_of_a_reward_models_training_is_named():
    section = page("reward-models.md").partition("## Training one")[2].partition("\n## ")[0]
    parts = (reward_program.RewardProgram.step, reward_program.RewardProgram.evaluate, reward_program._scores)
    metrics = {name for part in parts for name in re.findall(r'"(\w+)": ', inspect.getsource(part))}
    assert {"loss", "margin", "eval_auc"} <= metrics
    assert metrics - {"step"} - named(section) == set()


def test_the_page_of_misconceptions_says_which_deviation_of_the_batch_a_preset_takes():
    batch = TokenBatch.from_padded(
        logprobs=torch.zeros(5, 3), mask=torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]),
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]), group_ids=torch.tensor([0, 0, 1, 1, 1]),
    )  # fmt: skip
    of_group = torch.tensor([1 / 2, -1 / 2, 1 / 3, 1 / 3, -2 / 3])
    per_token = of_group[batch.sequence_ids]
    divisors = {
        "the standard deviation of the raw rewards": batch.total_rewards.std(),
        "that of the rewards minus their group's mean": of_group.std(),
        "the same with each completion counted once for each of its tokens": per_token.std(),
    }
    text = " ".join(page("notes.md").partition('**"Batch standard deviation"**')[2].partition("\n\n")[0].split())
    told = re.findall(r"(?:meanings: |, or |, )([^,]+) \(`([\w-]+)`\)", text)
    assert [name for _, name in told] == ["lite-ppo", "scalerl", "reinforce-pp-baseline"]
    for what, name in told:
        advantages = preset(name, beta=0.0).prepare(batch).advantages
        divisor = (of_group.max() - of_group.min()) / (advantages.max() - advantages.min())
        assert float(divisor) == pytest.approx(float(divisors[what]), rel=1e-5), name


def test_the_page_of_a_step_says_what_becomes_of_groups_whose_rewards_are_equal():
    text = page("loop.md").partition("Without dynamic sampling a step keeps every group")[2].partition("\n\n")[0]
    left_out, learning = (named(part) for part in text.partition("averages.")[::2])
    kept = {name for name in presets() if not preset(name).dynamic_sampling and name != "ppo-clip"}
    kept -= {name for name in presets() if isinstance(preset(name).advantage, DEMONSTRATED)}
    logprobs = torch.full((8, 2), -1.0)
    ends = torch.tensor([2, 1, 2, 1, 2, 2, 1, 2])
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    steps = [[(int(end), float(reward))] for end, reward in zip(ends, rewards, strict=True)]
    batch = TokenBatch.from_padded(
        logprobs=logprobs, mask=torch.arange(2) < ends[:, None], rewards=rewards, group_ids=torch.arange(8) // 4,
        old_logprobs=logprobs, rollout_logprobs=logprobs, ref_logprobs=logprobs, teacher_logprobs=logprobs - 0.1,
        entropies=torch.ones(8, 2), score_norms=torch.ones(8, 2), values=torch.zeros(8, 2), baselines=torch.zeros(8),
        truncated=torch.zeros(8, dtype=torch.bool), max_length=2, step_rewards=steps, turns=steps, states=[["s"]] * 8,
    )  # fmt: skip
    dropped, moved = set(), set()
    for name in kept:
        done = preset(name).prepare(batch)
        equal = done.sequence_ids >= 4
        dropped |= set() if done.mask[equal].any() else {name}
        moved |= {name} if done.advantages[equal].any() else set()
    assert (left_out, learning) == (dropped, moved)


def test_pages_say_which_completions_cannot_have_a_gradient():
    batch = TokenBatch.from_padded(
        logprobs=torch.full((2, 1), -1.0), mask=torch.ones(2, 1), rewards=torch.ones(2), group_ids=torch.zeros(2).long()
    )
    objective = preset("grpo", beta=0.0)
    assert not objective.has_gradient(objective.prepare(batch)).any()
    liked = preset("grpo", beta=0.0, nll=0.1)
    assert liked.has_gradient(liked.prepare(batch)).all()
    for name in ("loop.md", "glossary.md"):
        [exceptions] = re.findall(r"cannot\s+have a gradient \(([^)]*)\)", page(name))
        assert "nll" in named(exceptions)


def test_pages_name_every_preset_that_must_see_the_whole_step():
    # Of what is sampled, and inside TRL's trainer, which samples.
    seeing = {name for name in presets() if preset(name).sees_step} - {"dpo"}
    [told] = re.findall(r"a rule that reads several completions \(([^)]*)\)", page("loop.md"))
    assert named(told) == seeing
    [told] = re.findall(r"([\w\s,-]+) need the whole optimizer step at once", page("trl.md"))
    assert set(re.findall(r"[\w-]+", told)) - {"and"} == seeing


def test_the_page_of_trl_names_every_option_that_is_refused_there():
    refused = page("trl.md").partition("## What is refused")[2].partition("\n## ")[0]
    for option, value in (("nll", 0.1), ("distill", 0.5)):
        assert of_objective(preset("grpo", **{option: value}))
        assert f"`{option}`" in refused


def test_the_page_of_metrics_says_where_the_loss_is_0():
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    fields = {"logprobs": torch.full((2, 3), -1.0), "mask": mask, "group_ids": torch.tensor([0, 0]), "max_length": 3}
    batch = TokenBatch.from_padded(rewards=torch.tensor([1.0, 0.0]), **fields)  # the worse one is longer
    of = {name: float(preset(name, beta=0.0).loss(batch).loss) for name in ("grpo", "dapo", "dr-grpo")}
    text = page("metrics.md").partition("`loss` is not on the list.")[2].partition("\n\n")[0]
    [zero] = re.findall(r"`([\w-]+)` has a loss of 0", text)
    [above] = re.findall(r"average over tokens \(([^)]*)\)", text)
    assert of[zero] == pytest.approx(0.0, abs=1e-6)
    assert min(of[name] for name in named(above)) > 0.1


def test_the_page_of_performance_says_why_a_ratio_may_be_outside_its_range():
    rows = json.loads((DOCS.parent / "benchmarks" / "results" / "step.json").read_text(encoding="utf-8"))["rows"]
    outside = [row for row in rows if not row["ratio_range"][0] <= row["ratio"] <= row["ratio_range"][1]]
    if outside:
        table = page("performance.md").partition("## One step, next to TRL")[2].partition("<!-- generated")[0]
        assert "may lie just outside" in " ".join(table.split())


def test_the_page_of_objectives_says_which_correction_does_without_the_samplers_log_probs():
    names = [name for name in CORRECTIONS if "rollout_logprobs" not in preset("grpo", correction=name).needs]
    text = page("objectives.md").partition("**Corrections** are for")[2].partition("\n\n")[0]
    assert re.findall(r"`([\w-]+)` judges .* takes `old_logprobs` for μ", " ".join(text.split())) == names == ["opsm"]


def test_the_page_of_a_step_says_when_log_probs_of_the_old_policy_are_computed():
    assert "objective.distillation > 0" in inspect.getsource(frozen._compared_in_advantages)
    [row] = re.findall(r"^\| `old_logprobs` \|.*$", page("loop.md"), re.M)
    assert "distill" in named(row)
