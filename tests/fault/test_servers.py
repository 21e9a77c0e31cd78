"""Servers that die, hang, lie or answer badly: nothing of it reaches training, and a run goes on while one is left."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiers
import trew.weights.places as places
from disk import fill, tmpfs
from fake_vllm import FakeVllm, Refusal
from forks import wait_for
from trew.errors import EngineError, StorageError
from trew.rollout.engine import Finished, Lost, Request
from trew.rollout.generate import generate
from trew.rollout.shared import SharedEngine
from trew.rollout.vllm.engine import VllmEngine
from vllm_help import PROMPTS, SAMPLING, House, house, made, only, tokens

# ---- S4, S5: dead and hung


def test_groups_of_a_server_that_dies_are_made_by_another_with_the_same_draws(two):
    engine = two.engine()
    expected = made(engine)
    two.fakes[0].faults.dies_after = 4
    begin = time.monotonic()
    assert made(engine) == expected
    assert engine.counts["lost"] > 0
    assert "1 of 2 are left" in two.told[-1]
    asked = len(two.fakes[0].calls)
    assert made(engine) == expected
    assert len(two.fakes[0].calls) == asked, "it is not asked again"
    assert time.monotonic() - begin < engine.request_timeout_s, "found out by its connection, not by a limit"


def test_a_dead_engine_behind_a_live_server_is_a_dead_server(two):
    """vLLM answers 500 once its engine has died: no reason to try again."""
    engine = two.engine()
    expected = made(engine)
    two.fakes[1].faults.status = 500
    assert made(engine) == expected
    asked = sum("generate" in path for path, _ in two.fakes[1].calls)
    made(engine)
    assert sum("generate" in path for path, _ in two.fakes[1].calls) == asked
    assert any("EngineCore" in text for text in two.told)


def test_an_update_waits_for_no_request_that_waits_for_a_place(tmp_path):
    """The canary is not the last of a queue: the learner would wait until the server is through with it, and after its
    limit the server would be taken for a dead one."""
    with house(tmp_path) as one:
        engine = one.engine()
        one.fakes[0].places.slots, one.fakes[0].faults.slow = 1, 0.02
        requests = [Request(f"{i}", prompt, 0, SAMPLING) for i, prompt in enumerate(PROMPTS * 4)]
        engine.submit(requests)
        wait_for(lambda: len(one.fakes[0].calls) > len(requests))
        one.change()
        one.publish(engine, 1)
        reports = engine.poll(0.0)
        engine.cancel([request.id for request in requests])
        assert len(reports) < len(requests) / 2, "more than half of the queue was made before the update was over"


def test_what_somebody_waits_for_waits_for_no_request_that_waits_for_a_place(tmp_path):
    """An evaluation beside groups that nobody needs yet: of those, the server finishes the one that it has begun."""
    with house(tmp_path) as one, contextlib.closing(SharedEngine(one.engine())) as shared:
        one.fakes[0].places.slots, one.fakes[0].faults.slow = 1, 0.05
        ahead, beside = shared.view("ahead"), shared.view("beside", first=True)
        ahead.submit([Request(f"{i}", prompt, 0, SAMPLING) for i, prompt in enumerate(PROMPTS * 4)])
        wait_for(lambda: one.fakes[0].begun > 0)
        found = generate(beside, PROMPTS[:2], n=1, sampling=SAMPLING)
        done = len(ahead.poll(0.0))
    assert [len(group.rollouts) for group in found] == [1, 1]
    assert done < 12, "most of the queue of 24 was made before what somebody waits for"


def test_what_somebody_waits_for_is_sent_at_once(tmp_path, monkeypatch):
    """Also to a server that has as many groups as it is given otherwise."""
    monkeypatch.setattr("trew.rollout.vllm.engine.MOST_OPEN", 2)
    with house(tmp_path) as one:
        engine = one.engine()
        one.fakes[0].faults.hangs = True
        one.fakes[0].calls.clear()

        def sent() -> list[int]:
            return [body.get("priority", 0) for path, body in list(one.fakes[0].calls) if path.endswith("/generate")]

        asked = [Request(f"{i}", prompt, 0, SAMPLING) for i, prompt in enumerate(PROMPTS)]
        engine.submit(asked)
        engine.submit([dataclasses.replace(each, id=f"first {each.id}", first=True) for each in asked])
        wait_for(lambda: len(sent()) == 2 + len(asked))
        assert sorted(sent()) == [-1] * len(asked) + [0, 0]
        engine.cancel([name for each in asked for name in (each.id, f"first {each.id}")])


def test_a_server_that_comes_back_is_used_after_the_next_update(two):
    engine = two.engine()
    two.fakes[0].faults.dies_after = 0
    made(engine)
    two.fakes[0].faults.dies_after, two.fakes[0].dead = -1, False
    two.change()
    two.publish(engine, 1)
    before = [fake.tokens for fake in two.fakes]
    made(engine)
    assert all(fake.tokens > count for fake, count in zip(two.fakes, before, strict=True))


def test_a_server_that_makes_no_token_is_hung_however_healthy_it_says_it_is(two):
    engine, before = two.engine(request_timeout_s=0.6), set(threading.enumerate())
    expected = made(only(two, 1))
    two.fakes[0].faults.hangs = True
    assert made(engine) == expected
    assert any("no new token for 0.6 s" in text for text in two.told)
    assert not [t for t in set(threading.enumerate()) - before if t.name == "trew-requests"]


def test_a_slow_server_is_not_hung(two):
    """Its answers take longer than the limit, its tokens do not."""
    engine = only(two, 0, request_timeout_s=0.5)
    two.fakes[0].faults.slow = 0.1
    made(engine)
    assert engine.counts["lost"] == 0


def test_when_all_servers_are_gone_the_error_names_each_and_why(two):
    engine = two.engine(request_timeout_s=0.5)
    two.fakes[0].faults.dies_after = 2
    two.fakes[1].faults.hangs = True
    with pytest.raises(EngineError) as error:
        made(engine)
    for endpoint, why in zip(two.endpoints, ("closed connection", "no new token"), strict=True):
        assert f"server {endpoint}" in str(error.value)
        assert why in str(error.value)
    assert engine.poll() == []


# ---- S6: answers that cannot be right


def choice(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    return lambda answer: change(answer["choices"][1])


def set_logprob(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda c: c["logprobs"]["content"][0].update(logprob=value)


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "too few": (lambda a: a["choices"].pop(), "2 completions where 3 were asked for"),
    "too many": (lambda a: a["choices"].append(copy.deepcopy(a["choices"][0])), "4 completions where 3"),
    "one twice": (choice(lambda c: c.update(index=0)), "3 completions where 3"),
    "no choices": (lambda a: a.clear(), "malformed"),
    "cut": (choice(lambda c: (c.update(finish_reason="abort"))), "was cut"),
    "shorter than it says": (
        choice(lambda c: (c["token_ids"].pop(), c["logprobs"]["content"].pop(), c.update(finish_reason="length"),
                          c["weight_versions"][0].update(end=len(c["token_ids"])))), "was cut"),
    "empty": (choice(lambda c: c.update(token_ids=[])), "a completion of 0 tokens"),
    "too long": (choice(lambda c: c.update(token_ids=[1] * 99)), "a completion of 99 tokens"),
    "foreign token": (choice(lambda c: c["token_ids"].__setitem__(0, 10**6)), "outside the model's vocabulary"),
    "no token": (choice(lambda c: c["token_ids"].__setitem__(0, "7")), "token id '7'"),
    "after its end": (choice(lambda c: c["token_ids"].__setitem__(0, 258)), "goes on after the end token 258"),
    "fewer log-probs": (choice(lambda c: c["logprobs"]["content"].pop()), "log-probs for"),
    "other log-probs": (choice(lambda c: c["logprobs"]["content"][0].update(token_id=1)), "log-probs of other tokens"),
    "nan": (choice(set_logprob(-9999.0)), "a log-prob of -9999.0"),
    "above 0": (choice(set_logprob(0.5)), "a log-prob of 0.5"),
    "no log-prob": (choice(set_logprob(None)), "malformed"),
    "another version": (choice(lambda c: c["weight_versions"][0].update(version="0")), "weights '0', which it cannot"),
    "no version": (choice(lambda c: c.update(weight_versions=None)), "malformed"),
    "half a version": (choice(lambda c: c["weight_versions"][0].update(start=1)), "do not cover"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_group_with_anything_wrong_is_made_again_whole(two, name):
    spoil, said = BAD[name]
    sampling = dataclasses.replace(SAMPLING, stop=())
    engine = only(two, 0)
    expected = tokens(generate(engine, PROMPTS[:2], n=3, sampling=sampling))
    two.fakes[0].faults.spoil, two.fakes[0].faults.bad_answers = spoil, 1
    assert tokens(generate(engine, PROMPTS[:2], n=3, sampling=sampling)) == expected
    assert engine.counts == {"lost": 3, "refused": 3}
    assert said in two.told[-1]


def test_three_bad_answers_in_a_row_quarantine_a_server(two):
    engine = two.engine()
    expected = made(engine)
    two.fakes[0].faults.spoil, two.fakes[0].faults.bad_answers = BAD["too few"][0], 10**6
    assert made(engine) == expected
    assert "3 answers in a row could not be used" in " ".join(two.told)
    assert engine.servers[0].version is None
    alone = only(two, 0)
    with pytest.raises(EngineError, match=r"3 answers in a row.*2 completions where 3"):
        made(alone)


def test_answers_that_are_good_again_end_the_count(two):
    engine = only(two, 0)
    two.fakes[0].faults.spoil = BAD["too few"][0]
    for _ in range(3):
        two.fakes[0].faults.bad_answers = 2
        generate(engine, PROMPTS[:2], n=3, sampling=SAMPLING)
        generate(engine, PROMPTS[:1], n=3, sampling=SAMPLING)
    assert engine.servers[0].version == 0


# ---- S7, S8: updates


ROUTES = ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update")


@pytest.mark.parametrize("route", tiers.some(ROUTES, ("/start_weight_update", "/finish_weight_update")))
def test_a_server_is_not_used_between_a_failed_update_and_a_successful_one(two, route):
    engine = two.engine()
    two.change()
    two.fakes[0].faults.failing = {route: 99}
    two.publish(engine, 1)
    assert [server.version for server in engine.servers] == [None, 1]
    assert "is not used until an update succeeds" in two.told[-1]
    before = two.fakes[0].tokens
    first = made(engine)
    assert two.fakes[0].tokens == before
    two.fakes[0].faults.failing = {}
    two.publish(engine, 1)
    assert [server.version for server in engine.servers] == [1, 1]
    assert made(engine) == first


@pytest.mark.parametrize("route", ["/update_weights", "/finish_weight_update"])
def test_an_update_that_fails_once_is_begun_again(two, route):
    engine = two.engine()
    two.change()
    two.fakes[0].faults.failing = {route: 1}
    two.publish(engine, 1)
    assert [server.version for server in engine.servers] == [1, 1]


def test_a_file_that_is_damaged_is_refused_by_all_servers(two, monkeypatch):
    engine = two.engine()
    expected = made(engine)
    real = two.weights._take

    def damaged(*given: Any) -> Any:
        files, canary = real(*given)
        (path,) = (files.root / files.folder).glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:-100])
        return files, canary

    with monkeypatch.context() as within:
        within.setattr(two.weights, "_take", damaged)
        with pytest.raises(EngineError, match="half written or damaged"):
            two.publish(engine, 1)
    with pytest.raises(EngineError, match="damaged"):
        made(engine)
    two.weights.newest = None
    two.publish(engine, 2)
    assert made(engine) == expected


@pytest.mark.parametrize("stale", [("lm_head",), ("norm",), ("layers.1.mlp",)])
def test_weights_that_a_server_kept_are_found_out_before_anything_is_sampled(two, stale):
    """All calls succeed and the version is right."""
    engine = two.engine()
    two.change()
    two.fakes[1].faults.stale = stale
    two.fakes[1].calls.clear()
    two.publish(engine, 1)
    assert [server.version for server in engine.servers] == [1, None]
    assert "although it says that it has the same weights" in two.told[-1]
    made(engine)
    asked = [body["sampling_params"] for path, body in two.fakes[1].calls if "generate" in path]
    assert asked
    assert all(sampling.get("prompt_logprobs") == 0 for sampling in asked)


@pytest.mark.parametrize(
    "faults",
    [{"stale": ("lm_head",)}, {"failing": {"/inference/v1/generate": 99}}],
    ids=["canary fails", "canary refused"],
)
def test_what_a_server_made_with_unproven_weights_stays_lost_after_the_next_update(two, faults):
    """It goes on under the label of these weights, which the engine knows."""
    engine = two.engine()
    halfway(two, engine)
    two.change()
    vars(two.fakes[1].faults).update(faults)
    two.publish(engine, 1)
    assert [server.version for server in engine.servers] == [1, None]
    some_more(two.fakes[1])
    two.fakes[1].faults.stale, two.fakes[1].faults.failing = (), {}
    two.change(seed=2)
    two.publish(engine, 2)
    assert [server.version for server in engine.servers] == [2, 2]
    two.fakes[1].faults.hangs = False
    assert [(report.id, type(report)) for report in engine.poll()] == [("1", Lost)]
    assert engine.servers[1].version == 2, "it is not blamed for what was before"


def test_a_server_that_stayed_paused_until_the_next_update_loses_nothing(two):
    engine = two.engine()
    halfway(two, engine)
    two.change()
    two.fakes[1].faults.failing = {"/update_weights": 99}
    two.publish(engine, 1)
    assert [server.version for server in engine.servers] == [1, None]
    two.fakes[1].faults.failing = {}
    two.publish(engine, 2)
    two.fakes[1].faults.hangs = False
    assert [(report.id, type(report)) for report in engine.poll()] == [("1", Finished)]


def halfway(house: House, engine: VllmEngine) -> None:
    """Asks for two completions, of which server 1 has made a part and holds back the rest."""
    fake, how = house.fakes[1], dataclasses.replace(SAMPLING, max_tokens=60)
    fake.faults.hangs, fake.faults.slow, fake.begun = True, 0.02, 0
    engine.submit([Request(str(i), PROMPTS[i], 0, how) for i in range(2)])
    wait_for(lambda: fake.begun)
    some_more(fake)
    assert [(report.id, type(report)) for report in engine.poll()] == [("0", Finished)]


def some_more(fake: FakeVllm) -> None:
    """Lets a server make some tokens, but no completion."""
    before, fake.faults.hangs = fake.tokens, False
    wait_for(lambda: fake.tokens > before)
    fake.faults.hangs = True


def test_a_server_that_says_another_version_is_not_used(two):
    engine = two.engine()
    two.fakes[0].faults.lies = "older"
    two.change()
    two.publish(engine, 1)
    assert "says that it has 'older'" in two.told[-1]
    assert [server.version for server in engine.servers] == [None, 1]


def test_another_runs_weights_are_not_taken_for_its_own(two, tmp_path):
    """Two runs on one server: each has a version 0."""
    engine = only(two, 0)
    expected = made(engine)
    other = House(two.fakes[0].folder, tmp_path, [two.endpoints[0]], [two.fakes[0]])
    other.change()
    other.publish(other.engine(publish=False), 0)
    with pytest.raises(EngineError, match="which it cannot have"):
        made(engine)
    two.publish(engine, 0)
    assert made(engine) == expected
    other.weights.close()


# ---- S12: no room


def test_without_room_no_server_is_paused(two, tmp_path, monkeypatch):
    engine = two.engine()
    expected = made(engine)
    with tmpfs(kilobytes=1024) as small:
        monkeypatch.setattr(places, "SHARED_MEMORY", small)
        crowded = House(two.fakes[0].folder, small, two.endpoints, two.fakes)
        fill(small, leave=100_000)
        for fake in two.fakes:
            fake.calls.clear()
        with pytest.raises(StorageError, match=r"weights of version 0 need [\d.]+ MiB, [\d.]+ MiB are free") as error:
            crowded.publish(crowded.engine(publish=False), 0)
        assert str(small) in str(error.value)
        assert [fake.calls for fake in two.fakes] == [[], []]
    assert made(engine) == expected


def test_a_disk_that_fills_up_while_weights_are_written_leaves_no_half_version(two, tmp_path, monkeypatch):
    with tmpfs(kilobytes=1024) as small:
        crowded = House(two.fakes[0].folder, small, two.endpoints, two.fakes)
        monkeypatch.setattr(places, "SHARED_MEMORY", small / "none")
        monkeypatch.setattr("trew.weights.folders._require_room", lambda *_, **__: None)
        fill(small, leave=50_000)
        with pytest.raises(StorageError, match="cannot be written"):
            crowded.publish(crowded.engine(publish=False), 0)
        assert list((small / "weights").iterdir()) == []


# ---- what is published


def test_two_versions_stay_and_the_rest_is_removed(two):
    engine = two.engine()
    for version in range(1, 5):
        two.change()
        two.publish(engine, version)
    root = two.weights.newest.route.root
    assert sorted(path.name for path in root.iterdir()) == ["000003", "000004"]
    assert root.is_relative_to("/dev/shm")
    assert (root.parent.stat().st_mode & 0o777) == 0o700
    manifest = json.loads((root / "000004" / "manifest.json").read_text())
    assert manifest["tensors"]["lm_head.weight"] == manifest["tensors"]["model.embed_tokens.weight"]


def test_what_a_killed_process_left_in_memory_is_removed(tmp_path, monkeypatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", memory)
    left = memory / f"{places.PREFIX}left"
    (left / "weights").mkdir(parents=True)
    (left / "lock").touch()  # nobody holds it
    one = places.place_for(tmp_path, size=1, local=True)
    two = places.place_for(tmp_path, size=1, local=True)
    assert not left.exists()
    assert one.folder.is_dir(), "that of a process that lives stays"
    assert two.folder.is_dir()
    one.close()
    two.close()
    assert list(memory.iterdir()) == []


def test_servers_elsewhere_get_files_in_the_run_folder(tmp_path):
    (tmp_path / "weights" / "000007").mkdir(parents=True)
    place = places.place_for(tmp_path, size=1, local=False)
    assert place.folder == tmp_path / "weights"
    assert place.shared
    assert list(place.folder.iterdir()) == [], "of a process that was killed"
    place.close()
    unfit = places.place_for(tmp_path, size=1 << 60, local=True)
    assert unfit.folder == tmp_path / "weights", "shared memory is too small"
    assert Path(unfit.folder).is_dir()


def test_a_server_that_is_reached_by_a_port_of_this_machine_may_see_another_shared_memory(tmp_path, monkeypatch):
    """In a container, or at the other end of a tunnel."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", memory)
    init = FakeVllm.init
    for apart in (False, True):

        def seen(fake: FakeVllm, body: Any, apart: bool = apart) -> Any:
            if apart and str(memory) in str(body["init_info"].get("root")):
                raise Refusal(500, "Refused: root: accepts the absolute path of a folder on this host")
            return init(fake, body)

        monkeypatch.setattr(FakeVllm, "init", seen)
        with house(tmp_path, tcp=True) as servers:
            engine = servers.engine()
            assert engine.servers[0].version == 0
            assert any(memory.iterdir()) != apart
            assert (tmp_path / "weights").is_dir() == apart


def test_publishing_a_version_twice_asks_no_server(two):
    engine = two.engine()
    for fake in two.fakes:
        fake.calls.clear()
    two.publish(engine, 0)
    assert [fake.calls for fake in two.fakes] == [[], []]
