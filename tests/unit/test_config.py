"""Recipes: everything that is wrong is told at once, and what is right survives the way through TOML."""

from __future__ import annotations

import dataclasses
import tomllib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trew.cli.model_card import _reproduced, _shared, _source
from trew.config import Config, DataConfig, RewardConfig, apply_overrides, dumps, load, parse
from trew.data.episodes import numbered_episodes
from trew.errors import ConfigError
from trew.rollout.episodes import environment_seed
from trew.training.continuing import continued


def problems(table: dict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(table)
    return list(caught.value.problems)


def test_all_problems_are_told_at_once():
    found = problems(
        {
            "modle": "m",
            "steps": 0,
            "rollout": {"temprature": 1.0, "top_p": "x", "completions": 0},
            "learner": {"lr": -1, "schedule": "cos"},
            "rewards": [{"nam": "gsm8k"}],
            "eval": 3,
        }
    )
    text = "\n".join(found)
    for expected in (
        "modle: ",
        "model: ",
        "steps: got 0",
        "(did you mean 'temperature'?)",
        "rollout.top_p: ",
        "rollout.completions: got 0",
        "learner.lr: got -1.0",
        "'constant', 'linear', 'cosine' (did you mean 'cosine'?)",
        "rewards[0].nam: ",
        "rewards[0].name: ",
        "eval: ",
    ):
        assert expected in text, text
    assert len(found) == len(set(found))


CASES = [
    ({"rollout": {"temperature": 0}}, "rollout.temperature: got 0.0"),
    ({"rollout": {"temperature": float("nan")}}, "rollout.temperature: got nan"),
    ({"rollout": {"top_p": 0}}, "rollout.top_p: got 0.0"),
    ({"rollout": {"min_p": 1.0}}, "rollout.min_p: got 1.0"),
    ({"rollout": {"prompts": True}}, "rollout.prompts: "),
    ({"rollout": {"prompts": 2.5}}, "rollout.prompts: "),
    ({"rollout": {"stop": "x"}}, "rollout.stop: "),
    ({"rollout": {"stop": [""]}}, "rollout.stop: "),
    ({"rollout": {"prompts": 8}, "learner": {"minibatch_prompts": 3}}, "rollout.prompts = 8"),
    ({"rollout": {"prompts": 8}, "learner": {"minibatch_prompts": 9}}, "rollout.prompts = 8"),
    *(
        ({"data": {"task": task, "train": "x"}, "sft": {"batch": 8}, "learner": {"minibatch_prompts": n}}, why)
        for task, n, why in (("demonstrations", 3, "does not divide sft.batch = 8"), ("pairs", 9, "than sft.batch = 8"))
    ),
    ({"learner": {"lr": float("inf")}}, "learner.lr: got inf"),
    ({"learner": {"adam_beta2": 1.0}}, "learner.adam_beta2: got 1.0"),
    ({"learner": {"warmup_steps": 11}, "steps": 10}, "learner.warmup_steps"),
    # The critic learns alone in 6 of 10 steps.
    ({"learner": {"warmup_steps": 8}, "critic": {"warmup_steps": 6}, "steps": 10}, "has 4 optimizer steps of the"),
    ({"eval": {"samples": 4}}, "eval.samples"),
    ({"device": "gpu"}, "device: got 'gpu'"),
    ({"track": {"to": ["wandbb"]}}, "track.to: got 'wandbb'"),
    ({"seed": -1}, "seed: got -1"),
    ({"model": " "}, "model: got ' '"),
    ({"data": {"overlong": "cut"}}, "data.overlong: got 'cut'"),
    ({"checkpoint": {"keep": 0}}, "checkpoint.keep: got 0"),
]


@pytest.mark.parametrize(("table", "expected"), CASES)
def test_each_problem_names_key_value_and_what_is_accepted(table, expected):
    found = problems({"model": "m"} | table)
    assert any(expected in line for line in found), found


def test_a_recipe_survives_toml():
    config = parse(
        {
            "model": 'we"ird\\name\n\x00é\U0001f600',
            "objective": {"preset": "dapo", "eps_high": 0.3},
            "rewards": [{"name": "gsm8k", "args": {"odd key": [1, "a"]}}, {"name": "format", "weight": 0.5}],
            "data": {"args": {"ops": ["+"], "ranges": {"+": [0, 9]}}},
            "rollout": {"stop": ["\n\n"]},
        }
    )  # fmt: skip
    assert parse(tomllib.loads(dumps(config))) == config


@given(st.text())
def test_any_string_survives_toml(text):
    config = Config(model="m", rewards=(RewardConfig(name="x", args={"k": text}),))
    assert parse(tomllib.loads(dumps(config))) == config


def test_numbers_of_numpy_are_written_as_plain_ones():
    """numpy's float64 is a float, and its repr no TOML: a run with one of np.logspace as its rate could not begin."""
    rate, eps, weight = (np.float64(x) for x in (1e-5, 0.3, 0.5))
    config = parse(
        {"model": "m", "out": "o", "learner": {"lr": rate}, "objective": {"preset": "dapo", "eps_high": eps},
         "rewards": [{"name": "arithmetic", "weight": weight}]}
    )  # fmt: skip
    assert parse(tomllib.loads(dumps(config))) == config
    assert "float64" not in dumps(config)


def test_the_settings_of_a_reward_models_training_are_named_as_such(tmp_path):
    """Of its run, which trew eval and trew chat are given by mistake, ten keys were unknown."""
    (tmp_path / "config.toml").write_text('model = "m"\nepochs = 1\n[data]\npairs = "p.jsonl"\nruns = []\n')
    with pytest.raises(ConfigError, match=r"settings of a reward model's training .* trew train-reward") as refused:
        load(tmp_path / "config.toml")
    assert "unknown key" not in str(refused.value)


def test_overrides_come_last(tmp_path):
    recipe = tmp_path / "my.toml"
    recipe.write_text('model = "a"\n[learner]\nlr = 1e-6\n')
    config = load(recipe, ["learner.lr=1e-5", "model=./b", "rollout.stop=['x']", "data.args.largest=12"])
    assert (config.learner.lr, config.model, config.rollout.stop) == (1e-5, "./b", ("x",))
    assert config.data.args == {"largest": 12}
    assert config.out == "runs/my"
    assert load(recipe, "learner.lr=1e-5") == load(recipe, ["learner.lr=1e-5"])  # one text is no list of letters


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such recipe"),
        (b"model = ", "is not valid TOML"),
        (b"model = 'a'\nmodel = 'b'", "is not valid TOML"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"", "model: is required"),
    ],
)
def test_unreadable_recipes(tmp_path, content, expected):
    path = tmp_path / "r.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        load(path)


@pytest.mark.parametrize("override", ["lr", "=3", "a..b=1", ".a=1"])
def test_malformed_overrides(tmp_path, override):
    path = tmp_path / "r.toml"
    path.write_text("model = 'm'")
    with pytest.raises(ConfigError, match="key=value"):
        load(path, [override])


def test_a_reward_file_beside_the_recipe_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def f(completions, **_): return [0.0] * len(completions)")
    recipe = tmp_path / "r.toml"
    recipe.write_text("model = 'm'\n[[rewards]]\nname = 'mine.py:f'\n")
    monkeypatch.chdir("/")
    assert load(recipe).rewards[0].name == f"{tmp_path / 'mine.py'}:f"


def test_files_of_code_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    own = {
        "environment": {"name": "~/games.py:Game", "tools": ["~/tools.py:search"]},
        "rewards": [{"name": "~/r.py:f"}],
    }
    config = parse({"model": "m", **own}, base=tmp_path)
    assert config.rewards[0].name == f"{tmp_path}/r.py:f"
    assert (config.environment.name, *config.environment.tools) == (
        f"{tmp_path}/games.py:Game",
        f"{tmp_path}/tools.py:search",
    )


@pytest.mark.parametrize(
    ("given", "steps", "epochs"),
    [({}, 100, 1.0), ({"steps": 7}, 7, 0.0), ({"steps": 7, "sft": {"batch": 4}}, 7, 0.0),
     ({"steps": 7, "sft": {"epochs": 2}}, 7, 2.0), ({"sft": {"epochs": 2}}, 100, 2.0)],
)  # fmt: skip
@pytest.mark.parametrize("several", [False, True])
def test_steps_count_where_only_they_are_given(given, steps, epochs, several):
    """The one epoch that is the default does not overrule what the recipe says."""
    one = {"name": "a", "weight": 1.0, "task": "demonstrations", "train": "rows.jsonl"}
    data = [one, {**one, "name": "b"}] if several else {"task": "demonstrations", "train": "rows.jsonl"}
    config = parse({"model": "m", "data": data, **given})
    assert (config.steps, config.sft.epochs) == (steps, epochs)
    assert parse({"model": "m", "steps": 7, "data": {"task": "gsm8k"}}).sft.epochs == 1.0


def test_optimizer_steps_count_minibatches_and_inner_updates():
    config = parse(
        {"model": "m", "steps": 5, "rollout": {"prompts": 8}, "learner": {"minibatch_prompts": 2, "inner_updates": 3}}
    )
    assert config.optimizer_steps == 5 * 4 * 3


@pytest.mark.parametrize(("name", "kind"), [("own.py:Game", ""), ("trl:own.py:Game", "trl:")])
def test_the_file_of_an_environment_is_found_beside_the_recipe(name, kind, tmp_path):
    (tmp_path / "own.py").touch()
    found = parse({"model": "m", "environment": {"name": name}}, base=tmp_path).environment.name
    assert found == f"{kind}{tmp_path.resolve()}/own.py:Game"
    assert parse({"model": "m", "environment": {"name": found}}, base=tmp_path.parent).environment.name == found


@pytest.mark.parametrize("name", ["guess", "gym:Blackjack-v1", "openenv:http://localhost:8000"])
def test_the_name_of_another_environment_is_left_as_it_is(name, tmp_path):
    assert parse({"model": "m", "environment": {"name": name}}, base=tmp_path).environment.name == name


GUESS = {"name": "guess"}
ROWS = {"train": "rows.jsonl"}
UNREAD = {
    "eval": "games.jsonl", "prompt_column": "question", "args": {"chat": True}, "max_prompt_tokens": 16,
    "overlong": "drop", "shuffle": False,
}  # fmt: skip
"""Every key of [data] but those that name data, with a value that is not its default."""


def refused(**table: object) -> list[str]:
    """The keys that a recipe is refused for."""
    try:
        parse({"model": "m", **table})
    except ConfigError as error:
        return [problem.partition(":")[0] for problem in error.problems]
    return []


def test_the_settings_of_data_that_are_swept_are_all_that_there_are():
    assert {*UNREAD, "task", "train"} == {field.name for field in dataclasses.fields(DataConfig)}


@pytest.mark.parametrize("key", UNREAD)
def test_settings_of_data_that_episodes_do_not_read_are_refused(key):
    own = {key: UNREAD[key]}
    # Without data, only the order of the numbered problems is read.
    assert refused(environment=GUESS, data=own) == ([] if key == "shuffle" else [f"data.{key}"])
    unread = [f"data.{key}"] if key in ("max_prompt_tokens", "overlong") else []
    for environment in (GUESS, {"tools": ["calculator"]}):
        assert refused(environment=environment, data=ROWS | own) == unread
        sets = [{**ROWS, "name": "a"}, {**ROWS, **own, "name": "b"}]
        assert refused(environment=environment, data=sets) == [name.replace("data", "data[1]") for name in unread]
    assert refused(data=ROWS | own) == []


def test_numbered_episodes_have_no_pass_rate_of_their_own():
    """What the rate of a number was measured on does not come again: its episode has another seed in every step."""
    assert refused(environment=GUESS, curriculum={"share": 0.5}) == ["curriculum.share"]
    assert refused(environment=GUESS, data=ROWS, curriculum={"share": 0.5}) == []
    [first, *_] = numbered_episodes(1, eval_size=0).train
    seeds = {environment_seed(dataclasses.replace(first, seed=step)) for step in (1, 2)}
    assert len(seeds) == 2


def test_servers_that_a_run_starts_have_room_for_the_prompts_that_it_says():
    cluster = {"rollout": "vllm", "servers": 1}
    assert refused(environment=GUESS, data=ROWS | {"max_prompt_tokens": 2000}, cluster=cluster) == []


def test_reward_models_are_refused_where_episodes_are_played():
    model = {"model": "runs/rm/final", "name": "taste"}
    for environment in (GUESS, {"tools": ["calculator"]}):
        rewards = [{"name": "repetition"}, model]
        assert refused(environment=environment, data=ROWS, rewards=rewards) == ["rewards[1].model"]
    assert refused(environment=GUESS, data=ROWS, rewards=[{"name": "repetition"}]) == []
    assert refused(data=ROWS, rewards=[model]) == []


def test_the_number_of_episodes_counts_only_what_an_environment_makes():
    few = {**GUESS, "episodes": 5}
    assert refused(environment=few) == []
    assert refused(environment=few, data=ROWS) == ["environment.episodes"]
    assert refused(environment=few, data={"task": "gsm8k"}) == ["environment.episodes"]
    assert refused(environment=few, data=[{**ROWS, "name": "a"}]) == ["environment.episodes"]


@pytest.mark.parametrize("key", ["model", "out", "rewards[0].name", "rollout.stop[0]", "data.args.system"])
def test_what_config_toml_could_not_hold_is_refused(key):
    """A path with bytes that are not UTF-8 ended the run with a traceback as its config.toml was written."""
    bad = "a\udcff"
    table = {"model": "m", "data": {"task": "gsm8k", "train": "x"}}
    other = {
        "model": {"model": bad}, "out": {"out": bad}, "rewards[0].name": {"rewards": [{"name": bad}]},
        "rollout.stop[0]": {"rollout": {"stop": [bad]}},
        "data.args.system": {"data": {**table["data"], "args": {"system": bad}}},
    }  # fmt: skip
    assert problems(table | other[key]) == [f"{key}: got {bad!r}, which is not UTF-8 text; rename that file or folder"]


@pytest.mark.parametrize(("name", "task"), [("guess", "guess"), ("/home/ada/game.py:Game", "game.py:Game")])
def test_the_task_of_an_environment_that_makes_its_own_problems_is_the_environment(name, task):
    """Headline, summary, report and model card called it "prompts", after the default of a table that it lacks."""
    config = parse({"model": "m", "environment": {"name": name}})
    assert config.task == task
    assert _source(config) == task
    assert parse({"model": "m", "environment": {"name": name}, "data": {"task": "gsm8k", "train": "x"}}).task == "gsm8k"


def test_a_model_card_has_no_folders_of_an_environments_file():
    assert _shared({"name": "trl:/home/ada/game.py:Game"}) == {"name": "trl:game.py:Game"}
    assert _shared({"endpoint": "http://10.0.0.1:8100"}) == {"endpoint": "http://10.0.0.1:8100"}


@pytest.mark.parametrize("own", [{"tools": ["/home/ada/search.py:find"]}, {"name": "/home/ada/game.py:Game"}, {}])
def test_a_model_card_says_that_the_recipe_names_files_of_the_author(own):
    """Of tools in files it did not."""
    config = parse({"model": "m", "data": {"task": "gsm8k", "train": "x"}, "environment": own})
    assert any("functions in files of the author's" in text for text in _reproduced(config, 1)) == bool(own)


def test_files_of_a_recipe_are_no_edits_where_the_run_has_their_absolute_paths(tmp_path):
    """Every resume of a run with an environment of the user's told of two edits that nobody had made."""
    (tmp_path / "e.py").touch()
    recipe = tmp_path / "r.toml"
    text = """model = "m"\nsteps = 3\n[environment]\nname = "trl:e.py:Game"\ntools = ["e.py:look", "calculator"]
        [[rewards]]\nname = "e.py:f"\n"""
    recipe.write_text(text)
    own = tomllib.loads(dumps(load(recipe)))
    assert str(tmp_path) in own["environment"]["name"]
    assert continued(recipe, own, [], out=None)[1] == []
    recipe.write_text(text.replace("e.py:look", "e.py:see").replace("e.py:f", "e.py:g"))
    assert [line.partition(":")[0] for line in continued(recipe, own, [], out=None)[1]] == [
        "environment.tools", "rewards.0.name"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["3\nx = 4", "3\n[x]\ny = 4", '"a"\nb = "c"'])
def test_a_value_of_several_lines_is_a_text_and_loses_none_of_them(text):
    table: dict[str, object] = {}
    apply_overrides(table, [f"data.args.system={text}", "rollout.stop=[\n  'a',\n]"])
    assert table == {"data": {"args": {"system": text}}, "rollout": {"stop": ["a"]}}
