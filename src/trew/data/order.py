"""The order in which a run draws its prompts: the sets by their weights, and each set's prompts epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import Config
from ..types import Prompt
from .draws import key_of
from .mixture import Schedule, by_set
from .prompt_stream import PromptStream


class PromptOrder:
    """An endless stream of indices into the prompts of one or several data sets, a pure function of the position.

    ``streams`` has the stream of each set, by name, in the order of the prompts; ``weights`` belong to them.

    >>> a, b = PromptStream(2, seed=0, shuffle=False), PromptStream(3, seed=0, shuffle=False)
    >>> PromptOrder({"a": a, "b": b}, weights=[1, 2]).take(0, 6)
    [2, 0, 3, 4, 1, 2]
    """

    def __init__(self, streams: dict[str, PromptStream], *, weights: Sequence[float]) -> None:
        self.names, self._streams = tuple(streams), tuple(streams.values())
        self.schedule = Schedule(weights)
        self.sizes = tuple(stream.size for stream in self._streams)
        # Where each set's prompts begin in the list of all.
        self._first = [sum(self.sizes[:k]) for k in range(len(self.sizes))]

    def take(self, position: int, k: int) -> list[int]:
        """Entries ``position`` to ``position + k - 1`` of the stream."""
        return [self.nth(*self.place(entry)) for entry in range(position, position + k)]

    def place(self, position: int) -> tuple[int, int]:
        """The set that an entry belongs to, by its number, and how many entries of that set are before it."""
        return self.schedule.place(position)

    def nth(self, number: int, nth: int) -> int:
        """The index of the n-th entry of a set's own order."""
        return self._first[number] + self._streams[number].take(nth, 1)[0]


def prompt_order(config: Config, prompts: Sequence[Prompt]) -> PromptOrder:
    """The order of a run's training prompts."""
    if not isinstance(config.data, tuple):
        return PromptOrder({"": PromptStream(len(prompts), seed=config.seed, shuffle=config.data.shuffle)}, weights=[1])
    found = by_set(prompts, config.set_names)
    streams = {
        # By name: adding a set to the recipe does not change the order of the others.
        one.name: PromptStream(
            len(found[one.name]), seed=key_of("data set", one.name, config.seed), shuffle=one.shuffle
        )
        for one in config.data
    }
    return PromptOrder(streams, weights=[one.weight for one in config.data])
