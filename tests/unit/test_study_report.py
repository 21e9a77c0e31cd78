"""results.json holds one run on a line and reads back as it was; the page is made from that file alone."""

from __future__ import annotations

import json

import numpy as np

from study_help import row, simulated, study
from trew.study.choice import choose
from trew.study.design import Cell
from trew.study.history import History
from trew.study.pictures import draw
from trew.study.report import page, write_report
from trew.study.results import assemble, text


def test_results_read_back_and_the_page_is_the_same(tmp_path):
    rng = np.random.default_rng(0)
    found = simulated(tmp_path, {name: 0.5 + 0.05 * rng.normal(size=4) for name in ("clip", "other", "same")})
    written = text(found)
    assert json.loads(written) == found
    assert sum(line.startswith('{"task"') for line in written.splitlines()) == len(found["runs"] + found["tuning"])
    assert list(page(json.loads(written))) == list(page(found))
    write_report(found, tmp_path)
    for name in draw(found):
        assert (tmp_path / name).read_text().startswith("<svg")
        assert name in (tmp_path / "report.md").read_text()


def test_an_unfinished_tuning_compares_values_by_the_same_seeds_and_chooses_nothing(tmp_path):
    """By all runs of ``other`` 0.01 looks better; by the only seed that has run at both values, 0.001 does."""
    design = study(tmp_path)
    areas = {("clip", 0.001): (0.3, 0.3), ("clip", 0.01): (0.5, 0.5), ("same", 0.001): (0.4,),
             ("other", 0.001): (0.6, 0.1), ("other", 0.01): (0.4,)}  # fmt: skip
    rows = [
        row(name, seed, 0.5, value=value, area=area)
        for (name, value), of in areas.items()
        for seed, area in zip(design.tuning, of, strict=False)
    ]
    found = assemble(design, {}, choose(design, rows), rows, History.read(tmp_path))
    assert found["chosen"] == {"sums/off/clip": 0.01}
    lines = list(page(found))
    assert any(line.startswith("**Tuning is not complete**: 1 of these cells") for line in lines)
    table = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| sums/")}
    assert table.keys() == {"sums/off/clip", "sums/off/other"}
    assert "| 0.300 | 0.500 | 0.01* |" in table["sums/off/clip"]
    assert "| 0.600 | 0.400 | open (0.001* by 1 of 2 seeds) |" in table["sums/off/other"]
    assert lines[-1] == "Versions of trew: 1.0."
    assert not any("exploratory" in line for line in lines), "no run is reported"


def test_an_algorithm_that_fails_more_often_is_called_worse_by_that(tmp_path):
    """All runs end at the same accuracy; of one algorithm every run has failed."""
    rows = [row(name, seed, 0.5, failed="numbers not finite" if name == "other" else "")
            for name in ("clip", "other", "same") for seed in range(1, 11)]  # fmt: skip
    design = study(tmp_path)
    found = assemble(design, {}, dict.fromkeys(design.cells, 0.01), rows, History.read(tmp_path))
    lines = list(page(found))
    held = lines[lines.index("Share of runs that did not fail:") :]
    verdicts = {name: next(line for line in held if line.startswith(f"| {name} ")) for name in ("other", "same")}
    assert "-1.000 [-1.000, -1.000]" in verdicts["other"]
    assert verdicts["other"].endswith("| worse |")
    assert verdicts["same"].endswith("| equal |")
    # Nothing is said of failures where there are none.
    whole = assemble(
        design, {}, {Cell("sums", "off", "clip"): 0.01}, [r for r in rows if not r.failed], History(tmp_path)
    )
    assert "Share of runs that did not fail:" not in list(page(whole))
