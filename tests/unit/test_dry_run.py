"""``trew train --dry-run`` says what would be run and where each value comes from, and writes nothing."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tiers
import tiny
from trew.cli.dry_run import annotated, origins
from trew.cli.main import main
from trew.config import load, parse

RECIPE = """
model = "model"
steps = 2
[data]
train = "d.jsonl"
[data.args]
chat = true
[[rewards]]
name = "gsm8k"
[[rewards]]
name = "r.py:{f}"
weight = 0.5
[rollout]
prompts = 2
completions = 2
max_tokens = 4
[eval]
size = 2
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    tiny.save(tmp_path / "model")
    (tmp_path / "r.toml").write_text(RECIPE.replace("{f}", "f"))
    (tmp_path / "r.py").write_text("def f(completions, **_): return [1.0] * len(completions)\n")
    rows = [{"prompt": f"{i} + 1? \x1b[31mred \u202e[bold]", "gold": str(i + 1)} for i in range(12)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry(capsys, *args: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main(["train", "r.toml", "--dry-run", *args])
    said = capsys.readouterr()
    assert left.value.code == code, said.err
    return said.out if code == 0 else said.err


def test_end_tokens_of_the_generation_configuration_are_shown(here, capsys):
    """They end completions, too, and were left out."""
    (here / "model" / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    assert "a completion ends with <|endoftext|> (256) or <|im_end|> (258), or is cut off" in dry(capsys)


def test_everything_is_shown_and_nothing_is_written(here, capsys):
    before = {p: p.stat().st_mtime_ns for p in here.rglob("*") if "__pycache__" not in p.parts}
    out = dry(capsys, "--set", "objective.preset=dapo", "objective.eps_high=0.25")
    assert before == {p: p.stat().st_mtime_ns for p in here.rglob("*") if "__pycache__" not in p.parts}
    for expected in (
        "w = 0 if (A > 0 and r > 1.25) or (A < 0 and r < 0.8), else 1",  # the equation, with its numbers
        "data: 10 training and 2 held-out prompts; training prompts have",
        "reward gsm8k: weight 1; applies to 12 of 12 rows, whose golds all score 1",
        "applies to 12 of 12 rows; trew rewards test tries it",
        "│ <|im_start|>assistant",
        "scores 1 with gsm8k",
        "a completion ends with <|im_end|> (258), or is cut off after 4 tokens",
        "memory   peak about",
        "2 steps of 2 prompts x 2 completions, 2 optimizer steps, on cpu; evaluated before and after on 2 prompts",
        "Nothing was trained or written.",
    ):
        assert expected in out, expected
    assert out.count("── prompt ") == 3


@pytest.mark.parametrize("shuffle", tiers.some(["true", "false"], ["true"]))
def test_the_prompts_are_those_of_the_first_step(here, capsys, shuffle):
    settings = ["--set", f"data.shuffle={shuffle}", "steps=1", "rollout.prompts=3"]
    shown = [line.split()[6].rstrip(",") for line in dry(capsys, *settings).splitlines() if "── prompt" in line]
    with pytest.raises(SystemExit):
        main(["train", "r.toml", "--out", "run", *settings])
    table = pq.read_table(here / "run" / "rollouts" / "000001.parquet").to_pylist()
    assert shown == list(dict.fromkeys(row["uid"] for row in table))


def test_prompts_cannot_steer_the_terminal(here, capsys):
    out = dry(capsys)
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert r"red \u202e[bold]" in out


def test_what_is_shown_is_a_recipe_and_says_where_values_come_from(here, capsys):
    out = dry(capsys, "--out", "elsewhere", "--set", "learner.lr=1e-4", "data.args.system=s", "steps=3")
    text = out.split("\n──")[0]
    again = parse(tomllib.loads(text), base=here)
    settings = ["learner.lr=1e-4", "data.args.system=s", "steps=3", "out=elsewhere"]
    assert again == load(here / "r.toml", settings)
    remarks = dict(line.split("  # ") for line in text.splitlines() if "  # " in line)
    remarks = {key.split(" = ")[0]: where for key, where in remarks.items()}
    assert {k: remarks[k] for k in ("model", "steps", "lr", "args", "out", "weight")} == {
        "model": "r.toml", "steps": "--set", "lr": "--set", "args": "r.toml, --set", "out": "--out",
        "weight": "r.toml",
    }  # fmt: skip
    assert "seed" not in remarks


@pytest.mark.parametrize("own", [{}, {"sft.epochs": "r.toml", "objective.preset": "r.toml"}])
def test_a_value_that_another_setting_decides_is_not_shown_as_a_default(own):
    data = {"task": "demonstrations", "train": "rows.jsonl"}
    lines = annotated(parse({"model": "m", "steps": 7, "data": data}), {"steps": "r.toml", **own})
    said = {key: next(line.partition("# ")[2] for line in lines if line.startswith(f"{key} = "))
            for key in ("epochs", "preset", "steps")}  # fmt: skip
    assert said == {
        "epochs": own.get("sft.epochs", "as steps is given"),
        "preset": own.get("objective.preset", "by data.task"), "steps": "r.toml",
    }  # fmt: skip


def test_later_wins_as_a_whole_where_a_table_or_a_list_is_replaced(here):
    found = origins(here / "r.toml", ["data.args={chat=false}", "rewards=[{name='gsm8k', weight=2.0}]"])
    assert found["data.args.chat"] == "--set"
    assert not any(k.startswith("rewards.") and where == "r.toml" for k, where in found.items())
    assert found["out"] == "the recipe's name"
    lines = annotated(load(here / "r.toml", ["rewards=[{name='gsm8k', weight=2.0}]"]), found)
    assert {"name", "weight"} == {
        line.split(" = ")[0] for line in lines[lines.index("[[rewards]]") :] if "# --set" in line
    }


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["learner.lr=-1", "data.train=none.jsonl", "objective.preset=dap"], ["learner.lr", "none.jsonl", "'dapo'"]),
        (["track.to=['wandbb']"], ["did you mean 'wandb'"]),
        (["rewards=[{name='arithmetic'}]", "data.train=b.jsonl"], ["reward 'arithmetic'"]),
    ],
)
def test_it_refuses_what_a_run_refuses_with_the_same_words(here, capsys, settings, says):
    rows = [{"prompt": f"{i}?", "gold": "no number" if i == 3 else "1"} for i in range(9)]
    (here / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = dry(capsys, "--set", *settings, code=2)
    assert all(text in said for text in says), said
    with pytest.raises(SystemExit) as left:
        main(["train", "r.toml", "--set", *settings])
    assert left.value.code == 2
    assert capsys.readouterr().err == said


def test_a_used_folder_is_refused_as_by_a_run(here, capsys):
    (here / "used").mkdir()
    (here / "used" / "mine.txt").write_text("x")
    assert "is not empty and not a run folder" in dry(capsys, "--out", "used", code=2)


def test_what_changed_since_a_run_began_is_shown_or_refused_as_the_run_would(here, capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "r.toml", "--set", "steps=1"])
    assert left.value.code == 0
    capsys.readouterr()
    assert "settings that have changed" not in dry(capsys, "--resume", "--set", "steps=1")
    out = dry(capsys, "--resume", "--set", "rollout.batch=7", "steps=2")
    assert "steps: the run was started with 1, now it is 2" in out
    assert "rollout.batch: the run was started with" in out
    other = ("--resume", "--set", "learner.lr=0.5")
    assert "learner.lr: the run was started with" in dry(capsys, *other, code=2)
    assert "learner.lr: the run was started with" in dry(capsys, *other, "--allow-changes")
    assert "add --resume" in dry(capsys, "--allow-changes", code=2)


def test_the_openings_of_episodes_are_shown_as_the_model_reads_them(here, capsys):
    """The rows were, with their number of tokens: for numbered episodes 'episode 7', which no model reads."""
    (here / "tools.py").write_text(
        'def capital(country: str) -> str:\n    """Looks it up.\n\n    Args:\n        country: its name\n    """\n'
    )
    (here / "r.toml").write_text(
        'model = "model"\nsteps = 2\n[environment]\nname = "guess"\ntools = ["tools.py:capital"]\nworkers = 1\n'
        "[objective]\nbeta = 0.0\n[rollout]\nprompts = 2\nmax_tokens = 4\n"
    )
    said = dry(capsys)
    data = next(line for line in said.splitlines() if line.startswith("data: "))
    most = int(data.removeprefix("data: 1000 training and 200 held-out prompts; the openings that were tried have up "
                                 "to ").removesuffix(" tokens"))  # fmt: skip
    heads = [line for line in said.splitlines() if " of step 1: episode-" in line]
    assert len(heads) == 3
    assert all(f", {most} tokens " in head for head in heads)  # all begin alike
    assert said.count("Looks it up.") == 3  # tools that the template does not show are described in the messages
    assert "│ episode " not in said
    assert "a reply ends with <|im_end|> (258), or is cut off after 4 tokens" in said
