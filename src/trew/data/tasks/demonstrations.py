"""Rows that say what to answer, for supervised fine-tuning: conversations, prompts with completions, or completions
that a policy sampled and a reward accepted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import RewardConfig
from ...errors import DataError
from ...types import Message, Prompt
from .. import sources
from ..messages import parse_conversation, parse_prompt, refuse_what_changes_the_text, user_turn
from ..rows import BadRow, Row, Split, column, columns_of, show, text_column, to_prompts
from .base import Task

ANSWERS = "demonstration"
"""The column of a prompt with the messages that follow it, the first and the last of them the assistant's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations(Task):
    """Rows with ``messages``, or with ``prompt`` and ``completion``, as TRL's SFTTrainer reads them."""

    chat: bool = False  # True: a string prompt becomes a user message; False: it is used as it is
    system: str = ""  # a system message for chats without one; empty = none

    def prompts(self, split: Split) -> list[Prompt]:
        have = columns_of(split.rows)
        if "messages" not in have and not {"prompt", "completion"} <= set(have):
            raise DataError(
                f"{split.source}: demonstrations have the column 'messages', or 'prompt' and 'completion'; the columns "
                f"are {', '.join(map(repr, have)) or 'none'}"
            )
        return to_prompts(split, self._prompt)

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        return ()

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        answers = prompt.columns[ANSWERS]
        if prompt.text is not None:
            return {"prompt": prompt.text, "completion": answers[0]["content"]}
        return {"prompt": [dict(message) for message in prompt.messages or ()], "completion": answers}

    def _prompt(self, row: Row, uid: str) -> Prompt:
        refuse_what_changes_the_text(row.values)
        if row.values.get("messages") is not None:
            messages = parse_conversation(row.values["messages"], "messages")
            # What comes before the first answer is the prompt; all after it, answers and turns between them, is the
            # demonstration.
            first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
            if not first:
                raise BadRow("column 'messages' begins with an answer; something must be asked before it")
            return self._chat(uid, messages[:first], messages[first:])
        prompt = parse_prompt(column(row, "prompt"), "prompt")
        if isinstance(prompt, str) and self.chat:
            prompt = user_turn(prompt)
        answers = self._completion(row)
        if isinstance(prompt, str):
            if self.system:
                raise BadRow("is a string prompt, which has no system message; set data.args.chat = true")
            if len(answers) > 1:
                raise BadRow("has a string as prompt and several messages as completion; set data.args.chat = true")
            return Prompt(uid, text=prompt, columns={ANSWERS: answers})
        return self._chat(uid, prompt, answers)

    def _completion(self, row: Row) -> list[Message]:
        value = column(row, "completion")
        if isinstance(value, str):
            return [{"role": "assistant", "content": text_column(row, "completion")}]
        messages = parse_conversation(value, "completion")
        if messages[0]["role"] != "assistant":
            raise BadRow(f"column 'completion' begins with a {messages[0]['role']} message, not with an answer")
        return [dict(message) for message in messages]

    def _chat(self, uid: str, asked: Sequence[Message], answers: Sequence[Message]) -> Prompt:
        if self.system and asked[0]["role"] != "system":
            asked = ({"role": "system", "content": self.system}, *asked)
        return Prompt(uid, messages=tuple(asked), columns={ANSWERS: [dict(message) for message in answers]})


_LISTS = ("prompt_ids", "token_ids", "sampled")
_RECORDED = (*_LISTS, "prompt", "completion", "finish_reason", "score")
"""The columns of a run's rollouts that are read here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts(Task):
    """Completions of a run, or of ``trew eval --completions``, whose reward is high enough: rejection sampling."""

    reward: str = ""  # the reward that decides; empty = the total
    min_reward: float = 1.0  # completions with at least this are kept
    unique: bool = True  # of completions with equal tokens to a prompt, keep one

    def problems(self) -> list[str]:
        if math.isnan(self.min_reward):
            return ["data.args.min_reward: got nan, accepts a number"]
        return []

    def read(self, source: str) -> Split:
        return sources.read_rollouts(source)

    def prompts(self, split: Split) -> list[Prompt]:
        have = columns_of(split.rows)
        if lacking := [name for name in _RECORDED if name not in have]:
            raise DataError(
                f"{split.source}: has no column {lacking[0]!r}; give the folder of a run, one of its "
                "rollouts/*.parquet, or a file of trew eval --completions"
            )
        self._check_reward(split)
        seen: set[tuple[Any, ...]] = set()

        def make(row: Row, uid: str) -> Prompt | None:
            _check_recorded(row)
            value = self._value(row.values)
            tokens = (tuple(row.values["prompt_ids"]), tuple(row.values["token_ids"]))
            # Asked this way round, NaN is left out too.
            enough = value is not None and value >= self.min_reward
            if not enough or not tokens[1] or (self.unique and tokens in seen):
                return None
            seen.add(tokens)
            return _recorded(row.values, uid, value)

        # No ids: a row's uid is its prompt's, which all completions of a group share.
        return to_prompts(split, make, ids=())

    def skipped(self, count: int, split: Split) -> list[str]:
        if not count:
            return []
        name = self.reward or "the reward"
        again = ", or that repeat another" if self.unique else ""
        return [
            f"{split.source}: {len(split.rows) - count} of {len(split.rows)} completions are learned from; left out "
            f"are those with {name} below {self.min_reward:g}{again}"
        ]

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        return ()

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        raise DataError("data.task: 'rollouts' are tokens of one model already, and are not prepared")

    def _value(self, values: Mapping[str, Any]) -> float | None:
        return dict(values.get("parts") or ()).get(self.reward) if self.reward else values["score"]

    def _check_reward(self, split: Split) -> None:
        # A map of Parquet is a list of pairs; who writes the rows as JSON may make a table of it.
        known = sorted({name for row in split.rows for name in dict(row.values.get("parts") or ())})
        if self.reward and self.reward not in known:
            has = ", ".join(known) or "none"
            raise DataError(f"data.args.reward: got {self.reward!r}, but {split.source} has {has}")


def _check_recorded(row: Row) -> None:
    """Raises BadRow for a row without the tokens that a run records."""
    for name in _RECORDED:
        value = column(row, name)
        if name in _LISTS and not isinstance(value, list):
            raise BadRow(f"column {name!r} must be a list, as in a run's rollouts, got {show(value)}")


def _recorded(values: Mapping[str, Any], uid: str, value: float) -> Prompt:
    """A completion with the tokens that were sampled, which are not rendered again."""
    columns = {name: list(values[name]) for name in ("prompt_ids", "token_ids", "sampled")}
    columns |= {"completion": values["completion"], "score": value, "finish_reason": values["finish_reason"]}
    if values.get("messages") is None:
        return Prompt(uid, text=values["prompt"], columns=columns)
    try:
        messages = json.loads(values["messages"])
    except ValueError:
        raise BadRow(f"column 'messages' is no JSON: {show(values['messages'])}") from None
    return Prompt(uid, messages=tuple(messages), columns=columns)
