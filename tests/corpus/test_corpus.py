"""Every case of ``rewards.jsonl``, graded from the main thread and from another one.

A case is ``kind``, ``completion`` (text, or pieces ``[text, times]`` that are joined), ``gold``, ``args``, the
``expected`` score (null: not judged) and ``status`` (null or absent: any that goes with the score), and ``why``. Floats
are compared to twelve digits.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tiers
from trew.rewards import KINDS, Verdict, grade

CASES = [json.loads(line) for line in (Path(__file__).parent / "rewards.jsonl").read_text("utf-8").splitlines()]
SLOWEST = 30.0  # seconds on a machine with other work: a CPU limit of 2 s and a new runner, ten times over


def text_of(completion: str | list[Any]) -> str:
    """``["\\boxed{", ["(", 9], "}"]`` as text."""
    if isinstance(completion, str):
        return completion
    return "".join(piece if isinstance(piece, str) else piece[0] * piece[1] for piece in completion)


def in_a_thread(kind: str, completion: str, gold: Any, args: dict[str, Any]) -> Verdict:
    found: list[Verdict] = []
    thread = threading.Thread(target=lambda: found.append(grade(kind, completion, gold, **args)))
    thread.start()
    thread.join()
    return found[0]


LINES = {f"{case['kind']}-line{i}": case for i, case in enumerate(CASES, 1)}
AT_THEIR_LIMIT = {"math-line384", "math-line385", "math-line386"}
"""Hostile ones that take all of their two seconds, as math-line357 does; these run in the nightly tests."""


@pytest.mark.parametrize("line", tiers.some(LINES, LINES.keys() - AT_THEIR_LIMIT))
def test_case(line: str) -> None:
    case = LINES[line]
    completion = text_of(case["completion"])
    start = time.monotonic()
    verdict = grade(case["kind"], completion, case["gold"], **case["args"])
    took = time.monotonic() - start
    if case["expected"] is None:
        assert verdict.score is None, (verdict, case["why"])
    else:
        assert verdict.score == pytest.approx(case["expected"], rel=1e-12, abs=1e-12), (verdict, case["why"])
    assert case.get("status") in (None, verdict.status), (verdict, case["why"])
    assert took < SLOWEST
    if took < 1:  # what ran into its limit once would do so again
        again = in_a_thread(case["kind"], completion, case["gold"], case["args"])
        assert (again.score, again.status, again.extracted) == (verdict.score, verdict.status, verdict.extracted)


def test_the_corpus_is_large_and_has_right_wrong_and_hostile_cases_of_every_kind() -> None:
    ours = CASES
    assert len(ours) >= 400
    assert all(set(case) - {"status"} == {"kind", "completion", "gold", "args", "expected", "why"} for case in ours)
    assert all(case["why"] for case in ours)
    for kind in ("gsm8k", "arithmetic", "math", "countdown", "format", "soft_overlong", "cosine", "repetition"):
        assert kind in KINDS
        scores = {case["expected"] for case in ours if case["kind"] == kind}
        assert len(scores) >= 2, kind
    assert sum("hostile" in case["why"] for case in ours if case["kind"] == "math") >= 40
