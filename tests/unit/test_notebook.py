"""Runs in a notebook: the block below the cell, its pictures, and what trew.train takes from Python."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

import tiny
import trew
from rollouts_help import answers
from trew.config import LearnerConfig, parse
from trew.errors import ConfigError, DataError
from trew.runs import RunFolder, notebook
from trew.training import start
from trew.types import Prompt, Score, ScoredGroup
from trew.utils.console import Display, Silent

CELL = 'style="text-align:right;padding:2px 8px"'


@pytest.fixture
def shown(monkeypatch):
    """A notebook's block that is drawn into ``shown.drawn`` and not with IPython."""

    class Drawn(notebook.Notebook):
        def __init__(self):
            super().__init__()
            self.drawn = []

        def show(self, *, least_s=0.0):
            self.drawn.append(self.html())

    return Drawn()


def table(folder, **more):
    return {
        "model": str(tiny.save(folder / "model")), "steps": 3, "out": str(folder / "run"),
        "data": {"task": "arithmetic"}, "rollout": {"prompts": 2, "completions": 2, "max_tokens": 4},
        "eval": {"size": 4}, **more,
    }  # fmt: skip


def test_a_recipe_may_be_a_mapping_and_rows_are_told_as_they_are_written(tmp_path, shown):
    told = []
    summary = trew.train(table(tmp_path), set=["steps=2"], on_row=told.append, display=shown)
    assert summary["steps"] == 2
    assert start._config(table(tmp_path), "steps=2") == start._config(table(tmp_path), ["steps=2"])
    run = trew.load_run(tmp_path / "run")
    assert [row["step"] for row in told] == [0, 1, 2, 2] == [row["step"] for row in run.rows]
    assert told[1]["reward"] == run.rows[1]["reward"]
    assert told[0]["eval_accuracy"] == run.summary["before"]["accuracy"]["mean"]
    assert len(run.completions(1)) == 4
    with pytest.raises(DataError, match="kind: got 'eval', accepts 'rollouts' or 'evals'"):
        run.completions(kind="eval")
    block = shown.drawn[-1]
    assert "before training (n = 4)" in block
    assert "model: " not in block  # where files are is the command's affair
    assert any("training: " in at and 'value="1" max="2"' in at for at in shown.drawn)
    assert "data:image/svg+xml;base64," in block


def test_a_training_on_demonstrations_shows_its_loss(tmp_path, shown):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "completion": "a"}}\n' for i in range(9)))
    trew.train(
        {
            "model": str(tiny.save(tmp_path / "model")), "out": str(tmp_path / "run"), "eval": {"size": 1},
            "data": {"task": "demonstrations", "train": str(tmp_path / "rows.jsonl")}, "sft": {"batch": 4},
        },
        display=shown,
    )  # fmt: skip
    block = shown.drawn[-1]
    loss = trew.load_run(tmp_path / "run").summary["loss_after"]["mean"]
    assert f"after training (n = 1)</td><td {CELL}>{loss:.3f}</td><td {CELL}>-" in block
    assert ">gradient<" in block
    assert 'alt="loss over the steps"' in block
    # Of one row, without an interval.
    assert ">held out<" in trew.curves(tmp_path / "run", metrics="loss").svg


def test_a_held_out_loss_has_an_interval_where_its_rows_have_one(tmp_path):
    """That of a reward model has none."""
    for name, ends in (("sft", {"eval_loss_low": 0.5, "eval_loss_high": 0.7}), ("reward", {"eval_accuracy": 0.9})):
        with RunFolder.open(tmp_path / name) as run:
            for step in (1, 2):
                run.log({"step": step, "loss": 1 / step})
            run.log({"step": 2, "eval_loss": 0.6, **ends})
    assert ">held out, 95 %<" in trew.curves(tmp_path / "sft", metrics="loss").svg
    assert ">held out<" in trew.curves(tmp_path / "reward", metrics="loss").svg


@pytest.mark.parametrize(
    ("position", "sections", "said"),
    [
        (-1, {}, "position: got -1, accepts a whole number of at least 0"),
        (4, {"curriculum": {"share": 0.5}}, "position: got 4, accepts 0 with curriculum.share = 0.5"),
    ],
)
def test_a_place_at_which_a_run_cannot_begin_is_refused(tmp_path, position, sections, said):
    """A curriculum began with the first prompts whatever the place; a negative one was a ValueError in step 1."""
    with pytest.raises(ConfigError, match=said):
        trew.train(table(tmp_path, **sections), position=position, display=Silent())


def test_what_a_listener_raises_ends_the_run_and_it_can_be_resumed(tmp_path):
    def stop(row):
        if row["step"] == 2:
            raise ZeroDivisionError

    recipe = table(tmp_path, checkpoint={"every": 1})
    with pytest.raises(ZeroDivisionError):
        trew.train(recipe, on_row=stop, display=Silent())
    assert trew.train(recipe, resume=True, display=Silent())["steps"] == 3


def test_a_display_that_shows_a_second_run_tells_its_rows_to_that_run_s_listener_alone(tmp_path):
    display, first, second = Silent(), [], []
    trew.train(table(tmp_path, steps=1), on_row=first.append, display=display)
    trew.train(table(tmp_path, steps=1), overwrite=True, on_row=second.append, display=display)
    assert [row["step"] for row in first] == [row["step"] for row in second] == [0, 1, 1]


def test_the_threads_of_a_run_are_those_of_that_run_alone(tmp_path):
    """The next one with threads = 0 had them, too, where it leaves the number to torch."""
    before = torch.get_num_threads()
    during = []
    recipe = table(tmp_path, steps=1, threads=before + 1)
    trew.train(recipe, on_row=lambda row: during.append(torch.get_num_threads()), display=Silent())
    assert (set(during), torch.get_num_threads()) == ({before + 1}, before)


def test_a_recipe_without_a_file_needs_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="out: is missing"):
        trew.train({"model": "m"})
    with pytest.raises(ConfigError, match="lrr"):
        trew.train({"model": str(tmp_path), "out": "x", "learner": {"lrr": 1.0}})
    with pytest.raises(ConfigError, match="no such recipe"):
        trew.train(tmp_path / "none.toml")


def test_a_config_with_overrides_is_the_same_as_its_recipe(tmp_path):
    made = table(tmp_path, objective={"preset": "dapo", "eps_high": 0.3}, rewards=[{"name": "arithmetic"}])
    config = start._config(parse(made), ["learner.lr=1e-5", "objective.eps_high=0.4"])
    assert (config.learner.lr, config.objective.args["eps_high"], config.rewards[0].name) == (1e-5, 0.4, "arithmetic")
    assert made["objective"]["eps_high"] == 0.3


def test_a_config_that_was_changed_in_python_is_checked_like_a_recipe(tmp_path):
    """dataclasses.replace takes any value: a path as ``out`` ended in a TypeError, a seed of 1.5 was taken."""
    config = parse(table(tmp_path))
    assert start._config(config, []) == config
    counted = dataclasses.replace(config, steps=np.int64(2), learner=LearnerConfig(lr=np.float32(0.5)))
    found = start._config(counted, [])
    assert (type(found.steps), found.steps, type(found.learner.lr), found.learner.lr) == (int, 2, float, 0.5)
    wrong = dataclasses.replace(config, out=tmp_path / "run", seed=1.5, learner=LearnerConfig(lr="1e-5"))
    for overrides in ([], ["steps=2"]):
        with pytest.raises(ConfigError) as error:
            start._config(wrong, overrides)
        assert [line.partition(":")[0] for line in error.value.problems] == ["seed", "out", "learner.lr"]


def test_text_of_models_is_never_markup(shown):
    hostile = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m"
    group = answers(Prompt("q", text=hostile), hostile, hostile)
    shown.samples([ScoredGroup(group, (Score(1.0), Score(0.0)))])
    shown.line(hostile)
    shown.warn(hostile)
    block = shown.drawn[-1]
    assert "<script" not in block
    assert "<img" not in block
    assert "\x1b" not in block
    assert block.count("&lt;script&gt;") == 5


def test_curves_of_a_second_or_a_resumed_run_do_not_run_back(shown):
    def steps():
        return [(row["step"], row.get("reward", "held out")) for row in shown._rows]

    shown.evaluated({"step": 0, "eval_accuracy": 0.5})
    for step in (1, 2, 3):
        shown.step({"step": step, "reward": 0.1})
    shown.step({"step": 3, "reward": 0.2})  # resumed from the checkpoint of step 2
    shown.evaluated({"step": 3, "eval_accuracy": 0.5})
    assert steps() == [(0, "held out"), (1, 0.1), (2, 0.1), (3, 0.2), (3, "held out")]
    shown.evaluated({"step": 0, "eval_accuracy": 0.5})  # another run
    shown.step({"step": 1, "reward": 0.3})
    assert steps() == [(0, "held out"), (1, 0.3)]


def test_data_sets_and_agreement_with_pairs_are_in_its_table_as_in_a_terminal(shown):
    interval = {"mean": 0.5, "low": 0.25, "high": 0.75}
    none = {"mean": None, "low": None, "high": None}
    sets = {"sums": {"n": 4, "accuracy": interval}, "puzzles": {"n": 0, "accuracy": none}}
    shown.before_after({"n": 4, "accuracy": interval, "sets": sets}, None)
    assert f"– sums (n = 4)</td><td {CELL}>0.500</td><td {CELL}>0.250 to 0.750</td>" in shown.drawn[-1]
    assert f"– puzzles (n = 0)</td><td {CELL}>-</td><td {CELL}>no verdicts</td>" in shown.drawn[-1]
    found = {"rows": 4, "loss": interval, "perplexity": 1.649}
    for more, wanted in (({}, ("perplexity", "1.649")), ({"accuracy": {"mean": 0.875}}, ("accuracy", "0.875"))):
        shown.losses(found | more, found | more)
        assert f">{wanted[0]}</th>" in shown.drawn[-1]
        assert shown.drawn[-1].count(f">{wanted[1]}</td>") == 2


def test_outside_a_notebook_lines_are_printed():
    assert not notebook.in_notebook()
    assert type(notebook.display()) is Display


def test_curves_are_a_picture_of_all_runs(tmp_path):
    for name, end in (("a", 1.0), ("b", 0.5)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [f'{{"step": {i}, "reward": {i / 10 * end}, "accuracy": 0.5}}\n' for i in range(1, 11)]
        rows.append('{"step": 10, "eval_accuracy": 0.5, "eval_low": 0.4, "eval_high": 0.6, "eval_n": 9}\n')
        rows.append('{"step": 20, "eval_accuracy": 0.9}\n')  # no interval
        (folder / "metrics.jsonl").write_text("".join(rows))
    picture = trew.curves(tmp_path / "a", str(tmp_path / "b"), metrics=["reward", "accuracy"])
    svg = picture._repr_svg_()
    assert ET.fromstring(svg).tag.endswith("svg")
    for name in ("a reward", "b accuracy", "a held out, 95 %"):
        assert name in svg
    assert trew.curves(tmp_path / "a", metrics="reward") == trew.curves(tmp_path / "a", metrics=["reward"])
    # The mean is over steps: the last five have one evaluation.
    held_out = {"metrics": ["eval_accuracy"]}
    assert trew.curves(tmp_path / "a", **held_out) == trew.curves(tmp_path / "a", **held_out, window=1)
    with pytest.raises(ConfigError, match=r"metrics: got 'rewrad' \(did you mean 'reward'\?\), accepts reward, "):
        trew.curves(tmp_path / "a", metrics=["accuracy", "rewrad"])
    with pytest.raises(ConfigError, match="got no run"):
        trew.curves()
    with pytest.raises(ConfigError, match="metrics: got none"):
        trew.curves(tmp_path / "a", metrics=[])
    for window in (0, -1):  # of all steps before, and a ZeroDivisionError
        with pytest.raises(ConfigError, match=f"window: got {window}, accepts"):
            trew.curves(tmp_path / "a", window=window)
    picture.save(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text() == svg


def test_a_metric_or_a_step_that_a_run_does_not_have_is_refused(tmp_path):
    """Both were empty lists, as of a run that has not begun."""
    with RunFolder.open(tmp_path / "run") as folder:
        for step in (1, 2, 4):
            folder.log({"step": step, "reward": 0.5, "reward/math": 0.5, "loss": float("nan")})
            group = ScoredGroup(answers(Prompt("p", text="1+1="), "2"), (Score(1.0),))
            folder.write_rollouts(step, [group])
    run = trew.load_run(tmp_path / "run")
    assert run.column("reward") == ([1, 2, 4], [0.5] * 3)
    assert len(run.completions(2)) == 1 == len(run.completions())
    for name, meant in {"rewrd": "reward", "reward/maths": "reward/math", "clip_shar": "clip_share"}.items():
        with pytest.raises(DataError, match=rf"has no metric '{name}' \(did you mean '{meant}'\?\); it has reward, "):
            run.column(name)
    assert run.column("loss") == ([1, 2, 4], [None] * 3)
    for name in ("kl", "eval_accuracy", "age/2", "reward/math/timeout"):  # which other runs have
        assert run.column(name) == ([], []), name
    with pytest.raises(DataError, match=r"^step: got 99, .* there are 3 steps from 1 to 4, the nearest is 4$"):
        run.completions(99)
    with pytest.raises(DataError, match=r"^step: got 1, but .* has no evals of it; there are none of any step$"):
        run.completions(1, kind="evals")
    assert run.completions(kind="evals") == []


def test_of_a_run_that_has_just_begun_every_metric_is_empty(tmp_path):
    with RunFolder.open(tmp_path / "run") as folder:
        folder.log({"step": 0, "eval_accuracy": 0.5})
    assert trew.load_run(tmp_path / "run").column("reward/mine") == ([], [])


def test_a_report_is_written_of_folders_that_are_texts(tmp_path):
    """As of load_run and curves; one alone is no list of letters."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert trew.report.write_report(str(tmp_path)) == trew.report.write_report([str(tmp_path)])
    assert trew.report.write_report(tmp_path) == tmp_path / "report.html"
    assert trew.report.write_report([tmp_path], str(tmp_path / "other.html")) == tmp_path / "other.html"
