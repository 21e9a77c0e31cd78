"""The small model of a study: the same on every machine, and as right as its design says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from trew.config import load
from trew.study import warm
from trew.study.settings import Warm

SMALL = Path(__file__).parents[2] / "studies" / "small.toml"
DIGITS = ["data.args.largest=9", "eval.size=20", "model=made"]

STEPS = 60


def trained() -> tuple[str, int, float, float]:
    """Trains a tiny model on the sums of two digits: a + b=, two digits of the sum, the end. Returns this processor's
    kernels, the steps, the accuracy and the sum of all weights."""
    rows = [[2 + a, 12, 2 + b, 15, 2 + (a + b) // 10, 2 + (a + b) % 10, 1] for a in range(10) for b in range(10)]
    ids, answers = torch.tensor(rows), torch.zeros(100, 7, dtype=torch.bool)
    answers[:, 4:] = True
    design = Warm(hidden=32, layers=2, heads=2, intermediate=64, accuracy=0.999999, steps=STEPS, lr=1e-2)
    model = warm._drawn(warm._shape(design, 22, longest=7), seed=0)
    steps, reached = warm._train(model, ids, answers, torch.arange(100), design)
    total = sum(weight.detach().abs().sum().item() for weight in model.parameters())
    return torch.backends.cpu.get_cpu_capability(), steps, reached, total


def trained_elsewhere() -> tuple[str, float, float, float]:
    """The same with the plain kernels: their sums have other last digits."""
    code = "import torch, test_study_warm; torch.set_num_threads(1); print(*test_study_warm.trained())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(Path(__file__).parent)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    name, *numbers = found.stdout.split()
    steps, reached, weights = map(float, numbers)
    return name, steps, reached, weights


def test_differences_between_processors_do_not_grow():
    """Without rounded gradients they are 1e-10 after these steps, and after 700 another model."""
    plain, *expected = trained_elsewhere()
    fast, *got = trained()
    if plain == fast:
        pytest.skip("this processor has the plain kernels alone")
    assert expected[0] == STEPS
    assert got == pytest.approx(expected, rel=1e-13)


def test_the_saved_model_is_the_one_that_is_told(tmp_path):
    config = load(SMALL, DIGITS)
    design = Warm(hidden=32, layers=2, heads=2, intermediate=64, accuracy=0.05, lr=1e-2)
    told = warm.make(config, design, tmp_path / "made")
    again = warm.make(config, design, tmp_path / "again")
    assert told == again
    assert told["accuracy"] == pytest.approx(0.05, abs=0.03)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == told["parameters"]
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weight.bfloat16().float()), name
    # The model of transformers, in float32, computes what the training in float64 did.
    mirror = warm._drawn(model.config, seed=1)
    mirror.load_state_dict({name: weight.double() for name, weight in model.state_dict().items()})
    ids = torch.randint(2, 17, (8, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits.double(), mirror(ids).logits, rtol=1e-4, atol=1e-5)
