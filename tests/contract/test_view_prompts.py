"""Prompts of ``trew view`` that share a uid: data sets that each number their own rows, trained on and held out."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trew.runs import RunFolder
from view_help import CONFIG, client, get, group, make_run, write_eval, write_step


def _twins(folder: Path) -> None:
    """Two uids; the held-out rows of the first have another text, and so have those of a second set in one step."""
    with RunFolder.open(folder) as run:
        run.write_config(CONFIG.format(steps=2, seed=0, lr=1e-3))
        write_eval(run, 0, group("0", "no", scores=(0.0,), prompt="held out"))
        write_step(run, 1, group("0", "no", "no", prompt="trained on"), group("0", "other", prompt="of another set"))
        write_step(run, 2, group("0", "yes", "yes", scores=(1.0, 1.0), prompt="trained on"), group("1", "x", "y"))
        write_eval(run, 2, group("0", "yes", scores=(1.0,), prompt="held out"), group("1", "x"))


def test_prompts_with_one_uid_and_other_texts_are_others(tmp_path: Path) -> None:
    """They were one prompt: it had the visits of all, and the text of the last one alone."""
    _twins(tmp_path / "x")
    page = client(tmp_path)
    found = get(page, "runs/x/prompts", sort="gain")
    assert found["total"] == 4
    assert [(p["uid"], p["prompt"], p["times"], p["gain"]) for p in found["prompts"]] == [
        ("0", "held out", 2, 1.0), ("0", "trained on", 2, 0.5), ("1", "question 1", 2, -0.5),
        ("0", "of another set", 1, None),
    ]  # fmt: skip
    for text in ("held out", "trained on", "another set"):
        assert get(page, "runs/x/prompts", text=text)["total"] == 1


def test_the_address_of_a_prompt_says_which_of_one_uid_it_is(tmp_path: Path) -> None:
    _twins(tmp_path / "x")
    page = client(tmp_path)
    signs = {p["prompt"]: p["prompt_hash"] for p in get(page, "runs/x/prompts")["prompts"]}
    visited = {
        "held out": [(0, True), (2, True)],
        "trained on": [(1, False), (2, False)],
        "of another set": [(1, False)],
    }
    for text, steps in visited.items():
        for path, query in (("prompt", {"uid": "0"}), ("prompts/0", {})):
            history = get(page, f"runs/x/{path}", prompt_hash=signs[text], **query)
            assert (history["prompt"], history["prompt_hash"], history["total"]) == (text, signs[text], len(steps))
            assert [(visit["step"], visit["eval"]) for visit in history["visits"]] == steps
            assert {row["prompt"] for visit in history["visits"] for row in visit["rows"]} == {text}
    # Every completion leads there, from a list and alone.
    groups = get(page, "runs/x/groups", step=1)["groups"]
    assert [(g["prompt"], g["prompt_hash"]) for g in groups] == [
        (text, signs[text]) for text in ("trained on", "of another set")
    ]
    assert groups[1]["rows"][0]["prompt_hash"] == signs["of another set"]
    assert get(page, "runs/x/completion", step=1, group=1, sample=0)["row"]["prompt_hash"] == signs["of another set"]


def test_a_uid_alone_is_an_address_where_no_other_prompt_has_it(tmp_path: Path) -> None:
    _twins(tmp_path / "x")
    page = client(tmp_path)
    history = get(page, "runs/x/prompt", uid="1")
    assert (history["prompt"], [visit["eval"] for visit in history["visits"]]) == ("question 1", [False, True])
    message = get(page, "runs/x/prompt", 404, uid="0")["error"]["message"]
    signs = sorted(p["prompt_hash"] for p in get(page, "runs/x/prompts")["prompts"] if p["uid"] == "0")
    assert message == (
        "uid: got '0', which 3 prompts of x have, with different texts: choose one in the list of prompts, or add "
        f"prompt_hash, one of {', '.join(signs)}"
    )
    message = get(page, "runs/x/prompt", 404, uid="1", prompt_hash="never")["error"]["message"]
    assert message == "uid: got '1', which is none of the prompts of x with a text of the hash 'never'"


def test_long_prompts_are_told_apart_by_all_of_their_text(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        write_step(run, 1, *(group("0", end, prompt="long " * 2000 + end) for end in ("one", "two")))
    page = client(tmp_path)
    signs = {p["prompt_hash"] for p in get(page, "runs/x/prompts")["prompts"]}
    rows = get(page, "runs/x/rollouts")["rows"]
    assert len(signs) == 2
    assert {row["prompt_hash"] for row in rows} == signs
    assert {get(page, "runs/x/prompt", uid="0", prompt_hash=row["prompt_hash"])["visits"][0]["rows"][0]["completion"]
            for row in rows} == {"one", "two"}  # fmt: skip


def test_tables_without_texts_of_prompts_have_prompts_by_uid(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", steps=2)
    for path in (folder / "rollouts").iterdir():
        table = pq.read_table(path)
        at = table.column_names.index("prompt")
        pq.write_table(table.set_column(at, "prompt", pa.nulls(len(table), pa.string())), path)
    page = client(tmp_path)
    found = get(page, "runs/x/prompts", sort="uid")["prompts"]
    assert [(p["uid"], p["times"]) for p in found] == [("a", 2), ("b", 2), ("held", 2)]
    assert [p["prompt_hash"] == "" for p in found] == [True, True, False]
    history = get(page, "runs/x/prompt", uid="a")
    assert (history["prompt_hash"], history["prompt"], history["total"]) == ("", "", 2)
    assert get(page, "runs/x/groups", step=1)["groups"][0]["prompt_hash"] == ""


def test_a_prompt_that_a_later_step_has_too_is_found_while_the_run_trains(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config(CONFIG.format(steps=2, seed=0, lr=1e-3))
        write_step(run, 1, group("0", "no", "yes", prompt="trained on"))
        page = client(tmp_path)
        assert get(page, "runs/x/prompts")["total"] == 1
        assert get(page, "runs/x/prompt", uid="0")["total"] == 1
        write_step(run, 2, group("0", "no", "yes", prompt="trained on"), group("0", "x", prompt="new"))
        assert [(p["prompt"], p["times"]) for p in get(page, "runs/x/prompts")["prompts"]] == [
            ("trained on", 2), ("new", 1)
        ]  # fmt: skip
        # A resume that does the step again, with other data.
        run.rewind(1)
        write_step(run, 2, group("0", "no", "yes", prompt="other"))
        assert {p["prompt"]: p["times"] for p in get(page, "runs/x/prompts")["prompts"]} == {
            "trained on": 1,
            "other": 1,
        }
        assert len({p["prompt_hash"] for p in get(page, "runs/x/prompts")["prompts"]}) == 2
