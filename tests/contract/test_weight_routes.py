"""What every route of the weights to a server keeps: files, streams, shared memory.

On stand-ins, or on a real server (``vllm_help``); ``TREW_VLLM_ROUTES`` names the routes that the real one takes.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trew.weights.files as files
import trew.weights.places as places
from fake_vllm import CLOSE
from trew.errors import EngineError
from trew.rollout.vllm import buckets
from trew.rollout.vllm.client import call
from trew.rollout.vllm.update import Published, StaleWeights, update
from trew.weights.files import PublishedFiles
from trew.weights.memory import PublishedSegments
from trew.weights.stream import PublishedStream
from vllm_help import REAL, House, any_house, as_at_first, house, made

ROUTES = (os.environ.get("TREW_VLLM_ROUTES") or "files,nccl,ipc").split(",")
CLASSES = {"files": PublishedFiles, "nccl": PublishedStream, "ipc": PublishedSegments}
WHOLE_FIRST = ("files", "ipc")
"""The routes that verify a whole version before they touch the model."""
GAP = 1e-5
"""Nats between two computations of the same log-prob in float32."""

alone = pytest.mark.skipif(bool(REAL), reason="a real server is not broken on request")


@pytest.fixture(scope="module", params=ROUTES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with any_house(tmp_path_factory.mktemp("routes"), sync=request.param) as found:
        assert isinstance(found.weights, CLASSES[request.param])
        yield found


@pytest.fixture
def one(whole: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """A policy and a server, which gets its weights in several parts."""
    small_parts(monkeypatch)
    with as_at_first(whole):
        yield whole
        if REAL:  # the next test begins with a server that is in order
            whole.publish(whole.engine(publish=False), 0)


@pytest.fixture(params=ROUTES)
def two(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """A policy and two stand-ins."""
    small_parts(monkeypatch)
    with house(tmp_path, servers=2, sync=request.param) as found:
        yield found


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 14)
    monkeypatch.setattr(files, "SHARD_BYTES", 1 << 14)


def state(house: House) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in house.net.state_dict().items()}


def same(house: House, number: int, kept: dict[str, torch.Tensor] | None = None) -> bool:
    """Whether a stand-in has these weights to the bit, by default the policy's, and its head too."""
    fake, own = house.fakes[number], house.net.state_dict() if kept is None else kept
    served = dict(fake.model.named_parameters())
    return all(torch.equal(own[n], served[n]) for n in served) and torch.equal(fake.head, own["lm_head.weight"])


def newest(house: House) -> Published:
    assert house.weights.newest is not None
    return house.weights.newest


def serves(house: House, published: Published) -> bool:
    """Whether the server has these weights now, by the canary; it may have been left paused."""
    call(house.endpoints[0], "POST", "/resume", what="resuming", timeout_s=60)
    nothing = dataclasses.replace(published, route=Nothing())
    finish = {"weight_version": published.label}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trew.rollout.vllm.update._replace", lambda *_, **__: finish)
        try:
            return update(house.endpoints[0], nothing, timeout_s=60).gap < GAP
        except StaleWeights:
            return False


class Nothing:
    """A route that brings no weights."""

    def load(self, *_: Any, **__: Any) -> None:
        raise AssertionError("unreachable")


def edited(house: House, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
    """Publishes weights that ``edit`` has changed, as a policy with a fault would."""
    real = type(house.policy).weights

    def weights(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = {name: tensor.detach().clone() for name, tensor in real(self)}
        edit(tensors)
        return iter(tensors.items())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(house.policy), "weights", weights)
        house.publish(house.engine(publish=False), house.policy.version)


def test_every_tensor_arrives_and_the_tied_head(one):
    engine = one.engine()
    first = made(engine)
    for seed in (1, 2):
        one.change(seed=seed, scale=0.3)
        assert not serves(one, dataclasses.replace(newest(one), canary=one.weights._canary(one.policy)))
        one.publish(engine, one.policy.version)
        assert engine.servers[0].gap < GAP
        assert not one.fakes or same(one, 0)
    assert made(engine) != first


@alone
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_neox"])
@pytest.mark.parametrize("route", ROUTES)
def test_weights_that_transformers_fuses_or_renames_arrive(route, kind, tmp_path, monkeypatch):
    """They are in several parts of a version."""
    small_parts(monkeypatch)
    with house(tmp_path, kind=kind, sync=route) as found:
        engine = found.engine()
        found.change(seed=1, scale=0.3)
        found.publish(engine, found.policy.version)
        assert engine.servers[0].gap < GAP
        assert same(found, 0)


def test_a_version_stays_as_it_was_taken(one):
    """A server that comes back while the policy learns is given what the others have."""
    one.engine()
    kept = state(one)
    one.change(scale=0.3)
    if one.fakes:
        one.fakes[0].head.zero_()
    updated = update(one.endpoints[0], newest(one), timeout_s=60)
    assert updated.gap < GAP
    assert not one.fakes or same(one, 0, kept)


def test_weights_without_the_tied_head_touch_nothing(one):
    one.engine()
    before, kept = newest(one), state(one)
    one.change(scale=0.3)
    with pytest.raises(EngineError, match=r"lm_head\.weight is missing"):
        edited(one, lambda tensors: tensors.pop("lm_head.weight"))
    assert serves(one, before)
    assert not one.fakes or same(one, 0, kept)


def test_an_old_head_is_found_by_the_canary(one):
    one.engine()
    old = one.net.get_output_embeddings().weight.detach().clone()
    one.change(scale=0.3)
    with pytest.raises(EngineError, match="log-probs differ from the policy's by"):
        edited(one, lambda tensors: tensors.update({"lm_head.weight": old}))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage(route: Any) -> Any:
    """The route with a wrong byte in its second part."""
    if hasattr(route, "filled"):
        filled = [*route.filled]
        bad = filled[1].data.clone()
        bad[100] ^= 1
        filled[1] = dataclasses.replace(filled[1], data=bad)
        return dataclasses.replace(route, filled=tuple(filled))
    parts = sorted(path for path in (route.root / route.folder).iterdir() if path.name != "manifest.json")
    flip(parts[1])
    return route


def test_a_damaged_version_is_refused_and_the_next_one_repairs_what_it_broke(one, request):
    engine, kept = one.engine(), state(one)
    before, real = newest(one), one.weights._take
    one.change(scale=0.3)
    with pytest.MonkeyPatch.context() as patch:

        def damaged(policy: Any, engine: Any) -> Any:
            route, canary = real(policy, engine)
            return damage(route), canary

        patch.setattr(one.weights, "_take", damaged)
        with pytest.raises(EngineError, match=r"damaged: its (checksum|BLAKE3 digest) is"):
            one.publish(engine, one.policy.version)
    assert engine.servers[0].version is None
    if request.node.callspec.params["whole"] in WHOLE_FIRST:
        assert serves(one, before)
        assert not one.fakes or same(one, 0, kept)
    one.change(seed=9)
    one.publish(engine, one.policy.version)
    assert engine.servers[0].gap < GAP


def in_use(folder: Path) -> list[str]:
    """The processes that have something below a folder mapped or open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text()
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:  # it has ended
            continue
        if str(folder) in maps or any(str(folder) in link for link in links):
            found.append(process.name)
    return found


def test_nothing_stays_mapped_and_nothing_is_left_behind(one):
    engine = one.engine()
    one.change()
    one.publish(engine, one.policy.version)
    place = getattr(one.weights, "_place", None)
    assert place is None or place.folder.is_relative_to(places.SHARED_MEMORY)
    assert place is None or not in_use(place.folder)
    one.weights.close()
    assert place is None or not place.folder.parent.exists()
    assert not (one.run / "weights").exists()


@alone
def test_a_server_that_dies_in_an_update_is_left_alone_and_then_repaired(two):
    """The other has the weights and does the work."""
    engine = two.engine()
    two.fakes[0].faults.in_update = lambda number: CLOSE if number == 5 else None
    two.change()
    two.publish(engine, two.policy.version)
    assert [server.version for server in engine.servers] == [None, two.policy.version]
    assert "updating" in engine.servers[0].why or "broke off" in engine.servers[0].why
    assert same(two, 1)
    assert len(made(engine)) == 6
    two.fakes[0].faults.in_update, two.fakes[0].dead = None, False
    two.change(seed=9)
    two.publish(engine, two.policy.version)
    assert same(two, 0)
    assert [server.version for server in engine.servers] == [two.policy.version] * 2


@alone
def test_a_server_that_hangs_in_an_update_is_left_alone(two):
    engine = two.engine(sync_timeout_s=1.0)
    woken = threading.Event()
    two.fakes[0].faults.in_update = lambda number: woken.wait(60) if number == 5 else None
    two.change()
    try:
        two.publish(engine, two.policy.version)
        assert not woken.is_set()
    finally:
        woken.set()
    assert [server.version for server in engine.servers] == [None, two.policy.version]
    assert "within 1 s" in engine.servers[0].why or "broke off" in engine.servers[0].why
