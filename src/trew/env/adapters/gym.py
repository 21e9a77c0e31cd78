"""``gym:ID``: an environment of gymnasium whose observations and actions are text, or whole numbers with names.

Arguments: ``actions``, a word for each action of a ``Discrete`` space; ``observations``, likewise, where numbers alone
say nothing; ``opening``, what the policy reads first, before the first observation. Others go to ``gymnasium.make``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from ...utils.installing import install_extra
from ..protocol import Environment, Reply, Say

EXTRA = "gym"


def adapt(name: str, args: Mapping[str, Any]) -> tuple[Callable[[], Environment], Mapping[str, str]]:
    """Makes the environment once, to see what it is like. Raises ConfigError."""
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(f"environment.name: gym:{name} needs gymnasium ({error}): {install_extra(EXTRA)}") from None
    ours = ("actions", "observations", "opening")
    theirs = {key: value for key, value in args.items() if key not in ours}

    def make() -> Any:
        # Without its limit of steps, which says nothing about the policy: environment.turns is the limit here, and an
        # episode that reaches it counts as truncated.
        return gymnasium.make(name, max_episode_steps=-1, **theirs)

    try:
        made = make()
    except Exception as error:  # of gymnasium, and whatever an environment's constructor does
        raise ConfigError(f"environment.name: gym:{name}: {type(error).__name__}: {error}") from None
    actions = _words(gymnasium, made.action_space, "actions", args)
    observations = _words(gymnasium, made.observation_space, "observations", args)
    if isinstance(made.action_space, gymnasium.spaces.Discrete) and actions is None:
        count = int(made.action_space.n)
        raise ConfigError(f"environment.args.actions: gym:{name} has {count} actions; give {count} words, one for each")
    # Made only to look at its spaces: every episode makes its own.
    made.close()
    opening = str(args.get("opening", ""))
    return lambda: GymEnvironment(make(), actions=actions, observations=observations, opening=opening), {}


def _words(gymnasium: Any, space: Any, which: str, args: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The words for the numbers of a space, if they are given. Raises ConfigError if the space has no text form."""
    given = args.get(which)
    if isinstance(space, gymnasium.spaces.Text):
        if given is not None:
            raise ConfigError(f"environment.args.{which}: they are text already; remove it")
        return None
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigError(f"environment.name: {which} are {space}, accepts Text and Discrete; wrap the environment")
    if given is None:
        return None
    # A text would be a list of its letters.
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"environment.args.{which}: got {given!r}, accepts a list of {int(space.n)} words")
    words = tuple(map(str, given))
    if len(words) != int(space.n) or len({word.lower() for word in words}) != len(words):
        raise ConfigError(f"environment.args.{which}: got {list(words)}, needs {int(space.n)} different words")
    return words


class GymEnvironment:
    """One episode of an environment of gymnasium."""

    def __init__(
        self, inner: Any, *, actions: Sequence[str] | None, observations: Sequence[str] | None, opening: str
    ) -> None:
        self.inner, self.actions, self.observations, self.opening = inner, actions, observations, opening

    def reset(self, row: Mapping[str, Any], seed: int) -> Say:
        observation, _ = self.inner.reset(seed=seed % 2**31)
        return Say.of("\n".join(filter(None, (self.opening, self._shown(observation)))))

    def step(self, reply: Reply) -> Say:
        action = self._action(reply.text)
        if action is None:
            choice = f"one of {', '.join(self.actions)}" if self.actions else f"text for {self.inner.action_space}"
            # An unreadable reply costs a turn and nothing else: the environment stays where it is, and earns nothing.
            return Say(({"role": "user", "content": f"error: say {choice}"},), metrics={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, _ = self.inner.step(action)
        if truncated and not terminated:
            raise RuntimeError("it truncated the episode by itself, which says nothing about the policy; set turns")
        said = Say.of(self._shown(observation))
        return Say(said.messages, reward=float(reward), done=bool(terminated))

    def close(self) -> None:
        self.inner.close()

    def _action(self, text: str) -> Any:
        """The action that a reply names; None if it names none."""
        said = text.strip()
        if self.actions is None:
            return said if self.inner.action_space.contains(said) else None
        found = [i for i, word in enumerate(self.actions) if word.lower() == said.lower().rstrip(".")]
        # A Discrete space may begin at another number than 0.
        return int(self.inner.action_space.start) + found[0] if found else None

    def _shown(self, observation: Any) -> str:
        if self.observations is None:
            return str(observation)
        return self.observations[int(observation) - int(self.inner.observation_space.start)]
