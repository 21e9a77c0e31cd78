"""changes.jsonl: what changed where a run went on, kept through resumes, crashes and steps that are made anew."""

import json

import pytest

from compare_help import write
from trew.errors import ConfigError, DataError, ResumeError
from trew.iterate.continuing import LAYOUT
from trew.runs import RunFolder, changes
from trew.runs.changes import Accepted, RunChange
from trew.runs.compare import Choices, compare_runs
from trew.runs.compare.members import load_member
from trew.runs.compare.refusals import problems
from trew.runs.report import load_run, write_report
from trew.study.rows import _evaluations
from trew.training.changes import unrecorded
from trew.view.viewed import ViewedRun

FREE = ("track.", "steps")


def config(lr: float = 1.0, **more: float) -> str:
    return "".join(f"{key} = {value}\n" for key, value in {**more, "seed": 3}.items()) + f"[learner]\nlr = {lr}\n"


def add(known, step, before, now, *others):
    return changes.add(known, step, before=before, now=now, free=FREE, accepted=Accepted(others))


def test_a_change_has_the_step_the_settings_until_there_and_both_values():
    (change,) = add([], 40, config(1.0), config(2.0, steps=9), "the data changed")
    assert change == RunChange(40, config(1.0), ("learner.lr was 1.0, is 2.0",), ("the data changed",), ())
    assert change.told() == (
        "After step 40 the run went on with changes: learner.lr was 1.0, is 2.0; the data changed. config.toml has the "
        "settings of its last steps."
    )


def test_other_versions_are_told_and_only_those_of_trew_keep_a_run_from_being_compared(tmp_path):
    texts = ("torch was 2.12.0, is 2.13.0", "trew was 0.1.0, is 0.2.0")
    known = [
        changes.add([], 4, before=config(), now=config(), free=FREE, accepted=Accepted(versions=(text,)))
        for text in texts
    ]
    assert changes.read(changes.write(known[0])) == known[0]
    assert "with changes: torch was 2.12.0, is 2.13.0." in known[0][0].told()
    folder = write(tmp_path / "a", 0, 5)
    found = []
    for change in known:
        (folder / "changes.jsonl").write_text(changes.write(change))
        found.append(problems([load_member(folder)], allow=()))
    assert found == [[], [
        f"{folder}: trew was 0.1.0, is 0.2.0 from step 4 on: versions may compute different things; --allow version "
        "compares anyway"
    ]]  # fmt: skip
    assert problems([load_member(folder)], allow=("version",)) == []


def test_a_study_takes_no_run_of_two_settings_but_one_with_updated_libraries(tmp_path):
    folder = write(tmp_path / "a", 0, 5)
    evals = _evaluations(load_run(folder))
    for versions, now in ((("torch was 2.12.0, is 2.13.0",), config(1.0)), ((), config(2.0))):
        known = changes.add([], 4, before=config(1.0), now=now, free=FREE, accepted=Accepted(versions=versions))
        (folder / "changes.jsonl").write_text(changes.write(known))
        if versions:
            assert _evaluations(load_run(folder)) == evals
    with pytest.raises(DataError, match=r"learner.lr was 1.0, is 2.0.*It is no run of one cell: remove it, and it"):
        _evaluations(load_run(folder))


def test_runs_that_went_on_under_other_settings_are_not_averaged_with_others_in_the_page(tmp_path):
    one, other = (ViewedRun(write(tmp_path / name, 0, 5), id=name, name=name) for name in "ab")
    assert one.setting == other.setting
    (other.folder / "changes.jsonl").write_text(changes.write(add([], 4, config(1.0), config(2.0))))
    assert one.setting != other.setting


def test_a_comparison_that_takes_runs_of_two_settings_names_them(tmp_path):
    folders = [
        write(tmp_path / f"{lr}-{seed}", seed, 5 + seed, learner={"lr": lr}) for lr in (1e-3, 2e-3) for seed in (0, 1)
    ]
    known = add([], 4, config(1.0), config(2.0))
    (folders[0] / "changes.jsonl").write_text(changes.write(known))
    with pytest.raises(ConfigError, match="went on with changes after step 4"):
        compare_runs(folders, Choices())
    found = compare_runs(folders, Choices(allow=("changes",)))
    assert f"{folders[0]}: {known[0].told().removesuffix('.')}" in found.notes


def test_what_is_free_or_equal_is_no_change():
    assert add([], 40, config(steps=8), config(steps=9)) == []


def test_steps_that_are_made_anew_move_a_change_back():
    """Steps 31 to 50 are made again, under the third settings: nothing of the second is left."""
    known = add([], 40, config(1.0), config(2.0))
    known = add(known, 50, config(2.0), config(3.0), "reward.py changed")
    assert [change.step for change in known] == [40, 50]
    anew = add(known, 30, config(3.0), config(3.0), "reward.py changed")
    assert anew == [RunChange(30, config(1.0), ("learner.lr was 1.0, is 3.0",), ("reward.py changed",))]
    # What the checkpoint that a run goes on from does not know of is not of its steps.
    assert add(anew, 30, config(3.0), config(3.0)) == [RunChange(30, config(1.0), ("learner.lr was 1.0, is 3.0",))]
    assert add(known, 60, config(3.0), config(3.0)) == known


def test_settings_that_are_put_back_before_a_step_was_made_are_no_change():
    assert add(add([], 40, config(1.0), config(2.0)), 40, config(2.0), config(1.0)) == []


def test_the_settings_of_a_checkpoint_are_those_that_it_was_made_under():
    known = add(add([], 40, config(1.0), config(2.0)), 50, config(2.0), config(3.0))
    at = {step: changes.settings_at(known, step, now=config(3.0)) for step in (39, 40, 41, 50, 51)}
    assert at == {39: config(1.0), 40: config(1.0), 41: config(2.0), 50: config(2.0), 51: config(3.0)}


def test_a_file_is_read_back_and_lines_that_are_no_changes_are_left_out():
    known = add([], 40, config(1.0), config(2.0))
    text = changes.write(known)
    bad = ("x", "{}", "[]", "3", json.dumps({**json.loads(text), "step": "4"}), json.dumps({"step": 4}))
    assert changes.read(text) == known
    assert changes.read("\n".join([*bad, text])) == known


def go_on(folder, lr, step, rows=1):
    with RunFolder.open(folder, resume=True) as run:
        run.rewind(step if rows else -1)
        return run.go_on_with(config(lr), step, free=FREE)


def started(folder):
    with RunFolder.open(folder) as run:
        run.write_config(config(1.0))
        for step in (1, 2, 3):
            run.log({"step": step, "reward": 0.5})
    return folder


def test_more_steps_are_a_change_where_earlier_ones_depend_on_them():
    assert "steps" in unrecorded("constant")
    assert "steps" not in unrecorded("linear")
    assert "steps" not in unrecorded("constant", ahead=1)


def test_rounds_have_results_before_their_first_row(tmp_path):
    with RunFolder.open(tmp_path / "it", layout=LAYOUT) as run:
        run.write_config(config(1.0))
        (run.folder / "round-00").mkdir()
        (run.folder / "round-00" / "pairs.jsonl").write_text("{}\n")
    with RunFolder.open(tmp_path / "it", layout=LAYOUT, resume=True) as run:
        (change,) = run.go_on_with(config(2.0), -1, free=FREE)
    assert change.told("round").startswith("In or before round 0 the run went on with changes: learner.lr was 1.0, is")


def test_a_damaged_file_keeps_a_run_from_going_on_and_from_being_compared(tmp_path):
    folder = started(tmp_path / "run")
    (folder / "changes.jsonl").write_text("{}\n")
    with pytest.raises(ResumeError, match="is damaged, so that it is not known which steps were made under which"):
        go_on(folder, 2.0, 2)
    assert (folder / "changes.jsonl").read_text() == "{}\n"
    folder = write(tmp_path / "a", 0, 5)
    (folder / "changes.jsonl").write_text("{}\n")
    (line,) = problems([load_member(folder)], allow=())
    assert "changes.jsonl: left out 1 lines that tell of no change; put a backup of it there" in line


def test_a_run_folder_keeps_what_changed(tmp_path):
    folder = started(tmp_path / "run")
    assert go_on(folder, 1.0, 2) == []
    assert not (folder / "changes.jsonl").exists()
    (change,) = go_on(folder, 2.0, 2)
    # As after a crash in between: the file is written, and config.toml is not.
    (folder / "config.toml").write_text(config(1.0))
    assert go_on(folder, 2.0, 2) == [change]
    assert go_on(folder, 2.0, 2) == [change]
    events = (folder / "events.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in events if "learner.lr" in line] == [f"step 2: {change.told()}"]
    data = load_run(folder)
    assert data.changes == (change,)
    assert change.told() in write_report(folder).read_text()


def test_what_an_earlier_session_has_said_is_not_said_again(tmp_path):
    for resume in (False, True):
        with RunFolder.open(tmp_path / "run", resume=resume) as run:
            run.log({"step": 1})
            run.event("note: 3 rows dropped", once=True)
            run.event("note: 3 rows", once=True)
            run.event("twice")
    lines = (tmp_path / "run" / "events.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["note: 3 rows dropped", "note: 3 rows", "twice", "twice"]


def test_a_run_that_starts_over_has_no_changes(tmp_path):
    folder = started(tmp_path / "run")
    go_on(folder, 2.0, 2)
    assert go_on(folder, 3.0, 0, rows=0) == []
    assert not (folder / "changes.jsonl").exists()
    assert "lr = 3.0" in (folder / "config.toml").read_text()


def test_a_report_names_lines_that_it_cannot_read(tmp_path):
    folder = started(tmp_path / "run")
    (folder / "changes.jsonl").write_text("{}\n")
    assert load_run(folder).notes == ("changes.jsonl: left out 1 lines that tell of no change",)


def test_overwriting_a_run_removes_its_changes(tmp_path):
    folder = started(tmp_path / "run")
    go_on(folder, 2.0, 2)
    with RunFolder.open(folder, overwrite=True):
        assert not (folder / "changes.jsonl").exists()


def test_a_run_of_two_settings_is_compared_only_where_that_is_allowed(tmp_path):
    folder = write(tmp_path / "a", 0, 5)
    assert problems([load_member(folder)], allow=()) == []
    (folder / "changes.jsonl").write_text(changes.write(add([], 4, config(1.0), config(2.0))))
    (line,) = problems([load_member(folder)], allow=())
    assert line == (
        f"{folder}: went on with changes after step 4: learner.lr was 1.0, is 2.0; leave it out, or "
        "--allow changes takes it for a run of the settings that it ended with"
    )
    assert problems([load_member(folder)], allow=("changes",)) == []
