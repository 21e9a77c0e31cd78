"""Properties of data: nothing is lost on the way from rows to prompts, and every draw is what it says it is."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trew.config import DataConfig
from trew.data import PromptStream, load_task, truncate_left
from trew.data.draws import Draws, Permutation
from trew.data.files import read_rows, write_rows
from trew.data.rows import Split
from trew.data.tasks import Prompts
from trew.data.tasks.arithmetic import share
from trew.data.trl import to_rows as to_trl
from trew.data.verl import restored
from trew.data.verl import to_rows as to_verl
from trew.errors import DataError
from trew.types import Prompt

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": TEXT}), max_size=3
).map(lambda turns: [*turns, {"role": "user", "content": "?"}])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NAMES = TEXT.filter(lambda name: name not in ("prompt", "id", "uid", "reward_model"))
PLAIN = TEXT.filter(lambda text: not text.lstrip().startswith("["))


@given(
    prompts=st.lists(PLAIN | MESSAGES, min_size=1, max_size=5),
    columns=st.dictionaries(NAMES, VALUES, max_size=3),
    crlf=st.booleans(),
    bom=st.booleans(),
    escape=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_rows_to_jsonl_to_prompts(prompts: list, columns: dict, crlf: bool, bom: bool, escape: bool) -> None:
    lines = [json.dumps({"prompt": prompt, **columns}, ensure_ascii=escape).encode() for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.jsonl"
        path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + (b"\r\n" if crlf else b"\n").join(lines))
        back = Prompts().prompts(Split("mine", "mine", read_rows(path)))
    assert [p.text if p.text is not None else list(p.messages or ()) for p in back] == prompts
    assert [p.columns for p in back] == [columns] * len(prompts)
    assert [p.uid for p in back] == [f"mine:{i}" for i in range(len(prompts))]


@given(st.lists(st.tuples(MESSAGES, TEXT), min_size=1, max_size=5), st.sampled_from(["jsonl", "parquet"]))
@settings(max_examples=30, deadline=None)
def test_prompts_to_verl_to_trl_and_back(pairs: list, suffix: str) -> None:
    prompts = [Prompt(f"q:{i}", messages=tuple(turns), columns={"gold": g}) for i, (turns, g) in enumerate(pairs)]
    first = to_verl(prompts, split="train", data_source="mine")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{suffix}"
        write_rows(path, first)
        verl = Prompts().prompts(Split("rows", "rows", read_rows(path)))
        write_rows(path, to_trl(verl))
        trl = Prompts().prompts(Split("rows", "rows", read_rows(path)))
    assert [list(p.messages or ()) for p in trl] == [turns for turns, _ in pairs]
    assert [p.columns["ground_truth"] for p in trl] == [gold for _, gold in pairs]
    assert to_verl(trl, split="other", data_source="other") == first


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2), max_leaves=4,
)  # fmt: skip
GOLDS = TEXT | st.integers(-99, 99) | st.lists(st.integers(0, 9), min_size=1, max_size=3)


@given(
    st.lists(st.tuples(PLAIN | MESSAGES, GOLDS, st.dictionaries(NAMES, ANY, max_size=3)), min_size=1, max_size=4),
    st.sampled_from(["ground_truth", "gold", "answer", "solution"]),
    st.sampled_from(["verl", "trl"]),
)
@settings(max_examples=80, deadline=None)
def test_there_and_back_is_the_same(rows: list, gold: str, peer: str) -> None:
    """Prompts -> the peer's file -> prompts, whatever their columns hold."""
    names = list(dict.fromkeys(name for _, _, columns in rows for name in columns))
    prompts = []
    for i, (turns, value, columns) in enumerate(rows):
        own = {name: columns.get(name) for name in names if name != gold} | {gold: value}
        shape = {"text": turns} if isinstance(turns, str) else {"messages": tuple(turns)}
        prompts.append(Prompt(f"rows:{i}", columns=own, **shape))
    written = (
        to_verl(prompts, split="train", data_source="mine", gold_column=gold) if peer == "verl" else to_trl(prompts)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, written)
        read = Prompts().prompts(Split("rows", "rows", read_rows(path)))
    back = [restored(prompt) for prompt in read]
    assert [(p.text, p.messages, dict(p.columns)) for p in back] == [
        (p.text, p.messages, dict(p.columns)) for p in prompts
    ]


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_read_or_refused_with_a_message(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train.jsonl", "train.json", "train.parquet"):
            path = Path(folder) / name
            path.write_bytes(content)
            read, message = 0, ""
            try:  # any other exception fails the test
                read = len(load_task(DataConfig(train=str(path)), eval_size=1, seed=0).train)
            except DataError as error:
                message = str(error)
            assert read > 0 or name in message
            path.unlink()


@given(st.integers(1, 500), st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_permutation_is_one(size: int, seed: int) -> None:
    order = Permutation(size, "test", seed)
    assert sorted(map(order, range(size))) == list(range(size))


def test_permutation_of_a_huge_domain_stays_inside_and_differs_by_key() -> None:
    size = 10**30
    one, two = ([Permutation(size, key)(i) for i in range(200)] for key in ("a", "b"))
    assert all(0 <= x < size for x in one)
    assert len(set(one)) == 200
    assert not set(one) & set(two)
    assert 0.4 < sum(one) / len(one) / size < 0.6  # spread over the whole domain, not its start


def test_draws_are_even() -> None:
    draws = Draws("even", 1)
    counts = Counter(draws.below(7) for _ in range(7000))
    assert set(counts) == set(range(7))
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 30  # chi-square with 6 degrees: p < 1e-4 beyond


@given(st.integers(1, 40), st.integers(0, 2**63 - 1), st.integers(0, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_epoch_covers_everything_once(size: int, seed: int, epoch: int, shuffle: bool) -> None:
    sampler = PromptStream(size, seed=seed, shuffle=shuffle)
    assert sorted(sampler.take(epoch * size, size)) == list(range(size))


@given(st.integers(1, 30), st.integers(0, 100), st.lists(st.integers(0, 50), max_size=5))
@settings(max_examples=60, deadline=None)
def test_sampler_depends_on_the_position_alone(size: int, start: int, cuts: list[int]) -> None:
    whole = PromptStream(size, seed=9).take(start, sum(cuts))
    pieces: list[int] = []
    for k in cuts:
        pieces += PromptStream(size, seed=9).take(start + len(pieces), k)
    assert pieces == whole


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    sampler, other = PromptStream(50, seed=1), PromptStream(50, seed=2)
    orders = [tuple(s.take(epoch * 50, 50)) for s in (sampler, other) for epoch in range(3)]
    assert len(set(orders)) == 6
    assert PromptStream(50, seed=1, shuffle=False).take(45, 10) == [45, 46, 47, 48, 49, 0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="no prompts"):
        PromptStream(0, seed=1)


@given(st.integers(0, 200), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_share_is_full_and_even(total: int, limits: list[int]) -> None:
    parts = share(total, limits)
    assert sum(parts) == min(total, sum(limits))
    assert all(0 <= part <= limit for part, limit in zip(parts, limits, strict=True))
    unfilled = [part for part, limit in zip(parts, limits, strict=True) if part < limit]
    assert not unfilled or max(parts) <= min(unfilled) + 1


@given(
    st.integers(0, 1000),
    st.sampled_from(
        [
            ["+"],
            ["*", "-"],
            ["a + b * c", "a * b + c"],
            ["a + b + c", "/"],
            ["a + b + c", "a + (b + c)"],
            ["a * b * c", "a + b * c + d"],
        ]
    ),
    st.integers(2, 30),
    st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_arithmetic_never_trains_on_a_held_out_problem(seed: int, ops: list[str], largest: int, size: int) -> None:
    config = DataConfig(task="arithmetic", args={"ops": ops, "largest": largest, "smallest": 1, "size": 300})
    try:
        data = load_task(config, eval_size=size, seed=seed)
    except DataError:
        return  # too small a universe: says so
    assert len(data.eval) == size

    def parts(prompt: Prompt) -> tuple[str, ...]:
        """Summands in any order, factors in any order: equal for problems that are the same."""
        expression = prompt.columns["expression"]
        if "-" in expression or "/" in expression:
            return (expression,)
        # The brackets of these forms say nothing: they stand among summands.
        expression = re.sub("[()]", "", expression)
        return tuple(sorted(" * ".join(sorted(part.split(" * "))) for part in expression.split(" + ")))

    assert not set(map(parts, data.train)) & set(map(parts, data.eval))
    assert not {p.uid for p in data.train} & {p.uid for p in data.eval}


@given(st.text(min_size=2, max_size=200), st.integers(1, 100))
@settings(max_examples=80, deadline=None)
def test_truncation_fits_and_keeps_a_suffix(text: str, limit: int) -> None:
    def count(prompt: Prompt) -> int:
        return 3 + len((prompt.text or "").encode())  # bytes as tokens: some characters count more than once

    try:
        cut = truncate_left(Prompt("x", text=text), limit, count=count)
    except DataError:
        assert 3 + len(text[-1].encode()) > limit
        return
    assert cut.text
    assert text.endswith(cut.text)
    assert count(cut) <= limit
    start = len(text) - len(cut.text)
    if count(Prompt("x", text=text)) > limit:
        assert count(Prompt("x", text=text[start - 1 :])) > limit  # not cut more than needed
