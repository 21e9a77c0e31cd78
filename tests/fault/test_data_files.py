"""Files that cannot be used: every one gives one message with the place and the way out, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trew.config import DataConfig
from trew.data import load_task
from trew.data.files import read_rows, write_rows
from trew.errors import DataError

GOOD = b'{"prompt": "2 + 2?", "gold": "4"}\n'
CHAT = '{"prompt": %s, "gold": "4"}\n'


def chat(messages: object) -> bytes:
    return (CHAT % json.dumps(messages)).encode()


USER = {"role": "user", "content": "2 + 2?"}

# name -> (file name, bytes, what the message must say)
BAD: dict[str, tuple[str, bytes, list[str]]] = {
    "empty": ("d.jsonl", b"", ["d.jsonl", "no rows"]),
    "only blank lines": ("d.jsonl", b"\n  \r\n\n", ["no rows"]),
    "bom alone": ("d.jsonl", b"\xef\xbb\xbf", ["no rows"]),
    "not utf-8": ("d.jsonl", GOOD + b'{"prompt": "caf\xe9"}\n', ["line 2", "not UTF-8", "0xe9"]),
    "utf-16": ("d.jsonl", GOOD.decode().encode("utf-16"), ["UTF-16", "UTF-8"]),
    "nul": ("d.jsonl", GOOD + b'{"prompt": "a\x00b"}\n', ["line 2", "NUL"]),
    "lone surrogate": ("d.jsonl", GOOD * 2 + b'{"prompt": "x \\ud800"}\n', ["line 3", "surrogate", "ud800"]),
    "surrogate in a key": ("d.jsonl", b'{"prompt": "x", "\\uDC00": 1}\n', ["line 1", "surrogate"]),
    "trailing comma": ("d.jsonl", GOOD + b'{"prompt": "x",}\n', ["line 2", "not valid JSON"]),
    "cut off": ("d.jsonl", GOOD + b'{"prompt": "x', ["line 2", "not valid JSON"]),
    "two objects": ("d.jsonl", b'{"prompt": "x"} {"prompt": "y"}\n', ["line 1", "not valid JSON"]),
    "array row": ("d.jsonl", b'["x", "y"]\n', ["line 1", "expected an object", ".json"]),
    "scalar row": ("d.jsonl", b"42\n", ["line 1", "expected an object", "42 (number)"]),
    "null row": ("d.jsonl", GOOD + b"null\n", ["line 2", "got null"]),
    "NaN": ("d.jsonl", b'{"prompt": "x", "gold": NaN}\n', ["line 1", "NaN"]),
    "beyond any float": ("d.jsonl", b'{"prompt": "x", "gold": -1e999}\n', ["line 1", "-1e999 is too large a number"]),
    "repeated key": ("d.jsonl", b'{"prompt": "x", "prompt": "y"}\n', ["line 1", "'prompt'", "twice"]),
    "deep nesting": ("d.jsonl", b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", ["line 1", "nested"]),
    "endless number": ("d.jsonl", b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}\n", ["line 1", "limit"]),
    "no such column": ("d.jsonl", b'{"promt": "x", "gold": "4"}\n', ["'prompt'", "'promt'", "data.prompt_column"]),
    "column missing in one row": ("d.jsonl", GOOD + b'{"gold": "4"}\n', ["line 2", "no column 'prompt'", "'gold'"]),
    "null prompt": ("d.jsonl", GOOD + b'{"prompt": null}\n', ["line 2", "null"]),
    "number prompt": ("d.jsonl", b'{"prompt": 5}\n', ["line 1", "string or a list of messages", "5 (number)"]),
    "object prompt": ("d.jsonl", b'{"prompt": {"role": "user"}}\n', ["line 1", "string or a list"]),
    "empty prompt": ("d.jsonl", b'{"prompt": "  "}\n', ["line 1", "empty"]),
    "no messages": ("d.jsonl", chat([]), ["line 1", "empty list"]),
    "message is a string": ("d.jsonl", chat(["hi"]), ["line 1", "prompt[0]", "role and content"]),
    "no role": ("d.jsonl", chat([{"content": "hi"}]), ["line 1", "'role'"]),
    "no content": ("d.jsonl", chat([{"role": "user"}]), ["line 1", "'content'"]),
    "unknown role": ("d.jsonl", chat([{"role": "human", "content": "hi"}]), ["line 1", "'human'", "user"]),
    "content a list": ("d.jsonl", chat([{"role": "user", "content": [{"text": "hi"}]}]), ["content must be a string"]),
    "assistant last": ("d.jsonl", chat([USER, {"role": "assistant", "content": "4"}]), ["line 1", "assistant"]),
    "duplicate ids": ("d.jsonl", b'{"id": 7, "prompt": "x"}\n{"id": "7", "prompt": "y"}', ["line 2", "'7'", "line 1"]),
    "null id": ("d.jsonl", b'{"id": null, "prompt": "x"}\n', ["line 1", "'id'"]),
    "boolean id": ("d.jsonl", b'{"uid": true, "prompt": "x"}\n', ["line 1", "'uid'"]),
    "json array with a bad row": ("d.json", b'[{"prompt": "x"}, 3]', ["row 2", "3 (number)"]),
    "json array cut off": ("d.json", b'[{"prompt": "x"},\n {"prom', ["d.json", "not valid JSON", "line 2"]),
    "json empty array": ("d.json", b"[]", ["no rows"]),
    "not parquet": ("d.parquet", GOOD, ["d.parquet", "PAR1"]),
    "damaged parquet": ("d.parquet", b"PAR1" + b"\x07" * 200, ["d.parquet", "damaged or incomplete"]),
    "empty parquet": ("d.parquet", b"", ["no rows"]),
    "other suffix": ("d.csv", b"prompt,gold\nx,y\n", ["'.csv'", ".jsonl", ".parquet"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_malformed_files_are_refused_with_the_place(name: str, tmp_path: Path) -> None:
    file, content, says = BAD[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_task(DataConfig(train=str(tmp_path / file)), eval_size=1, seed=0)
    for text in says:
        assert text in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for source, says in [("nothing.jsonl", "no such file"), ("no folder here", "no such file"), ("", "empty")]:
        with pytest.raises(Exception, match=says):
            load_task(DataConfig(train=str(tmp_path / source) if source else ""), eval_size=1, seed=0)


def test_a_folder_named_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").mkdir()
    with pytest.raises(DataError, match=r"expected train\.jsonl"):
        load_task(DataConfig(train=str(tmp_path / "d.parquet")), eval_size=1, seed=0)


def parquet(folder: Path, arrays: list[pa.Array], names: list[str]) -> Path:
    path = folder / "d.parquet"
    pq.write_table(pa.Table.from_arrays(arrays, names=names), path)
    return path


@pytest.mark.parametrize(
    "times",
    [
        pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),  # as polars and pandas write them
        pa.array([2**60], pa.timestamp("us")),  # the year 38,000
        pa.array([0], pa.timestamp("s", tz="Mars/Base")),
    ],
)
def test_times_that_python_cannot_hold_are_refused_with_their_column(tmp_path: Path, times: pa.Array) -> None:
    path = parquet(tmp_path, [pa.array(["2 + 2?"]), times], ["prompt", "made_at"])
    with pytest.raises(DataError, match="made_at") as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path, [pa.array(["2 + 2?"]), pa.array(["4"]), pa.array(["5"])], ["prompt", "gold", "gold"])
    with pytest.raises(DataError, match="'gold'"):
        read_rows(path)


def test_ten_problems_are_spelled_out_and_the_rest_counted(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD + b'{"prompt": 1}\n' * 25)
    with pytest.raises(DataError) as caught:
        load_task(DataConfig(train=str(path)), eval_size=1, seed=0)
    message = str(caught.value)
    assert "25 of 26 rows" in message
    assert "line 11:" in message
    assert "line 12:" not in message
    assert "15 more" in message


def test_both_splits_problems_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(GOOD + b"{\n")
    (tmp_path / "test.jsonl").write_bytes(b"[1]\n")
    with pytest.raises(DataError) as caught:
        load_task(DataConfig(train=str(tmp_path)), eval_size=1, seed=0)
    assert "train.jsonl" in str(caught.value)
    assert "test.jsonl" in str(caught.value)


def test_unusual_but_good_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    rows = ["plain", "caf\u00e9 \U0001f600", "line\u2028separator \u0085 and \x0b", "escaped \\u0000", "x" * 3_000_000]
    lines = [json.dumps({"prompt": rows[0]}).encode(), *(json.dumps({"prompt": t}).encode() for t in rows[1:])]
    lines[2] = json.dumps({"prompt": rows[2]}, ensure_ascii=False).encode()  # the separators raw in the file
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines[:3]) + b"\r\n\r\n" + b"\n".join(lines[3:]))
    assert [row.values["prompt"] for row in read_rows(path)] == rows


def test_a_paired_surrogate_escape_is_an_ordinary_character(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "\\ud83d\\ude00"}\n')
    assert read_rows(path)[0].values["prompt"] == "\U0001f600"


def test_json_files_may_hold_an_array_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    for content in (b'\n [{"a": 1},\n{"a": 2}]\n', b'{"a": 1}\n{"a": 2}\n'):
        path.write_bytes(content)
        assert [row.values for row in read_rows(path)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_written_rows_are_read_back(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": [USER], "n": 1, "extra": {"a": {}, "b": None, "c": "x"}}, {"prompt": [USER], "late": "y"}]
    write_rows(tmp_path / "sub" / f"d.{suffix}", rows)
    back = [row.values for row in read_rows(tmp_path / "sub" / f"d.{suffix}")]
    assert [(row["prompt"], row.get("n"), row.get("late")) for row in back] == [([USER], 1, None), ([USER], None, "y")]
    assert back[0]["extra"]["c"] == "x"
    assert [path.name for path in (tmp_path / "sub").iterdir()] == [f"d.{suffix}"]  # nothing left aside


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    write_rows(path, [{"a": 1}])
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"column 'a'.*\.jsonl"):
        write_rows(path, [{"a": 1}, {"a": {"b": 2}}])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [b"bytes", float("nan"), {1, 2}])
def test_what_json_cannot_hold_is_refused_and_nothing_is_left(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError, match=r"cannot be written as JSON.*\.parquet"):
        write_rows(tmp_path / "d.jsonl", [{"a": value}])
    assert list(tmp_path.iterdir()) == []
