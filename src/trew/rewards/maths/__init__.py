"""Answers in mathematics: found (``extract``), written in one way (``normalise``), read (``answers``), compared
(``compare``, exactly; ``symbolic`` through math-verify where exact algebra cannot decide)."""
