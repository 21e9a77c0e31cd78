"""A teacher on a server: its log-probs are those of a teacher here, and whatever is wrong with it is noticed."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import tiny
import trew
from fake_vllm import CLOSE, FakeVllm, serving
from learner_help import plain_logprobs
from ranks_help import Fleet, free_port, variables
from recipe_help import ODD, merged, recipe
from trew.config import Config, parse
from trew.distributed.pulse import Watch
from trew.errors import ConfigError, EngineError, ModelError, NumericsError, ResumeError
from trew.learner import Solo
from trew.rollout.vllm.client import ServerGone
from trew.rollout.vllm.endpoint import Endpoint
from trew.rollout.vllm.served import served as read
from trew.rollout.vllm.teacher import EndpointTeacher
from trew.training import planning
from trew.types import TrainingSample
from trew.utils.console import Silent

TOKEN = "secret-of-the-teacher"
TEACHER = {"seed": 3, "initializer_range": 0.1}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """``lm``, the policy; ``other``, a teacher; ``shuffled`` and ``bytes``, whose tokens have other ids."""
    place = tmp_path_factory.mktemp("models")
    tiny.model("llama", seed=0, initializer_range=0.1).save_pretrained(place / "lm")
    for name in ("other", "shuffled", "bytes"):
        tiny.model("qwen3", **TEACHER).save_pretrained(place / name)
    for name in ("lm", "other", "shuffled", "bytes"):
        tiny.tokenizer(chat=False).save_pretrained(place / name)
    swap(place / "shuffled", "a", "b")
    swap(place / "bytes", *parts(place / "bytes"))
    (place / "reward.py").write_text(ODD)
    return place


def swap(folder: Path, one: str, other: str) -> None:
    file = folder / "tokenizer.json"
    table = json.loads(file.read_text())
    vocab = table["model"]["vocab"]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(table))


def parts(folder: Path) -> tuple[str, str]:
    """Two tokens that are no character alone, the second bytes of two characters."""
    tokenizer = trew.models.loading.load_tokenizer(str(folder))
    return tuple(tokenizer.convert_ids_to_tokens(tokenizer.encode(c, add_special_tokens=False))[1] for c in "éö")


@contextlib.contextmanager
def served(models: Path, name: str = "other") -> Iterator[tuple[FakeVllm, str]]:
    fake = FakeVllm(models / name, token=TOKEN)
    fake.name = "teacher-7b"
    with serving(fake) as endpoint:
        yield fake, endpoint.url


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("TREW_TEACHER_TOKEN", TOKEN)


def configured(models: Path, out: Path, address: str, **sections: Any) -> Config:
    table = {
        "chat_template": "plain", "out": str(out), "objective": {"preset": "opd"},
        "teacher": {"endpoint": address, "wait_s": 5},
    }  # fmt: skip
    text = recipe(models / "lm", reward=f"{models}/reward.py:odd", **merged(table, sections))
    return parse(tomllib.loads(text))


def rows(out: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss" in row]


def asked(fake: FakeVllm) -> Counter[str]:
    """What a server was asked, how often; without what depends on how long an answer takes."""
    return Counter(call for call, _ in fake.calls if call != "GET /metrics")


# ---- whole runs


def test_a_run_learns_from_the_server_what_it_would_learn_from_the_model(models, tmp_path):
    with served(models) as (_, address):
        trew.train(configured(models, tmp_path / "there", address), display=Silent())
    here = configured(models, tmp_path / "here", "", teacher={"model": str(models / "other"), "wait_s": 600.0})
    trew.train(here, display=Silent())
    there, own = rows(tmp_path / "there"), rows(tmp_path / "here")
    assert len(there) == len(own) > 1
    for one, other in zip(there, own, strict=True):
        for key in ("kl_teacher", "loss", "grad_norm", "reward"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
    teacher = tiny.model("qwen3", **TEACHER).double()
    for row in pq.read_table(tmp_path / "there" / "rollouts" / "000001.parquet").to_pylist():
        sample = TrainingSample(np.array(row["prompt_ids"]), np.array(row["token_ids"]), 0, np.array(row["sampled"]))
        want = plain_logprobs(teacher, sample, temperature=1.0).detach().numpy()
        np.testing.assert_allclose(row["teacher_logprobs"], want, atol=2e-5)


def test_a_run_that_continues_with_another_model_on_the_server_is_refused(models, tmp_path):
    with served(models) as (fake, address):
        config = configured(models, tmp_path / "run", address, steps=2, checkpoint={"every": 1})
        trew.train(config, display=Silent())
        before = rows(tmp_path / "run")
        longer = configured(models, tmp_path / "run", address, steps=3, checkpoint={"every": 1})
        with torch.no_grad():
            fake.head.mul_(1.5)  # the same name, other weights
        with pytest.raises(
            EngineError, match=r"teacher.endpoint: .* differ by .* per token from those at the beginning"
        ):
            trew.train(longer, resume=True, display=Silent())
        (tmp_path / "run" / "teacher.json").write_text("{}")
        with pytest.raises(ResumeError, match=r"teacher.json: cannot be read"):
            trew.train(longer, resume=True, display=Silent())
    assert rows(tmp_path / "run") == before


@pytest.mark.nightly
def test_two_ranks_learn_from_the_server_what_one_does(models, tmp_path, server):
    with served(models) as (fake, address):
        trew.train(configured(models, tmp_path / "one", address), display=Silent())
        alone = asked(fake)
        fake.calls.clear()
        text = recipe(
            models / "lm", reward=f"{models}/reward.py:odd", chat_template="plain", out=str(tmp_path / "pair"),
            objective={"preset": "opd"}, teacher={"endpoint": address}, cluster={"learner": 2, "shard": "none"},
        )  # fmt: skip
        (tmp_path / "r.toml").write_text(text)
        common = {"cwd": tmp_path, "TREW_TEACHER_TOKEN": TOKEN}
        port = free_port()
        ranks = [server.start("train", "r.toml", **common, **variables(rank, 2, port)) for rank in range(2)]
        assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.text() for rank in ranks)
        assert asked(fake) == alone, "one rank asks for all"
    for one, other in zip(rows(tmp_path / "one"), rows(tmp_path / "pair"), strict=True):
        for key in ("kl_teacher", "loss", "grad_norm", "reward"):
            assert other[key] == pytest.approx(one[key], rel=1e-5, abs=1e-5), key


def test_ranks_that_wait_for_a_slow_teacher_are_not_taken_for_hanging(models, tmp_path):
    """Rank 0 alone asks it; the process that starts ranks would end the others."""
    told: list[str] = []

    def slowly(answer: Any) -> None:
        if len(row(answer)) < 40:  # not the fixed text
            time.sleep(4)

    with served(models) as (fake, address), Fleet() as fleet, Watch(tmp_path, 2.5, told.append):
        fake.faults.bad_answers, fake.faults.spoil = 1000, slowly
        found = fleet.run("ranks_work:taught", 3, folder=str(tmp_path), address=address, token=TOKEN)
    assert told == []
    assert [one["busy"] for one in found] == [True] * 3
    assert all(torch.equal(one["logprobs"], found[0]["logprobs"]) for one in found)
    assert found[0]["logprobs"].any()


# ---- what is refused before anything is loaded


def refused(models: Path, out: Path, address: str, message: str, **sections: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        planning.plan(configured(models, out, address, **sections))


def test_a_server_that_fits_is_named(models, tmp_path):
    with served(models) as (_, address):
        made = planning.plan(configured(models, tmp_path / "run", address))
    assert any(f"teacher: teacher-7b on server {address} (vLLM 0.32.0)" in note for note in made.notes)


def test_tokens_of_other_ids_are_refused(models, tmp_path):
    with served(models, "shuffled") as (_, address):
        said = (
            r"teacher-7b .*another vocabulary than the policy: token \d+ is '[ab]' for the policy, and '[ab]' for the"
        )
        refused(models, tmp_path / "run", address, said)


def test_parts_of_characters_with_other_ids_are_refused(models, tmp_path):
    """Each of them alone is written as the same sign."""
    with served(models, "bytes") as (_, address):
        refused(models, tmp_path / "run", address, "parts of characters make other characters")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"temperature": 0.7}}, r"rollout.temperature: got 0.7 with teacher.endpoint, accepts 1"),
        ({"teacher": {"model": "lm"}}, r"teacher.endpoint: got .* with teacher.model = 'lm'; a run has one teacher"),
        ({"teacher": {"endpoint": "here:1"}}, r"teacher.endpoint: got 'here:1', accepts addresses like"),
        ({"teacher": {"endpoint": ""}}, r"teacher.wait_s: got 5 without teacher.endpoint"),
        ({"teacher": {"wait_s": math.inf}}, r"teacher.wait_s: got inf, accepts a number of seconds above 0"),
        ({"teacher": {"dtype": "bfloat16"}}, r"teacher.dtype: got 'bfloat16' without teacher.model"),
        ({"objective": {"preset": "grpo"}}, r"teacher.endpoint: got .*, but grpo does not learn from a teacher"),
        ({"teacher": {"endpoint": "http://127.0.0.1:1"}}, r"teacher.endpoint: server http://127.0.0.1:1: asking for"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(models, tmp_path, sections, message):
    with served(models) as (_, address):
        refused(models, tmp_path / "run", address, message, **sections)


def test_a_server_that_does_not_fit_is_refused(models, tmp_path, monkeypatch):
    with served(models) as (fake, address):
        fake.settings["max_model_len"] = 6
        said = r"has max_model_len = 6, and prompts with their completions take up to \d+, and one more token"
        refused(models, tmp_path / "run", address, said)
        monkeypatch.delenv("TREW_TEACHER_TOKEN")
        refused(models, tmp_path / "run", address, "needs its token, got none: TREW_TEACHER_TOKEN is not set")
        fake.faults.away = 404
        refused(models, tmp_path / "run", address, "teacher.endpoint: .*asking for its model, /version: status 404")


def test_an_address_that_never_answered_is_refused_at_once(models):
    """A status 404 there says that the address is wrong, or the path behind a proxy."""
    with served(models) as (fake, address):
        fake.faults.away = 404
        teacher = EndpointTeacher(Endpoint.parse(address, TOKEN), request_timeout_s=2.0, wait_s=3.0, parallel=Solo())
        with contextlib.closing(teacher), pytest.raises(EngineError, match="/version: status 404") as said:
            teacher.meet(range(40, 80))
    assert not isinstance(said.value, ServerGone)


@pytest.mark.parametrize("answer", ["<html>Sign in</html>", None, {"version": "0.32.0", "data": [None]}, [1]])
def test_an_answer_that_is_not_vllms_is_one_message(monkeypatch, answer):
    monkeypatch.setattr("trew.rollout.vllm.served.call", lambda *_, **__: answer)
    with pytest.raises(EngineError, match=r"is not as vLLM writes it .*; a proxy may answer in its place"):
        read(Endpoint.parse("http://localhost:1", TOKEN))


# ---- while it runs


@pytest.fixture
def house(models) -> Iterator[tuple[FakeVllm, EndpointTeacher, list[str]]]:
    told: list[str] = []
    with served(models) as (fake, address):
        teacher = EndpointTeacher(
            Endpoint.parse(address, TOKEN), request_timeout_s=2.0, wait_s=3.0, parallel=Solo(),
            tell=told.append,
        )  # fmt: skip
        with contextlib.closing(teacher):
            teacher.meet(range(40, 80))
            yield fake, teacher, told


SAMPLES = [
    TrainingSample(np.array([5, 9, 7]), np.array([40, 41, 42, 43]), 0, np.array([True, False, False, True])),
    TrainingSample(np.array([8]), np.array([70]), 1),
    TrainingSample(np.array([8, 1]), np.array([], np.int64), 1),
]


def expected() -> np.ndarray:
    net = tiny.model("qwen3", **TEACHER).double()
    found = np.concatenate([plain_logprobs(net, sample, temperature=1.0).detach().numpy() for sample in SAMPLES])
    return found * np.array([1, 0, 0, 1, 1])  # not where nothing was sampled


def test_log_probs_are_of_the_sampled_tokens_in_their_places(house):
    found = house[1].logprobs(SAMPLES)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected(), atol=2e-5)
    assert (found[1:3] == 0).all()


def spoiling(house: Any, change: Any, *, answers: int) -> None:
    """Changes the next answers that are about more than a fixed text."""
    fake = house[0]
    fake.faults.bad_answers, fake.faults.spoil = answers, change


def row(answer: Any) -> list[Any]:
    return answer["choices"][0]["prompt_logprobs"]


def positive(answer: Any) -> None:
    next(iter(row(answer)[1].values()))["logprob"] = 0.5


BAD = {
    "short": (lambda answer: row(answer).pop(), r"3 log-probs for 4 tokens|\d+ log-probs for \d+ tokens"),
    "positive": (positive, r"a log-prob of 0.5, accepted are numbers of at most 0"),
    "others": (lambda answer: row(answer).__setitem__(1, {"999": {"logprob": -1.0}}), r"malformed answer: KeyError"),
    "no number": (lambda answer: row(answer).__setitem__(1, None), r"malformed answer: TypeError"),
    "none": (lambda answer: answer["choices"][0].pop("prompt_logprobs"), r"malformed answer: KeyError"),
    "other model": (lambda answer: answer.update(model="adapter"), r"an answer of the model 'adapter' instead of"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_an_answer_that_cannot_be_right_is_never_used(house, monkeypatch, kind):
    _, teacher, told = house
    monkeypatch.setattr(EndpointTeacher, "_recognised", lambda self: self.known)  # the answers to it are not spoilt
    change, message = BAD[kind]
    spoiling(house, change, answers=1)
    np.testing.assert_allclose(teacher.logprobs(SAMPLES[:2]).numpy(), expected(), atol=2e-5)
    assert "it is asked again" in told[0]
    spoiling(house, change, answers=99)
    with pytest.raises(EngineError, match=rf"teacher.endpoint: server .*: gave .*({message}).*, 3 times"):
        teacher.logprobs(SAMPLES[:1])


@pytest.mark.parametrize("value", [math.nan, -math.inf, -9999.0])
def test_log_probs_that_are_not_finite_leave_the_step_out(house, monkeypatch, value):
    """vLLM writes -9999 where a token has no probability."""
    _, teacher, _ = house
    monkeypatch.setattr(EndpointTeacher, "_recognised", lambda self: self.known)
    spoiling(house, lambda answer: next(iter(row(answer)[-1].values())).update(logprob=value), answers=1)
    monkeypatch.setattr("fake_vllm.JSONResponse.render", lambda self, content: json.dumps(content).encode())
    with pytest.raises(NumericsError, match="the teacher's log-probs are not finite") as error:
        teacher.logprobs(SAMPLES[1:2])
    assert error.value.samples == (0,)
    assert error.value.quantity == "teacher_logprobs"


def test_a_token_that_the_teacher_does_not_have_is_an_error_at_once(house):
    before = len(house[0].calls)
    with pytest.raises(ModelError, match="Token id 100000 is out of vocabulary; the teacher cannot read a completion"):
        house[1].logprobs([TrainingSample(np.array([5]), np.array([100000]), 0)])
    assert len(house[0].calls) - before <= 4


def test_a_server_that_is_restarted_is_waited_for(house):
    """Its connections break in the middle of a step, and then there is none for a while."""
    fake, teacher, told = house
    seen: list[Any] = []

    def dies(answer: Any) -> Any:
        seen.append(answer)
        if len(seen) == 1:  # the fixed text
            return None
        fake.dead = True
        threading.Timer(0.7, lambda: setattr(fake, "dead", False)).start()
        return CLOSE

    spoiling(house, dies, answers=2)
    np.testing.assert_allclose(teacher.logprobs(SAMPLES).numpy(), expected(), atol=2e-5)
    assert "waiting up to 3 s for it (teacher.wait_s)" in told[0]
    assert "is back" in told[-1]


@pytest.mark.parametrize("status", [404, 500, 502, 503, 504])
def test_a_server_that_is_away_by_the_status_of_every_answer_is_waited_for(house, status):
    """A proxy answers for a server that is being restarted, whatever it is asked."""
    fake, teacher, told = house
    begin = time.monotonic()

    def leaves(answer: Any) -> Any:
        fake.faults.away = status
        threading.Timer(0.7, lambda: setattr(fake.faults, "away", 0)).start()

    spoiling(house, leaves, answers=1)  # that about the fixed text
    np.testing.assert_allclose(teacher.logprobs(SAMPLES).numpy(), expected(), atol=2e-5)
    assert time.monotonic() - begin > 0.6
    assert "waiting up to 3 s for it (teacher.wait_s)" in told[0]
    assert "is back" in told[-1]


@pytest.mark.parametrize("status", [0, 404, 503])  # 0: nothing listens
def test_a_server_that_stays_away_ends_the_run_with_what_to_do(house, status):
    fake, teacher, _ = house
    fake.dead, fake.faults.away = not status, status
    begin = time.monotonic()
    with pytest.raises(
        EngineError, match=r"did not come back within 3 s \(teacher.wait_s\); start it again, and contin"
    ):
        teacher.logprobs(SAMPLES)
    assert time.monotonic() - begin > 2.9


def test_a_server_that_comes_back_with_another_model_is_not_used(house):
    fake, teacher, _ = house

    def exchanged(answer: Any) -> Any:
        if len(row(answer)) == 40:  # the fixed text
            return None
        with torch.no_grad():
            fake.head.mul_(1.5)
        return CLOSE

    fake.faults.bad_answers, fake.faults.spoil = 2, exchanged
    with pytest.raises(EngineError, match=r"differ by .* nats per token from those at the beginning of this run"):
        teacher.logprobs(SAMPLES[:1])


def test_a_model_that_is_exchanged_between_two_steps_is_noticed(house):
    fake, teacher, _ = house
    teacher.logprobs(SAMPLES)
    fake.name = "teacher-8b"
    with pytest.raises(EngineError, match="serves 'teacher-8b', and this run has learned from 'teacher-7b'"):
        teacher.logprobs(SAMPLES)
    fake.name = "teacher-7b"
    with torch.no_grad():
        fake.head.add_(0.3 * torch.randn(fake.head.shape, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(EngineError, match=r"it has other weights under the name 'teacher-7b'"):
        teacher.logprobs(SAMPLES)


@pytest.mark.parametrize("scale", [1.0, 100.0, -100.0])
def test_logits_are_not_taken_for_log_probs(house, scale):
    """A server that was started with --logprobs-mode raw_logits gives them under the same name."""
    fake, _, _ = house
    fake.settings["logprobs_mode"] = "raw_logits"
    with torch.no_grad():
        fake.head.mul_(scale)
    other = EndpointTeacher(house[1].endpoint, request_timeout_s=2.0, wait_s=3.0, parallel=Solo())
    with pytest.raises(EngineError, match=r"log-prob of .*, accepted are numbers"):
        other.meet(range(40, 80))


def test_a_server_that_hangs_is_noticed(house):
    fake, teacher, told = house
    spoiling(house, lambda answer: setattr(fake.faults, "hangs", True), answers=1)  # after the fixed text
    threading.Timer(3.0, lambda: setattr(fake.faults, "hangs", False)).start()
    np.testing.assert_allclose(teacher.logprobs(SAMPLES).numpy(), expected(), atol=2e-5)
    assert "no new token for 2 s" in told[0]
    assert "is back" in told[-1]
