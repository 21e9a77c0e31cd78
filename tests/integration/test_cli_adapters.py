"""Runs with adapters through the real command line: trained, cut off, resumed, evaluated, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from test_cli_train import REWARD, SETTINGS, same_learning

import tiers
import tiny
from recipe_help import recipe as recipe_of
from recipe_help import training_rows
from trew.cli.main import main
from trew.models.loading import load_model
from trew.runs.rollouts import EFFECTS

UNTAUGHT = [name for name in EFFECTS if name != "teacher_logprobs"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "smollm")


@pytest.fixture
def recipe(tmp_path, model) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    path = tmp_path / "tiny.toml"
    path.write_text(recipe_of(model, **SETTINGS, lora={"rank": 4}))
    return path


@pytest.fixture
def cli(tmp_path, monkeypatch, capfd):
    """Runs one command line in ``tmp_path``; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str | Path, code: int = 0) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(a) for a in args])
        printed = "".join(capfd.readouterr())
        assert left.value.code == code, printed
        return printed

    return call


def names(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("base", tiers.some(["float32", "bfloat16", "nf4"], ["nf4"]))
def test_a_run_that_was_resumed_is_the_run_that_never_stopped(recipe, tmp_path, model, base, cli):
    dtype = "bfloat16" if base == "bfloat16" else "float32"
    settings = (
        "--set", f"lora.base={base}", "learner.optimizer=adamw-8bit", "lora.rank=96", "learner.schedule=constant",
        f"learner.dtype={dtype}",
    )  # fmt: skip
    out = cli("train", recipe, "--out", "whole", *settings)
    assert "of adapters trained" in out
    cli("train", recipe, "--out", "cut", *settings, "steps=2")
    cli("train", recipe, "--out", "cut", "--resume", "--set", "steps=3")  # all else is as the run was started
    same_learning(tmp_path / "whole", tmp_path / "cut")
    whole = tmp_path / "whole"
    checkpoint = whole / "checkpoints" / "000003"
    assert all("lora_" in name for name in names(checkpoint / "adapter_model.safetensors"))
    assert any("state1" in name for name in names(checkpoint / "optimizer.safetensors"))
    first = training_rows(whole)[0]
    assert first["kl"] > 0  # against the base, which has no copy of its own
    tables = [pq.read_table(run / "rollouts" / "000003.parquet") for run in (whole, tmp_path / "cut")]
    assert all(table.select(list(EFFECTS)).equals(tables[0].select(list(EFFECTS))) for table in tables)
    assert not any(tables[0][name].null_count for name in UNTAUGHT), "every token is pulled towards the reference"
    assert tables[0]["teacher_logprobs"].null_count == len(tables[0])  # there is no teacher

    assert json.loads((whole / "final" / "adapter" / "adapter_config.json").read_text())["r"] == 96
    trained, plain = (dict(load_model(str(f)).named_parameters()) for f in (whole / "final", model))
    assert not any("lora" in name for name in trained)
    moved = {n for n, p in trained.items() if not torch.equal(p, plain[n])}
    assert moved == {n for n in plain if "proj" in n}
    out = cli("eval", whole / "final", "--task", "arithmetic", "--size", "4", "--max-tokens", "4")
    assert "accuracy" in out


def test_what_cannot_work_is_told_before_anything_is_loaded(recipe, cli):
    out = cli("train", recipe, "--dry-run", "--set", "lora.targets=[\"q_prj\"]", code=2)  # fmt: skip
    assert "lora.targets: got 'q_prj', accepts" in out
    settings = ("lora.dropout=0.1", "lora.base=bfloat16", "learner.optimizer=adamw-offload")
    out = cli("train", recipe, "--set", *settings, code=2)
    for line in ("lora.dropout: got 0.1", "lora.base: got 'bfloat16'", "learner.optimizer: got 'adamw-offload'"):
        assert line in out


def test_other_adapters_or_another_base_are_another_run(recipe, cli):
    cli("train", recipe, "--out", "run", "--set", "steps=1")
    out = cli("train", recipe, "--out", "run", "--resume", "--set", "lora.rank=8", code=2)
    assert "lora.rank: the run was started with 4, now it is 8" in out
