"""Writes the generated tables of docs/*.md and their pictures from benchmarks/results/*.json.

python benchmarks/figures.py            writes what is not current (part of make docs)
python benchmarks/figures.py --check    only names it; exit code 1 if there is any
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import environments
import gpu
import learning_results
from trew.runs.report import Series, line_chart
from trew.runs.report.svg import CSS, side_by_side

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, MEMORY_PAGE, PAIRS_PAGE, SCALE_PAGE, ENVIRONMENTS_PAGE = (
    ROOT / "docs" / f"{name}.md" for name in ("performance", "memory", "reward-models", "scale", "environments")
)
IMAGES = ROOT / "docs" / "images"
PHASES = (("generate", ("generate",)), ("old and reference log-probs", ("old", "ref")),
          ("training pass", ("train", "forward", "backward", "optimizer")), ("rest", ("rest",)))  # fmt: skip
MIB = 2**20


def files() -> dict[Path, str]:
    """Every generated file with what should be in it."""
    step, hf, floor, scaling, paths, learning = map(load, ("step", "generate", "floor", "scaling", "paths", "learning"))
    tables = {
        "machine": (machine, step),
        "step": (step_table, step),
        "generate": (generate_table, hf),
        "vllm": (vllm_table, load("vllm-generate")),
        "floor": (floor_table, floor),
        "scaling": (scaling_table, scaling),
        "paths": (paths_table, paths),
        "learning": (learning_results.page, learning),
    }
    parts = {name: written(make, found) for name, (make, found) in tables.items()} | {"gpu": gpu_table(load("gpu"))}
    shown = [row for row in step["rows"] if row["setting"] in ("fixed-fp32", "ragged-fp32", "fixed-default")]
    return {
        PAGE: filled(PAGE.read_text(encoding="utf-8"), parts),
        MEMORY_PAGE: filled(MEMORY_PAGE.read_text(encoding="utf-8"), {"plan": written(plan_table, load("plan"))}),
        PAIRS_PAGE: filled(PAIRS_PAGE.read_text(encoding="utf-8"), {"pairs": written(pairs_table, load("pairs"))}),
        SCALE_PAGE: filled(
            SCALE_PAGE.read_text(encoding="utf-8"),
            {"cluster": written(cluster_table, load("cluster"))} | simulated(load("cluster_sim")),
        ),
        ENVIRONMENTS_PAGE: filled(
            ENVIRONMENTS_PAGE.read_text(encoding="utf-8"),
            {"learned": written(learned_table, load("environments")), "turns": turns_line(load("episodes"))},
        ),
        IMAGES / "performance-step.svg": stacked(shown),
        IMAGES / "performance-scaling.svg": scaling_picture(scaling),
        IMAGES / "performance-learning.svg": learning_results.picture(learning),
    }


def written(make: Callable[[dict[str, Any]], str], found: dict[str, Any]) -> str:
    return make(found) if found["rows"] else "Not measured yet."


def load(name: str) -> dict[str, Any]:
    """A file of results; one that is not there has no rows."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}


def filled(page: str, parts: dict[str, str]) -> str:
    """``page`` with its generated parts exchanged; each stands between two comments."""
    for name, text in parts.items():
        mark = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end of {name} -->)", re.S)
        page, count = mark.subn(lambda m, text=text: f"{m[1]}\n{text}\n\n{m[2]}", page)
        assert count == 1, name
    return page


# --------------------------------------------------------------------------------------------------------- the tables


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(found: dict[str, Any]) -> str:
    m = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    counts = sorted({len(r["runs"]["ours"]) for r in found["rows"]})
    runs = "1 run" if counts == [1] else f"{' or '.join(map(str, counts))} runs"
    where = f"{m['cpu']}, {found['threads']} threads of {m['cores']} cores"
    return f"Measured {found['date']} on {where}, {runs} of each side; {versions}."


def step_table(found: dict[str, Any]) -> str:
    rows = []
    for r in found["rows"]:
        memory = [r["memory"][side]["peak_bytes"] / MIB for side in ("ours", "peer")]
        rows.append((
            r["model"], r["setting"], seconds(r["seconds"]["ours"]), seconds(r["seconds"]["peer"]),
            ratio(r), f"{memory[0]:,.0f}", f"{memory[1]:,.0f}",
            f"{r['memory_ratio']:.2f}",
        ))  # fmt: skip
    head = ("model", "setting", "trew, s", "TRL, s", "ratio", "trew, MiB", "TRL, MiB", "ratio")
    return table(head, rows)


def pairs_table(found: dict[str, Any]) -> str:
    head = ("computation", "pairs", "tokens", "plain, s", "packed, s", "ratio")
    rows = [
        (r["dtype"], str(r["pairs"]), f"{r['tokens']:,}", seconds(r["seconds"]["plain"]),
         seconds(r["seconds"]["packed"]), f"**{r['ratio']:.1f}**")
        for r in found["rows"]
    ]  # fmt: skip
    m, versions = found["machine"], ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    where = f"{m['cpu']}, {found['threads']} threads of {m['cores']} cores, beside other work"
    return f"Measured {found['date']} on {where}; {versions}.\n\n{table(head, rows)}"


def ratio(r: dict[str, Any]) -> str:
    """The peer's seconds over ours; of more repeats than one, the range too."""
    low, high = r["ratio_range"]
    return f"**{r['ratio']:.1f}**" + (f" ({low:.1f} to {high:.1f})" if high > low else "")


def generate_table(found: dict[str, Any]) -> str:
    rows = [
        (r["model"], r["setting"], seconds(r["phases"]["ours"]["generate"]), seconds(r["phases"]["peer"]["generate"]),
         ratio(r), f"{r['tokens_per_second']['ours']:,.0f}")
        for r in found["rows"]
    ]  # fmt: skip
    return table(("model", "setting", "trew, s", "transformers, s", "ratio", "trew, tokens/s"), rows)


def vllm_table(found: dict[str, Any]) -> str:
    rows = []
    for r in found["rows"]:
        ours, theirs = (f"{r['tokens_per_second'][side]:,.0f}" for side in ("ours", "peer"))
        busy = f"{max(r['foreign_cpu'].values()):.2f}"
        rows.append((r["setting"].replace("x", " × ").replace("-", ", "), ours, theirs, ratio(r), busy))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    head = ("prompts × completions, type", "trew, tokens/s", "vLLM, tokens/s", "ratio", "cores that others used")
    return f"Measured {found['date']}; {versions}.\n\n{table(head, rows)}"


def cluster_table(found: dict[str, Any]) -> str:
    rows, places = [], []
    for r in found["rows"]:
        value, target = (f"{r[key]:.3g} {r['unit']}".strip() for key in ("value", "target"))
        met = "yes" if r["value"] <= r["target"] else f"no{r.get('note', '')}"
        if (place := measured_where(r["measured"])) not in places:
            places.append(place)
        rows.append((r["name"], f"**{value}**", target, met, "abcdefgh"[places.index(place)]))
    said = "; ".join(f"({letter}) {place}" for letter, place in zip("abcdefgh", places, strict=False))
    return f"Measured {said}.\n\n{table(('what', 'measured', 'at most', 'met', 'where'), rows)}"


def measured_where(of: dict[str, Any]) -> str:
    m, versions = of["machine"], ", ".join(f"{name} {version}" for name, version in of["versions"].items())
    return f"{of['date']} on {m['cpu']}, {m['cores']} cores, beside other work, {versions}"


def simulated(found: dict[str, Any]) -> dict[str, str]:
    """The tables of benchmarks/cluster_sim.py."""
    parts = {"simulation": ("validate", validate_table), "published": ("published", published_table),
             "limits": ("limits", limits_table)}  # fmt: skip
    return {
        name: f"Measured {found[part]['measured']}.\n\n{make(found[part]['rows'])}"
        if part in found
        else "Not measured yet."
        for name, (part, make) in parts.items()
    }


def validate_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (r["what"], str(r["staleness"]), f"{r['real s per step']:.2f}", f"{r['simulated']:.2f}", f"{r['off']:+.1%}",
         "" if r["learner idle, real"] is None else f"{r['learner idle, real']:.0%}",
         f"{r['learner idle, simulated']:.0%}")
        for r in rows
    ]  # fmt: skip
    head = ("lengths, learning", "S", "real, s per step", "simulated", "off", "learner waits, real", "simulated")
    return table(head, lines)


def published_table(rows: list[dict[str, Any]]) -> str:
    def shown(row: dict[str, Any], key: str) -> str:
        value = row.get(key, "")
        return value if isinstance(value, str) else f"{value:+.0%}" if key == "off" else f"{value:.3g}"

    keys = ("published s per step", "simulated", "off", "published speed-up", "speed-up")
    return table(("what", *keys), [(row["what"], *(shown(row, key) for key in keys)) for row in rows])


def limits_table(rows: list[dict[str, Any]]) -> str:
    costs = [
        (r["what"], f"{r['per second']:,.0f}", f"{r['us each']:,.3g}", f"{r['cores']:.2g}")
        for r in rows if "cores" in r
    ]  # fmt: skip
    sizes = [
        (r["what"], f"{r['value']:,.3g}" if r["value"] < 1000 else f"{r['value']:,.0f}") for r in rows if "value" in r
    ]
    first = table(("what rank 0 does", "per second", "microseconds each", "cores"), costs)
    return first + "\n\n" + table(("what else", ""), sizes)


def paths_table(found: dict[str, Any]) -> str:
    rows = []
    for r in found["rows"]:
        sides = r["plain"], r["fast"]
        rows.append((
            f"`{r['path']}`", r["dtype"], *(seconds(side["seconds"]) for side in sides), f"{r['ratio']:.2f}",
            *(f"{side['peak_bytes'] / MIB:,.0f}" for side in sides),
        ))  # fmt: skip
    return table(("setting", "type", "plain, s", "fast, s", "ratio", "plain, MiB", "fast, MiB"), rows)


def plan_table(found: dict[str, Any]) -> str:
    rows = [
        (r["setting"], f"{r['estimate'] / MIB:,.0f}", f"{r['measured'] / MIB:,.0f}", f"{r['error']:+.0%}")
        for r in found["rows"]
    ]
    dates = sorted(run["date"] for r in found["rows"] for run in r["runs"])
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    said = f"Measured {when}, torch {found['versions']['torch']}, {found['machine']['cores']} cores:"
    lines = [said, "", table(("setting", "estimated, MiB", "measured, MiB", "error"), rows)]
    peaks = [[max(run["peaks"].values()) for run in r["runs"]] for r in found["rows"] if len(r["runs"]) > 1]
    if peaks:
        apart = max(max(of) / min(of) - 1 for of in peaks)
        lines += ["", f"{len(peaks)} of these settings were run several times: the peaks of a setting's runs differ by "
                  f"{apart:.1%} at most, and the table shows the largest."]  # fmt: skip
    return "\n".join(lines)


def gpu_table(found: dict[str, Any]) -> str:
    """What each part of `make gpu` found."""
    known = gpu.parts(Path(), dry=False, trl=True)
    rows = [(f"`{name}`", row["outcome"], known[name].told(row["found"])) for name, row in found["parts"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    said = f"{found['date']}, {found['gpu']['name']}, {found['machine']['cores']} cores of its machine; {versions}:"
    return "\n".join([said, "", table(("part", "outcome", "found"), rows)])


def learned_table(found: dict[str, Any]) -> str:
    """What was learned in built-in environments; below it, in what the runs differ from today's recipes."""

    def share(a: dict[str, float]) -> str:
        return f"{a['mean']:.2f} ({a['low']:.2f} to {a['high']:.2f})"

    rows, earlier = [], {}
    for r in found["rows"]:
        name = r["environment"]
        if changed := environments.changes(r, environments.today(name)):
            earlier.setdefault(changed, f"`{name}` with {changed}")
            name += " *"
        before, after = share(r["accuracy_before"]), share(r["accuracy_after"])
        rows.append([name, str(r["seed"]), str(r["steps"]), before, after, r["date"]])
    text = table(["environment", "seed", "steps", "before (95 %)", "after (95 %)", "run"], rows)
    return text + (f"\n\n\\* by an earlier recipe: {'; '.join(earlier.values())}." if earlier else "")


def turns_line(found: dict[str, Any]) -> str:
    """What several turns cost."""
    if "rows" not in found:
        return "Not measured yet."
    each = found["episodes"]
    rows = [
        [
            str(row["tokens"]), f"{row['observed_tokens'] / each:.0f}", f"{row['completion_s']:.1f} s",
            f"{row['episode_s']:.1f} s", f"{row['ratio']:.2f}", f"{100 * row['waited_share']:.0f} %",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    header = ["tokens of a reply", "tokens observed", "one completion", "five turns", "ratio", "waited"]
    return (
        f"{table(header, rows)}\n\n{each} episodes of five turns beside as many completions with the same number of "
        "sampled tokens (medians; the ratio is the median over pairs). What is more is mostly the prefill of what the "
        "environment says, so the ratio falls as replies get longer. *waited*: share of the time in which nothing was "
        "generated, where the environment takes 50 ms for each answer."
    )


def floor_table(found: dict[str, Any]) -> str:
    limits = found["limits"]
    fast, own = ({t: f"{max(of.values()) / 1e9:,.0f}" for t, of in limits[k].items()} for k in ("products", "torch"))
    said = [f"{name} products {rate} GFLOP/s (torch's own {own[name]})" for name, rate in fast.items()]
    lines = [f"This machine: {', '.join(said)}, copy {limits['copy'] / 1e9:.0f} GB/s (read and write).", ""]
    rows = []
    for r in found["rows"]:
        cells = [f"{seconds(v['floor'])} of {seconds(v['seconds'])} ({v['share']:.0%})" for v in r["phases"].values()]
        rows.append((r["model"], r["dtype"], *cells))
    return "\n".join(
        [
            *lines,
            table(
                ("model", "type", "generate, s", "training pass, s", "whole step, s", "and by torch's own products"),
                rows,
            ),
        ]
    )


def scaling_table(found: dict[str, Any]) -> str:
    by: dict[tuple[str, Any], dict[str, float]] = {}
    for r in found["rows"]:
        by.setdefault((r["axis"], r["value"]), {})[r["dtype"]] = r["per_token_us"]["total"]
    names = list(dict.fromkeys(r["dtype"] for r in found["rows"]))
    rows = [
        (AXES.get(axis, axis), str(value), *(f"{of[name]:.0f}" if name in of else "" for name in names))
        for (axis, value), of in by.items()
    ]
    return table(("what varies", "value", *(f"{name}, µs per completion token" for name in names)), rows)


AXES = {"group": "group size", "prompt": "prompt tokens", "completion": "completion tokens", "size": "parameters"}


def seconds(value: float) -> str:
    """
    >>> seconds(12.345), seconds(1.2345), seconds(0.12345)
    ('12.3', '1.23', '0.123')
    """
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


# ------------------------------------------------------------------------------------------------------- the pictures


def stacked(rows: Sequence[dict[str, Any]]) -> str:
    """Two bars per row, ours and the peer's, as a share of the peer's seconds, their phases side by side."""
    left, width, bar, gap = 190, 700, 15, 14
    top, room = 34, 700 - 190 - 60
    height = top + len(rows) * (2 * bar + gap) + 34
    title = "Seconds of one GRPO step by phase, as a share of TRL's"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tc" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(title)}"><style>{CSS}</style>'
        f'<rect class="tc-ground" width="{width}" height="{height}" rx="6"/>'
        f'<text class="tc-ink tc-title" x="16" y="20">{escape(title)}</text>'
    ]
    for number, row in enumerate(rows):
        y = top + number * (2 * bar + gap)
        label = f"{row['model']} {row['setting']}"
        parts.append(f'<text class="tc-ink" x="16" y="{y + bar + 4}">{escape(label)}</text>')
        for i, (side, name) in enumerate((("ours", "trew"), ("peer", row["peer"].upper()))):
            at = y + i * bar
            parts.append(f'<text class="tc-muted" x="{left - 6}" y="{at + 11}" text-anchor="end">{name}</text>')
            x = float(left)
            for colour, (_, keys) in enumerate(PHASES):
                share = sum(row["phases"][side].get(k, 0.0) for k in keys) / row["seconds"]["peer"] * room
                parts.append(
                    f'<rect class="tc-f{colour}" x="{x:.1f}" y="{at}" width="{share:.1f}" height="{bar - 2}"/>'
                )
                x += share
            total = f"{seconds(row['seconds'][side])} s"
            parts.append(f'<text class="tc-ink" x="{x + 5:.1f}" y="{at + 11}">{total}</text>')
    x = 16.0
    for colour, (name, _) in enumerate(PHASES):
        parts.append(f'<rect class="tc-f{colour}" x="{x:.1f}" y="{height - 22}" width="12" height="12"/>')
        parts.append(f'<text class="tc-ink" x="{x + 17:.1f}" y="{height - 12}">{name}</text>')
        x += 34 + 6.6 * len(name)
    return "".join([*parts, "</svg>"])


def scaling_picture(found: dict[str, Any]) -> str:
    """A panel per axis: microseconds per completion token, of generation and of the training pass, float32."""
    names = [axis for axis in AXES if axis != "size" and any(r["axis"] == axis for r in found["rows"])]
    charts = []
    for axis in names:
        rows = [r for r in found["rows"] if r["axis"] == axis and r["dtype"] == "float32"]
        x = [float(r["value"]) for r in rows]
        highest = max(r["per_token_us"]["total"] for r in rows)
        series = [
            Series("", x, [r["per_token_us"][key] for r in rows], colour=i)
            for i, key in enumerate(("generate", "train"))
        ]
        charts.append(
            line_chart(series, x_label=AXES[axis], width=300, height=220, y_range=(0, 1.1 * highest), standalone=False)
        )
    charts = charts or [line_chart([], width=300, height=220, standalone=False)]
    legend = [Series(name, [], [], colour=i) for i, name in enumerate(("generate", "training pass"))]
    return side_by_side(
        charts, width=300, height=220, title="Microseconds per completion token, 5 M parameters, float32", legend=legend
    )


def main(args: Sequence[str], *, wanted: Callable[[], dict[Path, str]] = files) -> int:
    stale = [p for p, text in wanted().items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    check = "--check" in args
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'not current' if check else 'written'}")
        if not check:
            path.write_text(wanted()[path], encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
