"""A teacher on the real vLLM: its log-probs are those of the model, and it is recognised by them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_models import save

from learner_help import plain_logprobs
from trew.config import LearnerConfig
from trew.errors import EngineError, ModelError
from trew.learner import Solo
from trew.learner.runner import RunnerSettings
from trew.learner.teacher import LocalTeacher
from trew.rollout.vllm.served import served, vocabulary_problem
from trew.rollout.vllm.server import Servers
from trew.rollout.vllm.teacher import EndpointTeacher
from trew.types import TrainingSample

GAP = 2e-5
"""Nats between two computations of one log-prob in float32."""


@pytest.fixture(scope="module")
def taught(start: Callable[..., Servers], tmp_path_factory) -> tuple[Path, Servers]:
    """A model that learns nothing, and its server."""
    model = save(tmp_path_factory.mktemp("taught") / "model")
    return model, start(model, max_length=256)


@pytest.fixture
def teacher(taught) -> Iterator[EndpointTeacher]:
    made = EndpointTeacher(taught[1].endpoints[0], request_timeout_s=60.0, wait_s=10.0, parallel=Solo())
    with contextlib.closing(made):
        made.meet(range(40, 100))
        yield made


def samples() -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 256, size) for size in (3, 60, 100, 1, 30, 200)]
    made = [TrainingSample(drawn[i], drawn[i + 1], i) for i in (0, 1, 2, 3)]
    return [*made, TrainingSample(drawn[0], drawn[4], 4, np.arange(30) % 3 != 1)]


def test_log_probs_are_those_of_a_teacher_here(taught, teacher, record):
    net = AutoModelForCausalLM.from_pretrained(taught[0], dtype=torch.float32).eval()
    settings = RunnerSettings(budget=LearnerConfig().microbatch_tokens)
    local = LocalTeacher(net, settings=settings, backend=None, parallel=Solo()).logprobs(samples())
    found = teacher.logprobs(samples())
    gap = (found - local).abs().max().item()
    record("teacher_gap_nats", gap)
    assert gap < GAP
    exact = [plain_logprobs(net.double(), s, temperature=1.0).detach().numpy() for s in samples()[:4]]
    np.testing.assert_allclose(found[: sum(map(len, exact))].numpy(), np.concatenate(exact), atol=GAP)


def test_the_model_and_its_tokens_are_recognised(taught, tmp_path):
    model, servers = taught
    endpoint = servers.endpoints[0]
    found = served(endpoint)
    assert found.length == 256
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert vocabulary_problem(endpoint, found.name, tokenizer) == ""
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    table = json.loads(file.read_text())
    vocab = table["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(table))
    other = AutoTokenizer.from_pretrained(tmp_path)
    assert other.get_vocab()["a"] != tokenizer.get_vocab()["a"]
    assert "for the policy, and " in vocabulary_problem(endpoint, found.name, other)


def test_what_the_server_cannot_read_is_an_error_at_once(teacher):
    with pytest.raises(ModelError, match=r"teacher.endpoint: .*cannot read a completion of the policy"):
        teacher.logprobs([TrainingSample(np.array([5]), np.array([100000]), 0)])
    with pytest.raises(ModelError, match=r"teacher.endpoint: .*cannot read a completion of the policy"):
        teacher.logprobs([TrainingSample(np.array([5]), np.full(256, 7), 0)])


def test_another_model_is_not_taken_for_it(teacher):
    known = teacher.known
    assert known is not None
    teacher.known = type(known)(known.name, known.ids, tuple(p - 0.1 for p in known.logprobs))
    with pytest.raises(EngineError, match=r"differ by 0.1 nats per token from those at the beginning"):
        teacher.logprobs(samples())


def test_a_server_that_gives_logits_is_refused(taught, start):
    logits = start(taught[0], max_length=256, more={"logprobs-mode": "raw_logits"})
    other = EndpointTeacher(logits.endpoints[0], request_timeout_s=60.0, wait_s=10.0, parallel=Solo())
    with pytest.raises(EngineError, match=r"a (likeliest token with a )?log-prob of .*, accepted are numbers"):
        other.meet(range(40, 100))
