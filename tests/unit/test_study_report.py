"""results.json holds one run on a line and reads back as it was; the page is made from that file alone."""

from __future__ import annotations

import json

import numpy as np

from study_help import simulated
from trew.study.pictures import draw
from trew.study.report import page, write_report
from trew.study.results import text


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
