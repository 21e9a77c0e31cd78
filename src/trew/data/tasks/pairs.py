"""Preference pairs, for DPO: a prompt with a better and a worse answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...config import RewardConfig
from ...errors import DataError
from ...types import Prompt
from .. import trl
from ..messages import user_turn
from ..preferences import COLUMNS, parse_pair
from ..rows import BadRow, Row, Split, columns_of, to_prompts
from .base import Task

PAIR = "pair"
"""The column of a prompt with the texts of its answers, by the names ``chosen`` and ``rejected``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Task):
    """Rows with ``prompt``, ``chosen`` and ``rejected``, as trew train-reward and TRL's DPOTrainer read them."""

    chat: bool = False  # True: a string prompt becomes a user message; False: it is used as it is
    system: str = ""  # a system message for chats without one; empty = none

    def prompts(self, split: Split) -> list[Prompt]:
        have = columns_of(split.rows)
        if not set(COLUMNS[1:]) <= set(have):
            raise DataError(
                f"{split.source}: preference pairs have the columns 'prompt', 'chosen' and 'rejected'; the columns are "
                f"{', '.join(map(repr, have)) or 'none'}"
            )
        return to_prompts(split, self._prompt)

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        return ()

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        answers = {name: trl.answered(prompt, text) for name, text in prompt.columns[PAIR].items()}
        return {"prompt": trl.asked(prompt), **answers}

    def _prompt(self, row: Row, uid: str) -> Prompt:
        asked, chosen, rejected = parse_pair(row.values)
        answers = {"chosen": chosen, "rejected": rejected}
        for name, text in answers.items():
            if not text.strip():
                raise BadRow(f"column {name!r} is empty; there is nothing to compare with an empty answer")
        if isinstance(asked, str) and self.chat:
            asked = user_turn(asked)
        if isinstance(asked, str):
            if self.system:
                raise BadRow("is a string prompt, which has no system message; set data.args.chat = true")
            return Prompt(uid, text=asked, columns={PAIR: answers})
        if self.system and asked[0]["role"] != "system":
            asked = ({"role": "system", "content": self.system}, *asked)
        return Prompt(uid, messages=tuple(asked), columns={PAIR: answers})
