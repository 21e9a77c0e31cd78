"""Whether a teacher or a critic fits a run, at the edges; and what a run remembers of a teacher on a server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from trew.config import Config, CriticConfig, EnvironmentConfig, TeacherConfig
from trew.errors import ConfigError, ResumeError
from trew.models import loading
from trew.models.default import DEFAULT_MODEL
from trew.objective import preset
from trew.rollout.vllm import served
from trew.rollout.vllm.teacher import TEXT, EndpointTeacher, Known
from trew.training import teaching

OPD, PPO = preset("opd"), preset("ppo")


def config(*, teacher: dict[str, Any] | None = None, critic: dict[str, Any] | None = None) -> Config:
    return Config(model="m", teacher=TeacherConfig(**(teacher or {})), critic=CriticConfig(**(critic or {})))


# ---- what fits


@pytest.mark.parametrize("objective", [None, OPD])
def test_files_are_checked_whatever_is_wrong_with_the_objective(objective):
    found = teaching.problems(config(teacher={"model": "./nowhere"}, critic={"model": "./nothing"}), objective)
    assert [problem.partition(":")[0] for problem in found] == ["teacher.model", "critic.model"]


def test_a_teacher_that_nothing_reads_is_named_by_its_key():
    """A model and a server alike."""
    for key, value in (("model", "m"), ("endpoint", "http://127.0.0.1:1")):
        own = [p for p in teaching.problems(config(teacher={key: value}), PPO) if "does not learn" in p]
        assert [p.partition(", but")[0] for p in own] == [f"teacher.{key}: got {value!r}"]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> str:
    """A reward model with one score."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("scorer")
    like = tiny.model("llama").config
    like.num_labels = 1
    AutoModelForSequenceClassification.from_config(like).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_reward_model_is_a_critic_whose_head_is_there(scorer):
    assert teaching.problems(config(critic={"model": scorer, "head_std": 0.0}), PPO) == []
    (found,) = teaching.problems(config(critic={"model": scorer, "head_std": 0.1}), PPO)
    assert found.startswith("critic.head_std: got 0.1, but")


def test_a_model_that_is_not_here_yet_has_no_vocabulary_to_compare(monkeypatch):
    monkeypatch.setattr(loading, "cached", lambda: None)
    own: Any = SimpleNamespace(get_vocab=lambda: {"a": 0})
    assert teaching.vocabulary_problems(config(teacher={"model": DEFAULT_MODEL}), own) == []


def test_a_token_that_the_other_model_lacks_differs_and_the_first_by_id_is_named():
    (found,) = teaching.mismatch({"z": 0, "a": 1, "b": 2}, {"b": 2}, "t", "critic")
    assert "2 of 3 tokens differ ('z' is 0 for the policy, none for the critic, ...)" in found
    assert teaching.mismatch({"b": 2}, {"b": 2, "c": 3}, "t", "critic") == []


@pytest.mark.parametrize("who", ["teacher", "critic"])
def test_as_many_tokens_as_there_are_positions_fit(monkeypatch, who):
    monkeypatch.setattr(loading, "positions", lambda name: 16)
    own = config(**{who: {"model": "m"}})
    teaching.refuse_short(own, 16)
    with pytest.raises(ConfigError, match=rf"^{who}.model: m has 16 positions, .* take up to 17"):
        teaching.refuse_short(own, 17)


@pytest.mark.parametrize(("name", "key"), [("", "data.max_prompt_tokens"), ("guess", "environment.episode_tokens")])
def test_what_is_too_long_is_answered_with_settings_that_the_run_has(monkeypatch, name, key):
    """Episodes do not read data.max_prompt_tokens, and refuse it."""
    monkeypatch.setattr(loading, "positions", lambda name: 16)
    monkeypatch.setattr(served, "served", lambda endpoint: served.Served("t", 17, "0.32.0"))
    monkeypatch.setattr(served, "vocabulary_problem", lambda *given: "")
    own = config(teacher={"model": "m", "endpoint": "http://127.0.0.1:1"})
    own = dataclasses.replace(own, environment=EnvironmentConfig(name=name))
    for refused in (lambda: teaching.refuse_short(own, 17), lambda: teaching.served_note(own, tiny.tokenizer(), 17)):
        with pytest.raises(ConfigError, match=rf"lower rollout\.max_tokens or {key}$"):
            refused()


def test_a_server_needs_one_token_more_than_it_reads(monkeypatch):
    monkeypatch.setattr(served, "served", lambda endpoint: served.Served("t", 17, "0.32.0"))
    monkeypatch.setattr(served, "vocabulary_problem", lambda *given: "")
    monkeypatch.setenv("TREW_TEACHER_TOKEN", "secret")
    own, tokenizer = config(teacher={"endpoint": "http://127.0.0.1:1"}), tiny.tokenizer()
    assert teaching.endpoint_of(own).token == "secret"
    assert "t on server http://127.0.0.1:1 (vLLM 0.32.0)" in teaching.served_note(own, tokenizer, 16)
    with pytest.raises(ConfigError, match=r"max_model_len = 17, .* up to 17, and one more token; .*max-model-len 18"):
        teaching.served_note(own, tokenizer, 17)
    monkeypatch.setattr(served, "served", lambda endpoint: served.Served("t", None, "0.32.0"))
    teaching.served_note(own, tokenizer, 10**6)


# ---- the run's teacher


class Met(EndpointTeacher):
    """One that knows whom it is told to know."""

    def __init__(self) -> None:
        self.known, self.closed, self.asked = None, 0, []
        self.tell = lambda text: None

    def meet(self, ids: Any) -> Known:
        self.asked.append(list(ids))
        self.known = self.known or Known("teacher-7b", tuple(ids), (-1.0,) * (len(ids) - 1))
        return self.known

    def close(self) -> None:
        self.closed += 1


class Run:
    """The folder and the display of a run."""

    def __init__(self, folder: Path, *, resumed: bool = False) -> None:
        self.folder, self.resumed, self.events, self.warned = folder, resumed, [], []

    def write_teacher(self, known: dict[str, Any]) -> None:
        (self.folder / "teacher.json").write_text(json.dumps(known))

    def event(self, text: str) -> None:
        self.events.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)


def met(run: Run, tokenizer: Any = None) -> Met:
    teacher, ending = Met(), contextlib.ExitStack()
    with ending:
        teaching.meet(teacher, tokenizer or tiny.tokenizer(), run, run, ending)  # type: ignore[arg-type]
        assert not teacher.closed
    assert teacher.closed == 1
    return teacher


def test_a_new_run_remembers_its_teacher_by_the_text_as_it_is_in_the_policys_tokens(tmp_path):
    encoded: list[dict[str, Any]] = []

    def encode(text: str, **how: Any) -> list[int]:
        encoded.append({"text": text, **how})
        return [3, 4, 5]

    (tmp_path / "teacher.json").write_text("of a run that is overwritten")
    run = Run(tmp_path)
    teacher = met(run, SimpleNamespace(encode=encode))
    assert encoded == [{"text": TEXT, "add_special_tokens": False}]
    assert teacher.asked == [[3, 4, 5]]
    assert json.loads((tmp_path / "teacher.json").read_text()) == teacher.known.to_json()
    teacher.tell("it is gone")
    assert run.events == run.warned == ["it is gone"]


def test_a_resumed_run_asks_for_the_tokens_that_it_remembers(tmp_path):
    known = Known("teacher-7b", (7, 8, 9), (-0.5, -1.5))
    (tmp_path / "teacher.json").write_text(json.dumps(known.to_json()))
    teacher = met(Run(tmp_path, resumed=True))
    assert teacher.known == known
    assert teacher.asked == [[7, 8, 9]]


def test_a_resumed_run_that_never_met_its_teacher_meets_it_now(tmp_path):
    assert met(Run(tmp_path, resumed=True)).known.name == "teacher-7b"
    assert (tmp_path / "teacher.json").exists()
    (tmp_path / "teacher.json").write_text("{")
    with pytest.raises(ResumeError, match=r"teacher.json: cannot be read"):
        met(Run(tmp_path, resumed=True))
