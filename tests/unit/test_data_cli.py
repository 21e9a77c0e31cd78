"""``trew data prepare | show | convert``."""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from trew.cli.data import convert, prepare, show
from trew.cli.main import run
from trew.config import DataConfig
from trew.data import load_task, verl
from trew.data.files import read_rows, write_rows
from trew.errors import ConfigError, DataError
from trew.types import Prompt


def gsm8k(folder: Path, train: int = 5, test: int = 3) -> Path:
    for name, n in (("train", train), ("test", test)):
        rows = [{"question": f"{name} {i}?", "answer": f"So.\n#### {i},000"} for i in range(1, n + 1)]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def values(path: Path) -> list[Any]:
    return [dict(row.values) for row in read_rows(path)]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_prepare_writes_both_splits_and_says_so(
    tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    prepare("gsm8k", source=str(gsm8k(tmp_path / "in")), out=str(out), format=format)  # type: ignore[arg-type]
    assert sorted(path.name for path in out.iterdir()) == [f"test.{format}", f"train.{format}"]
    assert values(out / f"test.{format}")[1] == {"question": "test 2?", "answer": "So.\n#### 2,000", "gold": "2000"}
    said = capsys.readouterr().out
    assert "5 rows" in said
    assert "3 rows" in said
    assert hashlib.sha256((out / f"train.{format}").read_bytes()).hexdigest() in said
    data = load_task(DataConfig(task="gsm8k", train=str(out)), eval_size=3, seed=0)
    assert [p.columns["gold"] for p in data.eval] == ["1000", "2000", "3000"]


def test_prepare_refuses_to_replace_or_to_mix_formats(tmp_path: Path) -> None:
    source = str(gsm8k(tmp_path / "in"))
    out = str(tmp_path / "out")
    prepare("gsm8k", source=source, out=out)
    with pytest.raises(ConfigError, match="--overwrite"):
        prepare("gsm8k", source=source, out=out)
    with pytest.raises(ConfigError, match="another format"):
        prepare("gsm8k", source=source, out=out, format="parquet")
    prepare("gsm8k", source=source, out=out, overwrite=True)


def test_prepare_writes_nothing_when_a_split_is_bad(tmp_path: Path) -> None:
    source = gsm8k(tmp_path / "in")
    (source / "test.jsonl").write_text('{"question": "x", "answer": "no mark"}\n')
    with pytest.raises(DataError, match=r"test\.jsonl line 1"):
        prepare("gsm8k", source=str(source), out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_prepare_from_one_file_without_partner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = gsm8k(tmp_path / "in") / "train.jsonl"
    alone = source.rename(tmp_path / "alone.jsonl")
    prepare("gsm8k", source=str(alone), out=str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.jsonl"]
    assert "no test split" in capsys.readouterr().out


def test_show_prints_prompts_and_columns_without_acting_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "[red]a[/red] \x1b]8;;x\x07 \u202e", "gold": "[bold]4"}) + "\n")
    show(str(path))
    said = capsys.readouterr().out
    assert "[red]a[/red] \\x1b]8;;x\\x07 \\u202e" in said
    assert "gold = [bold]4" in said
    assert "1 of 1 prompts" in said


@pytest.mark.parametrize("task", ["arithmetic", "countdown"])
def test_show_procedural_tasks(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(task=task, n=2)
    said = capsys.readouterr().out
    assert said.count("user:") == 2
    with pytest.raises(ConfigError, match="--n"):
        show(task=task, n=0)


def test_convert_gsm8k_to_verl_has_exactly_verls_schema(tmp_path: Path) -> None:
    source = gsm8k(tmp_path / "in")
    out = tmp_path / "verl.parquet"
    convert(str(source), str(out), to="verl", task="gsm8k", split="test")
    row = values(out)[0]
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["data_source"] == "openai/gsm8k"
    assert row["prompt"][0]["role"] == "user"
    assert row["prompt"][0]["content"].startswith("test 1?")
    assert row["ability"] == "math"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1000"}
    assert row["extra_info"]["split"] == "test"
    assert [r["extra_info"]["index"] for r in values(out)] == [0, 1, 2]
    assert row["extra_info"]["question"] == "test 1?"


def test_convert_what_a_recipe_trains_and_is_evaluated_on(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('model = "m"\nsteps = 1\nseed = 3\n[data]\ntask = "arithmetic"\nargs = { largest = 9 }\n')
    changes = ("data.args.ops=['+']", "eval.size=7")
    for split in ("train", "test"):
        convert(str(recipe), str(tmp_path / f"{split}.jsonl"), to="trl", split=split, set=changes)
    config = DataConfig(task="arithmetic", args={"largest": 9, "ops": ["+"]})
    expected = load_task(config, eval_size=7, seed=3)
    assert [row["gold"] for row in values(tmp_path / "train.jsonl")] == [p.columns["gold"] for p in expected.train]
    assert [row["gold"] for row in values(tmp_path / "test.jsonl")] == [p.columns["gold"] for p in expected.eval]
    assert len(expected.eval) == 7
    convert(str(recipe), str(tmp_path / "verl.parquet"), to="verl")
    assert values(tmp_path / "verl.parquet")[0]["data_source"] == "arithmetic"


def test_convert_a_recipe_says_its_own_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sets them itself"):
        convert("r.toml", str(tmp_path / "o.jsonl"), task="gsm8k")
    with pytest.raises(ConfigError, match=r"--set: .*'rows\.jsonl'"):
        convert("rows.jsonl", str(tmp_path / "o.jsonl"), set=("seed=1",))


def test_convert_demonstrations_and_pairs_to_the_columns_that_trainers_read(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "1 + 1?"}]
    said, other = ([{"role": "assistant", "content": text}] for text in "23")
    files = {
        "demonstrations": ({"messages": [*asked, *said]}, {"prompt": asked, "completion": said}),
        "pairs": ({"chosen": [*asked, *said], "rejected": [*asked, *other]},
                  {"prompt": asked, "chosen": said, "rejected": other}),
    }  # fmt: skip
    for task, (row, expected) in files.items():
        source, out = tmp_path / f"{task}.jsonl", tmp_path / f"{task}-out.jsonl"
        write_rows(source, [row])
        convert(str(source), str(out), task=task)
        assert values(out) == [expected]
        convert(str(out), str(tmp_path / f"{task}-again.jsonl"), task=task)
        assert values(tmp_path / f"{task}-again.jsonl") == [expected]
        with pytest.raises(ConfigError, match=f"--to: got 'verl'.* of task '{task}'"):
            convert(str(source), str(tmp_path / "v.parquet"), task=task, to="verl")


def test_convert_refuses_a_recipe_whose_environment_makes_its_problems(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('model = "m"\nsteps = 1\n[environment]\nname = "guess"\n')
    with pytest.raises(ConfigError, match="environment 'guess' makes its own problems"):
        convert(str(recipe), str(tmp_path / "o.jsonl"))


def test_convert_says_that_overlong_prompts_are_not_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('model = "m"\nsteps = 1\n[data]\ntask = "arithmetic"\nmax_prompt_tokens = 3\n')
    convert(str(recipe), str(tmp_path / "a.jsonl"))
    assert "overlong" not in capsys.readouterr().out
    convert(str(recipe), str(tmp_path / "b.jsonl"), set=("data.overlong=drop",))
    assert "more than data.max_prompt_tokens = 3 tokens are written as they are" in capsys.readouterr().out


def test_convert_ground_truths_of_several_types_become_strings(tmp_path: Path) -> None:
    path, out = tmp_path / "d.jsonl", tmp_path / "verl.parquet"
    golds = ["72", 72, 1.5, {"a": 1}, [1, 2], True]
    write_rows(path, [{"prompt": f"p{i}", "gold": gold, "tools_kwargs": {}} for i, gold in enumerate(golds)])
    convert(str(path), str(out), to="verl", data_source="mine")
    truths = [row["reward_model"]["ground_truth"] for row in values(out)]
    assert truths == ["72", "72", "1.5", '{"a": 1}', "[1, 2]", "true"]
    assert "tools_kwargs" not in str(pq.read_schema(out))  # parquet cannot hold empty objects


def test_convert_to_verl_and_back_keeps_the_names_of_columns(tmp_path: Path) -> None:
    source, first, back = tmp_path / "in.jsonl", tmp_path / "verl.parquet", tmp_path / "back.jsonl"
    rows = [{"prompt": "2 + 2?", "answer": "4", "level": 1}, {"prompt": "3 + 3?", "answer": "6", "level": 2}]
    write_rows(source, rows)
    convert(str(source), str(first), to="verl")
    convert(str(first), str(back), to="trl")
    assert values(back) == rows


def test_convert_verls_own_rows_to_trl_and_back_is_the_same_file(tmp_path: Path) -> None:
    first, trl, second = (tmp_path / name for name in ("a.parquet", "b.parquet", "c.parquet"))
    convert(str(gsm8k(tmp_path / "in")), str(first), to="verl", task="gsm8k")
    foreign = values(first)
    for row in foreign:
        del row["extra_info"]["trew_row"]
    write_rows(first, foreign)
    convert(str(first), str(trl), to="trl")
    convert(str(trl), str(second), to="verl")
    back = values(second)
    for row in back:
        row["extra_info"].pop("trew_row")
    assert values(trl)[0]["ground_truth"] == "1000"
    assert values(trl)[0]["prompt"] == values(first)[0]["prompt"]
    assert "reward_model" not in values(trl)[0]
    assert values(first) == back


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_convert_to_verl_and_back_to_trew(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"prompt": "2 + 2?", "gold": 4, "level": 3, "tags": ["a"], "meta": None, "hint": "x", "hard": True},
        {
            "prompt": "3 * 3?",
            "gold": 9,
            "level": 1,
            "tags": [],
            "meta": {"by": {"who": "me"}},
            "hint": "y",
            "hard": False,
        },
    ]
    first, there, back = tmp_path / "a.jsonl", tmp_path / f"verl.{suffix}", tmp_path / "b.jsonl"
    write_rows(first, rows)
    convert(str(first), str(there), to="verl", gold_column="gold")
    convert(str(there), str(back), to="trew")
    assert values(back) == rows
    # What was edited there stays: the note does not bring the old answer back.
    changed = values(there)
    changed[0]["reward_model"]["ground_truth"] = "5"
    changed[0]["prompt"][0]["content"] = "2 + 3?"
    write_rows(there, changed)
    convert(str(there), str(back), to="trew", overwrite=True)
    assert (values(back)[0]["prompt"], values(back)[0]["gold"]) == ("2 + 3?", 5)
    assert values(back)[1] == rows[1]


def test_convert_countdown_uses_verls_ground_truth(tmp_path: Path) -> None:
    out = tmp_path / "verl.jsonl"
    write_rows(tmp_path / "in.jsonl", [{"nums": [1, 2, 3], "target": 6}])
    convert(str(tmp_path / "in.jsonl"), str(out), to="verl", task="countdown", data_source="countdown")
    assert json.loads(values(out)[0]["reward_model"]["ground_truth"]) == {"target": 6, "numbers": [1, 2, 3]}


def test_an_empty_cell_of_a_table_of_numbers_is_no_gold_for_verl(tmp_path: Path) -> None:
    path, out = tmp_path / "d.parquet", tmp_path / "v.parquet"
    write_rows(
        path, [{"prompt": "p", "gold": 0.5, "answer": "a"}, {"prompt": "q", "gold": float("nan"), "answer": "b"}]
    )
    convert(str(path), str(out), to="verl")
    assert [row.values["reward_model"]["ground_truth"] for row in read_rows(out)] == ["0.5", "b"]
    with pytest.raises(DataError, match=r"d:1': has no gold answer; looked for gold"):
        convert(str(path), str(tmp_path / "w.parquet"), to="verl", gold_column="gold")


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"answer": Decimal("5.0")}, "of 'answer', cannot be written as JSON: .*Decimal.*; write it as text"),
        ({"answer": [1.0, float("nan")]}, "of 'answer', cannot be written as JSON"),
        ({"nums": [1, 2], "target": Decimal(3)}, "of 'target' and 'numbers', cannot be written as JSON"),
        ({"answer": "5", "extra_info": "hello"}, "column 'extra_info' is an object in verl's rows, got 'hello'"),
    ],
)
def test_what_verl_s_rows_cannot_hold_is_named(columns: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=f"prompt 'a': .*{why}"):
        verl.to_rows([Prompt("a", text="q", columns=columns)], split="train", data_source="x")


def test_a_row_without_numbers_is_none_of_countdown() -> None:
    prompt = Prompt("a", text="q", columns={"answer": "5", "nums": None, "target": 3})
    (row,) = verl.to_rows([prompt], split="train", data_source="x")
    assert row["reward_model"]["ground_truth"] == "5"


def test_what_is_written_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder called ~ was made in the working directory."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    gsm8k(tmp_path / "set")
    prepare("gsm8k", source="set", out="~/gsm8k")
    convert("~/gsm8k", "~/trl.jsonl", task="gsm8k")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["gsm8k", "trl.jsonl"]
    assert not (tmp_path / "~").exists()


def test_convert_problems(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    write_rows(path, [{"prompt": "p", "label": "x"}])
    with pytest.raises(ConfigError) as caught:
        convert(str(path), "out.csv", to="trk", split="dev")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3
    with pytest.raises(DataError, match=r"no gold answer.*label"):
        convert(str(path), str(tmp_path / "o.jsonl"), to="verl")
    convert(str(path), str(tmp_path / "o.jsonl"), to="verl", gold_column="label")
    with pytest.raises(ConfigError, match="already exists"):
        convert(str(path), str(tmp_path / "o.jsonl"), to="verl", gold_column="label")


def test_the_command_line_takes_sources_by_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(gsm8k(tmp_path / "in")), str(tmp_path / "verl.jsonl")
    assert run(["data", "convert", source, out, "--task", "gsm8k", "--to", "verl"]) == 0
    assert run(["data", "show", out, "--n", "1"]) == 0
    assert run(["data", "prepare", "gsm8k", "--source", source, "--out", str(tmp_path / "out")]) == 0
    assert "ground_truth = 1000" in capsys.readouterr().out
    assert (tmp_path / "out" / "train.jsonl").exists()
