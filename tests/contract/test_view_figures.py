"""What `trew view` says of a run in figures and words is what its report and its metrics say."""

from __future__ import annotations

import dataclasses

import pytest

from trew.runs import RunFolder
from trew.runs.report import load_run
from trew.types import Group, ScoredGroup
from view_help import client, episode, get, group, make_run, score, write_eval, write_step


def test_an_episode_that_is_out_of_turns_was_not_cut_off(tmp_path):
    """Its status is "truncated", too; the filter and the tag said that it had reached max_tokens."""
    asked, (done,) = episode("out").group.prompt, episode("out").group.rollouts
    out = dataclasses.replace(done, status="truncated", ending="turns")
    cut = dataclasses.replace(
        out, ending="length", turns=(done.turns[0], dataclasses.replace(done.turns[1], finish_reason="length"))
    )
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 1\n[objective]\npreset = 'grpo'\n")
        write_step(run, 1, ScoredGroup(Group(asked, (done, out, cut)), (score(0.5), score(0.5), score(0.0))))
    page = client(tmp_path)
    assert [row["truncated"] for row in get(page, "runs/x/rollouts")["rows"]] == [False, False, True]
    assert [row["sample"] for row in get(page, "runs/x/rollouts", truncated=1)["rows"]] == [2]
    assert [row["sample"] for row in get(page, "runs/x/rollouts", truncated=0)["rows"]] == [0, 1]
    assert get(page, "runs/x/completion", step=1, group=0, sample=1)["row"]["truncated"] is False


def test_findings_about_a_whole_run_are_those_of_its_report(tmp_path):
    """Failures of an environment were missing, and a step with a norm that is not finite counted as one without any."""
    failed = {"reward": None, "environment/failed": 1.0}
    bad = {"grad_norm": float("nan"), "bad_steps": 1, "zero_signal_share": 0.0}
    rows = {"failed": [failed, failed], "bad": [{"grad_norm": 0.0, "bad_steps": 0}, bad]}
    for name, each in rows.items():
        with RunFolder.open(tmp_path / name) as run:
            run.write_config("steps = 2\n[objective]\npreset = 'grpo'\n[environment]\nname = 'guess'\n")
            for step, row in enumerate(each, 1):
                run.log({"step": step, **row})
            run.write_summary({"steps": 2})
    page = client(tmp_path)
    shown = {name: get(page, f"runs/{name}/summary")["outcome"] for name in rows}
    assert shown == {name: load_run(tmp_path / name).outcome for name in rows}
    assert "100% of the episodes failed in their environment" in shown["failed"][0]
    assert shown["bad"] == []


def test_a_run_that_went_on_under_other_settings_says_so(tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 2\nseed = 3\n[objective]\npreset = 'grpo'\n")
        run.log({"step": 1, "reward": 0.5})
    page = client(tmp_path)
    assert get(page, "runs/x/summary")["outcome"] == []
    with RunFolder.open(tmp_path / "x", resume=True) as run:
        run.go_on_with("steps = 2\nseed = 4\n[objective]\npreset = 'grpo'\n", 1, free=())
    (told,) = get(page, "runs/x/summary")["outcome"]
    assert told == load_run(tmp_path / "x").changed[0]
    assert "After step 1 the run went on with changes: seed was 3, is 4." in told
    marks = [(mark["step"], mark["kind"], mark["text"]) for mark in get(page, "runs/x/metrics")["marks"]]
    assert (1, "event", told) in marks


def test_each_evaluation_has_its_own_number_of_prompts(tmp_path):
    """That before training had the number of the one after it: prompts without a verdict are left out."""
    ends = {"mean": 0.5, "low": 0.3, "high": 0.7}
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 1\n[objective]\npreset = 'grpo'\n")
        run.log({"step": 1, "reward": 0.5})
        run.write_summary(
            {"n_eval": 16, "accuracy_before": ends, "accuracy_after": ends, "before": {"n": 14}, "after": {"n": 16}}
        )
    found = get(client(tmp_path), "runs/x/summary")
    assert [found[when]["n"] for when in ("before", "after")] == [14, 16]


def test_metrics_say_whether_they_go_on_behind_those_that_were_read_before(tmp_path):
    """A page that has the first rows asks for the rest: of an overwritten run it would have rows of both."""
    make_run(tmp_path / "x", finished=False)
    page = client(tmp_path)

    def number():
        found = get(page, "runs/x/metrics")["read"]
        assert found == get(page, "runs")["runs"][0]["read"]
        return found

    first = number()
    with RunFolder.open(tmp_path / "x", resume=True) as run:
        write_step(run, 4, group("a", "x"))
    assert number() == first
    with RunFolder.open(tmp_path / "x", resume=True) as run:
        run.rewind(2)
    rewound = number()
    assert rewound != first
    with RunFolder.open(tmp_path / "x", overwrite=True) as run:
        run.write_config("steps = 9\n[objective]\npreset = 'grpo'\n")
        empty = [get(page, "runs/x/metrics")["read"] for _ in range(2)]
        for step in range(1, 6):
            write_step(run, step, group("a", "x"), seconds=1.0)
    assert empty[0] == empty[1] not in (first, rewound)
    assert number() not in (first, rewound)


def test_an_evaluation_has_as_many_groups_as_prompts(tmp_path):
    """With several completions of each prompt, too, which the page counted as groups of their own."""
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 1\n[objective]\npreset = 'grpo'\n")
        write_eval(run, 0, *(group(uid, "x", "y", "z", scores=(1.0, 0.0, None)) for uid in "ab"))
    assert get(client(tmp_path), "runs/x/steps")["evals"] == [{"step": 0, "rows": 6, "groups": 2, "mean": 0.5}]


def test_every_resume_has_a_mark(tmp_path):
    """Also one that took nothing back, after an interrupt, and a second one after the same step."""
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 30\n[objective]\npreset = 'grpo'\n")
        for step in range(1, 6):
            run.log({"step": step, "reward": 0.0})
        run.rewind(3)  # as an older version left it
        run.event("step 4: a reward failed")
        for lost in (True, True, False):
            run.rewind(3)
            run.event("continued after step 3")
            for step in (4, 5) if lost else ():
                run.log({"step": step, "reward": 0.0})
    marks = get(client(tmp_path), "runs/x/metrics")["marks"]
    assert [(mark["step"], mark["text"]) for mark in marks if mark["kind"] == "resumed"] == [
        (3, "continued after step 3")
    ] * 4


@pytest.mark.parametrize("last", [2, -1], ids=["a checkpoint", "none yet"])
def test_warnings_of_steps_that_a_resume_took_back_are_gone(last, tmp_path):
    """They stayed as marks at steps that then were other ones."""
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 30\n[objective]\npreset = 'grpo'\n")
        for step in range(1, 6):
            run.log({"step": step, "reward": 0.0})
        run.event("step 1: a server did not answer")
        run.event("step 4: a reward failed")
        run.rewind(last)
        run.event("step 5: what the evaluation dropped is counted after step 0")  # of the steps that were done again
    marks = [(mark["kind"], mark["step"]) for mark in get(client(tmp_path), "runs/x/metrics")["marks"]]
    kept = [("event", 1), ("resumed", 2)] if last > 0 else []
    assert marks == [*kept, ("event", 5)]


def test_a_setting_that_is_infinite_is_shown(tmp_path):
    """It looked as one that the run does not have."""
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 1\n[objective]\npreset = 'grpo'\neps_high = inf\n")
        write_step(run, 1, group("a", "x"))
    page = client(tmp_path)
    assert get(page, "runs/x/config")["values"]["objective.eps_high"] == "inf"
    (key,) = [key for key in get(page, "config", run="x")["keys"] if key["key"] == "objective.eps_high"]
    assert key["values"] == {"x": "inf"}


def test_lines_of_the_metrics_that_are_left_out_are_counted(tmp_path):
    """Their points were missing in the curves without a word; the report of the run told it."""
    folder = make_run(tmp_path / "x")
    page = client(tmp_path)
    assert get(page, "runs/x/summary")["problems"] == []
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "reward": 0.\nnot a row\n')
    assert get(page, "runs/x/summary")["problems"] == ["metrics.jsonl: left out 2 lines that are not metrics rows"]
    assert get(page, "runs/x/metrics", since=1)["problem"].startswith("metrics.jsonl: left out 2 lines")
    assert "left out 2 lines" in load_run(folder).notes[0]


def test_files_of_a_run_that_are_damaged_are_named(tmp_path):
    """A finished run without a word was one that had stopped, and one without settings."""
    folder = make_run(tmp_path / "x")
    page = client(tmp_path)
    for name in ("config.toml", "summary.json", "memory.json"):
        (folder / name).write_text("{damaged")
    (folder / "events.log").unlink(missing_ok=True)
    (folder / "events.log").symlink_to(folder / "config.toml")
    told = get(page, "runs/x/summary")["problems"]
    assert [text.partition(":")[0] for text in told] == ["config.toml", "summary.json", "memory.json", "events.log"]
    assert all("cannot be read" in text for text in told[:3]), told
