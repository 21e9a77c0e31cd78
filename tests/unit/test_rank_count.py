"""``cluster.learner = 0``: how many ranks that is, by the GPUs of a machine or by what torchrun has started."""

import contextlib
import dataclasses
import os

import pytest
import torch

from trew.config import parse
from trew.distributed import Place, launch
from trew.errors import ConfigError


def recipe(**cluster):
    servers = {"rollout": "vllm"} if "servers" in cluster else {}
    return parse({"model": "m", "out": "o", "cluster": {"learner": 0, **servers, **cluster}})


@pytest.fixture
def gpus(monkeypatch):
    def there(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return there


@pytest.mark.parametrize(
    ("own", "of_ranks"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_ranks_on_the_cpu_gather_weights_in_huge_pages_unless_the_user_says_otherwise(own, of_ranks, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch",
        lambda *_: lambda *_: seen.append(os.environ.get("GLIBC_TUNABLES")),
    )
    if own is None:
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    else:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    launch.launch(dataclasses.replace(recipe(learner=2), device="cpu"), [], print)
    assert seen == [of_ranks]
    assert os.environ.get("GLIBC_TUNABLES") == own


@pytest.mark.parametrize(
    ("count", "cluster", "ranks"),
    [
        (1, {}, 1),
        (8, {}, 8),
        (8, {"servers": 2}, 6),
        (8, {"servers": 2, "server_gpus": 2}, 4),
        (8, {"servers": 8, "colocate": True}, 8),
        (8, {"endpoints": ["unix:/elsewhere"], "rollout": "vllm"}, 8),
        (8, {"learner": 3}, 3),
    ],
)
def test_every_gpu_that_servers_leave_has_a_rank(gpus, count, cluster, ranks):
    gpus(count)
    assert launch.with_ranks(recipe(**cluster)).cluster.learner == ranks


@pytest.mark.parametrize(
    ("count", "cluster", "said"),
    [
        (0, {}, "this machine has none: set the number of ranks"),
        (2, {"servers": 2}, "cluster.servers = 2 with cluster.server_gpus = 1 leave none of 2: use fewer"),
    ],
)
def test_without_a_gpu_that_is_left_it_is_refused(gpus, count, cluster, said):
    gpus(count)
    with pytest.raises(ConfigError, match=said):
        launch.with_ranks(recipe(**cluster))


def test_more_ranks_than_gpus_are_refused_before_any_is_started(gpus, monkeypatch):
    gpus(2)
    with pytest.raises(ConfigError, match=r"cluster.learner: got 3, but this machine has 2 GPUs"):
        launch.launch(recipe(learner=3), [], print)
    for local_rank in range(3):  # all of them, also those that have one: none waits for the others
        with pytest.raises(ConfigError, match=r"3 ranks were started on .* and see 2 GPUs there"):
            launch.own_device(Place(local_rank, 3, local_rank, 3))
    assert [launch.own_device(Place(rank, 4, rank % 2, 2)) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2


def test_ranks_that_are_to_compute_on_the_cpu_see_no_gpus(gpus, monkeypatch):
    """They take a device before they hear of the recipe."""
    gpus(2)
    seen = []
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch",
        lambda *_: lambda *_: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for device in ("cpu", "auto"):
        launch.launch(dataclasses.replace(recipe(learner=2), device=device), [], print)
    assert seen == ["", "0,1"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize(
    ("device", "own", "said"),
    [
        ("auto", "cuda:0", ""), ("cuda", "cuda:0", ""), ("auto", "cpu", ""), ("cpu", "cpu", ""),
        ("cuda:1", "cuda:0", "accepts 'auto' or 'cuda': each of these ranks computes on a GPU of its own"),
        ("cpu", "cuda:0", "to keep them off the GPUs, start them with CUDA_VISIBLE_DEVICES="),
        ("mps", "cpu", "got 'mps' with cluster.learner = 2, accepts 'auto' or 'cpu'"),
    ],
)  # fmt: skip
def test_rank_0_computes_where_the_others_do_or_not_at_all(device, own, said):
    config = dataclasses.replace(recipe(learner=2), device=device)
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        launch.check_device(config, torch.device(own))


def test_ranks_that_torchrun_has_started_count_themselves(gpus, monkeypatch):
    gpus(0)
    place = {"RANK": 1, "WORLD_SIZE": 6, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 3, "MASTER_ADDR": "h", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    assert launch.with_ranks(recipe()).cluster.learner == 6


def test_ranks_have_time_to_save_where_torch_can_be_told_so():
    @dataclasses.dataclass
    class Older:
        max_restarts: int = 3

    @dataclasses.dataclass
    class Newer(Older):
        shutdown_timeout: int | None = None

    assert launch._patience(Older, 620) == {}
    assert launch._patience(Newer, 620) == {"shutdown_timeout": 620}
