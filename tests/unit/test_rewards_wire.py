"""Values on their way to the process of a user's function and back."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trew.errors import RewardError
from trew.rewards.user.wire import decode, encode

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.datetimes(), st.dates(),
    st.times(), st.timedeltas(), st.decimals(allow_nan=False), st.fractions(),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.one_of(st.text(), st.integers()), inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_values_arrive_as_they_were_sent(value: object) -> None:
    assert repr(decode(encode(value))) == repr(value)


def test_types_arrive_as_they_were_sent() -> None:
    sent = [
        float("nan"), -0.0, "\ud800", "\0", {"\0": 1}, {1: {2: 3}}, {("a", 1): 2}, {"x"}, frozenset({1}),
        datetime(2026, 1, 1, tzinfo=UTC), date(2026, 1, 1), clock(1, 2), timedelta(1, 2, 3), Decimal("1.10"),
        Fraction(1, 3), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("x"),
    ]  # fmt: skip
    for value in sent:
        back = decode(encode(value))
        assert repr(back) == repr(set(value) if isinstance(value, frozenset) else value)
    assert decode(encode({"x", "y"})) == {"x", "y"}  # in no order that repr could show
    array = decode(encode(np.arange(6, dtype=np.int16).reshape(2, 3)))
    assert (array.dtype, array.tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])
    assert decode(encode(type("Price", (Decimal,), {})("1.10"))) == Decimal("1.10")  # its class is not known there
    with pytest.raises(RewardError, match="type object"):
        encode([object()])
