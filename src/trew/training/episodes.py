"""Prepares the episodes of a recipe with an environment: checks them before a model is loaded, and plays them later."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import Config, EnvironmentConfig, RewardConfig, to_table
from ..data import Dataset, by_set
from ..data.episodes import numbered_episodes
from ..data.load import load_eval, load_eval_of_sets, load_sets, load_task
from ..data.split import overlap_note
from ..env.hosts import Hosts
from ..env.load import Spec
from ..env.protocol import Say
from ..env.tools import ToolFormat, recognised
from ..errors import ConfigError, TrewError
from ..rollout.bridge import Bridges, as_shown
from ..rollout.chat import Renderer
from ..rollout.endings import ModelFacts
from ..rollout.engine import Engine
from ..rollout.episodes import Episodes, Limits, environment_seed, row_of
from ..types import Prompt
from ..utils.commands import trial

TRIED = 8
"""Openings that are looked at before a run: the first of each data set for training and evaluation."""
WITHOUT_LIMIT = 1 << 31
"""Tokens of an episode where neither the recipe nor the model has a limit."""


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """Episodes that can be played. ``opening``: tokens of the longest opening that was tried; ``around``: tokens that
    the template writes around an observation."""

    settings: EnvironmentConfig
    renderer: Renderer
    format: ToolFormat | None
    opening: int
    around: int

    def limits(self, positions: int | None) -> Limits:
        """What ends an episode, for a model of so many positions."""
        own = self.settings
        # 0 and None stand for no limit.
        tokens = min(n for n in (own.episode_tokens, positions, WITHOUT_LIMIT) if n)
        return Limits(own.turns, tokens, own.observation_tokens + self.around)

    def most_tokens(self, reply: int, positions: int | None) -> int:
        """The most tokens behind an opening, with replies of so many tokens."""
        # Behind the longest opening: the longest context, and the last reply behind it.
        return self.limits(positions).longest(self.opening, reply) + reply - self.opening

    def play(self, engine: Engine, facts: ModelFacts, ending: contextlib.ExitStack) -> Episodes:
        """An engine whose rollouts are episodes. ``ending`` ends its processes."""
        hosts = _hosts(self.settings)
        ending.callback(hosts.close)
        bridges = Bridges(self.renderer, most=self.settings.observation_tokens, ends=facts.ends)
        return Episodes(
            engine, hosts, bridges, limits=self.limits(facts.positions), format=self.format,
            ends=self.renderer.stop_ids | facts.ends, on_failure=self.settings.on_failure,
        )  # fmt: skip


def dataset(config: Config) -> Dataset:
    """The prompts of a recipe: its data or, where it names none for its environment, numbered episodes."""
    if config.numbered:
        return numbered_episodes(config.environment.episodes, eval_size=config.eval.size)
    if isinstance(config.data, tuple):
        return load_sets(config.data, eval_size=config.eval.size, seed=config.seed)
    return load_task(config.data, eval_size=config.eval.size, seed=config.seed)


def held_out(
    config: Config, *, trained: Config | None = None
) -> tuple[list[Prompt], tuple[RewardConfig, ...], list[str]]:
    """The prompts to evaluate on, with the task's rewards and notes.

    ``trained``: the settings that the model was trained with. Of data that both have, only what those hold out is
    evaluated, whatever size and seed ``config`` has. Raises ConfigError where that is less than ``eval.size``.
    """
    if config.numbered:
        return numbered_episodes(0, eval_size=config.eval.size).eval, (), []
    size, seed, first = config.eval.size, config.seed, None
    if trained is not None and _same_source(config, trained):
        # Another size or seed would divide the same data in another way, and evaluate what was trained on.
        size, seed, first = trained.eval.size, trained.seed, config.eval.size
    if isinstance(config.data, tuple):
        return load_eval_of_sets(config.data, size=size, seed=seed, first=first)
    return load_eval(config.data, size=size, seed=seed, first=first)


def _same_source(config: Config, trained: Config) -> bool:
    """Whether prompts of both come from the same task or file."""
    # A file may be read as another task; what is made, or the task's own set, differs by the task.
    ours, theirs = ({_place(one.train) or f"task {one.task}" for one in own.sets} for own in (config, trained))
    return not ours.isdisjoint(theirs)


def _place(source: str) -> str:
    """A source by which it is known: of a file or a folder, its absolute path, however it was written."""
    path = os.path.expanduser(source)
    return os.path.realpath(path) if source and os.path.exists(path) else source


def trained_on(prompts: Sequence[Prompt], trained: Config) -> list[str]:
    """A note on the prompts that a training with the settings ``trained`` had among its own; empty if there are none.
    Says so where its data cannot be read."""
    try:
        return overlap_note(dataset(trained).train, prompts)
    except (TrewError, OSError) as error:
        reason = str(error).partition("\n")[0]
        return [f"whether the run was trained on these prompts is not known, as its data cannot be read: {reason}"]


def rewards_of(config: Config, defaults: Sequence[RewardConfig]) -> tuple[RewardConfig, ...]:
    """The recipe's rewards, or the task's ``defaults``; with an environment, also what that gives. Of several data
    sets, those that no reward of the recipe judges have the defaults."""
    specs = (*config.rewards, *_of_unjudged_sets(config.rewards, defaults)) if config.rewards else tuple(defaults)
    if config.environment.name and all(spec.name != "environment" for spec in specs):
        return (RewardConfig(name="environment"), *specs)
    return specs


def _of_unjudged_sets(given: Sequence[RewardConfig], defaults: Sequence[RewardConfig]) -> list[RewardConfig]:
    """The default rewards of the data sets, of several, that none of the ``given`` ones is for."""
    if not all(spec.sets for spec in given):
        return []
    judged = {name for spec in given for name in spec.sets}
    left = [dataclasses.replace(spec, sets=tuple(n for n in spec.sets if n not in judged)) for spec in defaults]
    return [spec for spec in left if spec.sets]


def tried(config: Config, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts whose openings are looked at before a run: the first of the data, or of each of several sets."""
    parts = by_set(prompts, config.set_names).values() if config.set_names else [prompts]
    return [prompt for part in parts for prompt in part[:TRIED]]


def prepare(config: Config, prompts: Sequence[Prompt], renderer: Renderer, *, positions: int | None) -> EpisodePlan:
    """Begins an episode for each of ``prompts``, and checks that this model can play them. Raises ConfigError with
    every problem."""
    openings = _openings(config, prompts)
    # One opening stands for all of them here: one with tools, which some rows may bring and others not.
    first = next((opening for opening in openings if opening.tools), openings[0])
    format = _format(renderer, config) if first.tools or config.environment.tools else None
    bridges = Bridges(renderer, most=config.environment.observation_tokens)
    said, shown = as_shown(first, format)
    if problems := bridges.check(said, tools=shown):
        raise ConfigError(problems)
    lengths = []
    for opening in openings:
        said, shown = as_shown(opening, format)
        lengths.append(len(bridges.opening(bridges.harmless(said).messages, tools=shown)))
    bridge = bridges.bridge([{"role": "user", "content": "x"}], ended_by=None)
    # Twice what the template writes around one message: several results of tools are one observation.
    plan = EpisodePlan(config.environment, renderer, format, max(lengths), 2 * len(bridge or ()))
    if problems := _length_problems(config, plan, positions):
        raise ConfigError(problems)
    return plan


def openings(config: Config, plan: EpisodePlan, prompts: Sequence[Prompt]) -> list[tuple[str, int]]:
    """How episodes on ``prompts`` begin, as the model reads it, each with its number of tokens."""
    bridges = Bridges(plan.renderer, most=config.environment.observation_tokens)
    found = []
    for opening in _openings(config, prompts):
        said, shown = as_shown(opening, plan.format)
        ids = bridges.opening(bridges.harmless(said).messages, tools=shown)
        found.append((plan.renderer.decode_whole(ids), len(ids)))
    return found


def notes(config: Config) -> list[str]:
    """What a user should know of how these episodes are played."""
    ranks = config.cluster.learner
    if config.cluster.rollout != "embedded" or ranks == 1 or config.environment.turns == 1:
        return []
    return [
        f"environment.turns: {ranks} ranks generate the first replies of a step's episodes; all later ones are "
        "generated by rank 0 alone, while the others wait. Servers share all turns: cluster.rollout = 'vllm'"
    ]


def _hosts(settings: EnvironmentConfig) -> Hosts:
    spec = Spec(settings.name, settings.args, settings.tools)
    return Hosts(spec, size=settings.workers, timeout_s=settings.timeout_s)


def _openings(config: Config, prompts: Sequence[Prompt]) -> list[Say]:
    """The openings of episodes. Raises ConfigError where one fails."""
    hosts = _hosts(config.environment)
    try:
        keys = {hosts.begin(row_of(prompt), environment_seed(prompt)): prompt for prompt in prompts}
        found: dict[str, Say] = {}
        # As long as no opening has failed, every episode answers exactly once.
        while len(found) < len(keys):
            for answer in hosts.poll(None):
                if answer.say is None:
                    raise ConfigError(
                        f"environment: the opening of prompt {keys[answer.key].uid!r} failed: {answer.kind}"
                        f"{_brief(answer.error)}; {trial(to_table(config))} tries it by itself"
                    )
                found[answer.key] = answer.say
        return [found[key] for key in keys]
    finally:
        hosts.close()


def _brief(error: str) -> str:
    r"""An error of an environment in one line: the last of its traceback, and the place that is named last.

    >>> _brief('Traceback (most recent call last):\n  File "e.py", line 4, in e\n    1 / 0\nZeroDivisionError: 1 / 0\n')
    ' (e.py:4): ZeroDivisionError: 1 / 0'
    """
    places = re.findall(r'^ +File "(.+)", line (\d+)', error, re.MULTILINE)
    where = " ({}:{})".format(*places[-1]) if places else ""
    return f"{where}: {error.rstrip().rpartition(chr(10))[2]}"


def _format(renderer: Renderer, config: Config) -> ToolFormat:
    has_parser = getattr(renderer.tokenizer, "response_template", None)
    response = renderer.tokenizer.parse_response if has_parser else None
    return recognised(renderer.apply, response=response, wanted=config.environment.tools_format)


def _length_problems(config: Config, plan: EpisodePlan, positions: int | None) -> list[str]:
    """Settings that leave no room for a reply, or none for another turn."""
    tokens, own = plan.limits(positions).tokens, config.environment
    if positions and own.episode_tokens > positions:
        return [
            f"environment.episode_tokens: got {own.episode_tokens}, accepts at most the model's {positions} positions"
        ]
    return [
        f"{key}: got {most} after openings of up to {plan.opening} tokens, accepts at most "
        f"{max(tokens - plan.opening, 0)}: an episode has {tokens} tokens (environment.episode_tokens, or the model's "
        "positions); lower it, or shorten the opening"
        for key, most in {
            "rollout.max_tokens": config.rollout.max_tokens,
            "eval.max_tokens": config.eval.max_tokens,
        }.items()
        if plan.opening + most > tokens
    ]
