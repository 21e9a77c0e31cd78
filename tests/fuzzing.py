"""Inputs that nobody meant to write, for every loader: a loader gives a value or one of our errors, and ends.

``TARGETS`` are used by ``tests/property/test_fuzz.py`` (a few inputs, always the same) and by ``benchmarks/fuzz.py``
(as many as time allows). A target's ``run`` gets a made input and an empty folder.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import functools
import gzip
import json
import shutil
import signal
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from trew.cli.main import brief, visible
from trew.config import Config, DataConfig, RewardConfig, dumps, load
from trew.data import load_task
from trew.data.files import SUFFIXES
from trew.data.tasks import TASKS
from trew.errors import TrewError, path_problem
from trew.iterate.settings import Iterate, load_recipe
from trew.objective.options import Options
from trew.objective.presets import PRESETS, preset, settings
from trew.reward_training import RewardTraining, load_settings, read_pairs
from trew.rewards import KINDS, RewardSet
from trew.runs.folder import decode_row
from trew.runs.report import write_report
from trew.utils.toml import dump_table, toml_value

SECONDS = 20  # in which any input is dealt with


@dataclass(frozen=True)
class Target:
    """One loader: made inputs, and what is called with them."""

    name: str
    inputs: st.SearchStrategy[Any]
    run: Callable[[Any, Path], object]


class TooSlow(Exception):
    """A loader that did not end in time."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises TooSlow in the main thread after ``seconds``."""

    def late(*_: object) -> None:
        raise TooSlow(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(target: Target, made: Any) -> str | None:
    """The message with which the input was refused, None where it was accepted. Anything else is raised."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        with limit(SECONDS):
            target.run(made, folder)
    except TrewError as error:
        message = "\n".join(brief(visible(line)) for line in str(error).splitlines())  # as the command line prints it
        if not message.strip() or error.exit_code != 2:
            raise AssertionError(f"{type(error).__name__}, exit code {error.exit_code}: {message!r}") from error
        return message.replace(str(folder), "")
    except OSError as error:
        if not (said := path_problem(error)):
            raise
        return said.replace(str(folder), "")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


# --------------------------------------------------------------------------------------------------------------------
# Bytes: something valid with some of it changed

ODD = (b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"\xed\xa0\x80", b"\\ud800", b",", b"}", b"]]", b"[" * 3000,
       b'"', b"9" * 5000, b"1e999", b"NaN", b"null", b"\xe2\x80\xa8", b"=", b"[[a]]", b"'''", b"{" * 200)  # fmt: skip


@st.composite
def changed(draw: Any, bases: list[bytes]) -> bytes:
    """One of ``bases`` with up to four stretches replaced; or bytes of any kind."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    data = draw(st.sampled_from(bases))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 0, 1, 2, 8, 64])))
        data = data[:start] + draw(st.sampled_from(ODD) | st.binary(max_size=8)) + data[end:]
    return data


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


ROWS: dict[str, list[dict[str, Any]]] = {
    "prompts": [{"prompt": f"What is {i}?", "gold": str(i), "id": i} for i in range(6)],
    "verl": [
        {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": f"q{i}"}], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": str(i)}, "extra_info": {"index": i}}
        for i in range(6)
    ],
    "gsm8k": [{"question": f"q{i}", "answer": f"so\n#### {i}"} for i in range(6)],
    "math": [
        {"problem": f"{i} + 1?", "solution": f"\\boxed{{{i + 1}}}", "level": "Level 4", "type": "Algebra"}
        for i in range(6)
    ],
    "countdown": [{"nums": [1, 2, i], "target": 3 + i} for i in range(6)],
    "mbpp": [
        {"task_id": i, "text": f"Add {i}.", "code": f"def f(x): return x + {i}", "test_list": [f"assert f(1) == {i}"]}
        for i in (11, 12, 601, 602, 603, 604)
    ],
    "humaneval": [
        {"task_id": f"HumanEval/{i}", "prompt": f"def f(x):\n    return_{i} = 0\n", "entry_point": "f",
         "canonical_solution": "    return x\n", "test": "def check(candidate):\n    assert candidate(1) == 1\n"}
        for i in range(6)
    ],
    "reasoning-gym": [
        {"prompt": f"p{i}", "gold": str(i), "puzzle": '{"task": "chain_sum", "metadata": {}}'} for i in range(6)
    ],
}  # fmt: skip
PAIRS = [{"prompt": f"p{i}", "chosen": "good", "rejected": "bad"} for i in range(6)]

# --------------------------------------------------------------------------------------------------------------------
# Values

NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 7, 100, 2**31, 2**63 - 1, 2**63, -(2**70), 10**12]) | st.integers()
FLOATS = st.sampled_from([0.0, 0.5, 1.0, -1.0, 1e-9, 1e300, float("inf"), float("-inf"), float("nan")]) | st.floats()
WORDS = st.sampled_from(
    ["", "auto", "plain", "cpu", "cuda", "gsm8k", "arithmetic", "r.toml", ".", "/", "a/b", "../x", "x.py:f", "~", "\0",
     "a" * 5000, "\u202e", "+", "a + b", "((((", "k1", "<think>…</think>", "drop"]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # fmt: skip
SCALARS = st.booleans() | NUMBERS | FLOATS | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def keys_of(cls: type, where: str = "") -> list[str]:
    """Every dotted key of a configuration class."""
    hints, found = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        name = f"{where}{field.name}"
        found.append(name)
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):  # a table, or a list of tables
            hint = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(hint):
            found += keys_of(typing.cast(type, hint), f"{name}.")
    return found


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        if not isinstance(table.get(part), dict):
            table[part] = {}
        table = table[part]
    table[last] = value


@st.composite
def recipes(draw: Any, base: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """``base`` with some keys at any values, and some keys that do not exist."""
    table = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(0, 5))):
        key = draw(st.sampled_from(keys))
        if draw(st.integers(0, 9)) == 0:
            key += draw(st.sampled_from(["x", "s", "_", ".y", ".0"]))
        _put(table, key, draw(VALUES))
    return table


BASE: dict[str, Any] = {
    "model": "./none", "steps": 2, "data": {"task": "arithmetic", "args": {"ops": ["+"], "largest": 20, "size": 50}},
    "rollout": {"prompts": 2, "completions": 2, "max_tokens": 4}, "eval": {"size": 4},
    "objective": {"preset": "dapo", "eps_high": 0.3}, "learner": {"lr": 1e-5},
}  # fmt: skip
KEYS = [*keys_of(Config), *(f"objective.{k}" for k in ("beta", "kl", "eps_high", "correction", "overlong_cache"))]
REWARD = st.fixed_dictionaries({}, optional={f.name: VALUES for f in dataclasses.fields(RewardConfig)})
PAIR_BASE = {"model": "./none", "data": {"pairs": "p.jsonl"}}
ITERATE_KEYS = [*KEYS, *(f"iterate.{k}" for k in keys_of(Iterate))]

# --------------------------------------------------------------------------------------------------------------------
# What is called


def _write(table: Mapping[str, Any], path: Path) -> None:
    """Any values as TOML; ``dump_table`` wants the form of a recipe."""
    path.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in table.items()), encoding="utf-8")


def _recipe(made: bytes, folder: Path) -> None:
    (folder / "r.toml").write_bytes(made)
    config = load(folder / "r.toml")
    (folder / "again.toml").write_text(dumps(config), encoding="utf-8")
    assert load(folder / "again.toml") == config


def _table(made: Mapping[str, Any], folder: Path) -> None:
    _write(made, folder / "r.toml")
    config = load(folder / "r.toml")
    (folder / "again.toml").write_text(dumps(config), encoding="utf-8")
    again = load(folder / "again.toml")
    assert repr(again) == repr(config)  # NaN is not equal to itself


@functools.cache
def _model() -> str:
    import tiny

    folder = tempfile.TemporaryDirectory(prefix="fuzz-model-")
    atexit.register(folder.cleanup)
    return str(tiny.save(folder.name))


def _plan(made: Mapping[str, Any], folder: Path) -> None:
    """All rooms asked at once, as a run does before it loads weights."""
    from trew import runs
    from trew.runs import trackers
    from trew.training import planning

    if made.get("model") == "./none":
        made = {**made, "model": _model()}
    _write(made, folder / "r.toml")
    config = planning.read(folder / "r.toml")
    planning.plan(config, found=[*runs.problems(config.out), *trackers.problems(config.track.to)])


def _set(made: list[str], folder: Path) -> None:
    _write(BASE, folder / "r.toml")
    load(folder / "r.toml", made)


def _task_args(made: tuple[str, dict[str, Any], int], folder: Path) -> None:
    task, args, seed = made
    if "size" not in args:
        args = {**args, "size": 40}
    load_task(DataConfig(task=task, args=args), eval_size=3, seed=seed)


def _rewards(made: list[tuple[str, dict[str, Any]]], folder: Path) -> None:
    chosen = RewardSet.from_config([RewardConfig(name=name, args=args) for name, args in made])
    chosen.close()


def _preset(made: tuple[str, dict[str, Any]], folder: Path) -> None:
    preset(made[0], **made[1]).equation()


def _data(made: tuple[str, str, bytes], folder: Path) -> None:
    task, suffix, content = made
    path = folder / f"train{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    load_task(DataConfig(task=task, train=str(path)), eval_size=2, seed=0)


def _rows(made: tuple[str, list[dict[str, Any]]], folder: Path) -> None:
    task, rows = made
    (folder / "train.jsonl").write_bytes(_lines(rows))
    load_task(DataConfig(task=task, train=str(folder)), eval_size=2, seed=0)


def _parquet(made: tuple[str, list[tuple[str, Any]], bytes | None], folder: Path) -> None:
    task, columns, damage = made
    path = folder / "train.parquet"
    pq.write_table(pa.table(dict(columns)), path)
    if damage is not None:
        data = bytearray(path.read_bytes())
        for i in range(0, len(damage) - 1, 2):
            data[(damage[i] * 257) % len(data)] = damage[i + 1]
        path.write_bytes(bytes(data))
    load_task(DataConfig(task=task, train=str(path)), eval_size=2, seed=0)


def _pairs(made: bytes, folder: Path) -> None:
    (folder / "p.jsonl").write_bytes(made)
    read_pairs(folder / "p.jsonl")


def _pair_recipe(made: Mapping[str, Any], folder: Path) -> None:
    from trew.reward_training.settings import problems

    _write(made, folder / "r.toml")
    problems(load_settings(folder / "r.toml"))


def _iterate(made: Mapping[str, Any], folder: Path) -> None:
    _write(made, folder / "r.toml")
    load_recipe(folder / "r.toml")


def _run_folder(made: tuple[bytes, bytes, bytes], folder: Path) -> None:
    """A report is made of whatever is in a run's folder."""
    for name, content in zip(("metrics.jsonl", "config.toml", "summary.json"), made, strict=True):
        (folder / name).write_bytes(content)
    write_report([folder], folder / "report.html")
    for line in made[0].split(b"\n"):
        decode_row(line)


def _model_folder(made: tuple[bytes, bytes, bytes], folder: Path) -> None:
    from trew.models import loading

    for name, content in zip(("config.json", "tokenizer.json", "model.safetensors"), made, strict=True):
        (folder / name).write_bytes(content)
    found = loading.check(str(folder))
    assert all(problem.strip() for problem in found)


def _template(made: str, folder: Path) -> None:
    """Any chat template, on a chat: rendered, or refused by ``check``."""
    import tiny
    from trew.rollout.chat import Renderer
    from trew.types import Prompt

    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = made
    prompt = Prompt("p", messages=({"role": "user", "content": "2 + 2?"},))
    renderer = Renderer(tokenizer)
    if not renderer.check([prompt]):
        assert renderer.encode(prompt)


# --------------------------------------------------------------------------------------------------------------------
# The table

TEMPLATE_PARTS = st.sampled_from(
    ["{% for m in messages %}", "{% endfor %}", "{{ m['content'] }}", "{{ m.content }}", "{{ messages }}", "{{ x.y }}",
     "{% if add_generation_prompt %}", "{% endif %}", "{{ 1 / 0 }}", "{{ bos_token }}", "{{", "{%", "{# #}", "<think>",
     "{{ messages[9].content }}", "{{ raise_exception('no') }}", "{{ 'a' * 99999 }}", "{% set m = messages[0] %}",
     "{{ m.content.split('</think>')[-1] }}", "{{ ''.__class__.__mro__ }}", "{% break %}", "{{ cycler.__init__ }}"]
)  # fmt: skip
PARQUET_VALUES = st.sampled_from(
    ["x", 5, 1.5, None, True, b"\xff", [1], ["a"], {"a": 1}, datetime.date(2020, 1, 1), Decimal("1.5"),
     datetime.datetime(2020, 1, 1), datetime.timedelta(1), [{"role": "user", "content": "q"}],
     [{"role": "user", "content": None}], {"style": "rule", "ground_truth": "4"}, [None], [[1], []], float("nan")]
)  # fmt: skip


@st.composite
def parquet(draw: Any) -> tuple[str, list[tuple[str, Any]], bytes | None]:
    task = draw(st.sampled_from(["prompts", "gsm8k", "math", "countdown", "mbpp", "humaneval"]))
    named = ROWS["verl" if draw(st.booleans()) and task in ("prompts", "gsm8k") else task]
    columns = []
    for name in [*named[0], *draw(st.lists(st.sampled_from(["id", "uid", "extra", "prompt2"]), max_size=1))]:
        values: list[Any] = [row.get(name) for row in named]
        if draw(st.integers(0, 2)) == 0:
            value = draw(PARQUET_VALUES)
            values = [value] * len(values) if draw(st.booleans()) else [*values[:-1], value]
        try:
            columns.append((name, pa.array(values)))
        except (pa.ArrowException, OverflowError):
            columns.append((name, pa.array([str(v) for v in values])))
    return task, columns, draw(st.none() | st.binary(min_size=2, max_size=8))


@st.composite
def rows(draw: Any) -> tuple[str, list[dict[str, Any]]]:
    """Rows of a task with some values of any JSON type, some columns missing and some rows too many."""
    kind = draw(st.sampled_from(list(ROWS)))
    table: list[dict[str, Any]] = json.loads(json.dumps(ROWS[kind]))
    for _ in range(draw(st.integers(0, 4))):
        row = draw(st.sampled_from(table))
        name = draw(st.sampled_from([*row, "id", "extra"]))
        if draw(st.booleans()):
            row[name] = draw(JSON)
        else:
            row.pop(name, None)
    if kind == "verl":
        kind = draw(st.sampled_from(["prompts", "gsm8k"]))
    return kind, table


TASK_KEYS = sorted({f.name for task in TASKS.values() for f in dataclasses.fields(task)} - {"size"})
ARGS = st.dictionaries(st.sampled_from(TASK_KEYS), VALUES, max_size=3)
SIZED = st.builds(lambda args, size: {**args, **size}, ARGS, st.just({}) | st.just({"size": 7}))
REWARD_KEYS = sorted({name for kind in KINDS.values() for name in (*kind.settings, *kind.from_row)})
PRESET_KEYS = sorted({k for name in PRESETS for k in settings(name)} | {f.name for f in dataclasses.fields(Options)})
GRADED = {**BASE, "rewards": [{"name": "gsm8k", "args": {"mode": "strict"}}]}
ODD_TOML = b"a = 1\n[b]\nc = 2020-01-01T00:00:00Z\nd = [1, 2.5, 'x']\n[[rewards]]\nname = 'x'\n"
TOML = [dump_table(BASE).encode(), dump_table(GRADED).encode(), ODD_TOML]
METRICS = b'{"step": 1, "loss": 0.5, "reward": 1}\n{"step": 2, "loss": null, "not_finite": {"loss": "nan"}}\n'
SUMMARY = b'{"accuracy_before": {"mean": 0.1, "low": 0, "high": 1}, "accuracy_after": {"mean": 0.2}, "seconds": 3}'
MODEL = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4}).encode()
TOKENIZER = json.dumps({"model": {"vocab": {"a": 0, "b": 3}}, "added_tokens": [{"id": 2}]}).encode()
_HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
WEIGHTS = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4)
NAMED = [f"{key}={value}" for key in KEYS for value in ("1", "x", "[", "{a=1}", "''", "nan", "9" * 5000)]


def some(keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(keys), VALUES, max_size=3)


@st.composite
def files(draw: Any) -> tuple[str, str, bytes]:
    """A task, a file's ending, and rows of that task as bytes with changes."""
    kind = draw(st.sampled_from(list(ROWS)))
    suffix = draw(st.sampled_from([*(s for s in SUFFIXES if s != ".parquet"), ".csv", ".tsv"]))
    content = draw(changed([_lines(ROWS[kind]), json.dumps(ROWS[kind]).encode()]))
    return "prompts" if kind == "verl" else kind, suffix, content


MADE = st.tuples(st.sampled_from(["arithmetic", "countdown"]), SIZED, st.integers(0, 2**63 - 1))
REWARDS = st.lists(st.tuples(st.sampled_from(list(KINDS)), some(REWARD_KEYS)), max_size=2)
LISTED = st.builds(lambda rewards: {**BASE, "rewards": rewards}, st.lists(REWARD, max_size=3))

TARGETS = [
    Target("recipe: bytes", changed(TOML), _recipe),
    Target("recipe: values", recipes(BASE, KEYS), _table),
    Target("recipe: rewards", LISTED, _table),
    Target("recipe: --set", st.lists(st.sampled_from(NAMED) | st.text(max_size=20), max_size=3), _set),
    Target("recipe: all checks", recipes(BASE, KEYS), _plan),
    Target("recipe: train-reward", recipes(PAIR_BASE, keys_of(RewardTraining)), _pair_recipe),
    Target("recipe: iterate", recipes({**BASE, "iterate": {}}, ITERATE_KEYS), _iterate),
    Target("task arguments", MADE, _task_args),
    Target("reward arguments", REWARDS, _rewards),
    Target("objective settings", st.tuples(st.sampled_from(list(PRESETS)), some(PRESET_KEYS)), _preset),
    Target("data: bytes", files(), _data),
    Target("data: rows", rows(), _rows),
    Target("data: parquet", parquet(), _parquet),
    Target("preference pairs", changed([_lines(PAIRS)]), _pairs),
    Target("run folder", st.tuples(changed([METRICS]), changed(TOML), changed([SUMMARY])), _run_folder),
    Target("model folder", st.tuples(changed([MODEL]), changed([TOKENIZER]), changed([WEIGHTS])), _model_folder),
    Target("chat template", st.lists(TEMPLATE_PARTS | st.text(max_size=5), max_size=8).map("".join), _template),
]
