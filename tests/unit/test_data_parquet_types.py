"""Parquet finds one type for a column: rows that it would change are refused, and what readers take alike is not."""

import datetime as dt
from decimal import Decimal

import numpy as np
import pytest

from trew.data.files import read_rows, write_rows
from trew.errors import DataError


def stored(path, *golds, name="gold"):
    write_rows(path / "d.parquet", [{name: gold} for gold in golds])
    return [row.values[name] for row in read_rows(path / "d.parquet")]


@pytest.mark.parametrize(
    ("golds", "row"),
    [
        ((42, 0.5), 1), ((0.5, 42), 2), (([1, 2], [0.5], []), 1), (({"x": 1}, {"x": 0.5}), 1),
        (({"x": 1}, {"y": "z"}), 1), (({"x": 1, "y": 2}, {"x": 1}), 2),
        (([{"a": 1}, {"b": 1}],), 1), (({"t": {"a": 1}}, {"t": {"b": 1}}), 1),
        (("a", b"a"), 1), ((1, True), None), ((1.0, True), 2), ((dt.date(2020, 1, 1), dt.datetime(2020, 1, 1, 5)), 2),
        ((None, 2, {"x": 1}), None), ((True, 5), None), (("42", 5), None), ((2**53 + 1, 0.5), None),
    ],
)  # fmt: skip
def test_rows_that_parquet_would_change_are_refused(tmp_path, golds, row):
    with pytest.raises(DataError, match=r"column 'gold' cannot be written to parquet: .*; write \.jsonl") as caught:
        stored(tmp_path, *golds)
    assert row is None or f"mixed types: row {row} has" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "golds",
    [
        (1, None, 2), (None, None), (0.5, -0.0), (["a"], [], None), ({"x": 1}, None), ({"x": None}, {"x": 1}),
        (b"a", None), (Decimal("1.50"), Decimal(2)), (dt.date(2020, 1, 1),), (True, False), ([None, 1],),
        (dt.datetime(2020, 1, 1, tzinfo=dt.UTC),),
    ],
)  # fmt: skip
def test_rows_of_one_type_are_stored_as_they_are(tmp_path, golds):
    assert stored(tmp_path, *golds) == list(golds)


def test_what_the_docstring_allows_is_stored(tmp_path):
    assert stored(tmp_path, {}, {"k": 1}, {"k": {}}) == [None, {"k": 1}, None]
    assert stored(tmp_path, {"a": {}, "c": 1}, {"a": {"k": 1}, "c": 2}) == [
        {"a": None, "c": 1}, {"a": {"k": 1}, "c": 2},
    ]  # fmt: skip
    assert stored(tmp_path, (1, 2), [3]) == [[1, 2], [3]]
    assert stored(tmp_path, np.int64(3), np.int64(4)) == [3, 4]
    assert stored(tmp_path, np.arange(2), np.arange(1)) == [[0, 1], [0]]
    assert str(stored(tmp_path, float("nan"), 1.0)) == "[nan, 1.0]"


def test_keys_that_messages_and_extra_info_lack_are_null(tmp_path):
    """Their readers take a null key for one that is absent."""
    user, named = {"role": "user", "content": "q"}, {"role": "user", "content": "q", "name": "ann"}
    assert stored(tmp_path, [user], [named, user], name="prompt")[0] == [{**user, "name": None}]
    assert stored(tmp_path, {"a": 1}, {"b": {"c": 1}}, {"b": {"d": 1}}, name="extra_info")[0] == {"a": 1, "b": None}
    with pytest.raises(DataError, match=r"column 'extra_info'.*mixed types: row 1"):
        stored(tmp_path, {"level": 1}, {"level": 0.5}, name="extra_info")
