"""The adapter of OpenEnv against a server of the real package, over its WebSockets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trew.env import Reply
from trew.env.load import Spec, load
from trew.errors import ConfigError


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("openenv_server.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        yield f"http://127.0.0.1:{port}"
        server.kill()


def text(say) -> str:
    return say.messages[-1]["content"]


def test_sessions_are_apart_and_rewards_of_None_stay_None(url):
    loaded = load(Spec(f"openenv:{url}", {"observation": "text"}))
    one, other = loaded.make(), loaded.make()
    assert (text(one.reset({}, 7)), text(other.reset({}, 8))) == ("1", "0")
    said = one.step(Reply("more"))
    assert (text(said), said.reward, said.done) == ("2", None, False)
    assert text(other.step(Reply("less"))) == "0"
    last = one.step(Reply("more"))
    assert (text(last), last.reward, last.done) == ("3", 1.0, True)
    one.close()
    assert text(other.step(Reply("more"))) == "1"
    other.close()


def test_the_reset_takes_its_own_fields_and_everything_is_shown_without_a_name(url):
    made = load(Spec(f"openenv:{url}", {"reset": {"add": 1}})).make()
    assert text(made.reset({}, 8)) == "1"
    made.close()


def test_a_crash_of_the_server_is_no_reward(url):
    made = load(Spec(f"openenv:{url}")).make()
    made.reset({}, 0)
    with pytest.raises(Exception, match="the game crashed"):
        made.step(Reply("crash"))
    made.close()


def test_a_server_that_is_gone_is_named():
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/schema does not say what actions"):
        load(Spec("openenv:http://127.0.0.1:9"))
