"""Rewards that other machines compute: the scores of a run without them, whatever happens to the hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from forks import wait_for
from trew.config import RewardConfig
from trew.errors import ConfigError, RewardError
from trew.rewards import RewardSet
from trew.rewards.remote import hosts as h
from trew.rewards.remote import match, messages
from trew.rewards.remote.host import RewardHost
from trew.rewards.reward_checks import text_group
from trew.rewards.user.wire import decode, encode
from trew.types import Group, Prompt
from trew.utils import listening

TOKEN = "a-token-of-the-tests-of-hosts"
FILE = """
import helper
def by_step(prompts, completions, completion_ids, **columns):
    if any("boom" in text for text in completions):
        raise ValueError("as the test wants it")
    return [len(text) + helper.MORE + len(ids) / 3 if text else None for text, ids in zip(completions, completion_ids)]
def by_group(completions, answer, **columns):
    return [float(a in text) + len(completions) for text, a in zip(completions, answer)]
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.1 * len(solution_str), "more": 1}
"""
CONFIGS = [
    RewardConfig(name="math"), RewardConfig(name="gsm8k", weight=0.3), RewardConfig(name="f.py:by_step", weight=0.1),
    RewardConfig(name="f.py:by_group", calls="group"), RewardConfig(name="f.py:compute_score"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREW_REWARDS_TOKEN", TOKEN)


def configs(folder: Path) -> list[RewardConfig]:
    folder.mkdir(exist_ok=True)
    (folder / "f.py").write_text(FILE)
    (folder / "helper.py").write_text("MORE = 0.1\n")
    return [dataclasses.replace(c, name=c.name.replace("f.py", f"{folder}/f.py")) for c in CONFIGS]


def groups(count: int = 12) -> list[Group]:
    """Sums, with answers that are right, wrong, hard to decide and odd."""
    made = []
    for i in range(count):
        texts = [
            f"\\boxed{{{i}}}",
            f"\\boxed{{\\frac{{{2 * i}}}{{2}}}}",
            "no answer",
            "",
            "\ud800 \\boxed{x^2}",
            f"#### {i}",
        ]
        prompt = Prompt(
            f"p{i}", text=f"{i} + 0?", columns={"answer": str(i), "at": np.float64(0.1) * i, "raw": b"\x00"}
        )
        made.append(text_group(prompt, texts, token_ids=[list(range(j)) for j in range(len(texts))]))
    return made


def scores(rewards: RewardSet, of: list[Group] | None = None, **options: Any) -> list[Any]:
    """Everything that a score says but how long it took."""
    rows = rewards.score(of or groups(), step=3, **options)
    return [[(s.value, s.status, s.parts, s.extracted) for s in row.scores] for row in rows]


@contextlib.contextmanager
def served(rewards: RewardSet, app: Any = None) -> Iterator[str]:
    """The address of a host, in this process."""
    sockets = listening.sockets_for("127.0.0.1", 0, encrypted=False)
    told: list[str] = []
    with listening.listening(listening.Guard(app or RewardHost(rewards), TOKEN, told.append), sockets, None):
        yield listening.address_of(sockets[0], host="127.0.0.1", encrypted=False)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RewardSet, list[Any]]]:
    """The rewards of a run without hosts, and its scores."""
    with contextlib.closing(RewardSet.from_config(configs(tmp_path_factory.mktemp("here") / "a"))) as rewards:
        yield rewards, scores(rewards)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[RewardSet, str]]]:
    """Two hosts, whose files lie elsewhere."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("b", "c"):
            rewards = RewardSet.from_config(configs(tmp_path_factory.mktemp(name) / "files"))
            stack.callback(rewards.close)
            made.append((rewards, stack.enter_context(served(rewards))))
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RewardSet]:
    with contextlib.closing(RewardSet.from_config(configs(tmp_path / "run"))) as rewards:
        yield rewards


def test_scores_are_those_of_the_run_without_hosts(here, pair, run):
    """To the bit; and the hosts did the work: functions here are not even asked."""
    run.use_hosts([address for _, address in pair], [])
    asked: list[str] = []
    run.host.own.call = lambda calls, step: asked.append("here")
    for rewards, _ in pair:
        rewards.host._pool.stop()  # so that it counts who starts again
    with run.grading(step=3) as grading:
        made = groups()
        for i, group in enumerate(made):
            grading.add(i, group)
        rows = grading.finish(made)
    assert [[(s.value, s.status, s.parts, s.extracted) for s in row.scores] for row in rows] == here[1]
    assert scores(run) == here[1]
    assert asked == []
    assert all(rewards.host._pool._idle for rewards, _ in pair), "both had work"
    assert run.take_warnings() == []


def test_an_error_of_a_function_is_told_as_without_hosts(here, pair, run):
    bad = groups(3)
    bad[1] = text_group(bad[1].prompt, ["fine", "boom"], token_ids=[[1], [2]])
    run.use_hosts([address for _, address in pair], [])
    found = []
    for rewards in (here[0], run):
        with pytest.raises(RewardError, match=r"as the test wants it.*prompt 'p1', completion 'boom'") as error:
            scores(rewards, bad)
        found.append([row["completion"] for row in error.value.evidence["completions"]])
    assert found == [["boom"], ["boom"]]


class Broken:
    """A host that answers who it is, and then fails in one of the ways in which hosts do."""

    def __init__(self, rewards: RewardSet, how: str) -> None:
        self.real, self.how, self.asked = RewardHost(rewards), how, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.how == "works" or (scope["path"] == messages.ABOUT and not self.asked):
            await self.real(scope, receive, send)
            return
        self.asked += 1
        if self.how == "500":
            await listening.answer(send, 500, "memory ran out")
        elif self.how == "cut":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"  {", "more_body": True})
        elif self.how == "error":
            await listening.answer(send, 200, {"error": "a file was changed since it was loaded"})
        elif self.how == "few":
            body = encode({"answer": []})
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})
        elif self.how == "silent":
            while (await receive())["type"] != "http.disconnect":
                pass


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("500", "status 500: {'message': 'memory ran out'"),
        ("cut", "peer closed connection|Connection reset by peer"),
        ("error", "a file was changed since it was loaded"), ("few", "an answer that cannot be right"),
        ("silent", "no sign of life for 1 s"),
    ],
)  # fmt: skip
def test_what_a_lost_host_was_asked_goes_to_another(here, pair, run, monkeypatch, how, said):
    monkeypatch.setattr(h, "SILENT_S", 1.0)
    broken = Broken(pair[1][0], how)
    with served(pair[1][0], broken) as address:
        run.use_hosts([address, pair[0][1]], [])
        assert scores(run) == here[1]
        assert broken.asked
        (told,) = [line for line in run.take_warnings() if "reward host" in line]
        assert any(one in told for one in said.split("|"))
        assert "its work is done by 1 other hosts" in told
        before = broken.asked
        assert scores(run) == here[1]
        assert broken.asked == before, "it is left alone"


def test_without_any_host_the_run_grades_by_itself_and_goes_back_once_one_is_there(here, pair, run, monkeypatch):
    monkeypatch.setattr(h, "RETRY_S", 0.05)
    broken = Broken(pair[0][0], "500")
    with served(pair[0][0], broken) as address:
        run.use_hosts([address], [])
        assert scores(run) == here[1]
        told = run.take_warnings()
        assert any("its work is done by this machine" in line for line in told)
        broken.how = "works"
        broken.__class__ = type("Works", (), {"__call__": lambda self, *a: self.real(*a)})
        wait_for(lambda: any("is back" in line for line in run.take_warnings()))
        calls = run.host.own.call
        run.host.own.call = None
        assert scores(run) == here[1]
        run.host.own.call = calls


def test_a_host_that_grades_otherwise_is_refused_with_both_values(pair, run, tmp_path):
    """Another file, another module that the file imports, other arguments, another trew, another order."""
    made = configs(tmp_path / "other")
    changes: list[tuple[Any, str]] = [
        (lambda: (tmp_path / "other" / "f.py").write_text(FILE + "\n"), r"reward 2 'by_step': .*f.py:by_step.*SHA-256"),
        (lambda: (tmp_path / "other" / "helper.py").write_text("MORE = 0.2\n"), "helper.py"),
        (
            lambda: made.__setitem__(0, RewardConfig(name="math", args={"require_boxed": False})),
            "require_boxed = False",
        ),
        (lambda: made.pop(), "reward 4 'compute_score': .* in the run, 'absent' on the host"),
    ]
    for change, said in changes:
        made = configs(tmp_path / "other")
        change()
        with contextlib.closing(RewardSet.from_config(made)) as other, served(other) as address:
            with pytest.raises(ConfigError, match=said) as error:
                run.use_hosts([pair[0][1], address], [])
            assert str(error.value).startswith(f"reward host {address}: ")


def test_a_wrong_token_and_a_host_that_is_not_there_are_problems_of_the_settings(pair, run, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    for token, said in (("", "got none: TREW_REWARDS_TOKEN is not set"), ("x" * 20, "got another one")):
        monkeypatch.setenv("TREW_REWARDS_TOKEN", token)
        with pytest.raises(ConfigError, match=f"needs its token, {said}"):
            run.use_hosts([pair[0][1]], [])
    with pytest.raises(ConfigError, match=rf"cluster.reward_hosts: reward host http://127.0.0.1:{free}: .*refused"):
        run.use_hosts([f"http://127.0.0.1:{free}"], [])
    assert run._hosts is None


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with httpx2.Client(verify=False, trust_env=False, headers={"Authorization": f"Bearer {TOKEN}"}) as made:
        yield made


def test_programs_are_not_graded_behind_another_sandbox(monkeypatch):
    """Behind Landlock, programs that write files are wrong, so that scores would depend on who grades."""
    with contextlib.closing(RewardSet.from_config([RewardConfig(name="code_stdin")])) as rewards:
        monkeypatch.setattr(match, "describe", lambda: ("landlock", ""))
        with served(rewards) as address:
            rewards.use_hosts([address], [])
            monkeypatch.setattr(match, "describe", lambda: ("bubblewrap", ""))
            with pytest.raises(ConfigError, match="sandbox: 'bubblewrap' in the run, 'landlock' on the host"):
                rewards.use_hosts([address], [])


def test_a_host_answers_nothing_without_the_token(pair, client):
    for path in (messages.ABOUT, messages.GRADE, messages.CALL, "/", "/x"):
        for method in ("GET", "POST"):
            found = client.request(method, pair[0][1] + path, headers={"Authorization": "Bearer x"}, content=b"[]")
            assert found.status_code == 401
            assert found.text.count("token") == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"nonsense", b"[99, []]", b'["math", []]', b"[2, []]", b"[0, [1]]", b'[0, [["a", "b", {"os": 1}]]]',
     b"[[], [[7, [], null]], 0]", b'{"\\u0000": "array", "v": [1], "d": "O"}'],
)  # fmt: skip
def test_nonsense_is_refused_and_the_host_goes_on(here, pair, client, body):
    for path in (messages.GRADE, messages.CALL):
        found = client.post(pair[0][1] + path, content=body)
        assert found.status_code == 200
        assert list(decode(found.content)) in (["error"], ["answer"])
    good = client.post(pair[0][1] + messages.GRADE, content=encode([0, [("\\boxed{1}", "1", {})]]))
    assert decode(good.content)["answer"][0][:2] == (1.0, "scored")


def test_a_body_that_is_too_large_is_refused(pair, client):
    with served(pair[0][0], RewardHost(pair[0][0], most_bytes=100)) as address:
        assert client.post(address + messages.GRADE, content=b"x" * 1000).status_code == 413


def test_a_host_shows_that_it_works(pair, client, monkeypatch):
    """By a space, long before its answer is there; which is what tells work from silence."""
    from trew.rewards.remote import host as module

    monkeypatch.setattr(module, "BEAT_S", 0.01)
    going = threading.Event()
    slow = RewardHost(pair[0][0])
    slow._work[messages.GRADE] = lambda *_: going.wait(30) and []
    with (
        served(pair[0][0], slow) as address,
        client.stream("POST", address + messages.GRADE, content=b"[0, []]") as found,
    ):
        pieces = found.iter_raw()
        assert [next(pieces).strip() for _ in range(3)] == [b""] * 3
        going.set()
        assert decode(b"".join(pieces)) == {"answer": []}
