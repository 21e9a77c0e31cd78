"""Environments of other packages: played as they stand, refused by name where they cannot be."""

from __future__ import annotations

import json
import sys
import threading
import types
from typing import Any, ClassVar

import pytest

import trl_environments
from trew.env import Call, Reply
from trew.env.adapters import openenv, verifiers
from trew.env.load import Spec, load
from trew.errors import ConfigError

FILE = trl_environments.__file__


def played(name: str, row: dict[str, Any] | None = None, seed: int = 7, **args: Any):
    """An environment with its opening."""
    made = load(Spec(name, args)).make()
    return made, made.reset({"prompt": "Go."} if row is None else row, seed)


def refused(name: str, **args: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(Spec(name, args))
    return str(error.value)


def text(say) -> str:
    return "\n".join(message["content"] for message in say.messages)


# ---- verifiers


def test_an_episode_of_verifiers_may_be_closed_when_its_thread_is_ending():
    made = verifiers.VerifiersEnvironment(None, [])
    made._loop.close()  # as the thread does last
    release = threading.Event()
    made._thread = threading.Thread(target=release.wait)
    made._thread.start()
    threading.Timer(0.05, release.set).start()
    made.close()
    assert not made._thread.is_alive()


# ---- TRL


def test_a_class_of_trl_plays_as_it_stands():
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Count."}], "target": 2}
    made, opening = played(f"trl:{FILE}:Counter", row)
    assert [dict(message) for message in opening.messages] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "Count. The counter is at 0."},
    ]
    assert [tool.name for tool in opening.tools] == ["facts", "increment"]
    assert opening.tools[1].schema["function"]["return"] == {"type": "string", "description": "The new value."}
    assert text(made.step(Reply("", (Call("increment", {"times": 2}),)))) == "2"
    assert text(made.step(Reply("", (Call("facts", {}),)))) == "{'count': 2, 'done': True}"
    failed = made.step(Reply("", (Call("increment", {"times": -1}),)))
    assert text(failed) == "{'error': 'times must be at least 0'}", "the words of TRL"
    assert failed.metrics["tool_errors"] == 1
    wrong = made.step(Reply("", (Call("increment", {"times": "2"}),)))
    assert text(wrong).startswith("error: increment: 'times' must be an integer")
    last = made.step(Reply("2"))
    assert (last.done, last.reward) == (True, 1.0)
    made.close()


def test_a_class_of_trl_is_asked_for_its_reward_however_the_episode_ends():
    loaded = load(Spec(f"trl:{FILE}:Counter"))
    assert loaded.judges_stopped
    made = loaded.make()
    made.reset({"prompt": "Count.", "target": 2}, 0)
    made.step(Reply("", (Call("increment", {"times": 2}),)))
    assert made.stopped() == 1.0
    assert not load(Spec("guess")).judges_stopped


def test_a_class_of_trl_without_reward_and_with_async_methods():
    made, opening = played(f"trl:{FILE}:Silent")
    assert text(opening) == "Go."
    assert text(made.step(Reply("", (Call("ask", {"question": "a"}), Call("ask", {"question": "b"}))))) == "a? 1\nb? 2"
    last = made.step(Reply("done"))
    assert (last.done, last.reward) == (True, None)
    made.close()


def test_a_function_that_makes_environments_of_trl():
    made, _ = played(f"trl:{FILE}:made", step=5)
    assert text(made.step(Reply("", (Call("increment", {}),)))) == "5"


def test_what_cannot_be_an_environment_of_trl_is_refused():
    assert "NoReset: has no method reset" in refused(f"trl:{FILE}:NoReset")
    assert "tool act: " in refused(f"trl:{FILE}:Untyped")
    assert "both is not a function but dict" in refused(f"trl:{FILE}:both")
    assert "no such file" in refused("trl:nowhere.py:Class")
    assert "unexpected keyword argument 'size'" in refused(f"trl:{FILE}:Counter", size=1)
    with pytest.raises(TypeError, match="images are not"):
        played(f"trl:{FILE}:Image")


# ---- reasoning-gym


def test_a_problem_of_reasoning_gym_may_be_tried_again():
    pytest.importorskip("reasoning_gym")
    made, opening = played("reasoning_gym:chain_sum", attempts=2, min_terms=2, max_terms=2)
    again, same = played("reasoning_gym:chain_sum", attempts=2, min_terms=2, max_terms=2)
    _, other = played("reasoning_gym:chain_sum", seed=8, attempts=2, min_terms=2, max_terms=2)
    assert opening == same != other
    gold = again.environment._gold
    said = made.step(Reply("<answer>no</answer>"))
    assert (text(said), said.done, said.reward) == ("That is not right. Try again.", False, None)
    right = made.step(Reply(f"<answer>{gold}</answer>"))
    assert (right.done, right.reward, dict(right.metrics)) == (True, 1.0, {"attempts": 2.0})
    assert not again.step(Reply("5")).done
    wrong = again.step(Reply("no answer"))
    assert (wrong.done, wrong.reward) == (True, 0.0)


def test_what_reasoning_gym_does_not_have_is_refused():
    pytest.importorskip("reasoning_gym")
    assert "no task 'chain_sums' (did you mean 'chain_sum'?)" in refused("reasoning_gym:chain_sums")
    assert "it mixes other tasks" in refused("reasoning_gym:composite")
    assert "environment.args.seed: follows from the run's seed" in refused("reasoning_gym:chain_sum", seed=1)
    assert "environment.args.attempts: got 0" in refused("reasoning_gym:chain_sum", attempts=0)
    assert "environment.args: reasoning_gym:chain_sum" in refused("reasoning_gym:chain_sum", unheard=1)


# ---- gymnasium

LAKE = {"is_slippery": False, "actions": ["left", "down", "right", "up"]}


def test_an_environment_of_gymnasium_plays_with_words():
    pytest.importorskip("gymnasium")
    made, opening = played("gym:FrozenLake-v1", opening="Reach the goal.", **LAKE)
    assert text(opening) == "Reach the goal.\n0"
    unknown = made.step(Reply("north"))
    assert (text(unknown), dict(unknown.metrics)) == (
        "error: say one of left, down, right, up",
        {"invalid_actions": 1.0},
    )
    moves = ["Down.", "down", "right", " right ", "down", "RIGHT"]
    said = [made.step(Reply(move)) for move in moves]
    assert [text(one) for one in said] == ["4", "8", "9", "10", "14", "15"]
    assert [(one.reward, one.done) for one in said] == [(0.0, False)] * 5 + [(1.0, True)]
    made.close()


def test_observations_of_gymnasium_may_have_words_too():
    pytest.importorskip("gymnasium")
    words = [f"row {i // 4}, column {i % 4}" for i in range(16)]
    made, opening = played("gym:FrozenLake-v1", observations=words, **LAKE)
    assert text(opening) == "row 0, column 0"
    assert text(made.step(Reply("right"))) == "row 0, column 1"
    assert text(played("gym:FrozenLake-v1", **LAKE)[1]) == "0"
    made.close()


def test_the_limit_of_steps_is_the_recipes():
    pytest.importorskip("gymnasium")
    made, _ = played("gym:FrozenLake-v1", **LAKE)
    assert not any(made.step(Reply("left")).done for _ in range(150)), "FrozenLake-v1 itself stops after 100"
    made.close()


def test_what_has_no_text_is_refused_by_name():
    pytest.importorskip("gymnasium")
    assert "observations are Box(" in refused("gym:CartPole-v1", actions=["left", "right"])
    assert "gym:FrozenLake-v1 has 4 actions; give 4 words" in refused("gym:FrozenLake-v1")
    assert "needs 4 different words" in refused("gym:FrozenLake-v1", actions=["a", "b", "c", "C"])
    assert "got 'left', accepts a list of 4 words" in refused("gym:FrozenLake-v1", actions="left")  # no four letters
    assert "gym:FrozenLakes-v1" in refused("gym:FrozenLakes-v1")


# ---- TextArena


def test_a_game_of_textarena_says_what_is_new():
    pytest.importorskip("textarena")
    made, opening = played("textarena:GuessTheNumber-v0")
    assert "between 1 and 20" in text(opening)
    assert played("textarena:GuessTheNumber-v0")[1] == opening
    said = made.step(Reply("[5]"))
    assert text(said) in ("The target number is higher.", "The target number is lower.")
    number = made.environment.game.state.game_state["game_number"]
    last = made.step(Reply(f"I say [{number}]"))
    assert (last.done, last.reward, dict(last.metrics)) == (True, 1.0, {"invalid_moves": 0.0})
    made.close()


def test_games_for_several_players_are_refused():
    pytest.importorskip("textarena")
    assert "cannot be played by one player" in refused("textarena:TicTacToe-v0")
    assert "TextArena has no game 'GuessTheNumbr-v0' (did you mean" in refused("textarena:GuessTheNumbr-v0")


# ---- OpenEnv, by a client that stands in for its own


class StandIn:
    """What :class:`GenericEnvClient` is to the adapter: an echo that ends after the second action."""

    said: ClassVar[list[Any]] = []

    def __init__(self, base_url: str) -> None:
        self.said.append(base_url)

    def sync(self):
        return self

    def connect(self):
        self.said.append("connected")

    def reset(self, **fields):
        self.said.append(fields)
        return types.SimpleNamespace(
            observation={"text": "begin", "metadata": {"of": "the server"}}, reward=None, done=False
        )

    def step(self, action):
        self.said.append(action)
        steps = sum(isinstance(one, dict) for one in self.said) - 1
        return types.SimpleNamespace(
            observation={"a": "x", "b": action}, reward=None if steps == 1 else 2, done=steps == 2
        )

    def close(self):
        self.said.append("closed")


@pytest.fixture
def server(monkeypatch):
    """Sets the schema of actions, with a client in the place of OpenEnv's."""
    for name in ("openenv", "openenv.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    client = types.ModuleType("openenv.core.generic_client")
    client.GenericEnvClient = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, client.__name__, client)
    StandIn.said = []
    return lambda **schema: monkeypatch.setattr(openenv, "_schema", lambda url: schema)


def test_a_reply_is_the_one_field_that_an_action_needs(server):
    server(properties={"move": {"type": "string"}, "note": {"type": "string"}}, required=["move"])
    made, opening = played("openenv:http://host:1", reset={"level": 3})
    assert text(opening) == "begin"
    first, second = made.step(Reply("left")), made.step(Reply("right"))
    assert (first.reward, first.done, second.reward, second.done) == (None, False, 2.0, True)
    assert json.loads(text(first)) == {"a": "x", "b": {"move": "left"}}
    made.close()
    assert StandIn.said == [
        "http://host:1", "connected", {"level": 3, "seed": 7}, {"move": "left"}, {"move": "right"}, "closed",
    ]  # fmt: skip


def test_a_reply_is_a_whole_action_where_it_has_several_fields(server):
    server(properties={"x": {"type": "integer"}, "y": {"type": "integer"}}, required=["x", "y"])
    made, _ = played("openenv:http://host:1", observation="text")
    for reply in ("left", "[1]", '{"x": NaN}'):
        assert text(made.step(Reply(reply))).startswith("error: say an action as a JSON object")
    with pytest.raises(KeyError, match="no field 'text'"):
        made.step(Reply('{"x": 1, "y": 2}'))
    assert StandIn.said[-1] == {"x": 1, "y": 2}


def test_a_server_that_is_not_there_is_named(server):
    assert "openenv:http://HOST:PORT" in refused("openenv:host")
    assert "takes observation and reset" in refused("openenv:http://host:1", level=1)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"reset": {"seed": 3}}, "accepts a table of fields whose seed follows from the run's"),
        ({"reset": "level"}, "environment.args.reset: got 'level', accepts a table"),
        ({"observation": ["text"]}, "environment.args.observation: got ['text'], accepts the name of a field"),
    ],
)
def test_arguments_for_a_server_are_checked_before_an_episode(server, args, why):
    server(properties={"move": {"type": "string"}}, required=["move"])
    assert why in refused("openenv:http://host:1", **args)


def test_a_server_without_schema_is_named():
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/schema does not say what actions"):
        openenv._schema("http://127.0.0.1:9")


@pytest.mark.parametrize("kind", ["gym", "textarena", "openenv", "reasoning_gym", "verifiers"])
def test_a_package_that_is_missing_is_named(kind, monkeypatch):
    package = {"gym": "gymnasium", "openenv": "openenv.core.generic_client"}.get(kind, kind)
    monkeypatch.setitem(sys.modules, package, None)
    assert "-m pip install '" in refused(f"{kind}:http://x")
