"""Ranks on CPUs exchange shards through shared memory as their backend would, or all leave it to the backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ranks_help import Fleet
from trew.training.team import Team

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="the system has no /dev/shm")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as started:
        yield started


@pytest.mark.parametrize(("size", "dtype"), [(2, "float32"), (3, "float32"), (2, "bfloat16")])
def test_what_is_gathered_and_summed_is_that_of_all_ranks(fleet, size, dtype):
    # A rank has 64 bytes of a turn: none of it, a part, all, a bit more, and several turns, odd and even.
    lengths = [1, 0, 15, 16, 17, 32, 7, 200, 193, 1, 1, 96]
    ranks = fleet.run("shared_memory_work:exchanges", size, lengths=lengths, dtype=dtype, half=64 * size + 8)
    for turn, length in enumerate(lengths):
        owns, wholes, terms, sums = zip(*(found[turn] for found in ranks), strict=True)
        assert len(owns[0]) == length
        assert all(torch.equal(whole, torch.cat(owns)) for whole in wholes)
        total = terms[0].clone()
        for term in terms[1:]:  # in the order of the ranks, to the bit
            total += term
        assert torch.equal(torch.cat(sums), total)


def test_an_input_that_is_its_part_of_the_output_is_gathered(fleet):
    for whole in fleet.run("shared_memory_work:gathered_in_place", 3):
        assert torch.equal(whole, torch.arange(3.0)[:, None].expand(3, 5))


@pytest.mark.parametrize("fault", ["", "no such folder", "full", "another container"])
def test_all_ranks_have_it_or_none_and_no_file_stays(fleet, fault):
    found = fleet.run("shared_memory_work:opened", 3, fault=fault)
    assert [has for has, _ in found] == [not fault] * 3
    assert all(not files for _, files in found)


@pytest.mark.parametrize("case", [{}, {"dtype": "bfloat16"}, {"how": "offload"}, {"rank": 2}])
def test_two_ranks_take_the_backend_s_step_to_the_bit(fleet, case):
    ours, gloo = (
        fleet.run("ranks_work:steps", 2, name="grpo", count=2, shared=shared, **case) for shared in (True, False)
    )
    for one, other in zip(ours, gloo, strict=True):
        assert [out["loss"] for out in one["outputs"]] == [out["loss"] for out in other["outputs"]]
        assert all(torch.equal(one["weights"][name], tensor) for name, tensor in other["weights"].items())


def test_how_ranks_exchange_is_among_what_a_run_was_made_with():
    """More than two ranks add gradients in another order than their backend does: a resume that goes on otherwise says
    so, as for another number of threads."""
    orders: Any = SimpleNamespace(ranks=SimpleNamespace(exchange="shared memory"))
    assert Team(orders, sharded=True).exchange == {"exchange between ranks": "shared memory"}
    orders.ranks.exchange = ""  # GPUs, or whole weights on every rank
    assert Team(orders).exchange == Team().exchange == {}
