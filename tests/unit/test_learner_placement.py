"""A learner whose tensors leave the device and come back: the same parameters, with the same values."""

from __future__ import annotations

import copy

import pytest
import torch

import learner_help as help
from ranks_work import Moves
from trew.learner.placement import Placement
from trew.objective import preset


def made(net=None, **settings):
    net = net or copy.deepcopy(help.model())
    return help.learner(net, preset("grpo", beta=0.1), reference=copy.deepcopy(help.model()), **settings)


def outputs(learner, moves=None):
    """Losses of three steps; between them, everything leaves and comes back."""
    placement = Placement(learner, move=moves)
    items, out = help.samples(), []
    data = help.prepared(help.model(), learner.objective, items, seed=3)
    for _ in range(3):
        placement.enter()
        learner.logprobs(items, reference=True)
        out.append(learner.step(items, data).loss)
        placement.leave()
        learner.update_reference()  # on whichever side they are
    return out


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-offload"])
def test_what_has_moved_goes_on_to_the_bit(optimizer):
    still, moving, moves = made(optimizer=optimizer), made(optimizer=optimizer), Moves()
    before = list(moving.model.parameters())
    assert outputs(still) == outputs(moving, moves)
    assert all(a is b for a, b in zip(before, moving.model.parameters(), strict=True)), (
        "an optimizer knows them by that"
    )
    for (name, a), (_, b) in zip(still.state()[0].items(), moving.state()[0].items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-offload"])
def test_weights_reference_and_moments_leave(optimizer):
    """Moments that are in CPU memory for good stay there."""
    learner, moves = made(optimizer=optimizer), Moves()
    outputs(learner)
    Placement(learner, move=moves).leave()
    parameters = list(learner.model.parameters())
    size = sum(p.numel() for p in parameters)
    buffers = sum(b.numel() for b in learner.model.buffers())
    moments = 2 * size + len(parameters) if optimizer == "adamw" else 0
    assert moves.numbers == 2 * (size + buffers) + moments


def test_it_moves_only_when_it_is_elsewhere():
    moves = Moves()
    placement = Placement(made(), move=moves)
    placement.enter()
    assert moves.calls == []
    placement.leave()
    first = len(moves.calls)
    placement.leave()
    assert len(moves.calls) == first > 0
    assert placement.away


def test_adapters_and_gradients_move_with_their_model():
    learner, moves = made(), Moves()
    items = help.samples()
    learner.accumulate(items, help.prepared(help.model(), learner.objective, items, seed=3))
    grads = [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]
    assert grads
    Placement(learner, move=moves).leave()
    after = [p.grad for p in learner.model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(grads, after, strict=True))


def test_on_a_cpu_nothing_moves():
    learner = made()
    pointers = [p.data_ptr() for p in learner.model.parameters()]
    placement = Placement(learner)
    placement.leave()
    placement.enter()
    assert pointers == [p.data_ptr() for p in learner.model.parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_empty_while_the_learner_is_away():
    elsewhere = torch.cuda.memory_allocated()  # what other tests of this process still hold
    learner = made(copy.deepcopy(help.model()).to("cuda"))
    there = torch.cuda.memory_allocated() - elsewhere
    placement = Placement(learner)
    placement.leave()
    assert torch.cuda.memory_allocated() - elsewhere < there / 10
    assert {p.device.type for p in learner.model.parameters()} == {"cpu"}
    placement.enter()
    assert {p.device.type for p in learner.model.parameters()} == {"cuda"}
