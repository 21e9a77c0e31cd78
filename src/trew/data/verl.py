"""verl's row schema: reads rows into prompts, writes prompts as rows, and restores the prompts that were written.

data_source, prompt (messages), ability, reward_model {style, ground_truth}, extra_info {split, index, ...}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import DataError
from ..types import Prompt
from .messages import parse_prompt
from .rows import BadRow, Row, Split, column, columns_of, show

NOTE = "trew_row"
MODEL = "verl_reward_model"
"""The entry of ``extra_info`` that keeps a row's ``reward_model``, without the gold, where it says more than a rule."""
PLACES = ("data_source", "ability", "agent_name", "extra_info", "split", "index")  # columns that the schema fills

_RULE = {"style": "rule"}  # the reward_model of most rows, beside their gold

GOLD_COLUMNS = ("ground_truth", "gold", "answer", "solution")  # columns searched for a gold answer, in this order


def is_verl(split: Split, prompt_column: str = "prompt") -> bool:
    """Whether the rows follow verl's schema: a prompt, and a reward_model that holds the gold answer."""
    names = columns_of(split.rows[:100])
    return "reward_model" in names and prompt_column in names


def parse_row(row: Row, uid: str, prompt_column: str, *, system: str = "") -> Prompt:
    """Parses a verl row: ``reward_model.ground_truth`` becomes the column ``ground_truth``, other columns stay.
    ``system`` is the system message of a chat without one."""
    columns = {name: value for name, value in row.values.items() if name not in (prompt_column, "reward_model")}
    reward_model = _struct(column(row, "reward_model"), "reward_model")
    truth = reward_model.get("ground_truth")
    if truth is None:
        raise BadRow("reward_model has no ground_truth")
    for name in ("images", "videos"):
        if columns.pop(name, None):
            raise BadRow(f"column {name!r} is not empty; only text prompts are supported")
    columns["ground_truth"] = truth
    columns["extra_info"] = _struct(columns.get("extra_info") or {}, "extra_info")
    rest = {name: value for name, value in reward_model.items() if name != "ground_truth"}
    if rest not in ({}, _RULE):
        columns["extra_info"][MODEL] = rest
    prompt = parse_prompt(column(row, prompt_column), prompt_column)
    if isinstance(prompt, str):
        if system:
            raise BadRow("is a string prompt, which has no system message; leave data.args.system out")
        return Prompt(uid, text=prompt, columns=columns)
    if system and prompt[0]["role"] != "system":
        prompt = ({"role": "system", "content": system}, *prompt)
    return Prompt(uid, messages=prompt, columns=columns)


def own_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a prompt, without those of verl's schema if :func:`parse_row` read it."""
    if not {"extra_info", "ground_truth"} <= set(columns):
        return dict(columns)
    return {name: value for name, value in columns.items() if name not in (*PLACES, "ground_truth")}


def _struct(value: Any, name: str) -> dict[str, Any]:
    """Parses an object, or the JSON string that some writers put in its place."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow(f"column {name!r} is a string, but not a JSON object: {show(value)}") from None
    if not isinstance(value, Mapping):
        raise BadRow(f"column {name!r} must be an object, got {show(value)}")
    return dict(value)


# --------------------------------------------------------------------------------------------------------------------
# Writing


def to_rows(
    prompts: Sequence[Prompt], *, split: str, data_source: str, ability: str = "math", gold_column: str = ""
) -> list[dict[str, Any]]:
    """Converts prompts to verl rows. Columns without a place in the schema go into ``extra_info``.

    verl needs one Arrow type for ``ground_truth`` in all rows, so it is always a string, with objects and lists as JSON
    (for countdown, verl's ``{"target": ..., "numbers": [...]}``). ``extra_info.trew_row`` records as JSON what the
    schema cannot represent, so that :func:`restored` can undo the conversion. Raises DataError for a row without gold.
    """
    return [_to_row(prompt, index, split, data_source, ability, gold_column) for index, prompt in enumerate(prompts)]


def _to_row(prompt: Prompt, index: int, split: str, data_source: str, ability: str, gold_column: str) -> dict[str, Any]:
    columns = dict(prompt.columns)
    source, truth = _ground_truth(prompt, gold_column)
    old_extra = columns.pop("extra_info", None) or {}
    if not isinstance(old_extra, Mapping):
        raise DataError(
            f"prompt {prompt.uid!r}: column 'extra_info' is an object in verl's rows, got {show(old_extra)}; rename it"
        )
    columns.pop(source, None)  # it is in reward_model now; a copy could mix types, which Arrow refuses
    own = {name: columns.pop(name, None) for name in ("data_source", "ability", "agent_name")}
    note = _note(prompt, source)
    # The row's own extra_info wins: its split and index are those of the data set it came from.
    extra = {"split": split, "index": index, **columns, NOTE: note, **old_extra}
    model = extra.pop(MODEL, None)
    # verl applies the chat template to every prompt, so that a text becomes a user's message.
    messages = [{"role": "user", "content": prompt.text}] if prompt.text is not None else list(prompt.messages or ())
    row = {
        "data_source": own["data_source"] or data_source,
        "prompt": [dict(message) for message in messages],
        "ability": own["ability"] or ability,
        "reward_model": _RULE | (dict(model) if isinstance(model, Mapping) else {}) | {"ground_truth": truth},
        # Parquet cannot hold empty objects; verl takes a missing key (such as tools_kwargs) as empty.
        "extra_info": {name: value for name, value in extra.items() if value is not None and value != {}},
    }
    return row | ({"agent_name": own["agent_name"]} if own["agent_name"] else {})


def _note(prompt: Prompt, source: str) -> str:
    """Records the column order, the gold's column, and the values that parquet or the schema would change."""
    columns = prompt.columns
    if NOTE in columns:
        raise DataError(f"prompt {prompt.uid!r}: has a column {NOTE!r}, which trew writes into verl's rows; rename it")
    kept = {name: value for name, value in columns.items() if name != source and not _survives(name, value)}
    gold = columns.get(source)
    note = {"text": prompt.text is not None, "columns": list(columns), "gold": source, "values": kept,
            "json": gold is not None and not isinstance(gold, str)}  # fmt: skip
    try:
        return json.dumps(note, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"prompt {prompt.uid!r}: has a column that JSON cannot hold: {error}") from None


def _survives(name: str, value: Any) -> bool:
    """Whether a column passes through the schema and parquet unchanged."""
    return isinstance(value, (str, int, float)) and not isinstance(value, bool) and name not in PLACES


def restored(prompt: Prompt) -> Prompt:
    """Undoes :func:`to_rows` on a prompt that :func:`parse_row` read; returns rows without trew's record unchanged.

    Takes the prompt, the gold and plain columns from the row itself, so that edits to them are kept.
    """
    extra = dict(prompt.columns.get("extra_info") or {})
    note = _noted(extra)
    if not note:
        return prompt
    columns = _restored_columns(note, prompt.columns.get("ground_truth"), extra)
    turns = prompt.messages or ()
    # A row that was edited may have other turns by now, and stays a chat.
    if note["text"] and len(turns) == 1:
        return Prompt(prompt.uid, text=turns[0]["content"], columns=columns)
    return Prompt(prompt.uid, text=prompt.text, messages=prompt.messages, columns=columns)


def columns_before(extra_info: Mapping[str, Any], truth: Any) -> dict[str, Any]:
    """The columns that :func:`to_rows` made a row of, from the row's ``extra_info`` and ground truth; none for rows
    without trew's record."""
    note = _noted(extra_info)
    return _restored_columns(note, truth, extra_info) if note else {}


def was_chat(extra_info: Mapping[str, Any]) -> bool:
    """Whether trew wrote the row with this ``extra_info``, of a prompt that was a chat."""
    note = _noted(extra_info)
    return bool(note) and not note["text"]


def _noted(extra: Mapping[str, Any]) -> dict[str, Any]:
    return _struct(extra.get(NOTE) or {}, NOTE)


def _restored_columns(note: Mapping[str, Any], truth: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    values = note["values"]
    gold = _parsed(str(truth)) if note["json"] else truth
    known = {**extra, **values, note["gold"]: gold}
    # In the order of the note, so that a row is written again as it was.
    columns = {name: known[name] for name in note["columns"] if name in known}
    # Columns added to the row since; to_rows itself wrote split, index and the entries of the row's own extra_info.
    written = {*columns, "split", "index", NOTE, *(values.get("extra_info") or {})}
    return columns | {name: value for name, value in extra.items() if name not in written and value is not None}


def _parsed(text: str) -> Any:
    """Parses JSON; returns text that is not JSON (edited by hand) as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _ground_truth(prompt: Prompt, gold_column: str) -> tuple[str, str]:
    """Returns (the gold answer's column, "" if it is made of several; the gold answer as a string)."""
    columns = prompt.columns
    if not gold_column and (combined := _combined_truth(columns)):
        return "", _as_text(prompt, combined, combined)
    names = (gold_column,) if gold_column else GOLD_COLUMNS
    # NaN is what an empty cell of a table of numbers becomes, and no answer.
    name = next((name for name in names if not _is_empty(columns.get(name))), None)
    if name is None:
        raise DataError(
            f"prompt {prompt.uid!r}: has no gold answer; looked for {', '.join(names)}, "
            f"the columns are {', '.join(columns) or 'none'}; name the right one with --gold-column"
        )
    return name, _as_text(prompt, {name: columns[name]}, columns[name])


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _as_text(prompt: Prompt, columns: Mapping[str, Any], gold: Any) -> str:
    """A gold as text: others than texts as JSON. Raises DataError, which names its columns, for what has none."""
    try:
        return gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"prompt {prompt.uid!r}: the gold answer, of {' and '.join(map(repr, columns))}, cannot be written as "
            f"JSON: {error}; write it as text"
        ) from None


def _combined_truth(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The gold of tasks that need several columns to grade (countdown, programs); empty for others."""
    nums, target = columns.get("nums"), columns.get("target")
    if isinstance(nums, (list, tuple)) and target is not None:
        return {"target": target, "numbers": list(nums)}
    if columns.get("asserts") and "entry_point" in columns:
        return {name: columns.get(name) for name in ("entry_point", "asserts", "setup")}
    return {}
