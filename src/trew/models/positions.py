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

    Three architectures are used up to a shorter length, beyond which log-probs of a completion would depend on what
    stands beside it. With two rotary tables it is the length up to which the first one applies: then a model changes
    the table for all sequences that are computed together, and under the cached keys of one that is being written. A
    temperature of attention that grows with the position (Llama 4) counts columns, padding included. Attention to the
    k tokens that score highest (DeepSeek-V3.2, Doge) chooses among padding and later tokens too, once there are more.

    >>> positions_of({"max_position_embeddings": 2048}), positions_of({})
    (2048, None)
    >>> positions_of({"n_positions": 1024})  # GPT-2
    1024
    >>> positions_of({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
    ...     "rope_parameters": {"rope_type": "longrope"}})
    4096
    >>> positions_of({"max_position_embeddings": 163840, "index_topk": 2048})
    2048
    """
    found = [*_said(table), *(length for length, _ in _limits(table))]
    return min(found, default=None)


def notes(table: Mapping[str, Any]) -> list[str]:
    """One line where a model has fewer positions here than its configuration says."""
    said = min(_said(table), default=None)
    limit, why = min(_limits(table), default=(None, ""))
    if limit is None or (said is not None and said <= limit):
        return []
    many = f"of its {said} positions, {limit}" if said is not None else f"{limit} positions"
    return [f"model: {many} are used: beyond them {why}"]


def _limits(table: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Lengths from which on what stands beside a sequence would count, and why."""
    for length in _lengths_of_pretraining(table):
        if isinstance(length, int):
            yield length, "it changes its rotary table (longrope) for all sequences that are computed together"
    scale = table.get("floor_scale")
    if table.get("attn_temperature_tuning") and isinstance(scale, int | float):
        # floor((p + 1) / scale) is 0 for all positions p from 0 to scale - 2.
        yield max(1, int(scale) - 1), "its attention's temperature (attn_temperature_tuning) would count padding"
    for name in ("index_topk", "keep_window_size"):
        if isinstance(k := table.get(name), int):
            yield k, f"its attention chooses tokens ({name}) among padding and later ones too"


def _said(table: Mapping[str, Any]) -> list[int]:
    return [length for name in NAMES if isinstance(length := table.get(name), int)]


def _lengths_of_pretraining(table: Mapping[str, Any]) -> Iterator[Any]:
    """Up to which length the first of two rotary tables applies."""
    given = table.get("rope_parameters") or table.get("rope_scaling") or {}
    # One table, or one for each kind of layer.
    for rope in (given, *(part for part in given.values() if isinstance(part, Mapping))):
        if (rope.get("rope_type") or rope.get("type")) in LONG_ROPE:
            yield rope.get("original_max_position_embeddings") or table.get("original_max_position_embeddings")
