"""``trew data``: prepare a known set, look at prompts as a run would see them, convert between trainers' schemas."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from ..data.rows import Split
    from ..types import Prompt


def prepare(
    name: Annotated[Literal["gsm8k"], tyro.conf.Positional],
    *,
    source: str | None = None,
    out: str | None = None,
    format: Literal["jsonl", "parquet"] = "jsonl",
    overwrite: bool = False,
) -> None:
    """Writes a known data set as train and test files that recipes can name.

    Args:
        name: The set.
        source: Where it is read from: a file, a folder or a hub id; by default the set's home on the hub.
        out: The folder that is written; by default data/NAME.
        format: Of the files.
        overwrite: Replace files that are there already.
    """
    from ..data import sources
    from ..data.files import write_rows
    from ..data.tasks import Gsm8k

    folder = Path(out or f"data/{name}")
    task = Gsm8k()
    where = task.source(source or "")
    splits = {"train": sources.read_train(where), "test": sources.read_eval_beside(where)}
    targets = {key: folder / f"{key}.{format}" for key in splits}
    _refuse_existing(targets.values(), overwrite)
    _refuse_other_formats(targets.values())
    # Everything is read and checked before anything is written.
    rows = {key: [_gsm8k_row(p) for p in task.prompts(split)] for key, split in splits.items() if split is not None}
    for key, part in rows.items():
        write_rows(targets[key], part)
        _say(f"{targets[key]}: {len(part)} rows, sha256 {_sha256(targets[key])}")
    if "test" not in rows:
        _say(f"{where} has no test split beside it: only the training rows were written")


def show(
    source: Annotated[str, tyro.conf.Positional] = "",
    *,
    task: str = "prompts",
    n: int = 3,
    prompt_column: str = "prompt",
    seed: int = 0,
) -> None:
    """Prints a few prompts of a source or procedural task, with the columns that rewards will receive.

    Args:
        source: A file, a folder or a hub id; empty for tasks that make their own problems.
        task: gsm8k, arithmetic, countdown or prompts.
        n: How many prompts.
        prompt_column: The column that holds the prompt (task prompts only).
        seed: For tasks that make their own problems.
    """
    from ..config import DataConfig
    from ..errors import ConfigError

    if n < 1:
        raise ConfigError(f"--n: got {n}, accepts a whole number of at least 1")
    config = DataConfig(task=task, train=source, prompt_column=prompt_column)
    prompts = _read_or_make(config, seed=seed)
    for prompt in prompts[:n]:
        _say(f"── {prompt.uid} ──", style="bold")
        for role, text in _turns(prompt):
            _say(f"{role}:", style="cyan")
            _say(text)
        for key, value in prompt.columns.items():
            _say(f"  {key} = {_short(value)}", style="dim")
    _say(f"{min(n, len(prompts))} of {len(prompts)} prompts", style="bold")


def convert(
    source: Annotated[str, tyro.conf.Positional],
    out: Annotated[str, tyro.conf.Positional],
    *,
    to: Literal["trl", "verl"] = "trl",
    task: str = "prompts",
    prompt_column: str = "prompt",
    split: str = "train",
    data_source: str = "",
    ability: str = "math",
    gold_column: str = "",
    overwrite: bool = False,
) -> None:
    """Writes a source's prompts for another trainer: TRL's rows (prompt and columns), or verl's schema.

    Args:
        source: A file, a folder or a hub id, in any schema that training reads (TRL's, verl's, or the task's own).
        out: The file that is written, .jsonl or .parquet.
        to: The schema: trl or verl.
        task: How the source is read: gsm8k, countdown, or prompts.
        prompt_column: The column that holds the prompt (task prompts only).
        split: train, or test (else validation) of a folder or hub set; verl's rows carry the name.
        data_source: verl's name for the set, by which it picks a reward; by default the source.
        ability: verl's name for the kind of task.
        gold_column: Where verl's ground truth comes from; by default ground_truth, gold, answer or solution.
        overwrite: Replace the file if it is there already.
    """
    from ..config import DataConfig
    from ..data import trl, verl
    from ..data.files import SUFFIXES, write_rows
    from ..errors import ConfigError

    path = Path(out)
    problems = []
    if path.suffix not in SUFFIXES[:1] + SUFFIXES[2:]:
        problems.append(f"out: got {out!r}, accepts a file ending in .jsonl or .parquet")
    if split not in ("train", "test"):
        problems.append(f"--split: got {split!r}, accepts 'train' or 'test'")
    if to not in ("trl", "verl"):
        problems.append(f"--to: got {to!r}, accepts 'trl' or 'verl'")
    if problems:
        raise ConfigError(problems)
    _refuse_existing([path], overwrite)
    prompts = _read_or_make(DataConfig(task=task, train=source, prompt_column=prompt_column), split=split)
    if to == "trl":
        rows = trl.to_rows(prompts)
    else:
        home = data_source or ("openai/gsm8k" if task == "gsm8k" else source)
        rows = verl.to_rows(prompts, split=split, data_source=home, ability=ability, gold_column=gold_column)
        if any(prompt.text is not None for prompt in prompts):
            _say("string prompts became one user message each: verl applies the chat template to all prompts")
    write_rows(path, rows)
    _say(f"{path}: {len(rows)} rows in {to}'s schema, sha256 {_sha256(path)}")


# --------------------------------------------------------------------------------------------------------------------


def _read_or_make(config: Any, *, split: str = "train", seed: int = 0) -> list[Prompt]:
    """All prompts of one split, without an evaluation set being held out."""
    from ..data import make_task, sources
    from ..data.tasks import Arithmetic, Countdown, Prompts

    task = make_task(config)
    if isinstance(task, Arithmetic) or (isinstance(task, Countdown) and not config.train):
        return list(task.generate(eval_size=1, seed=seed)[0])
    where = task.source(config.train)
    rows: Split = sources.read_train(where) if split == "train" else sources.read_eval(where)
    if isinstance(task, Prompts):
        return task.prompts(rows, prompt_column=config.prompt_column)
    return task.prompts(rows)


def _gsm8k_row(prompt: Prompt) -> dict[str, Any]:
    """question, answer and gold; of verl's rows, where only the chat may be there, the prompt too."""
    columns = prompt.columns
    if "question" in columns and "answer" in columns:
        return {name: columns[name] for name in ("question", "answer", "gold")}
    from ..errors import DataError

    raise DataError(
        f"prompt {prompt.uid!r}: has no question and answer of its own (verl's extra_info.question, .answer); "
        "such rows can be trained on as they are, with data.train"
    )


def _turns(prompt: Prompt) -> Sequence[tuple[str, str]]:
    if prompt.text is not None:
        return [("text", prompt.text)]
    return [(message["role"], message["content"]) for message in prompt.messages or ()]


def _short(value: Any, most: int = 200) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _say(text: str, *, style: str = "") -> None:
    """Prints text as it is: data never acts on the terminal, be it markup, escape codes or direction marks."""
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False, soft_wrap=True).print(Text(_visible(text), style=style))


def _visible(text: str) -> str:
    """Control and formatting characters as escapes; new lines and tabs stay.

    >>> _visible("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return "".join(
        ch if ch in "\n\t" or unicodedata.category(ch) not in hidden else ch.encode("unicode_escape").decode()
        for ch in text
    )


def _refuse_existing(paths: Iterable[Path], overwrite: bool) -> None:
    from ..errors import ConfigError

    there = [str(path) for path in paths if path.exists()]
    if there and not overwrite:
        raise ConfigError(f"{', '.join(there)}: is there already; choose another --out, or add --overwrite")


def _refuse_other_formats(paths: Iterable[Path]) -> None:
    """train.jsonl beside train.parquet would leave it open which of them the folder means."""
    from ..data.files import SUFFIXES
    from ..errors import ConfigError

    others = [path.with_suffix(suffix) for path in paths for suffix in SUFFIXES if suffix != path.suffix]
    if there := [str(path) for path in others if path.exists()]:
        raise ConfigError(f"{', '.join(there)}: the same split in another format; remove it or choose another --out")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
