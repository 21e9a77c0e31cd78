"""A reward model at work: texts to tokens, batches under a token budget, scores. The one module of rewards with torch.

Padding is on the right and masked. A sequence classifier reads its score from the last token that is not padding; where
its configuration names no padding token, one that no text of the batch holds is used, which gives the same score.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import DataError, RewardError
from ...models import loading
from ...models.positions import positions_of
from ...types import Prompt

_REPLY = "trewreply"  # stands for a completion in a template: plain letters, no template changes them


def token_batches(lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Indices in batches of similar length, longest first: rows x longest stays within ``budget``, but one row always
    fits. Equal lengths stay in order.

    >>> token_batches([3, 9, 4, 2], budget=8)
    [[1], [2, 0], [3]]
    """
    batches: list[list[int]] = []
    widest = 0
    # Longest first, so that the first row of a batch is its width.
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * widest > budget:
            batches.append([])
            widest = max(lengths[i], 1)
        batches[-1].append(i)
    return batches


@dataclass
class Encoder:
    """A reward model's own tokenizer: prompts and completions as its tokens.

    Messages go through the chat template, the completion as the assistant's turn. A text prompt and its completion are
    one text, with the special tokens that the tokenizer adds to a text by itself. A completion that *spells* a special
    token (``<|im_end|>`` in letters) is read as these letters: it cannot end its turn and begin another.
    """

    tokenizer: Any

    @classmethod
    def load(cls, name: str, *, tokenizer: str = "", chat_template: str = "") -> Encoder:
        return cls(loading.load_tokenizer(name, tokenizer=tokenizer, chat_template=chat_template))

    @property
    def size(self) -> int:
        return max(self.tokenizer.get_vocab().values()) + 1

    def whole(self, prompt: Prompt, text: str) -> list[int]:
        """Prompt and completion. Raises DataError if there is no template, or it refuses the messages."""
        text = _sound(text)
        spelled = any(token in text for token in self._special)
        # A text has the tokenizer's own special tokens; a rendered chat has those of its template.
        if prompt.messages is None:
            if spelled:
                begun, end = self._begun(prompt.text or "")
                return [*begun, *self._letters(text), *end]
            ids: list[int] = self.tokenizer(f"{prompt.text}{text}")["input_ids"]
            return ids
        turns = [*map(dict, prompt.messages), {"role": "assistant", "content": _REPLY if spelled else text}]
        rendered = self._template(turns, uid=prompt.uid, generation_prompt=False)
        if not spelled:
            return self._bare(rendered)
        # The last one: a prompt may hold the word as well.
        head, _, tail = rendered.rpartition(_REPLY)
        return [*self._bare(head), *self._letters(text), *self._bare(tail)]

    def stepwise(self, prompt: Prompt, steps: Sequence[str], *, mark: str) -> tuple[list[int], list[int]]:
        """Prompt, then every step followed by ``mark``; and where the last tokens of the marks stand.

        Steps and marks are tokenised one by one, so that a mark is always the same tokens (as TRL's trainer of process
        reward models does).
        """
        if prompt.messages is None:
            ids, _ = self._begun(prompt.text or "")
        else:
            ids = self._bare(self._template([*map(dict, prompt.messages)], uid=prompt.uid, generation_prompt=True))
        ids, at, marks = list(ids), [], self._bare(mark)
        for step in steps:
            ids += self._letters(_sound(step)) + marks
            at.append(len(ids) - 1)
        return ids, at

    @property
    def _special(self) -> list[str]:
        return [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]

    def _begun(self, text: str) -> tuple[list[int], list[int]]:
        """A text that more is to follow, and the special tokens that the tokenizer puts behind a text."""
        bare, whole = self._bare("a"), self.tokenizer("a")["input_ids"]
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        end = list(whole[at + len(bare) :]) if bare else []
        ids = list(self.tokenizer(text)["input_ids"])
        return ids[: len(ids) - len(end)], end

    def _bare(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _letters(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _template(self, messages: list[dict[str, str]], *, uid: str, generation_prompt: bool) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"prompt {uid!r} is a chat, but the reward model's tokenizer has no chat template; give it one with "
                "chat_template = 'plain' or a .jinja file"
            )
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
        except Exception as error:  # templates raise jinja2's errors, or whatever Python does inside them
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise DataError(f"prompt {uid!r}: the reward model's chat template refuses the messages: {first}") from None


def _sound(text: str) -> str:
    r"""Half of a surrogate pair, which no tokenizer takes, as a question mark.

    >>> _sound("caf\u00e9 \ud800")
    'café ?'
    """
    return text.encode("utf-8", "replace").decode("utf-8")


class Scorer:
    """A loaded model with its tokenizer. Deterministic: the same call gives the same scores, and a text's score
    does not depend on the other texts, except for the rounding of sums (about 1e-6 in float32)."""

    def __init__(self, model: Any, encoder: Encoder, *, budget: int = 16384, autocast: torch.dtype | None = None):
        self.model, self.encoder, self.budget, self.autocast = model, encoder, budget, autocast
        self.limit = positions_of(model.config.get_text_config().to_dict())
        self.per_token = type(model).__name__.endswith("ForTokenClassification")
        self.labels = int(model.config.num_labels)

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]], *, progress: Callable[[int], None] | None = None) -> list[float]:
        """One score per row of tokens, of a sequence classifier."""
        out = [0.0] * len(rows)
        for batch in token_batches([len(row) for row in rows], budget=self.budget):
            for i, value in zip(batch, self.logits([rows[i] for i in batch]).tolist(), strict=True):
                out[i] = value
            if progress is not None:
                progress(len(batch))
        return out

    @torch.no_grad()
    def score_at(self, rows: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> list[list[float]]:
        """Scores at places of each row, of a token classifier: the logit of one label, the probability of label 1 of
        two."""
        out: list[list[float]] = [[] for _ in rows]
        for batch in token_batches([len(row) for row in rows], budget=self.budget):
            logits = self._forward([rows[i] for i in batch])  # (B, T, labels)
            # (B, T, labels) -> (B, T)
            values = logits[..., 0] if self.labels == 1 else logits.softmax(dim=-1)[..., 1]
            for row, i in enumerate(batch):
                out[i] = values[row, torch.tensor(list(places[i]), device=values.device)].tolist()
        return out

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """The scores of one batch as a float32 tensor (B,), with a gradient where that is on."""
        return self._forward(rows).squeeze(-1)

    def _forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, rows))
        with self._padding(rows) as pad:
            ids = torch.full((len(rows), width), pad, dtype=torch.int64)
            mask = torch.zeros((len(rows), width), dtype=torch.int64)
            for i, row in enumerate(rows):
                ids[i, : len(row)] = torch.as_tensor(row)
                mask[i, : len(row)] = 1
            device = self.model.device
            cast = torch.autocast(device.type, dtype=self.autocast) if self.autocast else contextlib.nullcontext()
            with cast:
                out = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return out.to(torch.float32)

    @contextlib.contextmanager
    def _padding(self, rows: Sequence[Sequence[int]]) -> Iterator[int]:
        """The padding token; for a model without one, a token that is in no row."""
        config = self.model.config.get_text_config()
        if config.pad_token_id is not None:
            yield int(config.pad_token_id)
            return
        used = set().union(*map(set, rows))
        free = next((i for i in range(self.encoder.size) if i not in used), None)
        if free is None:
            raise RewardError(
                "the reward model's configuration has no pad_token_id, and its texts use every token there is; set one"
            )
        # The model finds the last token that is not padding by its configuration.
        config.pad_token_id = free
        try:
            yield free
        finally:
            config.pad_token_id = None
