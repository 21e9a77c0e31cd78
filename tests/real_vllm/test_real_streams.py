"""The real vLLM is sent its weights as a stream: gloo between two processes and two environments."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from test_real_faults import engine_core
from test_real_updates import GAP, gap, version

from trew.errors import EngineError
from trew.rollout.vllm import buckets, handshake, stream
from trew.rollout.vllm.client import ServerHung
from vllm_help import House, made


@pytest.fixture
def house(streaming, tied, tmp_path, monkeypatch) -> Iterator[House]:
    """A policy beside the server, which is sent its weights in several buckets."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 17)
    found = House(tied, tmp_path, list(streaming.endpoints), [], sync="nccl")
    with contextlib.closing(found.weights):
        yield found


def test_streamed_weights_are_the_ones_that_are_served(streaming, house, record):
    fits = handshake.Expected(
        dtype="float32", vocabulary=house.facts.vocabulary, length=512, backend="trew_stream"
    )  # fmt: skip
    handshake.check(streaming.endpoints[0], fits, root=house.run)
    assert handshake.refusal(streaming.endpoints[0], stream.introduction("gloo")) == ""
    engine = house.engine()
    gaps, seconds = [gap(house)], []
    for seed in (1, 2, 3):
        house.change(seed=seed, scale=0.3)
        assert gap(house) > 0.05
        began = time.monotonic()
        house.publish(engine, house.policy.version)
        seconds.append(time.monotonic() - began)
        gaps.append(gap(house))
    assert len(house.weights.newest.route.filled) > 3
    assert max(gaps) < GAP
    assert len(made(engine)) == 6
    record("stream_gap_max_nats", [float(f"{g:.2g}") for g in gaps])
    record("stream_publish_and_update_s", [round(s, 2) for s in seconds])


def test_a_server_of_streams_takes_files_too(streaming, tied, tmp_path, house):
    other = House(tied, tmp_path, list(streaming.endpoints), [])
    with contextlib.closing(other.weights):
        other.change(seed=4, scale=0.3)
        other.engine()
        assert gap(other) < GAP
    house.engine()
    assert gap(house) < GAP


def test_a_damaged_bucket_is_refused_and_the_next_update_repairs_it(house):
    house.engine()
    before = version(house)
    house.change(seed=5)
    route, canary = house.weights._take(house.policy, house.engine(publish=False))
    bad = [*route.filled]
    bad[2] = dataclasses.replace(bad[2], bucket=dataclasses.replace(bad[2].bucket, checksum="0" * 32))
    published = dataclasses.replace(
        house.weights.newest, route=dataclasses.replace(route, filled=tuple(bad)), canary=canary, version=1
    )  # fmt: skip
    with pytest.raises(EngineError, match="bucket 2 is damaged: its checksum is"):
        house.engine(publish=False).update(published)
    assert version(house) == before  # which it has no longer: a server like this is not used
    house.publish(house.engine(publish=False), house.policy.version)
    assert gap(house) < GAP


def test_a_stream_without_the_tied_head_is_refused_and_the_old_weights_stay(house, monkeypatch):
    house.engine()
    kept = {name: tensor.clone() for name, tensor in house.net.state_dict().items()}
    real = house.policy.weights
    house.change(seed=6, scale=0.3)
    monkeypatch.setattr(
        type(house.policy), "weights", lambda self: ((n, t) for n, t in real() if n != "lm_head.weight")
    )
    with pytest.raises(EngineError, match=r"lm_head\.weight is missing"):
        house.publish(house.engine(publish=False), house.policy.version)
    monkeypatch.undo()
    house.net.load_state_dict(kept)
    stream.call(house.endpoints[0], "POST", "/resume", what="resuming", timeout_s=10)
    assert gap(house) < GAP


def test_a_server_that_stands_still_does_not_hold_up_an_update(streaming, house, record):
    """SIGSTOP: it goes on later, is told that the trainer has gone, and a whole update repairs it."""
    house.engine()
    house.change(seed=7)
    route, _ = house.weights._take(house.policy, house.engine(publish=False))
    stopped, began = engine_core(streaming), time.monotonic()
    # Before anything that its engine must answer; the limit of the call that does not come back is its own.
    send = stream._Meeting.send

    def stops(meeting: object, piece: torch.Tensor) -> None:
        os.kill(stopped, signal.SIGSTOP)
        send(meeting, piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream._Meeting, "send", stops)
        stream.call(house.endpoints[0], "POST", "/pause", what="pausing", timeout_s=60)
        try:
            with pytest.raises(ServerHung, match="weights x"):
                route.load(house.endpoints[0], "weights x", timeout_s=3.0)
        finally:
            os.kill(stopped, signal.SIGCONT)
    record("stream_stopped_noticed_s", round(time.monotonic() - began, 1))
    house.publish(house.engine(publish=False, sync_timeout_s=60.0), house.policy.version)
    assert gap(house) < GAP
