"""Reads rows with a prompt: any JSONL, parquet or hub set with a prompt column, and verl's schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...config import RewardConfig
from ...types import Prompt
from ..messages import parse_prompt, user_turn
from ..rows import BadRow, Row, Split, column, columns_of, require_columns, to_prompts
from ..verl import is_verl, parse_row
from .base import Task
from .gsm8k import HUB_SOURCE as GSM8K_SOURCE

_COLUMN = (
    "name the one with the prompts (data.prompt_column in a recipe, --prompt-column of a command), or call it 'prompt'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts(Task):
    """Arguments of the task."""

    chat: bool = False  # True: a string prompt becomes a user message; False: it is used as it is
    system: str = ""  # a system message for chats without one; empty = none
    instruction: str = ""  # appended to the prompt (in a chat, to its last message); empty = nothing

    def prompts(self, split: Split, *, prompt_column: str = "prompt") -> list[Prompt]:
        """Reads the prompt column as text or messages; passes every other column to the rewards.

        A column that only some rows have is None in the others, so that all prompts have the same columns.
        """
        require_columns(split, (prompt_column,), hint=_COLUMN)
        parse = parse_row if is_verl(split, prompt_column) else _parse_plain
        # reward_model has become the column ground_truth by then.
        empty = {name: None for name in columns_of(split.rows) if name not in (prompt_column, "reward_model")}

        def make(row: Row, uid: str) -> Prompt:
            prompt = self._dress(parse(row, uid, prompt_column))
            return replace(prompt, columns={**empty, **prompt.columns})

        return to_prompts(split, make)

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        """Default rewards exist only for verl's GSM8K rows; for all others the recipe must name them."""
        known = bool(prompts) and all(prompt.columns.get("data_source") == GSM8K_SOURCE for prompt in prompts)
        return (RewardConfig(name="gsm8k"),) if known else ()

    def _dress(self, prompt: Prompt) -> Prompt:
        """Adds the instruction, the user turn and the system message that the arguments ask for."""
        text, messages = prompt.text, prompt.messages
        if text is not None and self.chat:
            text, messages = None, user_turn(text)
        if messages is None:
            if self.system:
                raise BadRow("is a string prompt, which has no system message; set data.args.chat = true")
            return replace(prompt, text=f"{text}\n\n{self.instruction}" if self.instruction else text)
        if self.instruction:
            last = messages[-1]
            messages = (*messages[:-1], {**last, "content": f"{last['content']}\n\n{self.instruction}"})
        if self.system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system}, *messages)
        return replace(prompt, text=None, messages=messages)


def _parse_plain(row: Row, uid: str, prompt_column: str) -> Prompt:
    columns = {name: value for name, value in row.values.items() if name != prompt_column}
    prompt = parse_prompt(column(row, prompt_column), prompt_column)
    if isinstance(prompt, str):
        return Prompt(uid, text=prompt, columns=columns)
    return Prompt(uid, messages=prompt, columns=columns)
