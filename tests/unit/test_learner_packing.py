"""Packs by hand: what is fed, where it is read, and what the budget does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import learner_help as help
from trew.errors import EngineError
from trew.learner.attention import blocks
from trew.learner.packing import check_samples, pack_plain, pack_shared
from trew.types import TrainingSample


def of(prompt: list[int], completion: list[int], group: int = 0) -> TrainingSample:
    return TrainingSample(np.array(prompt, dtype=np.int64), np.array(completion, dtype=np.int64), group)


def test_a_shared_pack_by_hand():
    (pack,) = pack_shared([of([10, 11], [20, 21]), of([10, 11], [30, 31, 32]), of([12], [40], 1)], budget=100)
    assert pack.input_ids.tolist() == [[10, 11, 20, 30, 31, 12]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 2, 3, 0]]
    assert pack.read_at.tolist() == [1, 2, 3, 4, 5]
    assert pack.read_rows.tolist() == [0, 1, 0, 2, 3, 4]
    assert pack.targets.tolist() == [20, 21, 30, 31, 32, 40]
    assert pack.samples == (0, 1, 2)


def test_a_plain_pack_by_hand():
    (pack,) = pack_plain([of([10, 11], [20, 21, 22]), of([12], [40], 1)], budget=100)
    assert pack.samples == (1, 0)  # the shorter first
    assert pack.input_ids.tolist() == [[0, 12, 0, 0], [10, 11, 20, 21]]
    assert pack.mask is not None
    assert pack.mask.tolist() == [[False, True, False, False], [True, True, True, True]]
    assert pack.position_ids.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]
    assert pack.read_at.tolist() == [1, 2, 3]
    assert pack.read_rows.tolist() == [0, 3, 4, 5]
    assert pack.targets.tolist() == [40, 20, 21, 22]


def test_samples_share_a_prompt_only_within_their_group_and_only_an_equal_one():
    items = [of([1, 2], [5, 5]), of([1, 2], [6, 6]), of([1, 2], [7, 7], 1), of([1, 3], [8, 8])]
    (pack,) = pack_shared(items, budget=100)
    assert pack.input_ids.tolist() == [[1, 2, 5, 6, 1, 2, 7, 1, 3, 8]]


@pytest.mark.parametrize("budget", [1, 8, 12, 20, 1000])
@pytest.mark.parametrize("pack", [pack_shared, pack_plain])
def test_every_sample_is_packed_once_and_the_budget_holds(pack, budget):
    items = help.samples()
    packs = pack(items, budget=budget)
    packed = [i for p in packs for i in p.samples]
    assert sorted(packed) == [i for i, s in enumerate(items) if len(s.token_ids)]
    for p in packs:
        assert p.input_ids.size <= budget or len(p.samples) == 1
        assert len(p.targets) == len(p.read_rows) == sum(len(items[i].token_ids) for i in p.samples)
        assert p.targets.tolist() == [t for i in p.samples for t in items[i].token_ids]


def equal(groups: int, size: int, *, prompt: int, completion: int) -> list[TrainingSample]:
    return [of([1] * prompt, [2] * completion, group) for group in range(groups) for _ in range(size)]


@pytest.mark.parametrize(("groups", "want", "sizes"), [
    (4, [(0, 1, 2, 3), (4, 5, 6, 7)], [86, 86]),  # between groups
    (1, [(0,), (1,)], [23, 23]),  # inside the only one
    (3, [(0, 1, 2), (3, 4, 5)], [66, 66]),  # two groups for one rank and one for the other would take longer
])  # fmt: skip
def test_two_ranks_get_equal_packs_where_one_process_has_a_single_one(groups, want, sizes):
    items = equal(groups, 2, prompt=3, completion=21)
    assert len(pack_shared(items, budget=1000)) == 1
    packs = pack_shared(items, budget=1000, ranks=2)
    assert [p.samples for p in packs] == want
    assert [p.input_ids.size for p in packs] == sizes


def test_a_long_prompt_is_not_computed_twice():
    items = equal(1, 2, prompt=200, completion=21)
    assert len(pack_shared(items, budget=1000, ranks=2)) == 1
    assert len(pack_shared(equal(2, 2, prompt=200, completion=21), budget=1000, ranks=2)) == 2


SHAPES = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 30), min_size=1, max_size=6)), min_size=1, max_size=8
)


@given(shape=SHAPES, budget=st.integers(8, 200), ranks=st.integers(2, 5), share=st.booleans())
def test_ranks_take_no_more_rounds_than_the_budget_asks_for(shape, budget, ranks, share):
    items = help.samples(shape)
    pack = pack_shared if share else pack_plain
    alone, packs = pack(items, budget=budget), pack(items, budget=budget, ranks=ranks)
    assert sorted(i for p in packs for i in p.samples) == [i for i, s in enumerate(items) if len(s.token_ids)]
    assert -(-len(packs) // ranks) <= -(-len(alone) // ranks)
    largest = max((p.input_ids.size for p in packs), default=0)
    assert largest <= max((p.input_ids.size for p in alone), default=0)
    assert all(p.input_ids.size <= budget or len(p.samples) == 1 for p in packs)


@pytest.mark.parametrize("pack", [pack_shared, pack_plain])
def test_ranks_get_nearly_equal_shares(pack):
    """Of ragged completions: no rank has a tenth more than the mean."""
    rng = np.random.default_rng(0)
    items = help.samples([(int(rng.integers(5, 20)), rng.integers(1, 60, 8).tolist()) for _ in range(16)])
    for ranks in (2, 3, 4, 8):
        sizes = [p.input_ids.size for p in pack(items, budget=1 << 20, ranks=ranks)]
        assert len(sizes) == ranks
        assert max(sizes) <= 1.1 * sum(sizes) / ranks


def test_a_group_beyond_the_budget_is_split_and_its_prompt_repeated():
    items = [of([1] * 6, [2] * 5) for _ in range(4)]
    packs = pack_shared(items, budget=14)
    assert [p.input_ids.shape[1] for p in packs] == [14, 14]
    assert [p.samples for p in packs] == [(0, 1), (2, 3)]


def test_groups_join_up_to_fewer_tokens_than_one_may_have():
    items = [of([1] * 6, [2] * 5, group) for group in (0, 0, 1, 2, 3, 3)]  # 14, 10, 10 and 14 tokens
    packs = pack_shared(items, budget=14, join=12)
    assert [p.samples for p in packs] == [(0, 1), (2,), (3,), (4, 5)]
    assert [p.samples for p in pack_shared(items, budget=40, join=20)] == [(0, 1), (2, 3), (4, 5)]
    assert [p.samples for p in pack_shared(items, budget=40)] == [(0, 1, 2), (3, 4, 5)]


def test_samples_without_tokens_are_left_out():
    assert pack_shared([of([1], [])], budget=10) == []
    assert pack_plain([of([1], [])], budget=10) == []


def test_padding_inside_attention_stays_below_a_factor_of_two_per_side():
    rng = np.random.default_rng(0)
    items = help.samples([(int(rng.integers(1, 60)), rng.integers(1, 200, 6).tolist()) for _ in range(5)])
    (pack,) = pack_shared(items, budget=1 << 20)
    found = blocks(pack.segments).blocks
    fed = pack.input_ids.size
    assert sum(b.queries.numel() for b in found) < 2 * fed
    needed = sum(s.length * (s.length + s.prefix_length) for s in pack.segments)
    assert sum(b.visible.numel() for b in found) < 4 * needed


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        (of([], [1]), "sample 0: the prompt has no tokens"),
        (of([1, 300], [1]), "the prompt holds token id 300, but the model knows 0 to 259"),
        (of([1], [2, -1]), "the completion holds token id -1"),
    ],
)
def test_samples_that_cannot_be_run_are_refused_by_name(sample, says):
    with pytest.raises(EngineError, match=says):
        check_samples([sample], vocab_size=260)


def test_tokens_that_were_not_sampled_are_fed_and_never_read():
    sampled = np.array([True, False, False, True])
    episode = TrainingSample(np.array([10, 11]), np.array([20, 21, 22, 23]), 0, sampled)
    (pack,) = pack_shared([episode, of([10, 11], [30, 31])], budget=100)
    assert pack.input_ids.tolist() == [[10, 11, 20, 21, 22, 30]]
    assert pack.read_at.tolist() == [1, 4, 5]
    assert pack.read_rows.tolist() == [0, 1, 0, 2]
    assert pack.targets.tolist() == [20, 23, 30, 31]
    (pack,) = pack_plain([episode, of([12], [40], 1)], budget=100)
    assert pack.samples == (1, 0)
    assert pack.read_at.tolist() == [1, 4]  # the columns in which any row is read
    assert pack.read_rows.tolist() == [0, 2, 3]
    assert pack.targets.tolist() == [40, 20, 23]
