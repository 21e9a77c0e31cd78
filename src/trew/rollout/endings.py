"""What every engine checks before a prompt is answered, and how it reads where an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import EngineError
from ..models.positions import positions_of
from ..types import FinishReason, Prompt, Sampling, Turn
from ..utils.secrets import MASK
from .chat import Renderer


@dataclass(frozen=True, slots=True)
class Endings:
    """What ends a completion: the first of the tokens ``ids``, which it includes, or the token that completes one of
    ``strings``."""

    ids: frozenset[int]
    strings: tuple[str, ...]

    @staticmethod
    def of(renderer: Renderer, sampling: Sampling, *, ids: frozenset[int]) -> Endings:
        """The tokens ``ids``, and the stop strings of the request and of the run."""
        more, strings = renderer.split_stop((*sampling.stop, *renderer.stop))
        return Endings(ids | more, strings)

    def read(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> tuple[str, FinishReason]:
        """The text of a completion, without special tokens and what follows its first stop string, and why it ended."""
        ended = bool(ids) and ids[-1] in self.ids
        text = decode(ids[:-1] if ended else ids)
        # The text is cut before a stop string, but the tokens stay whole: the policy did sample them, and the learner
        # needs their log-probabilities.
        cuts = [at for string in self.strings if (at := text.find(string)) >= 0]
        return text[: min(cuts)] if cuts else text, "stop" if ended or cuts else "length"


def reads_otherwise(turn: Turn, renderer: Renderer) -> bool:
    """Whether the tokens of a recorded reply have another text than was recorded, from which a stop string was cut."""
    # A table has a mask where the text had a secret.
    return MASK not in turn.text and not renderer.decode(turn.token_ids.tolist()).startswith(turn.text)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine must know of the model that answers: rows of its vocabulary, the ``positions`` that a prompt and
    its completion may take together, None without a limit, and its own end tokens."""

    vocabulary: int
    positions: int | None = None
    ends: frozenset[int] = frozenset()

    def check(
        self, prompt: Prompt, ids: Sequence[int] | np.ndarray, max_tokens: int, *, in_episode: bool = False
    ) -> None:
        """Raises EngineError if the model cannot answer this prompt, of tokens ``ids``; ``in_episode``: these are of
        an episode up to now."""
        if max_tokens < 1:
            raise EngineError(f"prompt {prompt.uid!r}: max_tokens: got {max_tokens}, accepts at least 1")
        if not len(ids):
            raise EngineError(f"prompt {prompt.uid!r}: has no tokens; remove it or give it text")
        if self.positions and len(ids) + max_tokens > self.positions:
            what, advice = "prompt tokens", "lower rollout.max_tokens (or eval.max_tokens) or data.max_prompt_tokens"
            if in_episode:  # its prompt is measured by no key, only all of it
                what, advice = "tokens of its episode", f"set environment.episode_tokens to at most {self.positions}"
            raise EngineError(
                f"prompt {prompt.uid!r}: {len(ids)} {what} + max_tokens = {max_tokens} is more than the "
                f"model's {self.positions} positions; {advice}"
            )
        # On a GPU an id out of range is a device-side assert, after which the process cannot use the GPU any more.
        if max(ids) >= self.vocabulary:
            raise EngineError(
                f"prompt {prompt.uid!r}: token id {max(ids)} is outside the model's vocabulary of {self.vocabulary}; "
                "use the tokenizer that was trained with the model"
            )


def facts_of(model: Any) -> ModelFacts:
    """Reads the facts off a loaded Hugging Face model."""
    # Models may list several end tokens there (Llama 3: end of text and end of turn); a tokenizer names only one.
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    own = ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]
    return ModelFacts(
        vocabulary=model.get_input_embeddings().weight.shape[0],
        positions=positions_of(model.config.get_text_config().to_dict()),
        ends=frozenset(int(i) for i in own),
    )
