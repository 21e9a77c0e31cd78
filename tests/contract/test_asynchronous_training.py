"""With a bound of 0 and the embedded engine, a run on the asynchronous source is the synchronous run, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import run_help
import tiers
import trew
from run_help import Watching, configured, save_models
from trew.rollout.asynchronous import AsyncRollouts
from trew.runs.journal import Journal
from trew.training import build


@pytest.mark.parametrize("preset", tiers.some(["grpo", "dapo", "remax"], ["remax"]))
def test_without_staleness_a_run_is_the_synchronous_one(preset, tmp_path, monkeypatch):
    model = save_models(tmp_path)["native"]
    found = {}
    for kind in ("sync", "async"):
        config = configured(
            tmp_path, model, objective={"preset": preset}, out=str(tmp_path / kind), eval={"correct_at": 0.5}
        )
        if kind == "async":

            def source(engine: Any, config: Any = config, **settings: Any) -> AsyncRollouts:
                keeper = Journal(Path(config.out))
                return AsyncRollouts(engine, ahead=engine, keeper=keeper, config=config, **settings)

            monkeypatch.setattr(build, "SyncRollouts", source)
        trew.train(config, display=Watching())
        paths = sorted(Path(config.out, "rollouts").glob("*.parquet"))
        columns = ["uid", "sample", "token_ids", "logprobs", "score", "policy_version", "advantages"]
        found[kind] = (
            [pq.read_table(path, columns=columns).to_pylist() for path in paths],
            Path(config.out, "final", "model.safetensors").read_bytes(),
            [(row["loss"], row["grad_norm"]) for row in run_help.rows(config).values() if "loss" in row],
        )
    assert found["sync"] == found["async"]
