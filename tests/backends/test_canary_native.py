"""A decoder that keeps weights which are no longer the learner's is found out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import trew
from run_help import Watching, configured, rows, save_models
from test_canary import train_with_stale_weights
from trew.backends.cpu import build, decoder, layers

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason="no compiler")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


def hold_native(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every decoder has the weights that the first decoder laid out."""
    real, kept, used = layers.packed, {}, []

    def packed(*modules: Any, dtype: torch.dtype, arena: Any = None) -> Any:  # in the heap, where they stay
        key = tuple(map(id, modules)), dtype
        used.append(key in kept)
        return kept[key] if key in kept else kept.setdefault(key, real(*modules, dtype=dtype))

    for module in (layers, decoder):
        monkeypatch.setattr(module, "packed", packed)
    return used


@pytest.mark.parametrize("learner", [{}, {"minibatch_prompts": 2}], ids=["one update", "several"])
def test_stale_weights_end_the_run_before_anything_is_learned_from_them(learner, models, tmp_path, monkeypatch):
    config, said = train_with_stale_weights(hold_native, models["native"], learner, tmp_path, monkeypatch)
    assert re.search(r"differ from the learner's by .* nats on \d+ tokens", said)
    assert list(rows(config)) == [1]
    assert (Path(config.out) / "checkpoints" / "000001").is_dir()


@pytest.mark.filterwarnings("default")
def test_the_engine_sees_its_own_stale_pack_and_decodes_without_it(models, tmp_path, monkeypatch):
    """Large steps show in the proof on a prompt's first tokens, which is made in every call."""
    hold_native(monkeypatch)
    config, display = configured(tmp_path, models["native"], learner={"lr": 0.03}), Watching()
    trew.train(config, display=display)
    assert any("decodes through its own forward pass" in text for text in display.warnings)
    assert all(row["canary_gap"] < 1e-4 for row in rows(config).values())
    assert list(rows(config)) == [1, 2, 3]
