"""``trew env``: lists environments, plays one by hand, and checks one with scripted replies before training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from ..env import Say
    from ..env.hosts import Answer, Hosts


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
    Both call tools by the plain protocol: a line "calculator: 2 + 3", or NAME: {"x": 1, "y": 2} for several arguments.
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
    from .main import temporary_problem

    if not name:
        _list()
        return 0
    for option, value in (("--episodes", episodes), ("--turns", turns)):
        if value < 1:
            raise ConfigError(f"{option}: got {value}, accepts a whole number of at least 1")
    if play and check:
        raise ConfigError("--play and --check: got both, accepts one of them")
    if problem := temporary_problem():  # its processes would end with a traceback
        raise ConfigError(problem)
    args: dict[str, Any] = {}
    apply_overrides(args, set)
    # --check plays many episodes at once, on all cores (size 0); by hand it is one.
    hosts = Hosts(Spec(name, args, tools), timeout_s=timeout_s, size=0 if check else 1)
    try:
        hosts.load()
        rows = _rows(task, data, episodes)
        if check:
            return _check(name, hosts, rows, episodes=episodes, turns=turns)
        if play:
            return _play(hosts, rows[seed % len(rows)], seed=seed, turns=turns)
    finally:
        hosts.close()
    _describe(name)
    return 0


def _rows(task: str, data: str, episodes: int) -> list[Mapping[str, Any]]:
    """The rows that episodes are played on, as a run gives them: of the data, or the numbers of episodes without."""
    from ..config import DataConfig
    from ..data import load_prompts
    from ..data.episodes import numbered_episodes
    from ..rollout.episodes import row_of

    if not data and task == "prompts":
        prompts = numbered_episodes(episodes, eval_size=0).train
    else:
        prompts = load_prompts(DataConfig(task=task, train=data), seed=0)
    return [row_of(prompt) for prompt in prompts]


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
    from ..env.tools.plain import PlainFormat
    from ..env.trial import spoken

    key, tools, earned = hosts.begin(row, seed), (), list[float]()
    # One more round than replies: the answer to the last one is shown.
    for turn in range(turns + 1):
        [answer] = hosts.poll(None)
        if answer.say is None:
            return _failed(answer)
        say = answer.say
        if turn == 0:
            tools = say.tools
            # The opening lists the tools, as a run's prompt does.
            say = dataclasses.replace(say, messages=PlainFormat().opening(say.messages, tools))
        if say.reward is not None:
            earned.append(say.reward)
        _show(say)
        if say.done:
            print(f"The episode is over after {_replies(turn)}; {_reward(earned)}.")
            return 0
        if turn == turns:
            break
        # An empty line ends the episode, as the end of input does.
        text = _asked()
        if not text:
            print(f"\nYou left after {_replies(turn)}; {_reward(earned)}.")
            return 0
        hosts.reply(key, spoken(text, tools, turn))
    return _out_of_turns(hosts, key, earned, turns)


def _out_of_turns(hosts: Hosts, key: str, earned: list[float], turns: int) -> int:
    """Ends an episode as a run does, where an environment may judge what a budget has ended."""
    if hosts.judges_stopped:
        hosts.stopped(key)
        [answer] = hosts.poll(None)
        if answer.say is None:
            return _failed(answer)
        if answer.say.reward is not None:
            earned.append(answer.say.reward)
    print(f"The budget of {_replies(turns)} is used up; {_reward(earned)}.")
    return 0


def _failed(answer: Answer) -> int:
    print(f"The episode failed: it {answer.kind}.\n{_printable(answer.error)}")
    return 1


def _asked() -> str:
    try:
        return input("you> ")
    except EOFError:
        return ""


def _replies(count: int) -> str:
    return f"{count} {'reply' if count == 1 else 'replies'}"


def _reward(earned: list[float]) -> str:
    return f"its reward is {math.fsum(earned):g}" if earned else "it has no reward, so a run would not judge it"


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
