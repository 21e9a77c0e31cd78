"""The policy table of docs/rewards.md is what the grader does: every answer of every line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trew.rewards import grade
from trew.rewards.builtin import kinds

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def table() -> list[tuple[str, str, str, float]]:
    """(policy, gold, answer, score) for every answer in the table."""
    section = PAGE.split("### What is accepted (`math`)")[1].split("\n### ")[0]
    found = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 4 and "`" in cells[1]:
            [gold] = re.findall(r"`([^`]+)`", cells[1])
            for cell, score in ((cells[2], 1.0), (cells[3], 0.0)):
                answers = re.findall(r"`([^`]+)`", cell)
                assert answers, line
                found += [(cells[0], gold, answer, score) for answer in answers]
    return found


TABLE = table()


@pytest.mark.parametrize(("policy", "gold", "answer", "score"), TABLE, ids=[f"{p}: {g} / {a}" for p, g, a, _ in TABLE])
def test_policy(policy: str, gold: str, answer: str, score: float) -> None:
    assert kinds.gold_problem("math", {"answer": gold}, {}) == ""
    verdict = grade("math", f"so $\\boxed{{{answer}}}$.", gold)
    assert (verdict.score, verdict.status) == (score, "scored"), (policy, verdict)


def test_the_table_was_read() -> None:
    assert len({policy for policy, *_ in TABLE}) >= 30
    assert sum(score for *_, score in TABLE) >= 90
    assert sum(1 - score for *_, score in TABLE) >= 75
