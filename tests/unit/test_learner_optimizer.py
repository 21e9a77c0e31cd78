"""The forms of AdamW: the same numbers where that is promised, state kept to the bit, refusals where none fits."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

import learner_help as help
from trew.config import ClusterConfig, Config, LearnerConfig, LoraConfig, validate
from trew.errors import CheckpointError
from trew.learner import machine
from trew.learner.optimizer import OffloadedAdamW, begin, load_moments, make_optimizer, moments
from trew.utils.installing import install_extra

SHAPES = {"matrix": (64, 80), "small": (8, 16), "vector": (80,), "unused": (4, 4)}
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]


def parameters(device: str = "cpu") -> dict[str, torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {n: torch.nn.Parameter(torch.randn(s, generator=draw).to(device)) for n, s in SHAPES.items()}


def made(kind: str, own: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    return make_optimizer(own, LearnerConfig(optimizer=kind, lr=1e-2, weight_decay=0.1))  # type: ignore[arg-type]


def run(optimizer, own: dict[str, torch.nn.Parameter], first: int, last: int) -> None:
    for k in range(first, last):
        draw = torch.Generator().manual_seed(k)
        for name, p in own.items():
            p.grad = None if name == "unused" else torch.randn(p.shape, generator=draw).to(p.device) * 10.0 ** (k - 2)
        optimizer.step()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].cpu(), b[n].cpu()) for n in a)


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_moments_give_the_same_weights_and_moments_to_the_bit(device):
    plain, away = parameters(device), parameters(device)
    a, b = made("adamw", plain), made("adamw-offload", away)
    run(a, plain, 0, 5)
    run(b, away, 0, 5)
    assert isinstance(b, OffloadedAdamW)
    assert equal(dict(plain), dict(away))
    assert equal(moments(a, plain), moments(b, away))
    assert {t.device.type for t in moments(b, away).values()} == {"cpu"}
    assert "optimizer.step.unused" not in moments(b, away)


def test_an_optimizer_that_is_offloaded_is_the_same_optimizer():
    """cluster.offload may change when a run goes on: what one writes, the other reads."""
    plain, away = parameters(), parameters()
    a, b = made("adamw", plain), make_optimizer(away, LearnerConfig(lr=1e-2, weight_decay=0.1), offloaded=True)
    assert isinstance(b, OffloadedAdamW)
    run(a, plain, 0, 3)
    load_moments(b, away, moments(a, plain))
    with torch.no_grad():
        for name, p in away.items():
            p.copy_(plain[name])
    run(a, plain, 3, 5)
    run(b, away, 3, 5)
    assert equal(dict(plain), dict(away))
    assert equal(moments(a, plain), moments(b, away))


def test_the_first_8_bit_step_is_adamw_s_and_later_ones_stay_near():
    plain, small = parameters(), parameters()
    a, b = made("adamw", plain), made("adamw-8bit", small)
    start = parameters()
    run(a, plain, 0, 1)
    run(b, small, 0, 1)
    for name in plain:  # the moments are rounded after they were used
        torch.testing.assert_close(small[name], plain[name], rtol=1e-6, atol=1e-6)
    run(a, plain, 1, 5)
    run(b, small, 1, 5)
    for name in ("small", "vector"):  # too small to be rounded
        torch.testing.assert_close(small[name], plain[name], rtol=1e-5, atol=1e-6)
    assert 0 < help.relative(small["matrix"].detach() - start["matrix"].detach(),
                             plain["matrix"].detach() - start["matrix"].detach()) < 0.1  # fmt: skip
    assert b.state[small["matrix"]]["state1"].dtype == torch.uint8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["adamw", "adamw-8bit", "adamw-offload"])
def test_a_state_that_was_stored_and_loaded_goes_on_to_the_bit(kind, device):
    if kind == "adamw-8bit" and device == "cuda":
        pytest.importorskip("bitsandbytes")
    straight, stopped = parameters(device), parameters(device)
    a, b = made(kind, straight), made(kind, stopped)
    run(a, straight, 0, 4)
    run(b, stopped, 0, 2)
    stored = {n: t.clone() for n, t in moments(b, stopped).items()}
    again = {n: torch.nn.Parameter(p.detach().clone()) for n, p in stopped.items()}
    c = made(kind, again)
    load_moments(c, again, stored)
    assert equal(moments(c, again), stored)
    run(c, again, 2, 4)
    assert equal(dict(straight), dict(again))
    assert equal(moments(a, straight), moments(c, again))


def test_a_state_of_another_kind_is_refused_and_nothing_changes():
    own = parameters()
    a = made("adamw", own)
    run(a, own, 0, 2)
    before = {n: t.clone() for n, t in moments(a, own).items()}
    other = parameters()
    b = made("adamw-8bit", other)
    run(b, other, 0, 1)
    for wrong in (
        moments(b, other),
        before | {"optimizer.exp_avg.matrix": torch.zeros(3)},
        before | {"optimizer.exp_avg.nobody": torch.zeros(3)},
    ):
        with pytest.raises(CheckpointError, match="optimizer state"):
            load_moments(a, own, wrong)
        assert equal(moments(a, own), before)


def asked(*, base: str = "float32", rank: int = 0, optimizer: str = "adamw", **learner) -> Config:
    lora = LoraConfig(rank=rank, base=base)  # type: ignore[arg-type]
    return Config(model="m", lora=lora, learner=LearnerConfig(optimizer=optimizer, **learner))  # type: ignore[arg-type]


def test_offloading_without_a_gpu_is_said_to_save_nothing():
    away = dataclasses.replace(asked(), cluster=ClusterConfig(learner=2, offload="all"))
    assert machine.machine_notes(away, "cuda:0") == machine.machine_notes(asked(), "cpu") == []
    (note,) = machine.machine_notes(away, "cpu")
    assert note.startswith("cluster.offload = 'all' saves nothing on cpu")


def test_what_the_machine_does_not_have_is_one_line_each(monkeypatch):
    assert machine.machine_problems(asked(rank=8, base="nf4", optimizer="adamw-8bit"), "cpu") == []
    assert machine.machine_problems(asked(optimizer="adamw-offload"), "cuda:0") == []
    assert machine.machine_problems(asked(optimizer="adamw-offload"), "cpu")[0].startswith(
        "learner.optimizer: got 'adamw-offload'"
    )
    assert "mps" in machine.machine_problems(asked(optimizer="adamw-8bit"), "mps")[0]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert machine.machine_problems(asked(), "cpu") == []
    lines = machine.machine_problems(asked(rank=8, base="nf4", optimizer="adamw-8bit"), "cpu")
    assert lines == [
        f"lora.rank: got 8, which needs the package peft; it is not installed: {install_extra('lora')}",
        f"lora.base: got 'nf4', which needs the package bitsandbytes; it is not installed: {install_extra('4bit')}",
        "learner.optimizer: got 'adamw-8bit', which needs the package bitsandbytes; it is not installed: "
        + install_extra("4bit"),
    ]


@pytest.mark.parametrize(
    ("lora", "learner", "says"),
    [
        ({"rank": -1}, {}, "lora.rank: got -1"),
        ({"rank": 4, "alpha": 0.0}, {}, "lora.alpha: got 0.0"),
        ({"rank": 4, "dropout": 0.05}, {}, "lora.dropout: got 0.05, accepts 0 only"),
        ({"rank": 4, "targets": ("",)}, {}, "lora.targets: got"),
        ({"base": "nf4"}, {}, "lora.base: got 'nf4', accepts only its default while lora.rank = 0"),
        ({"targets": ("q_proj",)}, {}, "lora.targets: got"),
        ({"rank": 4, "base": "bfloat16"}, {}, "lora.base: got 'bfloat16', which needs learner.dtype = 'bfloat16'"),
    ],
)
def test_settings_that_cannot_work(lora, learner, says):
    problems = validate(Config(model="m", lora=LoraConfig(**lora), learner=LearnerConfig(**learner)))
    assert len(problems) == 1
    assert problems[0].startswith(says)


def test_settings_that_can():
    lora = LoraConfig(rank=4, base="bfloat16", targets=("q_proj",), alpha=1.0)
    assert validate(Config(model="m", lora=lora, learner=LearnerConfig(dtype="bfloat16"))) == []


def test_moments_that_are_made_beforehand_are_those_that_adamw_makes():
    found = []
    for zeros in (lambda shapes: [torch.zeros(*shape) for shape in shapes], lambda shapes: None):
        own = parameters()
        optimizer = made("adamw", own)
        for k in range(3):
            draw = torch.Generator().manual_seed(k)
            for name, p in own.items():
                p.grad = None if name == "unused" else torch.randn(p.shape, generator=draw)
            begin(optimizer, zeros)
            optimizer.step()
        found.append((moments(optimizer, own), {n: p.detach() for n, p in own.items()}))
    assert equal(found[0][0], found[1][0])
    assert equal(found[0][1], found[1][1])
