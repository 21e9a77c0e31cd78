"""Demonstrations as tokens: which of them are the answers to learn is known by construction, never searched for.

For every answer, the conversation before it is rendered as the policy would be asked, with the generation prompt, and
once more with the answer. The second must begin with the first; what it adds, up to the end token, is the answer. So a
policy learns exactly the tokens that it would have to sample, behind exactly those that it would be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..data.tasks.demonstrations import ANSWERS
from ..data.tasks.pairs import PAIR
from ..errors import DataError
from ..types import Message, Prompt, Rollout, Span, Turn
from .bridge import Bridges
from .chat import Renderer
from .endings import reads_otherwise

Tokens = Sequence[int] | np.ndarray
_FIX = "set chat_template to a file that only appends"


@dataclass(frozen=True, slots=True)
class Answered:
    """The tokens before an answer and those of the answer, in the template's tokens; ``end`` is an end token that the
    template does not write."""

    asked: list[int]
    answer: list[int]
    end: list[int]
    text: str

    @property
    def written(self) -> list[int]:
        """What the template writes up to the end of the answer."""
        return [*self.asked, *self.answer]


class Encoder:
    """Makes rollouts of demonstrations. ``loss_on``: "all" answers of a row, or the "last" one."""

    def __init__(self, renderer: Renderer, *, loss_on: str) -> None:
        self.renderer, self.loss_on = renderer, loss_on
        self._bridges = Bridges(renderer)
        self._ends = [str(token) for token in renderer.tokenizer.convert_ids_to_tokens(sorted(renderer.stop_ids))]
        self.split = 0  # rows that became several rollouts

    def encode(self, prompt: Prompt) -> tuple[Rollout, ...]:
        """One rollout with a turn for each answer. Where the template writes earlier turns differently in a longer
        conversation, as those that drop <think> do, or ends no turn, one rollout for each answer. Raises DataError if
        the tokens to learn are not certain."""
        if "token_ids" in prompt.columns:
            return (self._as_sampled(prompt),)
        if prompt.text is not None:
            return (_rollout([self._text(prompt, prompt.text)]),)
        messages = [*(prompt.messages or ()), *prompt.columns[ANSWERS]]
        self._refuse_ends(prompt, messages)
        # Answers that are to be learned; messages of others may stand between them.
        places = [i for i in range(len(prompt.messages or ()), len(messages)) if messages[i]["role"] == "assistant"]
        if self.loss_on == "last":
            places = places[-1:]
        found = [self._answer(prompt, messages[:i], messages[i]) for i in places]
        # Every later prompt begins with what the template wrote up to the answer before it: one sequence carries all
        # turns. With an end token that the template does not write, it would not.
        if all(b.asked[: len(a.written)] == a.written and not a.end for a, b in pairwise(found)):
            return (_rollout(found),)
        self.split += 1
        return tuple(_rollout([one]) for one in found)

    def pair(self, prompt: Prompt) -> tuple[Rollout, ...]:
        """The chosen and the rejected answer to a prompt, as one rollout each. Raises DataError if the tokens of an
        answer are not certain, or those of both are equal."""
        found = []
        for answer in prompt.columns[PAIR].values():
            one = Prompt(prompt.uid, text=prompt.text, messages=prompt.messages, columns={
                ANSWERS: [{"role": "assistant", "content": answer}]
            })  # fmt: skip
            found += self.encode(one)
        chosen, rejected = found
        if np.array_equal(chosen.token_ids, rejected.token_ids):
            raise DataError(
                f"prompt {prompt.uid!r}: chosen and rejected have the same tokens, as where they differ in spaces that "
                "the chat template takes away; such a pair says nothing: remove it"
            )
        return chosen, rejected

    def _as_sampled(self, prompt: Prompt) -> Rollout:
        """A recorded completion. Raises DataError where its tokens are another tokenizer's: they would be learned as
        other words than were sampled."""
        rollout = _recorded(prompt)
        if reads_otherwise(rollout.turns[-1], self.renderer):
            raise DataError(
                f"prompt {prompt.uid!r}: the tokens of its completion have another text in this model's tokenizer than "
                f"was recorded ({prompt.columns['completion'][:60]!r}); give the model that sampled them, or for "
                "another one rows of prompt and completion, as text (data.task = 'demonstrations')"
            )
        return rollout

    def _text(self, prompt: Prompt, text: str) -> Answered:
        completion = prompt.columns[ANSWERS][0]["content"]
        asked = self.renderer.encode(prompt)
        whole = self.renderer.encode(Prompt(prompt.uid, text=text + completion))
        return self._cut(prompt, asked, whole, completion, completion)

    def _answer(self, prompt: Prompt, before: Sequence[Message], answer: Message) -> Answered:
        asked = self.renderer.apply(before)
        whole = self.renderer.apply([*before, answer], generation_prompt=False)
        content = answer["content"]
        if not whole.startswith(asked):
            raise DataError(
                f"prompt {prompt.uid!r}: the chat template writes a conversation differently once it is answered, so "
                f"that it is not certain which tokens are the answer; {_FIX}"
            )
        # The answer as the template writes it, with what ends it.
        written = whole[len(asked) :]
        if content.strip() not in written:
            raise DataError(
                f"prompt {prompt.uid!r}: the chat template drops or changes the assistant message "
                f"({content.strip()[:60]!r}), as templates that reformat <think> do; set chat_template to a file that "
                "keeps messages as they are"
            )
        tokens = self.renderer.tokens
        return self._cut(prompt, tokens(asked), tokens(whole), written, content)

    def _cut(self, prompt: Prompt, asked: list[int], whole: list[int], written: str, text: str) -> Answered:
        """Cuts the tokens behind ``asked`` after the first end token, behind which the template may write a line break
        or more end tokens, but no text."""
        # Where a token would reach across the border, the policy could not sample it: the answer is tokenised alone.
        behind = whole[len(asked) :] if whole[: len(asked)] == asked else self._bridges.between(written)
        end = next((i for i, token in enumerate(behind) if token in self.renderer.stop_ids), None)
        if end is None:
            # A policy that never learned an end token would not stop: the tokenizer's own stands in.
            eos = self.renderer.tokenizer.eos_token_id
            return Answered(asked, behind, [] if eos is None else [int(eos)], text)
        if self.renderer.decode(behind[end + 1 :]).strip():
            raise DataError(
                f"prompt {prompt.uid!r}: its answer goes on behind the end token "
                f"{self.renderer.decode_whole(behind[end : end + 1])!r}, which would end it; take that out of the text"
            )
        return Answered(asked, behind[: end + 1], [], text)

    def _refuse_ends(self, prompt: Prompt, messages: Sequence[Message]) -> None:
        """Raises DataError for an end token in what others say: it would look like the template's own."""
        for message in messages:
            found = [end for end in self._ends if message["role"] != "assistant" and end in message["content"]]
            if found:
                raise DataError(
                    f"prompt {prompt.uid!r}: a {message['role']} message has the end token {found[0]!r} in its text; "
                    "take it out"
                )


def _rollout(found: Sequence[Answered]) -> Rollout:
    turns, before = [], 0
    for one in found:
        ids = [*one.answer, *one.end]
        # asked[before:] is what the template writes behind the answer before this one.
        turns.append(_turn(one.asked[before:], ids, one.text))
        before = len(one.written)
    return Rollout(tuple(turns))


def _turn(context: Tokens, ids: Tokens, text: str, *, cut: bool = False) -> Turn:
    # Nobody has sampled these tokens: NaN is the log-prob of a sampler that does not exist.
    nothing = np.full(len(ids), np.nan, np.float32)
    spans = (Span(0, 0, len(ids)),) if len(ids) else ()
    return Turn(
        np.asarray(context, np.int64), np.asarray(ids, np.int64), nothing, None, None, spans, text,
        "length" if cut else "stop",
    )  # fmt: skip


def _recorded(prompt: Prompt) -> Rollout:
    """A recorded completion, with the turns that its mask shows."""
    columns = prompt.columns
    sampled = np.asarray(columns["sampled"], bool)
    ids, context = np.asarray(columns["token_ids"], np.int64), np.asarray(columns["prompt_ids"], np.int64)
    # Where the mask changes: runs of sampled tokens and of context alternate.
    borders = [0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(ids)]
    turns = []
    for start, end in pairwise(borders):
        if sampled[start]:
            turns.append(_turn(context, ids[start:end], columns["completion"]))
            context = np.zeros(0, np.int64)
        else:
            context = ids[start:end]
    return Rollout(tuple(turns), status="truncated" if columns["finish_reason"] == "length" else "finished")


def length(rollout: Rollout) -> int:
    """All tokens of a rollout."""
    return len(rollout.prompt_ids) + len(rollout.token_ids)


def shortened(rollout: Rollout, most: int) -> Rollout | None:
    """The first ``most`` tokens of a rollout; None if no answer is among them."""
    turns, left = [], most
    for turn in rollout.turns:
        left -= len(turn.context_ids)
        if left <= 0:
            break
        cut = len(turn.token_ids) > left
        turns.append(_turn(turn.context_ids, turn.token_ids[:left], turn.text, cut=cut) if cut else turn)
        left -= len(turns[-1].token_ids)
    return Rollout(tuple(turns), status="truncated") if turns else None
