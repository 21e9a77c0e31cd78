"""trew compare on real runs: equal objectives give equal runs, and the page and the JSON agree."""

from __future__ import annotations

import json
import shutil

import pytest

import tiny
from recipe_help import ODD, recipe
from report_help import Elements

SAME = ["objective.preset=trw-triangular", "objective.w0=1.0", "objective.w2=1.0", "objective.w_out=0.0"]
"""The triangular weight that is the clip: 1 up to its ends, and nothing beyond."""


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory):
    """Two seeds of the clip, and of the same weight under another name."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "reward.py").write_text(ODD)
    tiny.save(folder / "lm")
    sections = {
        "steps": 2, "chat_template": "plain", "eval": {"size": 12, "correct_at": 0.6, "every": 1},
        "objective": {"preset": "grpo", "beta": 0.0, "eps_low": 0.2, "eps_high": 0.2},
        "checkpoint": {"every": 0}, "track": {"samples_every": 0, "regrade_every": 0},
    }  # fmt: skip
    (folder / "odd.toml").write_text(recipe("lm", **sections))
    for name, sets in (("clip", []), ("triangular", SAME)):
        for seed in (1, 2):
            out = f"runs/{name}-{seed}"
            server.run("train", "odd.toml", "--out", out, "--set", f"seed={seed}", *sets, cwd=folder)
    return folder


def names(folder, *kinds):
    return [f"runs/{kind}-{seed}" for kind in kinds for seed in (1, 2)]


def test_one_objective_under_two_names_is_equal_to_the_last_bit(server, runs):
    """Pairing by seed works only if runs of one seed see the same prompts and draws."""
    for metric in ("area", "reward:2", "entropy:1"):
        text = server.run("compare", *names(runs, "clip", "triangular"), "--json", "--metric", metric, cwd=runs)
        found = json.loads(text)
        (versus,) = found["comparisons"]
        assert versus["verdict"] == "equal"
        assert versus["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    first, second = (run["score"] for run in found["groups"][0]["runs"])
    assert first != second  # two seeds are two runs: equal groups are not equal because everything is


def test_text_and_page_tell_the_same(server, runs):
    text = server.run("compare", *names(runs, "clip", "triangular"), "--html", "cmp.html", cwd=runs)
    page = Elements((runs / "cmp.html").read_text())
    shown = "".join(page.text)
    for row in ("trw-triangular", "objective.w_out", "2 pairs of runs cannot show any difference"):
        assert row in text
        assert row in shown
    assert page.seen.count("svg") >= 5
    assert "script" not in page.seen


def test_real_runs_that_cannot_be_compared_are_refused(server, runs):
    assert "one seed" in server.run("compare", "runs/clip-1", "runs/triangular-1", cwd=runs, code=2)
    assert "held-out prompts" in server.run("compare", "runs/clip-1", "runs/triangular-1", cwd=runs, code=2)
    shutil.copytree(runs / "runs" / "triangular-2", runs / "runs" / "open")
    (runs / "runs" / "open" / "summary.json").unlink()
    refused = server.run("compare", *names(runs, "clip"), "runs/triangular-1", "runs/open", cwd=runs, code=2)
    assert "1 of 4 runs have not finished" in refused
    counted = server.run(
        "compare", *names(runs, "clip"), "runs/triangular-1", "runs/open", "--unfinished", "count", cwd=runs
    )  # fmt: skip
    assert "runs/open did not finish" in counted
