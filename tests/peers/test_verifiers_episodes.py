"""Tasksets of the real verifiers, played by scripted replies: turns, tools, rewards, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trew.env import Call, Reply
from trew.env.adapters import verifiers
from trew.env.hosts import Hosts
from trew.env.load import Spec, load
from trew.errors import ConfigError

FOLDER = str(Path(__file__).with_name("verifiers_tasks"))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasksets are packages of the user's: verifiers imports them by name, here and in its tool servers."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", FOLDER)


def played(name: str, seed: int = 0, **args: Any):
    made = load(Spec(f"verifiers:{name}", args)).make()
    return made, made.reset({}, seed)


def refused(name: str, **args: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(Spec(f"verifiers:{name}", args))
    return str(error.value)


def test_an_environment_of_verifiers_answers_turn_by_turn():
    made, opening = played("vf_guess", seed=3)
    assert [(m["role"], m["content"]) for m in opening.messages] == [("system", "Say a digit."), ("user", "Guess.")]
    said = made.step(Reply("5"))
    assert ([m["content"] for m in said.messages], said.done, said.reward) == (["lower"], False, None)
    last = made.step(Reply("4"))
    assert (last.done, last.reward, dict(last.metrics)) == (True, 1.0, {"tries": 2.0})
    made.close()
    assert played("vf_guess", seed=12)[1] == opening, "seeds number the tasks, again and again"


def test_episodes_that_earn_nothing_are_judged_0():
    made, _ = played("vf_guess", seed=8)
    assert [made.step(Reply("1")).messages[-1]["content"] for _ in range(2)] == ["higher", "higher"]
    last = made.step(Reply("2"))
    assert (last.done, last.reward) == (True, 0.0)
    made.close()


def test_tools_of_verifiers_run_there():
    made, opening = played("vf_tool")
    [tool] = opening.tools
    assert tool.name.endswith("add")
    assert sorted(tool.parameters["properties"]) == ["a", "b"]
    said = made.step(Reply("", (Call(tool.name, {"a": 2, "b": 3}, "call1"),)))
    assert [(m["role"], m["content"]) for m in said.messages] == [("tool", "5")]
    wrong = made.step(Reply("", (Call("no_tool", {}, "call2"),)))
    assert "error: there is no tool 'no_tool'" in wrong.messages[-1]["content"]
    last = made.step(Reply("5"))
    assert (last.done, last.reward) == (True, 1.0)
    made.close()


def test_a_history_that_verifiers_refuses_to_change_is_no_reward():
    made, opening = played("vf_tool", breaks="history")
    with pytest.raises(RuntimeError, match="can only rewrite new user or tool messages"):
        made.step(Reply("", (Call(opening.tools[0].name, {"a": 2, "b": 3}, "call1"),)))
    made.close()


def test_a_task_may_end_the_episode_after_its_rule():
    made, opening = played("vf_tool", turns=1)
    last = made.step(Reply("", (Call(opening.tools[0].name, {"a": 2, "b": 3}, "call1"),)))
    assert (last.done, last.reward) == (True, 0.0)
    made.close()


def test_branches_and_other_sampling_fail():
    made, _ = played("vf_guess")
    question = {"role": "user", "content": "a"}
    made.environment._said = [("user", "a", ())]
    for messages, problem in (
        ([{"role": "user", "content": "b"}], "a branch"),
        ([question], "another reply to the same"),
    ):
        made.environment._heard.put(("asked", {"messages": messages}))
        with pytest.raises(RuntimeError, match=problem):
            made.environment._next()
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    made.environment._heard.put(("asked", {"messages": [question, image]}))
    with pytest.raises(RuntimeError, match="a part of type 'image_url'"):
        made.environment._next()
    made.close()
    assert "asks for temperature = 0.5; replies are drawn" in verifiers._refusal({"messages": [], "temperature": 0.5})
    assert "asks for a stream" in verifiers._refusal({"stream": True})


def test_an_error_of_the_taskset_fails_the_episode_and_is_no_reward():
    made, _ = played("vf_tool", breaks="reward")
    with pytest.raises(RuntimeError, match="no judge"):
        made.step(Reply("5"))
    made.close()


def test_many_episodes_are_played_in_processes():
    sys.path.insert(0, FOLDER)  # of the host, too
    hosts = Hosts(Spec("verifiers:vf_guess"), size=1, timeout_s=60)
    try:
        keys = [hosts.begin({}, seed) for seed in (4, 4, 0)]
        openings = collected(hosts, 3)
        assert len({str(openings[key].messages) for key in keys}) == 1
        for key in keys:
            hosts.reply(key, Reply("5"))
        ends = collected(hosts, 3)
        assert [(ends[key].done, ends[key].reward) for key in keys] == [(True, 1.0), (True, 1.0), (False, None)]
    finally:
        hosts.close()
        sys.path.remove(FOLDER)


def collected(hosts: Hosts, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while len(found) < count:
        for answer in hosts.poll(60):
            assert answer.say is not None, answer.error
            found[answer.key] = answer.say
    return found


def test_what_cannot_be_honoured_is_refused_by_name():
    assert "is played by several agents (white, black); one is taken" in refused("vf_duel")
    assert "verifiers:vf_nothing cannot be loaded: ModuleNotFoundError" in refused("vf_nothing")
    assert "cannot be loaded: ValidationError" in refused("vf_tool", sums=1)
