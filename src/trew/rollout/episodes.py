"""Plays episodes with an engine: an :class:`.Engine` whose rollouts have several turns.

A request opens an episode; each reply goes to its environment, and what that says is the context of the next reply.
Neither engines nor callers know of environments. Tokens that were sampled are never tokenised again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..env.hosts import Answer, Hosts
from ..env.protocol import Call, Reply, Say, Tool
from ..env.tools import ToolFormat
from ..env.wire import from_say
from ..errors import EngineError, EpisodeError
from ..types import Ending, FinishReason, Message, Prompt, Rollout, Turn
from .bridge import Bridges, as_shown
from .engine import Earlier, Engine, Finished, Lost, Request

PAUSE_S = 0.02
"""The longest time in which an engine generates before answers of environments are looked for."""
LOOK_S = 0.5
"""The longest wait for environments after which it is looked whether their episodes were cancelled."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of an episode: ``turns`` replies, and ``tokens`` in all, prompt and observations included. ``observation``: the
    most tokens between two replies, with what the template writes around what the environment says."""

    turns: int
    tokens: int
    observation: int

    def longest(self, prompt: int, reply: int) -> int:
        """The most tokens that the context of a turn may have, after a prompt and with replies of so many tokens."""
        # The last turn follows the prompt and all other turns, each a reply with what the environment said to it.
        return max(prompt, min(self.tokens - reply, prompt + (self.turns - 1) * (reply + self.observation)))


@dataclass(eq=False, slots=True)
class _Play:
    """An episode that is being played. ``ids``: all its tokens so far; ``context``: those behind the last reply, and
    ``read`` the messages that they are of, both without the next reply."""

    request: Request
    key: str = ""  # in the environment
    opening: _Opening | None = None  # until it has begun
    said: Say | None = None
    tools: tuple[Tool, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    prompt: int = 0  # tokens of ids that are the prompt's
    context: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    read: tuple[Message, ...] = ()
    counts: dict[str, float] = field(default_factory=dict)
    stopped: Ending | None = None  # the budget that has ended it, while its environment judges it
    error: str = ""


@dataclass(eq=False, slots=True)
class _Opening:
    """The episodes of a group, which begin together: they share the opening, so that it is computed once."""

    plays: list[_Play]
    missing: int  # those whose environment has not answered


class Episodes:
    """Plays an episode for each request, with the environment of ``hosts`` and the policy of ``engine``.

    A request's row is its prompt's ``columns``, and ``prompt``; its environment's seed is a hash of the prompt's
    ``seed`` and ``uid``. Requests of one prompt in one :meth:`submit` are a group: where their openings differ,
    :meth:`poll` raises EpisodeError. An episode whose environment fails is a rollout of status ``failed``; with
    ``on_failure = "abort"`` it is an EpisodeError. ``ends`` are the tokens that end a reply.

    Nothing depends on how fast environments answer, or in which order. ``waited_s`` counts the seconds in which nothing
    was generated, because all episodes waited for their environments.
    """

    def __init__(
        self,
        engine: Engine,
        hosts: Hosts,
        bridges: Bridges,
        *,
        limits: Limits,
        ends: frozenset[int],
        format: ToolFormat | None = None,
        on_failure: Literal["abort", "skip"] = "skip",
    ) -> None:
        self.capabilities = engine.capabilities
        self.engine, self.hosts, self.bridges, self.limits = engine, hosts, bridges, limits
        self.ends, self.format, self.on_failure = ends, format, on_failure
        self.waited_s = 0.0
        self._plays: dict[str, _Play] = {}  # by the request's id
        self._by_key: dict[str, _Play] = {}  # by the environment's key
        self._asked: dict[str, _Play] = {}  # those whose environment has to answer, by its key
        self._generating: dict[str, _Play] = {}  # those that the engine has to answer, by the same key
        self._lock = threading.RLock()  # of everything here: one thread may submit while another one polls
        self._reports: list[Finished | Lost] = []

    @property
    def version(self) -> int:
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        if version != self.version and self._plays and not self.capabilities.in_flight_updates:
            raise EngineError(f"version: got {version} while {len(self._plays)} episodes of {self.version} are played")
        self.engine.version = version

    def state(self) -> dict[str, Any]:
        return self.engine.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.engine.load_state(state)

    # ---- the protocol

    def submit(self, requests: Sequence[Request]) -> None:
        ids = [request.id for request in requests]
        with self._lock:
            # All or none: nothing has begun yet when an id is refused.
            if taken := [id for i, id in enumerate(ids) if id in self._plays or id in ids[:i]]:
                raise EngineError(f"request {taken[0]!r}: another one with this id is unfinished; ids must differ")
            # By identity: callers give all samples of a prompt the same object.
            for _, side_by_side in itertools.groupby(requests, key=lambda r: (id(r.prompt), r.sampling)):
                opening = _Opening([_Play(request) for request in side_by_side], 0)
                opening.missing = len(opening.plays)
                for play in opening.plays:
                    prompt = play.request.prompt
                    play.opening = opening
                    self._plays[play.request.id] = play
                    play.key = self.hosts.begin(row_of(prompt), environment_seed(prompt))
                    self._by_key[play.key] = self._asked[play.key] = play

    def poll(self, timeout_s: float | None = None) -> list[Finished | Lost]:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self._plays and not self._reports:
                left = None if until is None else max(0.0, until - time.monotonic())
                self._work(left)
                # One round in any case, so that poll(0) makes progress.
                if left == 0:
                    break
        except BaseException:  # an interrupt too
            # After an exception an engine is empty, by the protocol.
            with self._lock:
                self._drop(list(self._plays))
                self._reports = []
            raise
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def cancel(self, ids: Sequence[str]) -> None:
        dropped = set(ids)
        with self._lock:
            self._drop([id for id in dropped if id in self._plays])
            self._reports = [report for report in self._reports if report.id not in dropped]

    def _work(self, left: float | None) -> None:
        """Generates, and takes in what environments have answered. Waits without the lock: others may submit."""
        if not self.capabilities.reproducible:
            self._as_they_come(left)
            return
        # In rounds: an answer is taken in after the round of generation that follows its question, however early it
        # came. Rows are then batched alike in every run, so that even rounding does not depend on environments' speed.
        # Only answers to questions of earlier rounds are waited for below.
        due = set(self._asked)
        # Environments work while the engine generates: both are polled before either is taken in.
        reports = self.engine.poll(left) if self._generating else []
        answers = self._answers(due, left)
        with self._lock:
            # In the order in which episodes began, whatever the order of answers.
            for answer in sorted(answers, key=lambda answer: int(answer.key)):
                self._heard(answer)
            for report in reports:
                self._reported(report)

    def _answers(self, due: set[str], left: float | None) -> list[Answer]:
        """Waits for the answers of the environments ``due``; returns them, and others that are there."""
        start = time.monotonic()
        found = self.hosts.poll(0.0)
        while (due - {answer.key for answer in found}) & self._asked.keys():
            passed = time.monotonic() - start
            if left is not None and passed >= left:
                break
            # Bounded, because another thread may cancel the episodes that this one waits for.
            found += self.hosts.poll(LOOK_S if left is None else min(LOOK_S, left - passed))
        self.waited_s += time.monotonic() - start
        return found

    def _as_they_come(self, left: float | None) -> None:
        """Takes in answers and replies at once, for engines whose results do not repeat to the bit anyway."""
        idle, start = not self._generating, time.monotonic()
        # With nothing to generate it waits here; otherwise in the engine below.
        answers = self.hosts.poll(left if idle else 0.0)
        with self._lock:
            if idle:
                self.waited_s += time.monotonic() - start
            for answer in answers:
                self._heard(answer)
        if not self._generating:
            return
        # While an environment has to answer, the engine keeps this thread for PAUSE_S at most.
        wait = left if not self._asked else PAUSE_S if left is None else min(left, PAUSE_S)
        reports = self.engine.poll(wait)
        with self._lock:
            for report in reports:
                self._reported(report)

    def _heard(self, answer: Answer) -> None:
        """Takes in what an environment has answered."""
        play = self._by_key.get(answer.key)
        if play is None:  # cancelled meanwhile
            return
        if answer.say is None:  # a host may die while nothing was asked of it
            self._failed(play, answer)
            return
        del self._asked[answer.key]
        # The first answer is the opening, for which the whole group is waited for.
        if play.opening is not None:
            play.said = answer.say
            self._opened(play.opening)
        else:
            self._answered(play, answer.say)

    def _reported(self, report: Finished | Lost) -> None:
        """Takes in what the engine has finished or lost."""
        play = self._generating.pop(report.id, None)
        if play is None:
            return
        if isinstance(report, Finished):
            self._replied(play, report.turn)
        else:  # the whole episode may be asked for again
            self._drop([play.request.id])
            self._reports.append(Lost(play.request.id, report.reason))

    # ---- an episode

    def _opened(self, opening: _Opening) -> None:
        """Begins the episodes of a group, once all of its environments have answered."""
        opening.missing -= 1
        if opening.missing:
            return
        for play in opening.plays:
            play.opening = None
        # said is None where the environment has failed.
        begun = [play for play in opening.plays if play.said is not None]
        ids = self._prompt(begun) if begun else self._encoded(opening.plays[0].request.prompt)
        most = begun[0].request.sampling.max_tokens if begun else 0
        # 0 tells the engine that no turn follows, so that it keeps nothing.
        longest = self.limits.longest(len(ids), most) if self.limits.turns > 1 else 0
        earlier = Earlier(ids, 0, longest, len(self._plays))  # the same object for all: the engine computes it once
        for play in opening.plays:
            # The first turn's context is the whole prompt.
            play.ids, play.context, play.prompt = ids, ids, len(ids)
            if play in begun:
                play.error = self._unfit(play, most)
            if play.error:
                self._end(play, "failed")
        self._generate([play for play in begun if not play.error], earlier)

    def _unfit(self, play: _Play, most: int) -> str:
        """Why an opening cannot be played, with replies of ``most`` tokens; empty if it can."""
        if play.prompt + most > self.limits.tokens:
            return (
                f"the opening has {play.prompt} tokens, which with rollout.max_tokens = {most} is more than the "
                f"{self.limits.tokens} of an episode; shorten it, or raise environment.episode_tokens or, for "
                "servers that the run starts, data.max_prompt_tokens"
            )
        if play.tools and self.format is None:  # its calls would be taken for text
            return (
                "the opening brings tools, as none of those did that were looked at before the run, so that no format "
                "of calls is known; bring tools with one of the first rows of a data set, too"
            )
        return ""

    def _prompt(self, plays: Sequence[_Play]) -> np.ndarray:
        """The tokens of the opening that episodes share. Raises EpisodeError where they do not."""
        first = plays[0]
        assert first.said is not None
        for play in plays[1:]:
            assert play.said is not None
            # Rewards are compared within the group, so that all of it must be asked the same.
            if _shown(play.said) != _shown(first.said):
                uid, one, other = first.request.prompt.uid, _text(first.said.messages), _text(play.said.messages)
                raise EpisodeError(
                    f"environment: prompt {uid!r} has different openings for one seed, {one[:200]!r} and "
                    f"{other[:200]!r}, so that its group would compare answers to different questions; draw from "
                    "random.Random(seed) alone"
                )
        messages, schemas = as_shown(first.said, self.format)
        # Escaped but never cut: an opening that is too long fails the episode.
        cleaned = self.bridges.harmless(messages)
        ids = np.asarray(self.bridges.opening(cleaned.messages, tools=schemas), np.int64)
        for play in plays:
            assert play.said is not None
            play.tools, play.read = first.said.tools, cleaned.messages
            play.counts = {**play.said.metrics, **_counts(cleaned)}  # of the first turn
        return ids

    def _encoded(self, prompt: Prompt) -> np.ndarray:
        """A stand-in for the prompt of a group without an opening."""
        return np.asarray(self.bridges.renderer.encode(prompt), np.int64)

    def _generate(self, plays: Sequence[_Play], earlier: Earlier) -> None:
        self._generating.update((play.key, play) for play in plays)
        # The key instead of the request's id: it is never given again, so that no late report is of another episode.
        self.engine.submit([dataclasses.replace(play.request, id=play.key, earlier=earlier) for play in plays])

    def _replied(self, play: _Play, turn: Turn) -> None:
        """Passes a reply on to its environment."""
        assert play.said is not None
        state = _text(play.said.messages) if play.said.state is None else play.said.state
        calls, malformed = self._parsed(play, turn)
        as_messages = tuple(map(_as_message, calls))
        # What the reply followed is recorded with its turn.
        known = {"context_ids": play.context, "messages": play.read, "state": state, "metrics": play.counts}
        play.turns.append(dataclasses.replace(turn, calls=as_messages, **known))
        play.ids = np.concatenate([play.ids, turn.token_ids])
        # A reply that was cut off may end within a call: no environment sees it.
        if turn.finish_reason == "length":
            self._stop(play, "length")
            return
        reason: FinishReason = "tool_call" if calls else turn.finish_reason
        reply = Reply(turn.text, calls, malformed, len(play.turns) - 1, reason)
        self._asked[play.key] = play
        self.hosts.reply(play.key, reply)

    def _parsed(self, play: _Play, turn: Turn) -> tuple[tuple[Call, ...], str | None]:
        """The tool calls of a reply, and what is wrong with them; of one that was cut off none."""
        if self.format is None or not play.tools or turn.finish_reason == "length":
            return (), None
        # Formats may mark calls by special tokens, which the text of a turn lacks; a stop string ends that text.
        ended = self._ended_by(turn) is not None
        text = self.bridges.renderer.decode_whole(turn.token_ids[:-1].tolist()) if ended else turn.text
        parsed = self.format.parse(text, play.tools)
        if parsed.malformed is not None and not ended:
            # The stop string, which the text lacks, may be what ends a call.
            whole = self.format.parse(self.bridges.renderer.decode_whole(turn.token_ids.tolist()), play.tools)
            parsed = parsed if whole.malformed is not None else whole
        return tuple(parsed.calls), parsed.malformed

    def _ended_by(self, turn: Turn) -> int | None:
        last = int(turn.token_ids[-1]) if len(turn.token_ids) else None
        return last if last in self.ends else None

    def _answered(self, play: _Play, say: Say) -> None:
        """Goes on with an episode, or ends it."""
        last = play.turns[-1]
        # The verdict on a stopped episode comes on top of what its last reply earned.
        if play.stopped is not None:
            if say.reward is not None:
                play.turns[-1] = dataclasses.replace(last, reward=(last.reward or 0.0) + say.reward)
            self._end(play, play.stopped)
            return
        # What the environment says of a reply belongs to the turn of that reply.
        play.turns[-1] = dataclasses.replace(last, reward=say.reward, metrics={**last.metrics, **say.metrics})
        if say.done or len(play.turns) >= self.limits.turns:
            if say.done:
                self._end(play, "done")
            else:
                self._stop(play, "turns")
            return
        messages = say.messages if self.format is None else self.format.observation(say.messages)
        cleaned = self.bridges.cleaned(messages)
        bridge = self.bridges.bridge(cleaned.messages, ended_by=self._ended_by(last))
        # The reply ended with a token that the template does not end replies with.
        if bridge is None:
            self._stop(play, "wrong_end")
            return
        play.said, play.read, play.counts = say, cleaned.messages, _counts(cleaned)
        play.context = np.asarray(bridge, np.int64)
        ids = np.concatenate([play.ids, play.context])
        reply = play.request.sampling.max_tokens
        # Before the observation becomes part of play.ids: the tokens of a rollout end with a reply.
        if len(ids) + reply > self.limits.tokens:
            self._stop(play, "tokens")
            return
        play.ids = ids
        # Whether another turn may follow the next one.
        more = len(play.turns) + 1 < self.limits.turns
        longest = self.limits.longest(play.prompt, reply) if more else 0
        # begin counts the tokens behind the prompt: with it no turn repeats the draws of another.
        self._generate([play], Earlier(ids, len(ids) - play.prompt, longest, len(self._plays)))

    def _failed(self, play: _Play, answer: Answer) -> None:
        uid = play.request.prompt.uid
        play.error = f"{answer.kind}: {answer.error}"
        if self.on_failure == "abort":
            raise EpisodeError(
                f"environment: the episode of prompt {uid!r}, sample {play.request.sample} failed after "
                f"{len(play.turns)} replies: {play.error.rstrip()}"
            )
        if play.opening is None:
            self._end(play, "failed")
            return
        # Its group has not begun, and begins without it.
        play.said = None
        # Its failure counts as its answer, unless it had answered before its host died.
        if self._asked.pop(play.key, None) is not None:
            self._opened(play.opening)

    def _stop(self, play: _Play, budget: Ending) -> None:
        """Ends an episode because of a budget, once its environment has judged it, if it does so."""
        if not self.hosts.judges_stopped:
            self._end(play, budget)
            return
        play.stopped = budget
        self._asked[play.key] = play
        self.hosts.stopped(play.key)

    def _end(self, play: _Play, ending: Ending) -> None:
        # An episode that failed before its first reply has no turn, and a rollout needs one.
        turns = tuple(play.turns) or (_nothing(play.context, play.read),)
        status = "finished" if ending == "done" else "failed" if ending == "failed" else "truncated"
        self._reports.append(Finished(play.request.id, Rollout(turns, status, play.error, ending)))
        self._drop([play.request.id])

    def _drop(self, ids: Sequence[str]) -> None:
        """Forgets episodes, here, in their environments and in the engine."""
        openings, keys = set[_Opening](), list[str]()
        for id in ids:
            play = self._plays.pop(id)
            self.hosts.end(play.key)
            if play.opening is not None:
                play.opening.plays.remove(play)
                play.opening.missing -= play.key in self._asked
                openings.add(play.opening)
            del self._by_key[play.key]
            self._asked.pop(play.key, None)
            self._generating.pop(play.key, None)
            keys.append(play.key)
        self.engine.cancel(keys)
        for opening in openings:
            # _opened() counts one more answer down.
            if opening.plays and not opening.missing:  # those that are left waited for the others
                opening.missing = 1
                self._opened(opening)


def environment_seed(prompt: Prompt) -> int:
    """The seed of a prompt's environment, the same for all samples.

    >>> environment_seed(Prompt("a", text="?")) == environment_seed(Prompt("a", text="?", seed=1))
    False
    """
    digest = hashlib.blake2b(f"{prompt.seed}:{prompt.uid}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # 63 bits, a non-negative int64.
    return int.from_bytes(digest, "big") >> 1


def row_of(prompt: Prompt) -> dict[str, Any]:
    """What an environment gets of a data row."""
    said = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
    return {"prompt": said, **prompt.columns}


def _shown(say: Say) -> Any:
    """What the episodes of a group must have in common."""
    return {**from_say(say, opening=True), "metrics": None}


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _counts(cleaned: Any) -> dict[str, float]:
    """What was done to an observation, where anything was."""
    counts = {"observations_escaped": float(cleaned.escaped), "observations_cut": float(cleaned.cut)}
    return {name: count for name, count in counts.items() if count}


def _as_message(call: Call) -> dict[str, Any]:
    """A call as chat messages have it."""
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}


def _nothing(context: np.ndarray, read: tuple[Message, ...]) -> Turn:
    """The turn of an episode that failed before the first reply."""
    empty = np.zeros(0, np.float32)
    return Turn(context, np.zeros(0, np.int64), empty, empty, empty, (), "", "abort", "", read)
