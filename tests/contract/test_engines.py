"""What every engine keeps: see ``trew.rollout.engine``. tests/backends runs all of this with compiled kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import tiny
from engine_help import ScriptedEngine
from trew.errors import EngineError, NumericsError, TrewError
from trew.rollout import Engine, Renderer
from trew.rollout.engine import Finished, Lost, Request
from trew.rollout.torch_engine import TorchEngine
from trew.types import Prompt, Sampling, Turn

TEXTS = ("hi", "a longer prompt than the others, well beyond any window", "how are you?", "x")
PROMPTS = [Prompt(uid=f"p{i}", text=text) for i, text in enumerate(TEXTS)]
SAMPLING = Sampling(max_tokens=12, seed=3)


class Kind(NamedTuple):
    """An implementation: ``make`` gives one that runs at most four requests at a time; inside ``broken`` its polls
    fail with ``failure``; ``publish`` gives it the weights as another version."""

    make: Callable[[], Any]
    broken: Callable[[Any], contextlib.AbstractContextManager[object]]
    failure: type[TrewError] = NumericsError
    publish: Callable[[Any, int], None] = lambda engine, version: setattr(engine, "version", version)


@contextlib.contextmanager
def without_numbers(engine: TorchEngine) -> Iterator[None]:
    weight = engine.model.get_input_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    yield
    with torch.no_grad():
        weight.copy_(kept)


@contextlib.contextmanager
def failing(engine: ScriptedEngine) -> Iterator[None]:
    engine.failure = NumericsError("not finite", quantity="rollout_logprobs")
    yield


def torch_engine(kind: str = "llama", backend: Any = None, **widths: int) -> TorchEngine:
    return TorchEngine(tiny.model(kind, **widths), Renderer(tiny.tokenizer()), batch=4, backend=backend)


KINDS = {
    "torch": Kind(torch_engine, without_numbers),
    "torch, sliding windows": Kind(lambda: torch_engine("gemma3"), without_numbers),
    "scripted": Kind(ScriptedEngine, failing),
    "scripted, one version": Kind(lambda: ScriptedEngine(in_flight_updates=False), failing),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def engine(kind: Kind) -> Engine:
    return kind.make()


def requests(*, n: int = 3, of: list[Prompt] = PROMPTS, sampling: Sampling = SAMPLING, mark: str = "") -> list[Request]:
    return [Request(f"{mark}{p.uid}/{sample}", p, sample, sampling) for p in of for sample in range(n)]


def drained(engine: Engine) -> list[Finished | Lost]:
    reports: list[Finished | Lost] = []
    while found := engine.poll():
        reports += found
    return reports


def turns(reports: list[Finished | Lost]) -> dict[str, Turn]:
    """By id; nothing was lost, nothing reported twice."""
    found = {report.id: report.turn for report in reports if isinstance(report, Finished)}
    assert len(found) == len(reports)
    return found


def tokens(reports: list[Finished | Lost]) -> dict[str, list[int]]:
    return {each: turn.token_ids.tolist() for each, turn in turns(reports).items()}


def asked(engine: Engine, wanted: list[Request]) -> dict[str, list[int]]:
    engine.submit(wanted)
    return tokens(drained(engine))


def test_every_request_is_reported_once(engine):
    assert engine.poll() == []
    engine.submit(requests())
    assert turns(drained(engine)).keys() == {request.id for request in requests()}
    assert engine.poll() == engine.poll(0) == []


def test_a_poll_without_patience_returns_before_anything_is_finished(engine):
    engine.submit(requests())
    found = [engine.poll(0)]
    while sum(map(len, found)) < len(requests()):
        found.append(engine.poll(0))
    assert [] in found
    assert tokens([report for reports in found for report in reports]) == asked(engine, requests())


def test_a_poll_with_time_reports_something(engine):
    engine.submit(requests())
    assert engine.poll(60.0)


def test_turns_are_whole(kind):
    engine = kind.make()
    kind.publish(engine, 5)
    engine.submit(requests(n=6, sampling=dataclasses.replace(SAMPLING, stop=tuple("abcdefgh"))))
    found = turns(drained(engine))
    ends = engine.renderer.stop_ids if hasattr(engine, "renderer") else ()
    for turn in found.values():
        count = len(turn.token_ids)
        assert 1 <= count <= SAMPLING.max_tokens
        assert len(turn.context_ids)
        assert (turn.context_ids.dtype, turn.token_ids.dtype) == (np.int64, np.int64)
        assert [(span.version, span.start, span.end) for span in turn.versions] == [(5, 0, count)]
        assert (turn.logprobs <= 0).all()
        if turn.finish_reason == "length":
            assert count == SAMPLING.max_tokens
            assert turn.token_ids[-1] not in ends
        else:
            assert turn.finish_reason == "stop"
    assert {turn.finish_reason for turn in found.values()} == {"stop", "length"}


def test_capabilities_are_true(engine):
    engine.submit(requests())
    for turn in turns(drained(engine)).values():
        assert (turn.entropies is not None) == engine.capabilities.entropies
        assert (turn.policy_logprobs is not None) == engine.capabilities.untruncated_logprobs


def test_equal_requests_get_equal_turns(kind):
    """Whatever else is asked, in whatever order and under whatever id. vLLM does not promise it, and does so on a
    CPU."""
    engine = kind.make()
    assert engine.capabilities.reproducible or kind.publish is not Kind._field_defaults["publish"]
    expected = asked(engine, requests())
    assert asked(engine, requests()) == expected
    assert asked(kind.make(), requests()[::-1]) == expected
    assert asked(engine, requests(mark="other ")) == {f"other {each}": ids for each, ids in expected.items()}
    for prompt in PROMPTS:
        alone = asked(engine, requests(of=[prompt]))
        assert alone == {each: expected[each] for each in alone}


def test_requests_may_come_while_others_are_running(engine):
    expected = asked(engine, requests(n=5))
    left, reports = requests(n=5), []
    while left or len(reports) < len(expected):
        engine.submit(left[:2])
        del left[:2]
        reports += engine.poll(0)
    assert tokens(reports) == expected


def test_requests_may_be_sampled_differently(engine):
    ways = [
        SAMPLING, dataclasses.replace(SAMPLING, temperature=0.7, top_p=0.9), dataclasses.replace(SAMPLING, seed=9),
        dataclasses.replace(SAMPLING, temperature=0.0), dataclasses.replace(SAMPLING, max_tokens=5),
    ]  # fmt: skip
    each = [requests(sampling=way, mark=f"{i} ") for i, way in enumerate(ways)]
    expected = {name: ids for wanted in each for name, ids in asked(engine, wanted).items()}
    mixed = [request for together in zip(*each, strict=True) for request in together]
    assert asked(engine, mixed) == expected


@pytest.mark.parametrize("passes", [0, 1, 5])
def test_what_is_cancelled_is_never_reported(engine, passes):
    """Queued and running requests; the others get what they would have got."""
    expected = asked(engine, requests())
    engine.submit(requests())
    reports = [report for _ in range(passes) for report in engine.poll(0)]
    early = {report.id for report in reports}
    gone = [request.id for request in requests()][::2]
    engine.cancel([*gone, "nobody's"])
    engine.cancel(gone)
    reports += drained(engine)
    assert tokens(reports) == {each: ids for each, ids in expected.items() if each in early or each not in gone}
    again = [request for request in requests() if request.id in gone]  # their ids are free
    assert asked(engine, again) == {each: expected[each] for each in gone}


@pytest.mark.parametrize("passes", [0, 2])
def test_nothing_is_left_when_all_are_cancelled(kind, passes):
    engine = kind.make()
    expected = asked(engine, requests())
    engine.submit(requests())
    for _ in range(passes):
        engine.poll(0)
    engine.cancel([request.id for request in requests()])
    assert engine.poll() == []
    kind.publish(engine, engine.version + 1)  # no request is unfinished
    assert asked(engine, requests()) == expected


def test_an_id_is_unique_among_unfinished_requests(engine):
    first, *others = requests()
    engine.submit([first])
    for wanted in ([*others, first], [others[0], others[0]]):
        with pytest.raises(EngineError, match="p0/"):
            engine.submit(wanted)
    assert turns(drained(engine)).keys() == {first.id}  # of a submit that is refused, nothing is taken
    assert asked(engine, [first]).keys() == {first.id}


def test_what_cannot_be_generated_is_refused_whole(engine):
    wrong = Request("wrong", PROMPTS[2], 0, dataclasses.replace(SAMPLING, max_tokens=0))
    with pytest.raises(EngineError, match=r"'p2'.*max_tokens"):
        engine.submit([*requests(), wrong])
    assert engine.poll() == []
    assert len(asked(engine, requests())) == len(requests())


def test_a_version_may_come_in_flight_only_where_the_engine_says_so(kind):
    engine = kind.make()
    engine.submit(requests())
    reports = engine.poll(0)
    engine.version = engine.version  # publishing a version twice changes nothing
    if engine.capabilities.in_flight_updates:
        kind.publish(engine, 1)
    else:
        with pytest.raises(EngineError, match="unfinished"):
            engine.version = 1
    found = turns([*reports, *drained(engine)])  # a turn checks that its spans cover it
    versions = {span.version for turn in found.values() for span in turn.versions}
    assert versions == ({0, 1} if engine.capabilities.in_flight_updates else {0})
    kind.publish(engine, 2)
    engine.submit(requests())
    assert {span.version for turn in turns(drained(engine)).values() for span in turn.versions} == {2}


@pytest.mark.parametrize("passes", [0, 2])
def test_after_a_failure_it_is_empty_and_usable(kind, passes):
    engine = kind.make()
    expected = asked(engine, requests())
    engine.submit(requests())
    for _ in range(passes):
        engine.poll(0)
    with kind.broken(engine), pytest.raises(kind.failure):
        drained(engine)
    assert engine.poll() == []
    assert asked(engine, requests()) == expected


def test_state_goes_to_another_engine(kind):
    engine, other = kind.make(), kind.make()
    kind.publish(engine, 7)
    other.load_state(engine.state())
    assert other.version == 7
    kind.publish(other, 7)
    assert asked(other, requests()) == asked(engine, requests())


# ---- engines with a model in this process


@pytest.fixture
def embedded(engine: Engine) -> TorchEngine:
    if not isinstance(engine, TorchEngine):
        pytest.skip("it has no model here")
    return engine


def test_a_poll_leaves_no_mode_behind(embedded):
    """Between polls the model is whole, and can be trained."""
    model = embedded.model
    model.train()
    next(iter(model.children())).eval()  # a mode of its own
    modes = [module.training for module in model.modules()]
    embedded.autocast = torch.bfloat16
    embedded.submit(requests())
    for _ in range(3):
        embedded.poll(0)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert [module.training for module in model.modules()] == modes
        assert not any("forward" in module.__dict__ for module in model.modules())
        model(input_ids=torch.arange(4)[None]).logits.sum().backward()
    drained(embedded)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_interrupt_anywhere_leaves_it_empty_and_usable(embedded, error, monkeypatch):
    expected = asked(embedded, requests())
    advance = type(embedded)._filled
    for at in (1, 3):
        left = [at]

        def interrupted(self: Any, left: list[int] = left) -> Any:
            schedule = advance(self)
            left[0] -= 1
            if not left[0]:
                raise error
            return schedule

        embedded.submit(requests())
        with monkeypatch.context() as within:
            within.setattr(type(embedded), "_filled", interrupted)
            for _ in range(at - 1):
                embedded.poll(0)
            with pytest.raises(error):
                embedded.poll(0)
        assert embedded.poll() == []
        assert asked(embedded, requests()) == expected
