"""GSM8K (Cobbe et al. 2021): grade-school word problems with one number as the answer.

Reads the original JSONL and the hub's parquet (question, answer), and verl's parquet (prompt, reward_model).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...config import RewardConfig
from ...errors import DataError
from ...types import Prompt
from ..messages import user_turn
from ..rows import BadRow, Row, Split, require_columns, show, text_column, to_prompts
from ..verl import is_verl, own_columns, parse_row
from .base import Task

HUB_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Think step by step, and put the final answer as a number after "####" at the end.'
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8k(Task):
    """Arguments of the task."""

    instruction: str = INSTRUCTION  # appended to every question; empty = the bare question
    system: str = ""  # a system message; empty = none
    mode: Literal["strict", "flexible"] = (
        "strict"  # what the default reward reads: the number after "####", or the last
    )

    def source(self, train: str) -> str:
        """The hub's data set where no source is given, with the config that holds the problems as published."""
        return f"{HUB_SOURCE}:main" if train in ("", HUB_SOURCE) else train

    def prompts(self, split: Split) -> list[Prompt]:
        """One user message per row; columns question, answer (the full solution) and gold (the final number)."""
        if is_verl(split):
            return to_prompts(split, self._verl_prompt)
        require_columns(split, ("question", "answer"), hint="GSM8K rows have question and answer")
        return to_prompts(split, self._prompt)

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        return (RewardConfig(name="gsm8k", args={"mode": self.mode}),)

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        columns = prompt.columns
        if "question" in columns and "answer" in columns:
            return own_columns(columns)  # with a uid or id, and whatever else a reward may read
        raise DataError(
            f"prompt {prompt.uid!r}: has no separate question and answer (verl's extra_info.question, .answer); "
            "train on such rows as they are, with data.train"
        )

    def _prompt(self, row: Row, uid: str) -> Prompt:
        question = text_column(row, "question")
        gold = final_answer(text_column(row, "answer"))
        text = f"{question.strip()}\n\n{self.instruction}" if self.instruction else question
        return Prompt(uid, messages=user_turn(text, system=self.system), columns={**row.values, "gold": gold})

    def _verl_prompt(self, row: Row, uid: str) -> Prompt:
        """verl's rows bring their own instruction, so none is appended to the prompt."""
        prompt = parse_row(row, uid, "prompt", system=self.system)
        extra: Mapping[str, Any] = prompt.columns.get("extra_info") or {}
        own = {name: extra[name] for name in ("question", "answer") if isinstance(extra.get(name), str)}
        gold = check_number(str(prompt.columns["ground_truth"]))
        return Prompt(uid, text=prompt.text, messages=prompt.messages, columns={**prompt.columns, **own, "gold": gold})


def final_answer(solution: str) -> str:
    """The number after the last ``####``, without thousands separators; raises BadRow if there is none.

    >>> final_answer("48 + 24 = 72, times 1,000\\n#### 72,000")
    '72000'
    """
    _, mark, tail = solution.rpartition("####")
    if not mark:
        raise BadRow(f"column 'answer' has no '####' before its final number, got {show(solution)}")
    return check_number(tail)


def check_number(text: str) -> str:
    """A final answer as plain digits; raises BadRow for anything but a number."""
    number = text.strip().removeprefix("$")
    if "," in number and _THOUSANDS.fullmatch(number):  # 72,000; no decimal comma, and no list
        number = number.replace(",", "")
    if not _NUMBER.fullmatch(number):
        raise BadRow(f"the final answer must be a number, got {show(text.strip())}")
    return number
