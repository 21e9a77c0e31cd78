"""Turns the ``[data]`` table of a recipe, or several, into training and evaluation prompts, without loading a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

from ..config import DEMONSTRATED, DataConfig, RewardConfig, SetConfig, build
from ..errors import ConfigError, DataError, Problems, nearest
from ..types import Prompt
from . import sources
from .mixture import named
from .rows import Split, columns_of
from .split import fingerprint, hold_out, overlap_note, repeat_note
from .tasks import TASKS, Prompts, Puzzles, Task
from .tasks.puzzles import PREFIX

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dataset:
    """The prompts that a run trains on and evaluates."""

    train: Sequence[Prompt]
    eval: list[Prompt]
    default_rewards: tuple[RewardConfig, ...]  # empty: the recipe must name its rewards
    notes: list[str]  # for the user: held-out rows, repeats, overlap
    fingerprint: str  # a hash of train and eval together


def load_task(config: DataConfig, *, eval_size: int, seed: int) -> Dataset:
    """Reads or generates the prompts that ``config`` asks for, and notes every training row it leaves out.

    Evaluates on the first ``eval_size`` rows of the test split. Raises ConfigError with every problem of the table, and
    DataError with the file, rows and columns at fault.
    """
    task = make_task(config)
    if task.makes(config.train):
        train, evaluation, notes = task.generate(eval_size=eval_size, seed=seed)
        rewards = task.rewards(train)
    else:
        train, evaluation, rewards, notes = _from_rows(task, config, eval_size, seed)
    return Dataset(train, evaluation, rewards, notes, fingerprint(train, evaluation))


def load_eval(
    config: DataConfig, *, size: int, seed: int, first: int | None = None
) -> tuple[list[Prompt], tuple[RewardConfig, ...], list[str]]:
    """Loads only the evaluation prompts, with the task's rewards and notes: those that ``load_task`` holds out.

    To evaluate on a whole file, name it in ``config.eval``: with "auto", a training file without a test split next to
    it gives only the rows that training with this size and seed does not see. ``first``: how many of them are wanted,
    if not ``size``. Raises ConfigError for more than ``size``, unless they have a source of their own.
    """
    task = make_task(config)
    if task.makes(config.train):
        _refuse_more(first, size)
        made, evaluation, _ = task.generate(eval_size=size, seed=seed)  # its notes concern training only
        return evaluation[:first], task.rewards(made), []
    source = task.source(config.train)
    if config.eval != "auto":
        split = sources.read_eval(task.source(config.eval))
    else:
        split = sources.read_eval_split_of(source)
    # The same order of precedence as in training, so that both evaluate on the same prompts.
    if split is None:
        whole = task.read(source)
        parts = task.parts(whole)
        split = parts.get("test") or parts.get("validation")
        if split is None:
            # Prompts, size and seed as in training, and so the rows that it holds out.
            _refuse_more(first, size)
            train, skipped = _prompts(task, whole, config)
            _, held, note = hold_out(train, size=size, seed=seed, source=source)
            return held[:first], task.rewards(train), [note, *skipped]
    # whole(): a selection, as by data.args.levels, is of training rows.
    prompts, skipped = _prompts(task.whole(), split, config)
    most = size if first is None else first
    notes = [_eval_note(split.source, prompts, most), *skipped, *repeat_note(prompts[:most], "evaluation")]
    return prompts[:most], task.rewards(prompts), notes


def _refuse_more(first: int | None, size: int) -> None:
    """Raises ConfigError if more prompts are wanted than are held out: the others are trained on."""
    if first is not None and first > size:
        raise ConfigError(
            f"--size (eval.size): got {first}, but the recipe holds out {size} prompts and trains on the others, "
            f"accepts at most {size}; lower it"
        )


def load_sets(sets: Sequence[SetConfig], *, eval_size: int, seed: int) -> Dataset:
    """Reads or generates several data sets. Each is evaluated on ``eval_size`` prompts; uids begin with its name, and
    its default rewards are for its rows alone. Raises ConfigError with the problems of all sets."""
    found = _of_each(sets, lambda one: load_task(one, eval_size=eval_size, seed=seed))
    train = {name: _named(name, data.train) for name, data in found.items()}
    evaluation = {name: _named(name, data.eval) for name, data in found.items()}
    notes = [f"{name}: {note}" for name, data in found.items() for note in data.notes]
    notes += _overlap_notes(train, evaluation)
    whole = [prompt for prompts in train.values() for prompt in prompts]
    held = [prompt for prompts in evaluation.values() for prompt in prompts]
    rewards = _rewards_of_sets({name: data.default_rewards for name, data in found.items()})
    return Dataset(whole, held, rewards, notes, fingerprint(whole, held))


def _overlap_notes(train: Mapping[str, Sequence[Prompt]], evaluation: Mapping[str, Sequence[Prompt]]) -> list[str]:
    """Notes on evaluation prompts of each set that other sets train on."""
    notes = []
    # Each set's own overlap is among its notes already.
    for name, prompts in evaluation.items():
        others = [prompt for other in train if other != name for prompt in train[other]]
        notes += [f"{name}: in other data sets, {note}" for note in overlap_note(others, prompts)]
    return notes


def load_eval_of_sets(
    sets: Sequence[SetConfig], *, size: int, seed: int, first: int | None = None
) -> tuple[list[Prompt], tuple[RewardConfig, ...], list[str]]:
    """What :func:`load_eval` returns, of several data sets together."""
    found = _of_each(sets, lambda one: load_eval(one, size=size, seed=seed, first=first))
    prompts = [prompt for name, (held, _, _) in found.items() for prompt in _named(name, held)]
    notes = [f"{name}: {note}" for name, (_, _, notes) in found.items() for note in notes]
    return prompts, _rewards_of_sets({name: rewards for name, (_, rewards, _) in found.items()}), notes


def load_prompts(config: DataConfig, *, split: str = "", seed: int = 0) -> list[Prompt]:
    """Loads all prompts of one split ("train", or "test" with validation as the fallback) and holds out none. Without
    ``split`` those of a training run's source, whole: also the test rows of a file with all published splits.

    A procedural task gives all its training problems. It has no test split: ``split="test"`` raises ConfigError.
    """
    return load_split(config, split=split, seed=seed)[0]


def load_split(config: DataConfig, *, split: str = "", seed: int = 0) -> tuple[list[Prompt], list[str]]:
    """What :func:`load_prompts` returns, with notes on the rows and columns that it leaves out."""
    task = make_task(config)
    if task.makes(config.train):
        if split == "test":
            raise ConfigError(
                f"split: got 'test', but task {config.task!r} makes its problems, and which are held out is decided by "
                "a recipe (eval.size, seed); name the recipe in place of the task"
            )
        return list(task.generate(eval_size=1, seed=seed)[0]), []
    source = task.source(config.train)
    whole = sources.read_eval(source) if split == "test" else task.read(source)
    wanted = {"train": ("train",), "test": sources.EVAL_SPLITS}.get(split, ())
    parts = task.parts(whole)
    return _prompts(task, next((parts[name] for name in wanted if name in parts), whole), config)


def check_task(name: str, accepted: Collection[str] = TASKS) -> None:
    """Raises ConfigError unless ``name`` is one of the ``accepted`` tasks."""
    kind, named, _ = name.partition(":")
    if kind not in accepted or (named and kind != PREFIX):
        accepts = ", ".join(repr(f"{t}:NAME" if t == PREFIX else t) for t in accepted)
        raise ConfigError(f"data.task: got {name!r}{nearest(name, accepted)}, accepts {accepts}")


def of_other_task(own: DataConfig, task: str, *, named: Collection[str]) -> DataConfig:
    """Settings of data for another ``task``: without the rows that are of their own, and without arguments that this
    one does not take. Keys that are ``named``, as data.args.mode, stay."""
    usual, kind = DataConfig(), TASKS.get(task.partition(":")[0])
    takes = {field.name for field in fields(cast(Any, kind))} if kind else set()
    rows = [key for key in ("train", "eval", "prompt_column") if not {"data", f"data.{key}"} & {*named}]
    whole = bool({"data", "data.args"} & {*named})
    args = {k: v for k, v in own.args.items() if whole or k in takes or f"data.args.{k}" in named}
    return replace(own, task=task, args=args, **{key: getattr(usual, key) for key in rows})


def make_task(config: DataConfig) -> Task:
    """Builds the task and checks its arguments; raises ConfigError with every problem of the table at once."""
    check_task(config.task)
    kind, _, name = config.task.partition(":")
    # With default arguments: whether a task makes its problems depends on data.train alone.
    problems = Problems(_source_problems(config, generates=TASKS[kind]().makes(config.train)))
    task = problems.attempt(lambda: build(TASKS[kind], config.args, where="data.args"))
    if task is None:
        raise ConfigError(problems)
    if isinstance(task, Puzzles) and name:
        if task.puzzle not in ("", name):
            problems.append(f"data.args.puzzle: got {task.puzzle!r}, but data.task says {name!r}; remove it")
        task = replace(task, puzzle=name)
    problems += task.problems()
    if problems:
        raise ConfigError(problems)
    return task


def _source_problems(config: DataConfig, *, generates: bool) -> list[str]:
    """What is wrong with data.train, data.eval and data.prompt_column for this kind of task."""
    found = []
    if config.task in ("prompts", *DEMONSTRATED) and not config.train:
        found.append(
            f"data.train (--data or FILE of a command): is empty; task {config.task!r} needs a file, a folder or a hub "
            "id (owner/name)"
        )
    if config.task != "prompts" and config.prompt_column != "prompt":
        found.append(f"data.prompt_column: got {config.prompt_column!r}, but only task 'prompts' reads it")
    if config.task == "arithmetic" and config.train:
        found.append(f"data.train: got {config.train!r}, but task 'arithmetic' makes its problems; leave it empty")
    if not config.eval:
        found.append("data.eval: is empty, accepts 'auto', a file, a folder or a hub id")
    elif config.eval != "auto" and generates:
        found.append(f"data.eval: got {config.eval!r}, but made problems hold out their own; leave it at 'auto'")
    return found


def _from_rows(
    task: Task, config: DataConfig, eval_size: int, seed: int
) -> tuple[list[Prompt], list[Prompt], tuple[RewardConfig, ...], list[str]]:
    source = task.source(config.train)
    train: list[Prompt] = []
    test: tuple[str, list[Prompt]] | None = None
    faults: list[str] = []
    skipped: list[str] = []
    parts: Mapping[str, Split] = {}
    split: Split | None = None
    with _collected(faults):
        whole = task.read(source)
        parts = task.parts(whole)
        train, skipped = _prompts(task, parts.get("train", whole), config)
    # A source of its own, else a split beside the training rows, else a part of their file.
    with _collected(faults):
        explicit = config.eval != "auto"
        split = sources.read_eval(task.source(config.eval)) if explicit else sources.read_eval_split_of(source)
        split = split or parts.get("test") or parts.get("validation")
        if split is not None:
            prompts, notes = _prompts(task.whole(), split, config)
            test = split.source, prompts
            skipped += notes
    if faults:
        raise DataError("\n".join(dict.fromkeys(faults)))  # a hub that is down reports the same fault for both splits
    if test is None:
        # Held-out rows leave the training set; a test split of its own leaves it whole.
        train, evaluation, note = hold_out(train, size=eval_size, seed=seed, source=source)
    else:
        evaluation, note = test[1][:eval_size], _eval_note(*test, eval_size)
    if parts:
        counts = ", ".join(f"{name} {len(part.rows)}" for name, part in parts.items())
        skipped.insert(0, f"{source}: one file with the published splits ({counts} rows); training uses only its own")
    repeats = repeat_note(train, "training") + repeat_note(evaluation, "evaluation")
    notes = [note, *skipped, *repeats, *overlap_note(train, evaluation)]
    return train, evaluation, task.rewards(train), notes


def _prompts(task: Task, split: Split, config: DataConfig) -> tuple[list[Prompt], list[str]]:
    """A split's prompts, with a note if the task leaves rows out, or a column that rewards cannot have by its name."""
    if isinstance(task, Prompts):
        return task.prompts(split, prompt_column=config.prompt_column), _other_prompt_note(split, config.prompt_column)
    prompts = task.prompts(split)
    return prompts, task.skipped(len(split.rows) - len(prompts), split)


def _other_prompt_note(split: Split, prompt_column: str) -> list[str]:
    if prompt_column == "prompt" or "prompt" not in columns_of(split.rows):
        return []
    return [
        f"{split.source}: has a column 'prompt' beside the prompts' own, {prompt_column!r}; reward functions do not "
        "get it, as they know the prompts by that name; rename it if a reward needs it"
    ]


def _eval_note(source: str, prompts: Sequence[Prompt], size: int) -> str:
    if len(prompts) < size:
        return f"evaluation: eval.size is {size}, but {source} has only {len(prompts)} rows; all of them are used"
    return f"evaluation: the first {size} of {len(prompts)} rows of {source}"


def _of_each(sets: Sequence[SetConfig], read: Callable[[SetConfig], T]) -> dict[str, T]:
    """What ``read`` makes of each set, by name. Raises ConfigError with the problems of all of them."""
    found: dict[str, T] = {}
    problems: list[str] = []
    for i, one in enumerate(sets):
        own = Problems()
        made = own.attempt(lambda one=one: read(one))
        problems += [f"data[{i}] {one.name!r}: {problem}" for problem in own]
        if made is not None:
            found[one.name] = made
    if problems:
        raise ConfigError(problems)
    return found


def _named(name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    return [replace(prompt, uid=named(name, prompt.uid)) for prompt in prompts]


def _rewards_of_sets(found: Mapping[str, Sequence[RewardConfig]]) -> tuple[RewardConfig, ...]:
    """The default rewards of all sets, each for the rows of the sets that bring it."""
    rewards: dict[str, RewardConfig] = {}
    for name, own in found.items():
        for reward in own:
            # By repr: a configuration holds tables, which are no keys. Sets with equal rewards share one.
            known = rewards.get(repr(reward), reward)
            rewards[repr(reward)] = replace(known, sets=(*known.sets, name))
    return tuple(rewards.values())


@contextmanager
def _collected(faults: list[str]) -> Iterator[None]:
    """Collects data errors, so that those of both splits are reported at once."""
    try:
        yield
    except DataError as error:
        faults.append(str(error))
