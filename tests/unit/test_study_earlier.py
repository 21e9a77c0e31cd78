"""Rows of results that were made elsewhere count only if nothing but the place was other."""

from __future__ import annotations

import json

import pytest

from study_help import row, simulated, study, write
from trew.config import load
from trew.errors import ConfigError
from trew.study.conduct import Conduct
from trew.study.design import Cell, Run
from trew.study.design import load as read_study
from trew.study.earlier import Earlier, foreign_weights, keep, kept
from trew.study.history import History
from trew.study.results import text
from trew.study.states import fingerprint

RUN = Run(Cell("sums", "off", "clip"), 0.01, 1)


@pytest.fixture
def part(tmp_path):
    found = simulated(tmp_path, {name: [0.5, 0.6] for name in ("clip", "other", "same")})
    found["models"] = {"sums": {"sha256": "aaaa", "parameters": 1}}
    path = tmp_path / "part.json"
    path.write_text(text(found))
    return Earlier.read(path)


def settings_here(folder, model="aaaa", **changes):
    design = read_study(write(folder, **changes))
    return fingerprint(load(design.base, design.overrides(RUN)), model=model)


def test_the_rows_are_those_of_the_file(part):
    assert part.rows[RUN] == row("clip", 1, 0.5)
    assert len(part.rows) == 6 + 3 * 2 * 2


def test_settings_made_from_the_design_in_the_file_are_those_of_the_run(part, tmp_path):
    assert part.settings(RUN, tmp_path) == settings_here(tmp_path)


@pytest.mark.parametrize("changes", [{"set": {"learner.weight_decay": 0.5}}, {"regimes": {"off": {"steps": 11}}},
                                     {"model": "bbbb"}, {"recipe": 'model = "lm"\nsteps = 12\n'}])  # fmt: skip
def test_a_run_of_another_design_or_start_has_other_settings(part, tmp_path, changes):
    assert part.settings(RUN, tmp_path) != settings_here(tmp_path, **changes)


def test_a_design_that_this_trew_refuses_gives_none_of_its_rows(part, tmp_path):
    content = json.loads(part.source.read_text())
    content["design"]["set"]["learner.of_the_past"] = 1
    part.source.write_text(json.dumps(content))
    assert Earlier.read(part.source).settings(RUN, tmp_path) == ""


def test_other_weights_are_refused_by_name(part):
    assert list(foreign_weights([part], {"sums": {"sha256": "aaaa"}})) == []
    (problem,) = foreign_weights([part], {"sums": {"sha256": "bbbb"}})
    assert "model for sums has other weights (aaaa, here bbbb)" in problem
    assert "copy models/sums" in problem


def test_parts_are_kept_once_in_the_folder_with_their_history(part, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        keep(part, out)
        History.begin(out, part.study, part.designs)
    assert [other.rows for other in kept(out)] == [part.rows]
    assert kept(out)[0].study.digest == part.study.digest
    changed = study(tmp_path, claims=["all are equal"])
    assert any("claims" in line for line in History.read(out).note(changed, runs=6))


@pytest.mark.parametrize("begun", [False, True])
def test_a_part_of_another_design_is_shown_also_beside_one_of_this_design_or_in_a_folder_that_has_its_own(
    part, tmp_path, begun
):
    design = study(tmp_path, claims=["all are equal"])
    (tmp_path / "same.json").write_text(text(simulated(tmp_path, {"clip": [0.5]}, design)))
    same, out = Earlier.read(tmp_path / "same.json"), tmp_path / "out"
    for runs in (0, len(same.rows)) if begun else ():
        History.read(out).note(design, runs=runs)
    conduct = Conduct(design, out, design.cells, 1, print)
    conduct.add([part] if begun else [part, same])
    conduct.add([part])  # given again, it adds nothing
    runs = len(part.rows) + len(same.rows)
    assert History.read(out).note(design, runs=runs) == []
    line = f'after {len(part.rows)} runs: claims was ["none is better than clip"] and is ["all are equal"]'
    assert History.read(out).lines() == [line]
    assert History.read(out).made == runs


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"runs": 1}', '{"tuning": [], "runs": [{}], "models": {}}'])
def test_a_file_without_results_is_refused(tmp_path, content):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ConfigError, match="has no results of trew study"):
        Earlier.read(tmp_path / "r.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        Earlier.read(tmp_path / "none.json")
