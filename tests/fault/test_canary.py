"""A sampler that has not the learner's weights is found out, whoever packs them, and however small the step was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tiers
import trew
from run_help import configured, rows, save_models
from trew.config import Config
from trew.errors import EngineError
from trew.rollout.torch_engine import choice, engine
from trew.types import Span
from trew.utils.console import Silent


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    made = save_models(tmp_path_factory.mktemp("models"))
    return {"native": made["native"], "forward": made["fused"]}


@pytest.mark.parametrize(
    ("path", "learner"),
    tiers.thinned(
        ["native", "forward"], [{}, {"minibatch_prompts": 2, "inner_updates": 2}, {"dtype": "bfloat16"}], keep=2
    ),
)
def test_a_sampler_with_the_learners_weights_agrees_with_it(path, learner, models, tmp_path):
    config = configured(tmp_path, models[path], learner=learner)
    trew.train(config, display=Silent())
    limit = 0.02 if "dtype" in learner else 1e-5
    assert all(0 <= row["canary_gap"] <= limit for row in rows(config).values())
    assert all(row["staleness"] == 0 for row in rows(config).values())


@pytest.mark.parametrize("temperature", tiers.some([0.7, 1.0], ["0.7"]))
def test_at_another_temperature_too_but_not_where_the_distribution_was_cut(temperature, models, tmp_path):
    for name, settings in {"whole": {}, "cut": {"top_p": 0.9}}.items():
        (tmp_path / name).mkdir()
        config = configured(
            tmp_path / name, models["native"], steps=1, rollout={"temperature": temperature, **settings}
        )
        trew.train(config, display=Silent())
        gap = rows(config)[1]["canary_gap"]
        assert gap is None if name == "cut" else gap < 1e-5


def hold_forward(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The model generates with the weights it began with, as one that was never told of an update."""
    begun: dict[str, torch.Tensor] = {}
    used: list[int] = []
    real = engine.TorchEngine.poll

    def poll(self: Any, *args: Any, **kwargs: Any) -> Any:
        live = {k: v.clone() for k, v in self.model.state_dict().items()}
        begun.update({k: v for k, v in live.items() if k not in begun})
        used.append(1)
        self.model.load_state_dict(begun)
        try:
            return real(self, *args, **kwargs)
        finally:
            self.model.load_state_dict(live)

    monkeypatch.setattr(engine.TorchEngine, "poll", poll)
    return used


def train_with_stale_weights(
    hold: Any, model: Path, learner: dict[str, Any], folder: Path, monkeypatch: Any
) -> tuple[Config, str]:
    """A run whose sampler keeps the weights that it began with, and the words that it ended with."""
    monkeypatch.setattr(choice, "TOLERANCE", 1e9)  # the engine's own comparison would see it first, and repair it
    used = hold(monkeypatch)
    config = configured(folder, model, learner={"lr": 3e-4, **learner}, checkpoint={"every": 1})
    with pytest.raises(EngineError) as error:
        trew.train(config, display=Silent())
    assert any(used)
    assert rows(config)[1]["canary_gap"] < 1e-5  # the first step's weights were right
    return config, str(error.value)


@pytest.mark.parametrize("learner", [{}, {"minibatch_prompts": 2}], ids=["one update", "several"])
def test_stale_weights_end_the_run_before_anything_is_learned_from_them(learner, models, tmp_path, monkeypatch):
    config, said = train_with_stale_weights(hold_forward, models["forward"], learner, tmp_path, monkeypatch)
    assert re.search(r"differ from the learner's by .* nats on \d+ tokens", said)
    assert list(rows(config)) == [1]
    assert (Path(config.out) / "checkpoints" / "000001").is_dir()


def test_completions_of_older_weights_are_counted_and_not_compared(models, tmp_path, monkeypatch):
    config = configured(tmp_path, models["native"], steps=2)

    monkeypatch.setattr(engine, "Span", lambda version, start, end: Span(max(version - 1, 0), start, end))
    summary = trew.train(config, display=Silent())
    assert [rows(config)[s]["staleness"] for s in (1, 2)] == [0, 1]
    assert rows(config)[2]["canary_gap"] is None
    assert [w["rule"] for w in summary["warnings"]] == ["stale"]
