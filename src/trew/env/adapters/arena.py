"""``textarena:ID``: a game of TextArena for one player. Arguments go to ``textarena.make``.

The policy reads what the game says since its last move: the package's wrappers would repeat the whole game at every
turn. The reward is the game's own, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError, nearest
from ...utils.installing import install_extra
from ..protocol import Environment, Reply, Say

EXTRA = "textarena"


def adapt(name: str, args: Mapping[str, Any]) -> tuple[Callable[[], Environment], Mapping[str, str]]:
    """Begins a game, to see that one player can play it. Raises ConfigError."""
    try:
        import textarena  # pyrefly: ignore[missing-import]
        from textarena.envs.registration import ENV_REGISTRY  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise ConfigError(
            f"environment.name: textarena:{name} needs TextArena ({error}): {install_extra(EXTRA)}"
        ) from None
    if name not in ENV_REGISTRY:
        raise ConfigError(f"environment.name: TextArena has no game {name!r}{nearest(name, ENV_REGISTRY)}")

    def make() -> TextarenaEnvironment:
        game = inner = textarena.make(name, **args)
        # Only the bare game says what is new since the last move; moves still go through the wrappers.
        while isinstance(inner, textarena.Wrapper):
            inner = inner.env
        return TextarenaEnvironment(game, inner)

    try:
        make().reset({}, 0)
    except Exception as error:  # assertions about the number of players, missing word lists, unknown arguments
        raise ConfigError(
            f"environment.name: textarena:{name} cannot be played by one player: {type(error).__name__}: {error}"
        ) from None
    return make, {}


class TextarenaEnvironment:
    """One game. ``inner`` is the game without its wrappers: those of moves are wanted, those of observations not."""

    def __init__(self, game: Any, inner: Any) -> None:
        self.game, self.inner = game, inner
        self._ended = False

    def reset(self, row: Mapping[str, Any], seed: int) -> Say:
        self.game.reset(num_players=1, seed=seed)
        if int(self.game.state.num_players) != 1:
            raise ValueError(f"the game has {self.game.state.num_players} players")
        return Say.of(self._heard())

    def step(self, reply: Reply) -> Say:
        done, _ = self.game.step(action=reply.text)
        if not done:
            return Say.of(self._heard() or "(the game says nothing)")
        # The game gives its rewards when it is closed, so that close() has nothing left to do.
        rewards, told = self.game.close()
        self._ended = True
        invalid = bool(told.get(0, {}).get("invalid_move"))
        # The policy is player 0, the only one.
        reward = None if rewards is None else float(rewards[0])
        return Say(reward=reward, done=True, metrics={"invalid_moves": float(invalid)})

    def close(self) -> None:
        if not self._ended:
            self.game.close()

    def _heard(self) -> str:
        """What the game said since the last move; not the policy's own words, which it repeats."""
        player, said = self.inner.get_observation()
        return "\n".join(text for sender, text, _ in said if sender != player)
