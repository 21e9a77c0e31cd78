"""What ``trew data`` writes keeps what its source had, or says what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trew.cli.data import convert, prepare, show
from trew.cli.main import main, run
from trew.config import DataConfig
from trew.data import load_prompts, load_task
from trew.data.files import read_rows, write_rows
from trew.errors import DataError

ASKED = [{"role": "user", "content": "2+2?"}]


def values(path: Path) -> list[Any]:
    return [dict(row.values) for row in read_rows(path)]


def sampled(score: float, text: str, messages: str | None) -> dict[str, Any]:
    """A row of a run's rollouts."""
    return {"prompt": "2+2?", "prompt_ids": [1], "token_ids": [*map(ord, text)], "sampled": [True] * len(text),
            "completion": text, "finish_reason": "stop", "score": score, "messages": messages}  # fmt: skip


@pytest.mark.parametrize("chat", [True, False])
def test_rollouts_are_written_in_the_form_of_their_prompt_and_those_left_out_are_counted(
    chat: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "r.jsonl", tmp_path / "out.jsonl"
    messages = '[{"role": "user", "content": "2+2?"}]' if chat else None
    write_rows(source, [sampled(1.0, "4", messages), sampled(0.0, "5", messages)])
    convert(str(source), str(out), task="rollouts")
    (row,) = values(out)
    said = [{"role": "assistant", "content": "4"}] if chat else "4"
    assert (row["prompt"], row["completion"]) == (ASKED if chat else "2+2?", said)
    assert "1 of 2 completions are learned from; left out are those with the reward below 1" in capsys.readouterr().out
    # trew reads that form, too.
    convert(str(out), str(tmp_path / "again.jsonl"), task="demonstrations")
    assert values(tmp_path / "again.jsonl") == [{"prompt": row["prompt"], "completion": said}]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("gsm8k", {"id": "a-7", "question": "1 + 1?", "answer": "#### 2"}),
        ("math", {"unique_id": "a-7", "problem": "1 + 1?", "answer": "2", "type": "Algebra"}),
        ("countdown", {"id": "a-7", "nums": [1, 2], "target": 3}),
    ],
)
def test_prepare_keeps_names_and_other_columns(task: str, row: dict[str, Any], format: str, tmp_path: Path) -> None:
    source, out = tmp_path / "train.jsonl", tmp_path / "out"
    name = next(iter(row))
    # Rows need not have the same columns.
    write_rows(source, [row | {"origin": "web"}, row | {name: "a-8", "hint": "easy"}])
    prepare(task, source=str(source), out=str(out), format=format, unchecked=True)  # type: ignore[arg-type]
    assert [p.uid for p in load_prompts(DataConfig(task=task, train=str(out)))] == ["a-7", "a-8"]
    second = values(out / f"train.{format}")
    assert [(r.get("origin"), r.get("hint")) for r in second] == [("web", None), (None, "easy")]


def test_a_column_called_prompt_beside_the_prompts_is_told_and_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "d.jsonl", tmp_path / "out.jsonl"
    write_rows(source, [{"question": f"2 + {n}?", "prompt": "be brief", "gold": str(2 + n)} for n in (1, 2)])
    with pytest.raises(DataError, match=r"'d:0': has a column 'prompt' that is not its prompt.*; rename the column"):
        convert(str(source), str(out), prompt_column="question")
    assert not out.exists()
    noted = "has a column 'prompt' beside the prompts' own, 'question'"
    assert noted in capsys.readouterr().out
    config = DataConfig(task="prompts", train=str(source), prompt_column="question")
    assert any(noted in note for note in load_task(config, eval_size=1, seed=0).notes)
    # verl's rows have a place for it.
    convert(str(source), str(tmp_path / "verl.jsonl"), prompt_column="question", to="verl")
    assert values(tmp_path / "verl.jsonl")[0]["extra_info"]["prompt"] == "be brief"


@pytest.mark.parametrize("through", ["", "trl.jsonl", "trl.parquet"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_reward_model_that_is_no_rule_stays_as_it_is(through: str, suffix: str, tmp_path: Path) -> None:
    source, out = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
    model = {"style": "model", "ground_truth": "4", "rubric": "Is it four?"}
    write_rows(source, [{"data_source": "x", "prompt": ASKED, "ability": "math", "reward_model": model}])
    first = str(tmp_path / through) if through else str(source)
    if through:
        convert(str(source), first)
    convert(first, str(out), to="verl")
    (row,) = values(out)
    assert row["reward_model"] == model
    assert "verl_reward_model" not in row["extra_info"]
    # Once more: the second time it has trew's record.
    convert(str(out), str(tmp_path / "again.jsonl"), to="verl")
    assert values(tmp_path / "again.jsonl")[0]["reward_model"] == model


def test_show_counts_no_more_prompts_than_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'model = "m"\nsteps = 1\n[data]\ntask = "arithmetic"\nargs = { size = 7 }\n[eval]\nsize = 2\n'
        "[rollout]\nprompts = 2\n"
    )
    show(str(recipe), n=12)
    said = capsys.readouterr().out
    assert "the first 7 of 7 training prompts" in said
    assert said.count("user:") == 7


def test_prepare_writes_no_file_without_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "train.jsonl", tmp_path / "out"
    write_rows(source, [{"question": "How many legs have 8 spiders?", "answer": "#### 64"}])
    options = ["--source", str(source), "--out", str(out), "--against", str(source), "--remove-overlap"]
    with pytest.raises(SystemExit) as ended:
        main(["data", "prepare", "gsm8k", *options])
    assert ended.value.code == 2
    assert "train: all rows were left out" in capsys.readouterr().err
    write_rows(source, [{"problem": "1 + 1?", "answer": r"\frac{1"}])  # no number, nor any other gold
    with pytest.raises(DataError, match="train: all rows were left out"):
        prepare("math", source=str(source), out=str(out), drop_bad=True)
    assert not out.exists()


def test_convert_names_the_splits_that_it_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["data", "convert", "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "(or validation)" not in said
    assert "test is the validation split" in said
    write_rows(tmp_path / "in" / "validation.jsonl", [{"prompt": "p", "gold": "1"}])
    convert(str(tmp_path / "in"), str(tmp_path / "o.jsonl"), split="test")
    assert values(tmp_path / "o.jsonl") == [{"prompt": "p", "gold": "1"}]
