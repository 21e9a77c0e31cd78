"""Weights in shared memory: what does not fit is refused, and no segment or handle is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trew_vllm import memory as theirs
from trew_vllm.published import FORMAT, Refused

import trew.weights.places as places
from disk import fill, tmpfs
from trew.errors import ConfigError, StorageError
from trew.rollout.vllm import buckets, handshake
from trew.rollout.vllm import memory as ours
from trew.rollout.vllm.client import ServerGone, ServerRefused
from trew.rollout.vllm.endpoint import Endpoint
from trew.weights import choose, folders
from trew.weights.memory import PublishedOnGpu, PublishedSegments
from vllm_help import as_at_first, house

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with house(tmp_path_factory.mktemp("shared"), sync="ipc") as found:
        yield found


@pytest.fixture
def one(whole):
    with as_at_first(whole):
        yield whole


@pytest.fixture
def version(tmp_path):
    """An offer of two buckets in segments, and their folder."""
    (tmp_path / "000003").mkdir()
    names = iter(("00000", "00001"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", 32)
        filled = list(
            buckets.fill(
                [("a", torch.arange(8.0)), ("b", torch.ones(3, 5))],
                lambda tensor: tensor.dtype,
                lambda size: ours.segment(tmp_path / "000003" / next(names), size),
            )
        )
    handles = [{"segment": "000003/00000"}, {"segment": "000003/00001"}]
    return ours.offer(3, [each.bucket for each in filled], handles), tmp_path


def mapped(offer, root):
    return theirs.Mapped(theirs.read(offer, CPU), root=root, device=CPU)


def maps(root: Path) -> bool:
    return str(root) in Path("/proc/self/maps").read_text()


def test_what_is_shared_is_mapped_and_let_go(version):
    offer, root = version
    opened = mapped(offer, root)
    assert maps(root)
    found = {name: tensor.clone() for name, tensor in opened.tensors()}
    opened.close()
    assert not maps(root)
    assert torch.equal(found["a"], torch.arange(8.0))
    assert torch.equal(found["b"], torch.ones(3, 5))


def shorten(root):
    os.truncate(root / "000003" / "00001", 16)


def empty(root):
    os.truncate(root / "000003" / "00001", 0)


def flip(root):
    data = bytearray((root / "000003" / "00001").read_bytes())
    data[5] ^= 1
    (root / "000003" / "00001").write_bytes(data)


def remove(root):
    (root / "000003" / "00001").unlink()


def link(root):
    (root / "000003" / "00001").rename(root / "elsewhere")
    (root / "000003" / "00001").symlink_to(root / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shorten, "bucket 1 has 16 bytes, expected 64"),
        (empty, "bucket 1 has 0 bytes, expected 64"),
        (flip, "bucket 1 is damaged: its checksum is"),
        (remove, "000003/00001 cannot be read"),
        (link, "000003/00001 cannot be read"),
    ],
)
def test_a_damaged_version_is_refused_and_nothing_stays_mapped(version, damage, says):
    offer, root = version
    damage(root)
    with pytest.raises(Refused, match=says):
        mapped(offer, root)
    assert not maps(root)


@pytest.mark.parametrize("segment", ["../000003/00000", "/000003/00000", "000003", "000003/00000\n", 3, None])
def test_nothing_but_a_segment_of_the_folder_is_opened(version, segment):
    offer, root = version
    offer["handles"][0] = {"segment": segment}
    with pytest.raises(Refused, match="is not the name of a segment"):
        mapped(offer, root)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": FORMAT + 1}, f"publishes format {FORMAT + 1}"),
        ({"buckets": []}, "no tensors"),
        ({"handles": []}, "0 handles for 2 buckets"),
        ({"handles": [3]}, "offer: TypeError"),
        ({"version": None}, "offer: TypeError"),
        ({"gpu": "GPU-1"}, "the trainer's weights are on GPU GPU-1, this server computes on cpu"),
    ],
)
def test_an_offer_that_does_not_fit_is_refused(version, changes, says):
    with pytest.raises(Refused, match=says):
        theirs.read({**version[0], **changes}, CPU)


# ---- room, and what a killed process leaves


def test_without_room_the_route_is_refused_before_any_server_is_asked(one, tmp_path, monkeypatch):
    engine = one.engine(publish=False)
    one.fakes[0].calls.clear()
    with tmpfs(kilobytes=64) as small:
        monkeypatch.setattr(places, "SHARED_MEMORY", small)
        crowded = PublishedSegments(dtype="float32", size=1 << 20, vocabulary=one.facts.vocabulary, positions=None)
        with pytest.raises(StorageError, match=r"keeps two versions of 1.0 MiB in .*--shm-size"):
            crowded.publish(one.policy, engine)
    assert one.fakes[0].calls == []


def test_memory_that_is_gone_while_segments_are_made_is_an_error_and_no_signal(one, tmp_path, monkeypatch):
    """Writing to a mapped file of a full file system would end the process by SIGBUS."""
    with tmpfs(kilobytes=1024) as small:
        monkeypatch.setattr(places, "SHARED_MEMORY", small)
        monkeypatch.setattr("trew.weights.folders._require_room", lambda *_, **__: None)
        crowded = PublishedSegments(dtype="float32", size=1000, vocabulary=one.facts.vocabulary, positions=None)
        crowded._place = places.in_shared_memory(1000)
        fill(small, leave=50_000)
        with pytest.raises(StorageError, match="cannot be written"):
            crowded.publish(one.policy, one.engine(publish=False))
        assert list(crowded._place.folder.iterdir()) == []
        crowded.close()


KILLED = """
import sys, time
from pathlib import Path
import trew.weights.places as places
places.SHARED_MEMORY = Path(sys.argv[1])
place = places.in_shared_memory(1)
(place.folder / "000001").mkdir()
(place.folder / "000001" / "00000").write_bytes(b"1" * 4096)
Path(sys.argv[1], "ready").touch()
time.sleep(600)
"""


def test_segments_of_a_killed_process_are_removed_by_the_next(tmp_path, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path])
    try:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.01)
        monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path)
        (left,) = tmp_path.glob("trew-*")
        places.in_shared_memory(1).close()
        assert left.exists(), "its process lives"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    places.in_shared_memory(1).close()
    assert list(tmp_path.glob("trew-*")) == []


def test_folders_of_running_jobs_stay_where_temporary_files_are_in_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path)
    names = ["trew-ranks-abcd1234", "trew-rank-abcd1234", "trew-servers-abcd1234", "trew-vllm-abcd1234"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "pulse-0").touch()
    # One that begins as those of weights do, but that nobody has ever locked.
    (tmp_path / f"{places.PREFIX}mine").mkdir()
    places.in_shared_memory(1).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, f"{places.PREFIX}mine"])
    assert list((tmp_path / f"{places.PREFIX}mine").iterdir()) == [], "looking makes no lock"
    assert [p.name for p in (tmp_path / "trew-ranks-abcd1234").iterdir()] == ["pulse-0"]


@pytest.mark.parametrize("versions", [(1, 2, 3), (999_999, 1_000_000, 1_000_001)])
def test_the_newest_version_stays_while_another_is_written(tmp_path, versions):
    place = places.WeightFolder(tmp_path, shared=False)
    for version in versions:
        with folders.new_version(place, version, 8) as work:
            (work / "00000").write_bytes(b"1" * 8)
    assert {int(path.name) for path in tmp_path.iterdir()} == set(versions[-2:])


# ---- who can read it


def test_a_server_that_does_not_see_the_memory_is_refused(one, monkeypatch):
    fits = handshake.Expected(dtype="float32", vocabulary=one.facts.vocabulary, length=100, backend="trew_memory")
    handshake.check(one.endpoints[0], fits, root=places.SHARED_MEMORY)
    monkeypatch.setattr("fake_vllm.Path", lambda text: Path("/nowhere") / str(text).lstrip("/"))  # as in a container
    with pytest.raises(ConfigError, match=r"does not see /dev/shm of rank 0's host.*set cluster.sync = 'files' or"):
        handshake.check(one.endpoints[0], fits, root=places.SHARED_MEMORY)


def test_a_server_on_another_host_is_refused(one, monkeypatch):
    monkeypatch.setattr(one, "endpoints", [Endpoint("http://10.0.0.7:8000")])
    with pytest.raises(ConfigError, match=r"got 'ipc', but server http://10.0.0.7:8000 is on another host"):
        one.publisher("auto", backend=handshake.ENGINES["ipc"])


def test_a_server_without_the_engine_is_refused(one):
    fits = handshake.Expected(dtype="float32", vocabulary=one.facts.vocabulary, length=100, backend="trew_memory")
    one.fakes[0].backend = "trew_stream"
    try:
        with pytest.raises(ConfigError, match="has the weight transfer backend 'trew_stream', needs 'trew_memory'"):
            handshake.check(one.endpoints[0], fits, root=places.SHARED_MEMORY)
    finally:
        one.fakes[0].backend = "trew_memory"


def test_a_system_without_shared_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(ConfigError, match="this system has no shared memory"):
        choose.folder_of("trew_memory", tmp_path)


# ---- handles of a GPU's memory; what torch does with them has not run here

SHARED = (0, b"\x01\x02", 64, 512, b"counter", 3, b"event", True)
"""What torch's ``_share_cuda_`` returns."""


class OnGpu:
    """Stands in for torch's calls: which counters were taken and given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[tuple] = []
        self.released: list[tuple] = []
        self.made = 0
        self.data = torch.arange(64, dtype=torch.uint8)
        gpu = SimpleNamespace(uuid="GPU-1")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        for name in ("init", "ipc_collect", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(theirs, "_from_gpu", self._open)
        monkeypatch.setattr(ours.form, "release", lambda handles: self.released.extend(handles))
        monkeypatch.setattr(theirs, "release", lambda handles: self.released.extend(handles))

    def _open(self, handle, device):
        values = theirs._decoded(handle)
        self.opened.append(values)
        return self.data

    def share(self):
        self.made += 1
        return (0, b"\x01", 64, 0, b"c", self.made, b"e", False)

    def filled(self):
        bucket = theirs.buckets.Bucket(
            64, theirs.buckets.checksum(self.data), {"a": theirs.Tensor("float32", (16,))}
        )  # fmt: skip
        storage = SimpleNamespace(_share_cuda_=self.share)
        return buckets.Filled(bucket, SimpleNamespace(untyped_storage=lambda: storage, device=CPU))


def test_a_handle_is_json_and_comes_back_as_it_was():
    import json

    assert theirs._decoded(json.loads(json.dumps(ours.form.encode(SHARED)))) == SHARED


@pytest.mark.parametrize("change", [{"memory": 3}, {"memory": "!"}, {"size": "x"}, {"offset": None}])
def test_a_malformed_handle_is_refused(change):
    with pytest.raises(Refused, match="a handle is malformed"):
        theirs._decoded({**ours.form.encode(SHARED), **change})


def gpu_offer(on, *, handles):
    return theirs.read(ours.offer(3, [on.filled().bucket], handles, gpu="GPU-1"), torch.device("cuda:1"))


def test_a_gpus_memory_is_opened_once_and_verified(monkeypatch):
    on = OnGpu(monkeypatch)
    offer = gpu_offer(on, handles=[ours.form.encode(SHARED)])
    opened = theirs.Mapped(offer, root=None, device=torch.device("cuda:1"))
    assert [name for name, _ in opened.tensors()] == ["a"]
    assert on.opened == [SHARED]
    assert on.released == []
    on.data = on.data.clone()
    on.data[3] = 99
    with pytest.raises(Refused, match="is damaged"):
        theirs.Mapped(offer, root=None, device=torch.device("cuda:1"))


def test_handles_that_are_not_opened_are_given_back(monkeypatch):
    on = OnGpu(monkeypatch)
    offer = gpu_offer(on, handles=[{**ours.form.encode(SHARED), "memory": "!"}])
    with pytest.raises(Refused, match="malformed"):
        theirs.Mapped(offer, root=None, device=torch.device("cuda:1"))
    assert on.released == [*offer.handles]


@pytest.mark.parametrize(
    ("error", "released"), [(None, 0), (ServerRefused("no", status=500), 0), (ServerGone("gone"), 1)]
)
def test_each_server_gets_handles_of_its_own_and_those_of_a_dead_one_are_given_back(monkeypatch, error, released):
    on = OnGpu(monkeypatch)
    asked = []

    def call(endpoint, method, path, **options):
        asked.append((path, options.get("body")))
        if error is not None and path == "/update_weights":
            raise error

    monkeypatch.setattr(ours, "call", call)
    monkeypatch.setattr("trew.rollout.vllm.routes.call", call)
    route = ours.OnGpu(3, "GPU-1", (on.filled(),))
    for _ in range(2):
        if error is None:
            route.load(Endpoint("http://localhost:1"), "weights 3", timeout_s=1)
        else:
            with pytest.raises(type(error)):
                route.load(Endpoint("http://localhost:1"), "weights 3", timeout_s=1)
    offers = [body["update_info"]["memory"] for path, body in asked if path == "/update_weights"]
    assert [offer["handles"][0]["counter_offset"] for offer in offers] == [1, 2]
    assert asked[0] == ("/init_weight_transfer_engine", {"init_info": {"gpu": "GPU-1", "format": FORMAT}})
    assert len(on.released) == 2 * released


def test_a_gpu_is_shared_if_servers_have_the_same_one(one, monkeypatch):
    OnGpu(monkeypatch)
    config = SimpleNamespace(
        learner=SimpleNamespace(dtype="float32"), cluster=SimpleNamespace(sync="ipc", colocate=False)
    )
    known = {
        "device": "cuda:0", "model": one.net.config, "facts": one.facts, "run": one.run, "endpoints": one.endpoints,
        "backend": "trew_memory", "tell": one.told.append,
    }  # fmt: skip
    assert isinstance(choose.publisher(config, **known), PublishedSegments)
    assert "weights are shared in host memory, not on the GPU: server" in one.told[0]
    assert "weights are on GPU GPU-1, this server computes on cpu" in one.told[0]
    monkeypatch.setattr(handshake, "refusal", lambda *_: "")
    assert isinstance(choose.publisher(config, **known), PublishedOnGpu)
    config.cluster.colocate = True  # the learner has left the GPU when servers wake
    assert isinstance(choose.publisher(config, **known), PublishedSegments)
