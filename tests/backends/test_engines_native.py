"""What every engine keeps, with a backend: compiled kernels for all layers, linear layers or draws; static buffers."""

from __future__ import annotations

import pytest
import test_engines
import torch
from test_engines import (  # noqa: F401
    Kind,
    embedded,
    engine,
    requests,
    test_a_poll_leaves_no_mode_behind,
    test_a_poll_without_patience_returns_before_anything_is_finished,
    test_a_version_may_come_in_flight_only_where_the_engine_says_so,
    test_after_a_failure_it_is_empty_and_usable,
    test_an_id_is_unique_among_unfinished_requests,
    test_an_interrupt_anywhere_leaves_it_empty_and_usable,
    test_capabilities_are_true,
    test_equal_requests_get_equal_turns,
    test_every_request_is_reported_once,
    test_nothing_is_left_when_all_are_cancelled,
    test_requests_may_be_sampled_differently,
    test_requests_may_come_while_others_are_running,
    test_turns_are_whole,
    test_what_is_cancelled_is_never_reported,
    without_numbers,
)

import tiny
from trew.backends.cpu import build
from trew.backends.cpu.backend import CpuBackend
from trew.backends.cuda_graphs.backend import CudaGraphsBackend
from trew.backends.cuda_graphs.graphs import Graphs
from trew.errors import NumericsError
from trew.rollout.torch_engine import TorchEngine

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason="no compiler")


def kernels(kind: str = "llama", *, products: bool = True) -> TorchEngine:
    return test_engines.torch_engine(kind, CpuBackend(products=products), **tiny.wide(kind))


KINDS = {
    "layers": Kind(kernels, without_numbers),
    "linear layers": Kind(lambda: kernels("gpt_neox"), without_numbers),
    "draws": Kind(lambda: kernels("gpt_neox", products=False), without_numbers),
    "static": Kind(
        lambda: test_engines.torch_engine(backend=CudaGraphsBackend(lambda device: Graphs(None))), without_numbers
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def leased(of: TorchEngine) -> bool:
    assert isinstance(of.backend, CpuBackend)
    with of.backend.arena.lease() as arena:
        return arena is not of.backend.arena


@pytest.mark.parametrize("end", ["finished", "cancelled", "failed"])
def test_memory_is_leased_until_nothing_is_unfinished(end):
    """The learner's passes want the same arena."""
    made = kernels()
    made.submit(requests())
    assert not leased(made)
    made.poll(0)
    assert leased(made)
    if end == "finished":
        while made.poll():
            pass
    elif end == "cancelled":
        made.cancel([request.id for request in requests()][1:])
        assert leased(made)
        made.cancel([request.id for request in requests()][:1])
    else:
        with torch.no_grad():  # layers and head are packed, the embedding is the model's own
            made.model.get_input_embeddings().weight.fill_(float("nan"))
        with pytest.raises(NumericsError):
            made.poll()
    assert not leased(made)
    assert not made.refused
