"""An objective in a file of the user's: what it may be, how it is loaded, what is said of one that does not work."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import compare_help
import tiny
import trew
from trew.cli import describe
from trew.cli.json_schema import recipe_schema
from trew.config import Config, dumps, load, parse
from trew.errors import ConfigError
from trew.objective import own, presets, trial
from trew.objective.presets import kinds, preset, settings
from trew.runs import RunFolder, problems
from trew.runs.compare import Choices, compare_runs, to_json
from trew.runs.rollouts import Sampler
from trew.training import planning
from trew.view.library import Library

GAUSSIAN = '''
"""Objectives of a test."""
from dataclasses import dataclass

import torch
import trew
from trew.objective.weight import Weight


@dataclass(frozen=True)
class Gaussian(Weight):
    s: float = 0.2

    def __post_init__(self):
        if not self.s > 0:
            raise ValueError(f"s: got {self.s!r}, accepts a number above 0")

    def __call__(self, ratio, *, advantages, batch):
        return torch.exp(-((ratio - 1) ** 2) / (2 * self.s**2))

    def equation(self):
        return f"w = exp(-(r - 1)^2 / (2 * {self.s:g}^2))"


def own(s: float = 0.2, clipped: bool = False, top: float | None = None):
    """A trust region without an edge.

    w = exp(-(r - 1)^2 / (2 s^2))

    Use it in tests.
    """
    grpo = trew.preset("grpo", beta=0.0)
    return grpo if clipped else grpo.replace(name="gaussian", weight=Gaussian(s))


value = own(0.1)
'''


def written(folder: Path, text: str = GAUSSIAN, name: str = "my.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def refusal(spec: object, **overrides: object) -> str:
    """The one thing that is wrong with an objective."""
    with pytest.raises(ConfigError) as caught:
        preset(spec, **overrides)  # type: ignore[arg-type]
    [problem] = caught.value.problems
    assert "\n" not in problem
    return problem


# ----------------------------------------------------------------------------------------------------------- what works


def test_a_function_has_settings_and_every_objective_the_options(tmp_path):
    spec = f"{written(tmp_path)}:own"
    assert settings(spec) == {"s": 0.2, "clipped": False, "top": None}
    assert kinds(spec) == {"s": float, "clipped": bool, "top": float}
    made = preset(spec, s=1, beta=0.04, correction="tis")
    assert made.weight.s == 1.0
    assert isinstance(made.weight.s, float)  # TOML's 1 is a whole number
    assert made.beta == 0.04
    assert made.needs == ("rewards", "rollout_logprobs", "ref_logprobs")
    assert preset(spec, clipped=True) == trew.preset("grpo", beta=0.0)


def test_a_value_has_the_options_alone(tmp_path):
    spec = f"{written(tmp_path)}:value"
    assert settings(spec) == {}
    assert (preset(spec).weight.s, preset(spec, beta=0.1).beta) == (0.1, 0.1)
    assert "my.py:value has no such setting; accepts none of its own; and as every objective beta" in refusal(spec, s=1)


def test_a_file_is_loaded_once_and_again_after_it_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = written(tmp_path)
    first, second = preset(f"{path}:own"), preset(f"{path}:own", s=0.2)
    assert first == second
    assert type(first.weight) is type(second.weight)
    written(tmp_path, GAUSSIAN.replace("s: float = 0.2, clipped", "s: float = 0.3, clipped"))
    assert preset(f"{path}:own").weight.s == 0.3


def test_what_a_file_imports_from_its_folder_counts_as_a_part_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "parts_of_own").mkdir()
    helper = tmp_path / "parts_of_own" / "width.py"
    helper.write_text("WIDTH = 0.4\n")
    text = "from parts_of_own.width import WIDTH\n" + GAUSSIAN.replace("own(0.1)", "own(WIDTH)")
    spec = f"{written(tmp_path, text)}:value"
    assert preset(spec).weight.s == 0.4
    assert own.sources(spec).keys() == {"my.py", "parts_of_own/width.py"}
    before = own.sources(spec)
    helper.write_text("WIDTH = 0.3\n")  # of the same size in the same second, as bytecode is told apart
    assert own.sources(spec) == before  # what is in memory
    assert preset(spec).weight.s == 0.3
    assert own.sources(spec)["parts_of_own/width.py"] != before["parts_of_own/width.py"]
    assert own.sources(spec)["my.py"] == before["my.py"]


def test_a_module_that_was_there_before_the_file_counts_as_well(tmp_path, monkeypatch):
    (tmp_path / "there_before_own.py").write_text("def width():\n    return 0.4\n")
    (tmp_path / "unrelated_to_own.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("there_before_own")
    __import__("unrelated_to_own")
    spec = f"{written(tmp_path, 'from there_before_own import width' + GAUSSIAN)}:own"
    preset(spec)
    assert own.sources(spec).keys() == {"my.py", "there_before_own.py"}


def test_a_recipe_finds_the_file_beside_it_and_keeps_its_whole_path(tmp_path, monkeypatch):
    path = written(tmp_path)
    (tmp_path / "r.toml").write_text('model = "m"\n[objective]\npreset = "my.py:own"\ns = 0.1\n')
    config = load(tmp_path / "r.toml")
    assert config.objective.preset == f"{path.resolve()}:own"
    assert dict(config.objective.args) == {"s": 0.1}
    (tmp_path / "again.toml").write_text(dumps(config))
    monkeypatch.chdir(tmp_path.parent)
    assert load(tmp_path / "again.toml") == config
    assert load(tmp_path / "r.toml", ["objective.preset=my.py:value"]).objective.preset == f"{path.resolve()}:value"
    assert parse({"model": "m", "objective": {"preset": f"{path}:own"}}).objective.preset == f"{path}:own"


def test_loading_changes_nothing_of_the_process(tmp_path):
    state = torch.get_rng_state()
    preset(f"{written(tmp_path, GAUSSIAN + 'torch.manual_seed(5); torch.set_num_threads(1)')}:own")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", presets())
def test_every_preset_passes_the_trial(name):
    made = preset(name)
    assert trial.problems_of_components(made, str) == []
    assert trial.problem_on_a_step(made, str) == ""


# --------------------------------------------------------------------------------------------------------- what is said


def test_what_is_said_of_a_file_that_cannot_be_loaded(tmp_path):
    path = written(tmp_path)
    assert refusal(f"{tmp_path}/nope.py:own") == f"objective.preset: {tmp_path}/nope.py: no such file"
    assert "has no function 'onw' (did you mean 'own'?); it defines Gaussian, own, value" in refusal(f"{path}:onw")
    assert "which function? write my.py:FUNCTION" in refusal(str(path))
    assert "torch is not a function but module" in refusal(f"{path}:torch")
    bad = written(tmp_path, "def own(:\n", "bad.py")
    assert f"{bad}:1: cannot be imported: SyntaxError: " in refusal(f"{bad}:own")
    lacking = written(tmp_path, "\nimport nothing_of_this_name\n", "lacking.py")
    assert f"{lacking}:2: cannot be imported: ModuleNotFoundError: " in refusal(f"{lacking}:own")


def test_what_is_said_of_another_name_or_value():
    assert refusal("grop").endswith("or path/to/file.py:name for your own")
    hint = "accepts preset = the name of a preset, or path/to/file.py:name for an objective of your own"
    for given, got in (
        (trew.preset("grpo"), "objective: expected a table, got an object of Objective; "),
        ("my.py:own", "objective: expected a table, got 'my.py:own'; "),
        ({"preset": trew.preset("grpo")}, "objective.preset: expected a string, got an object of Objective; "),
        ({"preset": 3, "s": 1}, "objective.preset: expected a string, got 3; "),
    ):
        with pytest.raises(ConfigError) as caught:
            parse({"model": "m", "objective": given})
        assert [p.startswith(got + hint) for p in caught.value.problems] == [True]


SIGNATURES = {
    "s": "own() has no default for s; every setting needs one, as in s: float = 0.2",
    "s=0.2": "own() gives s no type, accepts float, int, str, bool, as in s: float = 0.2",
    "s: list = ()": "own() gives s the type list, accepts float, int, str, bool",
    "s: int = 0.5": "own() gives s the default 0.5, which is no int; change one of them",
    "*, s: bool = 1": "own() gives s the default 1, which is no bool; change one of them",
    "**more": "own() has the parameter **more, which no key of [objective] can set; name each setting",
    "*more": "own() has the parameter *more, which no key of [objective] can set",
    "s: float = 0.2, /": "own() has the parameter s: float = 0.2, which no key of [objective] can set",
    "preset: str = 'grpo'": "own() has the parameter preset: str = 'grpo', which no key of [objective] can set",
}


@pytest.mark.parametrize("postponed", ["", "from __future__ import annotations\n"])
@pytest.mark.parametrize("parameters", SIGNATURES)
def test_what_is_said_of_a_function_whose_parameters_are_no_settings(tmp_path, parameters, postponed):
    path = written(tmp_path, f"{postponed}def own({parameters}): ...\n")
    said = refusal(f"{path}:own").replace("<class 'list'>", "list")
    assert said.startswith(f"objective.preset: {path}: ")
    if postponed:  # the signature shows such an annotation in quotes
        said = said.replace("'float'", "float").replace(": 'str'", ": str")
    assert SIGNATURES[parameters] in said


MADE = {
    "return 1 / 0": ":5: own() failed: ZeroDivisionError: division by zero",
    "return 'grpo'": ": own() returned str, accepts a trew.objective.Objective, such as trew.preset('grpo').replace(",
    "return trew.preset('grop')": ":5: own() failed: ConfigError: objective.preset: got 'grop'",
    "raise SystemExit('no')": ":5: own() failed: SystemExit: no",
    "raise ValueError('odd')": ":5: own() failed: ValueError: odd",
    "return trew.preset('grpo').replace(wieght=0.2)": ":5: own() failed: ValueError: wieght: is no part of an "
    "objective (did you mean 'weight'?)",
    "return trew.preset('grpo').replace(name='')": ": own: name: got '', accepts a text that names the objective",
}


@pytest.mark.parametrize("body", MADE)
def test_what_is_said_of_what_a_function_returns(tmp_path, body):
    path = written(tmp_path, f"import trew\n\n\ndef own(s: float = 0.2):\n    {body}\n")
    assert refusal(f"{path}:own").startswith(f"objective.preset: {path}{MADE[body]}")


def test_a_class_makes_no_objective(tmp_path):
    assert "Gaussian is a class; name a function that returns an Objective" in refusal(f"{written(tmp_path)}:Gaussian")


def test_settings_and_options_are_checked_as_those_of_presets(tmp_path):
    spec = f"{written(tmp_path)}:own"
    assert refusal(spec, s="wide") == "objective.s: got 'wide' (str), accepts a number like the default 0.2"
    assert refusal(spec, s=-1.0) == "objective.s: got -1.0, accepts a number above 0"
    assert refusal(spec, beta=-1.0).startswith("objective.beta: got -1.0, accepts 0")
    unknown = "objective.width: my.py:own has no such setting; accepts s, clipped, top; "
    assert refusal(spec, width=1).startswith(unknown)
    with pytest.raises(ConfigError) as caught:
        preset(spec, width=1, s="wide", beta="k3")
    assert len(caught.value.problems) == 3


BODIES = {
    "return ratio[:2]": "tried on a step of 8 completions: Broken: returned float32 of shape (2,), accepts (27,): one "
    "number for each token of the batch",
    "return ratio / 0 * 0": "tried on a step of 8 completions: weight = Broken gave numbers that are not finite",
    "return (ratio - 1).sqrt()": "weight = Broken gave numbers that are not finite",
    "return torch.ones(3) @ ratio": "my.py:11: RuntimeError: ",
    "return batch.lenghts": "my.py:11: AttributeError: ",
    "return batch.teacher.mean()": "my.py:11: AttributeError: ",
    "return ratio.mul_(2)": "ratio: was changed in place by a component of the objective",
    "return ratio / ratio.mean()": "weight = Broken gave other numbers for completions one by one than for all "
    "together, so that it must see more than its scope says; declare scope = 'batch', or 'group'",
    # The mean over each completion: right for whole ones, and in training some are cut.
    "i = batch.sequence_ids; return segment_mean(ratio, mask=batch.mask, ids=i, size=batch.size)[i]": "weight = Broken "
    "gave other numbers for every second token than for whole completions, so that it must see more than its scope "
    "says; declare scope = 'sequence'",
}
BROKEN = """
    import torch, trew
    from dataclasses import dataclass
    from trew.objective.segments import segment_mean
    from trew.objective.weight import Weight

    @dataclass(frozen=True)
    class Broken(Weight):
        {extra}
        def __call__(self, ratio, *, advantages, batch):
            {body}
        def equation(self):
            {equation}

    own = trew.preset("grpo").replace(weight=Broken())
"""


def broken(folder: Path, **parts: str) -> str:
    usual = {"extra": "pass", "body": "return ratio", "equation": "return 'w = r'"}
    return f"{written(folder, BROKEN.format(**usual | parts))}:own"


@pytest.mark.parametrize("body", BODIES)
def test_what_a_component_computes_is_tried(tmp_path, body):
    said = refusal(broken(tmp_path, body=body))
    assert said.startswith(f"objective.preset: {tmp_path}/my.py: own: tried on a step of 8 completions: ")
    assert BODIES[body] in said


WIDER = {"batch": "return ratio / ratio.mean()", "sequence": next(body for body in BODIES if "segment_mean" in body)}


@pytest.mark.parametrize("scope", WIDER)
def test_a_component_that_says_what_it_must_see_passes(tmp_path, scope):
    made = preset(broken(tmp_path, extra=f"scope = '{scope}'", body=WIDER[scope]))
    assert made.scope == scope


def test_it_is_tried_wherever_the_caller_is(tmp_path):
    spec = f"{written(tmp_path)}:own"
    with torch.inference_mode():
        assert preset(spec).name == "gaussian"
    with torch.no_grad():
        assert preset(spec).name == "gaussian"


COMPONENTS = {
    ("equation", "pass"): "weight = Broken: equation() returned None, accepts a line of text",
    ("equation", "return self.s"): "weight = Broken: its equation, needs or scope failed: ",
    ("extra", "needs = ('lenghts',)"): "weight = Broken: needs: got 'lenghts', accepts a tuple of fields that a batch",
    ("extra", "needs = 'values'"): "weight = Broken: needs: got 'values', accepts a tuple of fields that a batch",
    ("extra", "scope = 3"): "weight = Broken: scope: got 3, accepts 'token', 'sequence', 'group', 'batch'",
}


@pytest.mark.parametrize("part", COMPONENTS)
def test_what_a_component_says_of_itself_is_checked(tmp_path, part):
    name, text = part
    said = refusal(broken(tmp_path, **{name: text}))
    assert said.startswith(f"objective.preset: {tmp_path}/my.py: own: {COMPONENTS[part]}")


def test_a_component_is_a_frozen_dataclass(tmp_path):
    text = BROKEN.format(extra="pass", body="return ratio", equation="return 'w = r'")
    for line in ("@dataclass", ""):
        spec = f"{written(tmp_path, text.replace('@dataclass(frozen=True)', line))}:own"
        assert "weight = Broken: is no frozen dataclass" in refusal(spec)


# ------------------------------------------------------------------------------------------------- what is shown of it


def test_it_is_explained_like_a_preset(tmp_path):
    spec = f"{written(tmp_path)}:own"
    text = describe.text(describe.describe(spec, s=0.1, beta=0.04))
    assert text.startswith("my.py:own\n\nA trust region without an edge.\n\n    w = exp(-(r - 1)^2 / (2 s^2))\n")
    assert "  weight      w = exp(-(r - 1)^2 / (2 * 0.1^2))" in text
    assert "Settings    s = 0.1 (default 0.2), clipped = false, top = unset\n" in text
    assert "Options     beta = 0.04 (default 0.0)" in text
    assert "Use it      in tests." in text
    assert describe.known([spec, "grpo"]) == [spec, "grpo"]
    assert "my.py:own" in describe.listed([spec, "grpo"])
    silent = written(tmp_path, GAUSSIAN.replace("Objectives of a test.", ""), "silent.py")
    assert describe.text(describe.describe(f"{silent}:value")).startswith("silent.py:value\n\nC_t = ")


def test_the_schema_of_recipes_admits_it():
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft7Validator(recipe_schema())
    for preset_, right in (("my.py:own", True), ("a/b.py:own_2", True), ("grop", False), ("my.py", False)):
        table = {"model": "m", "objective": {"preset": preset_, "s": 0.1, "beta": 0.04, "eps_low": "wide"}}
        if not right:
            table["objective"] = {"preset": preset_}
        assert (not [*check.iter_errors(table)]) == right, preset_
    assert [*check.iter_errors({"model": "m", "objective": {"preset": "my.py:own", "beta": "no"}})]


def test_a_rank_with_another_file_is_told_so(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path / "lm")
    spec = f"{written(tmp_path)}:own"
    config = parse({"model": str(tmp_path / "lm"), "objective": {"preset": spec}, "data": {"task": "arithmetic"},
                    "rewards": [{"name": "arithmetic"}]})  # fmt: skip
    preset(spec)
    there = planning.objective_files(config)
    assert there.keys() == {"my.py"}
    sampler = Sampler("torch", "float32")
    assert planning.follow(config, sampler, device="cpu", files_there=there).objective == preset(spec)
    with pytest.raises(ConfigError) as caught:
        planning.follow(config, sampler, device="cpu", files_there={"my.py": "0" * 64})
    assert f"objective.preset: {spec}: another file lies there for this rank than for rank 0" in str(caught.value)


def test_a_run_is_not_overwritten_that_has_the_file_in_its_folder(tmp_path):
    with RunFolder.open(tmp_path / "run") as run:
        run.write_config('model = "m"\n')
    spec = f"{written(tmp_path / 'run' / 'rollouts')}:own"
    [said] = problems(tmp_path / "run", overwrite=True, settings={"objective": {"preset": spec}})
    assert said.startswith(f"objective.preset: {spec} belongs to the run in {tmp_path / 'run'}")


def test_recorded_runs_are_shown_and_compared_by_its_name_without_running_it(tmp_path):
    """There is no such file where they are looked at."""
    own_one = {"preset": "/somewhere/else/my.py:own", "s": 0.1, "beta": 0.3}
    runs = [compare_help.write(tmp_path / f"own-{seed}", seed, 12, objective=own_one) for seed in (0, 1)]
    runs += [compare_help.write(tmp_path / f"grpo-{seed}", seed, 12) for seed in (0, 1)]
    assert {run.about()["preset"] for run in Library([tmp_path]).runs()} == {"my.py:own", "grpo"}
    found = to_json(compare_runs(runs, Choices()))
    assert [group["name"] for group in found["groups"]] == ["my.py:own beta=0.3 s=0.1", "grpo"]
    said = json.dumps(found)
    assert "the presets differ in more than their method: objective.beta is " in said
    assert "0.3 in my.py:own" in said


def test_verl_is_told_where_it_belongs(tmp_path):
    from trew.integrations.verl.export import export

    spec = f"{written(tmp_path)}:own"
    with pytest.raises(ConfigError) as caught:
        export(parse({"model": "m", "objective": {"preset": spec, "s": 0.1}, "data": {"task": "gsm8k"}}))
    [said] = caught.value.problems
    assert f"objective.preset: got {spec!r}, accepts a preset here" in said
    assert f"trew.integrations.verl.register('own', trew.preset({spec!r}, s=0.1))" in said


def test_a_config_of_python_names_it_as_well(tmp_path):
    spec = f"{written(tmp_path)}:own"
    config = Config(model="m", objective=trew.config.ObjectiveConfig(preset=spec, args={"s": 0.1}))
    assert preset(config.objective.preset, **config.objective.args).weight.s == 0.1
