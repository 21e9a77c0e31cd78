"""The estimate of evaluations, which may decode more at once than a step, or longer completions."""

from __future__ import annotations

import dataclasses

import pytest

import tiers
from test_estimate import WIDE, config, made, saved
from trew.config import EvalConfig, RolloutConfig
from trew.estimate import advice

EVALUATIONS = [({}, 40), ({"samples": 3}, 30), ({"max_tokens": 70}, 12), ({"max_tokens": 70, "samples": 2}, 40)]


@pytest.mark.parametrize(("kernels", "evaluation"), tiers.thinned(["auto", "plain"], EVALUATIONS, keep=2))
def test_an_evaluation_takes_what_a_step_of_its_size_would(kernels, evaluation, tmp_path):
    sets, held_out = evaluation
    base = dataclasses.replace(config(saved(tmp_path, **WIDE), rollout={"batch": 64}), kernels=kernels)
    own = EvalConfig(temperature=1.0, **sets)
    e = made(dataclasses.replace(base, eval=own), held_out=held_out)
    alike = {"prompts": held_out, "completions": own.samples, "max_tokens": own.max_tokens or 10, "batch": 64}
    like = made(dataclasses.replace(base, rollout=RolloutConfig(**alike)))
    for part in ("laid out", "step", "cache"):
        assert e.memory.parts["evaluating"][part] == like.memory.parts["generating"][part]
    assert e.memory.parts["generating"]["cache"] == made(base).memory.parts["generating"]["cache"]
    assert e.memory.peak >= e.memory.total("evaluating") >= e.memory.total("generating")
    # What a step takes, and how long, is not touched.
    assert e.seconds == made(base).seconds
    assert e.load.rows == 12


def test_an_evaluation_smaller_than_a_step_needs_no_word(tmp_path):
    c = config(saved(tmp_path))
    found = made(dataclasses.replace(c, eval=EvalConfig(samples=4, temperature=1.0)), held_out=3)
    assert found.memory == made(c).memory
    assert (set(found.memory.parts), found.load.evaluation) == ({"generating", "training"}, None)


def test_rows_of_an_evaluation_can_be_lowered_too(tmp_path):
    c = config(saved(tmp_path, **WIDE), rollout={"prompts": 1, "completions": 4, "max_tokens": 200})
    found = next(k for k in advice.knobs(made(c, held_out=500)) if "rollout.batch" in k.settings)
    assert found.settings == {"rollout.batch": 32}
    lowered = advice.changed(c, found.settings)
    assert made(lowered, held_out=500).memory.peak == found.peak
