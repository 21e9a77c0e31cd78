"""`trew view` over folders that are hostile, broken, unfinished or changing."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from report_help import HOSTILE
from rollouts_help import rollout
from trew.errors import DataError
from trew.runs import RunFolder
from trew.runs.report.token_texts import Pieces, pieces
from trew.runs.rollouts import schema
from trew.types import Group, ScoredGroup
from trew.view.library import Library
from view_help import client, get, group, make_run, write_eval, write_step

ALL = ("metrics", "summary", "config", "steps", "rollouts", "prompts", "prompts?text=x", "rollouts?text=x")


def everything(page, id="x"):
    """Asks every route of a run; what they answered."""
    return {path: get(page, f"runs/{id}/{path}") for path in ALL} | {"runs": get(page, "runs")}


def open_run(folder):
    run = RunFolder.open(folder)
    run.write_config("model = 'none'\nsteps = 3\n[objective]\npreset = 'grpo'\n")
    return run


LONG = "x" * 100_000


@pytest.mark.parametrize("text", [*HOSTILE, "\ud800", "a\r\nb", LONG, "", "null", "]]>\u2028</script>"], ids=range(22))
def test_what_models_write_is_data(text, tmp_path):
    kept = text.encode("utf-8", "replace").decode()
    with open_run(tmp_path / "x") as run:
        write_step(
            run, 1, group(f"u{text[:50]}", text, text, prompt=text, answer=text), **{f"monitor/{text[:50]}": 1.0}
        )
    page = client(tmp_path)
    found = page.get("/api/runs/x/rollouts")
    assert found.headers["content-type"] == "application/json"
    row = json.loads(found.content.decode("utf-8"))["rows"][0]
    assert row["completion"] == kept[:2000]
    assert row["prompt"] == kept[:4000]
    assert (row.get("cut", False), row.get("prompt_cut", False)) == (len(text) > 2000, len(text) > 4000)
    whole = get(page, "runs/x/completion", step=1, group=0, sample=0)
    assert whole["row"]["completion"] == kept
    everything(page)


@pytest.mark.parametrize("damage", ["empty", "half", "zeros", "text", "folder", "fifo", "link", "other columns"])
def test_a_table_that_cannot_be_read_is_left_out_and_named(damage, tmp_path):
    folder = make_run(tmp_path / "x")
    path = folder / "rollouts" / "000002.parquet"
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "fifo":
        os.mkfifo(path)
    elif damage == "link":
        (tmp_path / "elsewhere.parquet").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere.parquet")
    elif damage == "other columns":
        pq.write_table(pa.table({"step": [1], "uid": [3.5]}), path)
    else:
        path.write_bytes(
            {"empty": b"", "half": data[: len(data) // 2], "zeros": bytes(len(data)), "text": b"hello"}[damage]
        )
    page = client(tmp_path)
    found = everything(page)
    assert found["rollouts"]["total"] == 12
    assert [s["step"] for s in found["steps"]["steps"]] == [1, 3]
    assert len(found["steps"]["unreadable"]) == 1
    assert "000002.parquet" in found["steps"]["unreadable"][0]
    get(page, "runs/x/groups", 404, step=2)
    get(page, "runs/x/completion", 404, step=2, group=0, sample=0)


@pytest.mark.parametrize("lacks", [["group", "sampled"], ["uid"]])
def test_a_table_of_an_older_version_is_called_so(lacks, tmp_path):
    path = make_run(tmp_path / "x") / "rollouts" / "000002.parquet"
    pq.write_table(pq.read_table(path).drop_columns(lacks), path)
    [said] = get(client(tmp_path), "runs/x/steps")["unreadable"]
    assert ("older version of trew" in said) == (lacks != ["uid"])
    assert ("is not a table of rollouts" in said) == (lacks == ["uid"])


def test_a_table_is_read_once_it_is_whole(tmp_path):
    folder = make_run(tmp_path / "x")
    path = folder / "rollouts" / "000002.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:1000])
    page = client(tmp_path)
    assert get(page, "runs/x/rollouts")["total"] == 12
    with path.open("ab") as file:  # in place, as a copying program does
        file.write(data[1000:])
    assert get(page, "runs/x/rollouts")["total"] == 17


def test_bytes_that_are_no_text_are_shown_all_the_same(tmp_path):
    """Another writer's table: bytes that are not UTF-8, nulls everywhere, numbers that contradict each other."""
    (tmp_path / "x" / "rollouts").mkdir(parents=True)
    (tmp_path / "x" / "metrics.jsonl").write_text('{"step": 1, "reward": 0}\n')
    row = {"step": 9, "group": 0, "sample": 0, "token_ids": [1, 2], "sampled": [True], "advantages": [1.0],
           "score": 0.5, "turns": [{"context": 5, "sampled": 900, "messages": "[[[", "calls": None}]}  # fmt: skip
    table = pa.Table.from_pylist([row, {"uid": "u"}, {}], schema=schema())
    for name in ("completion", "prompt", "uid", "columns"):
        bad = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 4, 4, 4], np.int32)), pa.py_buffer(b"caf\xe9"))
        table = table.set_column(table.schema.get_field_index(name), schema().field(name), bad)
    pq.write_table(table, tmp_path / "x" / "rollouts" / "000001.parquet")
    page = client(tmp_path)
    found = everything(page)
    assert found["rollouts"]["rows"][0]["completion"] == "caf\ufffd"
    completion = get(page, "runs/x/completion", step=1, group=0, sample=0)
    assert completion["turns"] == []
    assert completion["tokens"][1]["sampled"] is False


@pytest.mark.parametrize("bad", ["{", "[" * 100_000, '{"step": 1e400}', '{"step": -1}', "null", "\xff\xfe", '{"a": 1}'])
def test_lines_that_are_no_rows_are_passed_over(bad, tmp_path):
    folder = make_run(tmp_path / "x")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], bad.encode("latin-1"), *lines[2:], b""]))
    assert everything(client(tmp_path))["metrics"]["columns"]["reward"] == [0.1, 0.2, 0.3]


def test_a_partial_last_line_waits_for_its_rest(tmp_path):
    folder = make_run(tmp_path / "x", finished=False)
    page = client(tmp_path)
    with (folder / "metrics.jsonl").open("ab") as file:
        for part, steps in ((b'{"step": 4, "rew', 3), (b'ard": 7.0}', 3), (b"\n", 4)):
            file.write(part)
            file.flush()
            assert len(get(page, "runs/x/metrics")["steps"]) == steps
    assert get(page, "runs/x/metrics", since=3)["columns"]["reward"] == [7.0]


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "events.log"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"{" * 100_000, b"[1]", b'x = "\x00'])
def test_other_files_may_be_anything(name, content, tmp_path):
    folder = make_run(tmp_path / "x")
    (folder / name).write_bytes(content)
    assert everything(client(tmp_path))["rollouts"]["total"] == 17


def test_links_out_of_a_run_are_not_followed(tmp_path):
    secret = make_run(tmp_path / "secret")
    folder = tmp_path / "shown" / "x"
    make_run(folder)
    for name in ("config.toml", "summary.json", "metrics.jsonl"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret / name)
    for name in ("rollouts", "evals", "checkpoints"):
        shutil.rmtree(folder / name)
        (folder / name).symlink_to(secret / name)
    (tmp_path / "shown" / "deeper").mkdir()
    (tmp_path / "shown" / "deeper" / "linked").symlink_to(secret)
    page = client(tmp_path / "shown")
    assert [run["id"] for run in get(page, "runs")["runs"]] == ["x"]
    found = everything(page)
    assert found["rollouts"]["total"] == 0
    assert found["config"] == {"text": "", "values": {}}
    assert found["metrics"]["steps"] == []
    assert found["summary"]["summary"] == {}


@pytest.mark.parametrize("path", ["..", "../secret", "..%2Fsecret", "%2e%2e", "x/../../secret", ".", "x%00"])
def test_a_run_is_never_a_path(path, tmp_path):
    make_run(tmp_path / "secret")
    make_run(tmp_path / "shown" / "x")
    page = client(tmp_path / "shown")
    found = page.get(f"/api/runs/{path}/metrics")
    assert found.status_code in (401, 404)
    assert "reward" not in found.text


def test_a_run_that_disappears_is_named_and_one_that_comes_back_is_shown(tmp_path):
    make_run(tmp_path / "x")
    make_run(tmp_path / "y")
    page = client(tmp_path)
    everything(page)
    shutil.rmtree(tmp_path / "x")
    assert [run["id"] for run in get(page, "runs")["runs"]] == ["y"]
    for path in (*ALL, "completion?step=1&group=0&sample=0", "groups?step=1"):
        assert get(page, f"runs/x/{path}", 404)["error"]["message"].startswith("x: the folder of this run is gone")
    make_run(tmp_path / "x", steps=2)
    assert get(page, "runs/x/metrics")["steps"] == [1, 2]
    assert get(page, "runs/x/rollouts")["total"] == 12


def test_steps_that_a_resume_took_back_are_gone(tmp_path):
    folder = make_run(tmp_path / "x")
    page = client(tmp_path)
    before = everything(page)
    with RunFolder.open(folder, resume=True) as run:
        run.rewind(1)
        taken = everything(page)
        assert taken["metrics"]["steps"] == [1]
        assert taken["rollouts"]["total"] == 6
        assert taken["summary"]["summary"] == {}
        assert taken["metrics"]["revision"] != before["metrics"]["revision"]
        write_step(run, 2, group("other", "new"), reward=9.0)
        again = everything(page)
    assert again["metrics"]["columns"]["reward"] == [0.1, 9.0]
    assert {row["uid"] for row in again["rollouts"]["rows"] if row["step"] == 2} == {"other"}
    assert get(page, "runs/x/prompts", sort="uid")["prompts"][1]["last"]["step"] == 1


def test_metrics_that_were_replaced_by_others_of_the_same_size_are_read_anew(tmp_path):
    folder = make_run(tmp_path / "x")
    page = client(tmp_path)
    get(page, "runs/x/metrics")
    data = (folder / "metrics.jsonl").read_bytes()
    with (folder / "metrics.jsonl").open("r+b") as file:  # in place: the same inode
        file.write(data.replace(b'"reward": 0.', b'"reward": 7.') + b'{"step": 4, "reward": 1.0}\n')
    assert get(page, "runs/x/metrics")["columns"]["reward"] == [7.1, 7.2, 7.3, 1.0]


def test_every_answer_is_right_while_a_run_writes(tmp_path):
    """Another thread writes steps as a run does; no request fails, and no step that was seen is lost."""
    steps = 40
    with open_run(tmp_path / "x") as run:
        write_step(run, 1, group("a", "one", "two"))
        page, ended = client(tmp_path), threading.Event()

        def write():
            for step in range(2, steps + 1):
                write_step(run, step, group("a", "one", "two"))
                if step % 10 == 0:
                    write_eval(run, step, group("h", "x"))
            ended.set()

        writing = threading.Thread(target=write)
        writing.start()
        seen, revisions = 1, set()
        while not ended.is_set() or seen < steps:
            found = everything(page)
            assert len(found["metrics"]["steps"]) >= seen
            seen = len(found["metrics"]["steps"])
            assert len(found["steps"]["steps"]) >= seen  # tables are written before rows
            revisions.add(found["metrics"]["revision"])
            time.sleep(0.001)
        writing.join()
    assert len(revisions) > 1
    assert everything(page)["rollouts"]["total"] == 2 * steps + 4


def test_an_unchanged_run_keeps_its_revision(tmp_path):
    make_run(tmp_path / "x")
    page = client(tmp_path)
    assert get(page, "runs") == get(page, "runs")
    # Of a server that was started again everything is the same but how often its rows were read from the beginning,
    # which a page that stayed open has to ask for anew.
    [(here, there)] = zip(get(page, "runs")["runs"], get(client(tmp_path / "x"), "runs")["runs"], strict=True)
    assert {key for key in here | there if here.get(key) != there.get(key)} <= {"read", "revision"}


@pytest.mark.parametrize(("make", "message"), [(False, "no such folder"), (True, "no run is there")])
def test_nothing_to_show_is_said(make, message, tmp_path):
    if make:
        (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=message):
        Library([tmp_path / "none"])


# ------------------------------------------------------------------------------------------------------------ tokenizer


def with_tokenizer(folder, *, content=None):
    """The export of a run has a tokenizer of one token per byte; ``content`` replaces it."""
    (folder / "final").mkdir()
    content = tiny.tokenizer().backend_tokenizer.to_str() if content is None else content
    (folder / "final" / "tokenizer.json").write_text(content)


def test_pieces_join_to_the_text_however_it_is_split(tmp_path):
    text = "né 漢\U0001f600!"
    scored = group("a", text)
    answer = rollout(tiny.tokenizer().encode(text), text=text)
    with open_run(tmp_path / "x") as run:
        write_step(run, 1, ScoredGroup(Group(scored.group.prompt, (answer,)), scored.scores))
    with_tokenizer(tmp_path / "x")
    found = get(client(tmp_path), "runs/x/completion", step=1, group=0, sample=0)
    texts = [token["text"] for token in found["tokens"]]
    assert "".join(texts) == text
    assert texts[:3] == ["n", "", "é"]  # the bytes of a character are with the last of them
    assert found["pieces"]["why"] == ""


def test_bytes_that_never_become_a_character_are_not_lost():
    tokenizer = tiny.tokenizer().backend_tokenizer
    a, b, broken, begun = (tokenizer.token_to_id(symbol) for symbol in ("a", "b", "ÿ", "Ã"))  # bytes ff and c3
    found = pieces(tokenizer, [a, broken, b, begun], "a\ufffdb\ufffd")
    assert "".join(found.texts) == "a\ufffdb\ufffd"
    assert not found.why
    end = tokenizer.token_to_id("<|im_end|>")
    assert pieces(tokenizer, [a, end], "a") == Pieces(["a", "<|im_end|>"], [False, True])
    assert "do not join" in pieces(tokenizer, [a], "other").why


@pytest.mark.parametrize("content", ["", "{}", "null", "[" * 100_000, '{"model": {"type": "BPE"}}', "\x00"])
def test_a_tokenizer_that_is_none_leaves_ids(content, tmp_path):
    folder = make_run(tmp_path / "x", steps=1)
    with_tokenizer(folder, content=content)
    found = get(client(tmp_path), "runs/x/completion", step=1, group=0, sample=0)
    assert {token["text"] for token in found["tokens"]} == {None}
    assert found["pieces"]["why"]


def test_token_ids_do_not_bring_masked_secrets_back(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-3f9a0c77ab3d42")
    with open_run(tmp_path / "x") as run:
        write_step(run, 1, group("a", "my key is sk-3f9a0c77ab3d42", "fine"))
    with_tokenizer(tmp_path / "x")
    page = client(tmp_path)
    found = get(page, "runs/x/completion", step=1, group=0, sample=0)
    assert found["row"]["completion"] == "my key is [redacted]"
    assert {token["text"] for token in found["tokens"]} == {None}
    assert "secrets" in found["pieces"]["why"]
    assert "3f9a0c77" not in page.get("/api/runs/x/rollouts").text
    assert get(page, "runs/x/completion", step=1, group=0, sample=1)["tokens"][0]["text"] is not None


def test_no_model_is_downloaded_for_a_tokenizer(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("opened a connection")

    monkeypatch.setattr("socket.socket.connect", refuse)
    folder = make_run(tmp_path / "x", steps=1)
    config = (folder / "config.toml").read_text()
    for name in ("someone/some-model", "/nowhere", "bad\\u0000name", "../..", "http://127.0.0.1:1/x"):
        (folder / "config.toml").write_text(config.replace('"none"', f'"{name}"'))
        assert get(client(tmp_path), "runs/x/completion", step=1, group=0, sample=0)["tokens"][0]["text"] is None
