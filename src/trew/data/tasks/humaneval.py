"""HumanEval (Chen et al. 2021): 164 Python functions to write from signature and docstring.

Reads the published rows: ``prompt``, ``entry_point``, ``canonical_solution``, and ``test`` with its
``check(candidate)``. It is an evaluation set, published only as a test split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...config import RewardConfig
from ...types import Prompt
from ..messages import user_turn
from ..rows import BadRow, Row, Split, require_columns, show, text_column, to_prompts
from .base import Task
from .programs import syntax_problem, timeout_problem

HUB_SOURCE = "openai/openai_humaneval"
INSTRUCTION = "Complete this Python function. Answer with the whole function in one ```python block."


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanEval(Task):
    """Arguments of the task."""

    home_split: ClassVar[str] = "test"
    instruction: str = INSTRUCTION  # before every function; empty = nothing
    system: str = ""  # a system message; empty = none
    timeout_s: float = 0.0  # seconds for the default reward's tests; 0 = the reward's default

    def problems(self) -> list[str]:
        return timeout_problem(self.timeout_s)

    def source(self, train: str) -> str:
        return train or HUB_SOURCE

    def prompts(self, split: Split) -> list[Prompt]:
        """One user message per row: the instruction and the function so far. Columns ``entry_point``, ``asserts`` (the
        published test code), ``setup`` (the prompt: its imports and helpers) and ``reference`` (the set's program)."""
        hint = "HumanEval rows have prompt, entry_point, canonical_solution and test"
        require_columns(split, ("prompt", "entry_point", "canonical_solution", "test"), hint=hint)
        return to_prompts(split, self._prompt, ids=("uid", "id", "task_id"))

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        return (RewardConfig(name="code_func", args={"timeout_s": self.timeout_s} if self.timeout_s else {}),)

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        names = ("task_id", "entry_point", "canonical_solution", "test")
        kept = {name: prompt.columns[name] for name in names if name in prompt.columns}
        return kept | {"prompt": prompt.columns["setup"]}

    def _prompt(self, row: Row, uid: str) -> Prompt:
        start, test = text_column(row, "prompt"), text_column(row, "test")
        reference = start + text_column(row, "canonical_solution")
        entry = text_column(row, "entry_point").strip()
        for name, text in (("test", test), ("prompt' + 'canonical_solution", reference)):
            if wrong := syntax_problem(text):
                raise BadRow(f"column '{name}' is not Python: {wrong}")
        if not entry.isidentifier() or f"def {entry}(" not in reference:
            raise BadRow(f"column 'entry_point' must name a function of the prompt, got {show(entry)}")
        question = f"```python\n{start.strip()}\n```"
        question = f"{self.instruction}\n\n{question}" if self.instruction else question
        mine = {"reference": reference, "asserts": [test], "setup": start, "entry_point": entry}
        rest = {name: value for name, value in row.values.items() if name != "prompt"}
        return Prompt(uid, messages=user_turn(question, system=self.system), columns={**rest, **mine})
