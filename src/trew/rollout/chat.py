"""Converts prompts to tokens and tokens to text: chat templates, begin and end tokens, and checks of both.

Prompts are tokenised once, here. Completions stay token ids and are never tokenised again: decoding and re-encoding
may merge tokens differently, and the learner would then train on tokens that were never sampled.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..rewards.thinking import OPEN
from ..types import Message, Prompt
from ..utils.bounds import Overrun, bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLY = "trewreply"  # stands for an assistant's answer in probes: plain letters, no template changes them
_NOW = re.compile(r"strftime_now\(\s*['\"]([^'\"]+)['\"]")  # what a template calls for the date, and its format


class Renderer:
    """A tokenizer with its chat template and its end tokens.

    ``stop``: the run's stop strings; a string that is one special token (``<|im_end|>``) becomes a stop token.
    ``eos_ids``: further end tokens, such as those of the model's generation configuration.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, stop: Sequence[str] = (), eos_ids: Iterable[int] = ()
    ) -> None:
        self.tokenizer: Any = tokenizer  # typed loosely: its methods return unions that depend on arguments
        self.stop = tuple(stop)
        self._guard: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._begin = self._begin_tokens()
        # Other added tokens, like <think>, are part of what prompts of a reasoning model say.
        added = self.tokenizer.added_tokens_decoder.values()
        special = [t.content for t in added if t.special and len(t.content) > 1 and t.content.strip()]
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        ends: set[int] = {*eos_ids, *self.split_stop(self.stop)[0]}
        # Many base tokenizers name <|endoftext|> as eos, while their chat template ends a turn with another token: with
        # eos alone, every chat completion would run on to max_tokens.
        self._turn_end = self._end_of_turn()
        for end in (self.tokenizer.eos_token_id, self._turn_end):
            if end is not None:
                ends.add(int(end))
        self.stop_ids = frozenset(ends)

    @property
    def end_of_turn(self) -> str:
        """The special token that the template writes right after an assistant's message; empty if there is none."""
        return "" if self._turn_end is None else self.tokenizer.convert_ids_to_tokens(self._turn_end)

    # ---- text and tokens

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokenises a prompt. Messages go through the chat template, with its generation prompt and exactly the
        special tokens it writes. Text is used as it stands, after the tokenizer's begin token unless it starts with
        one already; an end token that the tokenizer would append is left out."""
        return self._tokens(prompt, self.render(prompt))

    def _tokens(self, prompt: Prompt, text: str) -> list[int]:
        # Templates write their begin token themselves: with add_special_tokens there would be two.
        ids = self.tokens(text)
        if prompt.text is not None and ids[: len(self._begin)] != self._begin:
            ids = self._begin + ids
        return ids

    def render(self, prompt: Prompt) -> str:
        """Returns the text to tokenise. Raises DataError if a template is missing or refuses the messages."""
        if prompt.text is not None:
            return prompt.text
        assert prompt.messages is not None
        if not self.tokenizer.chat_template:
            raise DataError(f"prompt {prompt.uid!r}: is a chat, but the tokenizer has no chat template; {_FIX}")
        return self._apply(prompt.messages, uid=prompt.uid)

    def apply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        generation_prompt: bool = True,
    ) -> str:
        """Returns messages as the template writes them. Raises DataError if it refuses them."""
        return self._apply(messages, uid="", tools=tools, generation_prompt=generation_prompt)

    def tokens(self, text: str) -> list[int]:
        """Tokenises text as it stands, without a begin or an end token."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ``ids`` without special tokens."""
        # Without clean-up: it would remove spaces before punctuation, so rewards would see text the model never wrote.
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_whole(self, ids: Iterable[int]) -> str:
        """Returns the text of ``ids`` with special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def split_stop(self, stop: Iterable[str]) -> tuple[frozenset[int], tuple[str, ...]]:
        """Splits stop strings into the ids of special tokens and other strings. Decoding removes special tokens, so a
        search in the text would never find them."""
        added, strings = self.tokenizer.get_added_vocab(), tuple(dict.fromkeys(stop))
        # Other added tokens, such as the line breaks of Gemma or <think>, are text, which other tokens may spell, too.
        special = {s: added[s] for s in strings if s in added and s not in self.decode([added[s]])}
        return frozenset(special.values()), tuple(s for s in strings if s not in special)

    # ---- checks

    def check(
        self,
        prompts: Iterable[Prompt],
        *,
        measured: Callable[[Prompt, int], object] = lambda prompt, length: None,
        answered: bool = False,
    ) -> list[str]:
        """Finds what would silently go wrong with these prompts and this tokenizer; one line per kind of problem.

        ``measured`` is given each prompt that could be rendered, with its length in tokens. ``answered``: their answers
        are given, and nothing is sampled.
        """
        problems: dict[str, str] = {}  # kind -> message of its first case
        if not self.stop_ids and not self.stop:
            problems["end"] = _NO_END_TO_LEARN if answered else _NO_END
        shapes: set[tuple[str, ...]] = set()
        for prompt in prompts:
            try:
                with self._guarded():
                    text = self.render(prompt)
                    ids = self._tokens(prompt, text)
                    measured(prompt, len(ids))
                    found = self._prompt_problems(prompt, text, ids, shapes)
            except DataError as error:
                found = {"render": str(error)}
            except Overrun as error:
                problems["endless"] = (
                    f"prompt {prompt.uid!r}: the chat template does not come to an end: {error}; {_FIX}"
                )
                break  # the others would take as long
            for kind, message in found.items():
                problems.setdefault(kind, message)
        return list(problems.values())

    def notes(self, prompts: Sequence[Prompt]) -> list[str]:
        """Returns one line if prompts are text although there is a chat template, which they bypass, one if messages
        spell special tokens, and one if the template writes the date."""
        found = []
        texts = sum(prompt.text is not None for prompt in prompts)
        if texts and self.tokenizer.chat_template:
            found.append(
                f"{texts} of {len(prompts)} prompts are text, which the model reads as it stands: the chat template is "
                "not used; for an instruct model set data.args.chat = true, or write lists of messages (docs/data.md)"
            )
        if spelled := [(prompt.uid, token) for prompt in prompts if (token := self._spelled(prompt))]:
            uid, token = spelled[0]
            found.append(
                f"messages of {len(spelled)} of {len(prompts)} prompts spell special tokens (prompt {uid!r}: "
                f"{token!r}), which the model reads as such, for example as the end of a message; take them out of the "
                "data unless they are meant"
            )
        if any(map(self.is_dated, [p for p in prompts if p.messages is not None][:1])):  # a template treats all alike
            found.append(
                "the chat template writes today's date into prompts, so that what is resumed, replayed or evaluated on "
                "another day has other prompts; set chat_template to a file with a fixed date in place of strftime_now"
            )
        return found

    def is_dated(self, prompt: Prompt) -> bool:
        """Whether the chat template writes the date into a prompt, as those of Llama 3.2 and SmolLM3 do."""
        formats = _NOW.findall(str(self.tokenizer.chat_template)) if prompt.messages is not None else []
        text = self.render(prompt) if formats else ""
        return any(datetime.now().astimezone().strftime(each) in text for each in formats)

    def _spelled(self, prompt: Prompt) -> str:
        """The first special token that a message of the prompt spells; empty if none does."""
        texts = (m.get("content") for m in prompt.messages or ())
        matches = (self._special.search(text) for text in texts if self._special and isinstance(text, str))
        return next((match[0] for match in matches if match), "")

    def opens_thought(self, prompts: Sequence[Prompt]) -> bool:
        """Whether the policy begins inside a thought, as by templates that end a prompt with <think>."""
        # A template ends all prompts alike.
        return bool(prompts) and self.render(prompts[0]).rstrip().endswith(OPEN)

    def _prompt_problems(
        self, prompt: Prompt, text: str, ids: Sequence[int], shapes: set[tuple[str, ...]]
    ) -> dict[str, str]:
        """Finds a prompt's problems, by kind; ``text`` and ``ids`` are how it was rendered. Probes the template's
        structure once per sequence of roles (``shapes``): three more renderings of every prompt would slow the check of
        a large data set."""
        found = {}
        begin = self.tokenizer.bos_token_id
        if not ids:
            found["empty"] = f"prompt {prompt.uid!r}: has no tokens; remove it or give it text"
        elif begin is not None and ids[:2] == [begin, begin]:
            found["bos"] = (
                f"prompt {prompt.uid!r}: starts with two begin tokens ({self.tokenizer.bos_token!r}); take it out of "
                "the prompt's text or of the chat template"
            )
        if prompt.messages is None:
            return found
        for message in prompt.messages:
            # Stripped: most templates trim contents, which loses nothing.
            if message["content"].strip() not in text:
                found["content"] = (
                    f"prompt {prompt.uid!r}: the chat template drops or changes the {message['role']} message "
                    f"({message['content'].strip()[:60]!r}), as templates that strip <think> do; set chat_template to "
                    "a file that keeps messages as they are"
                )
                break
        shape = tuple(message["role"] for message in prompt.messages)
        if shape not in shapes and shape[-1:] == ("user",):
            shapes.add(shape)
            if not self._keeps_prefix(prompt):
                found["prefix"] = (
                    f"prompt {prompt.uid!r}: the chat template writes a conversation differently once it is answered, "
                    "so the policy would be trained on another prompt than it is asked; set chat_template to a file "
                    "that only appends"
                )
        return found

    def _keeps_prefix(self, prompt: Prompt) -> bool:
        """Whether the template only appends when it adds the generation prompt or an answer."""
        assert prompt.messages is not None
        bare = self._apply(prompt.messages, uid=prompt.uid, generation_prompt=False)
        asked = self._apply(prompt.messages, uid=prompt.uid)
        reply = {"role": "assistant", "content": REPLY}
        try:
            answered = self._apply((*prompt.messages, reply), uid=prompt.uid, generation_prompt=False)
        except DataError:
            answered = bare  # a template that only accepts questions has no answered form that could differ
        return asked.startswith(bare) and answered.startswith(bare)

    # ---- the template

    def _apply(
        self,
        messages: Sequence[Message],
        *,
        uid: str,
        generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        try:
            with self._guard():
                return self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                )
        except Overrun:
            raise
        except Exception as error:  # templates raise jinja2's errors, or whatever Python does inside them
            first = next(iter(str(error).splitlines()), type(error).__name__)
            subject = f"prompt {uid!r}: " if uid else ""
            raise DataError(f"{subject}the chat template refuses the messages: {first}") from None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Bounds the time and memory of rendering inside the block: for the first rendering of prompts, while nothing
        else runs."""
        self._guard = bounded
        try:
            yield
        finally:
            self._guard = contextlib.nullcontext

    def _begin_tokens(self) -> list[int]:
        """Returns the tokens that the tokenizer puts before a plain text."""
        # Observed, not read from bos_token_id: tokenizers may name a begin token and never use it (GPT-2).
        bare: list[int] = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        full: list[int] = self.tokenizer("a")["input_ids"]
        # The bare tokens are looked for inside: what stands before them is what the tokenizer begins with.
        starts = (at for at in range(len(full)) if full[at : at + len(bare)] == bare)
        return full[: next(starts, 0)]

    def _end_of_turn(self) -> int | None:
        """Returns the special token that the template writes right after an assistant's message, or None."""
        if not self.tokenizer.chat_template:
            return None
        messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": REPLY})
        try:
            with self._guarded():
                tail = self._apply(messages, uid="", generation_prompt=False).rpartition(REPLY)[2].strip()
        except (DataError, Overrun):
            return None  # a template that refuses even this is reported by check, with the user's own messages
        ids = self.tokens(tail) if tail else []
        return ids[0] if ids and ids[0] in self.tokenizer.get_added_vocab().values() else None


class Lengths:
    """Prompts' lengths in tokens. Each prompt is rendered once: those of a large data set take seconds."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._known: dict[int, tuple[Prompt, int]] = {}  # by id; the prompt is kept, so that no other one gets its id

    def add(self, prompt: Prompt, length: int) -> None:
        """Remembers a length that is known."""
        self._known[id(prompt)] = prompt, length

    def __call__(self, prompt: Prompt) -> int:
        if id(prompt) not in self._known:
            self.add(prompt, len(self.renderer.encode(prompt)))
        return self._known[id(prompt)][1]


_FIX = "set chat_template = 'plain' (contents joined by newlines) or a .jinja file, or use an instruct model"
_NO_END = (
    "tokenizer: it has no end-of-text token and no stop string is set, so every completion would run to max_tokens; "
    "set rollout.stop (for example ['\\n\\n']) or use a tokenizer with an eos token"
)
_NO_END_TO_LEARN = (
    "tokenizer: it has no end-of-text token, so that answers would be learned without an end and a policy would never "
    "stop; name one of its tokens as eos_token in tokenizer_config.json, or set tokenizer to one with an eos token"
)
