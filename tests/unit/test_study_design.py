"""The design of a study: what is refused, the order of runs, what is fixed by its digest, and what changed later."""

from __future__ import annotations

import itertools
import json

import pytest

from study_help import study, write
from trew.config.recipe import load as read
from trew.errors import ConfigError
from trew.study.design import Run, load, only, reported_runs, tuning_runs
from trew.study.history import History


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"basline": "clip"}, "basline: unknown key (did you mean 'baseline'?)"),
        ({"baseline": "clp"}, "baseline: got 'clp' (did you mean 'clip'?), accepts one of the algorithms"),
        ({"base": None}, "base: got None"),
        ({"seeds": 1}, "seeds: got 1, accepts a whole number from 2"),
        ({"tuning_seeds": 0}, "tuning_seeds: got 0"),
        ({"name": "a b"}, "name: got 'a b'"),
        ({"claims": "none"}, "claims: got 'none', accepts a list of texts"),
        ({"tasks": None}, "tasks: got None, accepts one table or more, as [tasks.NAME]"),
        ({"regimes": {"clip": {}}}, "the name is among regimes too"),
        ({"regimes": {"../out": {}}}, "regimes.../out: accepts names of letters"),
        ({"set": {"seed": 3}}, "set: sets seed, which the study gives each run itself"),
        ({"algorithms": {"clip": {"learner.lr": 0.1}}}, "algorithms.clip: sets learner.lr, which [tune] varies"),
        ({"tune": {"learner.lr": [0.1]}}, "tune: got"),
        ({"tune": {"learner.lr": [0.1, 0.1]}}, "two different numbers"),
        ({"tune": {"learner.lr": None, "learner": {}}}, "tune: got {'learner': {}}, accepts one setting with two"),
        ({"warm": {"accuracy": 2.0}}, "warm.accuracy: got 2.0, accepts a share"),
        ({"warm": {"heds": 2}}, "warm.heds: unknown key"),
        ({"warm": {}, "set": {"model": "lm"}}, "set: sets model, which the study gives each run itself"),
    ],
)
def test_what_is_wrong_with_a_design_is_named(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, **changes))
    assert message in str(caught.value)


def test_a_date_is_named_before_a_record_of_the_study_would_have_to_hold_it(tmp_path):
    design = write(tmp_path, 'model = "lm"\n[data.args]\nsince = 2020-01-01\n')
    with pytest.raises(ConfigError, match=r"data\.args\.since: got datetime\.date\(2020, 1, 1\), accepts texts"):
        load(design)
    design = write(tmp_path)
    design.write_text(design.read_text().replace('"learner.inner_updates" = 2', '"data.args.since" = 2020-01-01'))
    with pytest.raises(ConfigError, match=r"regimes\.off: data\.args\.since: got datetime"):
        load(design)


def test_a_missing_design_and_a_missing_recipe_are_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="no such recipe"):
        load(write(tmp_path, base="gone.toml"))


@pytest.mark.parametrize("table", ['track.to = ["tensorboard"]', 'rollout.replay = "runs/x"'])
def test_a_recipe_whose_settings_a_run_of_a_study_cannot_have_is_refused(table, tmp_path):
    recipe = 'model = "lm"\nsteps = 10\n'
    with pytest.raises(ConfigError, match=f"sets {table.partition(' ')[0]}, which runs of a study cannot have"):
        load(write(tmp_path, recipe + table))
    load(write(tmp_path, f"{recipe}track.to = []"))  # the default, written out


def test_every_beginning_of_the_runs_is_a_balanced_study(tmp_path):
    plan = study(tmp_path, regimes={"on": {}})
    assert len(plan.cells) == 6
    tuning = list(tuning_runs(plan, plan.cells))
    reported = list(reported_runs(plan, plan.cells, dict.fromkeys(plan.cells, 0.01)))
    assert (len(tuning), len(reported)) == (6 * 2 * 2, 6 * 10)
    for runs in (tuning, reported):
        seeds = [run.seed for run in runs]
        assert seeds == sorted(seeds)  # one seed of all cells after the other
        for _, of in itertools.groupby(runs, key=lambda run: run.seed):
            assert {run.cell for run in of} == set(plan.cells)
    assert not {run.seed for run in tuning} & {run.seed for run in reported}
    assert len({run.folder for run in [*tuning, *reported]}) == len(tuning) + len(reported)


def test_later_settings_win_and_threads_do_not_depend_on_jobs(tmp_path):
    plan = study(
        tmp_path, set={"steps": 1, "eval.size": 1}, tasks={"sums": {"steps": 2}}, regimes={"off": {"steps": 3}},
        algorithms={"clip": {"steps": 4}},
    )  # fmt: skip
    runs = {run.cell.algorithm: run for run in reported_runs(plan, plan.cells, dict.fromkeys(plan.cells, 0.01))}
    assert "steps=4" in plan.overrides(runs["clip"])
    assert "steps=3" in plan.overrides(runs["other"])
    for wanted in ("threads=1", "eval.size=1", "learner.lr=0.01", "seed=10"):
        assert wanted in plan.overrides(runs["other"])
    assert "threads=1" not in study(tmp_path, set={"threads": 2}).overrides(runs["clip"])


def test_only_names_cells_by_their_parts(tmp_path):
    plan = study(tmp_path, regimes={"on": {}})
    assert [cell.name for cell in only(plan, "on/clip")] == ["sums/on/clip"]
    assert len(only(plan, "off/sums")) == len(only(plan, "sums/off")) == 3
    assert only(plan, "") == plan.cells
    for wrong, message in (("of", "did you mean 'off'"), ("on/off", "names no cell")):
        with pytest.raises(ConfigError, match=message):
            only(plan, wrong)


def test_the_digest_is_of_everything_that_was_fixed(tmp_path):
    one = study(tmp_path)
    assert one.digest == study(tmp_path).digest
    others = [
        study(tmp_path, claims=["another"]), study(tmp_path, question="?"), study(tmp_path, seeds=11),
        study(tmp_path, baseline="same"), study(tmp_path, tune={"learner.lr": [0.001, 0.02]}),
        load(write(tmp_path, recipe='model = "lm"\nsteps = 11\n')),
    ]  # fmt: skip
    assert len({one.digest, *(other.digest for other in others)}) == 7


def test_a_whole_number_can_be_tuned(tmp_path):
    made = study(tmp_path, tune={"learner.lr": None, "rollout.completions": [8, 2, 4]})
    assert made.values == (2, 4, 8)
    overrides = made.overrides(Run(made.cells[0], made.values[1], 1))
    assert "rollout.completions=4" in overrides
    assert read(tmp_path / "r.toml", overrides).rollout.completions == 4


def test_lists_of_tables_and_empty_tables_replace_those_of_the_recipe(tmp_path):
    """As with --set: what the recipe says of another reward, or of other data, is not mixed with them."""
    recipe = 'model = "lm"\nsteps = 10\n[data.args]\nlargest = 9\n[[rewards]]\nname = "arithmetic"\nweight = 0.5\n'
    parts = {"rewards": [{"name": "gsm8k"}], "data": {"args": {}}}
    made = study(tmp_path, recipe=recipe, tasks={"sums": parts})
    config = read(tmp_path / "r.toml", made.overrides(Run(made.cells[0], None, 1)))
    assert [(reward.name, reward.weight) for reward in config.rewards] == [("gsm8k", 1.0)]
    assert config.data.args == {}


def test_a_claim_that_changes_after_the_first_run_is_shown_and_one_before_is_not(tmp_path):
    first, second, third = (study(tmp_path, claims=[claim]) for claim in ("a", "b", "c"))
    assert History.read(tmp_path).note(first, runs=0) == []
    assert History.read(tmp_path).note(second, runs=0) == []  # no run has been made under the first one
    assert History.read(tmp_path).lines() == []
    (line,) = History.read(tmp_path).note(third, runs=4)
    assert line == 'changed after 4 runs: claims was ["b"] and is ["c"]'
    assert History.read(tmp_path).note(third, runs=9) == []
    assert History.read(tmp_path).lines() == ['after 4 runs: claims was ["b"] and is ["c"]']


def test_runs_that_are_deleted_stay_in_the_history(tmp_path):
    first, second, third, fourth = (study(tmp_path, claims=[claim]) for claim in "abcd")
    History.read(tmp_path).note(first, runs=0)
    for _ in range(5):
        History.read(tmp_path).count()
    # All of them are gone, and so are those of the second design later.
    assert History.read(tmp_path).note(second, runs=0) == ['changed after 5 runs: claims was ["a"] and is ["b"]']
    for _ in range(3):
        History.read(tmp_path).count()
    (line,) = History.read(tmp_path).note(third, runs=2)
    assert line.startswith("changed after 8 runs: ")
    # Two ended before the study was killed, which counted none.
    (line,) = History.read(tmp_path).note(fourth, runs=4)
    assert line.startswith("changed after 10 runs: ")
    assert [line.partition(":")[0] for line in History.read(tmp_path).lines()] == [
        "after 5 runs", "after 8 runs", "after 10 runs"]  # fmt: skip


def test_a_history_without_counts_is_continued(tmp_path):
    """That of an older trew."""
    first, second, third = (study(tmp_path, claims=[claim]) for claim in "abc")
    old = [{"digest": of.digest, "runs_before": runs, "design": of.to_json()} for of, runs in ((first, 0), (second, 4))]
    (tmp_path / "history.json").write_text(json.dumps(old))
    assert History.read(tmp_path).note(second, runs=6) == []
    assert History.read(tmp_path).designs == tuple(old)
    (line,) = History.read(tmp_path).note(third, runs=1)
    assert line.startswith("changed after 6 runs: ")
