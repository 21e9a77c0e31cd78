"""What every ``Parallel`` promises, and that a step computed by several ranks is the step of one process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import learner_help as help
from trew.errors import NumericsError
from trew.learner import Parallel, Solo
from trew.learner.dealing import deal, rounds
from trew.objective import preset


class Threads:
    """One of several ranks that are threads of this process. Between two collectives one thread runs at a time, since
    the plan of packed attention belongs to the process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, turn: threading.Lock, board: list[Any]):
        self.rank, self.size, self.turn = rank, size, turn
        self._barrier, self._board = barrier, board

    def beat(self) -> None:
        pass

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._wait()
        found = list(self._board)
        self._wait()  # nobody writes before everybody has read
        return found

    def _wait(self) -> None:
        self.turn.release()
        try:
            self._barrier.wait(300)
        finally:
            self.turn.acquire()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        every = self.gather([tensor.detach().clone() for tensor in tensors])
        with torch.no_grad():
            for tensor, *parts in zip(tensors, *every, strict=True):
                tensor.copy_(sum(parts[1:], start=parts[0]))


def ranks(size: int) -> list[Parallel]:
    if size == 1:
        return [Solo()]
    barrier, turn, board = threading.Barrier(size), threading.Lock(), [None] * size
    return [Threads(rank, size, barrier, turn, board) for rank in range(size)]


def on_all(size: int, work: Callable[[Parallel], Any]) -> list[Any]:
    """What ``work`` gives on each rank; a NumericsError is a result."""

    def caught(parallel: Parallel) -> Any:
        with getattr(parallel, "turn", nullcontext()):
            try:
                return work(parallel)
            except NumericsError as error:
                return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(caught, ranks(size)))


SIZES = pytest.mark.parametrize("size", [1, 2, 3])


@SIZES
def test_every_item_has_exactly_one_rank(size):
    dealt = on_all(size, lambda parallel: rounds([3, 1, 2, 2, 5], parallel))
    assert sorted(own for rank in dealt for own, _ in rank if own is not None) == [0, 1, 2, 3, 4]
    for of_ranks in zip(*dealt, strict=True):  # one round as each rank sees it
        assert {tuple(every) for _, every in of_ranks} == {tuple(own for own, _ in of_ranks if own is not None)}


@given(costs=st.lists(st.integers(1, 100)), size=st.integers(1, 6))
def test_no_rank_has_more_than_the_mean_and_one_item(costs, size):
    dealt = deal(costs, size)
    assert sorted(item for items in dealt for item in items) == list(range(len(costs)))
    assert all(sum(costs[i] for i in items) <= sum(costs) / size + max(costs, default=0) for items in dealt)


@SIZES
def test_sums_and_values_are_equal_on_all_ranks(size):
    def work(parallel: Parallel) -> tuple[list[Tensor], list[Any]]:
        tensors = [torch.tensor([1.0, float(parallel.rank)]), torch.tensor(parallel.rank + 1)]
        parallel.sum_(tensors)
        return tensors, parallel.gather({"rank": parallel.rank})

    for (pair, count), values in on_all(size, work):
        assert pair.tolist() == [size, sum(range(size))]
        assert int(count) == sum(range(1, size + 1))
        assert values == [{"rank": rank} for rank in range(size)]


# One objective for each scope in which a token's loss may depend on others, and one with an entropy bonus.
OBJECTIVES = {"dr-grpo": {}, "gspo": {}, "kl-cov": help.OVERRIDES["kl-cov"], "grpo": {"entropy_bonus": 0.05}}


@pytest.mark.parametrize(("size", "budget"), [(2, 24), (3, 24), (3, 4096)])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_several_ranks_take_the_step_of_one(name, size, budget):
    objective, items = preset(name, **OBJECTIVES[name]), help.samples()
    data = help.prepared(help.model(), objective, items, seed=3)

    def work(parallel: Parallel) -> Any:
        net = copy.deepcopy(help.model())
        learner = help.learner(net, objective, parallel=parallel, microbatch_tokens=budget, lr=1e-4)
        logprobs = learner.logprobs(items)
        output = learner.step(items, data)
        return logprobs, output, dict(net.named_parameters())

    ((alone, step, weights),) = on_all(1, work)
    found = on_all(size, work)
    for logprobs, output, parameters in found:
        torch.testing.assert_close(logprobs, alone, rtol=0, atol=2e-6)
        assert output.policy_version == 1
        assert output.loss == pytest.approx(step.loss, abs=1e-6)
        assert output.grad_norm == pytest.approx(step.grad_norm, rel=1e-5)
        assert output.metrics.keys() == step.metrics.keys()
        for key, (value, count) in step.metrics.items():
            if key == "learner_tokens":  # prompts of groups that are split count once more
                assert value <= output.metrics[key][0] <= value + (size - 1) * 13
                continue
            assert output.metrics[key] == pytest.approx((value, count), rel=1e-4, abs=1e-5), key
        for key, tensor in weights.items():
            torch.testing.assert_close(parameters[key], tensor, rtol=0, atol=1e-5, msg=key)
    first = found[0][2]
    assert all(torch.equal(first[key], other[2][key]) for other in found for key in first)


def test_a_rank_without_a_pack_takes_the_same_step():
    # One pack for three ranks: a prompt this long is not worth computing twice.
    objective, items = preset("dr-grpo"), help.samples(((40, (3, 2)),))
    data = objective.prepare(help.batch(items))

    def work(parallel: Parallel) -> Any:
        net = copy.deepcopy(help.model())
        help.learner(net, objective, parallel=parallel).step(items, data)
        return dict(net.named_parameters())

    ((alone),) = on_all(1, work)
    for parameters in on_all(3, work):
        assert all(torch.equal(parameters[key], alone[key]) for key in alone)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_numbers_that_are_not_finite_on_one_rank_end_the_step_on_all(size):
    objective, items = preset("dr-grpo"), help.samples()
    data = objective.prepare(help.batch(items))

    def work(parallel: Parallel) -> Any:
        net = copy.deepcopy(help.model())
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        learner = help.learner(net, objective, parallel=parallel, microbatch_tokens=8)
        learner.verify(items)
        if parallel.rank == size - 1:
            hurt = learner._runner.accumulate

            def broken(pack: Any, rule: Any, **how: Any) -> None:
                hurt(pack, lambda where, logprobs, entropies: rule(where, logprobs * float("nan"), entropies), **how)

            learner._runner.accumulate = broken
        try:
            learner.step(items, data)
        finally:
            assert all(p.grad is None for p in net.parameters())
            assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
            assert learner.version == 0

    found = on_all(size, work)
    assert all(isinstance(error, NumericsError) for error in found)
    assert len({(str(error), error.samples) for error in found}) == 1
