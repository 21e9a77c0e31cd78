"""trew study on real runs of a tiny model: killed anywhere and continued, it gives what an undisturbed one gives."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal

import pytest

import study_help
import tiny
from forks import below, fields_of, gone, wait_for
from recipe_help import ODD, recipe

TRIANGULAR = {"objective.preset": "trw-triangular", "objective.w0": 1.0, "objective.w2": 1.0, "objective.w_out": 0.0}
ALGORITHMS = {"clip": {"objective.preset": "grpo", "objective.eps_high": 0.2}, "other": None,
              "same": {**TRIANGULAR, "objective.eps_low": 0.2, "objective.eps_high": 0.2}}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A study of two algorithms that are the same one: 4 runs for tuning, 4 that are reported."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "reward.py").write_text(ODD)
    tiny.save(folder / "lm")
    sections = {
        "steps": 2, "chat_template": "plain", "eval": {"size": 8, "correct_at": 0.6, "every": 1},
        "checkpoint": {"every": 0}, "track": {"samples_every": 0, "regrade_every": 0},
    }  # fmt: skip
    text = recipe(folder / "lm", **sections)
    study_help.write(folder, text, seeds=2, tuning_seeds=1, algorithms=ALGORITHMS)
    return folder


@pytest.fixture(scope="module")
def undisturbed(server, place):
    text = server.run("study", "study.toml", "--out", "whole", cwd=place)
    assert "planted: 2 cells, 8 runs, 8 to do" in text
    return results(place / "whole")


def results(folder):
    """The results without what clocks say."""
    found = json.loads((folder / "results.json").read_text())
    for kind in ("tuning", "runs"):
        for row in found[kind]:
            del row["seconds"], row["cpu_seconds"], row["load"]
    return json.dumps(found, sort_keys=True)


def ended(folder):
    return len([*folder.glob("runs/*/*/*/*/*/summary.json")])


@pytest.mark.nightly
def test_the_same_algorithm_under_two_names_has_equal_curves(undisturbed, place):
    found = json.loads(undisturbed)
    assert (len(found["tuning"]), len(found["runs"])) == (4, 4)
    curves = {name: [{k: v for k, v in row.items() if k not in ("algorithm", "value")}
                     for row in (*found["tuning"], *found["runs"]) if row["algorithm"] == name]
              for name in ("clip", "same")}  # fmt: skip
    assert curves["clip"] == curves["same"]
    assert len({tuple(row["accuracy"]) for row in found["runs"]}) > 1  # equal, but not because all is equal
    assert found["chosen"]["sums/off/clip"] == found["chosen"]["sums/off/same"]
    assert "equal" in (place / "whole" / "report.md").read_text()
    assert not [*(place / "whole").glob("runs/*/*/*/*/*/final/*")]


@pytest.mark.nightly
def test_killed_and_continued_it_gives_the_same_results(server, place, undisturbed):
    """Stopped by a signal, then kill -9 of the study, then of a single run."""
    out = place / "killed"
    study = begun(server, place)
    family = study.family()
    assert study.kill(signal.SIGTERM).wait() == 128 + signal.SIGTERM, study.text()
    wait_for(lambda: gone(family), study.text)  # the fork server ends a moment after the study
    study = begun(server, place, "--jobs", "2")
    family = study.family()
    study.kill(signal.SIGKILL)
    wait_for(lambda: gone(family), study.text)
    assert 1 <= ended(out) < 8
    assert "seeds: 0 of 2 complete" in server.run("study", "study.toml", "--out", "killed", "--status", cwd=place)
    study = begun(server, place)
    for pid in runs_of(study)[:1]:
        os.kill(pid, signal.SIGKILL)  # one run alone: it is started again
    assert study.wait() == 0, study.text()
    assert results(out) == undisturbed


def test_no_run_goes_on_without_its_study(server, place):
    """The runs have more steps than a test would wait for: they end because the study was killed."""
    text = (place / "study.toml").read_text()
    (place / "long.toml").write_text(text.replace("set = {", "set = {steps = 1000000, ", 1))
    study = server.start("study", "long.toml", "--out", "long", cwd=place)
    wait_for(lambda: [*(place / "long").glob("runs/*/*/*/*/*/metrics.jsonl")] or study.ended(), study.text)
    family = study.family()
    assert len(family) >= 4, study.text()  # itself, the fork server, its tracker, a run
    study.kill(signal.SIGKILL)
    wait_for(lambda: gone(family), study.text)


def test_a_study_that_a_signal_stops_writes_the_rows_of_all_runs_that_have_ended(server, place):
    out = place / "stopped"
    study = server.start("study", "study.toml", "--out", "stopped", cwd=place)
    wait_for(lambda: " left, " in study.text() or study.ended(), study.text)  # said when a run is counted
    assert study.kill(signal.SIGTERM).wait() == 128 + signal.SIGTERM, study.text()
    found = json.loads((out / "results.json").read_text())
    assert 1 <= len(found["tuning"]) + len(found["runs"]) <= ended(out)
    assert not (out / "report.md").exists()


def test_results_of_another_folder_are_continued(server, place, undisturbed):
    """As on another machine: there are no folders of runs, only results.json, and later not even that."""
    part = place / "part.json"
    found = json.loads((place / "whole" / "results.json").read_text())
    found["runs"] = [row for row in found["runs"] if row["seed"] == 1]
    part.write_text(json.dumps(found))
    text = server.run("study", "study.toml", "--out", "on", "--earlier", "part.json", "--dry-run", cwd=place)
    assert "6 of 6 runs" in text
    assert "8 runs, 2 to do" in text
    part.unlink()
    server.run("study", "study.toml", "--out", "on", cwd=place)
    assert results(place / "on") == undisturbed
    assert ended(place / "on") == 2


def test_earlier_runs_with_other_settings_are_made_again(server, place, undisturbed):
    text = (place / "study.toml").read_text()
    assert "steps = 2" in (place / "r.toml").read_text()
    (place / "longer.toml").write_text(text.replace("set = {", "set = {steps = 3, ", 1))
    said = server.run("study", "longer.toml", "--out", "longer", "--earlier", "whole/results.json", "--dry-run",
                      cwd=place)  # fmt: skip
    assert "0 of 8 runs" in said
    assert "8 have other settings" in said
    assert "8 runs, 8 to do" in said
    # Seen all the same: the design that they were made under stays in the history.
    said = server.run("study", "longer.toml", "--out", "longer", "--hours", "0.000001", cwd=place)
    assert "note: changed after 8 runs: set.steps was not set and is 3" in said
    (place / "whole" / "none.json").write_text("[]")
    said = server.run("study", "study.toml", "--earlier", "whole/none.json", cwd=place, code=2)
    assert "has no results of trew study" in said


def test_a_change_that_leaves_no_run_of_the_earlier_design_is_shown(server, place, undisturbed):
    shutil.copytree(place / "whole", place / "changed")
    text = (place / "study.toml").read_text()
    (place / "changed.toml").write_text(text.replace("set = {", "set = {steps = 3, ", 1))
    said = server.run("study", "changed.toml", "--out", "changed", "--hours", "0.000001", cwd=place)
    assert "note: changed after 8 runs: set.steps was not set and is 3" in said
    assert json.loads((place / "changed" / "results.json").read_text())["changed"][0].startswith("after 8 runs: ")


def test_a_change_is_shown_where_the_runs_before_it_were_deleted(server, place, undisturbed):
    shutil.copytree(place / "whole", place / "deleted")
    shutil.rmtree(place / "deleted" / "runs")
    text = (place / "study.toml").read_text()
    (place / "deleted.toml").write_text(text.replace("set = {", "set = {steps = 3, ", 1))
    said = server.run("study", "deleted.toml", "--out", "deleted", "--hours", "0.000001", cwd=place)
    assert "note: changed after 8 runs: set.steps was not set and is 3" in said


def begun(server, place, *options):
    """A study that has ended one run more than before."""
    out = place / "killed"
    before = ended(out)
    study = server.start("study", "study.toml", "--out", "killed", *options, cwd=place, TREW_REAL_FORK_SERVER="1")
    wait_for(lambda: ended(out) > before or study.ended(), study.text)
    assert ended(out) > before, study.text()
    return study


def runs_of(study):
    """The processes of runs: children of the fork server, which is a child of the study."""
    servers = {pid for pid in below(study.pid) if parent(pid) == study.pid}
    return [pid for pid in below(study.pid) if parent(pid) in servers]


def parent(pid):
    with contextlib.suppress(OSError, IndexError):
        return int(fields_of(pid)[1])
    return 0


def test_nothing_starts_if_one_cell_would_be_refused(server, place):
    text = (place / "study.toml").read_text()
    (place / "wrong.toml").write_text(text.replace('"objective.eps_high" = 0.2', '"objective.eps_hihg" = 0.2', 1))
    said = server.run("study", "wrong.toml", "--out", "wrong", cwd=place, code=2)
    assert "sums/off/clip: " in said
    assert "eps_hihg" in said
    assert not (place / "wrong" / "runs").exists()
    shutil.rmtree(place / "wrong")


def test_nothing_starts_if_one_value_would_be_refused(server, place):
    """A value of the tuned setting after the first."""
    text = (place / "study.toml").read_text()
    (place / "wrong.toml").write_text(text.replace('"learner.lr" = [0.001, 0.01]', '"rollout.top_p" = [1.0, 2.0]'))
    said = server.run("study", "wrong.toml", "--out", "wrong", cwd=place, code=2)
    assert "sums/off/clip, sums/off/same: rollout.top_p: got 2.0" in said
    assert not (place / "wrong" / "runs").exists()
    shutil.rmtree(place / "wrong")


def test_a_dry_run_counts_and_trains_nothing(server, place):
    """Its fork server starts as a user's does; those of the other tests are forked (``forks.py``)."""
    said = server.run("study", "study.toml", "--out", "dry", "--dry-run", cwd=place, TREW_REAL_FORK_SERVER="1")
    assert "2 cells, 8 runs, 8 to do" in said
    assert not (place / "dry" / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--jobs", "0"], "--jobs: got 0"), (["--hours", "0"], "--hours: got 0"),
     (["--only", "offf"], "did you mean 'off'"), (["--status", "--dry-run"], "give one of them"),
     (["--status", "--earlier", "part.json"], "--earlier: adds rows to the folder")],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(server, place, options, message):
    assert message in server.run("study", "study.toml", *options, cwd=place, code=2)


def test_two_studies_in_one_folder_are_refused(server, place):
    study = server.start("study", "study.toml", "--out", "twice", cwd=place)
    wait_for(lambda: (place / "twice" / "study.lock").exists(), study.text)
    assert "in use by another run" in server.run("study", "study.toml", "--out", "twice", cwd=place, code=2)
    study.kill(signal.SIGKILL)
