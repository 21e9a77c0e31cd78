"""The report's completions with tokens coloured by what the update did to them."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tiny
from rollouts_help import rollout
from trew.runs import RunFolder
from trew.runs.report import load_run, render_report
from trew.runs.report.tokens import coloured
from trew.types import Group, Prompt, Score, ScoredGroup

TEXT = "a<b>c"
COEFFICIENTS = [0.5, -0.1, 0.0, 0.0, float("nan")]


@pytest.fixture
def folder(tmp_path):
    """A run whose group taught something, with the tokenizer of its exported model."""
    tokenizer = tiny.tokenizer()
    ids = np.array([tokenizer(ch, add_special_tokens=False)["input_ids"][-1] for ch in TEXT])
    group = Group(Prompt("p", text="?"), tuple(rollout(ids, text=TEXT) for _ in range(2)))
    size = len(ids)
    effects = {
        name: [np.array(values, np.float32)] * 2
        for name, values in {
            "final_ratios": [1.0] * size, "weights": [1, 1, 0, 1, 1], "coefficients": COEFFICIENTS,
        }.items()
    }  # fmt: skip
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 1\n")
        scored = ScoredGroup(group, (Score(1.0), Score(0.0)))
        run.write_rollouts(1, [scored], advantages=[[1.0, -1.0]], trained_on=[scored], effects=effects)
        run.log({"step": 1, "reward": 0.5})
        tokenizer.save_pretrained(run.final)
    return tmp_path / "x"


def test_tokens_are_coloured_by_what_was_done_to_them(folder):
    best, worst = coloured(folder)
    assert best.pieces[:3] == (("up up3", "a"), ("down down1", "<"), ("held", "b"))
    assert ("score", "1") in best.facts
    assert ("score", "0") in worst.facts
    assert ("held", "2") in best.facts  # shut by the weight, and by the coefficient
    html = render_report([load_run(folder)])
    assert re.search(r'<span class="down down1">&lt;</span><span class="held">b</span>', html)
    assert "<b>c" not in html


def test_without_texts_or_coefficients_there_is_no_section(folder):
    (folder / "final" / "tokenizer.json").unlink()
    assert coloured(folder) == []
    assert "<h2>Tokens" not in render_report([load_run(folder)])
