"""Calls of functions and their outcomes as plain values, for another process or another machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...types import Prompt
from .functions import Sample, UserFunction
from .session import CallOutcome, Fault, FunctionCall


def packed_calls(calls: Sequence[FunctionCall]) -> tuple[list[Any], list[Any]]:
    """Packs the prompts, each once, and calls that refer to them by index: a group's completions share their prompt."""
    numbers: dict[int, int] = {}
    prompts, packed = [], []
    for call in calls:
        rows = []
        for sample in call.samples:
            # By identity: prompts hold tables, and so cannot be keys.
            if id(sample.prompt) not in numbers:
                numbers[id(sample.prompt)] = len(prompts)
                p = sample.prompt
                prompts.append([p.uid, p.text, p.messages, dict(p.columns)])
            # Messages stay small: token ids go only to functions that ask for them.
            ids = [int(t) for t in sample.token_ids] if call.function.reads_tokens else []
            said = [dict(message) for message in sample.conversation]
            rows.append([numbers[id(sample.prompt)], sample.text, ids, sample.length, said, sample.opening])
        packed.append([call.function.index, rows, call.limit])
    return prompts, packed


def unpacked_calls(functions: Mapping[int, UserFunction], prompts: Any, calls: Any) -> list[FunctionCall]:
    """What :func:`packed_calls` packed; ``functions`` by their index."""
    rows = [Prompt(uid, text=text, messages=messages, columns=columns) for uid, text, messages, columns in prompts]
    return [
        FunctionCall(functions[index], [Sample(rows[p], *rest) for p, *rest in samples], limit)
        for index, samples, limit in calls
    ]


def packed_outcomes(outcomes: Sequence[CallOutcome]) -> list[Any]:
    """Outcomes as plain values."""
    return [
        {
            "values": outcome.values,
            "faults": [(i, dataclasses.astuple(fault)) for i, fault in outcome.faults.items()],
            "whole": None if outcome.whole is None else dataclasses.astuple(outcome.whole),
            "seconds": outcome.seconds,
            "steps": outcome.steps,
        }
        for outcome in outcomes
    ]


def unpacked_outcomes(answers: Sequence[Mapping[str, Any]]) -> list[CallOutcome]:
    """What :func:`packed_outcomes` made."""
    return [
        CallOutcome(
            answer["values"],
            {i: Fault(*fault) for i, fault in answer["faults"]},
            Fault(*answer["whole"]) if answer["whole"] else None,
            answer["seconds"],
            answer["steps"],
        )
        for answer in answers
    ]
