"""The JSON schema of recipes: every recipe of ours fits it, and what a run refuses for its form does not."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from trew.cli.json_schema import field_comments
from trew.cli.schema import schema as command
from trew.config import Config, parse
from trew.errors import ConfigError
from trew.objective import preset

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs" / "recipe.schema.json"
RECIPES = sorted([*(ROOT / "recipes").glob("*.toml"), *(ROOT / "src/trew/cli").glob("demo*.toml")])


@pytest.fixture(scope="module")
def schema() -> dict:
    return json.loads(KEPT.read_text())


@pytest.fixture(scope="module")
def validator(schema) -> Draft7Validator:
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def problems(validator: Draft7Validator, text: str) -> list[str]:
    return [error.message for error in validator.iter_errors(tomllib.loads(text))]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_fits(validator, recipe):
    assert problems(validator, recipe.read_text()) == []


def test_the_command_prints_what_is_kept(capsys, tmp_path):
    command()
    assert capsys.readouterr().out == KEPT.read_text(encoding="utf-8")
    command(out=str(tmp_path / "s.json"))
    assert "#:schema s.json" in capsys.readouterr().out
    assert (tmp_path / "s.json").read_text(encoding="utf-8") == KEPT.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        command(out=str(tmp_path))


WRONG = {
    "an unknown key": "steps_ = 3",
    "an unknown key in a table": "[learner]\nlearning_rate = 1e-5",
    "a text for a number": 'steps = "3"',
    "a fraction for a whole number": "steps = 2.5",
    "a number for a flag": "[rollout]\noverlap = 1",
    "a word that is not offered": '[learner]\nschedule = "sine"',
    "too little": "steps = 0",
    "too much": "[rollout]\ncompletions = 100001",
    "not above zero": "[learner]\nlr = 0.0",
    "one or more": "[learner]\nadam_beta1 = 1.0",
    "above one": "[rollout]\ntop_p = 1.1",
    "a rule of health": "[health]\nwindow = 1",
    "too few tokens": '[environment]\nname = "guess"\nobservation_tokens = 31',
    "an unknown preset": '[objective]\npreset = "grop"',
    "another preset's setting": '[objective]\npreset = "dapo"\ntau = 0.5',
    "a setting of the default's that it lacks": "[objective]\nw_max = 2.0",
    "a text for a setting": '[objective]\npreset = "grpo"\neps_low = "small"',
    "a weight that is a text": '[[data]]\nname = "a"\nweight = "1"',
    "a batch of nothing": '[data]\ntask = "demonstrations"\n[sft]\nbatch = 0',
    "a wait of no time": '[teacher]\nendpoint = "http://m:8000"\nwait_s = 0.0',
    "a limit of no time": '[cluster]\nrollout = "vllm"\nservers = 1\nsync_timeout_s = 0.0',
    "a share of one": "[curriculum]\nshare = 1.0",
    "a reward that is no table": "rewards = [1]",
    "a weight that is no number": '[[rewards]]\nname = "arithmetic"\nweight = "1"',
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_run_refuses_is_marked(validator, what):
    text = f'model = "m"\n{WRONG[what]}'
    assert problems(validator, text)
    with pytest.raises(ConfigError):
        made(text)


def made(text: str) -> None:
    """Reads a recipe; settings of objectives are checked when the objective is made."""
    config = parse(tomllib.loads(text))
    preset(config.objective.preset, **config.objective.args)


def test_a_recipe_without_a_model_is_marked(validator):
    assert problems(validator, "steps = 3") == ["'model' is a required property"]


RIGHT = (
    "[objective]\neps_high = 0.28\nbeta = 0", "[learner]\nlr = 1e-5\nadam_beta1 = 0.0", "[rollout]\ntop_p = 1",
    '[objective]\npreset = "dapo"\ncorrection = "tis"', "[lora]\nrank = 8\nalpha = 0.5", "[health]\nkl = 0",
    '[environment]\nname = "guess"\nobservation_tokens = 32', "[curriculum]\nshare = 0.5\nlow = 0.2",
    '[data]\ntask = "demonstrations"\n[sft]\nbatch = 1\nepochs = 0.5\nmax_tokens = 8',
    '[[data]]\nname = "a"\ntask = "arithmetic"\n[[data]]\nname = "b"\ntask = "countdown"\nweight = 0.5',
)  # fmt: skip


@pytest.mark.parametrize("text", RIGHT)
def test_what_a_run_takes_is_not_marked(validator, text):
    parse(tomllib.loads(f'model = "m"\n{text}'))
    assert problems(validator, f'model = "m"\n{text}') == []


def test_every_key_has_its_default_and_its_comment(schema):
    assert set(schema["properties"]) == {f.name for f in dataclasses.fields(Config)} | {"iterate"}
    learner = schema["properties"]["learner"]["properties"]
    assert learner["warmup_steps"]["description"] == "optimizer steps of linear warmup"
    assert (learner["lr"]["default"], learner["schedule"]["default"]) == (1e-6, "constant")
    assert schema["properties"]["data"]["anyOf"][0]["properties"]["task"]["description"].startswith(
        "gsm8k, math"
    )  # the line above


def test_signs_in_strings_are_no_comments(tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass\nclass Odd:\n    # above\n    a: str = '# no'  # yes\n"
        "    b: str = '# no'\n\n    # another\n\n    c: int = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from odd import Odd  # type: ignore[import-not-found]

    assert field_comments(Odd) == {"a": "above yes"}


def test_taplo_finds_the_schema():
    table = tomllib.loads((ROOT / ".taplo.toml").read_text())
    [rule] = table["rule"]
    assert (ROOT / rule["schema"]["path"]).samefile(KEPT)
    assert {p for pattern in rule["include"] for p in ROOT.glob(pattern)} == set(RECIPES)
