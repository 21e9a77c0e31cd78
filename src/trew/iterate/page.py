"""Renders the rounds as a single HTML page without scripts or external resources."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..runs.files import write_atomic
from ..runs.report.svg import CSS, Series, line_chart

_STYLE = """:root{color-scheme:light dark}body{margin:0 auto;max-width:1180px;padding:24px 20px 60px;
font:15px/1.5 system-ui,sans-serif}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid #8884}
.charts{display:flex;flex-wrap:wrap;gap:14px}"""


def write_page(path: Path, rows: Sequence[Mapping[str, Any]], *, verifier: str, notes: Sequence[str] = ()) -> None:
    """Writes the page for the rounds so far."""
    write_atomic(path, lambda file: file.write(render(rows, verifier=verifier, notes=notes).encode()))


def render(rows: Sequence[Mapping[str, Any]], *, verifier: str, notes: Sequence[str] = ()) -> str:
    """The page as HTML: per round, the policy's accuracy by the verifier and the reward model's agreement with it."""
    trained = [row for row in rows if "policy" in row]
    points: list[tuple[int, Mapping[str, Any]]] = []
    # The first point is the policy before its first round.
    if trained:
        points = [(trained[0]["round"] - 1, trained[0]["policy"]["accuracy_before"])]
        points += [(row["round"], row["policy"]["accuracy_after"]) for row in trained]
    charts = [
        line_chart(
            [_series(f"policy, judged by {verifier}", points)], title="Accuracy of the policy", x_label="round",
            y_range=(0.0, 1.0), standalone=False,
        ),
        line_chart(
            [_series(name, [(row["round"], row[key]["auc"]) for row in rows if key in row]) for name, key in _CURVES],
            title="Agreement of the reward model with the verifier (AUC)", x_label="round", y_range=(0.0, 1.0),
            standalone=False,
        ),
    ]  # fmt: skip
    head = "".join(f"<th>{h}</th>" for h in ("round", f"policy by {html.escape(verifier)}, before", "after",
                   "learned reward, first to last step", "pairs (replayed)", "reward model AUC, before", "after",
                   "accuracy on pairs, after", "minutes"))  # fmt: skip
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _cells(row))}</tr>" for row in rows)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Rounds</title><style>{_STYLE}{CSS}</style>'
        "<h1>Iterative training</h1><p>The policy is trained on the learned reward alone; the verifier only measures "
        "it and ranks the pairs that the reward model learns from. Intervals are 95 %. Agreement is on prompts that "
        f"the reward model never sees.</p>{''.join(f'<p>{html.escape(note)}</p>' for note in notes)}"
        f'<div class="charts">{"".join(charts)}</div><h2>Rounds</h2>'
        f"<table><tr>{head}</tr>{body}</table></html>\n"
    )


_CURVES = (
    ("before the round's update", "reward_before"),
    ("after it", "reward_after"),
    ("after it, on earlier rounds' pairs", "reward_on_history"),
)


def _series(name: str, points: Sequence[tuple[int, Mapping[str, Any]]]) -> Series:
    return Series(
        name, [x for x, _ in points], [i["mean"] for _, i in points], [i["low"] for _, i in points],
        [i["high"] for _, i in points],
    )  # fmt: skip


def _cells(row: Mapping[str, Any]) -> list[str]:
    policy = row.get("policy", {})
    reward = [policy.get("reward_first"), policy.get("reward_last")]
    return [
        str(row["round"]),
        _interval(policy.get("accuracy_before")),
        _interval(policy.get("accuracy_after")),
        " to ".join(f"{r:.3f}" for r in reward) if None not in reward else "-",
        _pairs(row),
        _interval(row["reward_before"]["auc"]),
        _interval(row["reward_after"]["auc"]),
        _interval(row["reward_after"]["accuracy"]),
        f"{row['seconds'] / 60:.1f}",
    ]


def _pairs(row: Mapping[str, Any]) -> str:
    """How many there are, and what was left out of them; rounds of earlier versions do not say that."""
    made = row["pairs"] + row["replayed"]
    told = [f"{row['pairs']} ({row['replayed']})"]
    if (learned := row.get("trained_pairs", made)) < made:
        told.append(f"{learned} learned from, the others are too long")
    if unjudged := row.get("unjudged"):
        told.append(f"{unjudged} completions without a verdict")
    return "; ".join(told)


def _interval(i: Mapping[str, float | None] | None) -> str:
    if not i or i["mean"] is None:
        return "-"
    return f"{i['mean']:.3f} ({i['low']:.3f} to {i['high']:.3f})"
