"""MATH, MBPP and HumanEval: what their rows become, which rows are refused, and ``trew data prepare`` of them."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trew.cli.data import convert, prepare, show
from trew.cli.main import main
from trew.config import DataConfig, RewardConfig
from trew.data import Dataset, load_eval, load_task, make_task
from trew.data.contamination import overlaps, problem_text, problem_texts
from trew.data.files import read_rows, write_rows
from trew.data.sources import read_train
from trew.data.tasks import Mbpp
from trew.data.tasks.maths import boxed
from trew.errors import ConfigError, DataError
from trew.rewards import RewardSet, grade


def load(path: Path, task: str, *, n: int = 1, eval: str = "auto", **args: Any) -> Dataset:
    return load_task(DataConfig(task=task, train=str(path), eval=eval, args=args), eval_size=n, seed=0)


def content(prompt: Any) -> str:
    return prompt.messages[-1]["content"]


def values(path: Path) -> list[dict[str, Any]]:
    return [dict(row.values) for row in read_rows(path)]


# ---------------------------------------------------------------------------------------------------------------- math


def hendrycks(n: int, level: int = 3, kind: str = "Algebra") -> list[dict[str, Any]]:
    """Rows as the original set has them: the answer is in the solution's box alone."""
    return [
        {"problem": f"What is ${i}/7$ (level {level}, {kind})?", "level": f"Level {level}", "type": kind,
         "solution": rf"It is \boxed{{1}}, no: $\boxed{{\frac{{{i}}}{{7}}}}$."}
        for i in range(1, n + 1)
    ]  # fmt: skip


def math500(n: int) -> list[dict[str, Any]]:
    return [
        {"problem": f"Give the interval {i}.", "solution": "None.", "answer": rf"\left[{i}, \infty\right)",
         "subject": "Precalculus", "level": 5, "unique_id": f"test/{i}.json"}
        for i in range(n)
    ]  # fmt: skip


def test_math_reads_the_answer_from_the_solutions_last_box(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", hendrycks(4))
    write_rows(tmp_path / "test.jsonl", math500(3))
    data = load(tmp_path, "math", n=2)
    assert [p.columns["gold"] for p in data.train] == [rf"\frac{{{i}}}{{7}}" for i in range(1, 5)]
    assert [p.columns["gold"] for p in data.eval] == [r"\left[0, \infty\right)", r"\left[1, \infty\right)"]
    assert (data.train[0].columns["level"], data.train[0].columns["subject"]) == (3, "Algebra")
    assert data.eval[1].uid == "test/1.json"
    assert content(data.train[0]).startswith("What is $1/7$")
    assert content(data.train[0]).endswith(r"put the final answer inside \boxed{}.")
    assert data.default_rewards == (RewardConfig(name="math"),)
    assert RewardSet.from_config(data.default_rewards).check_golds([*data.train, *data.eval]) == []
    assert grade("math", r"so \boxed{3/7}", data.train[2].columns["gold"]).score == 1


def test_levels_of_a_table_with_empty_cells_are_whole_numbers_written_as_floats(tmp_path: Path) -> None:
    levels = [3.0, 5.0, float("nan"), None, 3.5, 5.0]
    rows = [{"problem": f"{i}?", "answer": str(i), "level": level} for i, level in enumerate(levels)]
    write_rows(tmp_path / "train.parquet", rows)
    write_rows(tmp_path / "test.parquet", rows)
    assert [p.columns["level"] for p in load(tmp_path, "math", n=6).eval] == [3, 5, None, None, None, 5]
    assert [p.columns["answer"] for p in load(tmp_path, "math", levels=[5]).train] == ["1", "5"]


def test_math_keeps_levels_and_subjects_in_training_and_leaves_evaluation_whole(tmp_path: Path) -> None:
    rows = [*hendrycks(3, 1), *hendrycks(4, 5), *hendrycks(2, 5, "Counting & Probability")]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "test.jsonl", hendrycks(3, 2, "Geometry"))
    data = load(tmp_path, "math", n=3, levels=[4, 5], subjects=["counting and probability"])
    assert len(data.train) == 2
    assert len(data.eval) == 3
    assert any("7 of 9 rows have other levels or subjects" in note for note in data.notes)
    kept, _, notes = load_eval(DataConfig(task="math", train=str(tmp_path), args={"levels": [1]}), size=3, seed=0)
    assert len(kept) == 3
    assert not any("other levels" in note for note in notes)
    with pytest.raises(DataError, match="none of its 9 rows"):
        load(tmp_path, "math", levels=[3])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"problem": "p", "solution": "no box"}, "no answer, and column 'solution' has no \\boxed"),
        ({"problem": "p", "solution": r"\boxed{1"}, "has no \\boxed"),
        ({"problem": "p", "solution": r"\boxed{ }"}, "has no \\boxed"),
        ({"problem": "", "answer": "1"}, "'problem' is empty"),
        ({"problem": "p", "answer": ["1"]}, "'answer' must be a string, got ['1']"),
        ({"problem": "p", "answer": " "}, "'answer' is empty"),
        ({"problem": "p", "answer": "thus ####"}, "nothing after its last '####'"),
        ({"answer": "1"}, "no column 'question'"),
    ],
)
def test_math_rows_that_cannot_be_graded_are_refused(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [*hendrycks(3), row])
    with pytest.raises(DataError, match=r"train\.jsonl line 4") as caught:
        load(tmp_path, "math")
    assert says in str(caught.value)


def test_math_reads_verl_rows_numbers_and_gsm8k_and_says_which_columns_it_wants(tmp_path: Path) -> None:
    verl = {"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"ground_truth": "4"}}
    write_rows(tmp_path / "verl.jsonl", [{**verl, "data_source": "x"}, {**verl, "prompt": "3 + 1?"}])
    data = load(tmp_path / "verl.jsonl", "math")
    assert {p.columns["gold"] for p in [*data.train, *data.eval]} == {"4"}
    write_rows(tmp_path / "aime.jsonl", [{"problem": f"p{i}", "answer": 200 + i} for i in range(3)])
    assert {p.columns["gold"] for p in load(tmp_path / "aime.jsonl", "math").train} <= {"200", "201", "202"}
    write_rows(tmp_path / "gsm.jsonl", [{"question": f"q{i}", "answer": f"so\n#### {i}"} for i in range(3)])
    assert {p.columns["gold"] for p in load(tmp_path / "gsm.jsonl", "math").train} <= {"0", "1", "2"}
    write_rows(tmp_path / "other.jsonl", [{"problem": "p", "anwser": "1"}])
    with pytest.raises(DataError, match=r"MATH rows have a problem.*'anwser'"):
        load(tmp_path / "other.jsonl", "math")


def test_levels_subjects_and_the_system_message_hold_for_verl_rows_too(tmp_path: Path) -> None:
    def row(i: int, **more: Any) -> dict[str, Any]:
        asked = [{"role": "user", "content": f"{i} + 1?"}]
        kind = {"level": f"Level {1 + i % 5}", "type": "Algebra" if i % 2 else "Geometry"}
        return {"prompt": asked, "reward_model": {"ground_truth": str(i + 1)}, "extra_info": kind, **more}

    path = tmp_path / "verl.jsonl"
    write_rows(path, [*map(row, range(20)), row(20, level=5)])  # a column counts before extra_info
    data = load(path, "math", levels=[5], subjects=["algebra"], system="Be brief.")
    assert {p.columns["gold"] for p in [*data.train, *data.eval]} == {"10", "20"}
    assert [m["role"] for m in data.train[0].messages or ()] == ["system", "user"]
    assert any("19 of 21 rows have other levels or subjects" in note for note in data.notes)
    assert len(load(path, "math", levels=[5]).train) == 4
    with pytest.raises(DataError, match="arguments exclude all of them"):
        load(path, "math", levels=[5], subjects=["precalculus"])
    write_rows(tmp_path / "text.jsonl", [row(0, prompt="1 + 1?")])
    with pytest.raises(DataError, match="is a string prompt, which has no system message"):
        load(tmp_path / "text.jsonl", "math", system="Be brief.")


@pytest.mark.parametrize(
    ("solution", "found"),
    [
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\fbox{2}", "2"),
        (r"$\boxed 7$.", "7"),
        (r"$\boxed 1.5$", "1.5"),
        (r"$\fbox 1,200$", "1,200"),
        (r"$\boxed -3/4$", "-3/4"),
        (r"\boxed{5} is less than \boxed", "5"),
        (r"\boxed{x_{1}} and \boxed{y^{2}}", "y^{2}"),
        ("nothing", None),
        (r"\boxed{" + "{" * 5000, None),
    ],
)
def test_boxed(solution: str, found: str | None) -> None:
    assert boxed(solution) == found


@given(
    st.sampled_from(["\\boxed{@}", "\\boxed @", "\\fbox{@}", "\\fbox @", "\\boxed{ @ }"]),
    st.decimals(-9999, 9999, places=2),
    st.sampled_from(["{}", "{:,}"]),
)
def test_a_solution_in_a_box_scores_1_against_the_gold_read_from_it(box: str, value: Decimal, form: str) -> None:
    solution = f"So ${box.replace('@', form.format(value))}$"
    assert boxed(solution) == form.format(value)
    assert grade("math", solution, boxed(solution)).score == 1
    assert grade("math", solution, str(value)).score == 1


# ------------------------------------------------------------------------------------------------- MBPP and HumanEval


def mbpp(*ids: int) -> list[dict[str, Any]]:
    return [
        {"text": f"Write a function to add {i}.", "task_id": i, "test_setup_code": "", "challenge_test_list": [],
         "code": f"import math\r\ndef helper(x):\r\n  return x + {i}\r\ndef add{i}(x):\r\n  return helper(x)",
         "test_list": [f"assert add{i}(1) == {i + 1}", f"assert add{i}(-1) == {i - 1}"]}
        for i in ids
    ]  # fmt: skip


def humaneval(n: int) -> list[dict[str, Any]]:
    return [
        {"task_id": f"HumanEval/{i}", "entry_point": f"f{i}",
         "prompt": "from typing import List\n\ndef twice(x):\n    return 2 * x\n\n"
                   f'def f{i}(x: int) -> List[int]:\n    """Doc."""\n',
         "canonical_solution": f"    return [twice(x) + {i}]\n",
         "test": f"METADATA = {{}}\n\ndef check(candidate):\n    assert candidate(1) == [{i + 2}]\n"
                 "    for k in range(3):\n        assert candidate(k)[0] >= 2 * k\n"}
        for i in range(n)
    ]  # fmt: skip


def test_mbpp_takes_the_published_splits_of_the_whole_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "mbpp.jsonl", mbpp(3, 11, 12, 510, 550, 601, 602, 603, 974))
    data = load(tmp_path / "mbpp.jsonl", "mbpp", n=2)
    assert [p.columns["task_id"] for p in data.eval] == [11, 12]
    assert [p.uid for p in data.train] == ["602", "603", "974"]  # 601 cannot be tested from outside
    assert any("1 of 4 rows left out" in note for note in data.notes)
    assert any("published splits (train 4, test 3, validation 1 rows)" in note for note in data.notes)
    kept, _, _ = load_eval(DataConfig(task="mbpp", train=str(tmp_path / "mbpp.jsonl")), size=9, seed=0)
    assert [p.uid for p in kept] == ["11", "12", "510"]
    write_rows(tmp_path / "part.jsonl", mbpp(*range(700, 708)))
    assert len(load(tmp_path / "part.jsonl", "mbpp", n=2).train) == 6  # one split alone: rows are held out


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_mbpp_rows_that_were_prepared_keep_their_harder_tests(tmp_path: Path, suffix: str) -> None:
    """Without them, challenge = true graded no more than before, without a word."""
    rows = mbpp(*range(700, 704))
    rows[1]["challenge_test_list"] = ["assert add701(5) == 706"]
    write_rows(tmp_path / "mbpp.jsonl", rows)
    for name, pairs in (("plain", ()), ("harder", ("challenge=true",))):
        prepare("mbpp", source=str(tmp_path / "mbpp.jsonl"), out=str(tmp_path / name), format=suffix, set=pairs,
                unchecked=True)  # fmt: skip
        train = tmp_path / name / f"train.{suffix}"
        made = {p.uid: p for p in Mbpp(challenge=True).prompts(read_train(str(train)))}
        assert [len(made[uid].columns["asserts"]) for uid in ("700", "701")] == [2, 3]
    assert len(Mbpp().prompts(read_train(str(tmp_path / "plain" / f"train.{suffix}")))[1].columns["asserts"]) == 2


def test_mbpp_prompt_names_the_function_and_shows_only_some_tests(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", mbpp(*range(700, 704)))
    prompt = load(tmp_path / "train.jsonl", "mbpp").train[0]
    i = prompt.columns["task_id"]
    assert f"called `add{i}`" in content(prompt)
    assert f"assert add{i}(1) == {i + 1}" in content(prompt)
    assert f"assert add{i}(-1)" not in content(prompt)
    assert len(prompt.columns["asserts"]) == 2
    assert "\r" not in prompt.columns["reference"]
    for shown, count in ((0, 0), (2, 2), (9, 2)):
        assert content(load(tmp_path / "train.jsonl", "mbpp", shown=shown).train[0]).count("assert ") == count


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"test_list": []}, "'test_list' must be a list of asserts as strings, got []"),
        ({"test_list": ["assert add1(1 == 2"]}, "is not Python"),
        ({"test_list": ["assert sub(1) == 2"]}, "call no function that the reference defines"),
        ({"code": "def f(:"}, "the reference program is not Python"),
        ({"code": None}, "'code' must be a string, got null"),
        ({"text": ""}, "'text' is empty"),
    ],
)
def test_mbpp_rows_that_cannot_be_graded_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [*mbpp(700, 701), {**mbpp(702)[0], **change}])
    with pytest.raises(DataError, match=r"train\.jsonl line 3") as caught:
        load(tmp_path, "mbpp")
    assert says in str(caught.value)


def test_sanitized_mbpp_has_a_prompt_and_imports(tmp_path: Path) -> None:
    rows = [{**row, "prompt": "Write it.", "test_imports": ["import math", "import re"]} for row in mbpp(700, 701)]
    write_rows(tmp_path / "train.jsonl", [{k: v for k, v in row.items() if k != "text"} for row in rows])
    prompt = load(tmp_path, "mbpp").train[0]
    assert content(prompt).startswith("Write it.\n")
    assert prompt.columns["setup"] == "import math\nimport re"


def test_humaneval_prompt_and_columns_from_the_packed_file(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in humaneval(4)).encode()))
    data = load(path, "humaneval")
    prompt = min([*data.train, *data.eval], key=lambda p: p.uid)
    assert prompt.uid == "HumanEval/0"
    assert "```python\nfrom typing import List\n\ndef twice(x):" in content(prompt)
    assert prompt.columns["reference"].endswith("return [twice(x) + 0]\n")
    assert prompt.columns["entry_point"] == "f0"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="gzip"):
        load(path, "humaneval")


def test_code_rows_of_both_sets_pass_their_own_tests_and_an_answer_may_lean_on_the_prompts_helpers(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "train.jsonl", mbpp(700, 701))
    write_rows(tmp_path / "test.jsonl", humaneval(2))
    data = load(tmp_path, "mbpp", n=2)  # trained on MBPP, evaluated on HumanEval
    rewards = RewardSet.from_config(data.default_rewards)
    assert rewards.check_golds([*data.train, *data.eval]) == []
    columns = data.eval[1].columns
    given = {name: columns[name] for name in ("entry_point", "asserts", "setup")}
    short = "```python\ndef f1(x):\n    return [twice(x) + 1]\n```"
    assert grade("code_func", short, None, **given).score == 1
    assert grade("code_func", short.replace("+ 1", "+ 2"), None, **given).score == 0


def test_a_wrong_reference_is_found_before_anything_is_written(tmp_path: Path) -> None:
    rows = mbpp(700, 701, 702)
    rows[1]["test_list"] = ["assert add701(1) == 1"]
    write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError, match=r"1 of 3 rows are unusable.*\n.*row 2 \(701\).*code_func.*reference"):
        prepare("mbpp", source=str(tmp_path / "train.jsonl"), out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    prepare("mbpp", source=str(tmp_path / "train.jsonl"), out=str(tmp_path / "out"), drop_bad=True)
    assert [row["task_id"] for row in values(tmp_path / "out" / "train.jsonl")] == [700, 702]
    prepare("mbpp", source=str(tmp_path / "train.jsonl"), out=str(tmp_path / "all"), unchecked=True)
    assert len(values(tmp_path / "all" / "train.jsonl")) == 3


# ------------------------------------------------------------------------------------------------------------- prepare


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize(("task", "rows"), [("math", hendrycks(4)), ("mbpp", mbpp(*range(700, 704)))])
def test_prepared_rows_give_the_same_prompts_again(
    task: str, rows: list[dict[str, Any]], format: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "train.jsonl", rows)
    prepare(task, source=str(tmp_path), out=str(tmp_path / "out"), format=format, unchecked=True)  # type: ignore[arg-type]
    before, after = load(tmp_path / "train.jsonl", task), load(tmp_path / "out" / f"train.{format}", task)
    assert [p.messages for p in before.train] == [p.messages for p in after.train]
    for name in ("gold", "asserts", "reference", "setup", "entry_point", "level"):
        assert [p.columns.get(name) for p in before.train] == [p.columns.get(name) for p in after.train]


def test_humaneval_is_prepared_as_a_test_split_and_read_again(tmp_path: Path) -> None:
    write_rows(tmp_path / "he.jsonl", humaneval(3))
    prepare("humaneval", source=str(tmp_path / "he.jsonl"), out=str(tmp_path / "out"))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["test.jsonl"]
    config = DataConfig(task="humaneval", train=str(tmp_path / "out"), eval=str(tmp_path / "out"))
    prompts, rewards, _ = load_eval(config, size=3, seed=0)
    assert [p.uid for p in prompts] == ["HumanEval/0", "HumanEval/1", "HumanEval/2"]
    assert RewardSet.from_config(rewards).check_golds(prompts) == []


def test_countdown_is_prepared_by_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare("countdown", out=str(tmp_path / name), set=("size=20", "numbers=[3]"), seed=seed, eval_size=5)
    a, b, c = ((tmp_path / name / "train.jsonl").read_bytes() for name in "abc")
    assert a == b != c
    assert len(values(tmp_path / "a" / "test.jsonl")) == 5
    data = load(tmp_path / "a", "countdown", n=5)
    assert len(data.train) == 20
    assert RewardSet.from_config(data.default_rewards[:1]).check_golds(data.train) == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["mth"], "did you mean 'math'"),
        (["prompts"], "accepts gsm8k, math, countdown, mbpp, humaneval, reasoning-gym:NAME"),
        (["gsm8k:x"], "data.task: got 'gsm8k:x'"),
        (["math", "--set", "levels=[6]"], "data.args.levels: got [6]"),
        (["math", "--set", 'subjects=["Algebr"]'], "did you mean 'Algebra'"),
        (["mbpp", "--set", "shown=-1"], "data.args.shown: got -1"),
        (["mbpp", "--set", "timeout_s=1e9"], "data.args.timeout_s"),
        (["countdown", "--eval-size", "0"], "--eval-size"),
        (["countdown", "--remove-overlap"], "--against"),
        (["math", "--source", "nothing.jsonl"], "nothing.jsonl: no such file"),
    ],
)
def test_prepare_says_what_is_wrong_in_one_line(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["data", "prepare", *argv])
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_all_tasks_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for task, rows in (("math", hendrycks(2)), ("mbpp", mbpp(700)), ("humaneval", humaneval(1))):
        write_rows(tmp_path / f"{task}.jsonl", rows)
        show(str(tmp_path / f"{task}.jsonl"), task=task, n=1)
    said = capsys.readouterr().out
    for text in (r"\boxed{}", "gold = \\frac{1}{7}", "entry_point = add700", "```python block", "def twice"):
        assert text in said


def test_code_rows_convert_to_verl_with_their_tests_as_ground_truth(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", mbpp(700))
    convert(str(tmp_path / "train.jsonl"), str(tmp_path / "verl.parquet"), to="verl", task="mbpp", ability="code")
    [row] = values(tmp_path / "verl.parquet")
    truth = json.loads(row["reward_model"]["ground_truth"])
    assert truth == {"entry_point": "add700", "asserts": mbpp(700)[0]["test_list"], "setup": ""}
    answer = "```python\ndef add700(x): return x + 700\n```"
    assert grade("code_func", answer, None, **truth).score == 1


def test_convert_writes_the_published_split_of_a_file_that_has_them_all(tmp_path: Path) -> None:
    source, out = str(tmp_path / "mbpp.jsonl"), tmp_path / "rows.jsonl"
    write_rows(tmp_path / "mbpp.jsonl", mbpp(3, 11, 12, 550, 602, 603, 974))
    for split, numbers in {"train": [602, 603, 974], "test": [11, 12]}.items():
        convert(source, str(out), task="mbpp", split=split, overwrite=True)
        assert [row["task_id"] for row in values(out)] == numbers


def test_problems_that_are_made_have_no_test_split_without_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split: got 'test', but task 'countdown' makes its problems"):
        convert("", str(tmp_path / "rows.jsonl"), task="countdown", split="test")


# ------------------------------------------------------------------------------------------------------- contamination


def test_overlap_is_found_whatever_the_case_and_punctuation_and_removed_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = "Tom has 12 apples and gives 5 of them to Ann, who eats 2; how many do they have together?"
    near = "TOM has 12 apples -- and gives 5 of them to Ann, who eats 2; how much is that?"
    train = [copied, near, "How many legs have 8 spiders when each of them has eight of them, all told?", "2 + 2?"]
    rows = [{"question": text, "answer": "#### 10"} for text in train]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "eval.jsonl", [{"problem": "Unrelated."}, {"problem": copied.upper()}, {"problem": "2 + 2"}])
    args = {"source": str(tmp_path / "train.jsonl"), "against": (str(tmp_path / "eval.jsonl"),)}
    prepare("gsm8k", out=str(tmp_path / "out"), **args)
    said = capsys.readouterr().out
    assert "3 of 4 training rows" in said
    assert "13 words" in said
    assert "row 1: 100% with eval.jsonl line 2: tom has 12 apples" in said
    assert len(values(tmp_path / "out" / "train.jsonl")) == 4
    prepare("gsm8k", out=str(tmp_path / "clean"), remove_overlap=True, **args)
    assert [row["question"] for row in values(tmp_path / "clean" / "train.jsonl")] == [train[2]]


def test_overlap_counts_and_its_limits() -> None:
    assert overlaps(["a b c d"], ["x a b c y"], n=3)[0].share == 0.5
    assert overlaps(["a b c d"], ["x a b y c d"], n=3) == []
    assert overlaps(["short"], ["short"], n=13)[0].share == 1
    assert overlaps(["", "?!"], ["", "?!"], n=2) == []
    assert [o.other for o in overlaps(["a b c d"], ["a b c", "a b c d"], n=2)] == [1]


def test_messages_as_a_json_string_overlap_with_the_same_problem_as_text() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 17 + 25?"}]
    forms = ["What is 17 + 25?", chat, json.dumps(chat), [*chat, {"role": "tool", "content": None}]]
    texts = [problem_text({"prompt": form}) or "" for form in forms]
    assert [o.share for o in overlaps(texts, ["what is 17 + 25"])] == [1.0] * 4


def test_overlap_needs_a_problem_column(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.jsonl", [{"question": "a"}, {"gold": "1"}])
    with pytest.raises(DataError, match=r"x\.jsonl line 2"):
        problem_texts(read_train(str(tmp_path / "x.jsonl")))


def test_arguments_of_the_new_tasks_are_checked() -> None:
    with pytest.raises(ConfigError, match="levels"):
        make_task(DataConfig(task="math", args={"levels": [0]}))
    with pytest.raises(ConfigError, match=r"unknown key.*did you mean 'shown'"):
        make_task(DataConfig(task="mbpp", args={"show": 1}))
    assert isinstance(make_task(DataConfig(task="mbpp")), Mbpp)
