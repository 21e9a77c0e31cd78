"""TRL's row schema: ``prompt`` is a string or messages, and every other column reaches reward functions by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..types import Prompt


def to_rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Converts prompts to TRL rows (task ``prompts`` reads them).

    TRL keeps every column, but its data sets need the same columns in every row: missing values become None.

    >>> to_rows([Prompt("q:0", text="2 + 2?", columns={"gold": "4"})])
    [{'prompt': '2 + 2?', 'gold': '4'}]
    """
    names = list(dict.fromkeys(name for prompt in prompts for name in prompt.columns if name != "prompt"))
    return [_to_row(prompt, names) for prompt in prompts]


def _to_row(prompt: Prompt, names: Sequence[str]) -> dict[str, Any]:
    columns: Mapping[str, Any] = prompt.columns
    value = prompt.text if prompt.text is not None else [dict(message) for message in prompt.messages or ()]
    return {"prompt": value} | {name: columns.get(name) for name in names}
