"""``trew eval`` and ``trew report`` as commands, with a tiny random model."""

import json

import pyarrow.parquet as pq
import pytest

import tiny
from disk import read_only, tmpfs
from rollouts_help import answers
from trew.cli.chosen_model import choose
from trew.cli.eval import _table
from trew.cli.eval import eval as command
from trew.cli.export import model as export
from trew.cli.report import report
from trew.errors import ConfigError, DataError, StorageError
from trew.eval.evaluate import _count
from trew.training.exporting import finished
from trew.types import Prompt, Score, ScoredGroup


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.save(tmp_path_factory.mktemp("model") / "tiny", kind="llama"))


ARITHMETIC = {"task": "arithmetic", "device": "cpu", "max_tokens": 4}


def test_rows_of_a_file_are_called_by_its_name(model, tmp_path, capsys):
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "2 + 2 =", "answer": "4"}\n' * 2)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'model = "{model}"\n[data]\ntrain = "{own}"\neval = "{own}"\n[[rewards]]\nname = "gsm8k"\n')
    asked = {"recipe": recipe, "data": str(own), "device": "cpu", "max_tokens": 2}
    assert command(model, **asked) == 0
    assert "own.jsonl: 2 prompts, 1 completion each, greedy" in capsys.readouterr().out
    recipe.write_text(recipe.read_text().replace("[data]", '[[data]]\nname = "sums"'))  # a list of one
    assert command(model, recipe=recipe, device="cpu", max_tokens=2, size=1) == 0
    assert "own.jsonl: 1 prompt, 1 completion each, greedy" in capsys.readouterr().out


def test_another_task_takes_its_own_data_and_none_of_the_recipes(model, tmp_path, capsys):
    (tmp_path / "own.jsonl").write_text('{"prompt": "2 + 2 =", "completion": "4"}\n' * 9)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'model = "{model}"\n[data]\ntask = "demonstrations"\ntrain = "{tmp_path}/own.jsonl"\nargs = {{chat = true}}\n'
    )
    asked = {"recipe": recipe, "device": "cpu", "max_tokens": 2, "size": 2}
    assert command(model, task="arithmetic", **asked) == 0
    assert "on arithmetic: 2 prompts" in capsys.readouterr().out
    (tmp_path / "sums.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4"}\n' * 2)
    assert command(model, task="gsm8k", data=str(tmp_path / "sums.jsonl"), **asked) == 0
    assert "on gsm8k: 2 prompts" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"data\.args\.chat: unknown key"):
        command(model, task="arithmetic", set=("data.args.chat=true",), **asked)
    assert command(model, task="arithmetic", set=("data.args.largest=9",), **asked) == 0


def test_greedy_accuracy_with_its_interval_on_screen_and_on_disk(model, tmp_path, capsys):
    out, rows = tmp_path / "result.json", tmp_path / "completions.parquet"
    assert command(model, **ARITHMETIC, size=6, json=out, completions=rows) == 0
    screen = capsys.readouterr().out
    assert "6 prompts, 1 completion each, greedy" in screen
    result = json.loads(out.read_text())
    accuracy = result["result"]["accuracy"]
    assert accuracy["low"] <= accuracy["mean"] <= accuracy["high"]
    assert f"{accuracy['low']:.3f} to {accuracy['high']:.3f}" in screen
    assert result["result"]["n"] == 6
    assert result["model"] == model
    table = pq.read_table(rows).to_pylist()
    assert len(table) == 6
    assert sum(r["score"] for r in table) / 6 == pytest.approx(accuracy["mean"])


def test_several_samples_are_drawn_at_temperature_one_and_give_pass_at_k(model, tmp_path, capsys):
    out = tmp_path / "r.json"
    command(model, **ARITHMETIC, size=3, samples=4, json=out)
    screen = capsys.readouterr().out
    assert "temperature 1, seed 0" in screen
    for name in ("avg@4", "pass@2", "pass@4"):
        assert name in screen
    assert list(json.loads(out.read_text())["result"]["pass_at"]) == ["1", "2", "4"]


def test_pass_at_k_names_the_prompts_that_it_is_over_where_some_have_too_few_verdicts(model, tmp_path, capsys):
    """pass@4 of 1.000 stood under "3 prompts" though two of them had too few verdicts to count."""
    (tmp_path / "own.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    (tmp_path / "own.py").write_text(
        "def some(completions, prompts):\n"
        "    judged = {'a': 4, 'b': 2, 'c': 1}\n"
        "    return [1.0 if prompts[:i].count(p) < judged[p] else None for i, p in enumerate(prompts)]\n"
    )
    (tmp_path / "r.toml").write_text(
        f'model = "{model}"\n[data]\ntrain = "{tmp_path}/own.jsonl"\neval = "{tmp_path}/own.jsonl"\n'
        f'[[rewards]]\nname = "{tmp_path}/own.py:some"\n'
    )
    out = tmp_path / "r.json"
    command(model, recipe=tmp_path / "r.toml", device="cpu", max_tokens=2, samples=4, json=out)
    screen = capsys.readouterr().out
    assert "3 prompts, 4 completions each" in screen
    assert "pass@2 (2 prompts)" in screen
    assert "pass@4 (1 prompt)" in screen
    assert "avg@4 (" not in screen
    assert json.loads(out.read_text())["result"]["pass_at_n"] == {"1": 3, "2": 2, "4": 1}
    command(model, **ARITHMETIC, size=3, samples=4)
    assert "pass@4 (" not in capsys.readouterr().out, "every prompt has all of its verdicts"


def test_completions_go_into_a_file_that_is_called_what_it_is(model, tmp_path, capsys):
    """q.jsonl was parquet."""
    with pytest.raises(ConfigError, match=r"--completions: got .*q\.jsonl, accepts a file ending in \.parquet"):
        command(model, **ARITHMETIC, size=2, completions=tmp_path / "q.jsonl")
    assert not (tmp_path / "q.jsonl").exists()
    assert "evaluating" not in capsys.readouterr().out


def test_the_same_command_gives_the_same_result(model, tmp_path):
    files = [tmp_path / name for name in ("a.parquet", "b.parquet")]
    for file in files:
        command(model, **ARITHMETIC, size=3, samples=2, seed=5, completions=file)
    a, b = (pq.read_table(file).column("token_ids").to_pylist() for file in files)
    assert a == b


def test_a_file_of_problems_is_evaluated_as_it_is(model, tmp_path, capsys):
    data = tmp_path / "mine.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"What is 1 + {i}?", "answer": f"#### {1 + i}"}) + "\n" for i in range(3))
    )
    command(model, data=str(data), max_tokens=2, device="cpu")
    screen = capsys.readouterr().out
    assert "on gsm8k: 3 prompts" in screen
    assert "has only 3 rows" in screen


def test_a_recipe_gives_task_data_and_limits(model, tmp_path, capsys):
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'model = "other"\nseed = 7\n[data]\ntask = "arithmetic"\n[rollout]\nmax_tokens = 3\n'
        "[eval]\nsize = 2\nsamples = 2\ntemperature = 0.7\n"
    )
    command(model, recipe=recipe, set=("eval.size=4",), device="cpu")
    assert "arithmetic: 4 prompts, 2 completions each, temperature 0.7, seed 7" in capsys.readouterr().out


def test_another_task_is_judged_by_its_own_rewards_or_by_those_that_are_set(model, tmp_path, capsys):
    rewards = tmp_path / "own.py"
    rewards.write_text("def ten(completions): return [10.0 for _ in completions]\n")
    recipe, out = tmp_path / "recipe.toml", tmp_path / "result.json"
    judged = f'[[rewards]]\nname = "{rewards}:ten"\n[eval]\ncorrect_reward = "ten"\ncorrect_at = 10.0\n'
    recipe.write_text(f'model = "{model}"\n[data]\ntask = "countdown"\n{judged}')
    asked = {**ARITHMETIC, "recipe": recipe, "size": 3, "json": out}
    assert command(model, **asked) == 0
    found = json.loads(out.read_text())
    assert list(found["result"]["rewards"]) == ["arithmetic"]
    assert (found["eval"]["correct_reward"], found["eval"]["correct_at"]) == ("", 1.0)  # 10 is no value of its reward
    ours = (f'rewards=[{{name="{rewards}:ten"}}]', "eval.correct_at=11")
    assert command(model, **asked, set=ours) == 0
    found = json.loads(out.read_text())
    assert (found["result"]["rewards"], found["result"]["accuracy"]["mean"]) == ({"ten": 10.0}, 0.0)


def test_the_recipes_own_task_by_name_keeps_the_rewards_of_the_recipe(model, tmp_path):
    own, recipe, out = tmp_path / "own.jsonl", tmp_path / "recipe.toml", tmp_path / "result.json"
    own.write_text('{"prompt": "2 + 2 =", "answer": "4"}\n')
    rewards = tmp_path / "own.py"
    rewards.write_text("def ten(completions): return [10.0 for _ in completions]\n")
    recipe.write_text(
        f'model = "{model}"\n[data]\ntrain = "elsewhere.jsonl"\n[[rewards]]\nname = "{rewards}:ten"\n'
        "[eval]\ncorrect_at = 11.0\n"
    )
    asked = {"recipe": recipe, "data": str(own), "json": out, "device": "cpu", "max_tokens": 2}
    assert command(model, task="prompts", **asked) == 0
    found = json.loads(out.read_text())
    assert (found["result"]["rewards"], found["eval"]["correct_at"]) == ({"ten": 10.0}, 11.0)


def test_another_task_is_not_played_in_an_environment_that_makes_its_own_problems(model, tmp_path, capsys):
    recipe, out = tmp_path / "recipe.toml", tmp_path / "result.json"
    recipe.write_text(f'model = "{model}"\n[environment]\nname = "guess"\nturns = 2\n')
    assert command(model, **ARITHMETIC, recipe=recipe, size=3, json=out) == 0
    assert "on arithmetic: 3 prompts" in capsys.readouterr().out
    assert list(json.loads(out.read_text())["result"]["rewards"]) == ["arithmetic"]


def test_everything_wrong_is_said_at_once_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError) as error:
        command(
            str(tmp_path / "nowhere"), task="arithmetik", size=0, samples=2, temperature=0.0, json=tmp_path / "no/x"
        )
    text = str(error.value)
    for part in (
        "no such folder",
        "did you mean 'arithmetic'",
        "eval.size: got 0",
        "all samples are identical",
        "its folder is missing",
    ):
        assert part in text, part
    assert error.value.exit_code == 2


def test_report_of_nothing_and_of_no_run(tmp_path):
    with pytest.raises(ConfigError, match="at least one run folder"):
        report(())
    with pytest.raises(DataError, match="no such run folder"):
        report((tmp_path / "missing",))
    with pytest.raises(ConfigError, match="does not exist"):
        report((tmp_path,), out=tmp_path / "no" / "r.html")


def test_a_report_of_a_run_that_cannot_be_written_to_needs_another_file(tmp_path):
    """The advice was to run the command with --resume, which it does not have."""
    with tmpfs(kilobytes=64) as folder:
        (folder / "config.toml").write_text("steps = 1\n")
        read_only(folder)
        with pytest.raises(StorageError, match=r"^report.html: cannot be written: Read-only .* with --out$"):
            report((folder,))
        report((folder,), out=tmp_path / "r.html")
    assert (tmp_path / "r.html").exists()


def test_a_run_and_its_final_weights_are_evaluated_by_its_recipe(tmp_path, capsys):
    run = tmp_path / "run"
    final = run / "final"
    run.mkdir()
    tiny.save(final, kind="llama")
    config = (
        'model = "elsewhere"\nsteps = 1\ndevice = "cpu"\n[data]\ntask = "arithmetic"\n'
        "[rollout]\nmax_tokens = 3\n[eval]\nsize = 5\n"
    )
    (run / "config.toml").write_text(config)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    for named in (run, final):
        assert command(str(named)) == 0
        assert "on arithmetic: 5 prompts" in capsys.readouterr().out
    assert command(str(run), size=2) == 0
    assert "on arithmetic: 2 prompts" in capsys.readouterr().out
    (tmp_path / "outside.toml").write_text(config)
    (run / "config.toml").unlink()
    (run / "config.toml").symlink_to(tmp_path / "outside.toml")
    with pytest.raises(ConfigError, match=r"is a link.*give a recipe with --recipe FILE"):
        command(str(run))
    capsys.readouterr()
    for named in (run, final):  # as the message says
        assert command(str(named), recipe=tmp_path / "outside.toml") == 0
        assert f"{final} on arithmetic: 5 prompts" in capsys.readouterr().out
    final.rename(run / "moved")
    with pytest.raises(ConfigError, match="has no final weights yet"):
        command(str(run), recipe=tmp_path / "outside.toml")


def test_a_run_without_final_weights_says_so(tmp_path):
    (tmp_path / "config.toml").write_text('model = "m"\nsteps = 1\n[data]\ntask = "arithmetic"\n')
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no final weights yet"):
        command(str(tmp_path))


def test_a_run_that_has_gone_on_has_no_final_weights_until_it_ends_again(tmp_path, capsys):
    """What is in ``final`` is of the earlier end: its figures and answers were taken for those of the run."""
    run = tmp_path / "run"
    (run / "checkpoints" / "000002").mkdir(parents=True)
    tiny.save(run / "final", kind="llama")
    (run / "config.toml").write_text('model = "m"\n[data]\ntask = "arithmetic"\n[rollout]\nmax_tokens = 3\n')
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "summary.json").write_text('{"steps": 2}')
    known = {"step": None, "base": "", "chat_template": ""}

    def talked_to(name):
        return choose(str(name), **known).label.removeprefix(str(run))

    (run / "checkpoints" / "000003-copy").mkdir()  # a copy that somebody keeps: it was a ValueError
    assert command(str(run), size=2) == 0
    assert talked_to(run) == ""
    # Steps more than the summary tells; then none, as while the steps are taken.
    (run / "checkpoints" / "000003").mkdir()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"has gone on after .*trew export model .*run --out DIR"):
            command(str(run), size=2)
        assert talked_to(run) == " (newest checkpoint)"
        assert command(str(run / "final"), size=2) == 0
        assert talked_to(run / "final") == ""
        (run / "summary.json").unlink(missing_ok=True)
    (run / "summary.json").write_text('{"steps": null}')  # not one of trew's
    assert finished(run) is None


def test_a_reward_model_is_no_policy(tmp_path):
    """The message named eight settings of its run that a policy does not have."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('model = "m"\n[data]\npairs = "p.jsonl"\n[learner]\nbatch = 8\n')
    (run / "metrics.jsonl").write_text("")
    for of_it in (
        lambda: command(str(run)),
        lambda: choose(str(run), step=None, base="", chat_template=""),
        lambda: export(run, out=tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match=r"^[^\n]*is a run of trew train-reward, .* trew train or trew sft$"):
            of_it()


def test_a_run_of_rounds_names_its_policies_instead_of_itself(tmp_path):
    rounds = tmp_path / "rounds"
    for name in ("round-01", "round-02"):
        (rounds / name / "policy").mkdir(parents=True)
    (rounds / "config.toml").write_text("[iterate]\nrounds = 2\n")
    for of_it in (
        lambda: command(str(rounds)),
        lambda: choose(str(rounds), step=None, base="", chat_template=""),
        lambda: choose(str(rounds), step=3, base="", chat_template=""),
        lambda: export(rounds, out=tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match=r"^[^\n]*is a run of trew iterate, .* such as .*rounds/round-02/policy$"):
            of_it()


def test_a_folder_of_runs_is_told_from_a_model(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        for file in ("config.toml", "metrics.jsonl"):
            (tmp_path / "runs" / name / file).touch()
    with pytest.raises(ConfigError, match=r"is a folder of runs, and no run; name one: .*runs/a, .*runs/b$"):
        command(str(tmp_path / "runs"))
    with pytest.raises(ConfigError, match=r"is a folder of runs, and no run; name one: .*runs/a, .*runs/b$"):
        choose(str(tmp_path / "runs"), step=None, base="", chat_template="")
    with pytest.raises(DataError, match=r"it contains runs: name them, such as .*runs/a$"):
        report((tmp_path / "runs",))


def test_why_a_reward_failed_is_told(model, tmp_path, capsys):
    """Which reward failed was told and not why, though the failing function's message was known."""
    (tmp_path / "own.py").write_text("def f(completions, **columns):\n    raise ValueError('the server is down')\n")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'model = "{model}"\n[data]\ntask = "arithmetic"\n[[rewards]]\nname = "own.py:f"\non_failure = "skip"\n'
    )
    assert command(model, recipe=recipe, device="cpu", max_tokens=2, size=2) == 0
    screen = " ".join("".join(capsys.readouterr()).split())
    assert "left out 2 completions without a verdict" in screen
    assert "raised ValueError: the server is down" in screen


def test_an_accuracy_without_a_verdict_is_no_number():
    """It was nan, between 0.000 and 1.000."""
    group = ScoredGroup(answers(Prompt("p", text="q"), "a"), (Score(None),))
    table = _table(_count([group], [[None]], names=["exact"], samples=1, seconds=1.0, sets=["one"]))
    columns = [list(column.cells) for column in table.columns]
    rows = [row[:3] for row in zip(*columns, strict=True)][:3]
    assert rows == [("accuracy", "-", "no verdicts"), ("  one (0 prompts)", "-", "no verdicts"),
                    ("reward exact", "-", "")]  # fmt: skip


def test_a_small_reward_is_not_0():
    group = ScoredGroup(answers(Prompt("p", text="q"), "a"), (Score(1e-9, parts={"exact": 1e-9}),))
    table = _table(_count([group], [[True]], names=["exact"], samples=1, seconds=1.0, sets=["one"]))
    names, values = (list(column.cells) for column in table.columns[:2])
    assert values[names.index("reward exact")] == "1e-09"
