"""Which rows are trained on and which are held out, for files, folders and hub sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trew.config import DataConfig
from trew.data import Dataset, load_eval, load_task
from trew.data.files import write_rows
from trew.data.hub import HubId, parse_id
from trew.data.split import fingerprint
from trew.errors import DataError
from trew.types import Prompt


def rows(name: str, n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{name} question {i}", "gold": str(i)} for i in range(n)]


def load(source: Path | str, *, size: int = 3, seed: int = 0, **config: Any) -> Dataset:
    return load_task(DataConfig(train=str(source), **config), eval_size=size, seed=seed)


def texts(prompts: Any) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_folder_gives_train_and_the_first_test_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", rows("train", 5))
    write_rows(tmp_path / "test.jsonl", rows("test", 9))
    write_rows(tmp_path / "validation.jsonl", rows("validation", 4))
    data = load(tmp_path)
    assert texts(data.train) == [f"train question {i}" for i in range(5)]
    assert texts(data.eval) == [f"test question {i}" for i in range(3)]
    assert [p.uid for p in data.eval] == ["test:0", "test:1", "test:2"]
    assert data.train[4].columns == {"gold": "4"}
    assert data.default_rewards == ()
    assert data.notes == [f"evaluation: the first 3 of 9 rows of {tmp_path / 'test.jsonl'}"]


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_validation_stands_in_for_test(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / "train.parquet", rows("train", 5))
    write_rows(tmp_path / f"{name}.parquet", rows("v", 4))
    assert texts(load(tmp_path).eval) == [f"v question {i}" for i in range(3)]


def test_shards_are_joined_in_order(tmp_path: Path) -> None:
    for i in (1, 0):
        write_rows(tmp_path / f"train-0000{i}-of-00002.parquet", rows(f"shard {i}", 2))
    write_rows(tmp_path / "test-00000-of-00001.parquet", rows("test", 3))
    data = load(tmp_path)
    assert texts(data.train) == [f"shard {i} question {j}" for i in (0, 1) for j in (0, 1)]
    assert [p.uid for p in data.train] == ["train:0", "train:1", "train:2", "train:3"]


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "train-00000-of-00003.parquet", rows("a", 2))
    write_rows(tmp_path / "train-00002-of-00003.parquet", rows("a", 2))
    with pytest.raises(DataError, match="2 of 3 files"):
        load(tmp_path)


def test_shards_with_a_fingerprint_behind_their_numbers_are_shards_too(tmp_path: Path) -> None:
    first, second = (f"train-0000{i}-of-00002-a09b74b3ef9c3b5{i}.parquet" for i in (0, 1))
    write_rows(tmp_path / "test.parquet", rows("test", 3))
    write_rows(tmp_path / first, rows("shard 0", 2))
    with pytest.raises(DataError, match="incomplete: 1 of 2 files"):  # half a split is not the whole of it
        load(tmp_path)
    write_rows(tmp_path / second, rows("shard 1", 2))
    assert texts(load(tmp_path).train) == [f"shard {i} question {j}" for i in (0, 1) for j in (0, 1)]


def test_two_candidates_for_one_split_are_an_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.parquet", rows("a", 2))
    write_rows(tmp_path / "train.jsonl", rows("a", 2))
    with pytest.raises(DataError, match=r"train\.jsonl, train\.parquet"):
        load(tmp_path)


def test_a_folder_without_train_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    write_rows(tmp_path / "trainer.jsonl", rows("a", 2))
    with pytest.raises(DataError, match=r"train\.jsonl.* main/, trainer\.jsonl"):
        load(tmp_path)


def test_a_train_file_finds_its_sibling(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", rows("train", 5))
    write_rows(tmp_path / "test.jsonl", rows("test", 5))
    assert texts(load(tmp_path / "train.jsonl").eval) == [f"test question {i}" for i in range(3)]


def test_an_explicit_evaluation_file_wins(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", rows("train", 5))
    write_rows(tmp_path / "test.jsonl", rows("test", 5))
    write_rows(tmp_path / "mine.jsonl", rows("mine", 2))
    data = load(tmp_path, eval=str(tmp_path / "mine.jsonl"))
    assert texts(data.eval) == ["mine question 0", "mine question 1"]
    assert "eval.size is 3, but" in data.notes[0]
    assert "only 2 rows" in data.notes[0]


def test_without_a_test_split_rows_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write_rows(path, rows("q", 20))
    one, again, other = load(path, size=8), load(path, size=8), load(path, size=8, seed=1)
    assert len(one.eval) == 8
    assert sorted(texts(one.train) + texts(one.eval)) == sorted(r["prompt"] for r in rows("q", 20))
    assert (one.eval, one.fingerprint) == (again.eval, again.fingerprint)
    assert one.eval != other.eval
    assert one.fingerprint != other.fingerprint
    assert "8 rows held out" in one.notes[0]


def test_holding_out_more_than_half_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write_rows(path, rows("q", 20))
    with pytest.raises(DataError, match=r"20 rows; .*eval\.size .*10"):
        load(path, size=11)


def test_held_out_prompts_do_not_stay_in_training_under_another_row(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write_rows(path, [*rows("q", 10), *rows("q", 10)])
    data = load(path, size=4)
    assert len(set(texts(data.eval))) == 4
    assert not set(texts(data.eval)) & set(texts(data.train))
    assert len(data.train) == 12
    assert "4 repeats of them left out" in data.notes[0]
    assert "6 of 12 training prompts are repeats of others" in data.notes


def test_a_countdown_with_its_numbers_in_another_order_is_the_same_problem(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [{"nums": [3, 2, 1], "target": 6}, {"nums": [1, 2, 3], "target": 7}])
    write_rows(tmp_path / "test.jsonl", [{"nums": [1, 3, 2], "target": 6}])
    assert any(
        "1 of 1 evaluation prompts are in the training" in note for note in load(tmp_path, task="countdown").notes
    )
    rows = [{"nums": nums, "target": t} for t in range(6, 14) for nums in ([1, 2, 30], [30, 1, 2], [2, 30, 1])]
    write_rows(tmp_path / "rows.jsonl", rows)
    data = load(tmp_path / "rows.jsonl", task="countdown")
    held = {prompt.columns["target"] for prompt in data.eval}
    assert len(held) == 3
    assert not held & {prompt.columns["target"] for prompt in data.train}


def test_overlap_is_counted_ignoring_white_space(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", rows("q", 5))
    write_rows(tmp_path / "test.jsonl", [{"prompt": " q  question 1\n"}, {"prompt": "new"}, {"prompt": "q question 2"}])
    notes = load(tmp_path).notes
    assert any(note.startswith("2 of 3 evaluation prompts are in the training data") for note in notes)


def test_fingerprint_sees_any_change_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    prints = set()
    for gold in ("1", "2", 1, None):
        write_rows(path, [*rows("q", 10), {"prompt": "x", "gold": gold}])
        prints.add(load(path).fingerprint)
    assert len(prints) == 4


def test_fingerprint_is_of_what_is_in_an_image_and_in_a_long_array() -> None:
    class Image:
        def __init__(self, content: bytes) -> None:
            self.content = content

        def tobytes(self) -> bytes:
            return self.content

    def of(value: Any) -> str:
        return fingerprint([Prompt("a", text="?", columns={"given": value})])

    assert of(Image(b"1")) == of(Image(b"1")) != of(Image(b"2"))
    zeros, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1
    assert of(zeros) == of(zeros.copy()) != of(other)


def test_evaluation_alone_gives_the_prompts_that_training_holds_out(tmp_path: Path) -> None:
    write_rows(tmp_path / "mine.jsonl", rows("mine", 20))
    write_rows(tmp_path / "set" / "train.jsonl", rows("train", 5))
    write_rows(tmp_path / "set" / "test.jsonl", rows("test", 5))
    for config in (
        DataConfig(train=str(tmp_path / "mine.jsonl")),
        DataConfig(train=str(tmp_path / "set")),
        DataConfig(train=str(tmp_path / "set" / "train.jsonl")),
        DataConfig(train=str(tmp_path / "set"), eval=str(tmp_path / "mine.jsonl")),
        DataConfig(task="arithmetic"),
        DataConfig(task="countdown", args={"size": 5}),
    ):
        whole = load_task(config, eval_size=4, seed=3)
        prompts, rewards, _ = load_eval(config, size=4, seed=3)
        assert prompts == whole.eval
        assert rewards == whole.default_rewards


def test_a_file_named_for_evaluation_is_taken_as_it_is(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.jsonl")
    write_rows(tmp_path / "mine.jsonl", rows("mine", 3))
    prompts, _, notes = load_eval(DataConfig(train=path, eval=path), size=3, seed=0)
    assert texts(prompts) == [f"mine question {i}" for i in range(3)]
    assert notes == [f"evaluation: the first 3 of 3 rows of {path}"]


# --------------------------------------------------------------------------------------------------------------------
# The hub, with the package replaced by one that serves from memory


def fake_hub(sets: dict[str, list[dict[str, Any]]], calls: list[Any]) -> ModuleType:
    def load_dataset(path: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        calls.append((path, config, split))
        return sets[split]

    module: Any = SimpleNamespace(load_dataset=load_dataset, get_dataset_split_names=lambda path, config: list(sets))
    return module


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("openai/gsm8k", HubId("openai/gsm8k")),
        ("openai/gsm8k:main", HubId("openai/gsm8k", "main")),
        ("openai/gsm8k:main:test", HubId("openai/gsm8k", "main", "test")),
        ("owner/na.me-1::dev", HubId("owner/na.me-1", "", "dev")),
        ("gsm8k", None),
        ("../gsm8k", None),
        ("/abs/path", None),
        ("a/b/c", None),
        ("a/b:c:d:e", None),
        ("a\\b", None),
    ],
)
def test_hub_ids(source: str, expected: HubId | None) -> None:
    assert parse_id(source) == expected


def test_hub_set_with_train_and_test(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "datasets", fake_hub({"train": rows("a", 5), "test": rows("b", 4)}, calls))
    data = load("owner/name:config")
    assert calls == [("owner/name", "config", "train"), ("owner/name", "config", "test")]
    assert texts(data.eval) == [f"b question {i}" for i in range(3)]
    assert len(data.train) == 5


def test_gsm8k_comes_from_the_hub_when_no_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    solved = [{"question": f"How many? {i}", "answer": f"So\n#### {i}"} for i in range(5)]
    asked = [{"question": f"What? {i}", "answer": f"So\n#### {i}"} for i in range(5)]
    monkeypatch.setitem(sys.modules, "datasets", fake_hub({"train": solved, "test": asked}, calls))
    data = load("", task="gsm8k")
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert [p.columns["gold"] for p in data.eval] == ["0", "1", "2"]


def test_a_named_split_has_no_partner(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {"train_sft": rows("a", 8), "test": rows("b", 4)}
    monkeypatch.setitem(sys.modules, "datasets", fake_hub(sets, []))
    assert {text[0] for text in texts(load("owner/name::train_sft").eval)} == {"a"}
    with pytest.raises(DataError, match=r"train_sft, test.* owner/name::train_sft"):
        load("owner/name")
    with pytest.raises(DataError, match=r"'tset' .did you mean 'test'"):
        load("owner/name::train_sft", eval="owner/name::tset")


def test_hub_failures_become_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nTraceback and so on")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(get_dataset_split_names=offline))
    with pytest.raises(DataError) as caught:
        load("owner/name")
    assert "Couldn't reach the Hub" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_that_cannot_be_decoded_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def undecoded() -> Any:
        yield {"prompt": "a"}
        raise ImportError("To support decoding images, please install 'Pillow'.")

    hub = SimpleNamespace(load_dataset=lambda *_, **__: undecoded(), get_dataset_split_names=lambda *_: ["train"])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(DataError, match="owner/name: cannot be read from the hub: To support decoding images"):
        load("owner/name")


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'datasets>="):
        load("owner/name")


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a model may."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rows(tmp_path / "d" / "train.jsonl", rows("train", 5))
    write_rows(tmp_path / "d" / "test.jsonl", rows("test", 3))
    for source in ("~/d", "~/d/train.jsonl"):
        data = load(source)
        assert (len(data.train), texts(data.eval)[0]) == (5, "test question 0")
    assert len(load("~/d/train.jsonl", eval="~/d/train.jsonl").eval) == 3


def test_an_existing_path_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "train.jsonl").write_text("\n".join(map(json.dumps, rows("local", 6))))
    assert len(load("owner/name").eval) == 3
