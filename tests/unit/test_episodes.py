"""Episodes: what the policy is fed and trained on, how they end, and what nothing may depend on."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest
import torch

import env_help
import tiers
import tiny
from trew.config import RewardConfig, parse
from trew.env.hosts import Hosts
from trew.env.load import Spec
from trew.errors import EngineError, EpisodeError
from trew.rewards import RewardSet
from trew.rollout import Renderer, codec
from trew.rollout.bridge import Bridges
from trew.rollout.engine import Capabilities, Finished, Lost, Request
from trew.rollout.episodes import Episodes, Limits, environment_seed
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.rollout.torch_engine.decode import Schedule
from trew.training import episodes as planned
from trew.training import planning
from trew.types import Prompt, Sampling, Span, Turn

END = 258
SPOKEN = tiny.tokenizer()  # not the one that must not see what was sampled
HOW = Sampling(max_tokens=12)
BACKEND: Any = None  # another decoder, and the widths that it needs


def WIDTHS(kind):
    return {}


LIMITS = Limits(turns=6, tokens=512, observation=100)


class Guarded:
    """A tokenizer that refuses to encode what a policy has sampled."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.sampled = tokenizer, set[str]()

    def __call__(self, text: str, **options: Any) -> Any:
        assert not [said for said in self.sampled if said in text], f"sampled text is encoded again: {text!r}"
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Scripted:
    """An engine whose policy says what ``script`` returns for (request, number of the turn)."""

    capabilities = Capabilities(reproducible=True, entropies=True, untruncated_logprobs=True, in_flight_updates=False)
    version = 0

    def __init__(self, renderer: Renderer, script: Any) -> None:
        self.renderer, self.script = renderer, script
        self.fed: dict[str, list[list[int]]] = {}
        self.requests: dict[str, Request] = {}
        self.cancelled: list[str] = []
        self.lose = 0

    def submit(self, requests):
        self.requests |= {request.id: request for request in requests}

    def poll(self, timeout_s=None):
        found = []
        for request in self.requests.values():
            assert request.earlier is not None
            contexts = self.fed.setdefault(request.id, [])
            contexts.append(request.earlier.ids.tolist())
            if self.lose:
                self.lose -= 1
                found.append(Lost(request.id, "gone"))
                continue
            said = self.script(request, len(contexts) - 1)
            ids = [*SPOKEN(said)["input_ids"], END] if isinstance(said, str) else list(said)
            ended = ids[-1:] == [END]
            zeros = np.full(len(ids), -0.5, np.float32)
            found.append(Finished.of(request.id, Turn(
                request.earlier.ids, np.array(ids), zeros, zeros, zeros, (Span(0, 0, len(ids)),),
                self.renderer.decode(ids[:-1] if ended else ids), "stop" if ended else "length",
            )))  # fmt: skip
        self.requests = {}
        return found

    def cancel(self, ids):
        self.cancelled += ids
        self.requests = {id: r for id, r in self.requests.items() if id not in ids}

    def state(self):
        return {}

    def load_state(self, state):
        pass


def played(hosts: Hosts, script: Any, *, limits: Limits = LIMITS, guard: bool = True, **more: Any) -> Episodes:
    tokenizer = tiny.tokenizer()
    renderer = Renderer(Guarded(tokenizer) if guard else tokenizer)
    bridges = Bridges(renderer, most=64)
    return Episodes(Scripted(renderer, script), hosts, bridges, limits=limits, ends=renderer.stop_ids, **more)


@pytest.fixture
def env():
    """Makes hosts of an environment of ``env_help``, which end with the test."""
    made: list[Hosts] = []

    def make(name: str, *, size: int = 1, timeout_s: float = 20.0, **args: Any) -> Hosts:
        made.append(Hosts(Spec(f"{env_help.__file__}:{name}", args), size=size, timeout_s=timeout_s))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


def prompts(count: int, **columns: Any) -> list[Prompt]:
    return [Prompt(f"p{i}", text="x", columns={"word": f"w{i}", **columns}) for i in range(count)]


def test_what_is_trained_on_is_what_the_policy_was_fed(env):
    def says(request, turn):
        text = f"Z{turn}{request.sample}Q"
        episodes.bridges.renderer.tokenizer.sampled.add(text)
        return text

    episodes = played(env("quiet"), says)
    for group in generate(episodes, prompts(2), n=3, sampling=HOW):
        for rollout in group.rollouts:
            key = next(k for k, fed in episodes.engine.fed.items() if fed[-1] == _before_last(rollout))
            fed = episodes.engine.fed[key]
            assert [len(turn.token_ids) for turn in rollout.turns] == [5] * 4
            ids = rollout.prompt_ids.tolist()
            for turn, context in zip(rollout.turns, fed, strict=True):
                ids = ids if turn is rollout.turns[0] else ids + turn.context_ids.tolist()
                assert context == ids
                ids = ids + turn.token_ids.tolist()
            assert ids == [*rollout.prompt_ids, *rollout.token_ids]
            assert rollout.sampled.sum() == len(rollout) == 20
            assert not rollout.logprobs[~rollout.sampled].any()
            assert (rollout.status, rollout.ending, rollout.finish_reason) == ("finished", "done", "stop")
            roles = [message["role"] for message in rollout.conversation]
            assert roles == ["user", "assistant"] * 4
            text = episodes.bridges.renderer.decode_whole(ids)
            assert text == "".join(
                f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>{'' if i == 7 else chr(10)}"
                for i, m in enumerate(rollout.conversation)
            )


def _before_last(rollout):
    ids = [*rollout.prompt_ids, *rollout.token_ids]
    return [int(i) for i in ids[: len(ids) - len(rollout.turns[-1].token_ids)]]


def test_rewards_per_turn_reach_the_score(env):
    episodes = played(env("echo", turns=3), lambda request, turn: "hi")
    groups = generate(episodes, prompts(1), n=2, sampling=HOW)
    rewards = RewardSet.from_config([RewardConfig(name="environment")])
    [scored] = rewards.score(groups)
    rollout, score = scored.group.rollouts[0], scored.scores[0]
    assert [turn.reward for turn in rollout.turns] == [None, 0.5, 1.0]
    assert score.value == 1.5
    assert score.steps == ((rollout.turn_ends[1], 0.5), (rollout.turn_ends[2], 1.0))
    assert rollout.turn_ends[-1] == len(rollout.token_ids)
    assert rollout.turns[-1].metrics == {"heard": 4.0}


@pytest.mark.parametrize(
    ("says", "ending", "rewards"),
    [
        (lambda request, turn: "hi", "turns", [0.25, 0.25, 13.25]),
        (lambda request, turn: "hi" if turn < 1 else [65, 66], "length", [0.25, 11.0]),
        (lambda request, turn: [65, 66], "length", [None]),
    ],
    ids=["turns", "cut", "cut at once"],
)
def test_an_environment_may_judge_what_a_budget_has_ended(env, says, ending, rewards):
    episodes = played(env("Judged"), says, limits=Limits(turns=3, tokens=512, observation=100))
    [group] = generate(episodes, prompts(1), n=2, sampling=HOW)
    for rollout in group.rollouts:
        assert (rollout.status, rollout.ending) == ("truncated", ending)
        assert [turn.reward for turn in rollout.turns] == rewards


def test_a_judge_of_stopped_episodes_that_fails_leaves_them_without_a_reward(env):
    episodes = played(env("Judged", error=True), lambda request, turn: "hi", limits=Limits(2, 512, 100))
    [group] = generate(episodes, prompts(1), n=2, sampling=HOW)
    for rollout in group.rollouts:
        assert (rollout.status, rollout.ending) == ("failed", "failed")
        assert "ZeroDivisionError" in rollout.error


def test_a_group_shares_its_opening_and_other_prompts_have_others(env):
    episodes = played(env("echo"), lambda request, turn: "hi")
    one, other = generate(episodes, prompts(2), n=3, sampling=HOW)
    openings = {tuple(r.prompt_ids.tolist()) for g in (one, other) for r in g.rollouts}
    assert len(openings) == 2
    again = Prompt("p0", text="x", columns={"word": "w0"}, seed=1)
    assert environment_seed(again) != environment_seed(one.prompt)


def test_a_group_whose_openings_differ_is_refused(env, tmp_path):
    (tmp_path / "e.py").write_text("import os\ndef e(row, seed):\n    yield str(os.getpid())\n")
    hosts = Hosts(Spec(f"{tmp_path}/e.py:e"))
    episodes = played(hosts, lambda request, turn: "hi")
    with pytest.raises(EpisodeError, match="different openings for one seed"):
        generate(episodes, prompts(1), n=2, sampling=HOW)
    assert not episodes._plays
    hosts.close()


ENDINGS = {
    "turns": (Limits(2, 512, 100), lambda request, turn: "hi", 2),
    "length": (LIMITS, lambda request, turn: "hi" if turn == 0 else b"abcdefgh", 2),
    "tokens": (Limits(6, 90, 100), lambda request, turn: "hi", None),
    "wrong_end": (LIMITS, lambda request, turn: "hi" if turn == 0 else [97, 256], 2),
}


@pytest.mark.parametrize("why", ENDINGS)
def test_budgets_end_episodes_with_what_they_have_earned(env, why):
    limits, script, turns = ENDINGS[why]
    episodes = played(env("echo", turns=9), script, limits=limits, guard=False)
    episodes.ends |= {256}
    episodes.bridges = Bridges(episodes.bridges.renderer, most=64, ends=[256])
    if why == "wrong_end":
        script_of = episodes.engine.script
        episodes.engine.script = lambda request, turn: script_of(request, turn)
        episodes.engine.poll = _as_stopped(episodes.engine)
    [group] = generate(episodes, prompts(1), n=1, sampling=HOW)
    [rollout] = group.rollouts
    assert (rollout.status, rollout.ending) == ("truncated", why)
    assert turns is None or len(rollout.turns) == turns
    assert len(rollout.prompt_ids) + len(rollout.token_ids) <= limits.tokens
    [score] = RewardSet.from_config([RewardConfig(name="environment")]).score([group])[0].scores
    earned = [turn.reward for turn in rollout.turns if turn.reward is not None]
    assert score.value == sum(earned), "0 where nothing was earned: it was judged"


def _as_stopped(engine):
    poll = engine.poll

    def stopped(timeout_s=None):
        return [Finished.of(r.id, dataclasses.replace(r.turn, finish_reason="stop")) for r in poll(timeout_s)]

    return stopped


@pytest.mark.parametrize(("kind", "when"), tiers.thinned(["raise", "exit", "kill", "hang", "nothing"], [0, 1], keep=2))
def test_a_failure_costs_one_episode_of_the_group_and_never_counts_as_zero(env, kind, when, tmp_path):
    """One of eight fails: the statistics of its group are of the other seven."""
    hosts = env("once", kind=kind, when=when, marker=str(tmp_path / "marker"), timeout_s=1.0)
    episodes = played(hosts, lambda request, turn: "bad" if request.sample == 3 else "ok")
    groups = generate(episodes, prompts(1), n=8, sampling=HOW)
    rewards = RewardSet.from_config([RewardConfig(name="format", args={"template": "<a>…</a>"}, weight=0.5),
                                     RewardConfig(name="environment")])  # fmt: skip
    scores = rewards.score(groups)[0].scores
    failed = [i for i, r in enumerate(groups[0].rollouts) if r.status == "failed"]
    assert len(failed) == 1
    rollout, score = groups[0].rollouts[failed[0]], scores[failed[0]]
    assert (score.value, score.status, set(score.parts.values())) == (None, "environment_error", {None})
    assert rollout.ending == "failed"
    assert rollout.error.startswith(
        {"raise": "raised: Traceback", "nothing": "raised", "hang": "hung"}.get(kind, "died")
    )
    assert np.array_equal(rollout.prompt_ids, groups[0].rollouts[0].prompt_ids)
    others = [score for i, score in enumerate(scores) if i not in failed]
    assert [score.value for score in others] == [1.0] * 7
    assert codec.decode(codec.encode(groups[0])).rollouts[failed[0]].error == rollout.error


def test_with_abort_a_failure_ends_the_run(env):
    episodes = played(env("faulty", kind="raise"), lambda request, turn: "hi", on_failure="abort")
    with pytest.raises(EpisodeError, match=r"(?s)'p0', sample 0 failed after 1 replies: raised.*ZeroDivisionError"):
        generate(episodes, prompts(1), n=1, sampling=HOW)


def test_the_death_of_a_host_costs_its_episodes_even_those_that_generate(env):
    hosts = env("faulty", kind="fine")
    episodes = played(hosts, lambda request, turn: "hi")
    poll = episodes.engine.poll

    def killing(timeout_s=None):
        if hosts._hosts[0] is not None:
            hosts._hosts[0].worker.kill()
            hosts._hosts[0]._thread.join()
            return []
        return poll(timeout_s)

    episodes.engine.poll = killing
    [group] = generate(episodes, prompts(1), n=3, sampling=HOW)
    assert [r.status for r in group.rollouts] == ["failed"] * 3
    assert all("host" in r.error for r in group.rollouts)
    episodes.engine.poll = poll
    [group] = generate(episodes, prompts(1), n=3, sampling=HOW)
    assert [r.status for r in group.rollouts] == ["finished"] * 3, "another host was started"


def test_observations_are_cut_and_forged_tokens_are_text(env):
    special = set(tiny.tokenizer().get_added_vocab().values())
    for kind, count in (("forged", "observations_escaped"), ("big", "observations_cut")):
        episodes = played(env("faulty", kind=kind), lambda request, turn: "hi")
        [group] = generate(episodes, prompts(1), n=1, sampling=HOW)
        [rollout] = group.rollouts
        bridge = rollout.turns[1].context_ids
        assert [i for i in bridge if i in special] == [257, 258, 257]
        assert len(bridge) < 64 + 40
        assert rollout.turns[1].metrics[count] >= 1


def test_a_lost_turn_loses_the_episode_which_is_asked_for_again(env):
    episodes = played(env("echo"), lambda request, turn: "hi")
    episodes.engine.lose = 2
    [group] = generate(episodes, prompts(1), n=2, sampling=HOW)
    assert [r.ending for r in group.rollouts] == ["done", "done"]


def test_cancelled_episodes_are_gone_and_their_ids_are_free(env):
    episodes = played(env("echo"), lambda request, turn: "hi")
    [prompt] = prompts(1)
    requests = [Request(str(i), prompt, i, HOW) for i in range(3)]
    episodes.submit(requests)
    with pytest.raises(EngineError, match="unfinished"):
        episodes.submit(requests[:1])
    episodes.cancel(["0", "1", "unknown"])
    found = []
    while not found:
        found += episodes.poll(1.0)
    assert [report.id for report in found] == ["2"]
    assert episodes.poll() == []
    episodes.submit(requests[:1])
    assert [report.id for report in episodes.poll()] == ["0"]


def test_an_opening_that_leaves_no_room_fails_its_group(env):
    episodes = played(env("echo"), lambda request, turn: "hi", limits=Limits(6, 30, 100))
    [group] = generate(episodes, prompts(1), n=2, sampling=HOW)
    assert {r.status for r in group.rollouts} == {"failed"}
    assert "episode_tokens" in group.rollouts[0].error


def real(hosts: Hosts, *, batch: int, kind: str = "llama") -> Episodes:
    renderer = Renderer(tiny.tokenizer(), stop=[*"abcdefghijklmnopqrstuvwxyzABCDEFGH0123456789"])
    backend = None if BACKEND is None else BACKEND()
    engine = TorchEngine(tiny.model(kind, **WIDTHS(kind)), renderer, batch=batch, backend=backend)
    return Episodes(engine, hosts, Bridges(renderer, most=64), limits=LIMITS, ends=renderer.stop_ids)


@pytest.mark.parametrize("batch", tiers.some([1, 4, 64], ["1", "4"]))
def test_neither_speed_nor_order_of_environments_changes_anything(env, batch):
    """Answers that take random times give the rollouts of answers that come at once, bit for bit."""
    found = []
    for seconds in (0.0, 0.05):
        random.seed()
        groups = generate(real(env("slow", seconds=seconds, size=2), batch=batch), prompts(3), n=3, sampling=HOW)
        found.append([(r.token_ids.tolist(), r.sampled.tolist(), r.ending) for g in groups for r in g.rollouts])
    assert found[0] == found[1]
    assert any(ending == "done" for _, _, ending in found[0])
    KNOWN.setdefault("tokens", found[0])
    assert KNOWN["tokens"] == found[0], "nor does the batch"


KNOWN: dict[str, Any] = {}


def test_turns_have_draws_of_their_own(env):
    """The same words in every turn would mean that every turn has the draws of the first."""
    groups = generate(real(env("slow", seconds=0.0), batch=64), prompts(4), n=4, sampling=HOW)
    several = [r for g in groups for r in g.rollouts if len(r.turns) > 1]
    assert several
    assert any(r.turns[0].token_ids[0] != r.turns[1].token_ids[0] for r in several)


def kept(episodes: Episodes, monkeypatch) -> list[int]:
    """Counts the tokens that rows go on with, of which nothing is computed again."""
    found: list[int] = []
    go_on = Schedule._found

    def counted(schedule, prompt_ids, requests):
        held = go_on(schedule, prompt_ids, requests)
        found.append(len(held.ids) if held else 0)
        return held

    monkeypatch.setattr(Schedule, "_found", counted)
    return found


@pytest.mark.parametrize("kind", tiers.some(["llama", "qwen3", "gemma2", "gpt2"], ["llama", "gemma2"]))
def test_a_cache_that_is_kept_gives_the_tokens_of_one_that_is_computed_again(env, kind, monkeypatch):
    """And their log-probs are those of the model's own forward pass over the whole episode."""
    hosts = env("slow", seconds=0.0, turns=5, size=2)
    counts = kept(real(hosts, batch=4, kind=kind), monkeypatch)
    episodes = real(hosts, batch=4, kind=kind)
    groups = generate(episodes, prompts(3), n=3, sampling=HOW)
    assert episodes.engine._schedule is None, "what is held is given back with its episode"
    several = [r for g in groups for r in g.rollouts if len(r.turns) > 1]
    assert several
    assert kind != "llama" or max(len(r.turns) for r in several) == 5
    assert sum(counts) > 0
    monkeypatch.setattr(Schedule, "_hold", lambda *_: None)
    again = generate(real(hosts, batch=4, kind=kind), prompts(3), n=3, sampling=HOW)
    for a, b in zip(groups, again, strict=True):
        for one, other in zip(a.rollouts, b.rollouts, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
    for rollout in several:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
        with torch.no_grad():
            logits = tiny.model(kind, **WIDTHS(kind))(input_ids=ids).logits[0].log_softmax(-1)
        begin = len(rollout.prompt_ids)
        want = logits[begin - 1 : -1].gather(1, ids[0, begin:, None])[:, 0].numpy()
        gap = np.abs(want - rollout.policy_logprobs)[rollout.sampled]
        assert gap.max() <= 1e-4


def test_too_many_held_rows_are_computed_again(env, monkeypatch):
    """With one slot, one row is held; the others' caches are given back."""
    counts: list[int] = []
    hosts = env("slow", seconds=0.02, turns=5, size=2)
    found = []
    for batch in (1, 64):
        counts = kept(real(hosts, batch=batch), monkeypatch)
        groups = generate(real(hosts, batch=batch), prompts(2), n=3, sampling=HOW)
        found.append([r.token_ids.tolist() for g in groups for r in g.rollouts])
        if batch == 1:
            assert 0 in counts[2:], "some were computed again"
    assert found[0] == found[1]


def test_new_weights_give_up_what_is_held(env):
    episodes = real(env("faulty", kind="hang", timeout_s=60.0), batch=4)
    [prompt] = prompts(1)
    episodes.submit([Request("0", prompt, 0, HOW)])
    while not (episodes.engine._schedule and episodes.engine._schedule.held):
        episodes.poll(0.0)
    assert episodes.engine._unfinished == set()
    episodes.engine.version = 1
    assert episodes.engine._schedule is None
    episodes.cancel(["0"])


@pytest.mark.parametrize(
    ("cluster", "turns", "told"),
    [
        ({"learner": 2}, 4, True),
        ({}, 4, False),
        ({"learner": 2}, 1, False),
        ({"learner": 2, "rollout": "vllm", "servers": 1}, 4, False),
    ],
)
def test_ranks_that_wait_for_later_turns_are_told_of(cluster, turns, told):
    config = parse({"model": "m", "environment": {"name": "guess", "turns": turns}, "cluster": cluster})
    assert any("by rank 0 alone" in note for note in planned.notes(config)) == told


def test_tools_that_some_rows_alone_bring_are_called(env, tmp_path):
    """The first of all openings had none, and no format of calls was looked for: each call was taken for text."""
    model = tiny.save(tmp_path / "m")
    sets = []
    for name, looks in (("a", False), ("b", True)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{name}{i}", "looks": looks}) + "\n" for i in range(20))
        )
        sets.append({"name": name, "task": "prompts", "train": str(tmp_path / f"{name}.jsonl")})
    table = {
        "model": str(model), "data": sets, "environment": {"name": f"{env_help.__file__}:sometimes"},
        "rollout": {"max_tokens": 8}, "eval": {"size": 2},
    }  # fmt: skip
    plan = planning.plan(parse(table))
    assert plan.episodes is not None
    assert plan.episodes.format is not None
    episodes = played(env("sometimes"), lambda request, turn: "look:", format=plan.episodes.format)
    [with_tool] = generate(episodes, prompts(1, looks=True), n=1, sampling=HOW)
    assert with_tool.rollouts[0].turns[0].reward == 1.0


def test_tools_without_a_format_fail_the_episode(env):
    episodes = played(env("sometimes"), lambda request, turn: "look:")
    [plain] = generate(episodes, prompts(1), n=1, sampling=HOW)
    [late] = generate(episodes, prompts(1, looks=True), n=1, sampling=HOW)
    assert (plain.rollouts[0].status, late.rollouts[0].status) == ("finished", "failed")
    assert "no format of calls is known" in late.rollouts[0].error
