"""From the ``[data]`` table of a recipe to training and evaluation prompts. Nothing here needs a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..config import DataConfig, RewardConfig, build
from ..errors import ConfigError, DataError, nearest
from ..types import Prompt
from . import sources
from .rows import Split
from .split import fingerprint, hold_out, overlap_note, repeat_note
from .tasks import TASKS, Arithmetic, Countdown, Gsm8k, Prompts

Task = Arithmetic | Countdown | Gsm8k | Prompts


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a run trains and is evaluated on."""

    train: Sequence[Prompt]
    eval: list[Prompt]
    default_rewards: tuple[RewardConfig, ...]  # empty: the recipe must name its rewards
    notes: list[str]  # what the user should know: held-out rows, repeats, overlap
    fingerprint: str  # of train and eval together


def load_task(config: DataConfig, *, eval_size: int, seed: int) -> Dataset:
    """Reads or makes the prompts that ``config`` asks for. No training row is left out without a note.

    Evaluation is the first ``eval_size`` rows of the test split. ConfigError lists everything wrong in the table;
    DataError names the file, its rows and columns.
    """
    task = make_task(config)
    if isinstance(task, Arithmetic) or (isinstance(task, Countdown) and not config.train):  # made, not read
        train, evaluation, notes = task.generate(eval_size=eval_size, seed=seed)
        rewards = task.rewards(train)
    else:
        train, evaluation, rewards, notes = _from_rows(task, config, eval_size, seed)
    return Dataset(train, evaluation, rewards, notes, fingerprint(train, evaluation))


def load_eval(config: DataConfig, *, size: int, seed: int) -> tuple[list[Prompt], tuple[RewardConfig, ...], list[str]]:
    """Evaluation prompts alone, with the task's own rewards and notes: the very prompts that ``load_task`` holds out.

    A file that is to be evaluated as it is belongs in ``config.eval``: under "auto", a training file without a test
    split beside it gives the rows that training with this seed does not see.
    """
    task = make_task(config)
    if isinstance(task, Arithmetic) or (isinstance(task, Countdown) and not config.train):
        made, evaluation, _ = task.generate(eval_size=size, seed=seed)  # its notes are about training
        return evaluation, task.rewards(made), []
    source = task.source(config.train)
    split = sources.read_eval_beside(source) if config.eval == "auto" else sources.read_eval(task.source(config.eval))
    if split is None:
        train = _prompts(task, sources.read_train(source), config)
        _, held, note = hold_out(train, size=size, seed=seed, source=source)
        return held, task.rewards(train), [note]
    prompts = _prompts(task, split, config)
    notes = [_eval_note(split.source, prompts, size), *repeat_note(prompts[:size], "evaluation")]
    return prompts[:size], task.rewards(prompts), notes


def make_task(config: DataConfig) -> Task:
    """The task with its arguments, checked; ConfigError with every problem of the table at once."""
    if config.task not in TASKS:
        accepts = ", ".join(map(repr, TASKS))
        raise ConfigError(f"data.task: got {config.task!r}{nearest(config.task, TASKS)}, accepts {accepts}")
    problems: list[str] = []
    made = config.task == "arithmetic" or (config.task == "countdown" and not config.train)
    if config.task == "prompts" and not config.train:
        problems.append("data.train: is empty; task 'prompts' needs a file, a folder or a hub id (owner/name)")
    if config.task != "prompts" and config.prompt_column != "prompt":
        problems.append(f"data.prompt_column: got {config.prompt_column!r}, but only task 'prompts' reads it")
    if config.task == "arithmetic" and config.train:
        problems.append(f"data.train: got {config.train!r}, but task 'arithmetic' makes its problems; leave it empty")
    if not config.eval:
        problems.append("data.eval: is empty, accepts 'auto', a file, a folder or a hub id")
    elif config.eval != "auto" and made:
        problems.append(f"data.eval: got {config.eval!r}, but made problems hold out their own; leave it at 'auto'")
    try:
        task = build(TASKS[config.task], config.args, where="data.args")
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    problems += task.problems()
    if problems:
        raise ConfigError(problems)
    return task


def _from_rows(
    task: Countdown | Gsm8k | Prompts, config: DataConfig, eval_size: int, seed: int
) -> tuple[list[Prompt], list[Prompt], tuple[RewardConfig, ...], list[str]]:
    source = task.source(config.train)
    train: list[Prompt] = []
    test: tuple[str, list[Prompt]] | None = None
    faults: list[str] = []
    with _collected(faults):
        train = _prompts(task, sources.read_train(source), config)
    with _collected(faults):
        explicit = config.eval != "auto"
        split = sources.read_eval(task.source(config.eval)) if explicit else sources.read_eval_beside(source)
        test = (split.source, _prompts(task, split, config)) if split else None
    if faults:
        raise DataError("\n".join(dict.fromkeys(faults)))  # a hub that is down says the same for both
    if test is None:
        train, evaluation, note = hold_out(train, size=eval_size, seed=seed, source=source)
    else:
        evaluation, note = test[1][:eval_size], _eval_note(*test, eval_size)
    repeats = repeat_note(train, "training") + repeat_note(evaluation, "evaluation")
    return train, evaluation, task.rewards(train), [note, *repeats, *overlap_note(train, evaluation)]


def _prompts(task: Countdown | Gsm8k | Prompts, split: Split, config: DataConfig) -> list[Prompt]:
    if isinstance(task, Prompts):
        return task.prompts(split, prompt_column=config.prompt_column)
    return task.prompts(split)


def _eval_note(source: str, prompts: Sequence[Prompt], size: int) -> str:
    if len(prompts) < size:
        return f"evaluation: eval.size is {size}, but {source} has only {len(prompts)} rows; all of them are used"
    return f"evaluation: the first {size} of {len(prompts)} rows of {source}"


@contextmanager
def _collected(faults: list[str]) -> Iterator[None]:
    """Data errors inside are kept for later, so that both splits' are reported at once."""
    try:
        yield
    except DataError as error:
        faults.append(str(error))
