"""``trew eval`` of a run: whatever its options say, only prompts that the run did not train on."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import pytest

import tiny
import trew.cli.eval as eval_command
from trew.config import Config, DataConfig, EvalConfig, load
from trew.data.split import content_key
from trew.errors import ConfigError
from trew.training import episodes

HELD_OUT = 12
SEED = 3
DATA = {
    "arithmetic": 'task = "arithmetic"\nargs = { largest = 12, size = 300 }',
    "countdown": 'task = "countdown"\nargs = { size = 60 }',
    "file": 'train = "rows.jsonl"',
}
REWARD = '\n[[rewards]]\nname = "gsm8k"\n'


class Prepared(Exception):
    """Ends a command before it loads a model, with everything that is ready by then."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny", kind="llama")


@pytest.fixture
def evaluated(monkeypatch):
    """The prompts, by their content, that a command would evaluate on, and its notes."""

    def stop(ready, display):
        raise Prepared(ready)

    def prepare(model, **options):
        monkeypatch.setattr(eval_command, "measure", stop)
        with pytest.raises(Prepared) as stopped:
            eval_command.eval(str(model), device="cpu", max_tokens=2, **options)
        ready = stopped.value.args[0]
        return [content_key(prompt) for prompt in ready.prompts], ready.notes

    return prepare


def a_run(folder: Path, weights: Path, data: str) -> tuple[Path, Config]:
    """A run folder with final weights and its settings, as far as trew eval reads them; and those settings."""
    run = folder / "run"
    run.mkdir()
    shutil.copytree(weights, run / "final")
    write_rows(folder / "rows.jsonl", range(60))
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    table = data.replace("rows.jsonl", str(folder / "rows.jsonl"))
    (run / "config.toml").write_text(
        f'model = "elsewhere"\nsteps = 1\nseed = {SEED}\n[data]\n{table}\n[eval]\nsize = {HELD_OUT}\n'
        + (REWARD if "task" not in data else "")
    )
    return run, load(run / "config.toml")


def write_rows(path: Path, numbers) -> None:
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in numbers))


def contents(prompts) -> list[str]:
    return [content_key(prompt) for prompt in prompts]


@pytest.mark.parametrize("name", DATA)
def test_no_size_and_no_seed_reaches_what_the_run_trained_on(name, weights, tmp_path, evaluated):
    run, config = a_run(tmp_path, weights, DATA[name])
    data = episodes.dataset(config)
    trained, held = set(contents(data.train)), contents(data.eval)
    assert trained
    assert len(held) == HELD_OUT
    for size, seed in itertools.product((1, 5, HELD_OUT, None), (None, 0, SEED, 8)):
        prompts, _ = evaluated(run, size=size, seed=seed)
        assert prompts == held[: size or HELD_OUT], (size, seed)
        assert not trained & set(prompts)
    for changed in ("eval.size=5", "seed=8"):
        prompts, _ = evaluated(run, set=(changed,))
        assert prompts == held[: 5 if "size" in changed else HELD_OUT]
    for options in ({"size": HELD_OUT + 1}, {"set": (f"eval.size={HELD_OUT + 1}",)}, {"size": 1000, "seed": 1}):
        with pytest.raises(ConfigError, match=rf"--size.*the recipe holds out {HELD_OUT} prompts .* accepts at most "):
            eval_command.eval(str(run), **options)


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_naming_the_task_of_the_run_draws_no_other_problems(name, weights, tmp_path, evaluated):
    run, config = a_run(tmp_path, weights, DATA[name])
    held = contents(episodes.dataset(config).eval)
    assert evaluated(run, task=name, size=5, seed=1)[0] == held[:5]
    other = next(task for task in ("arithmetic", "countdown") if task != name)
    # A task that the run did not train on has no limit.
    prompts, notes = evaluated(run, task=other, size=30, set=("data.args={}",))
    assert len(prompts) == 30
    assert not any("training data" in note for note in notes)


def test_a_recipe_beside_a_run_and_a_checkpoint_beside_its_recipe(weights, tmp_path, evaluated):
    run, config = a_run(tmp_path, weights, DATA["file"])
    held = contents(episodes.dataset(config).eval)
    other = tmp_path / "other.toml"
    other.write_text((run / "config.toml").read_text().replace(f"seed = {SEED}", "seed = 8"))
    assert evaluated(run / "final", recipe=other, size=5)[0] == held[:5]
    assert evaluated(run / "final", recipe=other)[0] == held
    # What trew export has written is known by the recipe alone.
    exported = shutil.copytree(weights, tmp_path / "exported")
    for recipe in (run / "config.toml", other):
        own = held if recipe.parent == run else contents(episodes.dataset(load(other)).eval)
        assert evaluated(exported, recipe=recipe, size=5, seed=1)[0] == own[:5]
    assert evaluated(exported, recipe=run / "config.toml", set=("seed=8", "eval.size=5"))[0] == held[:5]


def test_a_test_split_of_its_own_may_give_more_than_the_run_asked_for(weights, tmp_path, evaluated):
    run, _ = a_run(tmp_path, weights, 'train = "rows.jsonl"\neval = "EVAL"')
    write_rows(tmp_path / "test.jsonl", range(50, 90))
    text = (run / "config.toml").read_text().replace("EVAL", str(tmp_path / "test.jsonl"))
    (run / "config.toml").write_text(text)
    prompts, notes = evaluated(run, size=5)
    assert prompts == [f"{i} + 1 =" for i in range(50, 55)]
    assert not any("training data" in note for note in notes)  # as the run has said already
    prompts, notes = evaluated(run, size=30)
    assert prompts == [f"{i} + 1 =" for i in range(50, 80)]
    assert any(note.startswith("10 of 30 evaluation prompts are in the training data") for note in notes)


def test_other_data_with_prompts_of_the_training_are_noted(weights, tmp_path, evaluated):
    run, _ = a_run(tmp_path, weights, DATA["file"])
    rows = tmp_path / "rows.jsonl"
    prompts, notes = evaluated(run, data=str(rows), size=60)  # as it is: that was asked for
    assert len(prompts) == 60
    assert any(note.startswith(f"{60 - HELD_OUT} of 60 evaluation prompts are in the training") for note in notes)
    write_rows(tmp_path / "fresh.jsonl", range(100, 130))
    _, notes = evaluated(run, data=str(tmp_path / "fresh.jsonl"), size=30)
    assert not any("training data" in note for note in notes)
    rows.unlink()
    _, notes = evaluated(run, data=str(tmp_path / "fresh.jsonl"), size=30)
    assert any("is not known, as its data cannot be read" in note for note in notes)


def test_problems_of_other_ranges_that_were_trained_on_are_noted(weights, tmp_path, evaluated):
    run, config = a_run(tmp_path, weights, DATA["arithmetic"])
    prompts, notes = evaluated(run, set=("data.args.largest=10",))
    shared = len(set(contents(episodes.dataset(config).train)) & set(prompts))
    assert shared
    assert any(note.startswith(f"{shared} of {HELD_OUT} evaluation prompts are in the training") for note in notes)


@pytest.mark.parametrize("name", ["rows.jsonl", "./rows.jsonl", "d/../rows.jsonl", "link.jsonl"])
def test_the_file_of_a_run_is_the_same_one_however_it_is_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    write_rows(tmp_path / "rows.jsonl", range(60))
    (tmp_path / "link.jsonl").symlink_to("rows.jsonl")
    made = Config(model="m", seed=SEED, data=DataConfig(train=str(tmp_path / "rows.jsonl")), eval=EvalConfig(size=12))
    asked = dataclasses.replace(made, seed=SEED + 1, data=DataConfig(train=name), eval=EvalConfig(size=6))
    prompts, _, _ = episodes.held_out(asked, trained=made)
    trained_on = {content_key(prompt) for prompt in episodes.dataset(made).train}
    assert len(prompts) == 6
    assert not trained_on & {content_key(prompt) for prompt in prompts}
