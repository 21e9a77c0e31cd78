"""How many tokens of context a model has, as far as a sequence's numbers depend on that sequence alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LONG_ROPE = ("longrope", "su")
"""Rotary tables of which there are two (Phi-3, Phi-4-mini): the one for sequences up to the length of pretraining, and
another for longer ones."""

OWN_POSITIONS = frozenset({
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "mvp", "pegasus",
    "plbart", "prophetnet", "trocr", "whisper",
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Kinds of models that number positions themselves: the first by the columns of a batch, so that what stands beside a
sequence moves them; the others (RoBERTa's) not from 0 on, so that those they are given are others."""

NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What configurations call their context length; the second is of GPT-2, GPT-J, CodeGen and StarCoder, the third of MPT
and DBRX."""


def positions_of(table: Mapping[str, Any]) -> int | None:
    """The context length of a model's configuration, as ``config.json`` has it; None if it does not say.

    With two rotary tables it is the length up to which the first one applies. Beyond it, a model changes the table for
    all sequences that are computed together, and under the cached keys of one that is being written: log-probs of a
    completion would depend on what stands beside it.

    >>> positions_of({"max_position_embeddings": 2048}), positions_of({})
    (2048, None)
    >>> positions_of({"n_positions": 1024})  # GPT-2
    1024
    >>> positions_of({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
    ...     "rope_parameters": {"rope_type": "longrope"}})
    4096
    """
    found = [*_said(table), *_lengths_of_pretraining(table)]
    return min((length for length in found if isinstance(length, int)), default=None)


def notes(table: Mapping[str, Any]) -> list[str]:
    """One line where a model has fewer positions here than its configuration says."""
    said, own = min(_said(table), default=None), positions_of(table)
    if own is None or said == own:
        return []
    return [
        f"model: of its {said} positions, {own} are used: beyond them it changes its rotary table (longrope) for all "
        "sequences that are computed together"
    ]


def _said(table: Mapping[str, Any]) -> list[int]:
    return [length for name in NAMES if isinstance(length := table.get(name), int)]


def _lengths_of_pretraining(table: Mapping[str, Any]) -> Iterator[Any]:
    """Up to which length the first of two rotary tables applies."""
    given = table.get("rope_parameters") or table.get("rope_scaling") or {}
    # One table, or one for each kind of layer.
    for rope in (given, *(part for part in given.values() if isinstance(part, Mapping))):
        if (rope.get("rope_type") or rope.get("type")) in LONG_ROPE:
            yield rope.get("original_max_position_embeddings") or table.get("original_max_position_embeddings")
