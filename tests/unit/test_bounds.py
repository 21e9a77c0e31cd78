"""What others' code may take of this process, and what settings may ask for, has an end."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import signal
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from trew.config import limits, schema
from trew.data.files import read_rows
from trew.errors import DataError, ModelError
from trew.models import loading
from trew.rollout import Renderer
from trew.types import Prompt
from trew.utils import bounds
from trew.utils.bounds import Overrun, bounded


def state() -> tuple:
    return (
        signal.getsignal(signal.SIGVTALRM),
        signal.getitimer(signal.ITIMER_VIRTUAL),
        resource.getrlimit(resource.RLIMIT_AS),
    )


def test_what_is_quick_is_left_alone_and_nothing_stays():
    before = state()
    with bounded():
        assert sum(range(1000)) == 499500
    assert state() == before


def test_a_loop_without_end_is_ended():
    before = state()
    with pytest.raises(Overrun, match=r"not done after 0\.1 s of processor time"), bounded(seconds=0.1):
        sum(1 for _ in iter(int, 1))
    nine = 9
    with pytest.raises(Overrun), bounded(seconds=0.1):
        nine ** (nine**nine)  # one operation of the interpreter
    assert state() == before


def test_code_that_handles_every_error_is_ended_too():
    def work() -> None:
        with contextlib.suppress(Exception):
            sum(1 for _ in iter(int, 1))
        sum(1 for _ in iter(int, 1))

    with pytest.raises(Overrun), bounded(seconds=0.1):
        work()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not say how large a process is")
def test_memory_without_end_is_ended():
    before = state()
    with pytest.raises(Overrun, match="needs more than 64 MiB"), bounded(memory=64 << 20):
        bytearray(1 << 40)  # more than what the process has freed and kept
    assert state() == before


def test_an_error_inside_stays_what_it_is():
    with pytest.raises(KeyError), bounded():
        raise KeyError("x")


def test_outside_the_main_thread_it_runs_all_the_same():
    done = []

    def work() -> None:
        with bounded():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]


def test_threads_take_turns_and_leave_the_process_without_a_limit():
    """Otherwise the second takes the first one's limit for the process's, and restores it for good."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    inside, leave = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def work(number: int) -> None:
        with bounded():
            inside[number].set()
            leave[number].wait(30)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    threads[0].start()
    inside[0].wait(30)
    threads[1].start()
    assert not inside[1].wait(0.2)
    for thread, event in zip(threads, leave, strict=True):
        event.set()
        thread.join()
    assert resource.getrlimit(resource.RLIMIT_AS) == before


# ---- chat templates

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3
ENDLESS = {
    "loops": LOOP,
    "power": "{{ 9 ** (9 ** 9) }}",
    "text": "{{ 'x' * 99999999999 }}",
    "growth": "{% set n = namespace(t='xxxxxxxx') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
}


@pytest.fixture(autouse=True)
def brief(monkeypatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("m") / "m"))


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_without_end_is_refused_when_it_is_loaded(kind, model, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text(ENDLESS[kind] + "{{ messages }}")
    with pytest.raises(ModelError, match=r"its chat template does not come to an end .* set chat_template to 'plain'"):
        loading.load_tokenizer(model, chat_template=str(file))


def test_a_template_that_has_no_end_for_some_prompts_stops_the_check_at_the_first(model):
    tokenizer = loading.load_tokenizer(model)
    tokenizer.chat_template = "{% if 'long' in messages[0].content %}" + LOOP + "{% endif %}" + tiny.CHATML
    prompts = [
        Prompt(uid=f"p{i}", messages=({"role": "user", "content": text},))
        for i, text in enumerate(["a", "long", "long"])
    ]
    (problem,) = Renderer(tokenizer).check(prompts)
    assert problem.startswith("prompt 'p1': the chat template does not come to an end: it is not done after")


def test_a_template_that_refuses_one_word_is_loaded(model, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{% if messages | length < 2 %}{{ raise_exception('two') }}{% endif %}{{ messages }}")
    assert loading.load_tokenizer(model, chat_template=str(file)).chat_template == file.read_text()


# ---- data files


@pytest.mark.parametrize("name", ["f.jsonl", "f.parquet", "f.jsonl.gz"])
def test_data_that_are_no_file_are_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="is not a regular file"):
        read_rows(tmp_path / name)
    (tmp_path / f"link-{name}").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="is not a regular file"):
        read_rows(tmp_path / f"link-{name}")


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_and_a_file_have_a_longest(packed, tmp_path, monkeypatch):
    path = tmp_path / ("f.jsonl.gz" if packed else "f.jsonl")
    text = b'{"prompt": "a"}\n{"prompt": "' + b"x" * 5000 + b'"}\n'
    path.write_bytes(gzip.compress(text) if packed else text)
    assert len(read_rows(path)) == 2
    monkeypatch.setattr(limits, "LINE_BYTES", 1000)
    with pytest.raises(DataError, match=r"line 2: has 5,0\d\d bytes, accepts at most 1,000"):
        read_rows(path)
    monkeypatch.setattr(limits, "FILE_BYTES", 4000)
    with pytest.raises(DataError, match="has more than 4,000 bytes of text"):
        read_rows(path)


@pytest.mark.parametrize("number", ["", "{}"], ids=["one value", "many values"])
def test_a_parquet_file_that_is_small_on_the_disk_cannot_fill_the_memory(number, tmp_path, monkeypatch):
    """A page may hold a value once and refer to it from every row: the file then says that it unpacks to little."""
    rows = [number.format(i) + "x" * 2000 for i in range(4000)]
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"prompt": rows}), path, compression="zstd")
    assert path.stat().st_size < 100_000
    said = pq.read_metadata(path).row_group(0).total_byte_size
    assert (said < 1_000_000) == (len(set(rows)) == 1)
    assert [row.values["prompt"] for row in read_rows(path)] == rows
    monkeypatch.setattr(limits, "FILE_BYTES", 1_000_000)
    with pytest.raises(DataError, match=r"unpacks to .* bytes, accepts at most 1,000,000; split it") as caught:
        read_rows(path)
    assert str(path) in str(caught.value)


def test_a_parquet_file_without_row_groups_has_no_rows(tmp_path):
    path = tmp_path / "f.parquet"
    pq.ParquetWriter(path, pa.schema([("text", pa.string())])).close()
    with pytest.raises(DataError, match="has no rows"):
        read_rows(path)


def test_a_parquet_file_has_a_largest_number_of_rows(tmp_path, monkeypatch):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"prompt": pa.nulls(1001)}), path)
    assert len(read_rows(path)) == 1001
    monkeypatch.setattr(limits, "FILE_ROWS", 1000)
    with pytest.raises(DataError, match="has 1,001 rows, accepts at most 1,000; split it"):
        read_rows(path)


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_has_a_longest(chat, tmp_path, monkeypatch):
    from trew.config import DataConfig
    from trew.data.load import load_prompts

    monkeypatch.setattr(limits, "PROMPT_CHARACTERS", 100)
    texts = ["a", "b" * 100, "c" * 101]
    prompts = [[{"role": "user", "content": t}] for t in texts] if chat else texts
    path = tmp_path / "f.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    with pytest.raises(DataError, match=r"line 3: is a prompt of 101 characters, accepts at most 100") as caught:
        load_prompts(DataConfig(task="prompts", train=str(path)))
    assert "line 2" not in str(caught.value)


# ---- settings


def test_every_limit_is_of_a_setting_that_there_is():
    from settings_help import keys
    from trew.iterate.settings import Iterate
    from trew.reward_training.settings import RewardTraining

    known = {*keys(schema.Config), *(f"rewards.{k}" for k in keys(schema.RewardConfig)), *keys(RewardTraining)}
    known |= {f"iterate.{k}" for k in keys(Iterate)} | {"data.args.size"}
    assert set(limits.MOST) <= known
