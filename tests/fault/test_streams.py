"""Weights as a stream: whole, or the server that did not get them is left alone, and the others go on."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from trew_vllm import buckets as form
from trew_vllm import stream as theirs
from trew_vllm.published import FORMAT, Refused

from trew.errors import ConfigError, EngineError
from trew.rollout.vllm import buckets, handshake, stream
from trew.rollout.vllm.endpoint import Endpoint
from trew.weights.files import PublishedFiles
from trew.weights.stream import PublishedStream
from vllm_help import as_at_first, house, made

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with house(tmp_path_factory.mktemp("streams"), servers=2, sync="nccl") as found:
        yield found


@pytest.fixture
def two(whole, monkeypatch):
    """Two servers that are sent their weights, in several buckets."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 14)
    monkeypatch.setattr(stream, "_GRACE_S", 2.0)
    with as_at_first(whole):
        yield whole


def same(house, number):
    """Whether a server has the policy's weights, to the bit, and its head too."""
    fake = house.fakes[number]
    own = dict(house.net.named_parameters())
    served = dict(fake.model.named_parameters())
    return all(torch.equal(own[n], served[n]) for n in own) and torch.equal(
        fake.head, house.net.get_output_embeddings().weight
    )


def test_a_server_that_hangs_in_mid_stream_is_left_alone(two):
    engine = two.engine(sync_timeout_s=2.0)
    woken = threading.Event()
    two.fakes[0].faults.in_update = lambda number: woken.wait(60) if number == 5 else None
    two.change()
    began = time.monotonic()
    try:
        two.publish(engine, two.policy.version)
        assert time.monotonic() - began < 30  # of 60, after which it would go on
    finally:
        woken.set()
    assert [server.version for server in engine.servers] == [None, two.policy.version]
    assert "within 2 s" in engine.servers[0].why or "broke off" in engine.servers[0].why


def test_a_server_that_comes_back_is_sent_what_the_others_have(two):
    """In the background, when the policy has other weights already."""
    asked: list[int] = []

    def restart(number):
        asked.append(number)
        fake = two.fakes[number]
        for p in fake.model.parameters():
            p.data.zero_()
        fake.faults.in_update, fake.faults.dies_after, fake.dead = None, -1, False

    engine = two.engine(restart=restart)
    served = {name: p.detach().clone() for name, p in two.net.named_parameters()}
    expected = made(engine)
    two.fakes[0].faults.dies_after = 3
    assert made(engine) == expected
    two.change(scale=0.3)
    until = time.monotonic() + 30
    while engine.servers[0].version is None and time.monotonic() < until:
        assert made(engine) == expected
    assert asked == [0]
    assert engine.servers[0].version == 0
    assert all(torch.equal(served[name], p) for name, p in two.fakes[0].model.named_parameters())


def test_a_server_that_does_not_come_is_left_alone(two, monkeypatch):
    engine = two.engine(sync_timeout_s=1.0)
    woken = threading.Event()
    real = theirs.read
    monkeypatch.setattr("fake_vllm.stream.read", lambda *given: woken.wait(60) and real(*given))
    two.change()
    try:
        with pytest.raises(EngineError, match="no server is left"):
            two.publish(engine, two.policy.version)
    finally:
        woken.set()


def test_another_torch_is_refused_with_both_versions(two, monkeypatch):
    monkeypatch.setattr(stream.torch, "__version__", "2.13.1+cu130")
    assert handshake.refusal(two.endpoints[0], stream.introduction("gloo")) == ""
    monkeypatch.setattr(theirs.torch, "__version__", "2.13.0")
    with pytest.raises(Refused, match=r"the trainer has torch 2\.14\.0, this server 2\.13\.0"):
        theirs.check_sender("2.14.0", "gloo", CPU)
    with pytest.raises(Refused, match="sends by NCCL, this server computes on cpu"):
        theirs.check_sender("2.13.0", "nccl", CPU)
    two.fakes[0].backend = "trew_files"
    try:
        assert "Invalid init_info" in handshake.refusal(two.endpoints[0], stream.introduction("gloo"))
    finally:
        two.fakes[0].backend = "trew_stream"


def test_a_run_falls_back_to_files_unless_it_asked_for_streams(two, monkeypatch):
    as_stream = handshake.ENGINES["nccl"]
    assert isinstance(two.publisher("auto", backend=as_stream), PublishedStream)
    assert not two.told
    real = stream.introduction
    monkeypatch.setattr(stream, "introduction", lambda backend: {**real(backend), "torch": "2.99.0"})
    assert isinstance(two.publisher("auto", backend=as_stream), PublishedFiles)
    assert "weights are published as files: server" in two.told[0]
    assert "the trainer has torch 2.99.0, this server" in two.told[0]
    with pytest.raises(ConfigError, match=r"cluster.sync: got 'nccl', but .* the trainer has torch 2.99.0"):
        two.publisher("nccl")


TENSORS = [
    ("a", torch.arange(5.0)), ("b", torch.randn(3, 7).to(torch.bfloat16)), ("c", torch.tensor(2.5)),
    ("d", torch.ones(0, 4)), ("e", torch.randn(40, 40)),
]  # fmt: skip


def test_what_is_packed_is_unpacked(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 128)
    filled = list(buckets.fill(TENSORS, lambda t: t.dtype))
    assert [len(each.bucket.tensors) for each in filled] == [4, 1], "one that is too large is a bucket by itself"
    read = theirs.read(offer(buckets=[each.bucket.table() for each in filled]), CPU)
    found = [pair for each, told in zip(filled, read.buckets, strict=True) for pair in told.unpack(each.data)]
    assert [name for name, _ in found] == [name for name, _ in TENSORS]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(found, TENSORS, strict=True))


def bucket(size=16, dtype="float32"):
    return {"bytes": size, "checksum": "0" * 32, "tensors": [{"name": "a", "dtype": dtype, "shape": [3]}]}


def offer(**changes):
    whole = {
        "format": FORMAT, "version": 3, "backend": "gloo", "torch": torch.__version__, "address": "127.0.0.1",
        "port": 1, "key": "k", "size": 2, "seconds": 1.0, "buckets": [bucket()],
    }  # fmt: skip
    return {**whole, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": FORMAT + 1}, f"publishes format {FORMAT + 1}"),
        ({"buckets": []}, "no tensors"),
        ({"backend": "mpi"}, "accepts gloo, nccl"),
        ({"torch": "1.0"}, "the trainer has torch 1.0"),
        ({"port": "x"}, "ValueError"),
        ({"buckets": [bucket(32)]}, "32 bytes"),
        ({"buckets": [bucket(dtype="int8")]}, "a is int8"),
        ({"buckets": [bucket(), bucket()]}, "one of them twice"),
    ],
)  # fmt: skip
def test_an_offer_that_does_not_fit_is_refused(changes, says):
    with pytest.raises(Refused, match=says):
        theirs.read(offer(**changes), CPU)


def test_a_trainer_that_is_not_there_is_given_up(monkeypatch):
    with pytest.raises(Refused, match="cannot join the trainer"):
        theirs.Receiver(theirs.read(offer(), CPU), rank=1, device=CPU)


@pytest.mark.parametrize("words", [4, 255, 256, 260, 1024, 3 * 1024 + 17])
def test_a_checksum_is_the_two_sums_that_it_is_said_to_be(monkeypatch, words):
    monkeypatch.setattr(form, "_SIDE", 16)
    monkeypatch.setattr(form, "_WORDS", 256)
    data = torch.randint(256, (4 * words,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = form.checksum(data)
    values = data.view(torch.int32).to(torch.int64).tolist()
    sums = (sum(values), sum(i * w for i, w in enumerate(values)))
    assert whole == "".join(f"{s % 2**64:016x}" for s in sums)
    swapped = data.clone()
    swapped[0:4], swapped[-4:] = data[-4:], data[0:4]
    assert form.checksum(swapped) != whole
    data[7] ^= 1
    assert form.checksum(data) != whole


def test_an_address_that_cannot_be_had_is_an_error_of_the_update(two, monkeypatch):
    engine = two.engine()
    monkeypatch.setattr(stream, "own_address", lambda endpoint: "192.0.2.1")  # nobody's
    two.change()
    with pytest.raises(EngineError, match=r"cannot listen for it: .*; set cluster.sync = 'files'"):
        two.publish(engine, two.policy.version)
    assert engine.servers[0].version is None


@pytest.mark.parametrize(("url", "address"), [("http://127.0.0.1:1", "127.0.0.1"), ("http://[::1]:1", "127.0.0.1")])
def test_servers_of_this_machine_are_met_on_its_own_address(url, address):
    assert stream.own_address(Endpoint(url)) == address
