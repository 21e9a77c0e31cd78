r"""Competition mathematics with boxed answers: MATH (Hendrycks et al. 2021), MATH-500, and sets of the same form.

Rows have ``problem`` (or ``question``), and the answer in ``gold``, in ``answer``, or in the last ``\boxed{...}`` of
``solution``; ``level`` and ``subject`` (or ``type``) are optional. Also reads verl's rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import RewardConfig
from ...errors import DataError, nearest
from ...types import Prompt
from ...utils.boxes import last_box
from ..messages import user_turn
from ..rows import BadRow, Row, Split, columns_of, show, text_column, to_prompts
from ..verl import is_verl, own_columns, parse_row
from .base import Task

HUB_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Think step by step, and put the final answer inside \boxed{}."
SUBJECTS = (
    "Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory", "Prealgebra",
    "Precalculus",
)  # fmt: skip
LEVELS = (1, 2, 3, 4, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Math(Task):
    """Arguments of the task."""

    instruction: str = INSTRUCTION  # appended to every problem; empty = the bare problem
    system: str = ""  # a system message; empty = none
    levels: tuple[int, ...] = ()  # difficulty levels (1 to 5) to train on; empty = all
    subjects: tuple[str, ...] = ()  # subjects to train on; empty = all

    def problems(self) -> list[str]:
        found = []
        if not set(self.levels) <= set(LEVELS):
            found.append(f"data.args.levels: got {list(self.levels)!r}, accepts a list of whole numbers from 1 to 5")
        known = set(map(subject_key, SUBJECTS))
        for name in self.subjects:
            if subject_key(name) not in known:
                accepts = ", ".join(map(repr, SUBJECTS))
                found.append(f"data.args.subjects: got {name!r}{nearest(name, SUBJECTS)}, accepts {accepts}")
        return found

    def source(self, train: str) -> str:
        return f"{HUB_SOURCE}:default" if train in ("", HUB_SOURCE) else train

    def prompts(self, split: Split) -> list[Prompt]:
        """One user message per row; columns ``gold`` (the answer as LaTeX), ``level`` (a number or None) and
        ``subject``, in addition to the row's own."""
        if is_verl(split):
            return to_prompts(split, self._verl_prompt)
        have = columns_of(split.rows)
        if not {"problem", "question"} & set(have) or not {"gold", "answer", "solution"} & set(have):
            raise DataError(
                f"{split.source}: MATH rows have a problem (or question), and an answer, a gold or a solution with "
                f"\\boxed{{...}}; the columns are {', '.join(map(repr, have)) or 'none'}"
            )
        return to_prompts(split, self._prompt, ids=("uid", "id", "unique_id"))

    def whole(self) -> Math:
        return replace(self, levels=(), subjects=())

    def skipped(self, count: int, split: Split) -> list[str]:
        if not count:
            return []
        return [
            f"{split.source}: {count} of {len(split.rows)} rows have other levels or subjects than data.args selects"
        ]

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        return (RewardConfig(name="math"),)

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        columns = prompt.columns
        if "problem" not in columns:
            raise DataError(
                f"prompt {prompt.uid!r}: has no separate problem; train on such rows as they are, with data.train"
            )
        return {"uid": prompt.uid} | {**own_columns(columns), "uid": prompt.uid}  # first, whatever the row's order was

    def _prompt(self, row: Row, uid: str) -> Prompt | None:
        problem = text_column(row, "problem" if "problem" in row.values else "question").strip()
        gold = _gold(row)
        level, subject = _kind(row.values)
        if not self._selects(level, subject):
            return None
        text = f"{problem}\n\n{self.instruction}" if self.instruction else problem
        mine = {"problem": problem, "gold": gold, "level": level, "subject": subject}
        return Prompt(uid, messages=user_turn(text, system=self.system), columns={**row.values, **mine})

    def _selects(self, level: int | None, subject: Any) -> bool:
        if self.levels and level not in self.levels:
            return False
        return not self.subjects or subject_key(str(subject)) in set(map(subject_key, self.subjects))

    def _verl_prompt(self, row: Row, uid: str) -> Prompt | None:
        """verl's rows bring their own instruction, so none is appended to the prompt. Level and subject are columns, or
        entries of extra_info."""
        prompt = parse_row(row, uid, "prompt", system=self.system)
        if not self._selects(*_kind({**prompt.columns["extra_info"], **prompt.columns})):
            return None
        gold = str(prompt.columns["ground_truth"]).strip()
        if not gold:
            raise BadRow("reward_model.ground_truth is empty")
        return Prompt(uid, text=prompt.text, messages=prompt.messages, columns={**prompt.columns, "gold": gold})


def _kind(values: Mapping[str, Any]) -> tuple[int | None, Any]:
    """The level and the subject of a row; None for what it does not say."""
    return level_of(values.get("level")), values.get("subject", values.get("type"))


def _gold(row: Row) -> str:
    """A row's answer: from ``gold``, ``answer``, or the box in the solution, in this order."""
    for name in ("gold", "answer"):
        value = row.values.get(name)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        text = text_column(row, name).rpartition("####")[2].strip()  # GSM8K's answers are whole solutions
        if not text:
            raise BadRow(f"column {name!r} has nothing after its last '####'")
        return text
    solution = text_column(row, "solution")
    found = boxed(solution)
    if not found:
        raise BadRow(f"has no answer, and column 'solution' has no \\boxed{{...}}: {show(solution)}")
    return found


def boxed(solution: str) -> str | None:
    r"""The content of a solution's last ``\boxed{...}`` or ``\fbox{...}``, read as the reward ``math`` reads those of
    completions; None without one. ``\boxed 5`` gives 5.

    >>> boxed(r"First \boxed{1}, then $\boxed{\frac{1}{\{2\}}}$."), boxed(r"so $\boxed 5$"), boxed(r"\boxed{1")
    ('\\frac{1}{\\{2\\}}', '5', None)
    """
    found = last_box(solution)
    return None if found is None else found.strip()


def level_of(value: Any) -> int | None:
    """The difficulty level as a number; None if the set does not give one.

    >>> level_of("Level 5"), level_of(3), level_of(3.0), level_of("Level ?")
    (5, 3, 3, None)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    # A table with empty cells, as pandas writes it, has floats in place of whole numbers, and NaN where a cell is.
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    match = re.search(r"\d+", value) if isinstance(value, str) else None
    return int(match[0]) if match else None


def subject_key(name: str) -> str:
    """A key that is equal for all spellings of a subject.

    >>> subject_key("Counting & Probability") == subject_key("counting_and_probability")
    True
    """
    return re.sub(r"[^a-z]", "", name.lower().replace("&", "and"))
