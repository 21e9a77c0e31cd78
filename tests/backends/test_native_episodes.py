"""All that holds for the cache of episodes, with the compiled kernels."""

from __future__ import annotations

import pytest

import test_episodes
import tiny
from test_episodes import (  # noqa: F401
    env,
    test_a_cache_that_is_kept_gives_the_tokens_of_one_that_is_computed_again,
    test_new_weights_give_up_what_is_held,
    test_too_many_held_rows_are_computed_again,
)
from trew.backends.cpu import build, decoder
from trew.backends.cpu.backend import CpuBackend

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason="no compiler")


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setattr(test_episodes, "WIDTHS", tiny.wide)
    monkeypatch.setattr(test_episodes, "BACKEND", CpuBackend)


def test_what_goes_on_is_computed_in_pieces(env, monkeypatch):  # noqa: F811
    """Pieces of 3 tokens give what one piece gives."""
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 3)
    test_episodes.test_a_cache_that_is_kept_gives_the_tokens_of_one_that_is_computed_again(env, "llama", monkeypatch)
