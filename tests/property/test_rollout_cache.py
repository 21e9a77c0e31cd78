"""The slot cache against a list of tensors per row, for any order of rows that come in, grow and leave."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers.cache_utils import DynamicCache

from trew.rollout.torch_engine import cache as module
from trew.rollout.torch_engine.cache import SlotCache

SLOTS, HEADS, SIZE, LAYERS = 5, 2, 3, 2
numbers = iter(range(1, 10**9))


def fresh(*shape: int) -> torch.Tensor:
    """Numbers that occur nowhere else, so that a misplaced row or column shows."""
    count = int(torch.tensor(shape).prod())
    return torch.tensor([next(numbers) for _ in range(count)], dtype=torch.float64).view(shape)


def admit(cache: SlotCache, rows: list[list[torch.Tensor]], lengths: list[int], shared: bool) -> None:
    """Adds a row per length, or twice the same prompt's."""
    prefill = DynamicCache()
    width = max(lengths)
    for layer in range(LAYERS):
        keys = fresh(len(lengths), HEADS, width, SIZE)
        prefill.update(keys, -keys, layer)
    source = [i for i in range(len(lengths)) for _ in range(2 if shared else 1)][: SLOTS - cache.rows]
    cache.add(prefill, source=torch.tensor(source), lengths=[lengths[i] for i in source], room=48)
    for i in source:
        rows.append([layer.keys[i, :, width - lengths[i] :] for layer in prefill.layers])


@pytest.fixture(scope="module", autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # with it, torch.empty holds NaN
    with mock.patch.object(module, "_ROOM", 0):  # buffers move as often as they can
        yield
    torch.use_deterministic_algorithms(before)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_row_reads_its_own_tokens(data):
    cache, rows = SlotCache(SLOTS), []
    for _ in range(data.draw(st.integers(1, 12))):
        if cache.rows < SLOTS and (not rows or data.draw(st.booleans())):
            lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=SLOTS - cache.rows))
            admit(cache, rows, lengths, data.draw(st.booleans()))
        elif data.draw(st.booleans()):
            alive = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True).map(sorted))
            rows = [rows[slot] for slot in cache.keep(alive)]
        for _ in range(data.draw(st.integers(0, 4)) if rows else 0):
            for layer in range(LAYERS):
                new = fresh(len(rows), HEADS, 1, SIZE)
                keys, values = cache.update(new, -new, layer)
                for slot, row in enumerate(rows):
                    row[layer] = torch.cat([row[layer], new[slot]], dim=1)
                    seen = slice(cache.starts[slot] - cache.begin, None)
                    assert torch.equal(keys[slot, :, seen], row[layer])
                    assert torch.equal(values[slot, :, seen], -row[layer])
                    assert torch.isfinite(keys).all()
                assert keys.shape[2] == max(row[layer].shape[1] for row in rows), "no column without a use"
        assert cache.rows == len(rows) == len(cache.starts)
        assert [cache.end - start for start in cache.starts] == [row[0].shape[1] for row in rows]
