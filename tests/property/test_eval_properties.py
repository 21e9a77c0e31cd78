"""What must hold of intervals and estimators for every input."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trew.eval.statistics import cluster_interval, iqm, paired_difference, pass_at_k, wilson

counts = st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counts, st.floats(0.01, 0.999))
def test_wilson_holds_the_mean_and_stays_in_the_unit_interval(count, level):
    correct, n = count
    mean, low, high = wilson(correct, n, level=level)
    assert 0 <= low <= mean <= high <= 1
    assert low < high


@given(counts, st.integers(2, 50))
def test_more_of_the_same_makes_the_interval_narrower(count, times):
    correct, n = count
    few, many = wilson(correct, n), wilson(correct * times, n * times)
    assert many.high - many.low < few.high - few.low


@given(counts)
def test_wilson_mirrors(count):
    correct, n = count
    right, wrong = wilson(correct, n), wilson(n - correct, n)
    assert (right.low, right.high) == pytest.approx((1 - wrong.high, 1 - wrong.low))


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_one_sample_per_prompt_is_wilson(row):
    assert cluster_interval(row, samples=1) == pytest.approx(wilson(sum(row), len(row)))


@given(st.integers(1, 8).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), min_size=1, max_size=60))))
def test_cluster_interval_lies_between_counting_prompts_and_counting_samples(case):
    k, rights = case
    means, n = np.array(rights) / k, len(rights)
    interval = cluster_interval(means, samples=k)
    widest = wilson(float(means.sum()), n)
    narrowest = wilson(min(sum(rights), n * k), n * k)
    width = interval.high - interval.low
    assert narrowest.high - narrowest.low - 1e-9 <= width <= widest.high - widest.low + 1e-9
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_k_rises_with_k_and_starts_at_the_share(case):
    n, c = case
    values = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    assert values[0] == pytest.approx(c / n)
    assert values[-1] == (1.0 if c else 0.0)
    assert all(0 <= a <= b + 1e-12 and b <= 1 for a, b in itertools.pairwise(values))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_iqm_lies_within_and_ignores_order(values):
    assert min(values) - 1e-6 <= iqm(values) <= max(values) + 1e-6
    assert iqm(values) == pytest.approx(iqm(values[::-1]))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80))
def test_paired_difference_changes_sign_with_its_arguments(pairs):
    before, after = zip(*pairs, strict=True)
    there, back = paired_difference(before, after), paired_difference(after, before)
    assert there.p_value == back.p_value
    assert there.difference == pytest.approx((-back.difference.mean, -back.difference.high, -back.difference.low))
    assert 0 < there.p_value <= 1
    assert there.difference.low <= there.difference.mean <= there.difference.high
