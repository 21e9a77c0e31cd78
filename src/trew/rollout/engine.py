"""What the loop needs from whatever generates completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..types import Group, Prompt, Sampling


class Engine(Protocol):
    """Generates completions with the policy's current weights.

    ``version`` is that of the weights: it is set after every weight update and written into each turn, so that stale
    tokens can be told from fresh ones.
    """

    version: int

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """``n`` completions for each of ``prompts``, in their order.

        A draw depends on (sampling.seed, prompt uid, sample number, position) and the policy alone. ``progress``
        receives how many more completions are finished. ``on_group`` receives the number of a prompt and its group as
        soon as all its completions are finished, the very object that is returned; an engine that has all groups at
        once need not call it. Raises EngineError when a prompt cannot be generated for,
        NumericsError when the model's output is not finite.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What later completions depend on beside the weights, ``version`` included, as JSON can hold it."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state` was taken."""
        ...
