"""One run on several processes: learner ranks, and what passes between them."""

from .ranks import Place, Ranks, here

__all__ = ["Place", "Ranks", "here"]
