"""Refuses, drops or truncates prompts that are longer than the limit, and counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..config import Config, Overlong
from ..errors import DataError
from ..types import Prompt
from .mixture import by_set

_SHOWN = 10


def fitting(
    config: Config, prompts: Sequence[Prompt], *, count: Callable[[Prompt], int], what: str
) -> tuple[list[Prompt], list[str]]:
    """:func:`apply_overlong` with the settings of a recipe, for each of its data sets."""
    if not isinstance(config.data, tuple):
        own = config.data
        return apply_overlong(prompts, count=count, limit=own.max_prompt_tokens, policy=own.overlong, what=what)
    kept: list[Prompt] = []
    notes: list[str] = []
    parts = by_set(prompts, config.set_names)
    for one in config.data:
        short, found = apply_overlong(
            parts[one.name], count=count, limit=one.max_prompt_tokens, policy=one.overlong, what=f"{one.name} {what}"
        )
        kept += short
        notes += found
    return kept, notes


def apply_overlong(
    prompts: Sequence[Prompt],
    *,
    count: Callable[[Prompt], int],
    limit: int,
    policy: Overlong,
    truncate: Callable[[Prompt, int], Prompt] | None = None,
    what: str = "training",
) -> tuple[list[Prompt], list[str]]:
    """Returns the prompts of at most ``limit`` tokens, and notes with the counts of the others.

    ``count`` gives a prompt's length in tokens as the model sees it, including the chat template. Policies: ``error``
    raises DataError naming the longest prompts; ``drop`` removes them, and raises DataError if none is left;
    ``truncate`` cuts them with ``truncate(prompt, limit)``, by default ``truncate_left``, which keeps the end of the
    question and never cuts the chat template.
    """
    measured = [(count(prompt), prompt) for prompt in prompts]  # once: counting renders and tokenizes the prompt
    long = [(length, prompt) for length, prompt in measured if length > limit]
    if not long:
        return list(prompts), []
    longest = max(length for length, _ in long)
    found = f"{len(long)} of {len(prompts)} {what} prompts are longer than data.max_prompt_tokens = {limit}"
    if policy == "error":
        raise DataError(_refusal(found, long, longest))
    found += f" (the longest has {longest})"
    if policy == "drop":
        short = [prompt for length, prompt in measured if length <= limit]
        if not short:
            raise DataError(f'{found}, so data.overlong = "drop" leaves none; raise the limit')
        return short, [f"{found}: dropped, {len(short)} are left"]
    shorten = truncate or partial(truncate_left, count=count)
    cut = [prompt if length <= limit else shorten(prompt, limit) for length, prompt in measured]
    return cut, [f"{found}: cut at their beginning, the ends are kept"]


def truncate_left(prompt: Prompt, limit: int, *, count: Callable[[Prompt], int]) -> Prompt:
    """Cuts the start of the text, or of the longest user message, until the whole prompt has at most ``limit`` tokens.

    Cuts between characters and measures with ``count``, so that the chat template, the other messages and multi-byte
    characters stay whole. Raises DataError if everything else alone exceeds the limit.
    """
    content, rebuild = _cuttable(prompt)
    low, high = 0, len(content) - 1  # bisection: cutting `high` characters is enough, cutting `low` is not
    # At least one character stays: without any, the prompt would be another one.
    if high < 1 or count(rebuild(content[high:])) > limit:
        raise DataError(
            f"prompt {prompt.uid!r}: has {count(prompt)} tokens and cannot be cut to data.max_prompt_tokens = {limit}, "
            "because everything but its longest user message is already too long; raise the limit or drop it"
        )
    while high - low > 1:
        middle = (low + high) // 2
        if count(rebuild(content[middle:])) > limit:
            low = middle
        else:
            high = middle
    return rebuild(content[high:])


def _cuttable(prompt: Prompt) -> tuple[str, Callable[[str], Prompt]]:
    """The part of a prompt that may be shortened, and a function that replaces it."""
    if prompt.text is not None:
        return prompt.text, lambda text: replace(prompt, text=text)
    messages = prompt.messages or ()
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return "", lambda text: prompt
    at = max(users, key=lambda i: len(messages[i]["content"]))

    def rebuild(text: str) -> Prompt:
        turn = {**messages[at], "content": text}
        return replace(prompt, messages=(*messages[:at], turn, *messages[at + 1 :]))

    return messages[at]["content"], rebuild


def _refusal(found: str, long: Sequence[tuple[int, Prompt]], longest: int) -> str:
    by_length = sorted(long, key=lambda pair: -pair[0])
    shown = ", ".join(f"{prompt.uid!r} ({length})" for length, prompt in by_length[:_SHOWN])
    more = f", ... and {len(long) - _SHOWN} more" if len(long) > _SHOWN else ""
    return (
        f"{found}: {shown}{more}; set data.max_prompt_tokens to at least {longest}, "
        'or data.overlong to "drop" or "truncate"'
    )
