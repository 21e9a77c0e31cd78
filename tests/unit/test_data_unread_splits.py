"""A test split that trew cannot read is named where rows are held out in its place."""

import pytest

from trew.config import DataConfig
from trew.data import load_task
from trew.data.files import write_rows
from trew.errors import DataError

ROWS = [{"prompt": f"question {i}", "gold": str(i)} for i in range(20)]


def note(source, size=3):
    return load_task(DataConfig(train=str(source)), eval_size=size, seed=0).notes[0]


@pytest.mark.parametrize(
    "name",
    ["test.csv", "test.JSONL", "Test.jsonl", "eval.jsonl", "test.jsonl.bz2", "Test_set.jsonl", "VAL-2.tsv", "dev"],
)
@pytest.mark.parametrize("whole", [False, True], ids=["file", "folder"])
def test_what_looks_like_a_test_split_and_is_not_read_is_named(tmp_path, name, whole):
    write_rows(tmp_path / "train.jsonl", ROWS)
    (tmp_path / name).write_text("prompt,gold\n")
    told = note(tmp_path if whole else tmp_path / "train.jsonl")
    assert f"no test split found ({name} beside it is not read: beside train.*" in told
    assert "test, validation, valid, val, dev that end in .jsonl, .json, .parquet" in told
    assert "3 rows held out" in told
    with pytest.raises(DataError, match=rf"no test split \({name} beside it is not read.*only 20 rows"):
        note(tmp_path, size=11)


def test_folders_and_several_files_are_named_too(tmp_path):
    write_rows(tmp_path / "train.jsonl", ROWS)
    for name in ("test", "eval"):
        (tmp_path / name).mkdir()
    assert "(eval/, test/ beside it are not read" in note(tmp_path)
    for name in ("dev.csv", "val.csv"):
        (tmp_path / name).touch()
    assert "(dev.csv, eval/, test/ and 1 more beside it are not read" in note(tmp_path)


def test_a_training_file_in_other_letters_has_no_splits_beside_it(tmp_path):
    write_rows(tmp_path / "Train.jsonl", ROWS)
    write_rows(tmp_path / "test.jsonl", ROWS[:4])
    assert "(test.jsonl beside it is not read: beside train.*, in lower case" in note(tmp_path / "Train.jsonl")


@pytest.mark.parametrize("name", ["tests.csv", "testing.jsonl", "test2.csv", "evaluation.md", "test.py", "eval.toml"])
def test_other_names_and_code_are_not(tmp_path, name):
    write_rows(tmp_path / "train.jsonl", ROWS)
    (tmp_path / name).touch()
    assert "no test split found;" in note(tmp_path)


def test_a_file_of_another_name_stands_for_itself(tmp_path):
    write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "test.csv").touch()
    assert "no test split found;" in note(tmp_path / "rows.jsonl")
