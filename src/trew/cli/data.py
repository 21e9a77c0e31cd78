"""``trew data``: prepare a known data set, show prompts as a run sees them, convert between trainers' schemas."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from ..config import DataConfig
    from ..data.rows import Split
    from ..data.tasks import Task
    from ..types import Prompt

PREPARED = ("gsm8k", "math", "countdown", "mbpp", "humaneval", "reasoning-gym")
_VERL_SOURCES = {"gsm8k": "openai/gsm8k", "math": "DigitalLearningGmbH/MATH-lighteval"}
_SHOWN = 10  # overlapping rows that are printed; the others are counted


def prepare(
    name: Annotated[str, tyro.conf.Positional],
    *,
    source: str | None = None,
    out: str | None = None,
    format: Literal["jsonl", "parquet"] = "jsonl",
    set: tuple[str, ...] = (),
    seed: int = 0,
    eval_size: int = 200,
    against: tuple[str, ...] = (),
    ngram: int = 13,
    remove_overlap: bool = False,
    drop_bad: bool = False,
    unchecked: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes a known data set as train and test files for recipes, and tries every gold answer with its reward.

    Reads and checks everything before it writes anything.

    Args:
        name: gsm8k, math, countdown, mbpp, humaneval, or reasoning-gym:NAME (a task of the reasoning-gym package).
        source: A file, a folder or a hub id to read from; default: the set's place on the hub, or generated problems.
        out: The folder to write; default: data/NAME.
        format: Format of the files.
        set: key=value, arguments of the task: --set levels=[4,5]
        seed: Seed of generated problems.
        eval_size: How many generated problems go into the test file.
        against: Evaluation set (file, folder or hub id; its test split) to compare training rows with. Reports the rows
            that share a run of words with it. Repeat the option for more sets.
        ngram: How many words a shared run has.
        remove_overlap: Leave out training rows with such an overlap.
        drop_bad: Leave out rows whose gold does not score 1 with the task's reward; without it they are an error.
        unchecked: Write the rows without trying their golds.
        overwrite: Replace existing files.
    """
    from ..errors import ConfigError, DataError

    # ---- options
    source = source or ""
    task = _known_task(name, source, set)
    if min(eval_size, ngram) < 1:
        raise ConfigError(f"--eval-size and --ngram: got {eval_size} and {ngram}, accept whole numbers of at least 1")
    if remove_overlap and not against:
        raise ConfigError("--remove-overlap: needs evaluation sets to compare with; add --against FILE")
    # ---- rows, and where they go
    folder = Path(os.path.expanduser(out or f"data/{name.replace(':', '-')}"))  # a shell leaves --out=~/data as it is
    if task.makes(source):  # checked before the problems are generated, which may take long
        _refuse_existing([folder / f"{key}.{format}" for key in ("train", "test")], overwrite)
    prompts = _prepared(task, source, seed=seed, eval_size=eval_size)
    targets = {key: folder / f"{key}.{format}" for key in prompts}
    # Again, as only the prompts tell which splits there are.
    _refuse_existing(targets.values(), overwrite)
    _refuse_other_formats(targets.values())
    # ---- checks: golds with their rewards, then overlaps with evaluation sets
    if not unchecked:
        prompts = {key: _graded(task, part, key, drop=drop_bad) for key, part in prompts.items()}
    rows = {key: [task.prepared(prompt) for prompt in part] for key, part in prompts.items()}
    for place in against:
        rows["train"] = _compared(rows.get("train", []), place, ngram=ngram, remove=remove_overlap)
    if emptied := [key for key in targets if not rows[key]]:
        raise DataError(
            f"{' and '.join(emptied)}: all rows were left out (--drop-bad, --remove-overlap); nothing was written"
        )
    # ---- files, once everything has passed
    _write_splits(rows, targets)
    if "test" not in rows:
        _say(f"{task.source(source)} has no test split next to it: wrote only the training rows")


def show(
    source: Annotated[str, tyro.conf.Positional] = "",
    *,
    task: str = "prompts",
    n: int = 3,
    prompt_column: str = "prompt",
    seed: int = 0,
    set: tuple[str, ...] = (),
) -> None:
    """Prints a few prompts of a source or procedural task, with the columns that rewards receive. Of a recipe: how it
    mixes its data sets, and the prompts that its run begins with.

    Args:
        source: A file, a folder or a hub id; empty for tasks that generate their problems; or a recipe (.toml).
        task: gsm8k, math, arithmetic, countdown, mbpp, humaneval, reasoning-gym:NAME or prompts.
        n: How many prompts.
        prompt_column: The column that holds the prompt (task prompts only).
        seed: Seed of generated problems.
        set: key=value, changes to the recipe.
    """
    from ..config import DataConfig
    from ..data import load_prompts
    from ..errors import ConfigError

    if n < 1:
        raise ConfigError(f"--n: got {n}, accepts a whole number of at least 1")
    if problems := _recipe_problems(source, set, task != "prompts" or prompt_column != "prompt" or seed != 0):
        raise ConfigError(problems)
    if _is_recipe(source):
        _show_recipe(source, set, n)
        return
    # Some of the package's problems take a second each to generate, so generate only those shown.
    args = {"size": n} if task.startswith("reasoning-gym:") and not source else {}
    prompts = load_prompts(DataConfig(task=task, train=source, prompt_column=prompt_column, args=args), seed=seed)
    _show_prompts(prompts[:n])
    _say(f"{min(n, len(prompts))} of {len(prompts)} prompts", style="bold")


def _show_recipe(path: str, changes: Sequence[str], n: int) -> None:
    """Prints how the run of a recipe mixes its data sets, and its first prompts before any is found too long."""
    from ..config import load
    from ..data import prompt_order
    from ..training.episodes import dataset
    from .mixture import mixture_lines

    config = load(path, changes)
    found = dataset(config)
    _notes(found.notes)
    for line in mixture_lines(config, found.train, found.eval):
        _say(line)
    order = prompt_order(config, found.train)
    n = min(n, len(found.train))  # more would begin the next epoch
    _show_prompts([found.train[index] for index in order.take(0, n)])
    _say(f"the first {n} of {len(found.train)} training prompts, in their order", style="bold")


def _show_prompts(prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        _say(f"── {prompt.uid} ──", style="bold")
        for role, text in _turns(prompt):
            _say(f"{role}:", style="cyan")
            _say(text)
        for key, value in prompt.columns.items():
            _say(f"  {key} = {_short(value)}", style="dim")


def convert(
    source: Annotated[str, tyro.conf.Positional],
    out: Annotated[str, tyro.conf.Positional],
    *,
    to: Literal["trl", "verl", "trew"] = "trl",
    task: str = "prompts",
    prompt_column: str = "prompt",
    split: str = "train",
    data_source: str = "",
    ability: str = "math",
    gold_column: str = "",
    set: tuple[str, ...] = (),
    overwrite: bool = False,
) -> None:
    """Converts a source's prompts to TRL's rows (prompt and columns) or verl's schema, and back.

    Args:
        source: A file, a folder or a hub id, in any schema that training reads (TRL's, verl's, or the task's own); or a
            recipe (.toml), for the prompts that its run trains on (split train) or evaluates on (test).
        out: The file to write, .jsonl or .parquet.
        to: The schema: trl or verl; trew is another name for trl. Restores the columns of rows that --to verl wrote.
        task: How to read the source: gsm8k, math, countdown, mbpp, humaneval, reasoning-gym:NAME, prompts, or
            demonstrations, rollouts or pairs, which verl's schema has no place for.
        prompt_column: The column that holds the prompt (task prompts only).
        split: train or test, of a folder, a hub set, or a file with all published splits (mbpp); where there is no
            test split, test is the validation split. verl's rows carry the name.
        data_source: verl's name for the set, by which it picks a reward; default: the source.
        ability: verl's name for the kind of task.
        gold_column: The column of verl's ground truth; default: ground_truth, gold, answer or solution.
        set: key=value, changes to the recipe.
        overwrite: Replace an existing file.
    """
    from ..config import DEMONSTRATED, DataConfig
    from ..data import load_split, verl
    from ..data.files import write_rows
    from ..errors import ConfigError

    path = Path(os.path.expanduser(out))
    reads_otherwise = (task, prompt_column) != ("prompts", "prompt")
    if problems := [*_format_problems(out, split, to), *_recipe_problems(source, set, reads_otherwise)]:
        raise ConfigError(problems)
    _refuse_existing([path], overwrite)
    # Read in any schema that training reads, into prompts; written in the schema of the trainer.
    config = DataConfig(task=task, train=source, prompt_column=prompt_column)
    if _is_recipe(source):
        config, prompts = _of_recipe(source, set, split)
        task, source = config.task, config.train or config.task
    else:
        prompts, notes = load_split(config, split=split)
        _notes(notes)
    if to != "verl":
        rows = _trl_rows(config, prompts)
    elif task in DEMONSTRATED:
        raise ConfigError(
            f"--to: got 'verl', whose rows are prompts with a gold answer, accepts 'trl' or 'trew' for the answers of "
            f"task {task!r}"
        )
    else:
        home = data_source or _VERL_SOURCES.get(task, source)
        rows = verl.to_rows(prompts, split=split, data_source=home, ability=ability, gold_column=gold_column)
        if any(prompt.text is not None for prompt in prompts):
            _say("converted each string prompt to one user message: verl applies the chat template to all prompts")
    write_rows(path, rows)
    _say(f"{path}: {len(rows)} rows in {to}'s schema, sha256 {_sha256(path)}")


# --------------------------------------------------------------------------------------------------------------------


def _trl_rows(config: DataConfig, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """The rows of TRL's trainers, which trew reads too."""
    from ..config import PAIRED
    from ..data import make_task, trl, verl

    # Their prompts keep the answers in a column of our own, which no trainer reads.
    if config.task in ("demonstrations", PAIRED):
        return [make_task(config).prepared(prompt) for prompt in prompts]
    rows = trl.to_rows([verl.restored(prompt) for prompt in prompts])
    if config.task == "rollouts":
        answers = [trl.answered(prompt, prompt.columns["completion"]) for prompt in prompts]
        return [{**row, "completion": answer} for row, answer in zip(rows, answers, strict=True)]
    return rows


def _write_splits(rows: Mapping[str, Sequence[dict[str, Any]]], targets: Mapping[str, Path]) -> None:
    """Writes each split that has a target, and prints what was written."""
    from ..data.files import write_rows

    for key, path in targets.items():
        write_rows(path, rows[key])
        _say(f"{path}: {len(rows[key])} rows, sha256 {_sha256(path)}")


def _format_problems(out: str, split: str, to: str) -> list[str]:
    """Everything wrong with what ``convert`` is to write."""
    from ..data.files import WRITTEN

    problems = []
    if Path(out).suffix not in WRITTEN:
        problems.append(f"out: got {out!r}, accepts a file ending in .jsonl or .parquet")
    if split not in ("train", "test"):
        problems.append(f"--split: got {split!r}, accepts 'train' or 'test'")
    if to not in ("trl", "verl", "trew"):
        problems.append(f"--to: got {to!r}, accepts 'trl', 'verl' or 'trew'")
    return problems


def _is_recipe(source: str) -> bool:
    return source.endswith(".toml")


def _recipe_problems(source: str, changes: Sequence[str], reads_otherwise: bool) -> list[str]:
    """Everything wrong with options that only a recipe takes, or only other sources (``reads_otherwise``)."""
    problems = []
    if _is_recipe(source) and reads_otherwise:
        problems.append(
            f"--task, --prompt-column, --seed: {source} sets them itself; change them with --set data.task=..."
        )
    if changes and not _is_recipe(source):
        problems.append(f"--set: got {source!r}, which is not a recipe; --set applies only to a .toml file")
    return problems


def _of_recipe(path: str, changes: Sequence[str], split: str) -> tuple[DataConfig, Sequence[Prompt]]:
    """The [data] table of a recipe, and the prompts that its run trains or evaluates on."""
    from ..config import load, one_set
    from ..data import load_task
    from ..errors import ConfigError

    config = load(path, changes)
    data = one_set(config, "trew data convert")
    if config.numbered:
        raise ConfigError(
            f"{path}: its environment {config.environment.name!r} makes its own problems, so that there are no rows to "
            "convert; give a recipe with data, or a file"
        )
    if data.overlong != "error" and not config.demonstrates:
        _say(
            f"note: lengths are not counted here: prompts of more than data.max_prompt_tokens = "
            f"{data.max_prompt_tokens} tokens are written as they are, and the run's data.overlong = "
            f"{data.overlong!r} is not applied"
        )
    found = load_task(data, eval_size=config.eval.size, seed=config.seed)
    _notes(found.notes)
    return data, found.train if split == "train" else found.eval


def _known_task(name: str, source: str, pairs: Sequence[str]) -> Task:
    """The task with its arguments; raises ConfigError for one without files to write."""
    from ..config import DataConfig, apply_overrides
    from ..data import make_task
    from ..data.tasks import TASKS
    from ..errors import ConfigError, nearest

    kind = name.partition(":")[0]
    if kind not in PREPARED:
        close = nearest(kind, PREPARED) if kind not in TASKS else ""
        accepts = ", ".join("reasoning-gym:NAME" if known == "reasoning-gym" else known for known in PREPARED)
        raise ConfigError(f"name: got {name!r}{close}, accepts {accepts}")
    args: dict[str, Any] = {}
    apply_overrides(args, pairs)
    return make_task(DataConfig(task=name, train=source, args=args))


def _prepared(task: Task, source: str, *, seed: int, eval_size: int) -> dict[str, list[Prompt]]:
    """The prompts of every existing split, read or generated."""
    if task.makes(source):
        return _generated(task, seed=seed, eval_size=eval_size)
    found = {}
    # The task's arguments may select training rows; an evaluation set is used whole.
    for key, split in _splits(task, task.source(source)).items():
        found[key] = (task if key == "train" else task.whole()).prompts(split)
        _notes(task.skipped(len(split.rows) - len(found[key]), split))
    return found


def _generated(task: Task, *, seed: int, eval_size: int) -> dict[str, list[Prompt]]:
    from ..data.tasks import Puzzles
    from ..utils.console import Display

    if isinstance(task, Puzzles):  # takes minutes for some puzzles, so it shows a progress bar
        with Display().bar("problems", task.size + eval_size) as bar:
            train, test, notes = task.generate(eval_size=eval_size, seed=seed, progress=bar.advance)
    else:
        train, test, notes = task.generate(eval_size=eval_size, seed=seed)
    _notes(notes)
    return {"train": train, "test": test}


def _splits(task: Task, where: str) -> dict[str, Split]:
    """The splits to write: the task's own parts of one file, or the file and the test split next to it."""
    from ..data import sources

    # Sets that are meant for evaluation alone (HumanEval) have a test split only.
    whole = sources.read_train(where) if task.home_split == "train" else sources.read_eval(where)
    if parts := dict(task.parts(whole)):
        return parts
    # A file that is called test is one, whatever the task's set at home is.
    own = task.home_split if whole.stem not in sources.EVAL_SPLITS else "test"
    parts = {own: whole}
    if own == "train" and (test := sources.read_eval_split_of(where)) is not None:
        parts["test"] = test
    return parts


def _graded(task: Task, prompts: Sequence[Prompt], split: str, *, drop: bool) -> list[Prompt]:
    """The prompts whose gold scores 1 with each of the task's rewards; raises DataError for others unless ``drop``."""
    from concurrent.futures import ThreadPoolExecutor

    from ..data.rows import RowProblems
    from ..rewards.builtin.kinds import gold_problem
    from ..utils.console import Display

    # Golds are tried with all of the task's rewards; one that fails is reported by row.
    rewards = task.rewards(prompts)

    def problems(prompt: Prompt) -> list[str]:
        found = [(r.name, gold_problem(r.name, prompt.columns, r.args)) for r in rewards]
        return [f"reward {name!r}: {wrong}" for name, wrong in found if wrong]

    bad = RowProblems(f"{split} rows")
    good = []
    with (
        Display().bar(f"{split}: trying every gold answer with its reward", len(prompts)) as bar,
        ThreadPoolExecutor(os.cpu_count() or 1) as threads,
    ):
        for number, (prompt, wrong) in enumerate(zip(prompts, threads.map(problems, prompts), strict=True), start=1):
            bar.advance()
            if not wrong:
                good.append(prompt)
            for line in wrong:
                bad.add(f"row {number} ({prompt.uid})", line)
    if not drop:
        bad.raise_if_any(len(prompts))
    elif len(good) < len(prompts):
        _say(f"{split}: left out {len(prompts) - len(good)} of {len(prompts)} rows whose gold does not score 1")
    return good


def _compared(rows: list[dict[str, Any]], place: str, *, ngram: int, remove: bool) -> list[dict[str, Any]]:
    """Prints which training rows overlap with an evaluation set; returns the rows, or with ``remove`` those without."""
    from ..data import contamination, sources

    other = sources.read_eval(place)
    texts = [contamination.problem_text(row) or "" for row in rows]
    found = contamination.overlaps(texts, contamination.problem_texts(other), n=ngram)
    # A share of 1: the whole row is in the evaluation set.
    copies = sum(o.share == 1 for o in found)
    affected = len({o.other for o in found})
    _say(
        f"against {other.source} ({len(other.rows)} rows): {len(found)} of {len(rows)} training rows share a run of "
        f"{ngram} words with it, {copies} of them entirely; at least {affected} evaluation rows are affected"
    )
    for overlap in found[:_SHOWN]:
        _say(f"  row {overlap.row + 1}: {overlap.share:.0%} with {other.rows[overlap.other].place}: {overlap.words}")
    if len(found) > _SHOWN:
        _say(f"  ... and {len(found) - _SHOWN} more")
    return _without(rows, {overlap.row for overlap in found}) if remove and found else rows


def _without(rows: list[dict[str, Any]], gone: set[int]) -> list[dict[str, Any]]:
    _say(f"train: left out {len(gone)} overlapping rows")
    return [row for number, row in enumerate(rows) if number not in gone]


def _notes(notes: Iterable[str]) -> None:
    for note in notes:
        _say(note, style="dim")


def _turns(prompt: Prompt) -> Sequence[tuple[str, str]]:
    if prompt.text is not None:
        return [("text", prompt.text)]
    return [(message["role"], message["content"]) for message in prompt.messages or ()]


def _short(value: Any, most: int = 200) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _say(text: str, *, style: str = "") -> None:
    """Prints text literally: markup, escape codes and direction marks in data must not affect the terminal."""
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False, soft_wrap=True).print(Text(_visible(text), style=style))


def _visible(text: str) -> str:
    """Shows control and formatting characters as escapes; newlines and tabs stay.

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
        raise ConfigError(f"{', '.join(there)}: already exists; choose another name, or add --overwrite")


def _refuse_other_formats(paths: Iterable[Path]) -> None:
    """Refuses to write train.jsonl next to train.parquet: the folder's train split would be ambiguous."""
    from ..data.files import SUFFIXES
    from ..errors import ConfigError

    others = [path.with_suffix(suffix) for path in paths for suffix in SUFFIXES if suffix != path.suffix]
    if there := [str(path) for path in others if path.exists()]:
        raise ConfigError(
            f"{', '.join(there)}: holds the same split in another format; remove it or choose another folder"
        )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
