"""A run of a study: what its folder says has become of it, its figures, and the choice of a learning rate."""

from __future__ import annotations

import json

import pytest

import compare_help
from disk import fill, tmpfs
from study_help import row, stopped_once, study
from trew.config import load
from trew.config.recipe import parse
from trew.errors import DataError
from trew.study import work
from trew.study.choice import choose, tuned_of
from trew.study.conduct import Conduct
from trew.study.design import Cell, Run
from trew.study.pool import Job, Pool, StudyError
from trew.study.rows import Row, read_row
from trew.study.states import Place, ended_below, fingerprint
from trew.training import start
from trew.utils.toml import dump_table

SETTINGS = {**compare_help.SETTINGS, "rewards": []}
RUN = Run(Cell("sums", "off", "clip"), 1e-3, 0)


def written(folder, **options):
    """A finished run of 10 steps, whose settings name the task's own reward, as a run's folder does."""
    return compare_help.write(folder, 0, 12, **options)


@pytest.fixture
def place(tmp_path):
    """A finished run, and the settings that it was made with."""
    folder = written(tmp_path / "0")
    config = parse(SETTINGS)
    mark = fingerprint(config)
    # The helper writes a part of the settings; a real run writes all of them, its rewards included.
    from trew.config.recipe import to_table

    table = to_table(config) | {"out": str(folder), "rewards": [{"name": "arithmetic"}]}
    (folder / "config.toml").write_text(dump_table(table))
    return Place(folder, mark)


def test_a_finished_run_with_the_same_settings_is_done(place):
    assert place.state() == "done"


@pytest.mark.parametrize("name", ["plain", "a b", 'a"b', "\U0001f600"])
def test_a_run_is_trained_in_its_own_folder_whatever_its_name(tmp_path, monkeypatch, name):
    (tmp_path / "r.toml").write_text('model = "lm"\n')
    seen = []
    monkeypatch.setattr(start, "train", lambda recipe, *, set, **how: seen.append(load(recipe, set).out))
    work.train(tmp_path / "r.toml", [], f"{tmp_path}/{name}/1")
    assert seen == [f"{tmp_path}/{name}/1"]


def test_runs_that_are_measured_by_a_loss_are_refused_before_the_first(tmp_path):
    (tmp_path / "r.toml").write_text('model = "lm"\n[data]\ntask = "demonstrations"\ntrain = "rows.jsonl"\n')
    problems = work.check(tmp_path / "r.toml", [("sums/off/clip", []), ("sums/off/other", ["seed=2"])])["problems"]
    assert list(problems.values()) == [["sums/off/clip", "sums/off/other"]]
    assert "a study compares accuracies" in next(iter(problems))


@pytest.mark.parametrize("learner", [0, 2])
def test_runs_of_several_ranks_are_refused_before_the_first(tmp_path, learner):
    """A study's run is a process of its own, which starts no others."""
    (tmp_path / "r.toml").write_text('model = "lm"\n')
    (problem,) = work.check(tmp_path / "r.toml", [("sums/on/clip", [f"cluster.learner={learner}"])])["problems"]
    assert problem == f"cluster.learner: got {learner}, accepts 1: trew study trains in a single process"


def test_a_run_with_other_settings_is_none(place):
    text = (place.folder / "config.toml").read_text()
    for old, new in (("lr = 0.001", "lr = 0.002"), ("seed = 0", "seed = 1"), ("largest = 20", "largest = 21"),
                     ('preset = "grpo"', 'preset = "dr-grpo"'), ("every = 5", "every = 4")):  # fmt: skip
        assert old in text
        (place.folder / "config.toml").write_text(text.replace(old, new))
        assert place.state() == "new", new
    (place.folder / "config.toml").write_text(text.replace(str(place.folder), "elsewhere"))
    assert place.state() == "done"  # moved: its settings are the same


def test_a_run_of_an_older_trew_that_lacked_a_setting_is_done(place):
    text = (place.folder / "config.toml").read_text()
    assert "inner_updates = 1\n" in text
    (place.folder / "config.toml").write_text(text.replace("inner_updates = 1\n", ""))
    assert place.state() == "done"
    (place.folder / "config.toml").write_text("of_the_future = 1\n" + text)
    assert place.state() == "new"


def test_a_run_that_ended_with_other_settings_is_put_aside_and_not_overwritten(place):
    other = Place(place.folder, fingerprint(parse({**SETTINGS, "seed": 9})))
    for number in (1, 2):
        (place.folder / "mark").write_text(str(number))
        other.begin()
        aside = place.folder.with_name(f"0.replaced-{number}")
        assert (aside / "mark").read_text() == str(number)
        assert not place.folder.exists()
        if number == 1:
            written(place.folder)


def test_weights_that_a_study_made_are_settings_wherever_they_lie(place):
    config = parse(SETTINGS)
    one, other = (fingerprint(config, model=digest) for digest in ("aa", "bb"))
    assert one != other
    moved = parse({**SETTINGS, "model": "there"})
    assert fingerprint(moved, model="aa") == one
    assert fingerprint(moved) != fingerprint(config)
    assert Place(place.folder, one).state() == "done"


def test_what_is_left_of_a_run_decides_how_it_goes_on(place):
    (place.folder / "summary.json").unlink()
    assert place.state() == "new"  # nothing to resume from: it starts again
    (place.folder / "checkpoints" / "000005").mkdir()
    assert place.state() == "half"
    place.result.write_text(json.dumps({"failed": "loss is not finite", "seconds": 1.0}))
    assert place.state() == "failed"
    place.begin()
    assert place.state() == "half"  # what an earlier process said of its end is gone
    (place.folder / "config.toml").unlink()
    assert place.state() == "new"


def test_figures_of_a_finished_run(place):
    place.result.write_text(json.dumps({"seconds": 3.5, "load": 2.0}))
    found = read_row(RUN, place)
    assert found.steps == (0, 5, 10)
    assert found.accuracy == (0.1, 0.3, 0.6)
    assert found.final == pytest.approx(0.45)
    assert found.area == pytest.approx((0.2 * 5 + 0.45 * 5) / 10)
    assert found.completions == (0, 160, 320)
    assert found.entropy == (1.0, 0.1)
    assert (found.failed, found.seconds, found.load) == ("", 3.5, 2.0)
    assert Row.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.normalised == pytest.approx(0.35 / 0.9)


def test_a_run_that_ended_with_numbers_that_are_not_finite_keeps_its_last_evaluation(place):
    (place.folder / "summary.json").unlink()
    lines = (place.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (place.folder / "metrics.jsonl").write_text("".join(lines[:8]))  # up to step 6
    place.result.write_text(json.dumps({"failed": "3 steps in a row", "seconds": 1.0}))
    found = read_row(RUN, place)
    assert (found.failed, found.error) == ("numbers not finite", "3 steps in a row")
    assert found.final == 0.3
    assert found.area == pytest.approx((0.2 * 5 + 0.3 * 5) / 10)


def test_tidying_leaves_every_figure(place):
    for name in ("final", "rollouts"):
        (place.folder / name).mkdir(exist_ok=True)
    for step in range(1, 11):
        (place.folder / "rollouts" / f"{step:06d}.parquet").touch()
    (place.folder / "final" / "model.safetensors").touch()
    before = read_row(RUN, place)
    place.tidy()
    assert sorted(p.name for p in (place.folder / "rollouts").iterdir()) == [f"{n:06d}.parquet" for n in (8, 9, 10)]
    assert not (place.folder / "final").exists()
    assert place.state() == "done"
    assert read_row(RUN, place) == before


def test_a_damaged_run_is_no_figure(place):
    with (place.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "rew')
    with pytest.raises(DataError, match="incomplete"):
        read_row(RUN, place)


@pytest.mark.parametrize(("step", "accuracy"), [(0, "0.1"), (10, "0.6")])
def test_a_run_with_an_evaluation_that_judged_nothing_is_no_figure(place, step, accuracy):
    path = place.folder / "metrics.jsonl"
    judged, null = (f'"step": {step}, "eval_accuracy": {value}' for value in (accuracy, "null"))
    assert judged in path.read_text()
    path.write_text(path.read_text().replace(judged, null))
    with pytest.raises(DataError, match=f"nothing was judged in its evaluation after step {step},"):
        read_row(RUN, place)


@pytest.mark.parametrize(
    ("accuracy", "final", "why"),
    [((0.2, 0.8, 0.3), 0.3, "lost half of its best"), ((0.2, 0.1, 0.1), 0.1, "ended below its start"),
     ((0.2, 0.3, 0.3), 0.3, "")],
)  # fmt: skip
def test_why_a_run_counts_as_failed(accuracy, final, why):
    from trew.study.rows import _failed

    assert _failed(accuracy, final, "") == why


def tuned(folder, areas, **changes):
    plan = study(folder, tune={"learner.lr": [0.001, 0.01, 0.1]}, algorithms={"clip": {}}, **changes)
    rows = [row("clip", seed, 0.5, value=value, area=area)
            for seed in plan.tuning for value, area in zip(plan.values, areas, strict=True)]  # fmt: skip
    return plan, rows


def test_the_learning_rate_with_the_largest_mean_area_is_chosen(tmp_path):
    plan, rows = tuned(tmp_path, (0.3, 0.5, 0.4))
    cell = Cell("sums", "off", "clip")
    assert choose(plan, rows)[cell] == 0.01
    # One tuning seed that disagrees moves the mean; reported seeds must not.
    moved = [row("clip", plan.tuning[0], 0.5, value=0.1, area=0.9) if r == rows[2] else r for r in rows]
    assert choose(plan, moved)[cell] == 0.1
    reported = [row("clip", seed, 0.9, value=0.001, area=5.0) for seed in plan.reported]
    assert choose(plan, [*rows, *reported])[cell] == 0.01
    tied, equal = tuned(tmp_path, (0.5, 0.5, 0.5))
    assert choose(tied, equal)[cell] == 0.001


def test_nothing_is_chosen_before_all_tuning_runs_have_ended(tmp_path):
    plan, rows = tuned(tmp_path, (0.3, 0.5, 0.4))
    assert choose(plan, rows[:-1]).get(Cell("sums", "off", "clip")) is None
    assert Cell("sums", "off", "other") not in choose(plan, rows)


def test_how_much_the_learning_rate_matters(tmp_path):
    plan, rows = tuned(tmp_path, (0.46, 0.5, 0.1))
    found = tuned_of(plan.cells, plan.values, rows)[Cell("sums", "off", "clip")]
    assert (found.width, found.at_an_end, found.at_three_times) == (pytest.approx(1.0), False, None)
    plan, rows = tuned(tmp_path, (0.1, 0.2, 0.5))
    assert tuned_of(plan.cells, plan.values, rows)[Cell("sums", "off", "clip")].at_an_end


def test_the_hours_that_are_left_are_told_by_runs_of_the_named_cells_where_there_are_any(tmp_path):
    """Runs of another regime may take several times as long."""
    planned = study(tmp_path, regimes={"on": {"steps": 5}})
    off, on = (Cell("sums", regime, "clip") for regime in ("off", "on"))
    conduct = Conduct(planned, tmp_path, [on], 1, print)
    conduct.rows[Run(off, 1e-3, 1)] = row("clip", 1, 0.5, seconds=7200.0)
    assert conduct.forecast() == "planted: 1 cells, 14 runs, 14 to do, about 28.0 h"
    conduct.rows[Run(on, 1e-3, 1)] = row("clip", 1, 0.5, regime="on", seconds=3600.0)
    assert conduct.forecast() == "planted: 1 cells, 14 runs, 13 to do, about 13.0 h"


def test_runs_that_ended_are_counted_with_any_settings(tmp_path):
    """Finished, put aside, and failed ones; not one that goes on, nor one that has only begun."""
    cell = tmp_path / "sums" / "off" / "clip" / "0.01"
    cell.mkdir(parents=True)
    for name in ("1", "2.replaced-1"):
        written(cell / name)
    written(cell / "3", finished=False)
    (cell / "3.json").write_text('{"failed": "numbers not finite"}')
    written(cell / "4", finished=False)
    (cell / "5").mkdir()
    assert ended_below(tmp_path) == 3
    assert ended_below(tmp_path / "none") == 0


def test_a_disk_that_is_full_to_the_last_byte_is_called_so(tmp_path, monkeypatch):
    """The process cannot even leave its error, neither as its result nor in its log."""
    monkeypatch.setattr(work, "PRELOADED", ())
    (tmp_path / "tried").touch()  # the work does nothing
    with tmpfs(kilobytes=64) as full:
        fill(full, leave=0)
        job = Job("sums", stopped_once, (str(tmp_path),), full / "log", full / "result.json")
        with Pool(1).open() as pool, pytest.raises(StudyError, match=r"^sums: its result, .* free or mount the disk"):
            list(pool.run([job]))


def test_a_run_that_is_stopped_alone_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "PRELOADED", ())
    job = Job("sums", stopped_once, (str(tmp_path),), tmp_path / "log", tmp_path / "result.json")
    with Pool(1).open() as pool:
        ((ended, found),) = pool.run([job])
    assert ended is job
    assert found["done"]
