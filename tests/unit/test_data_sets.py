"""Several data sets in one recipe: reading them, telling them apart, judging each by its own rewards, and refusals."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tiny
from rollouts_help import answers
from trew.cli.data import convert, show
from trew.cli.mixture import mixture_lines
from trew.config import Config, dumps, parse
from trew.data import load_eval_of_sets, load_sets
from trew.errors import ConfigError
from trew.eval import correct_by, evaluate
from trew.iterate import load_recipe
from trew.rewards import RewardSet
from trew.training import planning
from trew.types import Group, Sampling

PLUS = {"name": "plus", "task": "arithmetic", "args": {"ops": ["+"]}}
COUNT = {"name": "count", "task": "countdown", "args": {"size": 30}, "weight": 2.0}


def rows(path: Path, count: int, **columns: Any) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{path.stem} {i}", **columns}) + "\n" for i in range(count)))
    return str(path)


def configured(*sets: Mapping[str, Any], **more: Any) -> Config:
    return parse({"model": "m", "data": list(sets), **more})


def problems(*sets: Mapping[str, Any], **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        configured(*sets, **more)
    return list(caught.value.problems)


# ---- the configuration


def test_a_recipe_with_several_sets_goes_through_toml():
    config = configured(PLUS, COUNT, curriculum={"share": 0.25})
    text = dumps(config)
    assert text.count("[[data]]") == 2
    assert parse(tomllib.loads(text)) == config
    assert config.set_names == ("plus", "count")


def test_one_table_stays_what_it_was():
    config = parse({"model": "m", "data": {"task": "arithmetic"}})
    assert tomllib.loads(dumps(config))["data"] == {
        "task": "arithmetic", "train": "", "eval": "auto", "prompt_column": "prompt", "args": {},
        "max_prompt_tokens": 1024, "overlong": "error", "shuffle": True,
    }  # fmt: skip
    assert config.set_names == ()


def test_set_changes_one_of_several_tables(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(dumps(configured(PLUS, COUNT)))
    from trew.config import load

    assert [one.weight for one in load(recipe, ["data.0.weight=5"]).data] == [5.0, 2.0]
    for wrong in ("data.weight=5", "data.2.weight=5", "data.x.weight=5"):
        with pytest.raises(ConfigError, match="--set"):
            load(recipe, [wrong])


@pytest.mark.parametrize(
    ("sets", "more", "said"),
    [
        ([PLUS, PLUS], {}, "data[1].name: got 'plus', which is the name of data[0]"),
        ([PLUS, {"task": "countdown"}], {}, "data[1].name: got ''"),
        ([PLUS, {**COUNT, "name": "a/b"}], {}, "data[1].name: got 'a/b'"),
        ([PLUS, {**COUNT, "weight": 0}], {}, "data[1].weight: got 0.0"),
        ([PLUS, {**COUNT, "weight": -1}], {}, "data[1].weight: got -1.0"),
        ([PLUS, {**COUNT, "weight": float("nan")}], {}, "data[1].weight: got nan"),
        ([PLUS, {**COUNT, "max_prompt_tokens": 0}], {}, "data[1].max_prompt_tokens: got 0"),
        ([PLUS, {**COUNT, "wieght": 1}], {}, "data[1].wieght: unknown key (did you mean 'weight'?)"),
        ([PLUS, {**COUNT, "curriculum": {"share": 0.5}}], {},
         "data[1].curriculum: unknown key (did you mean the table [curriculum], beside the others?)"),
        ([], {}, "data: got an empty list"),
        ([PLUS], {"rewards": [{"name": "arithmetic", "sets": ["puls"]}]}, "rewards[0].sets: got 'puls', accepts plus"),
        ([PLUS], {"curriculum": {"share": 1.0}}, "curriculum.share: got 1.0"),
        ([PLUS], {"curriculum": {"low": 0.3}}, "curriculum.low: got 0.3, accepts only its default while"),
        ([PLUS], {"curriculum": {"share": 0.5, "low": 0.8, "high": 0.4}}, "curriculum.low: got 0.8"),
        ([PLUS], {"curriculum": {"share": 0.5, "floor": 2}}, "curriculum.floor: got 2.0"),
        ([PLUS], {"curriculum": {"share": 0.5, "decay": -1}}, "curriculum.decay: got -1.0"),
        ([PLUS], {"curriculum": {"share": 0.5, "low": 0.4, "high": 0.6}, "rollout": {"completions": 3}},
         "a prompt's first pass rate is a multiple of 1/3, and none lies between them"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_sets_is_told_in_one_line(sets, more, said):
    [problem] = [p for p in problems(*sets, **more) if said.partition(":")[0] in p]
    assert said in problem


def test_one_set_takes_no_name_and_no_rewards_of_sets():
    with pytest.raises(ConfigError, match=r"data\.name: unknown key"):
        parse({"model": "m", "data": {"name": "x", "task": "arithmetic"}})
    with pytest.raises(ConfigError, match=r"accepts nothing with one data set"):
        parse({"model": "m", "rewards": [{"name": "gsm8k", "sets": ["x"]}]})


# ---- the prompts


def test_uids_are_those_of_their_sets_and_the_same_row_may_be_in_two(tmp_path):
    train = rows(tmp_path / "train.jsonl", 20)
    config = configured({"name": "a", "train": train}, {"name": "b", "train": train})
    data = load_sets(config.data, eval_size=4, seed=0)
    assert len({p.uid for p in (*data.train, *data.eval)}) == 40
    assert {p.data_set for p in data.train} == {"a", "b"}
    assert any(
        "a: in other data sets, 4 of 4 evaluation prompts are in the training data" in n for n in data.notes
    ) or ({p.text for p in data.eval if p.data_set == "a"} == {p.text for p in data.eval if p.data_set == "b"})
    held, _, _ = load_eval_of_sets(config.data, size=4, seed=0)
    assert [p.uid for p in held] == [p.uid for p in data.eval]


def test_an_evaluation_prompt_that_another_set_trains_on_is_told():
    made = [
        {"name": name, "task": "arithmetic", "args": {"ops": ops}} for name, ops in (("a", ["+"]), ("b", ["+", "-"]))
    ]
    data = load_sets(configured(*made).data, eval_size=20, seed=0)
    assert any(note.startswith("a: in other data sets, ") for note in data.notes)


def test_the_fingerprint_changes_with_a_name_and_with_a_row():
    one = load_sets(configured(PLUS, COUNT).data, eval_size=4, seed=0).fingerprint
    assert load_sets(configured(PLUS, COUNT).data, eval_size=4, seed=0).fingerprint == one
    assert load_sets(configured({**PLUS, "name": "p"}, COUNT).data, eval_size=4, seed=0).fingerprint != one
    assert load_sets(configured(PLUS, {**COUNT, "args": {"size": 29}}).data, eval_size=4, seed=0).fingerprint != one


def test_the_problems_of_all_sets_are_told_at_once():
    bad = configured({"name": "a", "task": "prompts"}, {"name": "b", "task": "arithmetic", "args": {"ops": ["%"]}})
    with pytest.raises(ConfigError) as caught:
        load_sets(bad.data, eval_size=4, seed=0)
    assert [p.partition(":")[0] for p in caught.value.problems] == ["data[0] 'a'", "data[1] 'b'"]


# ---- rewards


def planned(folder: Path, *sets: Mapping[str, Any], **more: Any) -> planning.Plan:
    model = folder / "lm"
    if not model.exists():
        tiny.save(model)
    more = {
        "rollout": {"prompts": 3, "max_tokens": 9},
        "eval": {"size": 4},
        "objective": {"beta": 0.0},
        "out": str(folder / "run"),
        **more,
    }
    return planning.plan(parse({"model": str(model), "data": list(sets), **more}))


def test_each_set_has_the_rewards_of_its_task(tmp_path):
    plan = planned(tmp_path, PLUS, COUNT)
    assert {(r.name, r.sets) for r in plan.rewards.rewards} == {
        ("arithmetic", ("plus",)), ("countdown", ("count",)), ("format", ("count",)),
    }  # fmt: skip
    groups = [
        answers(next(p for p in plan.train if p.data_set == name), "<answer>1</answer>") for name in ("plus", "count")
    ]
    plus, count = plan.rewards.score(groups)
    assert plus.scores[0].statuses == {"arithmetic": "scored", "countdown": "other_set", "format": "other_set"} or (
        plus.scores[0].statuses["countdown"] == "other_set"
    )
    assert count.scores[0].statuses["arithmetic"] == "other_set"
    assert count.scores[0].parts["arithmetic"] is None
    summary = plan.rewards.summary([plus, count])
    assert "reward/arithmetic/none" not in summary, "answers of another set are not missing"


def test_two_sets_with_equal_rewards_share_them():
    minus = {"name": "minus", "task": "arithmetic", "args": {"ops": ["-"]}}
    [reward] = load_sets(configured(PLUS, minus).data, eval_size=4, seed=0).default_rewards
    assert reward.sets == ("plus", "minus")


def test_a_set_without_a_reward_of_the_recipe_has_its_own(tmp_path):
    plan = planned(tmp_path, PLUS, COUNT, rewards=[{"name": "format", "sets": ["count"]}])
    assert [(r.name, r.sets) for r in plan.rewards.rewards] == [("format", ("count",)), ("arithmetic", ("plus",))]


def test_accuracy_is_read_from_the_first_reward_of_each_set(tmp_path):
    plan = planned(tmp_path, PLUS, COUNT)
    prompts = {p.data_set: p for p in plan.eval}
    plus = answers(prompts["plus"], prompts["plus"].columns["answer"], "no")
    count = answers(prompts["count"], "<think>x</think><answer>x</answer>")  # a point for its form alone
    first, second = plan.rewards.score([plus, count])
    assert [plan.correct(s) for s in first.scores] == [True, False]
    assert [plan.correct(s) for s in second.scores] == [False]


def test_each_set_is_evaluated_with_an_interval(tmp_path):
    plan = planned(tmp_path, PLUS, COUNT)

    def generate(prompts: Any, *, n: int, **_: Any) -> list[Group]:
        return [answers(p, *[str(p.columns.get("answer", "no"))] * n) for p in prompts]

    found = evaluate(
        generate, plan.eval, plan.rewards, samples=1, sampling=Sampling(8), correct=plan.correct,
        sets=plan.config.set_names,
    )  # fmt: skip
    assert {name: (own.accuracy.mean, own.n) for name, own in found.sets.items()} == {
        "plus": (1.0, 4),
        "count": (0.0, 4),
    }
    assert found.accuracy.mean == 0.5
    assert found.to_json()["sets"]["plus"]["accuracy"]["low"] < 1.0
    alone = evaluate(generate, plan.eval[:4], plan.rewards, samples=1, sampling=Sampling(8), correct=plan.correct)
    assert "sets" not in alone.to_json()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rewards": [{"name": "arithmetic"}]}, "data set 'words': reward 'arithmetic' applies to none of the"),
        ({"rewards": [{"name": "arithmetic", "sets": ["plus"]}]}, "rewards: none judges data set 'words'"),
        ({"rewards": [{"name": "arithmetic", "sets": ["plus"]}, {"name": "format", "sets": ["words"]}],
          "eval": {"size": 4, "correct_reward": "arithmetic"}}, "which does not judge data set words"),
        ({"rewards": [{"name": "repetition"}], "rollout": {"prompts": 40, "max_tokens": 9}},
         "of which data set 'words' has up to 20 by its weight, but only 16 training prompts"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_set_is_refused(tmp_path, more, said):
    words = {"name": "words", "train": rows(tmp_path / "words.jsonl", 20, other="x")}
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, PLUS, words, **more)
    assert any(said in problem for problem in caught.value.problems), caught.value.problems


def test_a_reward_that_asks_whether_the_answer_is_right_comes_behind_one_of_its_set():
    from trew.config import RewardConfig

    first, second = RewardConfig(name="gsm8k", sets=("a",)), RewardConfig(name="cosine", sets=("b",))
    with pytest.raises(ConfigError, match="must come first"):
        RewardSet.from_config([first, second])


def test_correct_is_unknown_where_the_reward_of_a_set_failed():
    """The next reward in the list does not stand in."""
    from trew.types import Score

    score = Score(None, parts={"a": None, "b": 1.0}, statuses={"a": "timeout", "b": "scored"})
    assert correct_by("a", "b")(score) is None


def test_a_curriculum_needs_a_reward_that_says_who_passes(tmp_path):
    from scorer_help import save_scorer

    save_scorer(tmp_path / "scorer")
    judged = {"rewards": [{"model": str(tmp_path / "scorer")}], "curriculum": {"share": 0.5}}
    with pytest.raises(ConfigError, match=r"curriculum\.share: got 0.5, but the scores of reward model"):
        planned(tmp_path, PLUS, **judged)
    assert planned(tmp_path, PLUS, **judged, eval={"size": 4, "correct_at": 0.5})


# ---- commands


def test_data_show_tells_the_mixture_of_a_recipe(tmp_path, capsys):
    recipe = tmp_path / "r.toml"
    recipe.write_text(dumps(configured(PLUS, COUNT, curriculum={"share": 0.5}, steps=10, eval={"size": 5})))
    show(str(recipe), n=3)
    said = capsys.readouterr().out
    assert "data set plus: 33.3% of the prompts, 27 of 80" in said
    assert "data set count: 66.7% of the prompts, 53 of 80" in said
    assert "curriculum: 50% of the prompts" in said
    assert said.count("── count/") + said.count("── plus/") == 3
    show(str(recipe), n=1, set=("data.0.weight=6",))
    assert "data set plus: 75.0%" in capsys.readouterr().out


def test_the_mixture_of_demonstrations_counts_the_rows_of_a_batch(tmp_path):
    sets = []
    for name in ("one", "two"):
        text = "".join(json.dumps({"prompt": f"{name} {i}", "completion": "x"}) + "\n" for i in range(9))
        (tmp_path / f"{name}.jsonl").write_text(text)
        sets.append({"name": name, "task": "demonstrations", "train": str(tmp_path / f"{name}.jsonl")})
    config = configured(*sets, sft={"batch": 5, "epochs": 0}, steps=4, eval={"size": 1})
    data = load_sets(config.sets, eval_size=1, seed=0)
    lines = mixture_lines(config, data.train, data.eval)
    assert [line.split(",")[0] + line.split(",")[1] for line in lines] == [
        f"data set {name}: 50.0% of the prompts 10 of 20 without refills; 8 training prompts (1.25 epochs)"
        for name in ("one", "two")
    ]


def test_commands_that_take_one_set_say_so(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(dumps(configured(PLUS, COUNT)))
    with pytest.raises(ConfigError, match=r"data: got 2 data sets \(plus, count\), but trew data convert takes one"):
        convert(str(recipe), str(tmp_path / "out.jsonl"))
    with pytest.raises(ConfigError, match="but trew iterate takes one"):
        load_recipe(recipe)
    recipe.write_text(dumps(parse({"model": "m", "data": {"task": "arithmetic"}, "curriculum": {"share": 0.5}})))
    with pytest.raises(ConfigError, match=r"curriculum.share: got 0.5, but every round draws its own prompts"):
        load_recipe(recipe)


def test_what_is_shown_of_a_mixture_of_demonstrations_counts_by_its_epochs(tmp_path, capsys):
    """22 rows twice in steps of 4 are 11 steps, and not the 100 that a recipe has by default."""
    sets = ""
    for name, count in (("a", 6), ("b", 20)):
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": name}]
        rows = [{"messages": [{**turns[0], "content": f"{name}{i}"}, turns[1]]} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sets += f'[[data]]\nname = "{name}"\ntask = "demonstrations"\ntrain = "{tmp_path / name}.jsonl"\n'
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'model = "m"\n{sets}[sft]\nbatch = 4\nepochs = 2\n[eval]\nsize = 2\n')
    show(str(recipe), n=1)
    assert "50.0% of the prompts, 22 of 44 without refills; 4 training prompts (5.50 epochs)" in capsys.readouterr().out
