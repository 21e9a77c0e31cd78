"""Episodes in other processes: what they say, and how they fail."""

from __future__ import annotations

import os
import threading
import time

import pytest

import env_help
from trew.env import Reply
from trew.env.hosts import Answer, Hosts
from trew.env.load import Spec
from trew.errors import ConfigError
from trew.rewards.isolation.frames import Channel

FILE = env_help.__file__


def hosts(name: str, *, size: int = 1, timeout_s: float = 20.0, **args) -> Hosts:
    return Hosts(Spec(f"{FILE}:{name}", args), size=size, timeout_s=timeout_s)


def wait(hosts: Hosts, count: int = 1) -> list[Answer]:
    found: list[Answer] = []
    while len(found) < count:
        found += hosts.poll(30.0)
    return sorted(found, key=lambda answer: int(answer.key))


def said(answer: Answer) -> str:
    assert answer.say is not None, answer.error
    return answer.say.messages[0]["content"]


@pytest.fixture
def closing():
    """Makes hosts that are closed when the test ends."""
    made: list[Hosts] = []

    def make(*args, **kwargs):
        made.append(hosts(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_environment_may_judge_by_assert_whatever_the_environment_variables_say(closing, monkeypatch):
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    played = closing("asserting")
    key = played.begin({}, 5)
    wait(played)
    played.reply(key, Reply("wrong", turn=0))
    [answer] = wait(played)
    assert answer.say is not None
    assert answer.say.reward == 0.0


def test_a_generator_plays_an_episode(closing):
    played = closing("echo")
    key = played.begin({"word": "w"}, 5)
    [answer] = wait(played)
    assert (answer.key, said(answer)) == (key, "w 5 1")
    rewards = []
    for turn in range(3):
        played.reply(key, Reply(f"r{turn}", turn=turn))
        [answer] = wait(played)
        assert answer.say is not None
        rewards.append((answer.say.reward, answer.say.done, dict(answer.say.metrics)))
    assert rewards == [(None, False, {}), (0.5, False, {}), (1.0, True, {"heard": 4.0})]


def test_a_host_is_closed_when_nobody_reads_its_pipe_any_more(closing, monkeypatch):
    """Otherwise a late reader takes what the next host says, whose pipe has the same number."""
    real = Channel._wait

    def late(self, descriptor, *rest):
        real(self, descriptor, *rest)
        if threading.current_thread().name == "trew-episodes":
            time.sleep(1)

    monkeypatch.setattr(Channel, "_wait", late)
    played = closing("echo")
    played.load()
    played.close()
    assert [thread for thread in threading.enumerate() if thread.name == "trew-episodes"] == []


def test_a_class_plays_an_episode_and_is_closed(closing, tmp_path, monkeypatch):
    monkeypatch.setenv("TREW_TEST_CLOSED", str(tmp_path / "closed"))
    played = closing("Counter", start=5)
    key = played.begin({}, 0)
    assert said(wait(played)[0]) == "count from 5"
    played.reply(key, Reply("x"))
    assert said(wait(played)[0]) == "6"
    played.end(key)
    until = time.monotonic() + 20
    while not (tmp_path / "closed").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert (tmp_path / "closed").read_text() == "6\n"


def test_what_a_class_draws_when_it_is_made_depends_on_its_seed_alone(closing):
    openings = []
    for _ in range(2):  # hosts are processes of their own, whose generators begin anywhere
        played = closing("Drawn")
        for seed in (5, 5, 6):
            played.begin({}, seed)
        openings.append([said(answer) for answer in wait(played, 3)])
    assert openings[0] == openings[1]
    assert openings[0][0] == openings[0][1] != openings[0][2]


def test_episodes_share_no_state_and_draw_by_their_seed(closing):
    played = closing("echo", size=2)
    for seed in range(6):
        played.begin({}, seed)
    assert [said(answer) for answer in wait(played, 6)] == [f"none {seed} 1" for seed in range(6)]
    drawn = closing("chance")
    for seed in (1, 2, 1):
        drawn.begin({}, seed)
    one, two, again = (said(answer) for answer in wait(drawn, 3))
    assert one == again != two


@pytest.mark.parametrize(
    ("kind", "failed", "why"),
    [
        ("raise", "raised", "ZeroDivisionError"), ("exit", "died", "exited with code 3"),
        ("leave", "raised", "SystemExit"), ("kill", "died", "SIGKILL"), ("bytes", "raised", "no message"),
        ("nothing", "raised", "said nothing"), ("nan", "raised", "not finite"),
    ],
)  # fmt: skip
def test_a_failure_ends_its_episode_alone(closing, kind, failed, why):
    played = closing("faulty")
    played.begin({"kind": kind}, 0)
    other = played.begin({"kind": "fine"}, 0)
    for answer in wait(played, 2):
        played.reply(answer.key, Reply("x"))
    broken, fine = wait(played, 2)
    assert (broken.kind, broken.say) == (failed, None)
    assert why in broken.error
    assert said(fine) == "fine"
    if kind == "raise":
        assert "env_help.py" in broken.error, "with the traceback"
    played.reply(other, Reply("x"))
    assert wait(played)[0].key == other


def test_an_episode_that_hangs_is_ended_and_others_go_on(closing):
    played = closing("faulty", timeout_s=1.0)
    hanging, other = played.begin({"kind": "hang"}, 0), played.begin({"kind": "fine"}, 0)
    for answer in wait(played, 2):
        played.reply(answer.key, Reply("x"))
    [first] = wait(played)
    assert (first.key, said(first)) == (other, "fine"), "nothing waits for the one that hangs"
    [late] = wait(played)
    assert (late.key, late.kind) == (hanging, "hung")
    assert "timeout_s = 1 s" in late.error


def test_the_death_of_a_host_fails_all_of_its_episodes_and_another_is_started(closing):
    played = closing("faulty")
    for kind in ("host", "fine", "fine"):
        played.begin({"kind": kind}, 0)
    opened = wait(played, 3)
    played.reply(opened[0].key, Reply("x"))
    answers = wait(played, 3)
    assert [(answer.key, answer.kind) for answer in answers] == [(a.key, "died") for a in opened]
    assert played.poll() == []
    played.begin({"kind": "fine"}, 0)
    assert said(wait(played)[0]) == "go on"


@pytest.mark.parametrize("kind", ["big", "surrogate", "forged"])
def test_any_text_arrives(closing, kind):
    played = closing("faulty", when=0)
    played.begin({"kind": kind}, 0)
    assert said(wait(played)[0]) == env_help.FAULTS[kind]()


def test_a_row_of_a_data_file_arrives_with_its_types(closing):
    played = closing("echo")
    played.begin({"word": (1, b"\xff")}, 0)
    assert said(wait(played)[0]) == "(1, b'\\xff') 0 1"


def test_answers_of_ended_episodes_are_dropped(closing):
    played = closing("faulty")
    key = played.begin({"kind": "hang"}, 0)
    wait(played)
    played.reply(key, Reply("x"))
    played.end(key)
    played.end("unknown")
    assert played.poll(None) == []


def test_nothing_is_left_when_hosts_are_closed(closing):
    played = closing("slow", size=2)
    for seed in range(4):
        played.begin({}, seed)
    pids = [host.worker.process.pid for host in played._hosts if host]
    played.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}/fd")]
    assert played.poll(None) == []


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("waits", {}, "plain generator"), ("plain", {}, "neither a generator function"), ("FAULTS", {}, "callable"),
        ("ech", {}, "did you mean 'echo'"), ("echo", {"tuns": 3}, "unexpected keyword argument 'tuns'"),
        ("Counter", {"begin": 3}, "unexpected keyword argument"), ("Reply", {}, "has no reset and no step"),
    ],
)  # fmt: skip
def test_what_cannot_be_an_environment_is_refused(closing, name, args, why):
    if name == "FAULTS":
        why = "not a function but dict"
    with pytest.raises(ConfigError, match=why):
        closing(name, **args).load()


def test_a_file_that_ends_its_process_is_refused(tmp_path):
    (tmp_path / "bad.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(ConfigError, match="code 7"):
        Hosts(Spec(f"{tmp_path}/bad.py:x")).load()
