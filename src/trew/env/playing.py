"""The process of one episode: a fork of a host that answers the policy's replies until it is ended."""

from __future__ import annotations

import contextlib
import random
import traceback
from typing import Any

import numpy as np

from ..rewards.isolation.frames import Channel, Closed
from ..rewards.user.wire import decode, encode
from .load import Loaded
from .protocol import Environment, Say
from .wire import from_say, to_reply

MOST_BYTES = 64 << 20
"""Of one answer."""


def play(loaded: Loaded, channel: Channel) -> None:
    """Answers messages until the channel closes: ``["begin", row, seed]``, ``["reply", reply]``, ``["stopped"]`` if a
    budget has ended the episode and the environment judges that, ``["end"]``.

    Answers are ``["said", say]`` or ``["failed", kind, text]``. Nothing that the environment does, exiting included,
    reaches another episode."""
    environment: Environment | None = None
    with contextlib.suppress(Closed):
        while True:
            what, *given = decode(channel.receive()[0])
            if what == "end":
                break
            try:
                # The first message is always begin: given is [row, seed].
                if environment is None:
                    _seed(given[1])  # first: a class may draw when it is made, too
                    environment = loaded.make()
                answer = ["said", _answer(environment, what, given)]
            # Also what ends a process on purpose: an environment that exits fails its own episode with a traceback.
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                answer = ["failed", "raised", "".join(traceback.format_exception(error))]
            message = encode(answer)
            # Answers are read whole, by the host and by the run.
            if len(message) > MOST_BYTES:
                message = encode(["failed", "raised", f"it said {len(message):,} bytes, more than {MOST_BYTES:,}"])
            channel.send(message)
    if environment is not None:
        environment.close()


def _answer(environment: Any, what: str, given: list[Any]) -> dict[str, Any]:
    if what == "stopped":
        return from_say(Say(reward=environment.stopped(), done=True), opening=False)
    say = environment.reset(*given) if what == "begin" else environment.step(to_reply(given[0]))
    return from_say(say, opening=what == "begin")


def _seed(seed: int) -> None:
    """Seeds global generators: what an environment draws without one of its own depends on its seed alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
