"""``openenv:URL``: an environment that an OpenEnv server runs, one session per episode.

A reply becomes the one required text field of the server's actions; where they have several, it must be a JSON object.
Arguments: ``observation``, the field of observations that the policy reads (otherwise all but ``metadata``, as JSON, or
as text if that is all), and ``reset``, fields for the server's reset beside the seed.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError
from ...utils.installing import install_extra
from ..protocol import Environment, Reply, Say
from ..tools.arguments import read_json

EXTRA = "openenv"
ANSWER_S = 20.0  # for the server's schemas, when the environment is loaded


def adapt(name: str, args: Mapping[str, Any]) -> tuple[Callable[[], Environment], Mapping[str, str]]:
    """Asks the server what actions it takes. Raises ConfigError."""
    if unknown := sorted(args.keys() - {"observation", "reset"}):
        raise ConfigError(f"environment.args.{unknown[0]}: openenv takes observation and reset")
    observation, reset = args.get("observation"), args.get("reset", {})
    if not (observation is None or isinstance(observation, str)):
        raise ConfigError(f"environment.args.observation: got {observation!r}, accepts the name of a field")
    if not isinstance(reset, Mapping) or "seed" in reset:
        why = "whose seed follows from the run's" if isinstance(reset, Mapping) else "for the server's reset"
        raise ConfigError(f"environment.args.reset: got {reset!r}, accepts a table of fields {why}")
    if not name.startswith(("http://", "https://")):
        raise ConfigError(f"environment.name: got 'openenv:{name}', accepts openenv:http://HOST:PORT")
    try:
        from openenv.core.generic_client import GenericEnvClient  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise ConfigError(f"environment.name: openenv:{name} needs openenv ({error}): {install_extra(EXTRA)}") from None
    field = _text_field(_schema(name))
    return lambda: OpenenvEnvironment(
        GenericEnvClient(base_url=name).sync(), action=field, observation=observation, reset=reset
    ), {}  # fmt: skip


def _schema(url: str) -> Mapping[str, Any]:
    """The JSON schema of the server's actions."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=ANSWER_S) as answer:
            found = json.load(answer)["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"environment.name: {url}/schema does not say what actions an environment takes: {error}; is an OpenEnv "
            "server running there?"
        ) from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"environment.name: {url}/schema describes no actions, got {found!r:.80}")
    return found


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """The one field that an action must have, if it is text; None if the reply has to be the whole action.

    >>> _text_field({"properties": {"move": {"type": "string"}, "note": {}}, "required": ["move"]})
    'move'
    """
    required = schema.get("required", [])
    fields = schema.get("properties", {})
    # None as well where the one required field is not text: the reply then has to be the whole action, as JSON.
    return required[0] if len(required) == 1 and fields.get(required[0], {}).get("type") == "string" else None


class OpenenvEnvironment:
    """One session. ``action``: the field that a reply fills, None = a reply is the whole action."""

    def __init__(self, client: Any, *, action: str | None, observation: str | None, reset: Mapping[str, Any]) -> None:
        self.client, self.action, self.observation, self._reset = client, action, observation, reset

    def reset(self, row: Mapping[str, Any], seed: int) -> Say:
        self.client.connect()
        result = self.client.reset(**self._reset, seed=seed % 2**31)
        return Say.of(self._shown(result.observation))

    def step(self, reply: Reply) -> Say:
        action = self._action(reply.text)
        # A string is an observation for the policy, which wrote the reply, and no error of the episode.
        if isinstance(action, str):
            return Say(({"role": "user", "content": f"error: {action}"},), metrics={"invalid_actions": 1.0})
        result = self.client.step(action)
        reward = None if result.reward is None else float(result.reward)
        return Say(Say.of(self._shown(result.observation)).messages, reward=reward, done=bool(result.done))

    def close(self) -> None:
        self.client.close()

    def _action(self, text: str) -> dict[str, Any] | str:
        """The action in a reply, or what is wrong with it."""
        if self.action is not None:
            return {self.action: text}
        try:
            found = read_json(text.strip())
        except ValueError as error:
            return f"say an action as a JSON object: {error}"
        return found if isinstance(found, dict) else "say an action as a JSON object"

    def _shown(self, observation: Any) -> str:
        if self.observation is not None:
            if not isinstance(observation, Mapping) or self.observation not in observation:
                raise KeyError(f"the observation has no field {self.observation!r}, got {observation!r:.200}")
            return str(observation[self.observation])
        if isinstance(observation, Mapping):
            observation = {name: value for name, value in observation.items() if name != "metadata"}
            if len(observation) == 1:
                [observation] = observation.values()
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
