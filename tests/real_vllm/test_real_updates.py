"""The real vLLM: what it serves, what it loads, and what it refuses without losing what it has."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm_models import save

from trew.errors import ConfigError, EngineError
from trew.rollout.engine import Request
from trew.rollout.generate import generate
from trew.rollout.vllm import handshake
from trew.rollout.vllm.client import call
from trew.rollout.vllm.update import StaleWeights, prompt_logprobs, update
from trew.types import Prompt, Sampling
from vllm_help import House

GAP = 2e-5
"""Nats between two computations of one log-prob in float32."""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def house(shared, tied, tmp_path) -> Iterator[House]:
    """A policy beside the server, which has its weights when a test begins."""
    made = House(tied, tmp_path, list(shared.endpoints), [])
    with contextlib.closing(made.weights):
        yield made


def gap(house: House, seed: int = 0) -> float:
    """The largest difference in nats between the server's log-probs of some tokens and the model's own."""
    ids = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        own = house.net(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    served = prompt_logprobs(house.endpoints[0], ids.tolist(), timeout_s=60)
    return (torch.tensor(served) - own).abs().max().item()


def version(house: House) -> str:
    return call(house.endpoints[0], "GET", "/weight_info", what="version", timeout_s=10)["weight_version"]


def test_a_server_that_was_started_for_the_run_fits_it(shared, house):
    fits = handshake.Expected(dtype="float32", vocabulary=house.facts.vocabulary, length=512)
    handshake.check(shared.endpoints[0], fits, root=house.run)
    asked = {"config_format": "json"}
    info = call(shared.endpoints[0], "GET", "/server_info", what="settings", timeout_s=60, params=asked)
    assert info["vllm_config"]["scheduler_config"]["max_num_seqs"] == 48  # of cluster.server_args


def test_a_server_that_does_not_fit_is_refused_with_both_values(shared, house):
    other = handshake.Expected(dtype="bfloat16", vocabulary=99, length=513)
    with pytest.raises(ConfigError) as error:
        handshake.check(shared.endpoints[0], other, root=house.run)
    dtype, length, vocabulary = error.value.problems
    assert "computes in float32, the learner in bfloat16" in dtype
    assert "max_model_len = 512, prompts and completions take up to 513" in length
    assert f"a vocabulary of {house.facts.vocabulary}, the run's model has 99" in vocabulary


def test_published_weights_are_the_ones_that_are_served(house, record):
    engine = house.engine()
    gaps, seconds = [gap(house)], []
    for seed in (1, 2, 3):
        house.change(seed=seed, scale=0.3)
        stale = gap(house)
        assert stale > 0.05
        began = time.monotonic()
        house.publish(engine, house.policy.version)
        seconds.append(time.monotonic() - began)
        gaps.append(gap(house))
    assert max(gaps) < GAP
    record("gap_max_nats", [float(f"{g:.2g}") for g in gaps])
    record("gap_before_update_nats", round(stale, 3))
    record("publish_and_update_s", [round(s, 2) for s in seconds])
    record("canary_mean_nats", float(f"{engine.servers[0].gap:.2g}"))


@pytest.mark.parametrize(("kind", "own"), [("qwen3_moe", {"head_dim": 64}), ("mixtral", {})])
def test_experts_that_transformers_fuses_are_served(start, tmp_path, kind, own):
    model = save(tmp_path / "model", kind, **own)
    made = House(model, tmp_path, list(start(model).endpoints), [])
    with contextlib.closing(made.weights):
        engine = made.engine()
        assert gap(made) < GAP
        made.change(seed=1, scale=0.3)
        assert gap(made) > 0.05
        made.publish(engine, made.policy.version)
        assert gap(made) < GAP


def test_a_model_that_vllm_computes_otherwise_is_refused_by_the_canary(start, tmp_path):
    """vLLM 0.32 runs GPT-NeoX with the code of transformers, and not as transformers does: docs/models.md says so."""
    model = save(tmp_path / "model", "gpt_neox")
    made = House(model, tmp_path, list(start(model).endpoints), [])
    with contextlib.closing(made.weights):
        assert gap(made) > 1
        with pytest.raises(EngineError, match="its log-probs differ from the policy's"):
            made.engine()


def edited(house: House, edit) -> None:
    """Publishes weights that ``edit`` has changed, as a policy with a fault would."""
    policy = type(house.policy)
    real = policy.weights

    def weights(self):
        tensors = {name: tensor.detach().clone() for name, tensor in real(self)}
        edit(tensors)
        return iter(tensors.items())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "weights", weights)
        house.publish(house.engine(publish=False), house.policy.version)


def test_weights_without_the_tied_head_are_refused_and_the_old_ones_stay(house):
    engine = house.engine()
    kept, before = version(house), {name: tensor.clone() for name, tensor in house.net.state_dict().items()}
    house.change(seed=5)
    with pytest.raises(EngineError, match=r"lm_head\.weight is missing"):
        edited(house, lambda tensors: tensors.pop("lm_head.weight"))
    assert version(house) == kept
    house.net.load_state_dict(before)
    call(house.endpoints[0], "POST", "/resume", what="resuming", timeout_s=10)
    assert gap(house) < GAP
    house.change(seed=6)
    house.publish(engine, house.policy.version + 1)
    assert gap(house) < GAP


def test_an_old_head_is_found_by_the_canary(house, record):
    old = house.net.get_input_embeddings().weight.detach().clone()
    house.change(seed=7, scale=0.3)
    with pytest.raises(EngineError, match="log-probs differ from the policy's by") as error:
        edited(house, lambda tensors: tensors.update({"lm_head.weight": old}))
    record("canary_of_an_old_head_nats", float(re.search(r"by ([\d.e+-]+) nats", str(error.value))[1]))
    house.weights.newest = None
    house.publish(house.engine(publish=False), house.policy.version)
    assert gap(house) < GAP


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "says"), [(shorten, "half written or damaged"), (flip, "its BLAKE3 digest is")])
def test_a_damaged_file_is_refused_and_the_old_weights_stay(house, monkeypatch, damage, says):
    engine = house.engine()
    kept, before = version(house), {name: tensor.clone() for name, tensor in house.net.state_dict().items()}
    whole = engine.update

    def on_the_way(published):
        damage(next((published.route.root / published.route.folder).glob("*.safetensors")))
        return whole(published)

    monkeypatch.setattr(engine, "update", on_the_way)
    house.change(seed=8)
    with pytest.raises(EngineError, match=says):
        house.publish(engine, house.policy.version)
    assert version(house) == kept
    monkeypatch.undo()
    changed = {name: tensor.clone() for name, tensor in house.net.state_dict().items()}
    house.net.load_state_dict(before)
    call(house.endpoints[0], "POST", "/resume", what="resuming", timeout_s=10)
    assert gap(house) < GAP
    house.net.load_state_dict(changed)
    house.publish(engine, house.policy.version + 1)
    assert gap(house) < GAP


def test_a_version_that_was_loaded_may_be_sent_again_before_it_is_finished(house):
    """A trainer whose connection broke before the answer came."""
    engine = house.engine()
    house.change(seed=11)
    house.publish(engine, house.policy.version)
    newest = house.weights.newest
    endpoint, body = (
        house.endpoints[0],
        {"folder": newest.route.folder, "manifest_digest": newest.route.manifest_digest},
    )
    call(endpoint, "POST", "/pause", what="pausing", timeout_s=60, params={"mode": "keep"})
    call(endpoint, "POST", "/start_weight_update", what="start", timeout_s=60)
    for _ in range(2):
        call(endpoint, "POST", "/update_weights", what="update", timeout_s=60, body={"update_info": body})
    finish = {"weight_version": newest.label}
    call(endpoint, "POST", "/finish_weight_update", what="finish", timeout_s=60, body=finish)
    call(endpoint, "POST", "/resume", what="resuming", timeout_s=10)
    assert gap(house) < GAP


def test_many_long_prompts_with_seeds_at_once_are_answered(house):
    """More tokens than the server reads at a time: read in parts, with a seed, a prompt would end this build."""
    engine = house.engine()
    prompts = [Prompt(uid=f"p{i}", text=f"{i} " + "count on " * 45) for i in range(24)]
    assert len(house.renderer.encode(prompts[0])) > 300
    groups = generate(engine, prompts, n=2, sampling=Sampling(max_tokens=4, seed=5))
    assert [len(group.rollouts) for group in groups] == [2] * 24


def test_stale_weights_are_an_error_of_their_own(house):
    engine = house.engine()
    newest = house.weights.newest
    canary = newest.canary
    wrong = type(canary)(canary.ids, tuple(tuple(x - 1.0 for x in row) for row in canary.logprobs), canary.limit)
    with pytest.raises(StaleWeights, match="differ from the policy's by 1 nats"):
        update(house.endpoints[0], dataclasses.replace(newest, canary=wrong), timeout_s=60)
    house.publish(engine, 0)


def test_what_engines_keep_holds_on_a_real_server(shared, tied, record):
    """The contract of engines, which otherwise runs on a stand-in for vLLM."""
    endpoint = shared.endpoints[0]
    settings = {"TREW_VLLM_ENDPOINT": str(endpoint), "TREW_VLLM_MODEL": str(tied), "TREW_SERVER_TOKEN": endpoint.token}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-rA", str(ROOT / "tests/contract/test_vllm_engine.py")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    record("contract_tests_passed", passed)
    assert passed >= 15


def test_an_update_waits_for_no_request_that_waits_for_a_place(start, tied, tmp_path):
    """The canary is not the last of a queue: learner and all callers would wait until the server is through with it."""
    servers = start(tied, sequences=2)
    house = House(tied, tmp_path, list(servers.endpoints), [])
    engine = house.engine()
    sampling = Sampling(max_tokens=400, seed=3)
    prompts = [Prompt(f"p{i}", f"{i} + {i} =") for i in range(60)]
    engine.submit([Request(f"{p.uid}/{i}", p, i, sampling) for p in prompts for i in range(2)])
    time.sleep(1)
    with contextlib.closing(house.weights):
        house.change()
        house.publish(engine, house.policy.version)
    reports = engine.poll(0.0)
    engine.cancel([f"{p.uid}/{i}" for p in prompts for i in range(2)])
    # Behind the queue it would be all 120. Some are made while the weights are written, on a slow machine a few dozen.
    assert len(reports) < 60, f"{len(reports)} of 120 completions were made before the update was over"
