"""What engines keep, by VllmEngine: on a stand-in for its servers, or on a real one (``vllm_help``)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_engines import (  # noqa: F401
    PROMPTS,
    SAMPLING,
    Kind,
    asked,
    drained,
    requests,
    test_a_poll_with_time_reports_something,
    test_a_poll_without_patience_returns_before_anything_is_finished,
    test_after_a_failure_it_is_empty_and_usable,
    test_an_id_is_unique_among_unfinished_requests,
    test_capabilities_are_true,
    test_equal_requests_get_equal_turns,
    test_every_request_is_reported_once,
    test_nothing_is_left_when_all_are_cancelled,
    test_requests_may_be_sampled_differently,
    test_requests_may_come_while_others_are_running,
    test_state_goes_to_another_engine,
    test_turns_are_whole,
    test_what_cannot_be_generated_is_refused_whole,
    test_what_is_cancelled_is_never_reported,
    turns,
)

from forks import wait_for
from trew.errors import EngineError
from trew.rollout.engine import Request
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.rollout.vllm.client import call
from trew.rollout.vllm.endpoint import Endpoint
from trew.rollout.vllm.environment import FORMAT
from trew.rollout.vllm.routes import prepare
from trew.types import Prompt, Turn
from vllm_help import REAL, House, any_house

GAP = 1e-5
"""Nats between two computations of the same log-prob in float32."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with any_house(tmp_path_factory.mktemp("house")) as made:
        for fake in made.fakes:
            fake.faults.slow = 0.003  # seconds per token: something is in flight when a test looks
        yield made


@pytest.fixture
def servers(shared: House) -> Iterator[House]:
    """The servers and the policy, which has its first weights again afterwards."""
    kept = {name: p.detach().clone() for name, p in shared.net.state_dict().items()}
    yield shared
    shared.net.load_state_dict(kept)
    shared.weights.newest = None


@pytest.fixture
def kind(servers: House) -> Kind:
    @contextlib.contextmanager
    def broken(engine: Any) -> Iterator[None]:
        if not servers.fakes:
            pytest.skip("a real server is not broken on request")
        for fake in servers.fakes:
            fake.dead = True
        yield
        for fake in servers.fakes:
            fake.dead = False
        servers.publish(engine, engine.version)

    return Kind(servers.engine, broken, EngineError, servers.publish)


@pytest.fixture(name="engine")
def made_engine(kind: Kind) -> Any:
    return kind.make()


def one(engine: Any, wanted: list[Request]) -> dict[str, Turn]:
    engine.submit(wanted)
    return turns(drained(engine))


def policy_logprobs(servers: House, turn: Turn, *, temperature: float = 1.0) -> np.ndarray:
    ids = np.concatenate([turn.context_ids, turn.token_ids])
    with torch.no_grad():
        logits = servers.net(torch.from_numpy(ids)[None]).logits[0, len(turn.context_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.from_numpy(turn.token_ids)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_sampling_distribution(servers, temperature):
    sampling = dataclasses.replace(SAMPLING, temperature=temperature)
    for turn in one(servers.engine(), requests(sampling=sampling)).values():
        np.testing.assert_allclose(turn.logprobs, policy_logprobs(servers, turn, temperature=temperature), atol=GAP)


def test_an_update_changes_what_is_computed(servers):
    engine = servers.engine()
    before = one(engine, requests())
    servers.change()
    servers.publish(engine, servers.policy.version)
    after = one(engine, requests())
    for turn in after.values():
        np.testing.assert_allclose(turn.logprobs, policy_logprobs(servers, turn), atol=GAP)
        assert {span.version for span in turn.versions} == {1}
    assert any(before[i].token_ids.tolist() != after[i].token_ids.tolist() for i in before)
    assert all(server.gap < GAP for server in engine.servers)


def tokens_made(endpoint: Endpoint) -> float:
    """How many tokens a server has generated so far, by its own count."""
    text = call(endpoint, "GET", "/metrics", what="metrics", timeout_s=60)
    return sum(map(float, re.findall(r"(?m)^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)", text)))


def test_weights_may_change_while_completions_are_made(servers):
    """They go on with the new weights, and say which token is whose."""
    engine, endpoint = servers.engine(), servers.endpoints[0]
    made = tokens_made(endpoint)
    most = 24 if servers.fakes else 400
    engine.submit(requests(of=PROMPTS[:2], sampling=dataclasses.replace(SAMPLING, max_tokens=most)))
    wait_for(lambda: tokens_made(endpoint) > made + 2)
    # Held back here, so that none is complete before the update, however long that takes on a busy machine.
    call(endpoint, "POST", "/pause", what="holding back", timeout_s=60, params={"mode": "keep"})
    servers.change()
    servers.publish(engine, 1)
    found = turns(drained(engine))
    assert {0, 1} == {span.version for turn in found.values() for span in turn.versions}
    for turn in found.values():
        new = slice(next((span.start for span in turn.versions if span.version == 1), None), None)
        if new.start is not None:
            np.testing.assert_allclose(turn.logprobs[new], policy_logprobs(servers, turn)[new], atol=GAP)
    assert {span.version for turn in one(engine, requests()).values() for span in turn.versions} == {1}


def test_a_group_is_one_request_with_the_draws_of_its_samples(servers):
    """Sample by sample, in any order and with gaps, the draws are the same."""
    engine = servers.engine()
    wanted = requests(n=4, of=PROMPTS[:1])
    for fake in servers.fakes:
        fake.calls.clear()
    whole = asked(engine, wanted)
    for fake in servers.fakes:
        assert [path for path, _ in fake.calls if "generate" in path] == ["POST /inference/v1/generate"]
    for part in ([wanted[2]], wanted[::-1], [wanted[0], wanted[1], wanted[3]]):
        assert asked(engine, part) == {request.id: whole[request.id] for request in part}
    assert len({tuple(ids) for ids in whole.values()}) == 4


def test_prompts_of_the_same_text_have_draws_of_their_own(servers):
    engine = servers.engine()
    same = [Prompt(uid=f"same {i}", text="hi") for i in range(3)]
    got = asked(engine, requests(n=2, of=same))
    assert len({tuple(ids) for ids in got.values()}) == 6
    again = [Prompt(uid="same 0", text="hi")]
    assert asked(engine, requests(n=2, of=again)) == {each: got[each] for each in ("same 0/0", "same 0/1")}


def test_greedy_answers_are_one_answer(servers):
    sampling = dataclasses.replace(SAMPLING, temperature=0.0)
    found = one(servers.engine(), requests(n=3, of=PROMPTS[:1], sampling=sampling))
    (only,) = {tuple(turn.token_ids.tolist()) for turn in found.values()}
    turn = found["p0/0"]
    ids = [*turn.context_ids.tolist()]
    for token in only:
        with torch.no_grad():
            assert int(servers.net(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)
    assert not any(turn.logprobs.any() for turn in found.values())


@pytest.mark.parametrize("stop", ["a", "\x00", "<|im_end|>"])
def test_completions_end_as_the_embedded_engine_ends_them(servers, stop):
    """Same text, same reason, for the same tokens."""
    sampling = dataclasses.replace(SAMPLING, stop=(stop, *"bcdefghijklmnop"), max_tokens=24)
    found = one(servers.engine(), requests(n=6, sampling=sampling))
    embedded = TorchEngine(servers.net, servers.renderer)
    assert {turn.finish_reason for turn in found.values()} == {"stop", "length"}
    for turn in found.values():
        text = servers.renderer.decode(turn.token_ids[:-1].tolist())
        assert not any(string in text for string in sampling.stop), "it went on after a stop string"
        ended = int(turn.token_ids[-1]) in embedded.stop_ids
        whole = servers.renderer.decode(turn.token_ids.tolist())
        cut = min([at for string in sampling.stop if (at := whole.find(string)) >= 0], default=len(whole))
        assert turn.text == (text if ended else whole[:cut])
        assert turn.finish_reason == ("stop" if ended or cut < len(whole) else "length")


def test_weights_without_the_tied_head_are_found_out(servers, monkeypatch):
    """Every call succeeds, and the server would compute with the old head."""
    engine = servers.engine()
    before = one(engine, requests())
    servers.change()
    real = type(servers.policy).weights

    def old_head(policy: Any) -> Any:
        for name, tensor in real(policy):
            yield name, torch.zeros_like(tensor) if name == "lm_head.weight" else tensor

    with monkeypatch.context() as within:
        within.setattr(type(servers.policy), "weights", old_head)
        with pytest.raises(EngineError, match="nats"):
            servers.publish(engine, 1)
    with pytest.raises(EngineError, match="nats"):
        engine.submit(requests())
    servers.weights.newest = None
    servers.publish(engine, 2)
    assert one(engine, requests()).keys() == before.keys()


def test_an_announcement_is_accepted(servers):
    """Where it is not, nothing says so: an update does without."""
    engine = servers.engine()
    servers.change()
    files = servers.weights.write(servers.policy, engine).route
    info = {"root": str(files.root), "format": FORMAT, "folder": files.folder, "manifest_digest": files.manifest_digest}
    prepare(servers.endpoints[0], "announcing", info, timeout_s=60)
    servers.publish(engine, servers.policy.version)
    assert one(engine, requests()).keys() == {request.id for request in requests()}


def test_a_version_that_is_damaged_once_it_was_announced_is_refused(servers, monkeypatch):
    """Its bytes, not its size, and with the time of before."""
    engine = servers.engine()
    before = one(engine, requests())
    servers.change()
    canary = servers.weights._canary

    def damaging(policy: Any) -> Any:
        # The announcement comes before the canary, and small files are verified at once.
        time.sleep(0.5)
        (path,) = (servers.weights._place.folder / "000001").glob("*.safetensors")
        times = path.stat()
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return canary(policy)

    with monkeypatch.context() as within:
        within.setattr(servers.weights, "_canary", damaging)
        with pytest.raises(EngineError, match="is damaged: its BLAKE3 digest"):
            servers.publish(engine, 1)
    servers.weights.newest = None
    servers.publish(engine, 2)
    assert one(engine, requests()).keys() == before.keys()


def test_an_update_that_another_trainer_left_open_is_completed_with_these_weights(servers):
    for route in ("/pause", "/start_weight_update"):
        call(servers.endpoints[0], "POST", route, what=route, timeout_s=60)
    servers.change()
    engine = servers.engine()
    assert one(engine, requests()).keys() == {request.id for request in requests()}


def test_no_thread_is_left_when_nothing_is_unfinished(servers):
    before = {thread.name for thread in threading.enumerate()}
    engine = servers.engine()
    engine.submit(requests())
    assert "trew-requests" in {thread.name for thread in threading.enumerate()}
    engine.cancel([request.id for request in requests()])
    generate(engine, PROMPTS, n=2, sampling=SAMPLING)
    left = {thread.name for thread in threading.enumerate() if thread.name.startswith("trew")}
    assert left <= before


def test_without_weights_nothing_is_submitted(servers):
    engine = servers.engine(publish=False)
    with pytest.raises(EngineError, match="got no weights yet"):
        engine.submit(requests())
    with pytest.raises(EngineError, match="publish"):
        engine.version = 3


@pytest.mark.skipif(bool(REAL), reason="looks at what a stand-in was asked")
def test_every_sampling_parameter_is_sent(servers):
    engine = servers.engine()
    way = dataclasses.replace(SAMPLING, temperature=0.9, top_p=0.8, top_k=5, min_p=0.01, stop=("xyz",))
    servers.fakes[0].calls.clear()
    one(engine, requests(n=2, of=PROMPTS[:1], sampling=way))
    (sent,) = [body["sampling_params"] for path, body in servers.fakes[0].calls if "generate" in path]
    assert {key: sent[key] for key in ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p")} == {
        "n": 2, "max_tokens": 12, "temperature": 0.9, "top_p": 0.8, "top_k": 5, "min_p": 0.01,
    }  # fmt: skip
    assert (sent["stop"], sent["repetition_penalty"], sent["ignore_eos"]) == (["xyz"], 1.0, True)
    assert set(sent["stop_token_ids"]) == engine.renderer.stop_ids | engine.facts.ends
