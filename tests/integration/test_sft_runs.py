"""``trew sft`` as a user runs it: warm starts, rejection sampling, resumed and shared runs, and what follows them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import sft_help
import tiny
import trew
from ranks_help import free_port, variables
from sft_help import rows, weights
from sft_help import trained as sft
from trew.cli.main import run as command
from trew.config import Config, dumps, load, parse
from trew.config.schema import SftConfig
from trew.errors import ConfigError
from trew.training.continuing import continued
from trew.training.planning import plan
from trew.utils.toml import dump_table

RIGHT = {"task": "arithmetic", "args": {"ops": ["+"], "smallest": 1, "largest": 4}}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    tiny.save(folder / "model")
    prompts = trew.data.load_prompts(trew.config.DataConfig(**RIGHT))
    rows = [{"messages": [*map(dict, p.messages), answer(p)]} for p in prompts for _ in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def answer(prompt: Any) -> dict[str, str]:
    return {"role": "assistant", "content": f"#### {prompt.columns['answer']}"}


def recipe(place: Path, name: str, *, data: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    own = {"task": "demonstrations", "train": str(place / "rows.jsonl")} | (data or {})
    return sft_help.recipe(place, name, data=own, batch=8, held=2, **sections)


def test_a_resumed_training_is_equal_to_the_bit(place):
    whole = sft(recipe(place, "whole", sft={"epochs": 0}, steps=6))
    sft(recipe(place, "part", sft={"epochs": 0}, steps=4))
    # The six steps again, as one epoch: whether steps or epochs say how many may change.
    sft(recipe(place, "part", sft={"epochs": 1}), resume=True)
    a, b = weights(place / "whole"), weights(place / "part")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert whole["loss_after"]["mean"] < whole["loss_before"]["mean"]
    one, two = ([{k: v for k, v in r.items() if "second" not in k} for r in rows(place / n)] for n in ("whole", "part"))
    assert [r for r in one if "loss" in r] == [r for r in two if "loss" in r]
    report = (place / "whole" / "report.html").read_text()
    assert "<th>before</th><th>after</th>" in report
    assert re.search(r"<td>loss [\d.]+ \[[\d.]+, [\d.]+\]</td>", report)
    assert ">demonstration<" in report
    assert ">score <" not in report


def test_two_ranks_are_one_process(server, place):
    small = recipe(place, "two", eval={"every": 0}, checkpoint={"every": 0})
    sft(small | {"out": str(place / "one")})
    (place / "r.toml").write_text(dump_table(small | {"cluster": {"learner": 2}}))
    port = free_port()
    ranks = [server.start("sft", "r.toml", cwd=place, **variables(rank, 2, port)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.text() for rank in ranks)
    one, two = ([r.get("loss") or r["eval_loss"] for r in rows(place / name)] for name in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-5)
    a, b = weights(place / "one"), weights(place / "two")
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-4) for name in a)


def test_adapters_checkpointing_and_micro_batches_change_what_they_should(place):
    plain = recipe(place, "plain", sft={"epochs": 0}, steps=2, checkpoint={"every": 0})
    sft(plain)
    memory = {"microbatch_tokens": 300, "gradient_checkpointing": True}
    sft(plain | {"out": str(place / "small"), "learner": plain["learner"] | memory})
    a, b = weights(place / "plain"), weights(place / "small")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-4, msg=name)
    sft(plain | {"out": str(place / "lora"), "lora": {"rank": 2}})
    assert (place / "lora" / "final" / "adapter").is_dir()


def test_a_warm_start_raises_the_pass_rate_and_goes_on_with_rewards(place):
    sft(recipe(place, "warm", sft={"epochs": 12}, learner={"lr": 1e-2}, eval={"every": 0}, checkpoint={"every": 0}))
    found = []
    for name, model in (("cold", place / "model"), ("hot", place / "warm" / "final")):
        table = {
            "model": str(model), "out": str(place / name), "threads": 1, "steps": 1, "data": RIGHT,
            "rollout": {"prompts": 2, "completions": 2, "max_tokens": 12}, "eval": {"size": 4},
            "objective": {"preset": "online-rft"}, "learner": {"lr": 1e-4}, "checkpoint": {"every": 0},
        }  # fmt: skip
        found.append(sft(table))
    cold, hot = (each["accuracy_before"]["mean"] for each in found)
    assert cold == 0
    assert hot >= 0.5


def test_rollouts_above_a_reward_are_learned_as_they_were_sampled(place, tmp_path):
    model = place / "model"
    (tmp_path / "r.py").write_text("def odd(completion_ids, **_):\n    return [ids[0] % 2 for ids in completion_ids]\n")
    sampled = {
        "model": str(model), "out": str(tmp_path / "sampled"), "steps": 2, "data": RIGHT, "threads": 1,
        "rewards": [{"name": f"{tmp_path}/r.py:odd"}], "checkpoint": {"every": 0}, "eval": {"size": 2},
        "rollout": {"prompts": 4, "completions": 4, "max_tokens": 4},
    }  # fmt: skip
    sft(sampled)
    data = {"task": "rollouts", "train": str(tmp_path / "sampled")}
    table = recipe(place, "rft", data=data, checkpoint={"every": 0}) | {"out": str(tmp_path / "rft")}
    sft(table)
    import pyarrow.parquet as pq

    def tokens(run: str) -> list[dict[str, Any]]:
        files = sorted((tmp_path / run / "rollouts").glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    kept = {(tuple(r["prompt_ids"]), tuple(r["token_ids"])) for r in tokens("sampled") if r["score"] >= 1}
    learned = tokens("rft")
    assert {(tuple(r["prompt_ids"]), tuple(r["token_ids"])) for r in learned} <= kept
    assert learned[0]["score"] == 1
    assert 'preset = "rft"' in (tmp_path / "rft" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rollout": {"max_tokens": 8}}, "rollout.max_tokens: got 8, but demonstrations leave nothing to sample"),
        ({"rewards": [{"name": "gsm8k"}]}, "rewards: got 1, but demonstrations are not scored"),
        ({"objective": {"preset": "grpo"}}, "objective.preset: got 'grpo', which learns from what a policy samples"),
        ({"objective": {"preset": "sft", "dynamic_sampling": True}}, "demonstrations are not sampled"),
        ({"sft": {"max_tokens": 8}}, "rows are longer than 8 tokens"), ({"steps": 3}, "sft.epochs = 1 of"),
        ({"eval": {"temperature": 0.5}}, "eval.temperature"), ({"data": {"overlong": "drop"}}, "data.overlong"),
        ({"critic": {"warmup_steps": 2}}, "critic.warmup_steps: got 2, but sft has no critic; remove it"),
        ({"critic": {"lr": 1e-4}}, "critic.lr: got 0.0001, but sft has no critic"),
        ({"data": RIGHT}, "sft.batch: got 8, but .sft. is for demonstrations"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(place, changes, why):
    table = recipe(place, "refused", **changes)
    if changes.get("data") is RIGHT:
        table["data"] = RIGHT
    with pytest.raises(ConfigError, match=why):
        sft(table)
    assert not (place / "refused").exists()


WARM = (
    'model = "model"\nthreads = 1\n[data]\ntask = "demonstrations"\ntrain = "rows.jsonl"\n[sft]\nbatch = 8\n'
    "[eval]\nsize = 2\n[learner]\nlr = 1e-3\n"
)


def test_a_finished_run_goes_on_with_more_epochs(place, monkeypatch):
    monkeypatch.chdir(place)
    Path("more.toml").write_text(WARM)
    assert command(["sft", "more.toml", "--set", "sft.epochs=0.5"]) == 0
    assert json.loads(Path("runs/more/summary.json").read_text())["steps"] == 3
    assert command(["sft", "more.toml", "--resume", "--set", "sft.epochs=1"]) == 0
    assert json.loads(Path("runs/more/summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize("stored", [3, 100])
@pytest.mark.parametrize(("overrides", "steps"), [
    (["sft.epochs=2"], None), ([], None), (["sft.epochs=0"], "stored"), (["sft.epochs=0", "steps=7"], 7),
])  # fmt: skip
def test_steps_of_a_resumed_run_are_made_from_its_epochs_anew(tmp_path, stored, overrides, steps):
    """100 too, which is the default: a run that had as many is no different."""
    recipe = tmp_path / "r.toml"
    recipe.write_text(WARM)
    own = tomllib.loads(dumps(load(recipe))) | {"steps": stored}
    config, _ = continued(recipe, own, overrides, out=None)
    want = {None: Config(model="").steps, "stored": stored}.get(steps, steps)
    assert config.steps == want


def test_steps_that_a_recipe_gives_are_never_taken_for_the_default(place, tmp_path):
    """100 is the default: it counts where it is written down, and is refused beside epochs that make another number."""
    recipe = tmp_path / "r.toml"
    recipe.write_text("steps = 100\n" + WARM)
    paths = [f"model={place / 'model'}", f"data.train={place / 'rows.jsonl'}"]
    assert plan(load(recipe, paths)).config.steps == 100
    with pytest.raises(ConfigError, match=r"steps: got 100, but sft.epochs = 2 of .* leave steps out, or set sft"):
        plan(load(recipe, [*paths, "sft.epochs=2"]))
    with pytest.raises(ConfigError, match=r"steps: got 100, but sft.epochs = 1 of"):
        plan(load(recipe, [*paths, "sft.epochs=1"]))
    # Not given: the epochs decide, also after the configuration was written down and read back.
    recipe.write_text(WARM)
    config = load(recipe, [*paths, "sft.epochs=2"])
    made = plan(config).config
    assert made.steps not in (100, config.steps)
    for again in (parse(tomllib.loads(dumps(config))), parse(tomllib.loads(dumps(made)))):
        assert plan(again).config == made


@pytest.mark.parametrize("epochs", [0.55, 1.1, 2.2, 1])
def test_a_part_of_an_epoch_makes_the_steps_that_its_decimals_say(epochs):
    """0.55 x 100 rows are 55.000000000000007 in floating point, which made a step more."""
    own = SftConfig(epochs=epochs, batch=5)
    assert [own.steps(rows) for rows in (100, 200, 1500)] == [round(epochs * rows / 5) for rows in (100, 200, 1500)]


def test_a_batch_of_more_rows_than_there_are_is_said_to_pass_over_them_more_often_than_was_asked(place, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(WARM.replace("batch = 8", "batch = 1"))
    paths = [f"model={place / 'model'}", f"data.train={place / 'rows.jsonl'}"]
    rows = plan(load(recipe, paths)).config.steps
    notes = plan(load(recipe, [*paths, f"sft.batch={2 * rows}"])).notes
    said = [note for note in notes if "sft.epochs" in note or "passes" in note]
    more = "a step has rows several times, since sft.batch is more than they are: 2 passes"
    assert said == [f"sft.epochs = 1: {rows} rows make 1 steps of {2 * rows}", more]
    assert not any("passes" in note for note in plan(load(recipe, [*paths, f"sft.batch={rows}"])).notes)
    # Where steps say how long, as well.
    counted = plan(load(recipe, [*paths, "sft.epochs=0", "steps=4", f"sft.batch={2 * rows}"])).notes
    assert [note.rpartition(" ")[0].rpartition(": ")[2] for note in counted if "passes" in note] == ["8"]


def test_how_often_the_rows_of_each_data_set_are_learned_is_said(place, tmp_path):
    lines = (place / "rows.jsonl").read_text().splitlines(keepends=True)
    sets = []
    for name, some, weight in (("few", lines[:2], 3), ("many", lines[2:10], 1)):
        (tmp_path / f"{name}.jsonl").write_text("".join(some))
        own = {"train": str(tmp_path / f"{name}.jsonl"), "eval": str(place / "rows.jsonl")}
        sets.append({"name": name, "task": "demonstrations", "weight": weight, **own})
    table = recipe(place, "sets", sft={"epochs": 2, "batch": 5}, eval={"every": 0, "size": 1})
    config = parse(table | {"data": sets})
    (said,) = (note for note in plan(config).notes if "passes" in note)
    assert said.endswith("passes: 7.5 over 'few', 0.625 over 'many'")  # of 20 rows, 15 and 5


def test_settings_without_effect_and_rows_that_are_read_otherwise_are_said(place, tmp_path):
    rows = [{"prompt": f"{i}", "completion": "a"} for i in range(4)]
    asked = [{"role": "user", "content": "<|im_start|>system"}]
    rows += [{"prompt": asked, "completion": [{"role": "assistant", "content": "a"}]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    objective = {"preset": "sft", "kl": "k1", "entropy_step": 0.1, "overlong_filtering": True}
    table = recipe(place, "said", data={"train": str(tmp_path / "rows.jsonl")}, lora={"rank": 2}, objective=objective)
    notes = "\n".join(plan(parse(table | {"learner": {"lr": 1e-6}}, base=place)).notes)
    assert "objective.kl: does nothing while beta = 0" in notes
    assert "objective.entropy_step: does nothing while entropy_target = 0" in notes
    assert "objective.overlong_filtering: does nothing, as no row is cut off" in notes
    assert "learner.lr: 1e-06 is low for LoRA" in notes
    assert "4 of 5 prompts are text" in notes
    assert "spell special tokens" in notes
    assert not [note for note in plan(parse(recipe(place, "plain"), base=place)).notes if "does nothing" in note]


def test_warm_up_is_judged_by_the_steps_that_the_epochs_make(place, tmp_path):
    """Not by the 100 steps that a recipe has by default: a row for each step makes more."""
    recipe = tmp_path / "r.toml"
    recipe.write_text(WARM.replace("batch = 8", "batch = 1\nepochs = 3").replace("lr =", "warmup_steps = 120\nlr ="))
    paths = [f"model={place / 'model'}", f"data.train={place / 'rows.jsonl'}"]
    config = load(recipe, paths)
    made = plan(config).config
    assert made.steps == made.optimizer_steps > 120
    with pytest.raises(ConfigError, match=f"learner.warmup_steps: got 120, .* {made.steps // 3} optimizer steps"):
        plan(load(recipe, [*paths, "sft.epochs=1"]))
    halves = plan(load(recipe, [*paths, "sft.batch=2", "learner.minibatch_prompts=1"])).config
    assert halves.steps < 120 < halves.optimizer_steps
    with pytest.raises(ConfigError, match=r"learner.warmup_steps: got 120, .* has 100 optimizer steps"):
        load(recipe, ["sft.epochs=0"])
    own = tomllib.loads(dumps(config)) | {"steps": made.steps}
    assert continued(recipe, own, [], out=None)[0] == config


def test_the_commands_that_follow(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    Path("warm.toml").write_text(WARM)
    assert command(["sft", "warm.toml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "+│ #### " in shown
    assert "tokens are learned" in shown
    assert command(["plan", "warm.toml"]) == 0
    assert "generating" not in capsys.readouterr().out
    assert command(["sft", "warm.toml", "--set", "steps=2"]) == 0
    assert "held-out rows" in capsys.readouterr().out
    assert json.loads(Path("runs/warm/summary.json").read_text())["steps"] == 2
    assert command(["export", "model", "runs/warm", "--out", "exported"]) == 0
    card = Path("exported/README.md").read_text()
    assert "by supervised fine-tuning" in card
    assert "trew sft recipe.toml" in card
    assert command(["report", "runs/warm", "--out", "page.html"]) == 0
    with pytest.raises(ConfigError, match="whose rows have no rewards; name a task"):
        command(["eval", "runs/warm"])
    with pytest.raises(ConfigError, match=r"got 'gsm8' .did you mean 'gsm8k'.*, accepts ((?!demonstrations|pairs).)*$"):
        command(["eval", "model", "--task", "gsm8"])
    Path("other.toml").write_text('model = "model"\n[data]\ntask = "gsm8k"\n')
    with pytest.raises(ConfigError, match=r"data\.task is 'gsm8k', accepts 'demonstrations' or 'rollouts'"):
        command(["sft", "other.toml"])
