"""Environment classes as users of TRL write them."""

from __future__ import annotations


class Counter:
    """Counts up to a target, which the row says."""

    def __init__(self, step: int = 1):
        self.step = step

    def reset(self, target=3, **kwargs) -> str | None:
        self.count, self.target = 0, target
        return f" The counter is at {self.count}."

    def increment(self, times: int = 1) -> str:
        """Increments the counter.

        Args:
            times: How many times.

        Returns:
            The new value.
        """
        if times < 0:
            raise ValueError("times must be at least 0")
        self.count += times * self.step
        return f"{self.count}"

    def facts(self) -> dict:
        """Says all there is to know.

        Returns:
            The facts.
        """
        return {"count": self.count, "done": self.count == self.target}

    def get_reward(self) -> float:
        return 1.0 if self.count == self.target else 0.0

    def _private(self):
        raise AssertionError


class Silent:
    """Has no reward of its own, says nothing at the start, and answers later."""

    def reset(self, **kwargs) -> None:
        self.asked = 0

    async def ask(self, question: str) -> str:
        """Answers.

        Args:
            question: What to answer.
        """
        self.asked += 1
        return f"{question}? {self.asked}"


class NoReset:
    pass


class Untyped:
    def reset(self, **kwargs):
        pass

    def act(self, x):
        """Acts."""


class Image:
    def reset(self, **kwargs):
        return [{"type": "image"}]


def made(step: int = 2) -> Counter:
    return Counter(step)


both = {"a": Counter}
