"""The text of each token, by a tokenizer that the machine has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...utils.secrets import MASK


@dataclass(frozen=True, slots=True)
class Pieces:
    """One text per token. ``why``: why there are none, or why they do not join to the text that was recorded."""

    texts: list[str]
    special: list[bool]
    why: str = ""


def loaded(text: Callable[[], str]) -> Any:
    """The tokenizer in the text of a tokenizer.json; None if it is none."""
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(text())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a file that is no tokenizer; the library's panics are no Exception
        return None


def pieces(tokenizer: Any, ids: Sequence[int], text: str) -> Pieces:
    """The texts of ``ids``. Bytes of a character that is split over several tokens are with the last of them.

    ``text`` is what the run recorded: it says whether secrets were masked, which the ids would bring back.
    """
    if MASK in text:
        return Pieces([], [], f"the text has secrets that were masked ({MASK}); its tokens are not shown")
    if tokenizer is None:
        return Pieces([], [], "the tokenizer of this run is not on this machine; tokens are shown by their ids")
    try:
        found = _stream(tokenizer, ids)
        specials = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return Pieces([], [], f"the tokenizer of this run cannot decode these tokens ({type(error).__name__})")
    special = [number in specials for number in ids]
    plain = "".join(piece for piece, skip in zip(found, special, strict=True) if not skip)
    same = text.strip() in ("".join(found).strip(), plain.strip())
    return Pieces(found, special, "" if same else "the pieces do not join to the recorded text, which is shown above")


def _stream(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    from tokenizers.decoders import DecodeStream

    # Waits for the rest of a character whose bytes several tokens share.
    stream, found = DecodeStream(skip_special_tokens=False), []
    for number in ids:
        found.append(stream.step(tokenizer, number) or "")
    whole, joined = tokenizer.decode(list(ids), skip_special_tokens=False), "".join(found)
    if not whole.startswith(joined):  # this tokenizer decodes a token differently next to others
        return [tokenizer.decode([number], skip_special_tokens=False) for number in ids]
    if found:
        found[-1] += whole[len(joined) :]  # what never became a character
    return found
