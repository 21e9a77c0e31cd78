"""Handles step scores of completions: finds where steps end in text and tokens, and validates scores from functions.

A step score is ``(end, value)``, where ``end`` counts the completion's tokens up to and including the step's last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import RewardError
from .user.returned import as_number, short

Decode = Callable[[Sequence[int]], str]
"""Decodes token ids to the text that rewards read, without special tokens."""


def split_steps(text: str, mark: str) -> list[int]:
    """Returns where the steps of ``text`` end, in characters: after each ``mark``, the last at the end of the text.

    White space between two marks belongs to the step before. A text without a mark is one step, even if empty.

    >>> split_steps("a\\n\\nb\\n\\n\\n\\nc", "\\n\\n"), split_steps("a\\n\\n", "\\n\\n"), split_steps("", "\\n\\n")
    ([3, 8, 9], [3], [0])
    """
    ends: list[int] = []
    start = 0
    while (at := text.find(mark, start)) >= 0:
        end = at + len(mark)
        if text[start:at].strip() or not ends:
            ends.append(end)
        else:
            ends[-1] = end
        start = end
    if text[start:].strip() or not ends:
        ends.append(len(text))
    else:
        # Only white space is left: it belongs to the last step.
        ends[-1] = len(text)
    if len(ends) > 1 and not text[: ends[0]].replace(mark, "").strip():
        del ends[0]  # marks before the first text
    return ends


def token_ends(char_ends: Sequence[int], *, token_ids: Sequence[int], decode: Decode) -> list[int]:
    """Returns for each of ``char_ends`` the least number of ``token_ids`` whose text is that long, by bisection.

    The result never decreases. The last step takes all tokens, so it includes the end token. A token that spans the end
    of a step belongs to that step.

    >>> text = "ab|cd|e"
    >>> token_ends([3, 6, 7], token_ids=range(8), decode=lambda ids: text[:len(ids)])
    [3, 6, 8]
    """
    ids = list(token_ids)
    ends: list[int] = []
    # Prefixes are decoded, not single tokens: a character may take several tokens, and tokenizers treat the start of a
    # text specially, so the lengths of tokens decoded alone do not add up.
    for end in char_ends[:-1]:
        low, high = (ends[-1] if ends else 0), len(ids)
        while low < high:
            middle = (low + high) // 2
            # An incomplete character decodes to U+FFFD, which does not count yet.
            if len(decode(ids[:middle]).rstrip("�")) >= end:
                high = middle
            else:
                low = middle + 1
        ends.append(low)
    return [*ends, len(ids)] if char_ends else []


def are_steps(value: Any) -> bool:
    """Returns whether a function's result for one completion is a list of step scores rather than one number.

    >>> are_steps([(3, 0.5)]), are_steps([]), are_steps(0.5), are_steps("ab")
    (True, True, False, False)
    """
    return isinstance(value, (list, tuple))


def parse_steps(value: Any, *, length: int, who: str, sample: str) -> tuple[tuple[int, float], ...]:
    """Validates the step scores that a function returned for a completion of ``length`` tokens.

    An empty list means no steps. Raises RewardError, naming function and sample, for entries that are not (end, value),
    ends that are not strictly increasing integers from 1 to ``length``, and values that are not finite numbers.

    >>> parse_steps([(2, 0.5), [4, 1]], length=4, who="f", sample="s")
    ((2, 0.5), (4, 1.0))
    """
    accepts = f"(end, value) with end a whole number of tokens from 1 to {length}, each larger than the one before"
    steps: list[tuple[int, float]] = []
    for entry in value:
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise RewardError(f"{who} returned a step {short(entry)} for {sample}, not {accepts}")
        end = entry[0].item() if hasattr(entry[0], "item") else entry[0]
        before = steps[-1][0] if steps else 0
        if isinstance(end, bool) or not isinstance(end, int) or not before < end <= length:
            raise RewardError(f"{who} returned a step {short(entry)} for {sample}, not {accepts}")
        number = as_number(entry[1], who=who, sample=sample)
        if number is None:
            raise RewardError(f"{who} returned a step without a value, {short(entry)}, for {sample}; leave it out")
        steps.append((end, number))
    return tuple(steps)


def mean_of_steps(steps: Sequence[tuple[int, float]]) -> float | None:
    """Returns the mean of the steps, which serves as the completion's number; None without steps."""
    return sum(value for _, value in steps) / len(steps) if steps else None


def combined_steps(
    given: Sequence[tuple[float, float | None, Sequence[tuple[int, float]]]], *, length: int
) -> tuple[tuple[int, float], ...]:
    """Merges several rewards' (weight, number, steps) into the step rewards of one completion, ordered by end.

    Steps are weighted and keep their ends; steps with the same end are added up. If any reward scores steps, a reward
    for the whole completion counts as one step at its end. Rewards without a number or with weight 0 are left out.

    >>> combined_steps([(1.0, 0.5, [(2, 0.2), (5, 0.8)]), (2.0, 1.0, [])], length=5)
    ((2, 0.2), (5, 2.8))
    >>> combined_steps([(1.0, 0.5, [])], length=5)
    ()
    """
    counted = [(weight, number, steps) for weight, number, steps in given if weight and number is not None]
    if not length or not any(steps for _, _, steps in counted):
        return ()
    placed: dict[int, float] = {}
    for weight, number, steps in counted:
        for end, value in steps or ((length, number),):
            placed[end] = placed.get(end, 0.0) + weight * float(value or 0.0)
    return tuple(sorted(placed.items()))
