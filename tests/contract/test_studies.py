"""The designs in studies/ can be conducted: every cell has settings that a run accepts, with their own objectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from trew.config import load
from trew.objective.presets import preset
from trew.study.design import Run
from trew.study.design import load as load_study
from trew.training import compatibility

FOLDER = Path(__file__).parents[2] / "studies"
BASES = ("small.toml", "smol.toml")
STUDIES = sorted(path.name for path in FOLDER.glob("*.toml") if path.name not in BASES)


@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_of_a_study_is_accepted(name):
    study = load_study(FOLDER / name)
    assert study.name == Path(name).stem
    for cell in study.cells:
        value = study.values[0] if study.values else None
        config = load(study.base, study.overrides(Run(cell, value, 1)) + (["model=made"] if study.warm else []))
        objective = preset(config.objective.preset, **config.objective.args)
        assert compatibility.problems(objective, config) == [], cell.name


def test_the_tables_have_the_methods_that_they_promise():
    weights, recipes = (load_study(FOLDER / f"{name}.toml") for name in ("weights", "recipes"))
    assert (len(weights.algorithms), len(recipes.algorithms)) == (16, 12)
    assert list(weights.regimes) == ["on", "mini", "off", "stale"]
    assert weights.set["objective.beta"] == 0.0


def test_ratio_1_has_the_coefficient_of_an_on_policy_gradient():
    """cispo between 1 and 1: w r = 1 at any ratio."""
    study = load_study(FOLDER / "weights.toml")
    args = {k.removeprefix("objective."): v for k, v in study.algorithms["ratio-1"].items()}
    weight = preset(args.pop("preset"), **args).weight
    assert (weight.floor, weight.cap) == (1.0, 1.0)
