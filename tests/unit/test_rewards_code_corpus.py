"""Every case of tests/corpus/code.jsonl, one at a time from this thread and all together from several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiers
from trew.errors import SandboxError
from trew.rewards import KINDS, grade
from trew.rewards.sandbox import boundary

CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "corpus" / "code.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def _sandbox():
    try:
        boundary()
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}: {case['why']}"[:80])
def test_case(case):
    verdict = grade(case["kind"], case["completion"], case["gold"], **case["args"])
    assert (verdict.score, verdict.status) == (case["expected"], case["status"]), verdict.detail


@pytest.mark.parametrize("kind", tiers.some(["code_stdin", "code_func"], ["code_func"]))
def test_together_they_get_the_same_scores(kind):
    cases = [case for case in CASES if case["kind"] == kind]
    together = KINDS[kind].grade_many
    assert together is not None
    verdicts = together([(case["completion"], case["gold"], case["args"]) for case in cases])
    assert [v.score for v in verdicts] == [case["expected"] for case in cases]


def test_the_corpus_is_large_and_has_both_outcomes():
    scores = [(case["kind"], case["expected"]) for case in CASES]
    assert len(CASES) >= 60
    for kind in ("code_stdin", "code_func"):
        assert all(scores.count((kind, score)) >= 2 for score in (0, 1, None))
