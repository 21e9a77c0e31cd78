"""``trew eval``: measures a model's accuracy on a task, with confidence intervals."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..config import (
    DEMONSTRATED,
    Config,
    EnvironmentConfig,
    EvalConfig,
    RewardConfig,
    SftConfig,
    apply_overrides,
    limits,
    load,
    one_set,
    parse,
    to_table,
    validate,
)
from ..errors import ConfigError, Problems
from ..runs import changes
from ..utils.commands import trial
from .run_folders import refuse_no_policy, refuse_unnamed_run, run_of

if TYPE_CHECKING:
    from rich.table import Table

    from ..eval import EvalResult
    from ..eval.evaluate import Correct
    from ..rewards import RewardSet
    from ..rewards.gold_checks import Bar
    from ..rollout import Renderer
    from ..training.episodes import EpisodePlan
    from ..types import Prompt
    from ..utils.console import Display


def eval(
    model: Annotated[str, tyro.conf.Positional],
    /,
    *,
    task: str | None = None,
    data: str | None = None,
    size: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    batch: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    recipe: Path | None = None,
    set: tuple[str, ...] = (),
    json: Path | None = None,
    completions: Path | None = None,
) -> int:
    """Evaluate a model: accuracy with its 95 % interval, avg@k and pass@k.

    Reports everything wrong with settings, data and model before it loads the model (exit code 2).

    Args:
        model: Folder, hub id, smollm2-135m-instruct, or a run (runs/x or runs/x/final), which is evaluated with its
            final weights and its own recipe; one that goes on after its end has none until it ends again.
        task: gsm8k, math, arithmetic, countdown, mbpp, humaneval, reasoning-gym:NAME, or prompts (rows with a prompt
            column); default: the recipe's, or gsm8k. Another task than the recipe's has its own data and
            rewards, and is not played in an environment that makes its own problems.
        data: File, folder or hub id with the prompts: a whole file, or a test split. Default: the task's own.
        size: The most prompts to use, from the start; default: the recipe's, or 200. A run is never evaluated on what
            it was trained on: more than it held out are accepted from a file or test split of their own only.
        samples: Completions per prompt (k of avg@k and pass@k); default: the recipe's, or 1.
        temperature: 0 is greedy; default: the recipe's, or 0; with --samples 0 for one, and for several the recipe's,
            or 1 where that is greedy.
        max_tokens: The longest completion; default: the recipe's, or 256.
        batch: The most completions decoded at once; default: the recipe's, or 128.
        seed: Seed of sampling; default: the recipe's, or 0. Without a run or recipe, also of generated problems.
        device: auto, cpu, mps, cuda or cuda:N.
        recipe: Take task, data, rewards and chat template from this recipe, or from config.toml of a run.
        set: key=value, overrides the recipe: --set data.args.mode=flexible
        json: Write the result to this file.
        completions: Write every completion with its score to this parquet file.
    """
    # A run stands for its final weights, measured by its own recipe unless another one is given.
    if (run := run_of(Path(model))) is not None and (recipe is None or Path(model) == run):
        if recipe is None:
            _check_recipe(run)
        _check_run(run, named=Path(model))
        model, recipe = str(run / "final"), recipe or run / "config.toml"
    refuse_unnamed_run(Path(model))
    config = _config(model, recipe, set)
    trained = _trained(run, recipe, set)
    k = config.eval.samples if samples is None else samples
    if temperature is None and samples is not None:
        # Several samples need a temperature: greedy ones would be equal.
        temperature = 0.0 if k == 1 else config.eval.temperature or 1.0
    if task is not None and recipe is not None and task != one_set(config, "--task or --data").task:
        config = _of_another_task(config, task, set)  # the recipe may be a run's
    config = dataclasses.replace(
        # Options of the command line over the recipe.
        config,
        **_given(seed=seed, device=device),
        data=_data(config, _given(task=task, train=data, eval=data)),  # the file as it is
        eval=dataclasses.replace(
            config.eval, **_given(size=size, samples=samples, temperature=temperature, max_tokens=max_tokens)
        ),
        rollout=dataclasses.replace(config.rollout, **_given(batch=batch)),
    )
    if not config.numbered:
        # They count what to train on where the recipe names no data; the command line may have named some.
        own = dataclasses.replace(config.environment, episodes=EnvironmentConfig().episodes)
        config = dataclasses.replace(config, environment=own)
    if config.demonstrates:
        raise ConfigError(
            f"data.task: got {config.task!r}, whose rows have no rewards; name a task with rewards: --task gsm8k, or a "
            "--recipe of trew train"
        )
    from ..utils.console import Display

    display = Display(result=json is None and completions is None)
    # Everything is checked before weights are loaded; output files too, since hours lie between.
    ready = prepare(config, trained=trained, files=(json, completions), bar=display.bar)
    result = measure(ready, display)
    show(display, ready, result)
    _write(ready, result, json=json, completions=completions, display=display)
    return 0


@dataclass(frozen=True)
class Trained:
    """The settings that the model was trained with: those of its run or, where that is not known, of the recipe."""

    config: Config
    by_run: bool
    earlier: tuple[Config, ...] = ()  # of the run's first steps, where it went on under others


def _trained(run: Path | None, recipe: Path | None, overrides: tuple[str, ...]) -> Trained | None:
    """What is known of the training of the model; ``run`` is its run, if it is one's. None without run and recipe."""
    if run is None and recipe is not None and recipe.name == "config.toml":
        run = run_of(recipe.parent)  # of a checkpoint that was exported, for example
    if run is not None:
        # Without what --set changes: it changes the evaluation, not what was trained on.
        with contextlib.suppress(ConfigError):  # then a recipe was given instead
            _check_recipe(run)
            earlier = tuple(parse(tomllib.loads(each.config), base=run) for each in changes.in_folder(run))
            return Trained(load(run / "config.toml"), by_run=True, earlier=earlier)
    return None if recipe is None else Trained(load(recipe, overrides), by_run=False)


def _check_recipe(run: Path) -> None:
    """Raises ConfigError if the run's recipe is not a regular file."""
    from ..runs.report.safe_files import TEXT_BYTES, open_file

    try:
        open_file(run, "config.toml", most=TEXT_BYTES).close()
    except OSError as error:
        raise ConfigError(f"{run}/config.toml: {error.strerror}; give a recipe with --recipe FILE") from None


def _check_run(run: Path, *, named: Path) -> None:
    """Raises ConfigError if the run has no final weights, or other ones by now; those that are ``named`` themselves are
    as they are."""
    from ..training.exporting import has_gone_on

    refuse_no_policy(run)
    why = "" if (run / "final").is_dir() else "has no final weights yet (folder final)"
    if named == run and has_gone_on(run):
        why = "has gone on after the end that its final weights are of"
    if why:
        raise ConfigError(
            f"{run}: {why}; let the run finish with --resume, or export its newest checkpoint and name that folder: "
            f"trew export model {shlex.quote(str(run))} --out DIR"
        )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _data(config: Config, given: Mapping[str, Any]) -> Any:
    """The settings of the data; what is ``given`` can only replace those of one set."""
    return dataclasses.replace(one_set(config, "--task or --data"), **given) if given else config.data


def _of_another_task(config: Config, task: str, overrides: Sequence[str]) -> Config:
    """The settings without what belongs to the recipe's task: its data, its rewards, what counts as correct by them,
    settings of demonstrations, and an environment that makes its own problems, whose rewards would count in place of
    the task's. What ``overrides`` say of these stays."""
    from ..data.load import of_other_task

    keys = [text.partition("=")[0].strip() for text in overrides]
    data = of_other_task(one_set(config, "--task or --data"), task, named=keys)
    rewards = config.rewards if any(key.partition(".")[0] == "rewards" for key in keys) else ()
    usual = EvalConfig()
    judged = [name for name in ("correct_reward", "correct_at") if not {"eval", f"eval.{name}"} & {*keys}]
    eval_ = dataclasses.replace(config.eval, **{name: getattr(usual, name) for name in judged})
    left = config.numbered and not any(key.partition(".")[0] == "environment" for key in keys)
    world = EnvironmentConfig() if left else config.environment
    return dataclasses.replace(config, data=data, rewards=rewards, eval=eval_, sft=SftConfig(), environment=world)


def _config(model: str, recipe: Path | None, overrides: tuple[str, ...]) -> Config:
    if recipe is not None:
        return dataclasses.replace(load(recipe, overrides), model=model)
    table: dict[str, Any] = {"model": model, "data": {"task": "gsm8k"}}
    apply_overrides(table, overrides)
    return parse(table, base=Path.cwd())


@dataclass(frozen=True)
class Ready:
    """An evaluation that can start: everything checked, no weights loaded yet."""

    config: Config
    prompts: list[Prompt]
    rewards: RewardSet
    renderer: Renderer
    device: str
    correct: Correct
    notes: tuple[str, ...]
    episodes: EpisodePlan | None = None


def prepare(
    config: Config, *, trained: Trained | None = None, files: tuple[Path | None, ...] = (), bar: Bar | None = None
) -> Ready:
    """Checks settings, data, model and ``files`` (result, completions); raises ConfigError with all problems."""
    from ..models import files as model_files
    from ..models import loading
    from ..rollout import Renderer
    from ..training import episodes
    from ..training.right import correct_of

    limits.refuse(config)
    if trained is not None:
        limits.refuse(trained.config)  # as much is generated as that held out
    # ---- what needs no model and no data
    problems = Problems(validate(config))
    problems += _file_problems([file for file in files if file is not None])
    # The completions: whoever reads a file by its ending could not read parquet under another.
    wrong = [file for file in files[1:] if file and file.suffix != ".parquet"]
    problems += [f"--completions: got {file}, accepts a file ending in .parquet" for file in wrong]
    c = config
    device = problems.attempt(lambda: loading.resolve_device(c.device))
    model_notes: list[str] = []
    tokenizer = _tokenizer(c, problems, notes=model_notes)
    data = problems.attempt(lambda: _held_out(c, trained))
    rewards = _rewards(c, data[1] if data else (), problems) if data or c.rewards else None
    # A missing part has left its problem in the list; the checks below need all parts.
    if device is None or data is None or rewards is None or tokenizer is None:
        raise ConfigError(problems)
    # ---- checks of one part against another
    prompts, _, notes = data
    renderer = Renderer(tokenizer, stop=c.rollout.stop, eos_ids=model_files.end_ids(loading.folder(c.model)))
    fitted, fit_notes = _checked_prompts(c, prompts, renderer, rewards, problems, bar)
    positions, tried = loading.positions(c.model), episodes.tried(c, prompts)
    played = episodes.prepare(c, tried, renderer, positions=positions) if c.plays else None
    notes = [
        *model_notes, *notes, *([] if c.plays else renderer.notes(prompts)), *rewards.column_notes(prompts),
        *(rewards.thought_notes() if not c.plays and renderer.opens_thought(prompts) else ()),
        *rewards.code, *fit_notes,
    ]  # fmt: skip
    correct = correct_of(c, rewards)
    return Ready(c, fitted, rewards, renderer, device, correct, tuple(notes), played)


def _held_out(config: Config, trained: Trained | None) -> Any:
    """The prompts with their rewards and notes; rows of demonstrations have no rewards."""
    from ..data.load import check_task
    from ..data.tasks import TASKS
    from ..training import episodes

    if not config.plays:
        for one in config.sets:
            check_task(one.task, [task for task in TASKS if task not in DEMONSTRATED])
    if trained is None:
        return episodes.held_out(config)
    prompts, rewards, notes = episodes.held_out(config, trained=trained.config)
    # The run has said itself what its own held-out prompts share with its training data.
    own = config.sets == trained.config.sets and config.eval.size <= trained.config.eval.size
    if trained.by_run and not own and not config.numbered:
        notes = [*notes, *episodes.trained_on(prompts, trained.config)]
    if not config.numbered:
        _refuse_trained_on(prompts, trained)
    return prompts, rewards, notes


def _refuse_trained_on(prompts: Sequence[Prompt], trained: Trained) -> None:
    """Raises ConfigError for prompts that the run trained on before it went on under settings that hold out others."""
    from ..data.split import overlap_note
    from ..training import episodes

    last = trained.config
    for config in trained.earlier:
        if (config.sets, config.seed, config.eval.size) == (last.sets, last.seed, last.eval.size):
            continue
        for note in overlap_note(episodes.dataset(config).train, prompts):
            raise ConfigError(
                f"{note}. The run went on under settings that hold out other prompts than at first (changes.jsonl); "
                "name a file or test split of its own (--data)"
            )


def _checked_prompts(
    config: Config, prompts: list[Prompt], renderer: Renderer, rewards: RewardSet, problems: Problems, bar: Bar | None
) -> tuple[list[Prompt], list[str]]:
    """The prompts that fit into the model, and notes. Raises ConfigError with the problems of all of them."""
    problems += renderer.check([] if config.plays else prompts)
    problems += rewards.check_golds(prompts, bar=bar, sets=config.set_names)
    if config.plays and not problems:  # what is rendered of a row is its environment's affair
        return prompts, []
    fitted = None if problems else problems.attempt(lambda: _fit(config, prompts, renderer))
    if problems or fitted is None:
        raise ConfigError(problems)
    return fitted


def _tokenizer(config: Config, problems: Problems, *, notes: list[str]) -> Any:
    """Checks the model's files and loads its tokenizer; None, with problems added, where that cannot be done."""
    from ..models import loading

    template = config.chat_template
    wrong = loading.check(config.model, tokenizer=config.tokenizer, chat_template=template, notes=notes)
    problems += wrong
    if wrong:
        return None
    return problems.attempt(
        lambda: loading.load_tokenizer(config.model, tokenizer=config.tokenizer, chat_template=template)
    )


def _file_problems(files: Sequence[Path]) -> Iterator[str]:
    """Yields why output files cannot be written; checked first, because the evaluation before it may take hours."""
    for i, file in enumerate(files):
        refused = {
            "another output of this command goes there;": file.resolve() in [other.resolve() for other in files[:i]],
            "is a folder;": file.is_dir(),
            "its folder is missing; create it or": not file.parent.is_dir(),
            f"no permission in {file.parent};": not os.access(file.parent, os.W_OK),
        }
        if why := next((why for why, so in refused.items() if so), ""):
            yield f"{file}: cannot be written: {why} choose another file"


def _rewards(config: Config, defaults: Sequence[RewardConfig], problems: Problems) -> RewardSet | None:
    """The recipe's rewards, or the task's ``defaults``; None, with a problem added, where they cannot be used."""
    from ..rewards import RewardSet
    from ..training.episodes import rewards_of

    specs = rewards_of(config, defaults)
    if not specs:
        problems.append("rewards: none given, and the data have no default; give a --recipe with [[rewards]]")
        return None
    rewards = problems.attempt(lambda: RewardSet.from_config(specs))
    if rewards and config.cluster.reward_hosts:
        problems.attempt(lambda: rewards.use_hosts(config.cluster.reward_hosts, specs))
    if rewards and config.eval.correct_reward and config.eval.correct_reward not in rewards.names:
        problems.append(f"eval.correct_reward: got {config.eval.correct_reward!r}, accepts {', '.join(rewards.names)}")
    return rewards


def _fit(config: Config, prompts: list[Prompt], renderer: Renderer) -> tuple[list[Prompt], list[str]]:
    """Applies the configuration's policy for overlong prompts; returns the prompts and notes.

    Raises ConfigError if the remaining prompts with their completions are too long for the model.
    """
    from ..data import fitting
    from ..models import loading
    from ..training.planning import length_problems

    kept, notes = fitting(config, prompts, count=lambda p: len(renderer.encode(p)), what="evaluation")
    name = "eval.max_tokens" if config.eval.max_tokens else "rollout.max_tokens"
    most = {name: config.eval.max_tokens or config.rollout.max_tokens}
    longest = max(len(renderer.encode(p)) for p in kept)
    if too_long := length_problems(most, longest=longest, limit=loading.positions(config.model)):
        raise ConfigError(too_long)
    return kept, notes


def measure(ready: Ready, display: Display) -> EvalResult:
    """Loads the model and evaluates it, with a progress bar."""
    import torch

    from ..eval import evaluate
    from ..models import backends, loading
    from ..rollout.endings import facts_of
    from ..rollout.generate import generate
    from ..rollout.torch_engine import TorchEngine
    from ..types import Sampling

    c = ready.config
    if c.threads:
        torch.set_num_threads(c.threads)
    model = loading.load_model(c.model, device=ready.device)
    loading.check_vocab(model, ready.renderer.tokenizer)
    autocast = torch.bfloat16 if c.learner.dtype == "bfloat16" else None  # as a run with this recipe would evaluate
    engine = TorchEngine(
        model, ready.renderer, batch=c.rollout.batch, autocast=autocast, backend=backends.of(c, ready.device)
    )
    for note in ready.notes:
        display.line(f"note: {note}")
    how = Sampling(
        max_tokens=c.eval.max_tokens or c.rollout.max_tokens,
        temperature=c.eval.temperature,
        stop=c.rollout.stop,
        seed=c.seed,
    )
    with (
        contextlib.ExitStack() as ending,
        display.bar(f"evaluating {_subject(c)}", len(ready.prompts) * c.eval.samples) as bar,
    ):
        # Episodes need hosts, which ``ending`` closes after the evaluation.
        player = ready.episodes.play(engine, facts_of(model), ending) if ready.episodes else engine
        return evaluate(
            functools.partial(generate, player), ready.prompts, ready.rewards, samples=c.eval.samples, sampling=how,
            correct=ready.correct, progress=bar.advance, sets=c.set_names,
        )  # fmt: skip


def show(display: Display, ready: Ready, result: EvalResult) -> None:
    """Prints the result as a table, and what was left out."""
    c, k = ready.config, result.samples
    how = "greedy" if c.eval.temperature == 0 else f"temperature {c.eval.temperature:g}, seed {c.seed}"
    of = f"{_prompts(result.n)}, {k} completion{'s' * (k > 1)} each"
    display.line(f"\n{c.model} on {_subject(c)}: {of}, {how}")
    display.table(_table(result))
    for text in [each for each in (result.omission, *ready.rewards.take_warnings()) if each]:
        display.warn(text)
    if c.environment.name and any(r.status == "failed" for g in result.groups for r in g.group.rollouts):
        display.line(f"note: try the environment by itself: {trial(to_table(c))}")
    if result.truncated_share > 0.1:
        display.line("note: many completions were truncated; --max-tokens raises the limit")


def _subject(config: Config) -> str:
    """What the model is evaluated on: an environment, or its tasks; prompts of one's own by the name of their file."""
    if config.environment.name:
        return config.environment.name
    own = [one.train if one.eval == "auto" else one.eval for one in config.sets]
    tasks = [one.task if one.task != "prompts" else file for one, file in zip(config.sets, own, strict=True)]
    return " + ".join(dict.fromkeys(tasks))


def _prompts(count: int) -> str:
    return f"{count} prompt{'s' * (count != 1)}"


def _table(result: EvalResult) -> Table:
    from rich.table import Table

    from ..utils.console import accuracy_cells, rounded

    table = Table(box=None, pad_edge=False)
    for heading in ("", "value", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    names = {"accuracy" if result.samples == 1 else f"avg@{result.samples}": result.accuracy}
    fewer = {i: f" ({_prompts(n)})" for i, n in result.pass_at_n.items() if n != result.n}  # with enough verdicts
    names |= {f"pass@{i}{fewer.get(i, '')}": interval for i, interval in result.pass_at_intervals.items() if i > 1}
    names |= {f"  {name} ({_prompts(own.n)})": own.accuracy for name, own in result.sets.items()}
    for name, interval in names.items():
        table.add_row(name, *accuracy_cells(interval._asdict()))
    for name, value in result.rewards.items():
        table.add_row(f"reward {name}", rounded(value) if value == value else "-", "")
    table.add_row("length (tokens)", f"{result.mean_length:.1f}", "")
    table.add_row("cut off at the limit", f"{result.truncated_share:.1%}", "")
    table.add_row("tokens per second", f"{result.tokens_per_second:.0f}", "")
    return table


def _write(ready: Ready, result: EvalResult, *, json: Path | None, completions: Path | None, display: Display) -> None:
    """Writes the requested files, without secrets."""
    from json import dumps

    from ..errors import output_file
    from ..runs import redact
    from ..runs.files import write_atomic
    from ..runs.rollouts import write_rollouts

    if json is not None:
        table = to_table(ready.config)
        about = {key: table[key] for key in ("model", "seed", "data", "eval")} | {"device": ready.device}
        # Not in to_json, which checkpoints keep and older versions of trew read.
        own = result.to_json() | {"pass_at_n": {str(k): n for k, n in result.pass_at_n.items()}}
        text = dumps(redact({**about, "result": own}), indent=2) + "\n"
        write_atomic(json, lambda file: file.write(text.encode()), guard=output_file)
        display.line(f"result written to {json}")
    if completions is not None:
        write_rollouts(completions, result.groups, step=0, render=ready.renderer.render, guard=output_file)
        display.line(f"completions written to {completions}")
