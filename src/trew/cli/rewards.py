"""``trew rewards``: tests a reward on data before GPU hours are spent on it, and scores existing completions."""

# ruff: noqa: PT028 (a command named test is no test)
from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from ..data.rows import Row
    from ..rewards import RewardSet
    from ..rewards.reward_checks import Check
    from ..types import Group, ScoredGroup


def test(
    reward: Annotated[str, tyro.conf.Positional],
    /,
    *,
    data: str = "",
    task: str = "prompts",
    set: tuple[str, ...] = (),
    limit: int = 200,
    prompt_column: str = "prompt",
    seed: int = 0,
    timeout_s: float = 0.0,
    json: bool = False,
) -> int:
    """Test a reward on data before GPU hours are spent on it: known answers, hostile texts, repeats, threads, time.

    Gold answers must pass. Answers with one thing changed (sign, digit, order, ends of an interval) must fail.
    Formatting (white space, dollar signs, trailing zeros) must not matter. Texts built to hang must not exceed their
    time limit. Three repeats, another thread and another process must give the same scores. A function of your own is
    called with generated answers: only you can judge its values, but they must be numbers, the same every time, and
    independent of the batch. Exit code 0 if every check passes, 1 otherwise.

    Args:
        reward: A built-in name, path/to/file.py:function, or the folder of a reward model.
        data: The rows: a file, a folder or a hub id; empty for tasks that generate their problems.
        task: How to read the rows: gsm8k, math, arithmetic, countdown, mbpp, humaneval, reasoning-gym:NAME or prompts.
        set: key=value, an argument of the reward: --set mode=flexible thinking=true
        limit: How many rows to generate answers for; golds are checked in all rows.
        prompt_column: The column that holds the prompt (task prompts only).
        seed: Seed of generated problems.
        timeout_s: Time limit in seconds for one call of a function of your own; 0 = 20, less than in a recipe.
        json: Print the checks as JSON instead of a table.
    """
    from ..config import DataConfig
    from ..data import load_prompts
    from ..errors import ConfigError
    from ..rewards.reward_checks import HOSTILE_SECONDS, checks

    if limit < 1:
        raise ConfigError(f"--limit: got {limit}, accepts a whole number of at least 1")
    # A function of the user's own gets less time than in a run, as hostile texts are built to hang it.
    rewards = _load(reward, set, timeout_s=timeout_s or (HOSTILE_SECONDS if ".py:" in reward else 0.0))
    prompts = load_prompts(DataConfig(task=task, train=data, prompt_column=prompt_column), seed=seed)
    rewards.load()
    done = []
    if not json:
        print(_printable(f"reward {reward}"))
    for check in checks(rewards, prompts, limit=limit):
        done.append(check)
        if not json:
            show_check(check)
    rewards.close()
    holds = all(check.holds for check in done)
    if json:
        found = [dataclasses.asdict(check) for check in done]
        print(dumps({"reward": reward, "holds": holds, "checks": found, "warnings": rewards.take_warnings()}, indent=2))
        return 0 if holds else 1
    for warning in rewards.take_warnings():
        print(_printable(f"warning: {warning}"))
    return 0 if holds else 1


def show_check(check: Check) -> None:
    """Prints a check as soon as it is done, with the first examples where it fails."""
    print(_printable(f"{'ok' if check.holds else 'FAILED':<7} {check.what}: {check.numbers}"), flush=True)
    if not check.holds:
        for example in check.examples[:10]:
            print(f"          {_printable(example)}")
        if len(check.examples) > 10:
            print(f"          ... and {len(check.examples) - 10} more", flush=True)


def score(
    reward: Annotated[str, tyro.conf.Positional],
    /,
    *,
    data: str,
    out: str,
    set: tuple[str, ...] = (),
    completion_column: str = "completion",
    prompt_column: str = "prompt",
    timeout_s: float = 0.0,
    overwrite: bool = False,
) -> int:
    """Score existing completions: rows with a completion (or a list of them) and the reward's columns.

    The rollouts of a run (rollouts/NNNNNN.parquet) are such rows. Writes one row per completion.

    Args:
        reward: A built-in name, path/to/file.py:function, or the folder of a reward model.
        data: The rows, .jsonl or .parquet.
        out: The file to write, .jsonl or .parquet.
        set: key=value, an argument of the reward: --set mode=flexible thinking=true
        completion_column: The column with the completion: text, messages, or a list of texts.
        prompt_column: The column with the prompt, text or messages; only reward models need one.
        timeout_s: Time limit in seconds for one call of a function of your own; 0 = the default of a recipe.
        overwrite: Replace an existing file.
    """
    from ..data.files import read_rows, write_rows

    _refuse_output(out, overwrite=overwrite)
    rewards = _load(reward, set, timeout_s=timeout_s)
    # ---- rows to groups; everything that they lack is refused before anything is scored
    rows = read_rows(Path(data))
    groups = [_row_group(n, row, completion_column, prompt_column) for n, row in enumerate(rows)]
    _refuse_data(data, rows, groups, rewards)
    scored = _scored(groups, rewards)
    # ---- one line per completion
    firsts = _first_samples(rows, groups)
    path = Path(out)
    write_rows(path, [line for group, first in zip(scored, firsts, strict=True) for line in _lines(group, first)])
    means = [(k, f"{total / n:.4f}", f"{n:g}") for k, (total, n) in rewards.summary(scored).items() if n]
    _table(f"{reward} on {data}", ("", "mean", "completions"), means)
    print(f"{path}: {sum(len(group.scores) for group in scored)} rows")
    return 0


def serve(
    *,
    recipe: Path,
    host: str = "127.0.0.1",
    port: int = 8100,
    set: tuple[str, ...] = (),
    out: Path = Path("runs/rewards-serve"),
    tls_cert: str = "",
    tls_key: str = "",
) -> int:
    """Compute the rewards of a recipe for runs on other machines, on all cores of this one.

    A run with [cluster] reward_hosts sends completions and gets verdicts; no code is sent. Its reward files must be
    those of this recipe, by SHA-256, and so must trew's own rewards, Python, the packages that decide scores and the
    kind of sandbox for programs.
    Requests need the token in the environment variable TREW_REWARDS_TOKEN on both sides; without one, this command
    generates a token, shows it once and keeps it in the folder --out. Reward models are scored by the run itself.
    Ctrl-C or SIGTERM ends it.

    Args:
        recipe: The recipe of the runs, a TOML file: its [[rewards]] are used.
        host: The interface to listen on: a name or address of this machine. A public one, or all, needs TLS.
        port: The port; 0 takes a free one.
        set: key=value, overrides the recipe.
        out: The folder for the token.
        tls_cert: The certificate to show, a PEM file; runs trust the system's authorities, or SSL_CERT_FILE.
        tls_key: Its private key, a PEM file without a password.
    """
    from .serve import serve_rewards

    return serve_rewards(_of_recipe(recipe, set), recipe, host, port, out, (tls_cert, tls_key))


# --------------------------------------------------------------------------------------------------------------------


def _refuse_output(out: str, *, overwrite: bool) -> None:
    """Raises ConfigError if the scores cannot be written to ``out``; called before anything is scored."""
    from ..errors import ConfigError

    if Path(out).suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--out: got {out!r}, accepts a file ending in .jsonl or .parquet")
    if Path(out).is_dir():
        raise ConfigError(f"--out: {out} is a folder; name a file")
    if Path(out).exists() and not overwrite:
        raise ConfigError(f"--out: {out} already exists; name another file, or add --overwrite")
    # Missing folders are made when the scores are written.
    folder = next(parent for parent in Path(out).absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--out: {out} cannot be written: {folder} is no folder that may be written in; name another")


def _without_tokens(rows: Sequence[Row], groups: Sequence[Group]) -> str:
    """The place of the first row with a completion whose tokens are not known; empty if there is none."""
    return next(
        (
            row.place
            for row, group in zip(rows, groups, strict=True)
            if "token_ids" not in row.values or any(c.text and not len(c.token_ids) for c in group.rollouts)
        ),
        "",
    )


def _refuse_data(data: str, rows: Sequence[Row], groups: Sequence[Group], rewards: RewardSet) -> None:
    """Raises ConfigError if the rows lack something that the rewards read."""
    from ..errors import ConfigError

    if not rows:
        raise ConfigError(f"--data: {data} has no rows, so there is nothing to score; name a file with completions")
    if (needs := _needs_tokens(rewards)) and (place := _without_tokens(rows, groups)):
        raise ConfigError(
            f"{data}: reward {needs!r} reads tokens, but not every row has a column token_ids with those of its "
            f"completion, or one list for each of its completions: {place}"
        )
    # A model scores an answer to a question; without one its scores would look like any others.
    unasked = next((r.place for r, g in zip(rows, groups, strict=True) if not (g.prompt.text or g.prompt.messages)), "")
    if unasked and (name := next((reward.name for reward in rewards.rewards if reward.model), "")):
        raise ConfigError(
            f"{data}: reward {name!r} is a model, which reads prompts, but {unasked} has none; name the column that "
            "has them with --prompt-column"
        )
    # Only rollouts of a run say how an episode ended.
    played = any(row.values.get("ending") and "rollout_status" in row.values for row in rows)
    if played and (needs := _needs_turns(rewards)):
        raise ConfigError(
            f"{data}: got episodes of an environment, accepts completions of one turn for reward {needs!r}: it would "
            "get the row of an episode and its last reply, not what was said between them; take a built-in reward that "
            "reads the last reply alone, or the run's own scores in the columns score and parts"
        )
    if problems := rewards.column_problems([group.prompt for group in groups]):
        raise ConfigError(problems)


def _scored(groups: Sequence[Group], rewards: RewardSet) -> list[ScoredGroup]:
    """Scores all groups under a progress bar, and prints the rewards' warnings."""
    from ..utils.console import Display

    rewards.load()
    scored = []
    with Display().bar("scoring", sum(len(group.rollouts) for group in groups)) as bar:
        for part in _parts(groups):
            scored += rewards.score(part, progress=bar.advance)
    rewards.close()
    for warning in rewards.take_warnings():
        print(_printable(f"warning: {warning}"))
    return scored


def _of_recipe(recipe: Path, overrides: Sequence[str]) -> RewardSet:
    """The rewards of a recipe as its runs have them: its own or its task's, and what an environment gives."""
    from ..config import load, one_set
    from ..data.load import make_task
    from ..rewards import RewardSet
    from ..training.episodes import rewards_of

    config = load(recipe, overrides)
    data = one_set(config, "trew rewards")
    # An environment that makes its own problems has no task.
    defaults = () if config.numbered or config.rewards else make_task(data).rewards(())
    return RewardSet.from_config(rewards_of(config, defaults))


def _load(reward: str, pairs: Sequence[str], *, timeout_s: float = 0.0) -> RewardSet:
    from ..config import FUNCTION_SECONDS, RewardConfig, apply_overrides
    from ..errors import ConfigError
    from ..rewards import RewardSet

    if not 0 <= timeout_s < float("inf"):
        raise ConfigError(f"--timeout-s: got {timeout_s}, accepts a number of seconds above 0")
    args: dict[str, Any] = {}
    apply_overrides(args, pairs)
    if (Path(reward) / "config.json").is_file():
        return RewardSet.from_config([RewardConfig(model=reward, args=args, timeout_s=timeout_s or FUNCTION_SECONDS)])
    return RewardSet.from_config([RewardConfig(name=reward, args=args, timeout_s=timeout_s or FUNCTION_SECONDS)])


def _parts(groups: Sequence[Group], *, completions: int = 256) -> Iterator[list[Group]]:
    """Yields the groups in parts of about ``completions``: the size of a step, so that time limits mean the same."""
    part: list[Group] = []
    for group in groups:
        part.append(group)
        if sum(len(g.rollouts) for g in part) >= completions:
            yield part
            part = []
    if part:
        yield part


def _row_group(number: int, row: Row, completion_column: str, prompt_column: str) -> Group:
    """Turns one data row into a group: its completions, and its columns as the rewards receive them."""
    from ..data.messages import nested_messages
    from ..errors import DataError, nearest
    from ..rewards.reward_checks import text_group
    from ..types import Prompt

    columns = dict(row.values)
    if completion_column not in columns:
        close = nearest(completion_column, columns)
        raise DataError(f"{row.place}: has no column {completion_column!r}{close}; columns: {', '.join(columns)}")
    given, prompt, ids = columns.pop(completion_column), columns.pop(prompt_column, ""), columns.pop("token_ids", None)
    # A cell may be empty: rows without an id are different prompts all the same.
    uid = str(number if columns.get("uid") is None else columns["uid"])
    if isinstance(columns.get("columns"), str):
        columns, chat = _of_a_run(columns, row.place)
        prompt = chat if chat is not None and prompt_column == "prompt" else prompt
    elif isinstance(prompt, str):
        if prompt_column == "prompt" and prompt:  # HumanEval's tests use what it defines; no function is given it
            columns["prompt"] = prompt
        prompt = nested_messages(prompt) or prompt  # as training reads such a string
    texts = _texts(given)
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{row.place}: column {completion_column!r} must be text, messages, or a list of texts")
    tokens = _tokens(ids, len(texts), row.place)
    if isinstance(prompt, list):
        return text_group(Prompt(uid, messages=tuple(prompt), columns=columns), texts, token_ids=tokens)
    # An empty cell is a prompt that is not known, as a missing column is: not the word None.
    return text_group(Prompt(uid, text="" if prompt is None else str(prompt), columns=columns), texts, token_ids=tokens)


def _tokens(ids: Any, count: int, place: str) -> list[list[int]] | None:
    """The tokens of each completion of a row; None if they are not known: one list cannot belong to several."""
    from ..errors import DataError

    if ids is None or not count:
        return None
    if _are_numbers(ids):
        return [ids] if count == 1 else None
    if isinstance(ids, list) and len(ids) == count and all(map(_are_numbers, ids)):
        return ids
    raise DataError(
        f"{place}: column 'token_ids' must be a list of numbers, or one such list for each of {count} completions, "
        f"got {ids!r:.80}"
    )


def _are_numbers(ids: Any) -> bool:
    return isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)


def _texts(given: Any) -> list[Any]:
    """The completions in a cell: a list of messages is one, a list of texts is several."""
    many = isinstance(given, list) and not (given and isinstance(given[0], dict))
    return [_text(one) for one in (given if many else [given])]


def _of_a_run(columns: Mapping[str, Any], place: str) -> tuple[dict[str, Any], list[Any] | None]:
    """The data row that a run's rollouts keep as JSON in one column, and the prompt's messages as its rewards got them;
    None of a prompt that was a text."""
    chat = columns.get("messages")
    messages = _nested(chat, "messages", list, place) if isinstance(chat, str) else None
    return _nested(columns["columns"], "columns", dict, place), messages


def _nested(text: str, name: str, kind: type, place: str) -> Any:
    from ..errors import DataError

    try:
        value = loads(text)
    except ValueError as error:
        raise DataError(f"{place}: column {name!r} is not JSON, as in a run's rollouts: {error}") from None
    if not isinstance(value, kind):
        wanted = "object" if kind is dict else "array"
        raise DataError(f"{place}: column {name!r} must hold a JSON {wanted}, as in a run's rollouts")
    return value


def _text(completion: Any) -> Any:
    """The text of a completion; for messages, the content of the last one."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        return completion[-1].get("content")
    return completion


def _needs_tokens(rewards: RewardSet) -> str:
    from ..rewards import KINDS

    for reward in rewards.rewards:
        named = reward.function is not None and reward.function.names_tokens
        of_kind = KINDS[reward.kind].from_row if reward.kind in KINDS else ()
        if named or {"length", "token_ids"} & {*of_kind}:
            return reward.name
    return ""


def _needs_turns(rewards: RewardSet) -> str:
    """The name of a reward that reads more of a completion than the text of its last turn; empty if none does."""
    for reward in rewards.rewards:
        # A function in verl's form gets a text alone.
        if reward.model or (reward.function and not reward.function.verl):
            return reward.name
    return _needs_tokens(rewards)


def _first_samples(rows: Sequence[Row], groups: Sequence[Group]) -> list[int]:
    """The sample number of every row's first completion, so that uid and sample together identify a completion.

    A run's rollouts have the number in the row; other rows of a prompt are numbered on.
    """
    following: dict[str, int] = {}
    firsts = []
    for row, group in zip(rows, groups, strict=True):
        own, uid = row.values.get("sample"), group.prompt.uid
        # bool is an int, and no number of a sample.
        whole = isinstance(own, int) and not isinstance(own, bool)
        firsts.append(own if whole else following.get(uid, 0))
        following[uid] = firsts[-1] + len(group.rollouts)
    return firsts


def _lines(scored: ScoredGroup, first: int) -> list[dict[str, Any]]:
    pairs = enumerate(zip(scored.group.rollouts, scored.scores, strict=True), start=first)
    return [
        {
            "uid": scored.group.prompt.uid,
            "sample": i,
            "completion": completion.text,
            "score": score.value,
            "status": score.status,
            "parts": dict(score.parts),
            "extracted": score.extracted,
        }
        for i, (completion, score) in pairs
    ]


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*header, title=escape(title), title_justify="left")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


def _printable(text: str) -> str:
    """Makes untrusted text safe for a terminal: no control sequences, no reordering marks."""
    return "".join(ch if ch.isprintable() else repr(ch)[1:-1] for ch in text)
