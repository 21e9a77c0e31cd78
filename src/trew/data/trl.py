"""TRL's row schema: ``prompt`` is a string or messages, and every other column reaches reward functions by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import DataError
from ..types import Prompt


def to_rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Converts prompts to TRL rows (task ``prompts`` reads them).

    TRL keeps every column, but its data sets need the same columns in every row: missing values become None.

    >>> to_rows([Prompt("q:0", text="2 + 2?", columns={"gold": "4"})])
    [{'prompt': '2 + 2?', 'gold': '4'}]
    """
    names = list(dict.fromkeys(name for prompt in prompts for name in prompt.columns if name != "prompt"))
    for prompt in prompts:
        # Left out silently, a column that rewards may need would be missed only in training.
        if prompt.columns.get("prompt") is not None:
            raise DataError(
                f"prompt {prompt.uid!r}: has a column 'prompt' that is not its prompt, and TRL's rows have that name "
                "for the prompt; rename the column"
            )
    return [_to_row(prompt, names) for prompt in prompts]


def _to_row(prompt: Prompt, names: Sequence[str]) -> dict[str, Any]:
    columns: Mapping[str, Any] = prompt.columns
    return {"prompt": asked(prompt)} | {name: columns.get(name) for name in names}


def asked(prompt: Prompt) -> str | list[dict[str, Any]]:
    """The column ``prompt``: the text, or the messages."""
    return prompt.text if prompt.text is not None else [dict(message) for message in prompt.messages or ()]


def answered(prompt: Prompt, text: str) -> str | list[dict[str, Any]]:
    """An answer in the form of its prompt: TRL's trainers cannot join messages and a text."""
    return text if prompt.text is not None else [{"role": "assistant", "content": text}]
