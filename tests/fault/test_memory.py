"""Memory that runs out, while generating and while learning: one message with what takes less, nothing is broken."""

from __future__ import annotations

import re
import resource
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiers
import trew
from run_help import configured, rows, save_models
from trew.config import Config, EnvironmentConfig, apply_overrides, dumps, parse
from trew.config.free import is_free
from trew.errors import MemoryShortage
from trew.rollout.sync import SyncRollouts
from trew.training import guards, loop
from trew.utils.console import Silent

BIG = {"prompts": 8, "completions": 16, "max_tokens": 48, "overlap": False}
HOLDS = {"collect": "trew.rollout.sync:sampling", "update": "trew.training.loop:update"}
CALLS: dict[str, tuple[Any, str]] = {"collect": (SyncRollouts, "next"), "update": (loop, "update")}
KNOBS = {
    "collect": ("generating", "rollout.batch", "rollout.max_tokens"),
    "update": ("learning", "learner.microbatch_tokens", "learner.gradient_checkpointing = true", "lora.rank"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))["native"]


def run_of(folder: Path, model: Path, **settings: Any) -> Config:
    folder.mkdir(exist_ok=True)
    every = {"every": 1, "background": False}
    return configured(folder, model, steps=2, threads=1, rollout=BIG, checkpoint=every, **settings)


def same(a: Config, b: Config) -> None:
    first, second = (load_file(Path(c.out) / "final" / "model.safetensors") for c in (a, b))
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of another process are Linux's")
@pytest.mark.parametrize("where", tiers.some(KNOBS, ["collect"]))  # the other one plays five runs
def test_a_machine_without_memory(where, model, tmp_path, server):
    knobs = KNOBS[where]
    kernels, at = ("auto", 1) if where == "collect" else ("plain", 2)
    config = run_of(tmp_path / where, model, kernels=kernels)
    (tmp_path / where / "recipe.toml").write_text(dumps(config))
    command = server.start("train", "recipe.toml", "--out", config.out, cwd=tmp_path / where,
                           hold=f"{HOLDS[where]}:{at}").held()  # fmt: skip
    pages = int(Path(f"/proc/{command.pid}/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + (1 << 18)
    resource.prlimit(command.pid, resource.RLIMIT_AS, (size, size))
    assert command.go(full=True).wait() == 1, command.text()
    said = " ".join(command.text().split())
    assert "Traceback" not in said, command.text()
    assert "the machine ran out of memory while" in said
    assert f"in step {at}" in said
    assert all(word in said for word in (*knobs, "trew plan")), said
    if where == "collect":
        return
    assert list(rows(config)) == [1]
    # What is there is whole: continued, it ends as a run that had memory all along.
    trew.train(config, resume=True, display=Silent())
    whole = run_of(tmp_path / f"{where}-whole", model, kernels=kernels)
    trew.train(whole, display=Silent())
    same(config, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", KNOBS)
def test_a_gpu_without_memory(where, model, tmp_path, monkeypatch):
    config, real, calls = run_of(tmp_path / "run", model, device="cuda"), getattr(*CALLS[where]), [0]

    def short(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:  # more than any GPU has: so small a model would fit into what little a limit leaves
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return real(*args, **kwargs)

    monkeypatch.setattr(*CALLS[where], short)
    with pytest.raises(MemoryShortage, match="the GPU ran out of memory while") as error:
        trew.train(config, display=Silent())
    missing = [word for word in KNOBS[where] if word not in str(error.value)]
    assert not missing, str(error.value)
    trew.train(config, resume=True, display=Silent())
    whole = run_of(tmp_path / "whole", model, device="cuda")
    trew.train(whole, display=Silent())
    same(config, whole)


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True), (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("std::bad_alloc"), True), (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for a matmul"), False),
        (RuntimeError("shapes do not fit"), False), (ValueError("out of memory"), False),
    ],
)  # fmt: skip
def test_only_what_is_about_memory_is_called_so(error, short):
    job = _job(Config(model="m"))
    with pytest.raises(MemoryShortage if short else type(error)) as told, guards.memory(job, lambda: "learning"):
        raise error
    assert ("in step 5" in str(told.value)) == short


def _job(config: Config) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(device="cpu"), state=SimpleNamespace(step=4), config=config)


@pytest.mark.parametrize(("name", "key"), [("", "data.max_prompt_tokens"), ("guess", "environment.episode_tokens")])
@pytest.mark.parametrize("doing", ["generating", "evaluating"])
def test_settings_that_need_less_memory_are_those_of_the_run(doing, name, key):
    job = _job(Config(model="m", environment=EnvironmentConfig(name=name)))
    with pytest.raises(MemoryShortage, match=rf"\.max_tokens, or {key}; trew plan"), guards.memory(job, lambda: doing):
        raise MemoryError


@pytest.mark.parametrize(("task", "doing"), [("demonstrations", "evaluating"), ("demonstrations", "learning"),
                                             ("pairs", "evaluating"), ("", "evaluating"), ("", "generating"),
                                             ("", "learning")])  # fmt: skip
def test_what_is_advised_is_accepted(task, doing):
    sets = {"task": task, "train": "rows.jsonl"} if task else {"task": "arithmetic"}
    config = parse({"model": "m", "steps": 2, "data": sets, "objective": {"preset": "dpo"} if task == "pairs" else {}})
    with pytest.raises(MemoryShortage) as told, guards.memory(_job(config), lambda: doing):
        raise MemoryError
    said = str(told.value)
    # A run takes every setting that is named, and one that is continued takes the one after --set as it is.
    named = set(re.findall(r"\b(?:rollout|eval|data|sft|learner|lora)\.[a-z_]+", said))
    for key in named - {"learner.gradient_checkpointing"}:
        table = tomllib.loads(dumps(config))
        apply_overrides(table, [f"{key}=4"])
        parse(table)
    [free] = re.findall(r"--resume --set ([a-z._]+)=", said)
    assert is_free(free)
    assert {key for key in named if is_free(key)} == {free}
    assert ("lora.rank" in named) == ("in a new run" in said)
