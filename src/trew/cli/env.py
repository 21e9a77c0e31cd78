"""``trew env``: lists environments, plays one by hand, and checks one with scripted replies before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from ..env import Say
    from ..env.hosts import Hosts


def env(
    name: Annotated[str, tyro.conf.Positional] = "",
    /,
    *,
    play: bool = False,
    check: bool = False,
    set: tuple[str, ...] = (),
    tools: tuple[str, ...] = (),
    data: str = "",
    task: str = "prompts",
    seed: int = 0,
    episodes: int = 100,
    turns: int = 20,
    timeout_s: float = 20.0,
) -> int:
    """List environments, play one by hand, or check one with scripted replies.

    --play shows what the policy would read, and you reply; an empty line or Ctrl-D ends it. --check plays scripted
    episodes twice: equal seeds must give equal episodes, no reply may crash it, and it shows how long its answers take.
    Exit code 0 if every check passes, 1 otherwise. Without either, shows the environment's description and arguments;
    without a name, lists the built-in ones.

    Args:
        name: A built-in name or path/to/file.py:name, as environment.name in a recipe.
        play: Play one episode by hand.
        check: Play scripted episodes.
        set: key=value, an argument of the environment: --set largest=15 turns=5
        tools: A tool that it may use: a built-in name or path/to/file.py:function.
        data: Rows for it: a file, a folder or a hub id, read as --task says; row N is given to seed N.
        task: How to read --data: gsm8k, math, prompts, or another task.
        seed: Seed of the episode that you play.
        episodes: How many episodes --check plays, twice.
        turns: The most replies of an episode.
        timeout_s: Seconds that one answer may take.
    """
    from ..config import apply_overrides
    from ..env.hosts import Hosts
    from ..env.load import Spec
    from ..errors import ConfigError

    if not name:
        _list()
        return 0
    for option, value in (("--episodes", episodes), ("--turns", turns)):
        if value < 1:
            raise ConfigError(f"{option}: got {value}, accepts a whole number of at least 1")
    if play and check:
        raise ConfigError("--play and --check: got both, accepts one of them")
    args: dict[str, Any] = {}
    apply_overrides(args, set)
    hosts = Hosts(Spec(name, args, tools), timeout_s=timeout_s, size=0 if check else 1)
    try:
        hosts.load()
        rows = _rows(task, data)
        if check:
            return _check(name, hosts, rows, episodes=episodes, turns=turns)
        if play:
            return _play(hosts, rows[seed % len(rows)], seed=seed, turns=turns)
    finally:
        hosts.close()
    _describe(name)
    return 0


def _rows(task: str, data: str) -> list[Mapping[str, Any]]:
    """The rows that episodes are played on; one empty row without data."""
    from ..config import DataConfig
    from ..data import load_prompts

    if not data and task == "prompts":
        return [{}]
    return [prompt.columns for prompt in load_prompts(DataConfig(task=task, train=data), seed=0)]


def _list() -> None:
    from ..env.load import ENVIRONMENTS

    width = max(map(len, ENVIRONMENTS))
    print("Built-in environments:")
    for name, function in ENVIRONMENTS.items():
        print(f"  {name:<{width}}   {(function.__doc__ or '').strip().splitlines()[0]}")
    print("\ntrew env NAME says more; --play plays it, --check tests it. Your own: path/to/file.py:name")


def _describe(name: str) -> None:
    """Shows a built-in environment's arguments and text; of a user's file, that it can be loaded."""
    import inspect

    from ..env.load import ENVIRONMENTS

    function = ENVIRONMENTS.get(name)
    if function is None:
        print(f"{name}: can be loaded; --play plays it, --check tests it")
        return
    given = list(inspect.signature(function).parameters.values())[2:]  # without row and seed
    print(f"{name}\n\n{inspect.cleandoc(function.__doc__ or '')}\n")
    print("Arguments: " + ", ".join(f"{each.name} = {each.default!r}" for each in given))


def _check(name: str, hosts: Hosts, rows: list[Mapping[str, Any]], *, episodes: int, turns: int) -> int:
    from ..env.trial import checks
    from .rewards import show_check

    print(f"environment {name}")
    holds = True
    for check in checks(hosts, rows, episodes=episodes, turns=turns):
        holds &= check.holds
        show_check(check)
    return 0 if holds else 1


def _play(hosts: Hosts, row: Mapping[str, Any], *, seed: int, turns: int) -> int:
    from ..env import Reply

    key, total = hosts.begin(row, seed), 0.0
    for turn in range(turns + 1):
        [answer] = hosts.poll(None)
        if answer.say is None:
            print(f"The episode failed: it {answer.kind}.\n{_printable(answer.error)}")
            return 1
        total += answer.say.reward or 0.0
        _show(answer.say)
        if answer.say.done:
            print(f"The episode is over after {turn} replies; its reward is {total:g}.")
            return 0
        if turn == turns:
            break
        try:
            text = input("you> ")
        except EOFError:
            text = ""
        if not text:
            print(f"\nYou left after {turn} replies, with a reward of {total:g}.")
            return 0
        hosts.reply(key, Reply(text, turn=turn))
    print(f"The budget of {turns} replies is used up; the reward is {total:g}.")
    return 0


def _show(say: Say) -> None:
    if say.reward is not None:
        print(f"  (reward {say.reward:g})")
    for message in say.messages:
        print(f"{message['role']}: {_printable(str(message.get('content', '')))}", flush=True)
    for name, value in say.metrics.items():
        print(f"  ({name} {value:g})")


def _printable(text: str) -> str:
    from .main import visible

    return "\n".join(visible(line) for line in text.splitlines())
